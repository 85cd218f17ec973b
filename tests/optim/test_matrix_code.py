"""What an optimizer's code may do in a step, to its state, to numbers, and what it may not keep."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from composable import fully_shard, replicate, step_on_matrices, step_on_shards
from composable.errors import OptimizerError
from tests.helpers.world import spmd
from tests.optim.matrix_models import Net, OneProcess, backward, local_of, made

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch's checkpoints warn of


class _Own(Optimizer):
    """Sums gradients, and does something else beside that."""

    def __init__(self, parameters: Any, does: str = "") -> None:
        super().__init__(parameters, {"lr": 0.1, "tensor": torch.zeros(()), "list": [0]})
        self.does, self.steps, self.counts = does, 0, {"n": 0}

    def _count(self, group: dict[str, Any]) -> int:
        if self.does == "counts in a tensor":
            group["tensor"] += 1
            return int(group["tensor"])
        if self.does == "counts in a list":
            group["list"][0] += 1
            return int(group["list"][0])
        if self.does == "counts in state":
            everything: Any = self.state
            everything["all"]["n"] = everything["all"].get("n", 0) + 1
            return int(everything["all"]["n"])
        if self.does == "counts in an attribute":
            self.counts["n"] += 1
            return self.counts["n"]
        return 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1
        third = self.steps == 3
        if third and self.does == "sets state":
            self.state = defaultdict(dict)
        count = self._count(self.param_groups[0])
        for parameter in self.param_groups[0]["params"]:
            if third and self.does == "removes state":
                self.state.pop(parameter)
            former = self.state[parameter].get("sum", torch.zeros_like(parameter))
            self.state[parameter] = {"sum": former + parameter.grad}
            parameter.sub_(self.state[parameter]["sum"], alpha=0.1 / count)
            if third and self.does == "empties state":
                self.state[parameter] = {}


@spmd(ranks=2)
@pytest.mark.parametrize("by", ["matrices", "shards"])
def test_code_may_exchange_its_state_and_count_in_place(by: str) -> None:
    for does in ("", "sets state", "removes state", "empties state", "counts in a tensor",
                 "counts in a list", "counts in state", "counts in an attribute"):  # fmt: skip
        model = made(Net, biases=True)
        fully_shard(model)
        alone = OneProcess(model, lambda parameters, does=does: _Own(parameters, does))
        optimizer = _Own(model.parameters(), does)
        if by == "matrices":
            step_on_matrices(optimizer)
        else:
            step_on_shards(optimizer, elementwise=True)
        alone.step_beside(optimizer, range(4), dist.get_rank(), 7)


class _Lookahead(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


class _Keeping(Optimizer):
    def __init__(self, parameters: Any, keep: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__(parameters, {})
        self.keep = keep or torch.clone
        self.kept: Any = None
        if keep is not None:
            self._make()

    def _make(self) -> None:
        self.kept = {"all": [self.keep(each) for each in self.param_groups[0]["params"]]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.kept is None:
            self._make()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_code_that_keeps_parameters_in_attributes_is_refused(verb: Any) -> None:
    model = made(Net)
    verb(model)
    sgd: Callable[[Any], Optimizer] = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    for make in (
        lambda p: _Lookahead(sgd(p)),
        lambda p: _Keeping(p, torch.clone),
        lambda p: _Keeping(p, lambda each: each),
        lambda p: _Keeping(p, id),
    ):
        with pytest.raises(OptimizerError, match=r"keeps parameters.*attribute '(inner|kept)'"):
            step_on_matrices(make(list(model.parameters())))
    late = step_on_matrices(_Keeping(model.parameters()))
    backward(model, 0, dist.get_rank(), 7)
    late.step()
    before = [local_of(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(OptimizerError, match="keeps parameters"):
        late.step()
    assert all(map(torch.equal, map(local_of, model.parameters()), before))
    alone = OneProcess(model, lambda p: _Lookahead(sgd(p)))
    wrapped = _Lookahead(step_on_matrices(sgd(model.parameters())))
    alone.step_beside(wrapped, range(4), dist.get_rank(), 7)


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = (0, 3, 4), (3, 0, 4), (0, 4), (4, 0), (2, 0, 3, 3), (0,)
        self.empty = nn.ParameterList(torch.ones(shape) for shape in shapes)
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(each.sum() for each in self.empty)


@spmd(ranks=2)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_empty_parameters_step_and_resume(verb: Any) -> None:
    model = made(_Empty)
    verb(model)
    optimizer = step_on_matrices(optim.AdamW(model.parameters()))
    for number in range(2):
        backward(model, number, dist.get_rank(), 7)
        optimizer.step()
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


@spmd(ranks=2)
def test_a_copy_does_not_keep_what_it_is_a_copy_of() -> None:
    model = made(Net)
    fully_shard(model)
    optimizer = step_on_matrices(optim.AdamW(model.parameters()), which=["layers.0.weight"])
    backward(model, 0, dist.get_rank(), 7)
    optimizer.step()
    kept = copy.deepcopy((model, optimizer))
    former = weakref.ref(next(model.parameters()))
    del model, optimizer
    gc.collect()
    assert former() is None
    assert kept[1].state
