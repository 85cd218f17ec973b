"""One optimizer's groups and state as its own code sees them in a step, and what becomes of them afterwards.

The user's parameters, groups and state are the truth. A `Plan` is made of them, holds until they change, and is thrown away
then; nothing is ever read back from an old one. Between steps it keeps no state alive: who moves or drops it, has its memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from operator import is_
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable.device.parameter_forms import like_parameter
from composable.device.private import local_of
from composable.errors import OptimizerError
from composable.optim.scalars import Column, columns_of
from composable.optim.spans import Span, find_spans, local_parameter_of

_PLAIN: Final = (Tensor, nn.Parameter)
_NOTHING: Final = object()


def _same(some: Iterable[object], others: Iterable[object]) -> bool:
    """Whether both give the same objects. Comparing would ask the tensors."""
    return all(map(is_, some, others))


def _says(group: dict[str, Any]) -> bool:
    """Whether a group says how it is to be stepped, or cannot."""
    return "foreach" not in group or group["foreach"] is not None or bool(group.get("fused"))


def _how(group: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a group is to be stepped by fused operations, or by those over lists."""
    return bool(group.get("fused")), bool(group.get("foreach"))


def _held(value: object) -> object:
    """What `_is_held` recognises a value by: it does not keep tensors alive."""
    return weakref.ref(value) if isinstance(value, Tensor) else value


def _is_held(held: object, value: object) -> bool:
    return (held() if isinstance(held, weakref.ReferenceType) else held) is value


def _anchor(gradient: Tensor) -> Tensor:
    """The tensor by which a gradient is recognised: a `DTensor` may be another one, the memory is what counts."""
    return local_of(gradient) if isinstance(gradient, DTensor) else gradient


class _Seen:
    """What was seen of a sharded parameter when a plan was made; weak where the plan must keep nothing alive."""

    __slots__ = ("_gradient", "_local", "_values", "parameter")

    def __init__(self, parameter: DTensor, state: dict[str, Any] | None) -> None:
        self.parameter = parameter
        self._local = local_of(parameter)
        gradient = parameter.grad
        self._gradient = None if gradient is None else weakref.ref(_anchor(gradient))
        self.look_at(state)

    def look_at(self, state: dict[str, Any] | None) -> None:
        self._values = None if state is None else tuple(map(_held, state.values()))

    def holds(self, states: dict[Tensor, Any]) -> bool:
        parameter = self.parameter
        gradient, expected = parameter.grad, self._gradient
        if local_of(parameter) is not self._local or (gradient is None) is not (expected is None):
            return False
        if gradient is None or expected is None:
            return True  # nothing will be done to it
        if _anchor(gradient) is not expected():
            return False
        state, values = states.get(parameter), self._values
        if state is None or values is None:
            return state is values
        return len(state) == len(values) and all(map(_is_held, values, state.values()))


class _Group:
    """One group of hyper-parameters: its runs, and the parameters that torch's code sees as they are."""

    def __init__(self, group: dict[str, Any], states: dict[Tensor, Any]) -> None:
        self.parameters = tuple(group["params"])
        self._how = _how(group)
        fused, foreach = self._how
        self.spans: list[Span] = []
        self.plain: list[Tensor] = []
        self.odd: list[Tensor] = []  # DTensors, which cannot be listed together with plain tensors
        sharded = [p for p in self.parameters if isinstance(p, DTensor)]
        strangers = any(type(p) not in _PLAIN and not isinstance(p, DTensor) for p in self.parameters)
        if strangers or len(dict.fromkeys(map(id, self.parameters))) < len(self.parameters):
            # Its code chooses its implementation by the parameters' types; duplicates are stepped more than once.
            self.odd = list(self.parameters)
            self.seen = []
            return
        self.plain = [p for p in self.parameters if not isinstance(p, DTensor)]
        self.seen = [_Seen(p, states.get(p)) for p in sharded]
        members = []
        for parameter in sharded:
            local = local_parameter_of(parameter, states.get(parameter, {}), fused=fused, loops=not (fused or foreach))
            if local is not None:
                members.append(local)
            elif parameter.grad is not None:
                self.odd.append(parameter)
        self.spans = list(find_spans(members))

    def is_still(self, group: dict[str, Any]) -> bool:
        found = group["params"]
        return len(found) == len(self.parameters) and _same(found, self.parameters) and _how(group) == self._how


