"""Optimizers of whole matrices are copied as the ones inside of them; what would be a part of one
is refused on all ranks.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from composable import fully_shard, replicate, step_on_matrices, step_on_shards
from composable.errors import OptimizerError
from tests.helpers.compare import all_full
from tests.helpers.world import current_device, spmd
from tests.optim.copies import Exchanging
from tests.optim.matrix_models import (
    Net,
    OneProcess,
    Stacked,
    backward,
    local_of,
    made,
    muon,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch's checkpoints warn of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": muon,
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.01),
}


def _step(model: nn.Module, optimizer: Optimizer, number: int, width: int = 7) -> None:
    backward(model, number, dist.get_rank(), width)
    optimizer.step()
    optimizer.zero_grad()


def _assert_same_on_all_ranks(model: nn.Module) -> None:
    for whole in all_full([p.detach() for p in model.parameters()]):
        every = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(every, whole.contiguous())
        assert all(torch.equal(each, every[0]) for each in every)


@spmd(ranks=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_a_copy_of_model_and_optimizer_steps_as_the_original(name: str, verb: Any) -> None:
    model = made(Net)
    verb(model)
    optimizer = step_on_matrices(OPTIMIZERS[name](model.parameters()))
    for number in range(2):
        _step(model, optimizer, number)
    copied, clone = copy.deepcopy((model, optimizer))
    again, third = copy.deepcopy((copied, clone))  # of a copy that has not stepped
    for number in range(2, 4):
        for each, stepper in ((model, optimizer), (copied, clone), (again, third)):
            _step(each, stepper, number)
    for each in (copied, again):
        for one, other in zip(model.parameters(), each.parameters(), strict=True):
            assert torch.equal(local_of(one), local_of(other))
            assert one is not other
        _assert_same_on_all_ranks(each)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_what_is_copied_without_its_model_steps_its_own_parameters(verb: Any) -> None:
    model = made(Net)
    verb(model)
    optimizer = step_on_matrices(muon(model.parameters()))
    _step(model, optimizer, 0)
    clone = copy.deepcopy(optimizer)
    backward(model, 1, dist.get_rank(), 7)
    parameters = clone.param_groups[0]["params"]
    for parameter, own in zip(model.parameters(), parameters, strict=True):
        assert own is not parameter
        own.grad = parameter.grad.detach().clone()  # type: ignore[union-attr]
    optimizer.step()
    clone.step()
    for parameter, own in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(local_of(parameter), local_of(own))


@spmd(ranks=2)
def test_a_copy_of_an_optimizer_that_a_user_vouched_for_steps_its_shards() -> None:
    model = made(Net)
    fully_shard(model)
    optimizer = Exchanging(model.parameters(), {})
    step_on_shards(optimizer, elementwise=True)
    _step(model, optimizer, 0)
    copied, clone = copy.deepcopy((model, optimizer))
    for each, stepper in ((model, optimizer), (copied, clone)):
        _step(each, stepper, 1)
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(local_of(one), local_of(other))
    pickle.loads(pickle.dumps(OPTIMIZERS["SGD"]([nn.Parameter(torch.ones(2))])))


@spmd(ranks=[1, 2])
def test_an_optimizer_with_state_of_matrices_is_not_pickled() -> None:
    model = made(Net)
    replicate(model)
    optimizer = step_on_matrices(muon(model.parameters()))
    assert isinstance(pickle.loads(pickle.dumps(optimizer)), optim.Muon)  # it has no state
    _step(model, optimizer, 0)
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(OptimizerError, match="keeps the state of whole matrices on the ranks"):
            act(optimizer)
    _step(model, optimizer, 1)
    _assert_same_on_all_ranks(model)


@spmd(ranks=2)
def test_the_state_dict_of_one_rank_is_refused_on_all_ranks_where_another_loads_it() -> None:
    model = made(Net)
    replicate(model)
    alone = OneProcess(model, muon)
    optimizer = step_on_matrices(muon(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    state = optimizer.state_dict()
    shared: list[Any] = [state]
    dist.broadcast_object_list(shared)
    with pytest.raises(OptimizerError, match=r"that of one rank.*Nothing was loaded"):
        optimizer.load_state_dict(shared[0])
    optimizer.load_state_dict(state)
    alone.step_beside(optimizer, range(2, 4), dist.get_rank(), 7)


@spmd(ranks=2)
@pytest.mark.parametrize("kind", ["the object", "parts"])
def test_an_optimizer_is_saved_as_an_object_or_as_what_each_rank_has(
    kind: str, tmp_path: Path
) -> None:
    model = made(Net)
    fully_shard(model)
    alone = OneProcess(model, muon)
    optimizer = step_on_matrices(muon(model.parameters()))

    def saved() -> dict[str, Any]:
        return {"optimizer": optimizer if kind == "the object" else optimizer.state_dict()}

    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    dcp.save(saved(), checkpoint_id=tmp_path)
    for state in filter(None, optimizer.state.values()):
        state["momentum_buffer"].zero_()
    loaded = saved()
    dcp.load(loaded, checkpoint_id=tmp_path)
    if kind == "parts":
        optimizer.load_state_dict(loaded["optimizer"])
    alone.step_beside(optimizer, range(2, 4), dist.get_rank(), 7)


class _ScheduleFree(Optimizer):
    """Writes to its parameters outside of `step`, by its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], 0.5)

    def all(self) -> list[Any]:
        return [value["z"] for value in self.state.values()]

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "z" not in state:
                state["z"] = parameter.clone()
            state["z"].sub_(parameter.grad, alpha=0.1)
            parameter.sub_(parameter.grad, alpha=0.05)


