"""What extras may use: each name of `seams.py` does alone what it says, and extras keep to it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from composable import (
    apply_optimizer_in_backward,
    fully_shard,
    keep_unsharded,
    no_sync,
    register_comm_hook,
    replicate,
    seams,
    unshard,
)
from composable.comm.base import GroupComm, observe_launches
from composable.comm.launch import Launch, LaunchKind
from composable.contract.values import parameters_of
from composable.engine.step.observer import DECISIONS
from composable.errors import NotAnnotatedError, PhaseError
from composable.features.activations import copies_of
from composable.memory.streams import Streams
from docs.counts import PACKAGE, Source, sources, taken
from tests.helpers.world import Pool, current_device

_PROTOCOLS: Final = {
    name: kind
    for name, kind in vars(seams).items()
    if getattr(kind, "_is_protocol", False) and kind.__module__ == seams.__name__
}


# --- the list ------------------------------------------------------------------------------------


def test_seams_are_few_and_each_is_in_the_table_and_used() -> None:
    rows = re.findall(r"^\| (`.*?) +\|", seams.__doc__ or "", re.M)
    listed = set(re.findall(r"`(\w+)`", " ".join(rows)))
    names = taken(sources(PACKAGE))
    used = {name.partition(".")[2] for name in names if name.startswith("seams.")}
    assert listed == used
    assert len(used) <= 37


def _chains(source: Source) -> Iterator[tuple[int, list[str]]]:
    """Attributes behind attributes, over calls and items; each chain once."""
    inner: set[ast.AST] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            names, at = [], node
            while isinstance(at, ast.Attribute | ast.Subscript | ast.Call):
                inner.add(at)
                if isinstance(at, ast.Attribute):
                    names.append(at.attr)
                at = at.func if isinstance(at, ast.Call) else at.value  # type: ignore[assignment]
            yield node.lineno, names[::-1]


def _too_long(source: Source) -> list[int]:
    """Lines with chains of more than two attributes of the engine's objects, as the protocols know
    them. What is behind them is torch's, or the ground's.
    """
    members: dict[str, str] = {}
    for kind in _PROTOCOLS.values():
        for name, member in vars(kind).items():
            if isinstance(member, property):
                assert member.fget is not None
                members[name] = str(inspect.signature(member.fget).return_annotation)
    leads_on = {
        name
        for name, returned in members.items()
        if set(re.findall(r"\w+", returned)) & _PROTOCOLS.keys()
    }
    found = []
    for line, names in _chains(source):
        length = 0
        for name in names:
            length = length + 1 if name in members else 0
            if length > 2:
                found.append(line)
                break
            length = length if name in leads_on else 0
    return found


def test_extras_follow_no_long_chains_of_attributes_into_units() -> None:
    long = {
        source.path: lines
        for source in sources(PACKAGE)
        if source.path.startswith("extras/")
        if (lines := _too_long(source))
    }
    assert long == {}


def test_long_chains_are_found() -> None:
    text = """
root.units[0].groups[0].params
root.units[0].mesh_info.all.size
call.unit.gradients.has_unreduced
managed.param.at_rest.grad
self.unit.spec.divisor
"""
    assert _too_long(Source("some.py", text, ast.parse(text))) == [2, 4, 6]


# --- observing steps, and notifying of them -------------------------------------------------------


class _Noting(seams.Observer):
    def __init__(self) -> None:
        self.said: list[object] = []

    @override
    def calls(self, what: str) -> None:
        self.said.append(what)

    @override
    def exchanges_values(self, back: bool) -> None:
        self.said.append(back)

    @override
    def loses(self, units: Any) -> None:
        self.said.append(units)


def test_observers_are_notified_by_extras_until_they_end() -> None:
    noting = _Noting()
    end = seams.observe(noting)
    seams.called("a function of all ranks")
    seams.values_exchanged(back=False)
    seams.values_exchanged(back=True)
    seams.lose_step([])
    end()
    seams.called("another one")
    assert noting.said == ["a function of all ranks", False, True, []]


def test_a_scope_answers_for_the_engine_while_it_is_open() -> None:
    class Scope:
        source = 3

    scope = Scope()
    close = seams.follow_steps(scope, source=lambda: seams.open_scope().source)
    assert (seams.open_scope(), DECISIONS.source()) == (scope, 3)
    close()
    assert (seams.open_scope(), DECISIONS.source()) == (None, 0)


# --- units, over two ranks -----------------------------------------------------------------------


def _model(verb: str = "fully_shard") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device())
    if verb == "replicate":
        return replicate(model)
    fully_shard(model, policy={nn.Linear})
    return model


class _Looking(seams.Observer):
    """Reads each attribute that the protocols have, of objects that a step shows."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def look(self, kind: str, value: Any) -> None:
        for name, member in vars(_PROTOCOLS[kind]).items():
            if not name.startswith("_") and name != "forward_number":
                found = getattr(value, name)
                assert callable(found) or isinstance(member, property)
                self.read.add(f"{kind}.{name}")

    @override
    def post_forward(self, root: seams.Root, call: seams.Call, keep: bool) -> None:
        for kind, value in (
            ("Root", root), ("Call", call), ("Unit", call.unit), ("_Spec", call.unit.spec),
            ("_Gradients", call.unit.gradients),
        ):  # fmt: skip
            self.look(kind, value)
        for group in call.unit.groups:
            self.look("Group", group)
            self.look("_Precision", group.precision)
            self.look("Param", group.params[0])
            self.look("_Slot", group.slots[0])
            self.look("_Gather", group.gather)

    def launching(self, _: GroupComm, launch: Launch, *__: Any) -> None:
        if launch.kind is LaunchKind.REDUCE:
            self.look("ReducePlan", launch.sender)


