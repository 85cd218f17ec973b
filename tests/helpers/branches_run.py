"""Runs the plans of `branches.py`: annotated on all ranks, and in one process on the batches of all
ranks.
"""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from composable import checkpoint, fully_shard, no_sync, reduce_gradients, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from tests.extensions.rows import Emulated, Rows
from tests.helpers import events
from tests.helpers.branches import ROWS, SKIP, WIDTH, WORDS, Op, Part, Plan, RootOf, Unit, plan_of
from tests.helpers.communicators import Delayed, Log, Recording, all_ordered
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import current_device, set_timeout

Ways = Mapping[str, str]
PATIENCE: Final = 20.0  # seconds until a collective gives up

OPTIMIZERS: Final[dict[str, Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


# --- modules ------------------------------------------------------------------------------------


class Piece(nn.Module):
    """The module of a part. `place` is where in the root's forward it is called; `ways` says what
    it does there.

    Args:
        sends: whether weights of bytes are; otherwise they are rounded alike.
    """

    def __init__(self, part: Part, sends: bool) -> None:
        super().__init__()
        self.part = part
        self.inside = nn.ModuleList(Piece(each, sends) for each in part.inside)
        match part.kind:
            case "layer":
                kind = Emulated if part.form == "bytes" and not sends else nn.Linear
                self.layer = kind(WIDTH, WIDTH, dtype=torch.float64)
                if part.form == "bytes" and sends:
                    self.layer.weight = nn.Parameter(Rows(self.layer.weight.detach()))
            case "scale":
                self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
            case "heads" | "outputs":
                self.first, self.second = _linear(), _linear()
            case "experts":
                self.experts = nn.ModuleList(_linear() for _ in range(ROWS))
            case "table":
                self.emb = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
            case "pair":
                self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
                self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, words: Tensor, ways: Ways, place: str) -> Any:
        for inner in self.inside:
            name = f"{place}.{inner.part.name}"
            if ways.get(name) == SKIP:
                continue
            x = joined(inner(x, words, ways, name), ways.get(name, ""))
        way = ways.get(place, self.part.ways[0])
        if way == "constant":
            with torch.no_grad():
                return torch.ones_like(self._own(x, words, self.part.ways[0])[0])
        if way == "identity":
            return x
        with torch.set_grad_enabled(torch.is_grad_enabled() and way != "unrecorded"):
            y = self._own(x, words, way)
        if way == "detached":
            y = tuple(each.detach() for each in y)
        return (x + y[0], y[1]) if len(y) == 2 else x + y[0]

    def _own(self, x: Tensor, words: Tensor, way: str) -> tuple[Tensor, ...]:
        match self.part.kind:
            case "layer":
                return (self.layer(x).tanh(),)
            case "scale":
                return (x * self.scale,)
            case "heads":
                called = {
                    "both": (self.first, self.second),
                    "first": (self.first,),
                    "second": (self.second,),
                }.get(way, ())
                return (sum([head(x).tanh() for head in called], start=torch.zeros_like(x)),)
            case "outputs":
                return self.first(x).tanh(), self.second(x).sin()
            case "experts":
                return (self._routed(x, way),)
            case "table":
                y = torch.zeros_like(x)
                if "lookup" in way:
                    y = y + (
                        F.embedding(words, self.emb.weight, sparse=True)
                        if self.part.sparse
                        else self.emb(words)
                    )
                if "logits" in way:
                    y = y + (x @ self.emb.weight.t()).softmax(-1) @ self.emb.weight
                return (y,)
            case _:
                h = self.norm(x)
                y = (
                    F.linear(h, self.head.weight).sin()
                    if way in ("both", "read")
                    else torch.zeros_like(x)
                )
                # backward enters the unit by it, also where it counts for nothing
                called = self.head(h).tanh()
                return (y + called * (0.0 if way == "read" else 1.0),)

    def _routed(self, x: Tensor, way: str) -> Tensor:
        y = torch.zeros_like(x)
        if way == "none":
            return y
        to = torch.tensor([int(number) for number in way.removeprefix("all ")], device=x.device)
        for number, expert in enumerate(self.experts):
            chosen = (to == number).nonzero().flatten()
            if len(chosen) or way.startswith("all"):
                y = y.index_add(0, chosen, expert(x[chosen]).tanh())
        return y


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def joined(found: Any, way: str) -> Tensor:
    """What the caller of a part makes of what it returns."""
    if not isinstance(found, tuple):
        return found  # type: ignore[no-any-return]
    return {"first": found[0], "second": found[1]}.get(way, found[0] + found[1])  # type: ignore[no-any-return]


class Root(nn.Module):
    def __init__(self, root: RootOf, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self.root = root
        self.first = _linear()
        self.parts = nn.ModuleDict({name: pieces[name] for name in root.chain})

    def forward(self, x: Tensor, words: Tensor, ways: Ways) -> Tensor:
        h = self.first(x)
        y = x if self.root.beside else h
        for index, name in enumerate(self.root.chain):
            place = f"{index}.{name}"
            if ways.get(place) == SKIP:
                continue
            y = joined(self.parts[name](y, words, ways, place), ways.get(place, ""))
        return h + y  # type: ignore[no-any-return]


def model_of(plan: Plan, *, sends: bool = False) -> nn.ModuleDict:
    """All roots, before they are annotated."""
    torch.manual_seed(plan.seed)
    pieces = {part.name: Piece(part, sends) for part in plan.parts}
    model = nn.ModuleDict({root.name: Root(root, pieces) for root in plan.roots}).to(
        current_device()
    )
    freeze(model, plan.frozen, True)
    return model


def freeze(model: nn.ModuleDict, names: Sequence[str], frozen: bool) -> None:
    found: dict[str, nn.Module] = {
        module.part.name: module for module in model.modules() if isinstance(module, Piece)
    }
    found |= dict(model.items())
    for name in names:
        part, _, below = name.partition(".")
        target: Any = found[part]
        for attribute in below.split(".") if below else ():
            target = getattr(target, attribute)
        target.requires_grad_(not frozen)


def units_of(model: nn.ModuleDict, plan: Plan) -> Iterator[tuple[list[nn.Module], Unit]]:
    """The modules of every unit, innermost first."""
    seen: set[nn.Module] = set()

    def below(piece: Piece) -> Iterator[tuple[list[nn.Module], Unit]]:
        for inner in piece.inside:
            yield from below(inner)  # type: ignore[arg-type]
        if piece.part.unit is not None:
            yield (
                [piece.norm, piece.head] if piece.part.kind == "pair" else [piece],
                piece.part.unit,
            )  # type: ignore[list-item]

    for root in model.values():
        for piece in root.parts.values():
            if piece not in seen:
                seen.add(piece)
                yield from below(piece)
        if root.root.unit is None:
            yield [root.first], Unit("shard")
        elif not plan.together:
            yield [root], root.root.unit
    if plan.together:
        assert plan.roots[0].unit is not None
        yield list(model.values()), plan.roots[0].unit


def _distribute(model: nn.ModuleDict, tensor: DeviceMesh) -> None:
    """Layers over the tensor-parallel dimension."""
    styles = {
        "columns": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rows": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    for module in model.modules():
        if isinstance(module, Piece) and module.part.form in styles:
            parallelize_module(module.layer, tensor, styles[module.part.form]())


def annotate(model: nn.ModuleDict, plan: Plan, mesh: DeviceMesh | None) -> None:
    """All units.

    Args:
        mesh: of hybrid units, or data parallel and tensor parallel.
    """
    data = None
    if plan.tensor > 1:
        assert mesh is not None
        _distribute(model, mesh["tensor"])
        data = mesh["data"]
    for modules, unit in units_of(model, plan):
        target: Any = modules if len(modules) > 1 else modules[0]
        if unit.verb == "replicate":
            replicate(
                target,
                grad_reduce=unit.grad_reduce,
                bucket_cap_mb=0.0002,
                gradient_as_bucket_view=unit.views,
                mesh=data,
            )
        else:
            hybrid = mesh if unit.hybrid else data
            fully_shard(
                target,
                reshard_after_forward=unit.reshard,
                prefetch=unit.prefetch,
                grad_reduce=unit.grad_reduce,
                mesh=hybrid,
            )
    for module in model.modules():
        if isinstance(module, Piece) and module.part.checkpoint:
            checkpoint(module)


def _scale_gradients(model: nn.ModuleDict, plan: Plan) -> None:
    """In one process each unit's `grad_reduce` is a factor of the sum over all batches."""
    scaled: set[nn.Parameter] = set()
    for modules, unit in units_of(model, plan):
        factor = unit.factor(plan.ranks)
        for parameter in [each for module in modules for each in module.parameters()]:
            if parameter not in scaled:
                scaled.add(parameter)
                trains = parameter.requires_grad
                # torch registers hooks only where a gradient may come
                parameter.requires_grad_(True)
                parameter.register_hook(lambda gradient, factor=factor: gradient * factor)
                parameter.requires_grad_(trains)


# --- running ------------------------------------------------------------------------------------


class Side:
    """The models of one side, and what a plan does with them.

    Args:
        ranks: whose batches it computes.
        annotated: on this rank; otherwise it is the reference.
    """

    def __init__(
        self, plan: Plan, ranks: Sequence[int], *, annotated: bool, mesh: DeviceMesh | None = None
    ) -> None:
        self.plan, self.ranks, self.annotated = plan, ranks, annotated
        self.models = [model_of(plan, sends=annotated)]
        self.losses: dict[int, list[Tensor]] = {}
        if annotated:
            annotate(self.models[0], plan, mesh)
        else:
            _scale_gradients(self.models[0], plan)
        self.optimizers = [self._optimizer(0)]
        self._event: Iterator[None] = iter(())

    def _optimizer(self, model: int) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.plan.optimizer](self.models[model].parameters())  # type: ignore[no-any-return]

    def _loss(self, op: Op, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.plan.seed + 10 * op.numbers[0] + rank)
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(current_device())
        words = torch.randint(0, WORDS, (ROWS,), generator=generator).to(current_device())
        x.requires_grad_(self.plan.input_grad and op.kind == "forward")
        return self.models[op.model][op.root](x, words, op.ways[rank]).square().mean()  # type: ignore[no-any-return]

    def gradients(self, model: int) -> Mapping[str, Tensor | None]:
        """Of what the optimizer steps: after `unshard` modules may hold whole parameters."""
        names = [name for name, _ in self.models[model].named_parameters()]
        held = [each for group in self.optimizers[model].param_groups for each in group["params"]]
        return full_gradients(zip(names, held, strict=True))

    def end_event(self) -> None:
        for _ in self._event:
            pass

    def _scene(self, op: Op) -> events.Scene:
        """Roots in which this rank takes other ways than others, and all parts by themselves."""
        (rank,), model = self.ranks, self.models[op.model]
        draw = random.Random(f"{self.plan.seed} {op} {rank}")
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=current_device())
        words = torch.zeros(ROWS, dtype=torch.long, device=current_device())

        def ways(piece: Piece, place: str) -> dict[str, str]:
            found = {place: draw.choice((*piece.part.ways, "constant"))}
            for inner in piece.inside:
                found |= ways(inner, f"{place}.{inner.part.name}")  # type: ignore[arg-type]
            return found

        def run(root: str, of: nn.ModuleDict) -> None:
            chosen: dict[str, str] = {}
            for index, name in enumerate(of[root].root.chain):
                chosen |= ways(of[root].parts[name], f"{index}.{name}")
            of[root](x, words, chosen)

        def run_part(name: str, of: nn.ModuleDict) -> None:
            of.get_submodule(name)(x, words, {}, "")

        # With gradients, parameters are whole in forwards of their units only.
        shown = all(parameter.grad is None for parameter in model.parameters())
        pieces = [name for name, each in model.named_modules() if isinstance(each, Piece)]
        return events.Scene(
            model,
            op.numbers == (rank,),
            [partial(run, root) for root in model],
            [partial(run_part, name) for name in pieces] if shown else [],
            draw,
            self.optimizers[op.model],
        )

    def perform(self, op: Op) -> None:
        model, optimizer = self.models[op.model], self.optimizers[op.model]
        match op.kind:
            case "forward":
                self.losses[op.numbers[0]] = [self._loss(op, rank) for rank in self.ranks]
            case "evaluate":
                with torch.no_grad():
                    self.losses[op.numbers[0]] = [self._loss(op, rank) for rank in self.ranks]
            case "backward":
                with no_sync(model, level=op.how) if self.annotated and op.how else nullcontext():
                    for losses in zip(*(self.losses[number] for number in op.numbers), strict=True):
                        torch.stack(losses).sum().backward(retain_graph=op.retain)
            case "reduce" if self.annotated:
                reduce_gradients(model)
            case "freeze" | "unfreeze":
                freeze(model, op.names, op.kind == "freeze")
            case "step":
                optimizer.step()
            case "zero":
                optimizer.zero_grad(set_to_none=op.how != "zeros")
            case "event" if self.annotated:
                self.end_event()
                self._event = events.perform(op.names[0], self._scene(op))
                next(self._event)
            case "resume" if self.annotated:
                next(self._event, None)
            case "copy":
                self.models.append(copy.deepcopy(model))
                if not self.annotated:
                    _scale_gradients(self.models[-1], self.plan)
                self.optimizers.append(self._optimizer(len(self.models) - 1))


def differences(
    plan: Plan, mesh: DeviceMesh | None = None, *, annotated: bool = True
) -> tuple[list[str], list[str]]:
    """Run a plan: how it ends otherwise than in one process, and the sharded collectives that this
    rank launched.

    Args:
        annotated: False runs the plan in one process twice, which shows whether it is legal.
    """
    log, rank = Log(), dist.get_rank() // plan.tensor
    draw = random.Random(f"{plan.seed} {dist.get_rank()}")

    def wrapped(comm: Comm) -> Comm:
        if comm.size == 1:
            return comm
        inner: Any = all_ordered(comm) if plan.seed % 2 else comm
        return Recording(Delayed(inner, draw) if plan.seed % 3 else inner, log)  # type: ignore[return-value]

    everyone = range(plan.ranks)
    plain = Side(plan, everyone, annotated=False)
    try:
        with comms_wrapped_by(wrapped):
            ours = Side(plan, [rank] if annotated else everyone, annotated=annotated, mesh=mesh)
    except Exception as error:
        return [f"annotating: {_said(error)}"], []
    log.events.clear()
    held: frozenset[int] = frozenset()
    for number, op in enumerate(plan.ops):
        plain.perform(op)  # an error here is one of the plan
        try:
            ours.perform(op)
            held = plan.held_after(op, held)
            found = list(_compare(plain, ours, op, op.model in held))
        except Exception as error:
            found = [_said(error)]
        if found:  # later ones would only hide it
            return [f"op {number}, {op.kind}: {line}" for line in found[:6]], []
    try:
        ours.end_event()
    except Exception as error:
        return [f"the end of an event: {_said(error)}"], []
    return [], [label for label in log.labels() if "all-reduce" not in label]


def _said(error: Exception) -> str:
    raised = traceback.extract_tb(error.__traceback__)[-1]
    text = "\n".join([*str(error).splitlines()[:4], *getattr(error, "__notes__", [])])
    return f"{type(error).__name__} in {Path(raised.filename).name}, line {raised.lineno}: {text}"


def _compare(plain: Side, ours: Side, op: Op, held: bool) -> Iterator[str]:
    if op.kind in ("forward", "evaluate"):
        losses = plain.losses[op.numbers[0]]
        for mine, expected in zip(
            ours.losses[op.numbers[0]], [losses[rank] for rank in ours.ranks], strict=True
        ):
            yield from _differ("the loss", mine.detach(), expected.detach())
    elif op.kind in ("backward", "reduce") and not held:
        yield from _by_name(
            "gradient of ",
            ours.gradients(op.model),
            plain.gradients(op.model),
        )
    elif op.kind in ("step", "copy"):
        which = -1 if op.kind == "copy" else op.model
        yield from _by_name(
            "", full_parameters(ours.models[which]), full_parameters(plain.models[which])
        )


def _by_name(
    what: str, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> Iterator[str]:
    if list(actual) != list(expected):
        yield f"the names {list(actual)} are not {list(expected)}"
        return
    for name in expected:
        yield from _differ(f"{what}{name}", actual[name], expected[name])


def _differ(what: str, actual: Tensor | None, expected: Tensor | None) -> Iterator[str]:
    if actual is None or expected is None:
        if actual is not expected:
            yield (
                f"{what} is {'None' if actual is None else 'there'}, and should"
                f" {'be' if actual is None else 'not be'}"
            )
        return
    actual, expected = (each.to_dense() if each.is_sparse else each for each in (actual, expected))
    if not torch.allclose(actual, expected, rtol=1e-8, atol=1e-10):
        apart = (actual - expected).abs().max().item()
        yield f"{what} is off by {apart:.3g} of {expected.abs().max().item():.3g}"


def _mesh_of(plan: Plan) -> DeviceMesh:
    if plan.tensor > 1:
        shape, names = (plan.ranks, plan.tensor), ("data", "tensor")
        return init_device_mesh(current_device().type, shape, mesh_dim_names=names)
    shape = (plan.replicas, plan.ranks // plan.replicas)
    return init_device_mesh(current_device().type, shape)


def run_plans(plans: Sequence[Plan], annotated: bool = True) -> list[tuple[list[str], list[str]]]:
    """What each plan brings on this rank; ends with the first that fails. Runs on every rank."""
    results = []
    meshes: dict[tuple[int, int], DeviceMesh | None] = {(0, 1): None}
    for plan in plans:
        form = plan.replicas, plan.tensor
        if form not in meshes:
            meshes[form] = made = _mesh_of(plan)
            for group in made.get_all_groups():
                set_timeout(group, PATIENCE)
        try:
            # torch's, of backward hooks where inputs need no gradient; copies keep the hooks
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                results.append(differences(plan, meshes[form], annotated=annotated))
        except Exception as error:
            raise AssertionError(f"{plan}") from error
        if results[-1][0]:
            break
    return results


def run_seeds(
    seeds: Sequence[int], without: Sequence[str] = (), annotated: bool = True
) -> list[tuple[list[str], list[str]]]:
    return run_plans([plan_of(seed, dist.get_world_size(), without) for seed in seeds], annotated)
