"""What this rank sees of a model in a step, in the order of this file.

A bracket around the forwards of each unit's modules sees inputs and outputs, and tensor hooks on
them see their gradients. Gradients of parameters are seen in the messages that are about to be
reduced. Nothing here waits for another rank; `watch.py` exchanges what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from composable.comm.base import Columns
from composable.comm.launch import Launch, LaunchKind
from composable.compilation import backward_will_be_compiled, untraced
from composable.contract.values import tensors_in
from composable.errors import unit_name
from composable.extras.watch.agreement import Agreement, Named
from composable.extras.watch.findings import GRADIENT, INPUT, OUTPUT, PARAMETER, Checks, First
from composable.extras.watch.incident import (
    ModuleCall,
    call_of,
    is_forward,
    keep_gradient,
    version_of,
)
from composable.extras.watch.repeat import Repeat, candidates_in
from composable.seams import Param, ReducePlan, Root, Unit, label_of
from composable.torch_private import is_transformed

# Parameters are what they are before the first forward, whose inputs are seen at the same clock.
_AT_REST: Final = (-1, 0)


class UnitPlace(NamedTuple):
    """A unit, by its names below the watched model.

    Attributes:
        name: its FQN.
        around: that of the unit around it; its own if there is none.
        depth: how many units are around it.
    """

    name: str
    around: str
    depth: int

    def order(self, *, made: bool) -> tuple[int, int]:
        """Of a gradient that came to what the unit made, or read: see `Seen`."""
        return (1, self.depth) if made else (0, -self.depth)


def _place_of(unit: Unit, names: Mapping[Unit, str]) -> UnitPlace:
    own = names[unit]
    outer = [
        name
        for other, name in names.items()
        if other is not unit and (not name or own.startswith(f"{name}."))
    ]
    around = max(outer, key=len, default=own)
    return UnitPlace(unit_name(own), unit_name(around), len(outer))


class Message(NamedTuple):
    """A message of gradients.

    Attributes:
        tensors: what is sent.
        gradients: parts of these, with the names of their parameters.
        params: the parameters at rest.
    """

    tensors: Sequence[Tensor]
    gradients: list[tuple[str, Tensor]]
    params: Sequence[Tensor]


class RankObserver:
    """What this rank sees of a model.

    Args:
        names: the FQNs of its units below the model.
        every, agree: see `watch`.
        keeps: calls of units, to write them to a folder.
        repeat: see `watch`.

    Attributes:
        step: the number of the step that is under way.
        checks, agreement: of this step.
        places: of the units.
        ran: those of the roots that had a backward since the last exchange, on all ranks alike.
        scaled: a loss scaler has scaled the gradients of this step.
        calls: of units in this step, by name.
        repeat: the unit whose operators run again in this step, if one's do.
    """

    def __init__(
        self, names: Mapping[Unit, str], every: int, agree: int, *, keeps: bool, repeat: bool
    ) -> None:
        units = list(names)
        self.step = 0
        self.checks = Checks(on_stream=units[0].mesh_info.all.traits.on_stream)
        self.agreement = Agreement()
        # weak: a module below several models would keep them all
        self.places = WeakKeyDictionary({unit: _place_of(unit, names) for unit in units})
        self._every, self._agree, self._keeps = every, agree, keeps
        # weak, too; all ranks have as many, whichever of them are gone
        self._in_turn = [ref(unit) for unit in (candidates_in(units) if repeat else ())]
        self._trains = False  # the last forward began with gradients
        self._handles: list[Any] = []  # of hooks on leaves, which outlive the step
        self._begin_step()

    def _begin_step(self) -> None:
        self.ran: set[Unit] = set()
        self.scaled = False
        self.calls: dict[str, list[ModuleCall]] = {}
        turn = None
        if self._in_turn and self.looks:
            turn = self._in_turn[self.step // self._every % len(self._in_turn)]()
        self.repeat = None if turn is None else Repeat(turn)
        self._begun: set[str] = set()  # units whose parameters were looked at
        self._reduced: set[int] = set()  # ids of parameters whose gradients were
        self._known = WeakTensorKeyDictionary()  # outputs, which other units read, with versions

    @property
    def looks(self) -> bool:
        """Whether this step is one of those that are looked at."""
        return self.step % self._every == 0

    @property
    def compares(self) -> bool:
        """Whether the ranks compare digests at the end of this step."""
        return self._agree > 0 and self.step % self._agree == 0

    @property
    def _looks_now(self) -> bool:
        # inside of a forward with gradients: reentrant checkpointing turns them off
        return self.looks and (self._trains or torch.is_grad_enabled())

    @property
    def named(self) -> Named:
        """The units that are watched."""
        return [(place.name, unit) for unit, place in self.places.items()]

    # --- forward ---------------------------------------------------------------------------------

    def begin_forward(self, root: Root) -> None:
        """The outermost module of `root` is called."""
        self._trains = torch.is_grad_enabled()
        if self.compares and self._trains:
            self.agreement.begin(self.named, root)
        for unit in root.units if self._looks_now else ():
            place = self.places.get(unit)
            if place is not None and place.name not in self._begun:
                self._begun.add(place.name)
                for group in unit.groups:
                    shard = [] if group.shard is None else [group.shard]
                    rest = ((param.fqn, param.at_rest) for param in group.params)
                    self.checks.look_together(shard, rest, PARAMETER, place.name, _AT_REST)

    def pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A module of a unit is about to compute. Returns what it computes with."""
        place, number = self.places[unit], unit.forward_number
        in_training = self._trains and number is not None  # one rank alone may evaluate
        if self.compares and in_training:
            self.agreement.note_gathered(unit, place.name, "in forward")
        if looks := self._looks_now:
            if self._keeps and in_training and is_forward() and not is_transformed():
                self.calls.setdefault(place.name, []).append(call_of(unit, module, args, kwargs))
            named = list(_named(INPUT, (*enumerate(args), *kwargs.items())))
            fresh = [(n, each) for n, each in named if self._known.get(each) != version_of(each)]
            self.checks.look(fresh, INPUT, place.name, place.around, forward=_forward_of(unit))
            self._watch_gradients(unit, named, made=False)
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.begin(module, looks=looks)
        return args, kwargs

    def post_forward(self, unit: Unit, output: Any) -> None:
        """A module of a unit has computed."""
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.end(output)
        if not self._looks_now:
            return
        place = self.places[unit]
        if isinstance(output, dict):
            items: Iterable[tuple[Any, Any]] = output.items()
        else:
            items = enumerate(output if isinstance(output, (tuple, list)) else [output])
        named = list(_named(OUTPUT, items))
        self.checks.look(named, OUTPUT, place.name, place.name, forward=_forward_of(unit))
        for _, tensor in named:
            self._known[tensor] = version_of(tensor)
        call = next(reversed(self.calls.get(place.name, ())), None)
        # not of a recomputation; of a module that calls itself the inner call is kept
        if call is None or call.outputs or call.forward != unit.forward_number:
            call = None
        else:
            call.end(output)
        self._watch_gradients(unit, named, made=True, call=call)

    def raised(self, unit: Unit) -> None:
        """A module of a unit that was entered has raised, or what came before it."""
        if self.repeat is not None and self.repeat.unit is unit:
            self.repeat.stop()

    # --- backward --------------------------------------------------------------------------------

    def _watch_gradients(
        self,
        unit: Unit,
        named: Iterable[tuple[str, Tensor]],
        *,
        made: bool,
        call: ModuleCall | None = None,
    ) -> None:
        if backward_will_be_compiled():
            return
        forward = _forward_of(unit)
        came = partial(self.gradient_came, unit, made=made, forward=forward)
        for index, (name, tensor) in enumerate(named):
            # hooks on parameters are the engine's matter; the messages have their gradients
            if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
                continue
            handle = tensor.register_hook(partial(came, f"gradient of {name}"))
            if call is not None:
                tensor.register_hook(partial(keep_gradient, call.gradients, index))
            if tensor.grad_fn is None:
                self._handles.append(handle)

    @untraced
    def gradient_came(
        self, unit: Unit, name: str, gradient: Tensor, *, made: bool, forward: int | None
    ) -> None:
        """Autograd has the gradient of what a unit read, or `made`."""
        place = self.places[unit]
        if self.looks:
            maker = place.around if made else place.name
            order = place.order(made=made)
            seen = [(name, gradient)]
            self.checks.look(seen, GRADIENT, place.name, maker, order, forward=forward)
        if self.compares and not made:  # it was gathered for backward, and is not left yet
            self.agreement.note_gathered(unit, place.name, "in backward")

    def end_backward(self, root: Root) -> None:
        """A backward of `root` is at its end, on all ranks."""
        self.ran |= {unit for unit in root.units if unit in self.places}

    def note_scaler(self) -> None:
        """A loss scaler has scaled the gradients of this step."""
        self.scaled = True

    def launching(self, unit: Unit, message: Message) -> None:
        """A message with gradients of `unit` is about to be reduced."""
        place = self.places[unit]
        self._reduced.update(map(id, message.params))
        order = place.order(made=True)
        self.checks.look_together(message.tensors, message.gradients, GRADIENT, place.name, order)

    # --- the end of a step -----------------------------------------------------------------------

    def first_not_finite(self, *, scaled: bool) -> tuple[First | None, bool]:
        """See `Checks.end`."""
        for unit, place in self.places.items():
            # in no message that is known: of one rank, or of users' hooks
            landed = [
                (param.fqn, gradient)
                for param in (unit.params if unit.trains else ())
                if id(param.at_rest) not in self._reduced
                and (gradient := param.at_rest.grad) is not None
            ]
            order = place.order(made=True)
            self.checks.look(landed, GRADIENT, place.name, place.name, order)
        first, overflows = self.checks.end(scaled=scaled)
        if first is not None and first.seen.forward is not None:
            numbers = [call.forward for call in self.calls.get(first.seen.maker, ())]
            if first.seen.forward in numbers:
                first = first._replace(call=numbers.index(first.seen.forward))
        return first, overflows

    def end_step(self) -> None:
        """What was seen was said."""
        self.step += 1
        self._end()

    def evaluate_again(self, step: int) -> None:
        """An optimizer calls its closure once more: what follows belongs to a step that has ended.

        Args:
            step: the number of the step that the call before was in.
        """
        self.step = step
        self._begin_step()

    def evaluated(self, step: int) -> None:
        """It has called it: the step is over, too, without an exchange if no backward came."""
        if self.step == step:
            self.end_step()

    def lose_step(self) -> None:
        """All ranks have lost the step, and have seen different parts of it."""
        self.checks.drop()
        self.agreement.drop()
        self._end()

    def _end(self) -> None:
        for call in (call for calls in self.calls.values() for call in calls):
            call.end_step()
        if self.repeat is not None:
            self.repeat.drop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin_step()


