"""Random trees of units and random programs, all from one seed.

Every rank makes the same tree and the same program, and draws by itself which parameters it leaves
out. The reference is the same program on a plain copy, whose gradients are averaged over the ranks.

Programs never do what is documented not to work: units that run on some ranks only, and checkpoints
around units that ranks recompute at different points (`steady`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import checkpoint, fully_shard, no_sync, reduce_gradients, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from tests.helpers import events
from tests.helpers.communicators import Delayed, Log, Recording, all_ordered
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.events import MIXED, REPLICAS, SHARDS, events_of
from tests.helpers.world import current_device

WIDTH: Final = 4
UNHELD: Final = ("compare", "event", "resume")  # steps outside of `no_sync`


@dataclass
class Node:
    """One module of a tree: some layers of its own, between modules inside it.

    Attributes:
        verbs: what it is annotated with.
        listed: annotated together with the sibling before it, as one unit.
        branches: the modules inside run side by side, in place of one after the other.
        steady: nothing is left out after the last module inside, since a checkpoint around it is
            recomputed there.
    """

    name: str
    layers: int
    inside: list[Node] = field(default_factory=list)
    verbs: tuple[str, ...] = ()
    listed: bool = False
    branches: bool = False
    steady: bool = False
    returns: str = ""  # besides its result: "two" tensors that it made, or what it was "given"
    plain: bool = False  # returns what it was given when it leaves out all layers
    reshard: bool | int = True
    hybrid: bool = False  # sharded over the mesh of the plan, if that has one
    again: int = -1  # which of the modules inside is called a second time

    def everything(self) -> Iterator[Node]:
        yield self
        for node in self.inside:
            yield from node.everything()

    def __str__(self) -> str:
        marks = [
            *self.verbs,
            *(
                name
                for name in ("listed", "branches", "steady", "plain", "returns")
                if getattr(self, name)
            ),
        ]
        marks += (
            [f"reshard={self.reshard}", *(["hybrid"] if self.hybrid else [])]
            if "shard" in self.verbs
            else []
        )
        marks += [f"again={self.again}"] if self.again >= 0 else []
        inner = " ".join(map(str, self.inside))
        return f"({self.name} {self.layers} {' '.join(marks)}{' ' if inner else ''}{inner})"


@dataclass(frozen=True)
class Plan:
    """All that a seed decides."""

    seed: int
    tree: Node
    program: tuple[tuple[Any, ...], ...]
    leave_out: float  # how often a rank leaves out a layer
    delays: bool
    replicas: int = 0  # of the mesh that hybrid units are sharded over
    held: tuple[str, ...] = ()  # for each step, the level of `no_sync` around it, if it is in one

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.replicas or 'no'} replicas, {self.tree}; " + ", ".join(
            " ".join(map(str, step)) + (f" (held: {level})" if level else "")
            for step, level in zip_longest(self.program, self.held, fillvalue="")
        )


# --- from a seed to a plan ----------------------------------------------------------------------


def plan_of(seed: int, ranks: int) -> Plan:
    draw = random.Random(seed)
    tree = tree_of(draw, ranks)
    program, leave_out, delays = (
        tuple(_program(draw)),
        draw.choice([0.0, 0.2, 0.5, 0.8]),
        draw.random() < 0.5,
    )
    replicas = _make_hybrid(tree, draw, ranks)
    held = _held(tree, draw, len(program))
    # from numbers of their own: the rest of a seed's plan does not depend on them
    steps = list(_with_events(program, held, tree, random.Random(f"{seed} events"), ranks))
    program, held = tuple(step for step, _ in steps), tuple(level for _, level in steps)
    return Plan(seed, tree, program, leave_out, delays, replicas, held)


def _with_events(
    program: Sequence[tuple[Any, ...]],
    held: Sequence[str],
    tree: Node,
    draw: random.Random,
    ranks: int,
) -> Iterator[tuple[tuple[Any, ...], str]]:
    """A program, and what one rank does by itself where no backward is to come. Before it gradients
    are compared and dropped: with some, scopes show whole parameters in forwards only.
    """
    verbs = {verb for node in tree.everything() for verb in node.verbs} & {"shard", "replicate"}
    kind = MIXED if len(verbs) > 1 else SHARDS if "shard" in verbs else REPLICAS
    names, often, goes_on = (
        events_of(kind, unused=True, held=any(held)),
        draw.choice([0.0, 0.3, 0.8]),
        False,
    )
    if any(step[0] == "drop" for step in program):
        # A rank in evaluation mode does not count a forward that the others give up, or goes on in
        # it and still counts one (docs/failures.md).
        names = [name for name in names if name != "eval_mode"]
    pending: set[int] = set()
    for place, (step, level) in enumerate(zip_longest(program, held, fillvalue="")):
        if verbs and not pending and draw.random() < often:
            yield from [(("compare", "zero"), "")] if place else []
            yield from [(("resume",), "")] if goes_on else []
            yield ("event", draw.choice(names), draw.randrange(ranks)), ""
            goes_on = True
        if step[0] == "drop":
            # A forward that raises gives it up, too, on one rank only.
            names = [name for name in names if not name.startswith("failed_evaluation")]
        match step:
            case ("forward", number):
                pending.add(number)
            case ("backward", _, "retain"):
                pass
            case ("backward" | "both" | "drop", *numbers):
                pending -= set(numbers)
        yield step, level  # type: ignore[misc]


def _held(tree: Node, draw: random.Random, steps: int) -> tuple[str, ...]:
    often = draw.choice([0.0, 0.5, 0.8])
    levels = [
        draw.choice(["all", "all", "replicate"]) if draw.random() < often else ""
        for _ in range(steps)
    ]
    annotated = any(
        verb in ("shard", "replicate") for node in tree.everything() for verb in node.verbs
    )
    return tuple(levels) if annotated else ()


def _make_hybrid(tree: Node, draw: random.Random, ranks: int) -> int:
    """Some units, all or none; the number of their replicas."""
    replicas: int = draw.choice([0, 0, ranks, *([2, 2, 2] if ranks == 4 else [])])
    often = draw.choice([1.0, 0.5])
    for node in tree.everything():
        node.hybrid = replicas > 0 and draw.random() < often
        if node.hybrid and replicas == ranks and node.reshard == 2:
            node.reshard = True
    return replicas


def tree_of(
    draw: random.Random,
    ranks: int,
    flavours: Sequence[str] = ("shard", "shard", "mixed", "replicate"),
) -> Node:
    budget = [draw.randint(1, 12)]

    def grow(name: str, depth: int) -> Node:
        budget[0] -= 1
        node = Node(
            name,
            draw.randint(0, 3),
            branches=draw.random() < 0.3,
            returns=draw.choice(["", "", "", "two", "given"]),
        )
        node.plain = draw.random() < 0.3
        while (
            depth < 4
            and budget[0] > 0
            and len(node.inside) < 5
            and draw.random() < (0.95 if depth == 0 else 0.5)
        ):
            node.inside.append(grow(f"{name}.{len(node.inside)}".removeprefix("root."), depth + 1))
        if not node.inside:
            node.layers = max(1, node.layers)
        elif draw.random() < 0.2:
            node.again = draw.randrange(len(node.inside))
        return node

    root = grow("root", 0)
    several = bool(root.inside) and draw.random() < 0.25  # roots, in a module that nobody annotates
    flavour = draw.choice(flavours)

    def verb() -> str:
        return flavour if flavour != "mixed" else draw.choice(["shard", "replicate"])

    for node in root.everything():
        if node is root:
            node.verbs = () if several else (verb(),)
        elif (several and node in root.inside) or draw.random() < 0.6:
            node.verbs = (verb(),)
        node.reshard = draw.choice([True, True, False, *([2] if ranks == 4 else [])])
        if draw.random() < 0.2 and node.verbs:
            node.verbs = (*node.verbs, "checkpoint")
    if several:
        root.layers = 0
    for node in root.everything():
        for before, after in zip(node.inside, node.inside[1:], strict=False):
            alike = (
                before.verbs == after.verbs == ("shard",) and not before.inside and not after.inside
            )
            if alike and not before.listed and draw.random() < 0.3:
                after.listed = True
        if "checkpoint" in node.verbs:
            for below in node.everything():
                below.steady, below.plain = True, False
    return root


def _program(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    pending: list[int] = []
    forwards = 0
    for _ in range(draw.randint(2, 8)):
        kind = draw.choice(
            ["forward", "forward", "backward", "backward", "both", "evaluate", "compare", "drop"]
        )
        if kind == "forward" and len(pending) < 3:
            forwards += 1
            pending.append(forwards)
            yield "forward", forwards
        elif kind == "backward" and pending:
            chosen = draw.choice(pending)
            retain = draw.random() < 0.25
            if not retain:
                pending.remove(chosen)
            yield "backward", chosen, "retain" if retain else ""
        elif kind == "both" and len(pending) > 1:
            chosen, other = pending[-1], pending[-2]
            del pending[-2:]
            yield "both", chosen, other
        elif kind == "evaluate":
            forwards += 1
            yield "evaluate", forwards
        elif kind == "drop" and pending and draw.random() < 0.3:
            yield "drop", pending.pop(draw.randrange(len(pending)))
        elif kind == "compare":
            yield ("compare", "zero") if draw.random() < 0.5 else ("compare",)
    yield "forward", forwards + 1
    for chosen in [*pending, forwards + 1]:
        yield "backward", chosen, ""
    yield ("compare",)


# --- modules ------------------------------------------------------------------------------------


class Piece(nn.Module):
    """The module of one node. `where` tells calls apart, also when one is recomputed: ranks leave
    out by it.
    """

    def __init__(self, node: Node, leave_out: float) -> None:
        super().__init__()
        self.node = node
        self.leave_out = leave_out
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(node.layers))
        self.inside = nn.ModuleList(type(self)(each, leave_out) for each in node.inside)

    def _layer(self, index: int, x: Tensor, where: tuple[int, ...]) -> Tensor:
        last = self.node.steady and index >= len(self.layers) - 1
        rank = dist.get_rank()
        if (
            not last
            and random.Random(f"{rank} {where} {self.node.name} {index}").random() < self.leave_out
        ):
            return x
        return x + self.layers[index](x).tanh()  # type: ignore[no-any-return]

    def calls(self) -> list[int]:
        """The modules inside, by number, in the order in which they are called."""
        return [*range(len(self.inside)), *([self.node.again] if self.node.again >= 0 else [])]

    def forward(self, x: Tensor, where: tuple[int, ...]) -> Any:
        index, outputs = 0, []
        given = x
        x = x if self.node.plain else x.sin()
        for call, inner in enumerate(self.calls()):
            if index < len(self.layers) - 1:
                x = self._layer(index, x, where)
                index += 1
            found = self.inside[inner](x, (*where, call))
            y = found[0] + found[1] if isinstance(found, tuple) else found
            if self.node.branches:
                outputs.append(y)
            else:
                x = y
        x = sum(outputs, start=x) if outputs else x
        for last in range(index, len(self.layers)):
            x = self._layer(last, x, where)
        return {"two": (x, x.cos()), "given": (x, given)}.get(self.node.returns, x)


def annotate(piece: Piece, mesh: DeviceMesh | None = None) -> None:
    """All modules inside, innermost first.

    Args:
        mesh: of hybrid units.
    """
    pieces: list[Piece] = list(piece.inside)  # type: ignore[arg-type]
    for inner in pieces:
        annotate(inner, mesh)
    for index, inner in enumerate(pieces):
        if not inner.node.listed:
            _annotate_together(
                [inner, *(after for after in pieces[index + 1 : index + 2] if after.node.listed)],
                mesh,
            )


def _annotate_together(pieces: list[Piece], mesh: DeviceMesh | None) -> None:
    node = pieces[0].node
    for verb in node.verbs:
        target: Any = pieces if len(pieces) > 1 else pieces[0]
        if verb == "shard":
            fully_shard(
                target, reshard_after_forward=node.reshard, mesh=mesh if node.hybrid else None
            )
        elif verb == "replicate":
            replicate(target, bucket_cap_mb=0.0002)
        else:
            checkpoint(target)


# --- running ------------------------------------------------------------------------------------


class _Runner:
    """One model and what a program does with it."""

    def __init__(
        self, plan: Plan, annotated: bool, log: Log, ordered: bool, mesh: DeviceMesh | None
    ) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = Piece(plan.tree, plan.leave_out).to(torch.float64)
        self.losses: dict[int, Tensor] = {}
        self.accumulates = annotated and any(plan.held)
        self.annotated = annotated
        self._event: Iterator[None] = iter(())
        if not annotated:
            return
        draw = random.Random(f"{plan.seed} {dist.get_rank()}")

        def wrapped(comm: Comm) -> Comm:
            if comm.size == 1:
                return comm
            inner: Any = all_ordered(comm) if ordered else comm
            return Recording(Delayed(inner, draw) if plan.delays else inner, log)  # type: ignore[return-value]

        with comms_wrapped_by(wrapped):
            holder = nn.ModuleList([self.model])
            root = Piece(Node("", 0), 0.0)
            root.inside = holder
            annotate(root, mesh)

    def _forward(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            1000 * self.plan.seed + 10 * number + dist.get_rank()
        )
        x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(
            torch.is_grad_enabled()
        )
        found = self.model(x, (number,))
        return (found[0] * found[1] if isinstance(found, tuple) else found).square().mean()  # type: ignore[no-any-return]

    def perform(self, step: tuple[Any, ...], level: str) -> None:
        if self.accumulates and level:
            with no_sync(self.model, level=level):
                self._perform(step)
            return
        self._perform(step)
        if self.accumulates and step[0] == "compare":
            reduce_gradients(self.model)

    def _perform(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("forward", number):
                self.losses[number] = self._forward(number)
            case ("evaluate", number):
                with torch.no_grad():
                    self._forward(number)
            case ("backward", number, "retain"):
                self.losses[number].backward(retain_graph=True)
            case ("backward", number, _):
                self.losses.pop(number).backward()
            case ("both", number, other):
                (self.losses.pop(number) + self.losses.pop(other)).backward()
            case ("drop", number):
                del self.losses[number]
            case ("event", name, acting) if self.annotated:
                self.end_event()
                self._event = events.perform(name, self._scene(name, acting))
                next(self._event)
            case ("resume",) if self.annotated:
                next(self._event, None)

    def end_event(self) -> None:
        for _ in self._event:
            pass

    def _scene(self, name: str, acting: int) -> events.Scene:
        """Forwards that leave out other layers, and all modules by themselves."""
        draw = random.Random(f"{self.plan.seed} {name} {dist.get_rank()}")
        x = torch.randn(2, WIDTH, dtype=torch.float64, device=current_device())

        def run(name: str, model: nn.Module) -> None:
            model.get_submodule(name)(x, (draw.randrange(100),))

        pieces = [name for name, each in self.model.named_modules() if isinstance(each, Piece)]
        calls, parts = [partial(run, "")], [partial(run, name) for name in pieces[1:]]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        return events.Scene(self.model, acting == dist.get_rank(), calls, parts, draw, optimizer)


def differences(
    plan: Plan, *, ordered: bool, mesh: DeviceMesh | None = None
) -> tuple[list[str], list[str]]:
    """Run a plan: in what the gradients differ from those of one process, and the sharded
    collectives that were launched.
    """
    log = Log()
    plain, ours = _Runner(plan, False, log, ordered, mesh), _Runner(plan, True, log, ordered, mesh)
    found: list[str] = []
    log.events.clear()
    for number, (step, level) in enumerate(zip_longest(plan.program, plan.held, fillvalue="")):
        for runner in (plain, ours):
            runner.perform(step, "" if step[0] in UNHELD else level)  # type: ignore[arg-type]
        if step[0] == "compare":
            found += [f"at step {number}: {line}" for line in _compare(plain.model, ours.model)]
            if step[1:]:
                plain.model.zero_grad()
                ours.model.zero_grad()
    ours.end_event()
    return found, [label for label in log.labels() if "all-reduce" not in label]


def _compare(plain: nn.Module, ours: nn.Module) -> Iterator[str]:
    actual = full_gradients(ours)
    for name, mean in averaged_gradients(plain).items():
        gradient = actual[name]
        if mean is None or gradient is None:
            if mean is not gradient:
                yield f"{name} is {'None' if gradient is None else 'there'}, and should not be"
        elif not torch.allclose(gradient, mean, rtol=1e-8, atol=1e-10):
            yield f"{name} is off by {(gradient - mean).abs().max().item():.3g}"


def run_seeds(seeds: list[int], ordered: bool) -> list[tuple[int, list[str], list[str]]]:
    """What each seed brings on this rank. Runs on every rank."""
    results = []
    ranks, meshes = dist.get_world_size(), dict[int, DeviceMesh]()
    for seed in seeds:
        plan = plan_of(seed, ranks)
        replicas = plan.replicas
        if replicas and replicas not in meshes:
            meshes[replicas] = init_device_mesh(
                current_device().type, (replicas, ranks // replicas)
            )
        try:
            found, launched = differences(plan, ordered=ordered, mesh=meshes.get(replicas))
        except Exception as error:
            raise AssertionError(f"{plan}") from error
        results.append((seed, found, launched))
        if found:
            break  # later ones would only hide it
    return results
