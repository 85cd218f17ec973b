"""Offloaded modules raise where autograd does, leave nothing after errors, and go every way through
autograd.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import checkpoint, fully_shard, offload_activations, remove
from composable.errors import SavedTensorError
from tests.helpers.compare import full_gradients
from tests.helpers.offloading import Line, inputs_of, line, offloading
from tests.helpers.world import current_device, spmd

# --- versions ------------------------------------------------------------------------------------


@spmd(ranks=1)
@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("what", ["the input", "a view of the input", "the result", "a parameter"])
def test_what_was_written_to_since_raises_in_backward(what: str, annotated: bool) -> None:
    with offloading() as seen:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()).to(current_device())
        if annotated:
            offload_activations(model, **seen.options)
        x = inputs_of(4, 8).requires_grad_()
        entered = x * 1
        y = model(entered)
        if current_device().type != "cpu":
            # else the device would find a write to what is being copied
            torch.accelerator.synchronize()
        with torch.no_grad():
            if what == "the input":
                entered.add_(1)
            elif what == "a view of the input":
                entered[0].mul_(2)
            elif what == "the result":
                y.add_(1)
            else:
                model[0].weight.mul_(2)
        words = r"has been modified by an inplace operation: \[\S*Float\S* \[\d, 8\]\]"
        with pytest.raises(RuntimeError, match=words) as caught:
            y.sum().backward()
        assert isinstance(caught.value, SavedTensorError) == annotated
        if annotated:
            assert re.search(
                r", which Sequential saved for backward, is at version \d; expected version \d",
                str(caught.value),
            )
        del y, caught
        # an accelerator's thread has dropped the pass before that comes to its end
        entered.sum().backward()
        assert not seen.alive


@spmd(ranks=2)
def test_a_step_between_a_forward_and_its_backward_raises_with_shards_too() -> None:
    with offloading() as seen:
        model = nn.Sequential(Line(), Line()).to(current_device())
        fully_shard(model, policy={Line})
        offload_activations(model, policy={Line}, **seen.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = model(inputs_of()), model(inputs_of())
        first.sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.sum().backward()


# --- goes wrong ---------------------------------------------------------------------------------


class Fails(nn.Module):
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            fail()
        if self.where == "backward":
            x.register_hook(fail)
        return x * x


def fail(_: object = None) -> None:
    raise ValueError("as planned")


@spmd(ranks=2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("verbs", ["nothing else", "fully_shard", "checkpoint"])
def test_a_step_that_raises_leaves_nothing(verbs: str, where: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), nn.Sequential(Line(), Fails()), Line()).to(current_device())
    with offloading() as seen:
        offload_activations(model, **seen.options)
        offload_activations(model[1], **seen.options)
        if verbs == "fully_shard":
            fully_shard(model, policy={Line})
        if verbs == "checkpoint":
            checkpoint(model, policy={nn.Sequential})
        expected = None
        for fails in ("", where, ""):
            model[1][1].where = fails
            if fails:
                with pytest.raises(ValueError, match="as planned") as caught:
                    model(inputs_of()).sum().backward()
                del caught
                model.zero_grad()
            else:
                model(inputs_of()).sum().backward()
                gradients = full_gradients(model)
                model.zero_grad()
                assert expected is None or all(
                    torch.equal(expected[name], each) for name, each in gradients.items()
                )
                expected = gradients
            x = inputs_of().requires_grad_()
            y = x * x
            # An accelerator's thread may drop a backward that raised a little after its caller has
            # seen the error.
            assert not seen.alive or (fails == "backward" and current_device().type != "cpu"), (
                "autograd saves for itself alone"
            )
            del y


# --- other ways through autograd ----------------------------------------------------------------


@spmd(ranks=1)
def test_gradients_of_gradients_are_the_same() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = inputs_of().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with offloading() as seen:
        model = line(**seen.options)
        found = penalty(model)
        assert seen.left
        remove(model, offload_activations).zero_grad()
        assert all(torch.equal(*pair) for pair in zip(found, penalty(model), strict=True))
        assert not seen.alive


@spmd(ranks=1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpointing_goes_around_and_inside(reentrant: bool) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = Line()

        def forward(self, x: Tensor) -> Tensor:
            return torch_checkpoint(self.line, x * x, use_reentrant=reentrant)

    def run(model: nn.Module) -> list[Tensor]:
        x = inputs_of().requires_grad_()
        if reentrant:
            model(x).sum().backward()  # what is inside would see no inputs that need gradients
        else:
            torch_checkpoint(model, x, use_reentrant=False).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    with offloading() as seen:
        results = []
        for annotated in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Line(), Inside(), Line()).to(current_device())
            if annotated:
                offload_activations(model, **seen.options)
            results.append(run(model))
        assert seen.left
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert not seen.alive


@spmd(ranks=1)
def test_forwards_without_gradients_copy_nothing() -> None:
    with offloading() as seen:
        model = line(**seen.options)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                model(inputs_of())
        model.requires_grad_(False)(inputs_of())
        assert not seen.left


@spmd(ranks=1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules_keep_what_they_save_on_the_host(backend: str) -> None:
    torch._dynamo.reset()
    with offloading() as seen:
        results = []
        for annotated in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Line(), Line()).to(current_device())
            if annotated:
                offload_activations(model, policy={Line}, **seen.options)
            for line in model:
                line.compile(backend=backend)
            for _ in range(2):
                model.zero_grad()
                model(inputs_of()).sum().backward()
            results.append([p.grad for p in model.parameters()])
        assert seen.left
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        assert not seen.alive
    torch._dynamo.reset()
