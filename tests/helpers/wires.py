"""Wires that record, delay or hold back collectives; knows the protocol of wires and nothing above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composable.device.collectives import (
    Arrival,
    Channel,
    GatherPart,
    PairsWire,
    Pending,
    ReducePart,
    Scratch,
    TensorsWire,
    Term,
    Wire,
    communicator_like,
)


@dataclass
class Log:
    """What happened on this rank, in order: ("launch" or "wait", label), and whatever the test adds."""

    events: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, label: str) -> None:
        self.events.append((what, label))

    def labels(self, what: str = "launch") -> list[str]:
        return [label for event, label in self.events if event == what]

    def while_in_flight(self, label: str, what: str) -> list[str]:
        """Labels of the events `what` between the first launch of `label` and its wait."""
        start = self.events.index(("launch", label))
        end = self.events.index(("wait", label), start)
        return [other for event, other in self.events[start:end] if event == what]


@dataclass
class _Later:
    """An arrival that does something of its own before or in place of the wire's."""

    act: Callable[[], None]
    try_to: Callable[[], bool] = lambda: False
    done: bool = False

    def progress(self) -> bool:
        return self.done or self.try_to()

    def wait(self) -> None:
        if not self.done:
            self.done = True
            self.act()

    def give_up(self) -> None:
        self.wait()


class _Around:
    """A wire that passes everything on."""

    def __init__(self, inner: Wire) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Recording(_Around):
    """Writes launches and waits into a log."""

    def __init__(self, inner: Wire, log: Log) -> None:
        super().__init__(inner)
        self._log = log

    def _noted(self, label: str, arrival: Arrival) -> Pending:
        self._log.add("launch", label)

        def wait() -> None:
            self._log.add("wait", label)
            arrival.wait()

        return _Later(wait, getattr(arrival, "progress", lambda: False))

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        return self._noted(label, self._inner.all_gather(prepared, label=label, channel=channel))

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        return self._noted(label, self._inner.reduce_scatter(parts, scratch=scratch, label=label, channel=channel))

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        return self._noted(label, self._inner.all_reduce(tensor, label=label, term=term))


class Slow(_Around):
    """Starts every collective late on one rank."""

    def __init__(self, inner: Wire, *, rank: int, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds if inner.rank == rank else 0.0

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        time.sleep(self._seconds)
        return self._inner.all_gather(prepared, label=label, channel=channel)

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        time.sleep(self._seconds)
        return self._inner.reduce_scatter(parts, scratch=scratch, label=label, channel=channel)

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        time.sleep(self._seconds)
        return self._inner.all_reduce(tensor, label=label, term=term)


class Impatient(_Around):
    """Waits for every collective at once: results are there before anybody asks."""

    def _now(self, arrival: Arrival) -> Pending:
        arrival.wait()
        return _Later(lambda: None, lambda: True)

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        return self._now(self._inner.all_gather(prepared, label=label, channel=channel))

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        return self._now(self._inner.reduce_scatter(parts, scratch=scratch, label=label, channel=channel))

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        return self._now(self._inner.all_reduce(tensor, label=label, term=term))


class LastMoment(_Around):
    """Moves no byte before the wait, and leaves NaN where the result will be: who reads too early, or changes what is
    being sent, computes something else than expected, every time and not once in a thousand runs."""

    def prepare(self, parts: Sequence[GatherPart]) -> Any:
        return self._inner.prepare(parts), list(parts)

    def all_gather(self, prepared: Any, *, label: str, channel: Channel) -> Arrival:
        plan, parts = prepared
        for part in parts:
            if part.whole.untyped_storage().data_ptr() != part.shard.untyped_storage().data_ptr():
                _spoil(part.whole)
        return _Later(lambda: self._inner.all_gather(plan, label=label, channel=channel).wait())

    def reduce_scatter(self, parts: Sequence[ReducePart], *, scratch: Scratch, label: str, channel: Channel) -> Arrival:
        for part in parts:
            if part.out.untyped_storage().data_ptr() != part.source.untyped_storage().data_ptr():
                _spoil(part.out)
        return _Later(lambda: self._inner.reduce_scatter(parts, scratch=scratch, label=label, channel=channel).wait())

    def all_reduce(self, tensor: Tensor, *, label: str, term: Term | None = None) -> Pending:
        before = tensor.detach().clone()
        _spoil(tensor)

        def act() -> None:
            tensor.detach().copy_(before)
            self._inner.all_reduce(tensor, label=label, term=term).wait()

        return _Later(act)


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        with torch.no_grad():
            tensor.data.fill_(float("nan"))


def all_shared(wire: Wire) -> Wire:
    """The wire that ranks of one host have anyway; that it is the one through shared memory is made sure of."""
    assert wire.capabilities.tells_of_leaving
    return wire


def all_sockets(wire: Wire) -> Wire:
    """A wire that moves everything from point to point, in place of one that uses shared memory."""
    if wire.capabilities.tells_of_leaving and wire.apart:
        return PairsWire(communicator_like(wire.group, wire.device), wire.device)
    return PairsWire(wire.group, wire.device) if wire.capabilities.tells_of_leaving else wire


def all_ordered(wire: Wire) -> Wire:
    """A wire whose collectives are told apart by nothing but their order, as NCCL's are."""
    if wire.capabilities.tells_of_leaving and wire.apart:
        return TensorsWire(communicator_like(wire.group, wire.device), wire.device)
    sent_by_pairs = wire.capabilities.tells_of_leaving or isinstance(wire, PairsWire)
    return TensorsWire(wire.group, wire.device) if sent_by_pairs else wire
