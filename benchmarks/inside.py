"""Shows where composable's host time goes: pieces of one unit's way through a step.

Looks into the library; compares nothing.

Every piece is timed where it happens (`in place`), and in another process a few times more directly
afterwards (`again`, the least): the same work on the same data, which the caches have by then.
Pieces that cannot be done twice have no such figure. `torch's calls of empty hooks` is what hooks
that do nothing add to an un-annotated model, in the places where composable has its own;
`everything else` is what forward and backward add beside all these, as measured without any clock
inside.

    python benchmarks/inside.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from contenders import LOCAL, scale
from harness import Measure, Rounds, Sample, compete, device_of, series, spread, world_of
from models import Task
from options import parse, parser
from overhead import make_task
from publish import bars, emit, rounded, table
from torch import Tensor, nn

PLAIN, IN_PLACE, AGAIN, HOOKED = "composable", "in place", "again", "empty hooks"
REPEATS = 5


@dataclass(frozen=True)
class Piece:
    """Functions that make up one piece, as "module:class.method" below `composable`."""

    title: str
    functions: tuple[str, ...]
    repeatable: bool = False


PIECES = (
    Piece("all-gathers of the faked group", ("comm.base:GroupComm.all_gather",), True),
    Piece("reduce-scatter of the faked group", ("comm.base:GroupComm.reduce_scatter",), True),
    Piece("parameters out of the message", ("engine.params.param_group:Gather.copy_out",), True),
    Piece("gradients into the message", ("engine.gradients.reduction:ReducePlan.copy_in",), True),
    Piece("gradients taken from parameters", ("engine.gradients.grad_bucket:GradBucket._take",)),
    Piece("gradients onto parameters", ("engine.gradients.grad_bucket:GradBucket._deliver",)),
    Piece("checks before forward", ("engine.step.prepare:Preparation.run",), True),
    Piece(
        "version counters",
        (
            "engine.params.param_group:ParamGroup._follow_writes",
            "engine.params.param_group:ParamGroup._look_for_writes",
            "engine.params.param_group:set_versions",
        ),
        True,
    ),
    Piece(
        "which form modules hold",
        ("engine.params.param:ParameterSwap.swap_in", "engine.params.param:ParameterSwap.swap_out"),
        True,
    ),
    Piece("outputs watched", ("engine.step.visit:watch",)),
    Piece("memory", ("memory.elastic:ElasticBuffer.allocate", "memory.elastic:ElasticBuffer.free")),
)
HOOKS = "torch's calls of empty hooks"
REST = "everything else"


class Clock:
    """Adds up what the pieces take in one step."""

    def __init__(self, *, again: bool) -> None:
        self._again = again
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.seconds = {piece.title: 0.0 for piece in PIECES}
        self.calls = {piece.title: 0.0 for piece in PIECES}

    def attach(self, piece: Piece) -> None:
        """Time the piece's functions from here on, in this process."""
        for path in piece.functions:
            module, _, name = path.partition(":")
            owner: Any = import_module(f"composable.{module}")
            *classes, attribute = name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            setattr(owner, attribute, self._timed(getattr(owner, attribute), piece))

    def _timed(self, function: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
        title, clock = piece.title, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            taken = clock() - start
            if self._again:
                if not piece.repeatable:
                    return result
                taken = min(self._once_more(function, args, kwargs) for _ in range(REPEATS))
            self.seconds[title] += taken
            self.calls[title] += 1
            return result

        return timed

    def _once_more(self, function: Callable[..., Any], args: Any, kwargs: Any) -> float:
        start = time.perf_counter()
        function(*args, **kwargs)
        return time.perf_counter() - start


def hook(task: Task) -> None:
    """Put a hook that does nothing wherever composable has one: around each unit, before its
    output, behind its gradients.
    """

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda *gradients: None)

    for unit in task.model.modules():
        if isinstance(unit, task.units):
            unit.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs), prepend=True, with_kwargs=True
            )
            unit.register_forward_hook(watch, always_call=True)
            for parameter in unit.parameters():
                parameter.register_post_accumulate_grad_hook(lambda parameter: None)


