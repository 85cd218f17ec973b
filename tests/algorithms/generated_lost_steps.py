"""Steps that ranks lose at drawn places of drawn models, in `together`: all ranks lose them, say
the same, and end with the bits of a run that never had these batches.

    python -m tests.algorithms.generated_lost_steps --minutes 60 --seed 0
    python -m tests.algorithms.generated_lost_steps --count 1 --seed 4711  # one of them again
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from composable import (
    EMA,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    keep_unsharded,
    no_sync,
    offload_activations,
    reduce_gradients,
    replicate,
    together,
    unshard,
)
from composable.comm import observe_launches
from composable.comm.launch import Launch
from composable.engine.step.unit import units_below
from composable.errors import CommunicationError, RanksDisagreeError
from tests.helpers.compare import all_full
from tests.helpers.world import Pool, RanksFailed, current_device

WIDTH: Final = 5  # uneven over 2, 3 and 4 ranks
PATIENCE: Final = 30.0  # seconds until a collective gives up
ERRORS: Final = {
    each.__name__: each
    for each in (MemoryError, ValueError, torch.OutOfMemoryError, KeyError, AssertionError)
}


# --- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What some ranks do in a step.

    Attributes:
        place: a name that the model or the step comes by; "launch N" is before that launch.
        again: they go on so often before.
    """

    place: str
    ranks: tuple[int, ...]
    error: str
    again: int


@dataclass(frozen=True)
class Plan:
    """A model, its steps, and what goes wrong in every other one of these."""

    seed: int
    world: int
    verb: str
    units: tuple[str, ...]
    after: bool | None
    precision: str
    recomputed: str
    offload: str
    norm: bool
    frozen: bool
    unused: bool
    hooks: bool
    micro_batches: int
    reduces: str
    unshards: bool
    evaluates: str
    clips: bool
    averages: bool
    optimizer: str
    faults: tuple[Fault, ...]


def plan_of(seed: int) -> Plan:
    draw = random.Random(seed)
    world = draw.choice((2, 2, 2, 3, 4))
    verbs = ["fully_shard"] * 4 + ["replicate", "mixed", "beside"] + ["hybrid"] * (world == 4)
    verb, micro_batches = draw.choice(verbs), draw.choice((1, 1, 2, 3))
    shards = verb != "replicate"
    plan = Plan(
        seed=seed,
        world=world,
        verb=verb,
        units=draw.choice(((), ("Inner",), ("Block",), ("Block", "Inner"), ("Stem", "Block"))),
        after=draw.choice((None, True, False)),
        precision=draw.choice(("", "", "", "param", "reduce")),
        recomputed=draw.choice(("", "", "Block", "Inner")),
        offload=draw.choice(("", "", "", "", "params", "activations")) if shards else "",
        norm=draw.random() < 0.5,
        frozen=draw.random() < 0.3,
        unused=draw.random() < 0.3,
        hooks=draw.random() < 0.3,
        micro_batches=micro_batches,
        reduces=draw.choice(("each", "last", "last", "reduce_gradients")),
        unshards=shards and draw.random() < 0.25,
        evaluates=draw.choice(("", "", "", "before", "behind", "kept before", "kept behind")),
        clips=draw.random() < 0.5,
        averages=draw.random() < 0.2,
        optimizer=draw.choice(("sgd", "adamw")),
        faults=(),
    )
    faults = []
    for _ in range(5):
        place = draw.choice(PLACES) if draw.random() < 0.8 else f"launch {draw.randrange(30)}"
        count = draw.choice((1, 1, 1, 1, world, draw.randint(1, world)))
        ranks = tuple(sorted(draw.sample(range(world), count)))
        again = draw.choice((0, 0, 0, 1)) if "launch" not in place else 0
        faults.append(Fault(place, ranks, draw.choice([*ERRORS]), again))
    return Plan(**{**vars(plan), "faults": tuple(faults)})


# --- places --------------------------------------------------------------------------------------


class _Faults:
    """What this rank does now.

    Attributes:
        fault: of the step that runs.
        mine: this rank raises.
        raised: it has.
    """

    fault: Fault | None = None
    mine = raised = False
    left = 0


