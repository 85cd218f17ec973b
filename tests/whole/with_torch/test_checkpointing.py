"""Checkpointed modules forget activations and compute them again, to the same gradients, with all
of torch's options.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts

from composable import checkpoint, fully_shard, replicate
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.transformers import Block, Transformer, next_token_loss
from tests.helpers.compare import assert_same_training, averaged_gradients, full_gradients
from tests.helpers.world import current_device, spmd

_SAVED: Final = [torch.ops.aten.addmm.default]
_selective = partial(create_selective_checkpoint_contexts, _SAVED)

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "selective": {"context_fn": _selective},
    "without early stop": {"early_stop": False},
    "without random state": {"preserve_rng_state": False},
    "without determinism check": {"determinism_check": "none"},
    "debugging": {"debug": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("ranks", "order"), [(1, "checkpoint alone"), (2, "checkpoint first"), (2, "checkpoint last")]
)
@spmd()
def test_every_option_trains_the_same(options: str, order: str) -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        if order == "checkpoint first":
            checkpoint(model, policy=set(case.units), **OPTIONS[options])
        if order != "checkpoint alone":
            fully_shard(model, policy=set(case.units))
        if order != "checkpoint first":
            checkpoint(model, policy=set(case.units), **OPTIONS[options])

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


class _Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _transformer(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dropout=dropout).double().to(current_device())


def _tokens() -> Tensor:
    (tokens,) = BATTERY["transformer with tied embedding"].inputs(
        0, 0, dist.get_rank(), current_device()
    )
    return tokens


@spmd(ranks=1)
def test_checkpointing_runs_the_blocks_again_and_selective_checkpointing_spares_what_it_saves() -> (
    None
):
    calls = {}
    for how, options in {"plain": None, "whole": {}, "selective": OPTIONS["selective"]}.items():
        model = _transformer()
        if options is not None:
            assert checkpoint(model, policy={Block}, early_stop=False, **options) is model
        with _Count() as count:
            next_token_loss(model, _tokens()).backward()
        calls[how] = count.calls
    plain, whole, selective = calls.values()
    layers = {"aten.addmm.default": 3, "aten.native_layer_norm.default": 2, "aten.gelu.default": 1}
    for operator, per_block in layers.items():
        assert whole[operator] == plain[operator] + 3 * per_block
    assert selective["aten.addmm.default"] == plain["aten.addmm.default"]
    assert selective["aten.gelu.default"] == whole["aten.gelu.default"]


@pytest.mark.parametrize(
    ("how", "expected"), [("plain", 3), ("checkpointed", 0), ("checkpointed and sharded", 0)]
)
@spmd(ranks=2)
def test_inner_activations_are_gone_after_forward(how: str, expected: int) -> None:
    model = _transformer()
    if how == "checkpointed and sharded":
        fully_shard(model, policy={Block})
    if how != "plain":
        checkpoint(model, policy={Block})
    inner: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        block.up.register_forward_hook(
            lambda module, args, output: inner.append(weakref.ref(output))
        )
    loss = next_token_loss(model, _tokens())
    assert sum(reference() is not None for reference in inner) == expected
    loss.backward()


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("shard", [False, True])
@spmd(ranks=2)
def test_dropout_is_recomputed_with_its_own_random_numbers(shard: bool, preserve: bool) -> None:
    plain, model = _transformer(0.4), _transformer(0.4)
    if shard:
        fully_shard(model, policy={Block})
    checkpoint(model, policy={Block}, preserve_rng_state=preserve)
    losses = []
    for each in (plain, model):
        torch.manual_seed(100 + dist.get_rank())
        losses.append(next_token_loss(each, _tokens()))
        torch.manual_seed(200)  # what a recomputation must not draw from
        losses[-1].backward()
    assert torch.equal(*losses)
    expected = (
        averaged_gradients(plain)
        if shard
        else {name: p.grad for name, p in plain.named_parameters()}
    )
    found = full_gradients(model)
    assert (
        all(torch.allclose(expected[name], found[name], rtol=1e-9, atol=1e-12) for name in found)
        is preserve
    )  # type: ignore[arg-type]


class OwnNorm(nn.modules.batchnorm._BatchNorm):
    """As libraries derive theirs."""

    def _check_input_dim(self, input: Tensor) -> None:
        return None


class Normed(nn.Module):
    """Norms with running statistics, in a module of its own and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3)
        self.inner = nn.Sequential(nn.Linear(6, 6), OwnNorm(6, momentum=None), nn.Tanh())

        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.norm(self.first(x)))
        if self.fails and torch._C._current_graph_task_id() != -1:
            raise KeyError("when it runs again")
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how", ["alone", "inner", "shard", "inner and shard", "inner and replicate"]
)
@spmd(ranks=2)
def test_norms_count_each_batch_once(how: str) -> None:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(Normed(), nn.Linear(6, 2)).to(current_device()) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    if "inner" in how:
        checkpoint(model[0].inner)
    checkpoint(model[0])
    if "shard" in how:
        fully_shard(model, policy={Normed})
    if "replicate" in how:
        replicate(model, broadcast_buffers=False)
    buffers = dict(model.named_buffers())
    for step in range(4):
        x = torch.randn(
            5, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        ).to(current_device())
        if step == 2:
            model[0].fails = True
            with pytest.raises(KeyError):
                model(x).sum().backward()
            model[0].fails = False
            plain(x)  # the first run counts
            model.zero_grad()
        for each in (plain, model):
            each.train(step != 1)
            each(x).square().mean().backward()
            each.zero_grad()
    for name, buffer in plain.named_buffers():
        assert buffers[name] is model.get_buffer(name)
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)


