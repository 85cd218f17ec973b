"""Random programs in which one rank does what it may not, all from one seed; knows the verbs, and nothing of how they work.

A program is a row of slots, and every rank goes through all of them: in each it runs one forward of the same model, and what
else the slot says. In one slot something goes wrong, on one rank mostly. Ranks catch what they get and go on with the next
slot. What a slot brings is right (it ended without an error, with the numbers of one process) or an error that names a unit.
After the next slot in which they train, all ranks must have met again, and a model that is made afterwards must find nothing
left over.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.collectives import communicators_wrapped_by
from composable.errors import ComposableError
from tests.helpers.communicators import Delayed
from tests.helpers.illegal_plans import (
    CALLS_MORE,
    DROPS,
    EVALUATES,
    FREES,
    GROWS,
    KEEPS,
    OF_ANNOTATION,
    OMITS,
    RAISES_AFTER,
    RAISES_AGAIN,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    REORDERS,
    REPEATS,
    RESHARDS,
    SKIPS,
    WRITES,
    IllegalPlan,
    illegal_plan_of,
)
from tests.helpers.programs import WIDTH, Node, Piece, annotate, differences, plan_of
from tests.helpers.quiet import errors_only

_RIGHT: Final = "right"


class Planned(MemoryError):
    """What programs raise on purpose."""


# --- what happens -----------------------------------------------------------------------------------------------------


class Unruly(Piece):
    """A piece that now and then calls the modules inside otherwise. `disorder` is how, and at which module."""

    disorder: tuple[str, str] = ("", "")

    def calls(self) -> list[int]:
        order = super().calls()
        how, where = self.disorder
        names = [node.name for node in self.node.inside]
        if how == REORDERS and where == self.node.name:
            return order[::-1]
        if how == SKIPS and where in names:
            return [inner for inner in order if inner != names.index(where)]
        if how == CALLS_MORE and where in names:
            return [*order, names.index(where)]
        return order


def _raise(*_: object) -> None:
    raise Planned("as planned")


def _spoil(module: nn.Module, args: object, output: Any) -> None:
    """Raise when backward comes to what `module` returns."""
    first = output[0] if isinstance(output, tuple) else output
    if first.requires_grad:
        first.register_hook(_raise)


@dataclass
class _Slot:
    """What a slot brought on this rank."""

    legal: bool
    outcome: str = _RIGHT  # or the error
    planned: bool = False  # it is the error of the plan
    loss: float | None = None
    expected_loss: float | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    averages: dict[str, Tensor | None] = field(default_factory=dict)
    refused: bool = False  # by autograd, in one process
    seconds: float = 0.0


class _Runner:
    """One model and what this rank does with it."""

    def __init__(self, plan: IllegalPlan, annotated: bool) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.annotated = annotated
        self.model = Unruly(plan.tree, plan.leave_out).to(torch.float64)
        self.pieces: dict[str, Unruly] = {m.node.name: m for m in self.model.modules() if isinstance(m, Unruly)}
        self.kept: list[Tensor] = []
        self.loss: float | None = None
        if annotated:
            annotate_anew(self.model, plan)
        self._first = [self._local(parameter).detach().clone() for parameter in self.model.parameters()]

    def _local(self, parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def begin(self, slot: int) -> None:
        """Other gradients, and other parameters, than the slots before."""
        self.kept = []
        self.model.zero_grad()
        self._write(1.0 + 0.01 * slot)

    @torch.no_grad()
    def _write(self, factor: float) -> None:
        for parameter, first in zip(self.model.parameters(), self._first, strict=True):
            self._local(parameter).copy_(first * factor)

    def _output(self, slot: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.plan.seed + 10 * slot + dist.get_rank())
        x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(torch.is_grad_enabled())
        found = self.model(x, (slot,))
        return found[0] * found[1] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    def _loss(self, slot: int) -> Tensor:
        loss = self._output(slot).square().mean()
        self.loss = loss.item()
        return loss

    def perform(self, slot: int, action: str) -> None:
        """What the slot says, or what goes wrong in it; `action` is one or the other."""
        self.loss = None
        piece = self.pieces.get(self.plan.where)
        match action:
            case "evaluate" | "evaluates":
                with torch.no_grad():
                    self._loss(slot)
            case "keep" | "runs backward one slot later":
                self.kept.append(self._loss(slot))
            case "drops its loss":
                self._loss(slot)
            case "runs backward twice":
                loss = self._loss(slot)
                loss.backward(retain_graph=True)
                loss.backward()
            case "skips a module" | "calls modules in another order" | "calls a module once more":
                Unruly.disorder = action, self.plan.where
                try:
                    self._loss(slot).backward()
                finally:
                    Unruly.disorder = "", ""
            case "runs backward through a graph that is freed":
                output = self._output(slot)
                (output * 2).sum().backward()
                (output * 3).sum().backward()
            case "writes to parameters before backward":
                loss = self._loss(slot)
                self._write(2.0)
                loss.backward()
            case _:
                self._train(slot, action if self.annotated and piece is not None else "train")

    def _train(self, slot: int, action: str) -> None:
        piece = self.pieces.get(self.plan.where, self.model)
        if action == RAISES_FORWARD:
            with piece.register_forward_pre_hook(_raise):
                self._loss(slot)
        elif action == RAISES_AFTER:
            with piece.register_forward_hook(_raise):
                self._loss(slot)
        elif action == RAISES_BACKWARD:
            with piece.register_forward_hook(_spoil):
                self._backward(self._loss(slot))
        elif action == RAISES_AGAIN:
            loss = self._loss(slot)
            with piece.register_forward_pre_hook(_raise):
                self._backward(loss)
        else:
            self._backward(self._loss(slot))

    def _backward(self, loss: Tensor) -> None:
        kept, self.kept = self.kept, []
        sum(kept, start=loss).backward()  # type: ignore[union-attr]

    def gradients(self) -> dict[str, Tensor | None]:
        """As this rank holds them."""
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {name: None if grad is None else grad.detach().clone() for name, grad in found.items()}


def annotate_anew(model: Unruly, plan: IllegalPlan) -> None:
    draw = random.Random(f"{plan.seed} {dist.get_rank()}")
    holder = Piece(Node("", 0), 0.0)
    holder.inside = nn.ModuleList([model])
    with communicators_wrapped_by(
        lambda communicator: Delayed(communicator, draw) if plan.delays and communicator.size > 1 else communicator
    ):  # type: ignore[return-value]
        annotate(holder)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(plan: IllegalPlan, found: list[_Slot]) -> None:
    """Append what each slot brings, as they come."""
    plain, ours = _Runner(plan, False), _Runner(plan, True)
    mine = plan.culprit == dist.get_rank() or plan.fault in (FREES, WRITES)
    for number, legal in enumerate(plan.slots):
        wrong = number == plan.at and mine
        action = plan.fault if wrong else legal
        slot = _Slot(legal=not wrong)
        begins = number == 0 or plan.slots[number - 1] != "keep"
        if begins and not (number == plan.at + 1 and plan.fault == KEEPS):
            for runner in (plain, ours):
                runner.begin(number)
        start = time.monotonic()
        try:
            ours.perform(number, action)
        except (Planned, ComposableError, RuntimeError) as error:
            slot.outcome = f"{type(error).__name__}: {error}"
            slot.planned = isinstance(error, Planned)
        slot.seconds = time.monotonic() - start
        slot.loss = ours.loss
        try:
            plain.perform(number, "train" if action == REPEATS else action)
        except RuntimeError:
            slot.refused = True
        slot.expected_loss = plain.loss
        if slot.outcome != _RIGHT:
            ours.kept, plain.kept = [], []
        slot.gradients = ours.gradients()
        slot.averages = plain.gradients()
        found.append(slot)
    _average(found, plain.model)


def _average(slots: list[_Slot], model: nn.Module) -> None:
    """Replace this rank's gradients by the means over all ranks; None where no rank has one. Collective."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    held = [(slot.averages, name) for slot in slots for name in shapes]
    rows = [torch.zeros(shapes[name]) if (row := gradients[name]) is None else row for gradients, name in held]
    present = torch.tensor([gradients[name] is not None for gradients, name in held], dtype=torch.float64)
    sums = torch.cat([*(row.reshape(-1).double() for row in rows), present])
    dist.all_reduce(sums)
    *means, present = sums.split([*(row.numel() for row in rows), len(rows)])
    for (gradients, name), mean, ranks in zip(held, means, present.tolist(), strict=True):
        gradients[name] = mean.view(shapes[name]) / dist.get_world_size() if ranks else None