def at(place: str, *_: object) -> None:
    """Raise here, if this rank is to."""
    fault = _Faults.fault
    if fault is None or not _Faults.mine or fault.place != place or _Faults.raised:
        return
    if _Faults.left:
        _Faults.left -= 1
        return
    _Faults.raised = True
    raise ERRORS[fault.error](f"planned at {place}")


class _Trap(torch.autograd.Function):
    """Comes by a place in backward."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        at(ctx.place)
        return gradient, None


def _passes(x: Tensor, place: str) -> Tensor:
    """Come by the place: now, in backward at a node, and in a hook."""
    at(place)
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x
    x = _Trap.apply(x, f"{place} backward")
    x.register_hook(partial(at, f"{place} hook"))
    return x


class Inner(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(_passes(x, self.name)))


class Stem(Inner):
    pass


class Block(nn.Module):
    def __init__(self, name: str, *, norm: bool) -> None:
        super().__init__()
        self.name = name
        self.first, self.second = Inner(f"{name}.first"), Inner(f"{name}.second")
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(_passes(x, f"{self.name} begin"))
        y = self.norm(_passes(y * self.scale, f"{self.name} middle"))
        y = self.second(self.dropout(y))
        return x + _passes(y, f"{self.name} end")


class Model(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(plan.seed)
        self.stem = Stem("stem")
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", norm=plan.norm) for i in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = Inner("unused") if plan.unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(_passes(x, "root begin"))
        for number, block in enumerate(self.blocks):
            x = _passes(block(x), f"root behind {number}")
        y: Tensor = _passes(self.head(x), "root end")
        return y


_INSIDE: Final = [
    "stem",
    *(f"blocks.{i}.{inner}" for i in range(2) for inner in ("first", "second")),
    *(f"blocks.{i} {where}" for i in range(2) for where in ("begin", "middle", "end")),
    *("root begin", "root behind 0", "root behind 1", "root end"),
]
_AROUND: Final = [
    "step begin", "forward", "loss", "backward", "clip", "reduce", "evaluation", "step end",
    "landed stem", "landed head", "module backward", "pre-forward",
]  # fmt: skip
PLACES: Final = [f"{place}{kind}" for place in _INSIDE for kind in ("", " backward", " hook")] + [
    *_AROUND
]


# --- runs ----------------------------------------------------------------------------------------


def _annotate(model: Model, plan: Plan) -> None:
    classes = {each for each in (Stem, Inner, Block) if each.__name__ in plan.units}
    if Inner not in classes and Stem not in classes and plan.verb == "beside":
        classes.add(Block)
    options: dict[str, Any] = {}
    if plan.precision == "param":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, full_precision_classes=(nn.BatchNorm1d,)
        )
    elif plan.precision == "reduce":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for kind in (Block, Inner):
        if plan.recomputed == kind.__name__:
            checkpoint(model, policy={kind})
    if plan.offload == "activations":
        offload_activations(model, policy={Block})
    if plan.verb == "replicate":
        replicate(model, **options)
        return
    if plan.verb == "mixed":
        replicate(model.blocks[0], **options)
    if plan.verb == "beside":
        replicate(model.blocks[1].second, **options)
    if plan.verb == "hybrid":
        options["mesh"] = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    if plan.offload == "params":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model, policy=classes or None, reshard_after_forward=plan.after, **options)


def _batch(number: int, micro_batch: int) -> Tensor:
    seed = 10_000 * number + 100 * micro_batch + dist.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(current_device())


class Run:
    """A model and its steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = Model(plan).to(current_device())
        if plan.frozen:
            self.model.blocks[0].first.requires_grad_(False)
        _annotate(self.model, plan)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(trained, lr=0.1, momentum=0.9)
            if plan.optimizer == "sgd"
            else torch.optim.AdamW(trained, lr=0.01)
        )
        self.average = EMA(self.model, decay=0.9) if plan.averages else None
        if plan.hooks:
            for name, module in (("stem", self.model.stem), ("head", self.model.head)):
                weight = module.weight if name == "head" else module.linear.weight
                weight.register_post_accumulate_grad_hook(partial(at, f"landed {name}"))
            inner = self.model.blocks[1].second
            inner.register_full_backward_hook(partial(at, "module backward"))
            inner.register_forward_pre_hook(partial(at, "pre-forward"))

    def _evaluate(self, number: int) -> None:
        kept = self.plan.evaluates.startswith("kept") and self.plan.verb != "replicate"
        self.model.eval()
        try:
            with keep_unsharded(self.model) if kept else nullcontext(), torch.no_grad():
                self.model(_batch(number, 9))
                at("evaluation")
        finally:
            self.model.train()

    def _compute(self, number: int) -> None:
        plan, model = self.plan, self.model
        at("step begin")
        if plan.evaluates.endswith("before"):
            self._evaluate(number)
        if plan.unshards:
            unshard(model)
        for micro_batch in range(plan.micro_batches):
            last = micro_batch == plan.micro_batches - 1
            holds = plan.reduces == "reduce_gradients" or (plan.reduces == "last" and not last)
            with no_sync(model, enabled=holds):
                at("forward")
                y = model(_batch(number, micro_batch))
                at("loss")
                loss = _passes(y.square().mean(), "loss")
                loss.backward()
                at("backward")
        at("reduce")
        if plan.reduces == "reduce_gradients":
            reduce_gradients(model)
        at("clip")
        if plan.clips:
            clip_grad_norm_(model.parameters(), 1.0)
        if plan.evaluates.endswith("behind"):
            self._evaluate(number)
        at("step end")

    def step(self, number: int) -> together:
        torch.manual_seed(number)
        scope = together(self.model, give_up_after=99)
        try:
            with scope:
                self._compute(number)
            if not scope.lost:
                self.optimizer.step()
                if self.average is not None:
                    self.average.update()
        finally:
            self.optimizer.zero_grad()
        return scope

    @torch.no_grad()
    def state(self) -> list[Tensor]:
        averages = [] if self.average is None else self.average.state_dict()["averages"].values()
        averages = [each for each in averages if isinstance(each, nn.Parameter)]
        return [*all_full([*self.model.parameters()]), *self.model.buffers(), *averages]


