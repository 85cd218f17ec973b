"""State of the units of one root that is equal on all ranks.

| field | decides | changes in |
|-------|---------|------------|
| `Unit.compared` | whether ranks compare where they are as they enter a unit | its first use |
| `recorded` | which units forwards gather ahead | see below |
| `buckets` | the order of parameters in buckets | the first backward |
| `late` | which parameters are in buckets that wait for the end | the first backward |
| `in_one_order`, `before` | which replicated units precede which with shards | the first backward |
| `Unit.input_grad_modes` | whether backward enters a frozen unit that a rank skips | forwards |
| `patterns` | for which sets of training units there are modes | forwards with gradients |
| `untraced` | whether the compiler may reduce gradients | a backward that it did not run |
| `last_backward` | whether other roots take part in a backward | each backward |

`recorded` is at first the order of the first forward, in which the ranks were compared. When a
backward has landed, the gathers of its own forward replace it. Forwards in scopes that keep
parameters unsharded, evaluations and lost steps do not change it.

An agreement changes only in calls that all ranks make. It is attached to the units, which
annotations and copies create. Between two steps, one rank may replace a module, which makes a new
`Root` there, or move a parameter's memory, which makes new groups and buckets. This does not touch
an agreement: a new root of the same units uses it again. A rank cannot know whether an object that
is new to it is new on all ranks, so new objects never cause a message.

An `Agreed` has only weak references to its units. So a module that several models share does not
keep the units of dropped models alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

from composable.engine.gradients.agreed_order import AgreedOrder

# Entries of `Agreed.patterns` at most. Where layers are frozen in turn there are many.
PATTERNS: Final = 64


@dataclass(slots=True, eq=False)
class Agreed:
    """See the top of this file. Units are indices into `members`.

    Attributes:
        members: in the order in which they were first planned.
        gradients: `buckets`, `late`, `in_one_order` and `before` of the table.
        untraced: why the compiler reduces no gradients any more; empty if it may.
        last_backward: when it ended, on the clock of `order.CLOCK`; -1 before the first.
        patterns: which units trained in forwards with gradients, oldest first. All ranks have the
            same, also where some skip units.
    """

    members: tuple[ref[Any], ...]
    recorded: tuple[int, ...] = ()
    gradients: AgreedOrder = field(default_factory=AgreedOrder)
    untraced: str = ""
    last_backward: int = -1
    patterns: dict[tuple[bool, ...], None] = field(default_factory=dict)

    def units(self) -> list[Any]:
        """The members; one of a dropped model has no root that would ask."""
        return [member() for member in self.members]

    def follow(self, order: tuple[int, ...]) -> None:
        """Forwards gather ahead in this order from now on."""
        self.recorded = order

    def note_pattern(self, training: tuple[bool, ...]) -> tuple[bool, ...] | None:
        """A forward with gradients begins. Returns the oldest of too many patterns."""
        if training in self.patterns:
            return None
        self.patterns[training] = None
        if len(self.patterns) <= PATTERNS:
            return None
        oldest = next(iter(self.patterns))
        del self.patterns[oldest]
        return oldest

    def stop_tracing(self, why: str) -> None:
        """The compiler reduces no gradients any more."""
        self.untraced = why

    def end_backward(self, when: int) -> None:
        """A backward has landed."""
        self.last_backward = when


def agreed_by(units: Sequence[Any]) -> Agreed:
    """The agreement of these units, in whatever order the modules of this rank have them now."""
    wanted = set(units)
    found: list[Agreed] = units[0].agreements
    for each in found:
        if set(each.units()) == wanted:
            return each
    made = Agreed(tuple(map(ref, units)))
    for unit in units:
        unit.note_agreement(made)
    return made
