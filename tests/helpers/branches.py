"""Random programs whose ranks and steps take different branches inside of units, all from one seed.

A plan is a value: models, annotations and operations are written out in it, with what each rank
does in each forward. So it can be printed, repeated and made smaller. The reference runs the same
operations in one process, on the batches of all ranks.

Plans never do what is documented not to work: all ranks run the same units in the same order, and
backward enters the same units on all ranks. What differs by rank is inside of a unit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tests.helpers.events import EVENTS, GATHERED, MIXED, REPLICAS, SHARDS, events_of

T = TypeVar("T")
WIDTH: Final = 4
ROWS: Final = 3  # of a batch
WORDS: Final = 5  # rows of a table

# What a plan can be drawn without.
FEATURES: Final = (
    "branches",  # ranks and steps that take other ways
    "frozen",  # parameters frozen and unfrozen at any place of a step
    "roots",  # several annotated models over shared parts
    "together",  # ... as one unit
    "inner",  # units in units
    "again",  # a part called twice in one forward
    "reads",  # weights read outside of their module
    "sparse",
    "lists",  # units of several modules
    "factors",  # `grad_reduce`
    "copies",  # copy.deepcopy
    "mixed",  # both verbs
    "hybrid",
    "checkpoint",
    "held",  # `no_sync`
    "retain",  # two backwards through one graph
    "holder",  # annotated modules in one that nobody annotates
    "options",  # `prefetch`, `gradient_as_bucket_view`
    "skips",  # ranks and steps that do not call a replicated unit
    "events",  # what one rank does by itself between steps
    "scopes",  # ... and what each rank does in a scope that all ranks open
    "tensor",  # layers distributed over a tensor-parallel dimension
    "bytes",  # weights with FSDP2's extension protocol, which are sent as bytes
)
SKIP: Final = "skip"

# What each kind of part does: the first way is the usual one.
WAYS: Final[dict[str, tuple[str, ...]]] = {
    "layer": ("apply", "identity", "detached", "unrecorded"),
    "scale": ("apply", "identity", "detached"),
    "heads": ("both", "first", "second", "neither"),  # which are called
    "outputs": ("both", "first", "second"),  # which of two outputs the caller uses
    # where the tokens go; "all": experts without tokens are called, too
    "experts": ("012", "000", "112", "all 000", "none"),
    "table": ("lookup", "logits", "lookup logits", "identity"),
    # of a norm and a head: whether the head's weight is read between the two
    "pair": ("both", "call", "read"),
}
PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "layer": ("layer.weight", "layer.bias"),
    "scale": ("scale",),
    "heads": ("first", "second.bias"),
    "outputs": ("first", "second.bias"),
    "experts": ("experts.0", "experts.1.weight"),
    "table": ("emb.weight",),
    "pair": ("norm", "head.weight"),
}


@dataclass(frozen=True)
class Unit:
    """How a module is annotated."""

    verb: str
    reshard: bool | int | None = True
    grad_reduce: str | float = "mean"
    hybrid: bool = False
    prefetch: int = 1
    views: bool = False

    def __str__(self) -> str:
        marks = [f"reshard={self.reshard}"] if self.verb == "shard" else []
        marks += ["hybrid"] if self.hybrid else []
        marks += [f"prefetch={self.prefetch}"] if self.prefetch != 1 else []
        marks += ["views"] if self.views else []
        marks += [str(self.grad_reduce)] if self.grad_reduce != "mean" else []
        return f"{self.verb}({', '.join(marks)})"

    def factor(self, ranks: int) -> float:
        """Of the sum over the ranks."""
        return {"mean": 1 / ranks, "sum": 1.0}.get(str(self.grad_reduce)) or 1 / float(
            self.grad_reduce
        )


@dataclass(frozen=True)
class Part:
    """A module that does one thing after what is inside it; several roots may share it."""

    name: str
    kind: str
    unit: Unit | None = None
    checkpoint: bool = False
    sparse: bool = False  # lookups of a table
    form: str = ""  # of a layer's weight: "columns" or "rows" are distributed, "bytes" are sent
    inside: tuple[Part, ...] = ()

    def everything(self) -> Iterator[Part]:
        yield self
        for part in self.inside:
            yield from part.everything()

    @property
    def has_unit(self) -> bool:
        return any(part.unit is not None for part in self.everything())

    @property
    def is_replicated(self) -> bool:
        """Whether it is a replicated unit, in which nothing is sharded."""
        units = [part.unit for part in self.everything()]
        return self.unit is not None and all(
            unit is None or unit.verb == "replicate" for unit in units
        )

    @property
    def ways(self) -> tuple[str, ...]:
        """Where ranks recompute units inside, all must come to the end of this one."""
        return WAYS[self.kind][:1] if self.checkpoint and self.inside else WAYS[self.kind]

    def __str__(self) -> str:
        marks = [
            self.kind,
            *(["sparse"] if self.sparse else []),
            *([f"of {self.form}"] if self.form else []),
            *(["checkpoint"] if self.checkpoint else []),
        ]
        inside = f" [{', '.join(map(str, self.inside))}]" if self.inside else ""
        return f"{self.name}: {' '.join(marks)} {self.unit or ''}".rstrip() + inside


@dataclass(frozen=True)
class RootOf:
    """A model: `first`, a layer that is always used, and a chain of parts, by name, behind it or
    (`beside`) on the same input.
    """

    name: str
    chain: tuple[str, ...]
    unit: Unit | None  # None: nobody annotates it, but all that it holds is annotated
    beside: bool = False

    def __str__(self) -> str:
        return (
            f"{self.name} {self.unit or 'not annotated'}: first"
            f" {'+ ' if self.beside else ''}{' '.join(self.chain)}"
        )


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        model: 0 is the first one, 1 its first copy, ...
        numbers: of the forward that is run, or of those whose losses are summed for a backward; of
            the rank that acts in an event.
        ways: by rank, what parts do that is not the usual, by their place in the forward.
        names: of parts, of parameters, or of an event.
        how: level of `no_sync` around a backward; "zeros": gradients are set to zeros, not to None.
    """

    kind: str
    model: int = 0
    root: str = ""
    numbers: tuple[int, ...] = ()
    ways: tuple[Mapping[str, str], ...] = ()
    names: tuple[str, ...] = ()
    how: str = ""
    retain: bool = False

    def __str__(self) -> str:
        words = [self.kind, *([f"of copy {self.model}"] if self.model else []), self.root]
        words += [
            *map(str, self.numbers),
            *self.names,
            f"({self.how})" if self.how else "",
            "(retain)" if self.retain else "",
        ]
        said = [" ".join(f"{place} {way}" for place, way in ways.items()) for ways in self.ways]
        said = (
            said[:1]
            if len(set(said)) == 1
            else [f"rank {rank}: {text or 'as usual'}" for rank, text in enumerate(said)]
        )
        return " ".join(filter(None, words)) + (f" {{{', '.join(said)}}}" if any(said) else "")