@contextmanager
def _planned(fault: Fault) -> Iterator[None]:
    _Faults.fault, _Faults.left = fault, fault.again
    _Faults.mine, _Faults.raised = dist.get_rank() in fault.ranks, False
    seen = 0

    def note(comm: object, launch: Launch, *_: object) -> None:
        nonlocal seen
        if launch.text.startswith("vote"):  # behind the step
            _Faults.fault = None
        at(f"launch {seen}")
        seen += 1

    end = observe_launches(launching=note)
    try:
        yield
    finally:
        end()
        _Faults.fault = None


def _unit_of(model: Model, path: str) -> str:
    """The name of the unit that computes what is at the path of a module."""
    owners = {id(module): unit.name for unit in units_below([model]) for module in unit.modules}
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = model.get_submodule(".".join(names[:end]))
        if id(module) in owners:
            return owners[id(module)]
    raise AssertionError(path)


def _expected(run: Run, fault: Fault) -> str:
    """What `why` says of the place, where that is known."""
    if fault.again or run.plan.evaluates or fault.place.startswith("launch"):
        return ""
    if fault.place in _AROUND:
        outside = fault.place in ("step begin", "forward", "reduce", "clip")
        return "outside of all units" if outside else ""
    place = fault.place.removesuffix(" backward").removesuffix(" hook")
    if place == "root end" and place != fault.place:
        return ""  # a hook there may run before backward comes to the root
    path = place.split(" ")[0].replace("root", "")
    unit = _unit_of(run.model, path)
    if place == fault.place:
        return f"in the forward of unit '{unit}'"
    # backward has come to the innermost unit last, if the place is in one
    known = unit == path and path.endswith("second")
    return f"in backward, near unit '{unit}'" if known else "in backward"


