"""State of the units of one root that is equal on all ranks.

| field | decides | changes in |
|-------|---------|------------|
| `Unit.compared` | whether ranks compare where they are as they enter a unit | its first use |
| `recorded` | which units forwards gather ahead | see below |
| `buckets` | the order of parameters in buckets | the first backward |
| `late` | which parameters are in buckets that wait for the end | the first backward |
| `before` | which replicated units precede which with shards | the first backward |
| `modes` | whether backward enters a frozen unit that a rank skips | forwards with gradients |
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

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref

# Entries of `Agreed.modes` at most. Where layers are frozen in turn there are many.
PATTERNS: Final = 64


class InputGradMode(enum.IntEnum):
    """Whether the inputs of a frozen unit require gradients: backward enters it if they do."""

    UNKNOWN = -1  # it was not computed yet
    NO_GRAD = 0  # it was computed without autograd
    NOT_REQUIRED = 1
    REQUIRED = 2


@dataclass(slots=True, eq=False)
class Agreed:
    """See the top of this file. Units are indices into `members`.

    Attributes:
        members: in the order in which they were first planned.
        recorded: the order in which forwards gather.
        buckets: parameters in the order of buckets; None before the first backward that reduces.
        late: those whose buckets are launched at the end of backward.
        before: of a unit with shards, the replicated ones that backward left before it, and after
            the unit with shards before that. None before the first backward that reduces; empty
            where ranks leave units in other orders, or nothing is replicated next to shards.
        untraced: why the compiler reduces no gradients any more; empty if it may.
        last_backward: when it ended, on the `CLOCK` of `gather_order.py`; -1 before the first.
        modes: for each pattern of units that trained in forwards with gradients, oldest first, how
            frozen units were last computed, by `Relations.number`. Backward must enter such a unit
            on all ranks or on none. All ranks have the same patterns, also where some skip units.
    """

    members: tuple[ref[Any], ...]
    recorded: tuple[int, ...] = ()
    buckets: tuple[ref[Any], ...] | None = None
    late: tuple[ref[Any], ...] = ()
    before: Mapping[int, tuple[int, ...]] | None = None
    untraced: str = ""
    last_backward: int = -1
    modes: dict[tuple[bool, ...], dict[int, InputGradMode]] = field(default_factory=dict)

    def units(self) -> list[Any]:
        """The members; one of a dropped model has no root that would ask."""
        return [member() for member in self.members]

    def follow(self, order: tuple[int, ...]) -> None:
        """Forwards gather ahead in this order from now on."""
        self.recorded = order

    def agree_on_buckets(self, order: Iterable[Any], late: Iterable[Any]) -> None:
        """All ranks have exchanged in which order parameters were ready."""
        self.buckets, self.late = tuple(map(ref, order)), tuple(map(ref, late))

    def agree_on_leaving(self, before: Mapping[int, tuple[int, ...]]) -> None:
        """All ranks have compared in which order they left the units."""
        self.before = before

    def note_pattern(self, training: tuple[bool, ...]) -> None:
        """A forward with gradients begins, in which these units train."""
        self.modes.setdefault(training, {})
        if len(self.modes) > PATTERNS:
            del self.modes[next(iter(self.modes))]  # the oldest

    def note_mode(self, training: tuple[bool, ...], number: int, mode: InputGradMode) -> None:
        """What ranks have agreed on in a forward, see `modes`."""
        self.modes[training][number] = mode

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