def _forward_of(unit: Unit) -> int | None:
    """The number of the forward that runs; None if nobody will say that its backward came."""
    return None if backward_will_be_compiled() else unit.forward_number


def _named(kind: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in inputs or outputs, with names: `input 0`, `input mask`, `output 1.2`."""
    for key, value in items:
        tensors = tensors_in(value)
        for index, tensor in enumerate(tensors):
            yield f"{kind} {key}" + (f".{index}" if len(tensors) > 1 else ""), tensor


def message_of(launch: Launch, tensors: Columns) -> Message | None:
    """The gradients that are about to be reduced.

    Args:
        launch: of any kind.
        tensors: outputs and inputs, or what is reduced in place.

    Returns:
        None for other launches. These are no gradients, or sums of the first stage, or they are
        what a communication hook sends, or copies in memory that somebody supplies.
    """
    sent = tensors[-1] if tensors else ()
    if launch.sender is None:  # built anew, and a lost step launches again what was before
        return None
    if launch.kind is LaunchKind.GATHER_SPARSE:
        param: Param = launch.sender
        return Message(sent, [(param.fqn, each) for each in sent], [param.at_rest])
    if launch.kind is not LaunchKind.REDUCE:
        return None
    plan: ReducePlan = launch.sender
    parts = plan.gradients_in(sent)
    if not parts:
        return None
    named = [(_name_of(plan.at_rest[index]), each) for index, each in parts.items()]
    return Message(sent, named, [plan.at_rest[index] for index in parts])


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    return "" if label is None else label.fqn