@spmd(ranks=[1, 2])
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_code_of_an_optimizer_that_reads_its_state_outside_of_step_is_refused(
    verb: Any,
) -> None:
    model = made(Net, biases=True)
    verb(model)
    optimizer = step_on_matrices(_ScheduleFree(model.parameters()))
    _step(model, optimizer, 0)
    assert optimizer.rate() == 0.1
    assert any(optimizer.state[parameter] for parameter in model.parameters())  # who looks may
    if dist.get_world_size() == 1 and verb is replicate:
        optimizer.eval()
        return
    for _ in range(2):
        before = all_full([p.detach() for p in model.parameters()])
        with pytest.raises(OptimizerError, match=r"_ScheduleFree\.eval reads the optimizer's"):
            optimizer.eval()
        with pytest.raises(OptimizerError, match=r"_ScheduleFree\.all reads the optimizer's"):
            optimizer.all()
        after = all_full([p.detach() for p in model.parameters()])
        assert all(map(torch.equal, before, after))
        optimizer.load_state_dict(optimizer.state_dict())
    _step(model, optimizer, 1)
    _assert_same_on_all_ranks(model)


# --- stacks and kernels --------------------------------------------------------------------------


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RMSprop", "Adafactor"])
def test_stacks_of_experts_resume(kind: str) -> None:
    for experts in (1, 4):  # of one, some ranks have no slice
        model = made(Stacked, experts)
        fully_shard(model)
        make: Callable[[Any], Optimizer] = lambda p: getattr(optim, kind)(p, lr=0.01)  # noqa: E731
        alone = OneProcess(model, make)
        optimizer = step_on_matrices(make(model.parameters()))
        alone.step_beside(optimizer, range(2), dist.get_rank(), 5)
        state = get_optimizer_state_dict(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        alone.optimizer.load_state_dict(alone.optimizer.state_dict())
        alone.step_beside(optimizer, range(2, 3), dist.get_rank(), 5)
        again = step_on_matrices(make(model.parameters()))
        set_optimizer_state_dict(model, again, state)
        backward(model, 3, dist.get_rank(), 5)
        again.step()


class _Flattening(Optimizer):
    """Takes a kernel for the matrix that it is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            update = parameter.grad
            if parameter.ndim >= 2:
                flat = update.reshape(len(update), -1)
                update = flat @ flat.t() @ flat
            parameter.sub_(update.view_as(parameter))


@spmd(ranks=[2, 3])
def test_kernels_of_convolutions_are_whole_by_default() -> None:
    def convolutions() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(3, 4, 2), nn.Conv2d(2, 5, 3), nn.Conv3d(2, 3, 2)).double()

    plain, model = convolutions(), convolutions()
    sizes = (3, 4), (2, 4, 4), (2, 4, 4, 4)
    x: list[Tensor] = [torch.ones(1, *size, dtype=torch.float64) for size in sizes]
    model.to(current_device())
    fully_shard(model, policy={nn.Conv1d, nn.Conv2d, nn.Conv3d})
    optimizers = _Flattening(plain.parameters()), step_on_matrices(_Flattening(model.parameters()))
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        for layer, batch in zip(each, x, strict=True):
            layer(batch.to(next(each.parameters()).device)).square().mean().backward()
        optimizer.step()
    for whole, expected in zip(
        all_full([p.detach() for p in model.parameters()]), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(whole.cpu(), expected.detach(), rtol=1e-12, atol=1e-12)


@spmd(ranks=2)
def test_state_in_lists_of_vectors_is_that_of_dtensors() -> None:
    """Of parameters beside matrices, which are stepped on their shards."""

    class Pairs(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                pair = self.state[parameter].setdefault("pair", [torch.zeros_like(parameter), 1])
                pair[0] = pair[0] + parameter.grad
                parameter.sub_(pair[0], alpha=0.1)

    model = made(Net, biases=True)
    fully_shard(model)
    alone = OneProcess(model, Pairs)
    optimizer = step_on_matrices(Pairs(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    for name, parameter in model.named_parameters():
        assert state[name]["pair"][0].shape == parameter.shape