def _a_step_is_looked_at() -> set[str]:
    model = _model()
    looking, numbers = _Looking(), list[int | None]()
    (unit,) = seams.units_in(model[0])
    model[0].register_forward_pre_hook(lambda *_: numbers.append(unit.forward_number))
    ends = seams.observe(looking), observe_launches(launching=looking.launching)
    try:
        model(torch.ones(2, 4, device=current_device())).sum().backward()
    finally:
        for end in ends:
            end()
    looking.look("_NamedParam", next(seams.managed_in("test", model)))
    looking.look("_Driver", seams.driver_of([unit]))
    return {*looking.read, *("Unit.forward_number" for number in numbers if number is not None)}


def _finding() -> None:
    model = _model()
    head = nn.Sequential(model, nn.Linear(4, 1, device=current_device()))
    weight = model[1].weight
    units = seams.units_in(head, caller="test")
    assert [unit.name for unit in units] == [unit.name for unit in seams.units_in(model)]
    assert seams.units_in(head[1]) == []
    with pytest.raises(NotAnnotatedError, match=r"^test"):
        seams.units_in(head[1], caller="test")
    unit, label = seams.unit_of(weight), seams.label_of(weight)
    assert unit is not None
    assert label is not None
    assert (unit.modules, label.fqn) == ((model[1],), "weight")
    assert seams.unit_of(head[1].weight) is None is seams.label_of(head[1].weight)
    names = {each.fqn: each.param.at_rest for each in seams.managed_in("test", head)}
    assert names.keys() == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}
    assert names["0.1.weight"] is weight
    assert seams.comms_of_model(units) == [units[0].mesh_info.all]
    seams.refuse_extended("test", unit)
    seams.warn_of_other_groups(model[1], "")  # all of its ranks are those of the model

    assert not seams.hooks_of(unit)
    register_comm_hook(model, None, _summed)
    assert [*seams.hooks_of(unit)] == ["reduce_scatter"]

    assert seams.stepped_in_backward([weight]) is None
    stepped = apply_optimizer_in_backward(SGD, [weight], {"lr": 0.1})
    assert "weight" in (seams.stepped_in_backward([weight]) or "")
    assert seams.is_part_of_backward(stepped)
    assert not seams.is_part_of_backward(SGD(model.parameters()))
    stepped.remove()


def _summed(state: object, bucket: Any) -> Any:
    raise AssertionError("no step is made")


def _reading_and_writing() -> None:
    model = _model()
    units = seams.units_in(model, caller="test")
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    whole = torch.arange(16.0, device=current_device()).view(4, 4)
    with keep_unsharded(model), torch.no_grad():
        model(torch.ones(2, 4, device=current_device()))
        seams.write_whole(whole, weight)
        seams.written(units)  # what was gathered is gathered again
        x = torch.eye(4, device=current_device())
        torch.testing.assert_close(model[0](x), whole.T + model[0](x - x))
    torch.testing.assert_close(weight.full_tensor(), whole)

    fully = _model()
    unshard(fully)
    assert not isinstance(fully[0].weight, DTensor)
    with seams.at_rest(seams.units_in(fully)):
        assert isinstance(fully[0].weight, DTensor)
    assert not isinstance(fully[0].weight, DTensor)
    seams.require_at_rest("test", seams.units_in(fully))
    assert isinstance(fully[0].weight, DTensor)

    unit = units[0]
    seams.refuse_moment("test", unit)
    loss = model(torch.ones(2, 4, device=current_device())).sum()
    with pytest.raises(PhaseError, match=r"^test: unit"):
        seams.refuse_moment("test", unit)
    loss.backward()
    seams.refuse_moment("test", unit)

    class Inside(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(PhaseError, match=r"^test was called inside"):
                seams.require_at_rest("test", seams.units_in(self))
            return x

    inside = Inside()
    inside.weight = nn.Parameter(torch.ones(2, device=current_device()))
    fully_shard(inside)(torch.ones(1, device=current_device()))


class _Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4, bias=False, device=current_device())
        self.outer = nn.Linear(4, 1, bias=False, device=current_device())

    @override
    def forward(self, x: Tensor, computes: bool = True) -> Tensor:
        y = (
            self.inner(x)
            if computes
            else seams.driver_of(seams.units_in(self.inner)).pass_through(self.inner, x)
        )
        return self.outer(y)


