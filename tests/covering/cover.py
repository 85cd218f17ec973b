"""Covering arrays: few rows in which all values of two options meet, and all values of some three;
knows no option.

Greedy, as AETG (Cohen et al., 1997): a row begins with values that have not met yet, and each other
option gets the value that meets most of those chosen before it for the first time. Deterministic: a
row has the same number in every process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, islice, product
from typing import Final

Row = Mapping[str, str]
Excluded = Sequence[Mapping[str, Sequence[str]]]
Values = tuple[tuple[str, str], ...]  # options and values that are to meet
TRIES: Final = 30  # of one row, in other orders of the options
CANDIDATES: Final = 3  # of which the best is taken


def is_excluded(row: Row, excluded: Excluded) -> bool:
    """Whether the values of one of `excluded` are there together."""
    return any(all(row.get(option) in of for option, of in each.items()) for each in excluded)


def products(
    options: Mapping[str, Sequence[str]], strength: int, excluded: Excluded
) -> Iterator[Values]:
    """All values of so many options that may be there together."""
    for chosen in combinations(options, strength):
        for values in product(*(options[option] for option in chosen)):
            together = tuple(sorted(zip(chosen, values, strict=True)))
            if not is_excluded(dict(together), excluded):
                yield together


def covering(
    options: Mapping[str, Sequence[str]], triples: Sequence[str], excluded: Excluded
) -> list[dict[str, str]]:
    """Rows of all options.

    Args:
        triples: options of which all three values meet; of the others all two.
        excluded: values that are never there together.
    """
    three = {option: options[option] for option in options if option in triples}
    missing = dict.fromkeys([*products(three, 3, excluded), *products(options, 2, excluded)])
    excludes = {
        (option, value): [each for each in excluded if value in each.get(option, ())]
        for option, values in options.items()
        for value in values
    }
    rows: list[dict[str, str]] = []
    while missing:
        first = dict(next(iter(missing)))
        draws = (random.Random(TRIES * len(rows) + number) for number in range(TRIES))
        made = (_row(options, three, first, missing, excludes, draw) for draw in draws)
        candidates = list(islice(filter(None, made), CANDIDATES))
        if not candidates:
            raise ValueError(f"no row has {first}: name it among what is impossible")
        best = max(candidates, key=lambda row: len(_new(row, three, missing)))
        for values in _new(best, three, missing):
            del missing[values]
        rows.append({option: best[option] for option in options})
    return rows


def _row(
    options: Mapping[str, Sequence[str]],
    three: Mapping[str, Sequence[str]],
    first: Row,
    missing: Mapping[Values, None],
    excludes: Mapping[tuple[str, str], Excluded],
    draw: random.Random,
) -> dict[str, str] | None:
    """One that begins with some values; None: what was drawn ends where nothing fits.

    Args:
        excludes: by option and value, what is excluded and has that value.
    """
    row = dict(first)
    others = [option for option in options if option not in row]
    draw.shuffle(others)
    for option in others:
        values = [
            v for v in options[option] if not is_excluded(row | {option: v}, excludes[option, v])
        ]
        if not values:
            return None
        draw.shuffle(values)
        row[option] = max(
            values, key=lambda v: len(_new({**row, option: v}, three, missing, option))
        )
    return row


def _new(
    row: Row,
    three: Mapping[str, Sequence[str]],
    missing: Mapping[Values, None],
    option: str = "",
) -> list[Values]:
    """The values that meet for the first time in a row: all, or those of one option."""
    of_it = [(option, row[option])] if option else []
    others = [each for each in row.items() if each[0] != option]
    some = [each for each in others if each[0] in three and (not option or option in three)]
    size = 2 - len(of_it)
    met = chain(combinations(others, size), combinations(some, size + 1))
    return [values for each in met if (values := tuple(sorted([*of_it, *each]))) in missing]