_NAMES_A_UNIT: Final = re.compile(r"(unit|runs) '")
_TIMED_OUT: Final = re.compile(r"within \d|[Tt]imed out|[Tt]imeout|Timed")
_OF_AUTOGRAD: Final = re.compile(
    r"^RuntimeError: (Trying to backward through the graph a second time|one of the variables needed)"
)


def _judge(plan: IllegalPlan, slots: list[_Slot]) -> Iterator[str]:
    # A rank whose own backward is still to come learns that the others gave it up when it waits, until it trains again.
    last = plan.slots.index("train", plan.at + 1)
    for number, slot in enumerate(slots):
        here = f"slot {number}, after {slot.seconds:.1f} s"
        if slot.loss is not None and abs(slot.loss - (slot.expected_loss or 0.0)) > 1e-8:
            yield f"{here}: loss {slot.loss}, not {slot.expected_loss}"
        if slot.outcome == _RIGHT:
            if slot.refused:
                yield f"{here}: autograd refuses it in one process, and no error came"
            if plan.slots[number] == "train" and (slot.legal or plan.fault not in (DROPS, EVALUATES, KEEPS)):
                yield from (f"{here}: {line}" for line in _compare(slot, skipped=plan.fault == SKIPS and not slot.legal))
        elif not plan.at <= number <= last:
            yield f"{here}: {slot.outcome}"
        elif _TIMED_OUT.search(slot.outcome):
            yield f"{here}: waited for the timeout: {slot.outcome}"
        elif not (slot.planned or _NAMES_A_UNIT.search(slot.outcome) or (slot.refused and _OF_AUTOGRAD.search(slot.outcome))):
            yield f"{here}: an error that names no unit: {slot.outcome}"


