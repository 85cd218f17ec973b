"""A unit's gradients are reduced together, when somebody else says so; only what nobody expects makes itself heard."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable.device.collectives import TagSequence
from composable.plan.phases import GradPhase
from composable.runtime.gradients import UnitGradients


class Ledger:
    """What a group knows of its gradients, by name."""

    undecided = False

    def __init__(self, *names: str) -> None:
        self.names = names
        self.here: dict[str, int] = {}
        self.log: list[str] = []

    def reduce(self, tags: TagSequence, label: str) -> None:
        self.log.append(f"reduce {dict(self.here)}: {label}")
        self.here = {}

    def finish(self) -> list[nn.Parameter]:
        self.log.append("finish")
        return []

    def drop_gradients(self) -> None:
        self.here = {}

    def drop_reduction(self) -> None:
        self.log.append("drop")


class Unit:
    def __init__(self, *groups: Ledger) -> None:
        self.gradients = UnitGradients()
        self.gradients.tags = TagSequence(0)
        self.gradients.groups = groups  # type: ignore[assignment]
        self.gradients.rename("u")
        self.gradients.on_unexpected = lambda: self.log.append("unexpected")
        self.groups = groups
        self.log: list[str] = []

    def arrive(self, name: str, tensor: Tensor = torch.ones(())) -> None:  # noqa: B008
        for group in self.groups:
            if name in group.names:
                group.here[name] = group.here.get(name, 0) + 1
        self.gradients.watch.arrived(tensor)

    def events(self) -> list[str]:
        """What happened to the first group, in short."""
        return [entry.partition(" ")[0] for entry in self.groups[0].log]


def test_nothing_is_launched_because_of_a_gradient_not_even_of_the_last_one() -> None:
    unit = Unit(Ledger("a", "b"), Ledger("c"))
    unit.gradients.expect()
    for name in ("b", "c", "a"):
        unit.arrive(name)
    assert unit.log == unit.events() == []
    assert unit.gradients.phase is GradPhase.EMPTY


def test_all_groups_are_reduced_together_whatever_has_arrived() -> None:
    unit = Unit(Ledger("a", "b"), Ledger("c"))
    unit.gradients.expect()
    unit.arrive("b")
    unit.gradients.reduce()
    assert unit.gradients.phase is GradPhase.REDUCING
    assert unit.groups[0].log == ["reduce {'b': 1}: gradient reduction of unit 'u'"]
    assert unit.groups[1].log == ["reduce {}: gradient reduction of unit 'u'"]


def test_the_first_gradient_that_nobody_expects_is_noticed_and_the_others_go_with_it() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.arrive("a")
    assert unit.log == ["unexpected"]
    assert unit.gradients.phase is GradPhase.ARRIVING
    unit.arrive("b")
    assert unit.log == ["unexpected"]
    unit.gradients.reduce()
    assert unit.groups[0].log == ["reduce {'a': 1, 'b': 1}: gradient reduction of unit 'u'"]


def test_gradients_after_a_reduction_are_unexpected_until_backward_reaches_the_unit_again() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.gradients.expect()
    unit.gradients.reduce()
    unit.arrive("a")
    assert unit.log == ["unexpected"]
    unit.gradients.reduce()
    unit.gradients.expect()
    unit.arrive("b")
    assert unit.log == ["unexpected"]


def test_what_waits_for_a_share_of_the_gradients_is_called_once_when_that_is_there() -> None:
    unit, called = Unit(Ledger("a", "b", "c", "d")), []
    unit.gradients.expect()
    unit.gradients.watch.count(8, lambda: called.append("here"))
    four_bytes = torch.ones(())
    unit.arrive("a", four_bytes)
    assert called == []
    unit.arrive("b", four_bytes)
    assert called == ["here"]
    unit.arrive("c", four_bytes)
    assert called == ["here"]
    unit.gradients.watch.count(8, lambda: called.append("too late"))
    unit.arrive("d", four_bytes)
    unit.gradients.reduce()
    unit.gradients.expect()
    unit.arrive("a", four_bytes)
    assert called == ["here"], "the backward that counted is over"
    assert unit.log == []


def test_a_gradient_that_meets_a_reduction_in_flight_waits_for_it() -> None:
    unit = Unit(Ledger("a"))
    unit.arrive("a")
    unit.gradients.reduce()
    unit.arrive("a")
    assert unit.events() == ["reduce", "finish"]
    assert unit.gradients.phase is GradPhase.ARRIVING


def test_a_reduction_waits_for_the_one_before() -> None:
    unit = Unit(Ledger("a"))
    for _ in range(2):
        unit.gradients.expect()
        unit.arrive("a")
        unit.gradients.reduce()
    assert unit.events() == ["reduce", "finish", "reduce"]


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
    assert unit.log == ["unexpected"], "noticed at once"


def test_dropped_gradients_do_not_count() -> None:
    unit = Unit(Ledger("a", "b"))
    unit.arrive("a")
    unit.gradients.drop()
    assert unit.gradients.phase is GradPhase.EMPTY
    assert unit.groups[0].log == ["drop"]
    unit.arrive("b")
    assert unit.log == ["unexpected", "unexpected"]