@dataclass(frozen=True)
class Plan:
    """All that a seed decides.

    Attributes:
        ranks: data-parallel ones, each with batches of its own.
        tensor: tensor-parallel ranks for each of them, which do the same.
    """

    seed: int
    ranks: int
    parts: tuple[Part, ...]
    roots: tuple[RootOf, ...]
    ops: tuple[Op, ...]
    optimizer: str = "sgd"
    replicas: int = 0  # of the mesh of hybrid units
    together: bool = False  # the roots are one unit
    input_grad: bool = True
    frozen: tuple[str, ...] = ()  # before the annotation
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.ranks * self.tensor

    def held_after(self, op: Op, held: frozenset[int]) -> frozenset[int]:
        """The models that hold gradients which are not reduced, after `op`."""
        if op.kind == "backward" and op.how:
            return held | {op.model}
        # A backward reduces what its root holds, and others may have none that takes part.
        alone = len(self.roots) == 1 and self.roots[0].unit is not None
        return (
            held - {op.model}
            if op.kind in ("reduce", "zero") or (op.kind == "backward" and alone)
            else held
        )

    @property
    def units(self) -> list[Unit]:
        annotated = [each.unit for part in self.parts for each in part.everything()]
        roots = [root.unit or Unit("shard") for root in self.roots]
        return [*roots, *(unit for unit in annotated if unit is not None)]

    @property
    def consists_of(self) -> str:
        """Shards, replicas or both."""
        verbs = dict.fromkeys(unit.verb for unit in self.units)
        return (
            MIXED if len(verbs) > 1 else {"shard": SHARDS, "replicate": REPLICAS}[next(iter(verbs))]
        )

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def __str__(self) -> str:
        marks = [f"seed {self.seed}: {self.ranks} ranks", self.optimizer]
        marks += [f"{self.tensor} tensor-parallel ones each"] if self.tensor > 1 else []
        marks += [f"{self.replicas} replicas"] if self.replicas else []
        marks += ["roots are one unit"] if self.together else []
        marks += [] if self.input_grad else ["inputs need no gradient"]
        marks += [f"frozen before: {' '.join(self.frozen)}"] if self.frozen else []
        return "\n".join(
            [
                ", ".join(marks),
                *map(str, self.roots),
                *map(str, self.parts),
                *(f"  {number} {op}" for number, op in enumerate(self.ops)),
            ]
        )