def _compare(slot: _Slot, *, skipped: bool) -> Iterator[str]:
    for name, mean in slot.averages.items():
        gradient = slot.gradients[name]
        if isinstance(gradient, DTensor) and mean is not None:
            (placement,) = gradient.placements
            if placement.is_shard():
                chunks = mean.chunk(dist.get_world_size(), placement.dim)  # type: ignore[attr-defined]
                mean = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else mean[:0]
            gradient = gradient.to_local()
        if skipped and gradient is None:
            continue  # it took no part in that unit, and the others, which did, got an error
        if mean is None or gradient is None:
            if mean is not gradient:
                yield f"{name} is {'None' if gradient is None else 'there'}, and should not be"
        elif not torch.allclose(gradient, mean, rtol=1e-8, atol=1e-10):
            yield f"{name} is off by {(gradient - mean).abs().max().item():.3g}"


def _disagree(plan: IllegalPlan) -> Iterator[str]:
    """Annotate otherwise on one rank: all ranks are told at once."""
    mine = plan.culprit == dist.get_rank()
    torch.manual_seed(plan.seed)
    for node in plan.tree.everything():
        if mine and node.name == plan.where:
            node.layers += plan.fault == GROWS
            if plan.fault == RESHARDS:
                node.reshard = not node.reshard
            elif plan.fault == OMITS:
                node.verbs = ()
    model = Unruly(plan.tree, plan.leave_out).to(torch.float64)
    try:
        annotate_anew(model, plan)
    except ComposableError as error:
        if "RanksDisagreeError" not in type(error).__name__:
            yield f"{type(error).__name__}: {error}"
    else:
        yield "annotated, though ranks disagree"


@errors_only()  # of resets, which are what this is about, it warns
def run_illegal_seeds(seeds: list[int]) -> list[tuple[int, list[str]]]:
    """In what each seed went wrong otherwise than it should. Runs on every rank."""
    results = []
    for seed in seeds:
        plan = illegal_plan_of(seed, dist.get_world_size())
        legal = plan_of(seed, dist.get_world_size())
        slots: list[_Slot] = []
        try:
            if plan.fault in OF_ANNOTATION:
                found = list(_disagree(plan)) if plan.where else []
            else:
                _run(plan, slots)
                found = list(_judge(plan, slots))
            if not _anywhere(bool(found)):
                found = [f"afterwards, {line}" for line in differences(legal, ordered=False)[0]]
        except Exception as error:
            lines = [f"slot {number}, after {slot.seconds:.1f} s: {slot.outcome}" for number, slot in enumerate(slots)]
            raise AssertionError("\n".join([str(plan), *lines])) from error
        results.append((seed, found))
        if _anywhere(bool(found)):
            break  # later ones would only hide it
    return results


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank; collective."""
    count = torch.tensor([float(here)])
    dist.all_reduce(count)
    return bool(count)
