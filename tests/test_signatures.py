"""The signatures of all public names are those of `signatures.txt`.

python -m tests.test_signatures rewrites it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import composable
from composable import forecast, fsdp2, traversal
from docs.reference import FSDP2, MODULES, public_errors

SNAPSHOT: Final = Path(__file__).with_name("signatures.txt")
# functions of the package make them; how is not public
MADE: Final = ("HostOffload", "Installation", "LocalSteps", "OptimizerInBackward", "Watch")
NAMES: Final = [name for name in composable.__all__ if name not in (*MODULES, "__version__")]


def _signature(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:  # an error, or an enumeration
        return name
    parts, last = [], None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and last not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        last = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(last, "")
        kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}{kind}{default}")
    returns = signature.return_annotation
    said = "" if returns is signature.empty else f" -> {returns}"
    return f"{name}({', '.join(parts)}){said}"


def _lines(prefix: str, owner: Any, names: Iterator[str] | list[str]) -> Iterator[str]:
    for name in names:
        thing = getattr(owner, name)
        if not callable(thing):
            yield f"{prefix}{name}"
            continue
        yield f"{prefix}{name}" if name in MADE else _signature(f"{prefix}{name}", thing)
        if not isinstance(thing, type) or issubclass(thing, Enum):
            continue
        # methods of private bases are the class's own
        tables = [vars(c) for c in thing.__mro__ if c is thing or c.__name__.startswith("_")]
        members = {key: value for table in reversed(tables) for key, value in table.items()}
        for key in sorted(members):
            value = members[key]
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            if not key.startswith("_") and inspect.isfunction(value):
                yield "    " + _signature(f"{name}.{key}", value)
            elif not key.startswith("_") and isinstance(value, property):
                yield f"    {name}.{key}"
        if "__exit__" in members:
            yield f"    {name} is a context manager"


def signatures() -> str:
    """One line for each function, class, method and property; then the names of errors."""
    lines = [
        *_lines("", composable, sorted(NAMES)),
        *_lines("forecast.", forecast, sorted(forecast.__all__)),
        *_lines("fsdp2.", fsdp2, sorted(FSDP2)),
        *_lines("traversal.", traversal, sorted(traversal.__all__)),
        *(f"errors.{error.__name__}" for error in public_errors()),
    ]
    return "".join(f"{line}\n" for line in lines)


def test_public_signatures_are_those_of_the_snapshot() -> None:
    before, now = SNAPSHOT.read_text().splitlines(), signatures().splitlines()
    changed = [f"- {each}" for each in before if each not in now]
    changed += [f"+ {each}" for each in now if each not in before]
    assert before == now, (
        "public signatures have changed. If that is meant, say it in CHANGELOG, then run"
        " python -m tests.test_signatures\n" + "\n".join(changed)
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(signatures())