# --- from a seed to a plan ----------------------------------------------------------------------


class _Draw(random.Random):
    def __init__(self, seed: int | str, without: Sequence[str]) -> None:
        super().__init__(seed)
        assert set(without) <= set(FEATURES), without
        self._without = without

    def may(self, feature: str, often: float) -> bool:
        return self.random() < often and feature not in self._without

    def some(self, values: Sequence[T]) -> tuple[T, ...]:
        """One or more of them, in their order."""
        chosen = self.sample(range(len(values)), self.randint(1, len(values)))
        return tuple(values[index] for index in sorted(chosen))


def plan_of(seed: int, ranks: int, without: Sequence[str] = ()) -> Plan:
    draw, forms = _Draw(seed, without), _Draw(f"{seed} forms", without)
    tensor = 2 if ranks == 4 and forms.may("tensor", 0.4) else 1
    ranks //= tensor
    optimizer = draw.choice(["sgd", "momentum", "adamw"])
    replicas = (
        draw.choice([each for each in (1, 2, 3, 4) if not ranks % each])
        if draw.may("hybrid", 0.3) and tensor == 1
        else 0
    )
    verbs = (
        draw.choice(["shard", "replicate", "mixed"])
        if draw.may("mixed", 0.7)
        else draw.choice(["shard", "replicate"])
    )
    often_hybrid = draw.choice([1.0, 0.5]) if replicas else 0.0

    def unit() -> Unit:
        verb = draw.choice(["shard", "replicate"]) if verbs == "mixed" else verbs
        factor = draw.choice(["sum", 3.0, 0.5]) if draw.may("factors", 0.3) else "mean"
        if verb == "replicate":
            return Unit(verb, grad_reduce=factor, views=draw.may("options", 0.4))
        hybrid = draw.random() < often_hybrid
        per_shard = ranks // replicas if hybrid else ranks
        reshard = draw.choice([True, None, None, False, *([2] if per_shard == 4 else [])])
        prefetch = draw.choice([0, 2]) if draw.may("options", 0.3) else 1
        return Unit(verb, reshard, factor, hybrid, prefetch)

    holder = draw.may("holder", 0.15)

    def part(name: str, *, annotated: bool, depth: int = 0) -> Part:
        kinds = [
            *("layer", "layer", "scale", "heads", "outputs", "experts"),
            *(["table"] if "reads" not in without else []),
            # read in the forward of a root only
            *(["pair"] if "lists" not in without and not holder else []),
        ]
        kind = draw.choice(kinds)
        inside: tuple[Part, ...] = ()
        # a pair's unit has the two modules only
        if depth == 0 and kind != "pair" and draw.may("inner", 0.3):
            often = draw.choice([0.5, 1.0])
            inside = tuple(
                part(f"{name}{letter}", annotated=draw.random() < often, depth=1)
                for letter in "xy"[: draw.randint(1, 2)]
            )
        sparse = kind == "table" and optimizer == "sgd" and draw.may("sparse", 0.5)
        return Part(
            name, kind, unit() if annotated else None, draw.may("checkpoint", 0.25), sparse, inside
        )

    several = draw.choice([2, 2, 3]) if draw.may("roots", 0.4) else 1
    together = several > 1 and not holder and draw.may("together", 0.2)
    names = [f"p{number}" for number in range(draw.randint(1, 4))]
    chains = [draw.sample(names, draw.randint(1, len(names))) for _ in range(several)]
    if several > 1 and not set(chains[0]) & set(chains[1]):
        chains[1].append(chains[0][0])
    for chain in chains:
        if draw.may("again", 0.15):
            chain.append(draw.choice(chain))
    used = [name for name in names if any(name in chain for chain in chains)]
    shared = [name for name in used if sum(name in chain for chain in chains) > 1]
    parts = tuple(
        part(name, annotated=draw.random() < 0.6 or holder or (name in shared and not together))
        for name in used
    )
    own = unit()
    roots = tuple(
        RootOf(
            letter,
            tuple(chain),
            None if holder else own if together else unit(),
            draw.may("branches", 0.2),
        )
        for letter, chain in zip("abc", chains, strict=False)
    )
    input_grad = draw.random() < 0.5
    plan = Plan(seed, ranks, parts, roots, (), optimizer, replicas, together, input_grad)
    ops = _Ops(draw, plan)
    frozen = ops.names() if draw.may("frozen", 0.2) else ()
    ops.frozen[0] = [frozen] if frozen else []
    plan = replace(plan, frozen=frozen, ops=tuple(ops.draw()), tensor=tensor)
    # from numbers of their own: the rest of a seed's plan does not depend on them
    plan = _with_forms(plan, forms)
    return replace(plan, ops=tuple(_with_events(plan, _Draw(f"{seed} events", without))))