def _driving() -> None:
    model, alone = _Choosing(), _Choosing()
    fully_shard(model.inner)
    fully_shard(model)
    units, x = seams.units_in(model, caller="test"), torch.ones(2, 4, device=current_device())
    rank, device = torch.distributed.get_rank(), current_device()
    driver = seams.driver_of(units)

    model(x, computes=rank == 0).sum().backward()
    alone(x).sum().backward()
    gradient = model.inner.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, alone.inner.weight.grad / 2)  # none from the other rank

    event, order = seams.StepEvent, [0, 1, 1, 0]  # the root around the other one
    with torch.no_grad():
        if rank == 0:
            model(x)
        for number, index in enumerate(order if rank else ()):
            driver.visit(index, event.PRE_FORWARD if number < 2 else event.POST_FORWARD, 0)
    assert [each.name for each in driver.modes] == ["REDUCE", "REDUCE"]

    undo = driver.scale_gradients(lambda gradient: 2 * gradient)
    model.zero_grad()
    model(x).sum().backward()
    for end in undo:
        end()
    torch.testing.assert_close(model.inner.weight.grad.full_tensor(), 2 * alone.inner.weight.grad)

    with no_sync(model):
        model(x).sum().backward()
    driver.reduce([model.inner.weight])  # as `reduce_gradients` on another rank
    driver.reduce([model.outer.weight])
    assert not any(unit.gradients.has_unreduced for unit in units)
    model(x)
    driver.reset()
    driver.take_buffers(0)
    assert not any(unit.is_unsharded for unit in units)

    found = seams.unscale_gradients([model.inner.weight], torch.full((), 0.5, device=device), False)
    assert [each.item() for each in found.values()] == [0.0]


def _all_of_it() -> set[str]:
    _finding()
    _reading_and_writing()
    _driving()
    return _a_step_is_looked_at()


def test_units_are_found_read_and_written_by_what_the_protocols_have(pool: Pool) -> None:
    expected = {
        f"{kind}.{name}"
        for kind, protocol in _PROTOCOLS.items()
        for name in vars(protocol)
        if not name.startswith("_")
    }
    assert pool.run(2, _all_of_it) == [expected] * 2


# --- stepping on shards --------------------------------------------------------------------------


class _Doubling(seams.Stepping):
    """Hands the code of an optimizer copies, and writes back twice what it did."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.copies: list[nn.Parameter] = []
        super().__init__(optimizer)

    @override
    def _takes(self, optimizer: Optimizer) -> bool:
        return True

    @override
    def _groups_for(self, stand_in: seams.StandIn) -> tuple[list[dict[str, Any]], Any]:
        parameters: Any = parameters_of(stand_in.optimizer)
        self.copies = [nn.Parameter(each.detach().clone()) for each in parameters]
        for copy, each in zip(self.copies, parameters, strict=True):
            self.copy_attributes(each, copy)
            copy.grad = each.grad
        groups = stand_in.optimizer.param_groups
        return [{**groups[0], "params": self.copies}], stand_in.state

    @override
    @torch.no_grad()
    def _finish(self, optimizer: Optimizer) -> None:
        for copy, each in zip(self.copies, parameters_of(optimizer), strict=False):
            each.copy_(copy + (copy - each))
        self.copies = []

    @override
    def _follow_to(self, copied: Optimizer, memo: dict[int, Any]) -> None:
        _Doubling(copied)


def test_an_optimizer_steps_what_a_stepping_hands_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.role = "mine"  # type: ignore[attr-defined]
    optimizer = SGD([parameter], lr=0.25)
    stepping = _Doubling(optimizer)
    seen: list[tuple[bool, str]] = []
    step = SGD.step

    class Seeing(SGD):
        @override
        def step(self, closure: Any = None) -> Any:
            (given,) = parameters_of(self)
            seen.append((isinstance(self, seams.StandIn), given.role))  # type: ignore[attr-defined]
            return step(self, closure)

    optimizer.__class__ = Seeing
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [0.5, 0.5]  # twice a step of 0.25
    assert seams.Stepping.of(optimizer) is stepping
    assert not isinstance(optimizer, seams.StandIn)
    assert not seams.Stepping.is_differentiable(optimizer)


def test_a_local_step_gives_gradients_up_and_keeps_state_by_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.5, momentum=0.5)
    assert seams.LocalStep.knows(SGD)
    assert not seams.LocalStep.knows(_Unknown)
    parameter.grad = torch.ones(2)
    step = seams.LocalStep.begin(optimizer, optimizer.param_groups, check_state=True)
    assert step is not None
    assert step.groups[0]["params"] == [parameter]
    step.finish(optimizer)
    parameter.grad = torch.ones(2).to_sparse()
    assert seams.LocalStep.begin(optimizer, optimizer.param_groups, check_state=True) is not None


class _Unknown(SGD):
    @override
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


# --- the simulated machine -----------------------------------------------------------------------


def test_a_simulated_machine_has_memory_without_values_and_offloads_from_the_host() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    seams.give_memory(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight
    assert not any(each.is_meta for each in model.parameters())

    host, streams = torch.device("cpu"), Streams()
    with seams.offloading_from_host(streams):
        copies = copies_of(host)
        assert copies is not None
        assert copies.streams is streams
    assert copies_of(host) is None