class Plan:
    """How one optimizer steps: `open` before its code runs, `close` after it.

    Args:
        chooses: whether torch's code chooses its implementation anew, by the tensors that it is shown. Otherwise it is the one
            that it would have chosen by the user's parameters.
    """

    def __init__(self, optimizer: Optimizer, *, chooses: bool = True) -> None:
        self._chooses = chooses
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._groups = [_Group(group, optimizer.state) for group in optimizer.param_groups]
        self._spans = [span for group in self._groups for span in group.spans]
        self._as_they_are = [p for group in self._groups for p in chain(group.plain, group.odd)]
        self._seen = [seen for group in self._groups for seen in group.seen]
        # What runs have in a step: their parameters' states, and their own when it was last in accord with these.
        self._members: dict[int, list[dict[str, Any] | None]] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._pieces: list[tuple[weakref.ref[DTensor], weakref.ref[Tensor]]] = []  # per-element state, and its local tensor
        self._columns: list[Column] = []
        self._shown: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._truth: Any = None
        for span in self._spans:
            self._members[id(span)] = [optimizer.state.get(p) for p in span.parameters]
            self._adopt(span, move=True)
        self._note_state(optimizer)
        self._let_go()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether parameters, gradients, state and groups are still the ones that the plan was made of."""
        groups = zip_longest(self._groups, optimizer.param_groups)
        if not all(ours is not None and group is not None and ours.is_still(group) for ours, group in groups):
            return False
        states = optimizer.state
        return (
            all(seen.holds(states) for seen in self._seen)
            and all(map(_lies_as_before, self._pieces))
            and all(column.agrees() for column in self._columns)
        )

    def open(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The groups that the optimizer's code may step now, with `state` as their state."""
        self._truth = optimizer.state
        for span in self._spans:
            span.take_gradients()
            self._members[id(span)] = [optimizer.state.get(p) for p in span.parameters]
            self._adopt(span, move=False)
            if span.tensor in self.state:
                self._known[id(span)] = dict(self.state[span.tensor])
            span.spread_state(self.state)
        for parameter in self._as_they_are:
            if parameter in optimizer.state:
                self.state[parameter] = optimizer.state[parameter]
        self._shown = []
        for ours, group in zip(self._groups, optimizer.param_groups, strict=True):
            # The loop is what it takes where DTensors are in the group, unless somebody said otherwise.
            kept = {} if self._chooses or not ours.seen or _says(group) else {"foreach": False}
            self._show(group, [*chain.from_iterable(span.stepped for span in ours.spans), *ours.plain], kept)
            if ours.odd:
                self._show(group, ours.odd, {})
        return [shown for _, shown, _ in self._shown]

    def _show(self, group: dict[str, Any], parameters: list[Tensor], kept: dict[str, bool]) -> None:
        shown = {**group, **kept, "params": parameters}
        self._shown.append((group, shown, dict(shown)))

    def close(self, optimizer: Optimizer) -> None:
        """Give up gradients and state, and let the user's groups and state say what the optimizer's code left behind."""
        for span in self._spans:
            span.drop_gradients()
        try:
            # Otherwise an error ended the step, and the user has put other state in the place of what it left.
            if optimizer.state is self._truth:
                self._tell(optimizer)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._truth = None
        self._shown = []
        self.state.clear()
        self._members.clear()
        self._known.clear()

    def _tell(self, optimizer: Optimizer) -> None:
        for group, shown, before in self._shown:
            for key, value in shown.items():
                # Only what its code wrote: since an error ended the step, the user may have changed the group.
                if value is not before.get(key, _NOTHING):
                    group[key] = value
        for span in self._spans:
            span.collect_state(self.state, self._known.get(id(span), {}))
        changed = [span for span in self._spans if self._changed(span)]
        self._enter_in_order(changed, optimizer.state)
        for span in changed:
            self._publish(span, optimizer)
        for column in self._columns:
            column.spread()
        if changed:
            self._note_state(optimizer)

    def _enter_in_order(self, changed: Sequence[Span], states: Any) -> None:
        """Enter parameters that got their first state, in the order in which torch would have."""
        fresh = {id(p): self.state[p] for p in self._as_they_are if p in self.state and p not in states}
        fresh.update((id(p), {}) for span in changed for p in span.parameters if p not in states)
        if fresh:
            for parameter in chain.from_iterable(group.parameters for group in self._groups):
                if id(parameter) in fresh:
                    states[parameter] = fresh[id(parameter)]

    # --- the state of runs and of their members ---------------------------------------------------------------------

    def _adopt(self, span: Span, *, move: bool) -> None:
        """Make the span's state of its members', who agree in all that is not per element; `move`: it is not one tensor yet."""
        states = self._members[id(span)]
        first = states[0]
        if first is None:
            return
        self.state[span.tensor] = whole = dict(first)
        for key, value in first.items():
            if isinstance(value, DTensor):
                members = [state[key] for state in states if state is not None] if move else []
                whole[key] = span.gather(members) if move else span.whole_of(value)

    def _changed(self, span: Span) -> bool:
        state, known = self.state.get(span.tensor), self._known.get(id(span))
        if state is None or known is None:
            return state is not known
        return len(state) != len(known) or not _same(state.values(), known.values())

    def _publish(self, span: Span, optimizer: Optimizer) -> None:
        """Tell the members what is new in the span's state."""
        states: list[dict[str, Any]] = [optimizer.state[parameter] for parameter in span.parameters]
        self._members[id(span)] = list(states)
        whole, known = self.state[span.tensor], self._known.get(id(span), {})
        for key in [key for key in known if key not in whole]:
            for state in states:
                state.pop(key, None)
        if any(value is not known.get(key) and _is_among(value, known) for key, value in whole.items()):
            # Its code exchanged tensors: one would be overwritten before it is copied.
            whole.update({key: value.clone() for key, value in whole.items() if isinstance(value, Tensor)})
        for key, value in whole.items():
            before = known.get(key, _NOTHING)
            if value is before:
                continue
            if isinstance(value, Tensor) and isinstance(before, Tensor) and _alike(value, before):
                whole[key] = before.copy_(value)  # the members' are views of it, or will follow it
                continue
            self._publish_new(span, states, key, value)

    def _publish_new(self, span: Span, states: Sequence[dict[str, Any]], key: str, value: object) -> None:
        if isinstance(value, Tensor) and value.shape == span.tensor.shape:
            span.note_parts(value)
            for index, (state, parameter) in enumerate(zip(states, span.parameters, strict=True)):
                state[key] = like_parameter(span.part(value, index), parameter)
        elif isinstance(value, Tensor) and not value.dim():
            for state in states:
                state[key] = value if span.single else value.clone()
        elif value is None or isinstance(value, (bool, int, float, str)):
            for state in states:
                state[key] = value
        else:
            raise OptimizerError(
                f"step_on_shards: the optimizer keeps '{key}' of type {type(value).__name__} as state of a parameter, which is "
                "neither one value per element, nor one number; so it does not step element by element. Call remove() on what "
                "step_on_shards returned, and make a new optimizer."
            )

    def _note_state(self, optimizer: Optimizer) -> None:
        """Members' scalars move into columns; from now on, what is there is what is expected."""
        together = [
            [state for state in self._members[id(span)] if state is not None]
            for span in self._spans
            if not span.single and self._members[id(span)][0] is not None
        ]
        self._columns = list(columns_of(together))
        values: list[DTensor] = []
        for span in self._spans:
            states = self._members[id(span)]
            if states[0] is None:
                continue
            whole = self.state[span.tensor]
            for key, value in states[0].items():
                if not isinstance(value, DTensor):
                    whole[key] = value
            for state in states:
                values += [] if state is None else [value for value in state.values() if isinstance(value, DTensor)]
            self._known[id(span)] = dict(whole)
        self._pieces = [(weakref.ref(value), weakref.ref(local_of(value))) for value in values]
        for seen in self._seen:
            seen.look_at(optimizer.state.get(seen.parameter))


def _lies_as_before(piece: tuple[weakref.ref[DTensor], weakref.ref[Tensor]]) -> bool:
    value = piece[0]()
    return value is not None and local_of(value) is piece[1]()


def _is_among(value: object, known: Mapping[str, object]) -> bool:
    """Whether a tensor lies where one of those does that were known."""
    if not isinstance(value, Tensor):
        return False
    return any(isinstance(other, Tensor) and other.data_ptr() == value.data_ptr() for other in known.values())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