def _with_forms(plan: Plan, draw: _Draw) -> Plan:
    """A plan with layers distributed over the tensor-parallel dimension, or sent as bytes."""
    # what is sent in a form of its own cannot be kept over a number of ranks
    can_send = all(unit.reshard in (True, False, None) for unit in plan.units)
    sends = plan.consists_of == SHARDS and can_send and draw.may("bytes", 0.3)
    sent = ["bytes"] if sends else []
    choices = ["columns", "rows", *sent] if plan.tensor > 1 else sent

    def formed(part: Part) -> Part:
        form = draw.choice(choices) if part.kind == "layer" and draw.random() < 0.7 else ""
        return replace(part, form=form, inside=tuple(map(formed, part.inside)))

    return replace(plan, parts=tuple(map(formed, plan.parts))) if choices else plan


def _with_events(plan: Plan, draw: _Draw) -> Iterator[Op]:
    """The operations of a plan, and events at its start and between its steps."""
    held = any(op.kind == "backward" and op.how for op in plan.ops)
    rounded = any(part.form == "bytes" for each in plan.parts for part in each.everything())
    distributed = plan.tensor > 1
    legal = events_of(
        plan.consists_of, unused=True, distributed=distributed, held=held, rounded=rounded
    )
    scopes = [name for name in legal if EVENTS[name][1] == GATHERED]
    # A part that is a root of its own, before a constant, is given up: a rank that goes on in
    # evaluation mode still counts it (docs/failures.md).
    cut = any("constant" in mine.values() for op in plan.ops for mine in op.ways)
    alone = [name for name in legal if name not in scopes and not (cut and name == "eval_mode")]
    often = draw.choice([0.0, 0.5, 0.9])
    models, between, goes_on = 1, True, False
    for op in plan.ops:
        if between and op.kind != "zero":
            between = False
            if goes_on:
                yield Op("resume")
            chosen = alone if draw.may("events", 0.6) else scopes if draw.may("scopes", 1.0) else []
            if chosen and draw.random() < often:
                model, acting = draw.randrange(models), draw.randrange(plan.ranks)
                yield Op("event", model, numbers=(acting,), names=(draw.choice(chosen),))
                goes_on = True
        models += op.kind == "copy"
        between = between or op.kind == "step"
        yield op