def _lose(run: Run, number: int, fault: Fault) -> str:
    """Run a step that some ranks may lose. Returns what is wrong; nothing if all is as it must be.
    Without a rank that comes by the place the step is not lost, and `number` is in `kept`.
    """
    error: Exception | None = None
    lost, why = False, ""
    with _planned(fault):
        try:
            scope = run.step(number)
            lost, why = scope.lost, scope.why
        except CommunicationError:
            raise
        except Exception as raised:  # on all ranks
            error, lost = raised, True
    said: list[Any] = [None] * dist.get_world_size()
    try:
        mine = _Faults.raised, lost, why, type(error).__name__, str(error)
        dist.all_gather_object(said, mine)
    except RanksDisagreeError as apart:
        raise apart from error
    raisers = [rank for rank, (raised, *_) in enumerate(said) if raised]
    if len(raisers) == len(said):
        wrong = [each for each in said if each[3] != fault.error]
        return f"all raised, and not all say so: {said}" if wrong else ""
    if any(each[1:] != said[0][1:] for each in said):
        return f"ranks say different things: {said}"
    if error is not None:
        return "".join(traceback.format_exception(error))
    if lost != bool(raisers):
        return f"lost is {lost}, and {raisers} raised"
    if not lost:
        return ""
    texts = why.split("; ")
    if [text.partition(":")[0] for text in texts] != [f"rank {rank}" for rank in raisers]:
        return f"{raisers} raised, and why is {why}"
    expected = _expected(run, fault)
    for text in texts:
        if f" {fault.error} " not in text or f"planned at {fault.place}" not in text:
            return f"why is {text}"
        if expected and expected not in text and not (run.plan.recomputed and "recomp" in text):
            return f"why is {text}, and not {expected}"
    return "lost"


def run_plan(plan: Plan) -> list[str]:
    """Returns what is wrong."""
    run, reference = Run(plan), Run(plan)
    number = 0
    for number in range(3):
        for each in (run, reference):
            if each.step(number).lost:
                return [f"good step {number} is lost"]
    for fault in plan.faults:
        number += 1
        said = _lose(run, number, fault)
        gathered: list[Any] = [None] * plan.world
        dist.all_gather_object(gathered, said)
        if any(each not in ("", "lost") for each in gathered):
            return [f"{fault}: {said}" if said else ""]
        everywhere = len(fault.ranks) == plan.world
        if said == "" and not everywhere:
            reference.step(number)  # nobody came by
        elif said == "":
            came: list[Any] = [None] * plan.world
            dist.all_gather_object(came, _Faults.raised)
            if not any(came):
                reference.step(number)
        number += 1
        for each in (run, reference):
            if each.step(number).lost:
                return [f"the step behind {fault} is lost: {each}"]
        names = [name for name, _ in run.model.named_parameters()]
        pairs = enumerate(zip(run.state(), reference.state(), strict=True))
        apart = [index for index, (mine, theirs) in pairs if not torch.equal(mine, theirs)]
        if apart:
            what = [names[index] if index < len(names) else f"buffer {index}" for index in apart]
            return [f"behind {fault}: other bits in {what}"]
    return []


def run_plans(plans: Sequence[Plan]) -> list[list[str]]:
    """Of each plan what is wrong on this rank; nothing of those behind one that is."""
    found: list[list[str]] = []
    for plan in plans:
        try:
            found.append(run_plan(plan))
        except Exception:
            found.append([traceback.format_exc()])
        if found[-1]:
            break
    return found


def failure(pool: Pool, plans: Sequence[Plan]) -> tuple[int, str] | None:
    """The first of the plans (of one number of ranks) that fails, and how."""
    try:
        by_rank = pool.run(
            plans[0].world, run_plans, list(plans), timeout=20 * PATIENCE, group_timeout=PATIENCE
        )
    except RanksFailed as error:
        pool.stop()
        returned = getattr(error, "returned", None)
        if returned is None or not any(each for each in returned if any(each)):
            return 0, str(error)
        by_rank = returned
    index = min((len(each) - 1 for each in by_rank if each and each[-1]), default=None)
    if index is None:
        return None
    pool.stop()
    return index, "\n".join(
        f"rank {rank}: {text}"
        for rank, each in enumerate(by_rank)
        for text in (each[index] if len(each) > index else ())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run steps that ranks lose.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    options = parser.parse_args()
    end, pool, done, failed = time.monotonic() + 60 * options.minutes, Pool(), 0, []
    while time.monotonic() < end and not (options.count and done >= options.count):
        plan = plan_of(options.seed + done)
        found = failure(pool, [plan])
        if found is not None:
            failed.append(plan.seed)
            print(f"--- {plan}\n{found[1]}\n", flush=True)
        done += 1
    pool.stop()
    print(f"{done} programs, {len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
