"""The text of what `watch` has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from composable.errors import few
from composable.extras.watch.checks import GRADIENT, INPUT, OUTPUT, PARAMETER, First

HINT: Final = "hint"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `watch` found. All ranks have the same.

    Attributes:
        kind: "not finite", "ranks differ" or "not reproduced"; of hints, "hint".
        step: the step in which it was found, counted from 0.
        ranks: where, by their numbers among all ranks; the first one is `rank`.
        unit: the unit that it is about.
        phase: "parameter", "input", "output" or "gradient"; for ranks that differ, what does.
        tensor: which one, such as `output 0`, or the FQN of a parameter below the unit.
        what: what was seen there, in a few words.
        lines: more for the reader: a name and a text each.
        call: which call of the unit in the step it is in; -1 if that is the last one, or not known.
    """

    kind: str
    step: int
    ranks: tuple[int, ...]
    unit: str
    phase: str
    tensor: str
    what: str
    lines: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    call: int = field(default=-1, compare=False)

    @property
    def rank(self) -> int:
        """The first rank on which it was found."""
        return self.ranks[0]

    @property
    def place(self) -> tuple[str, ...]:
        """By which two findings are distinguished: a place is reported once."""
        return self.kind, self.unit, self.phase, self.tensor

    def __str__(self) -> str:
        """One block of text."""
        where = ", ".join(map(str, self.ranks))
        rows = [("unit", self.unit), ("phase", self.phase), ("tensor", self.tensor), *self.lines]
        title = f"watch: step {self.step}, rank {where}: {self.what}"
        return "\n".join([title, *(f"  {name:<10}{text}" for name, text in rows if text)])


def hint(step: int, ranks: Sequence[int], what: str, *, unit: str = "", phase: str = "") -> Finding:
    """Something to know, and no error."""
    return Finding(HINT, step, tuple(ranks), unit, phase, "", what)


def overflow(step: int) -> Finding:
    """Infinities that a loss scaler has made."""
    what = (
        "gradients have infinities, as is expected of a loss scaler, which skips the step."
        " The next ones are counted (`overflows`)"
    )
    return hint(step, [0], what, phase=GRADIENT)


_MADE: Final = {
    PARAMETER: "the last step of the optimizer, a load, or a write",
    INPUT: "the code of unit '{maker}' before it calls unit '{unit}'",
    OUTPUT: "the forward of unit '{maker}'",
    GRADIENT: "the backward of unit '{maker}'",
}


def not_finite(step: int, said: Sequence[tuple[int, First | None]]) -> Finding:
    """Put what each rank has seen first into words; the earliest decides."""
    seen = sorted(
        ((rank, each) for rank, each in said if each is not None),
        key=lambda pair: (pair[1].seen.clock, pair[1].seen.order, pair[0]),
    )
    first = seen[0][1]
    where = first.seen
    # what other ranks saw there later may have come by a reduction
    ranks = [
        rank
        for rank, each in seen
        if (each.seen.place, each.seen.clock) == (where.place, where.clock)
    ]
    others = [
        f"rank {rank} ({each.seen.unit}, {each.seen.tensor})"
        for rank, each in seen
        if rank not in ranks
    ]
    made = _MADE[where.phase].format(maker=where.maker, unit=where.unit)
    tensor = where.tensor
    if where.maker != where.unit:
        tensor = f"{tensor} of unit '{where.unit}'"
    elif where.phase == INPUT:
        made = "the batch: it was there before the model was called"
    elif where.phase == GRADIENT and tensor.startswith(f"gradient of {OUTPUT}"):
        made = "the loss, or what is between it and the model"
    kind = str(where.dtype).removeprefix("torch.")
    return Finding(
        "not finite", step, tuple(ranks), where.maker, where.phase, tensor,
        f"{first.what} in the {where.phase}s",
        (
            ("is", f"{kind} {tuple(where.shape)}"),
            ("made by", made),
            ("also", few(others)),
        ),
        first.call,
    )  # fmt: skip


def not_reproduced(step: int, unit: str, wrong: Mapping[int, str]) -> Finding:
    """What each rank has seen differ, by rank."""
    return Finding(
        "not reproduced", step, tuple(wrong), unit, "again", next(iter(wrong.values())),
        "an operator that ran again computed other bits",
        (("seen", "at once, on the same tensors: the later runs agree, the first one differs"),),
    )  # fmt: skip