class _Ops:
    """Draws operations.

    Attributes:
        frozen: by model, names that were frozen and not unfrozen: more may be frozen by them than
            is.
        blurred: models of which that may be so.
        pending: by number, the model and the root of forwards whose backward is to come.
        held: models that hold gradients which are not reduced.
    """

    def __init__(self, draw: _Draw, plan: Plan) -> None:
        self._draw, self._plan = draw, plan
        self._often = draw.choice([0.0, 0.3, 0.7])
        self._often_held = draw.choice([0.0, 0.0, 0.5]) if draw.may("held", 1.0) else 0.0
        self._models, self._number = 1, 0
        self.frozen: dict[int, list[tuple[str, ...]]] = {0: []}
        self.blurred: dict[int, None] = {}
        parts = [part for each in plan.parts for part in each.everything()]
        self._recomputed = {
            each.name for part in parts if part.checkpoint for each in part.everything()
        }
        self.pending: dict[int, int] = {}
        # Units that ranks skip: a backward through several forwards is right if none before it has
        # left some of them out (docs/failures.md).
        self._skipped = self._left_out = False
        self.held: frozenset[int] = frozenset()

    def names(self) -> tuple[str, ...]:
        """Parts and parameters to freeze. A loss must need gradients on all ranks: without those of
        inputs, of `first`.
        """
        # A checkpointed part with units inside saves something at its end whatever is frozen: see
        # `Part.ways`.
        parts = [
            part
            for each in self._plan.parts
            for part in each.everything()
            if not (part.checkpoint and part.inside)
        ]
        first = [
            f"{root.name}.first{suffix}" for root in self._plan.roots for suffix in ("", ".bias")
        ]
        single = [f"{part.name}.{name}" for part in parts for name in PARAMETERS[part.kind]]
        pools = [[part.name for part in parts], single, first if self._plan.input_grad else []]
        pools = [pool for pool in pools if pool]
        return self._draw.some(self._draw.choice(pools)) if pools else ()

    def draw(self) -> Iterator[Op]:
        for _ in range(self._draw.randint(2, 4)):
            yield from self._step(self._draw.randrange(self._models))

    def _step(self, model: int) -> Iterator[Op]:
        draw = self._draw
        yield from self._freeze(model, 0.2)
        yield self._forward(model)
        for _ in range(draw.randint(0, 4)):
            kind = draw.choice(
                ["forward", "forward", "backward", "backward", "freeze", "evaluate", "copy"]
            )
            if kind == "forward" and len(self.pending) < 3:
                yield self._forward(model)
            elif kind == "backward" and self.pending:
                yield self._backward(
                    model, draw.some(list(self.pending)), retain=draw.may("retain", 0.15)
                )
            elif kind == "freeze":
                yield from self._freeze(model, 1.0)
            elif kind == "evaluate":
                yield self._forward(draw.randrange(self._models), "evaluate")
            elif kind == "copy" and self._models < 3 and draw.may("copies", 0.3):
                self.frozen[self._models] = [*self.frozen[model]]
                self.blurred |= dict.fromkeys([self._models] if model in self.blurred else [])
                self._models += 1
                yield Op("copy", model)
        while self.pending:
            yield from self._freeze(model, 0.2)
            yield self._backward(model, draw.some(list(self.pending)))
        yield from self._freeze(model, 0.2)
        if model in self.held:
            yield Op("reduce", model)
            self.held -= {model}
        yield Op("step", model)
        if draw.random() < 0.9:
            yield Op("zero", model, how="zeros" if draw.random() < 0.2 else "")

    def _freeze(self, model: int, often: float) -> Iterator[Op]:
        if not self._draw.may("frozen", often):
            return
        frozen = self.frozen[model]
        which = self._draw.randrange(len(frozen)) if frozen and self._draw.random() < 0.5 else None
        names = self.names() if which is None else frozen[which]
        if not names:
            return
        there, back = ("freeze", "unfreeze") if which is None else ("unfreeze", "freeze")
        if self.pending and self._are_recomputed(names):
            # Recomputation must save what the forward saved, in one process too: all is as it was
            # before backward.
            if len(frozen) == (which is not None) and model not in self.blurred:
                yield Op(there, model, names=names)
                yield self._forward(model, "evaluate")
                yield Op(back, model, names=names)
            return
        if which is None:
            frozen.append(names)
        else:
            del frozen[which]
            if frozen:
                self.blurred[model] = None
        yield Op(there, model, names=names)

    def _are_recomputed(self, names: tuple[str, ...]) -> bool:
        """Whether parameters of a checkpointed part are among them."""
        parts = {part.name: part for each in self._plan.parts for part in each.everything()}
        below = {name: parts[name].everything() if name in parts else () for name in names}
        return any(
            name.split(".")[0] in self._recomputed
            or any(part.name in self._recomputed for part in below[name])
            for name in names
        )

    def _forward(self, model: int, kind: str = "forward") -> Op:
        self._number += 1
        if kind == "forward":
            self.pending[self._number] = model
        root = self._draw.choice(self._plan.roots)
        return Op(kind, model, root.name, (self._number,), self._ways(root, model))

    def _backward(self, model: int, numbers: tuple[int, ...], *, retain: bool = False) -> Op:
        if self._skipped:
            numbers, retain = tuple(self.pending), False
        for number in numbers if not retain else ():
            del self.pending[number]
        self._left_out = bool(self.pending)
        self._skipped = self._skipped and self._left_out
        how = (
            self._draw.choice(["all", "all", "replicate"])
            if self._draw.random() < self._often_held
            else ""
        )
        op = Op("backward", model, numbers=numbers, how=how, retain=retain)
        self.held = self._plan.held_after(op, self.held)
        return op

    def _ways(self, root: RootOf, model: int) -> tuple[Mapping[str, str], ...]:
        ways: list[dict[str, str]] = [{} for _ in range(self._plan.ranks)]
        # Whether nothing before needs a gradient, on some ranks at least. Then only units inside of
        # another that train are sure to be entered in backward, whatever they do.
        cut = root.beside and not self._plan.input_grad
        apart = root.unit is not None and not self.frozen[model]
        entered = False  # whether backward may come to a unit before this place

        inside = False

        def choose(part: Part, place: str) -> None:
            for inner in part.inside:
                choose(inner, f"{place}.{inner.name}")
            if not self._draw.may("branches", self._often):
                return
            skips = inside and part.is_replicated and self._draw.may("skips", 0.5)
            choices = (*part.ways, SKIP) if skips else part.ways
            alike = self._draw.choice(choices)
            same = (cut and not apart) or self._draw.random() < 0.3
            by_rank = [alike if same else self._draw.choice(choices) for _ in ways]
            if SKIP in by_rank and self._left_out:
                return
            self._skipped = self._skipped or SKIP in by_rank
            for mine, way in zip(ways, by_rank, strict=True):
                if way != part.ways[0]:
                    mine[place] = way

        for index, name in enumerate(root.chain):
            part = self._plan.part(name)
            # What is a root of its own, all ranks run: here, or of several models.
            chains = [each.chain for each in self._plan.roots if name in each.chain]
            inside = root.unit is not None and len(chains) == 1
            choose(part, f"{index}.{name}")
            before, entered = entered, entered or part.has_unit
            if not part.checkpoint and self._draw.may("branches", 0.1 if self._often else 0.0):
                # A rank that goes on with a constant goes to no unit before it in backward: then
                # all ranks do so.
                inner = any(each.has_unit for each in part.inside) or part.kind == "pair"
                some = apart and not before and not inner and self._draw.random() < 0.7
                cut, entered = True, part.unit is not None
                for mine in self._draw.some(ways) if some else ways:
                    mine[f"{index}.{name}"] = "constant"
        return tuple(ways)
