"""A unit's gradients are counted as they arrive, and reduced together: once, and not before all are there."""

from __future__ import annotations

import torch
from torch import Tensor

from composable.device.collectives import Channel
from composable.plan.phases import GradPhase
from composable.runtime.gradients import UnitGradients


class Ledger:
    """What a part knows of its gradients, by name."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.here: dict[str, int] = {}
        self.log: list[str] = []

    @property
    def awaited(self) -> int:
        return len(self.names)

    def still_missing(self) -> int:
        return sum(name not in self.here for name in self.names)

    def reduce(self, channel: Channel, label: str) -> None:
        self.log.append(f"reduce {dict(self.here)}: {label}")
        self.here = {}

    def finish(self) -> None:
        self.log.append("finish")

    def forget_gradients(self) -> None:
        self.here = {}

    def drop_reduction(self) -> None:
        self.log.append("drop")


class Unit:
    def __init__(self, *parts: Ledger) -> None:
        self.gradients = UnitGradients(Channel(0))
        self.gradients.parts = parts  # type: ignore[assignment]
        self.gradients.rename("u")
        self.gradients.on_first = lambda: self.log.append("first")
        self.gradients.on_complete = self._complete
        self.parts = parts
        self.log: list[str] = []

    def _complete(self) -> None:
        self.log.append("complete")
        self.gradients.reduce()

    def arrive(self, name: str, tensor: Tensor = torch.ones(())) -> None:  # noqa: B008
        for part in self.parts:
            if name in part.names:
                part.here[name] = part.here.get(name, 0) + 1
        self.gradients.countdown.arrived(tensor)


def test_the_last_gradient_completes_the_unit_whatever_the_order_over_all_parts() -> None:
    unit = Unit(Ledger("a", "b"), Ledger("c"))
    for name in ("b", "c"):
        unit.arrive(name)
        assert unit.log == ["first"]
        assert unit.gradients.phase is GradPhase.ARRIVING
    unit.arrive("a")
    assert unit.log == ["first", "complete"]
    assert unit.gradients.phase is GradPhase.REDUCING
    assert unit.parts[0].log == ["reduce {'b': 1, 'a': 1}: gradient reduction of unit 'u'"]
    assert unit.parts[1].log == ["reduce {'c': 1}: gradient reduction of unit 'u'"]


def test_a_unit_of_one_parameter_is_complete_at_once() -> None:
    unit = Unit(Ledger("a"))
    unit.arrive("a")
    assert unit.log == ["complete"]


def test_a_gradient_that_arrives_twice_does_not_stand_for_another() -> None:
    unit = Unit(Ledger("a", "b", "c"))
    for name in ("a", "a", "a", "b", "b"):
        unit.arrive(name)
        assert unit.log == ["first"]
    unit.arrive("c")
    assert unit.log == ["first", "complete"]
    assert unit.parts[0].log == ["reduce {'a': 3, 'b': 2, 'c': 1}: gradient reduction of unit 'u'"]


def test_every_backward_is_counted_anew() -> None:
    unit = Unit(Ledger("a", "b"))
    for _ in range(3):
        unit.arrive("a")
        unit.arrive("b")
        unit.gradients.finish()
    assert unit.log == ["first", "complete"] * 3
    assert [entry.partition(" ")[0] for entry in unit.parts[0].log] == ["reduce", "finish"] * 3


def test_a_gradient_that_meets_a_reduction_in_flight_waits_for_it() -> None:
    unit = Unit(Ledger("a", "b"))
    for name in ("a", "b", "a"):
        unit.arrive(name)
    assert [entry.partition(" ")[0] for entry in unit.parts[0].log] == ["reduce", "finish"]
    assert unit.gradients.phase is GradPhase.ARRIVING
    assert unit.log == ["first", "complete", "first"]


def test_a_unit_reduced_before_it_is_complete_starts_from_nothing_afterwards() -> None:
    unit = Unit(Ledger("a", "b", "c"))
    unit.arrive("a")
    unit.gradients.reduce()
    unit.gradients.finish()
    for name in ("b", "a"):
        unit.arrive(name)
    assert unit.log == ["first", "first"]
    unit.arrive("c")
    assert unit.log == ["first", "first", "complete"]


def test_expected_gradients_are_nobodys_business_until_all_have_arrived() -> None:
    unit = Unit(Ledger("a", "b"), Ledger("c"))
    unit.gradients.expect()
    unit.arrive("a")
    unit.gradients.expect()  # backward reaches the unit by another output
    unit.arrive("c")
    assert unit.log == []
    unit.arrive("b")
    assert unit.log == ["complete"]


def test_expected_gradients_that_arrive_twice_do_not_stand_for_others() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.gradients.expect()
    for name in ("a", "a"):
        unit.arrive(name)
        assert "complete" not in unit.log
    unit.arrive("b")
    assert unit.log[-1] == "complete"


def test_what_was_expected_in_one_backward_is_not_in_the_next() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.gradients.expect()
    unit.arrive("a")
    unit.gradients.reduce()
    unit.gradients.end()
    assert unit.gradients.phase is GradPhase.EMPTY
    unit.gradients.expect()
    unit.gradients.end()  # it brought nothing
    unit.arrive("b")
    assert unit.log == ["first"], "noticed at once"


def test_dropped_gradients_do_not_count() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.arrive("a")
    unit.gradients.drop()
    assert unit.gradients.phase is GradPhase.EMPTY
    assert unit.parts[0].log == ["drop"]
    unit.arrive("b")
    assert "complete" not in unit.log
    unit.arrive("a")
    assert unit.log == ["first", "first", "complete"]