def build(label: str, options: argparse.Namespace) -> Measure:
    """One training step per call, without an optimizer: seconds of the host for all of it, and for
    each piece.
    """
    device = device_of(options)
    task = make_task(options)
    clock = Clock(again=label == AGAIN)
    if label in (IN_PLACE, AGAIN):
        for piece in PIECES:
            clock.attach(piece)
    if label == HOOKED:
        hook(task)
    model = scale(
        LOCAL if label in (LOCAL, HOOKED) else PLAIN,
        task.model,
        task.units,
        device=device,
        world=world_of(options),
    )
    step = 0

    def measure() -> Sample:
        nonlocal step
        clock.start()
        start = time.perf_counter()
        task.loss(model, step).backward()
        taken = time.perf_counter() - start
        model.zero_grad()
        step += 1
        calls = {f"calls of {title}": number for title, number in clock.calls.items()}
        return {"step": taken, **clock.seconds, **calls}

    return measure


def pieces_table(rounds: Rounds, units: int) -> tuple[str, dict[str, dict[str, float]]]:
    """Microseconds per unit of each piece: the table, and the same for the chart."""

    def per_unit(label: str, metric: str) -> dict[str, float]:
        found = spread(series(rounds, label, metric))
        return {name: 1e6 * seconds / units for name, seconds in found.items()}

    def added(label: str) -> dict[str, float]:
        pairs = zip(series(rounds, label, "step"), series(rounds, LOCAL, "step"), strict=True)
        return spread(1e6 * (seconds - alone) / units for seconds, alone in pairs)

    found = {piece.title: per_unit(IN_PLACE, piece.title) for piece in PIECES}
    pieces = sorted(PIECES, key=lambda piece: -found[piece.title]["median"])
    shown = {piece.title: found[piece.title] for piece in pieces} | {HOOKS: added(HOOKED)}
    total = added(PLAIN)["median"]
    rest = total - sum(values["median"] for values in shown.values())
    rows = []
    for piece in pieces:
        calls = series(rounds, IN_PLACE, f"calls of {piece.title}")[0] / units
        again = f"{per_unit(AGAIN, piece.title)['median']:.1f}" if piece.repeatable else ""
        rows.append([piece.title, f"{calls:.1f}", f"{shown[piece.title]['median']:.1f}", again])
    rows.append([HOOKS, "", f"{shown[HOOKS]['median']:.1f}", ""])
    rows += [
        [REST, "", f"{rest:.1f}", ""],
        ["added by forward and backward", "", f"{total:.1f}", ""],
    ]
    shown[REST] = {"median": rest, "min": rest, "max": rest}
    return table(["microseconds per unit and step", "calls", IN_PLACE, AGAIN], rows), shown


def main() -> None:
    options = parser(__doc__.splitlines()[0], rounds=11, steps=5, warmup=2)
    options.set_defaults(fake_world=8)
    options.add_argument("--units", type=int, default=32)
    options.add_argument(
        "--params",
        type=int,
        default=0,
        help="parameters per unit; 0: a transformer block, which has 12",
    )
    found = parse(options, units=2)
    rounds = compete(build, [LOCAL, PLAIN, IN_PLACE, AGAIN, HOOKED], found)
    pieces, shown = pieces_table(rounds, found.units)
    what = (
        f"{found.units} transformer blocks"
        if not found.params
        else f"{found.units} units of {found.params} parameters"
    )
    title = (
        f"Where the host's time goes: {what}, fake process group of {found.fake_world} ranks,"
        f" {found.device}"
    )

    def draw(path: Path) -> None:
        bars(path, title, "microseconds per unit and step, in place", shown, digits=0)

    data = {"units": found.units, "params": found.params, "seconds": rounded(rounds)}
    emit("inside", found, title=title, tables=[pieces], data=data, draw=draw)


if __name__ == "__main__":
    main()