class Fickle(nn.Module):
    """Does something else the second time that it is called, where it is asked to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line, self.how, self.called = nn.Linear(4, 4), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        how = self.how if self.called == 2 else ""
        x = self.line(x[:2] if how == "shape" else x).sin()
        return x if how == "fewer" else x.cos().cos() if how == "more" else x.cos()


@pytest.mark.parametrize(
    ("how", "options"),
    [("shape", {}), ("fewer", {}), ("more", {"early_stop": False}), ("shape", {"debug": True})],
)
@spmd(ranks=2)
def test_a_second_run_that_does_something_else_loses_one_step(
    how: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fickle(how), nn.Linear(4, 1)).to(current_device())
    checkpoint(model, policy={Fickle}, **options)
    fully_shard(model, policy={Fickle})
    x = torch.ones(3, 4, device=current_device())
    with pytest.raises(CheckpointError):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()  # the third call and the fourth
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("early", [True, False])
@spmd(ranks=1)
def test_hooks_before_forward_run_twice_and_those_after_it_where_it_is_run_to_its_end(
    early: bool,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(current_device())
    calls: Counter[str] = Counter()
    model[0].register_forward_pre_hook(lambda *_: calls.update(["before"]))
    model[0].register_forward_hook(lambda *_: calls.update(["after"]))
    model[0].register_full_backward_hook(lambda *_: calls.update(["backward"]))
    checkpoint(model[0], early_stop=early)
    fully_shard(model)
    model(torch.ones(2, 4, device=current_device(), requires_grad=True)).sum().backward()
    assert calls == {"before": 2, "after": 1 if early else 2, "backward": 1}


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.linear(x).tanh())  # type: ignore[no-any-return]


class _Branching(nn.Module):
    """Behind the inner part there is a branch that not every call takes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.branch = _Inner(), nn.Linear(6, 6)

    def forward(self, x: Tensor, takes: bool) -> Tensor:
        x = self.inner(x)
        return x + self.branch(x).tanh() if takes else x


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.outer, self.last = nn.Linear(6, 6), _Branching(), nn.Linear(6, 6)

    def forward(self, x: Tensor, takes: bool) -> Tensor:
        return self.last(self.outer(self.first(x), takes))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_unit", [True, False])
@spmd(ranks=2)
def test_ranks_may_skip_a_branch_at_the_end_of_a_checkpointed_module(is_unit: bool) -> None:
    plain, model = _Around().to(current_device()), _Around().to(current_device())
    checkpoint(model.outer)
    for module in [model.outer.inner.linear, model.outer.inner, *[model.outer] * is_unit, model]:
        fully_shard(module)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        x = torch.randn(3, 6, generator=generator).to(current_device())
        for each in (plain, model):
            each.zero_grad()
            each(x, (step + dist.get_rank()) % 2 == 0).square().mean().backward()
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name])
