"""All options of the verbs that have to work together, and what each of their values does to a
program. To add an option, or a value, add it here.

`FULLY_SHARD`, `REPLICATE` and `OFFLOADED` say which options each array multiplies; the first value
of each option is the one that a program has when it is about others. `IMPOSSIBLE` are products that
no program can be, with the reason, and `REFUSED` those that the library refuses by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composable import (
    EMA,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    join,
    keep_unsharded,
    offload_activations,
    refresh,
    register_comm_hook,
    replicate,
    step_on_matrices,
    summon_full_params,
    together,
    watch,
)
from tests.covering import model as models
from tests.covering.model import Block, Distribute, Net, Up
from tests.covering.run import Run, reloaded, saved_by_torch
from tests.helpers.compare import full_parameters
from tests.helpers.offloading import offloading
from tests.helpers.world import current_device
from tests.meshes.test_dims import Dims
from tests.tensor_parallel.models import full

BF16: Final = torch.bfloat16
F32: Final = torch.float32
F64: Final = torch.float64


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Choice:
    """A value of an option: what a program with it does. Functions of a `Run` find it in any state
    that its name says.

    Attributes:
        keywords: for the verb that the array is about.
        both_verbs: keywords also for the other verb, next to it.
        is_: what the program itself asks for: a `Mesh`, a function that annotates, ...
        tolerance: how far from one process a gradient may be, of its norm.
        coarser: how many times farther it may be, since something amplifies what is rounded.
        both: done to both models, when ours is distributed over dimensions beside data parallel.
        before: done to ours before it is annotated.
        after: done to ours when it is annotated.
        step: done before each step, of both models.
        finish: done at the end.
        around: what all steps are in.
        backwards: what the backwards of a step of ours are in.
        forward: what forwards of ours are in.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    both_verbs: Mapping[str, Any] = field(default_factory=dict)
    is_: Any = None
    tolerance: float = 0.0
    coarser: float = 1.0
    both: Callable[[Net], object] = nothing
    before: Callable[[Run], object] = nothing
    after: Callable[[Run], object] = nothing
    step: Callable[[Run, int], object] = nothing
    finish: Callable[[Run], object] = nothing
    around: Callable[[Run], AbstractContextManager[Any]] = lambda run: nullcontext()
    backwards: Callable[[Run], AbstractContextManager[Any]] = lambda run: nullcontext()
    forward: Callable[[Run], AbstractContextManager[Any]] = lambda run: nullcontext()


Values = Mapping[str, Choice]
Row = Mapping[str, str]


# --- the mesh -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """Ranks, and which of them train on the same batches.

    Attributes:
        shape: of all dimensions.
        data: names of those that are data parallel.
        distribute: what distributes the model over the others.
        by_dims: the verbs get the whole mesh and the names of dimensions.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ("dp",)
    data: tuple[str, ...] = ("dp",)
    distribute: Distribute = models.nowhere
    by_dims: bool = False

    @property
    def ranks(self) -> int:
        return torch.Size(self.shape).numel()

    def keywords(self, verb: Any, mesh: DeviceMesh) -> dict[str, Any]:
        """What tells `verb` over which ranks."""
        if self.by_dims:
            shards = verb is fully_shard
            dims = Dims(self.data if shards else None, None if shards else self.data)
            return {"mesh": mesh, "dp_mesh_dims": dims}
        if len(self.data) == 1:
            return {"mesh": mesh[self.data[0]] if len(self.names) > 1 else mesh}
        hybrid = verb is fully_shard and "replicate" in self.data
        return {"mesh": mesh if hybrid else mesh[self.data]._flatten("_".join(self.data))}


_TP: Final = ("dp", "tp")
MESHES: Final[Values] = {
    "2 ranks": Choice(is_=Mesh((2,))),
    "3 ranks": Choice(is_=Mesh((3,))),
    "4 ranks": Choice(is_=Mesh((4,))),
    "hybrid": Choice(is_=Mesh((2, 2), *[("replicate", "shard")] * 2)),
    "tensor parallel": Choice(is_=Mesh((2, 2), _TP, distribute=models.over_tp)),
    "sequence parallel": Choice(is_=Mesh((2, 2), _TP, distribute=models.over_sequences)),
    "sequence parallel, dp 1": Choice(is_=Mesh((1, 2), _TP, distribute=models.over_sequences)),
    "DTensors over all": Choice(is_=Mesh((2, 2), _TP, distribute=models.over_all, by_dims=True)),
    "experts": Choice(is_=Mesh((2, 2), *[("efsdp", "ep")] * 2, distribute=models.over_experts)),
    "one rank": Choice(is_=Mesh((2, 1), ("others", "dp"), ("dp",))),
}


# --- which modules ------------------------------------------------------------------------------


def _one_unit(run: Run) -> None:
    run.annotate(run.model)


def _units(run: Run) -> None:
    run.annotate(run.model, policy={Block})


def _nested(run: Run) -> None:
    run.annotate(run.model, policy={Block, Up})


def _list(run: Run) -> None:
    """Two blocks are one unit."""
    run.annotate([*run.model.blocks[:2]])
    run.annotate(run.model)


def _roots(run: Run) -> None:
    """All parts are roots, in a model that nobody annotates."""
    for part in run.model.children():
        for module in part if isinstance(part, nn.ModuleList) else [part]:
            run.annotate(module)


def _beside(run: Run) -> None:
    """One block belongs to the other verb."""
    other = replicate if run.verb is fully_shard else fully_shard
    run.annotate(run.model.blocks[1], verb=other)
    run.annotate(run.model, policy={Block})


PLACES: Final[Values] = {
    "units": Choice(is_=_units),
    "one unit": Choice(is_=_one_unit),
    "units in units": Choice(is_=_nested),
    "a list": Choice(is_=_list),
    "several roots": Choice(is_=_roots),
    "beside the other verb": Choice(is_=_beside),
}


# --- precision ----------------------------------------------------------------------------------


def _at_rest(dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> Callable[[Run], None]:
    def apply(run: Run) -> None:
        run.model.to(dtype)
        for parameter in run.model.parameters() if grad_dtype is not None else ():
            parameter.grad_dtype = grad_dtype

    return apply


def _policy(**options: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(**options)}


_KEPT: Final = _policy(reduce_dtype=F32, keep_grads_in_reduce_dtype=True)
PRECISIONS: Final[Values] = {
    "float64": Choice(tolerance=1e-9, before=_at_rest(F64)),
    "bfloat16": Choice(both_verbs=_policy(param_dtype=BF16), tolerance=0.06, before=_at_rest(F32)),
    "bfloat16, reduced in float32": Choice(
        both_verbs=_policy(param_dtype=BF16, reduce_dtype=F32), tolerance=0.06, before=_at_rest(F32)
    ),
    "weights in float16": Choice(tolerance=0.02, before=_at_rest(torch.float16)),
    "grad_dtype": Choice(tolerance=0.06, before=_at_rest(BF16, F32)),
    "keep_grads_in_reduce_dtype": Choice(both_verbs=_KEPT, tolerance=0.06, before=_at_rest(BF16)),
    "autocast": Choice(
        tolerance=0.06,
        before=_at_rest(F32),
        forward=lambda run: torch.autocast(current_device().type, BF16),
    ),
}


# --- what a step is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Accumulation:
    """Backwards of a step.

    Attributes:
        held: the level of `no_sync` around all but the last.
        closes: around the last one, too, and `reduce_gradients` is called behind it.
        zeros: gradients are kept as zeros from step to step.
    """

    backwards: int = 2
    held: str = ""
    closes: bool = False
    zeros: bool = False


ACCUMULATIONS: Final[Values] = {
    "one backward": Choice(is_=Accumulation(1)),
    "several backwards": Choice(is_=Accumulation()),
    "no_sync": Choice(is_=Accumulation(held="all")),
    "no_sync of replicas": Choice(is_=Accumulation(held="replicate")),
    "reduce_gradients": Choice(is_=Accumulation(held="all", closes=True)),
    "set_to_none=False": Choice(is_=Accumulation(zeros=True)),
}

_SGD: Final = {"lr": 0.001, "momentum": 0.9}
# an update that is smooth where gradients are small, also in float16
_ADAM: Final = {"lr": 0.02, "betas": (0.9, 0.9), "eps": 0.1, "weight_decay": 0.1}


def _in_backward(parameters: Any, *, ours: bool) -> torch.optim.Optimizer:
    if not ours:
        return torch.optim.SGD(parameters, **_SGD)  # type: ignore[arg-type]
    return apply_optimizer_in_backward(torch.optim.SGD, parameters, _SGD)


def _on_matrices(parameters: Any, *, ours: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, **_ADAM)  # type: ignore[arg-type]
    return step_on_matrices(optimizer) if ours else optimizer


def _optimizer(kind: Any, **options: Any) -> Callable[..., Any]:
    return lambda parameters, *, ours: kind(parameters, **options)


OPTIMIZERS: Final[Values] = {
    "SGD": Choice(is_=_optimizer(torch.optim.SGD, **_SGD)),
    "AdamW, foreach": Choice(is_=_optimizer(torch.optim.AdamW, **_ADAM, foreach=True)),
    "AdamW, fused": Choice(is_=_optimizer(torch.optim.AdamW, **_ADAM, fused=True)),
    "in backward": Choice(is_=_in_backward),
    "AdamW, whole matrices": Choice(is_=_on_matrices),
}


def _scaled(run: Run) -> None:
    run.scaler = torch.amp.GradScaler(current_device().type, init_scale=8.0)


SCALING: Final[Values] = {"none": Choice(), "GradScaler": Choice(after=_scaled)}

CLIPPING: Final[Values] = {
    "none": Choice(),
    "composable.clip_grad_norm_": Choice(is_=clip_grad_norm_),
    "torch's clip_grad_norm_": Choice(is_=torch.nn.utils.clip_grad_norm_),
}


# --- keywords of one verb -----------------------------------------------------------------------


def _keyword(name: str, **values: Any) -> Values:
    return {
        word.replace("_", " "): Choice(keywords={name: value}) for word, value in values.items()
    }


RESHARD: Final[Values] = {
    "None": Choice(),
    "True": Choice(keywords={"reshard_after_forward": True}),
    "False": Choice(keywords={"reshard_after_forward": False}),
    "over one rank": Choice(keywords={"reshard_after_forward": 1}),
    "over two ranks": Choice(keywords={"reshard_after_forward": 2}),
}
DIMENSIONS: Final[Values] = {
    "0": Choice(),
    "the last": Choice(
        keywords={"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}
    ),
}
PREFETCH: Final = {str(each): Choice(keywords={"prefetch": each}) for each in (1, 0, 2)}
VIEWS: Final = {str(on): Choice(keywords={"gradient_as_bucket_view": on}) for on in (False, True)}
BUCKETS: Final = {
    name: Choice(keywords={"bucket_cap_mb": size}) for name, size in (("one", 25), ("many", 1e-4))
}
OFFLOAD: Final = {
    name: Choice(keywords={"offload_policy": CPUOffloadPolicy(pin_memory=pinned)})
    for name, pinned in (("pinned", True), ("unpinned", False))
}
# what gradients of one process are divided by, for so many data-parallel ranks
DIVISORS: Final = {
    "mean": Choice(is_=lambda ranks: ("mean", ranks)),
    "sum": Choice(is_=lambda ranks: ("sum", 1)),
    "a number": Choice(is_=lambda ranks: (3.0, 3)),
}


def _spoil(run: Run) -> None:
    """What all data-parallel ranks but the first have must not count."""
    for name, parameter in run.model.named_parameters():
        if run.index and ".experts." not in name:
            with torch.no_grad():
                parameter.mul_(2.0)


SYNC: Final[Values] = {
    "the default": Choice(),
    "broadcast": Choice(both_verbs={"sync_module_states": "broadcast"}, before=_spoil),
    "off": Choice(both_verbs={"sync_module_states": "off"}),
}


# --- activations, hooks -------------------------------------------------------------------------


def _on_blocks(verb: Any, **options: Any) -> Callable[[Run], None]:
    return lambda run: [verb(block, **options) for block in run.model.blocks] and None


def _torchs(reentrant: bool) -> Callable[[Net], None]:
    return lambda net: setattr(net, "recompute", reentrant)


def _offloading(run: Run) -> AbstractContextManager[Any]:
    return offloading()


RECOMPUTE: Final[Values] = {
    "none": Choice(),
    "checkpoint": Choice(before=_on_blocks(checkpoint)),
    "checkpoint, annotated last": Choice(after=_on_blocks(checkpoint)),
    "offload_activations": Choice(
        before=_on_blocks(offload_activations, min_bytes=0, pin_memory=False), around=_offloading
    ),
    "torch's checkpoint": Choice(both=_torchs(False)),
    "torch's reentrant checkpoint": Choice(both=_torchs(True)),
}


def _own_hook(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    group = bucket.group
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    scale = 1 / group.size()
    return work.get_future().then(lambda done: done.value()[0] * scale)  # type: ignore[no-any-return]


def _power(run: Run) -> powerSGD_hook.PowerSGDState:
    """Of full rank, which loses nothing."""
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=1e-3
    )


def _hooked(hook: Any, stage: str, state: Any = nothing) -> Callable[[Run], None]:
    def register(run: Run) -> None:
        options = {"stage": stage} if run.is_hybrid else {}
        for root in [run.model] if run.model in run.roots else run.roots:
            register_comm_hook(root, state(run), hook, **options)

    return register


HOOKS: Final[Values] = {
    "none": Choice(),
    "own": Choice(after=_hooked(_own_hook, "reduce_scatter")),
    "torch's fp16": Choice(
        after=_hooked(default_hooks.fp16_compress_hook, "all_reduce"), tolerance=5e-3
    ),
    "PowerSGD": Choice(
        after=_hooked(powerSGD_hook.powerSGD_hook, "all_reduce", _power), tolerance=1e-3
    ),
}


# --- parameters ---------------------------------------------------------------------------------


def _freeze(model: Net, frozen: bool = True) -> None:
    for each in (model.blocks[0].up, model.head.bias):
        each.requires_grad_(not frozen)  # type: ignore[union-attr]


def _thaw(run: Run, step: int) -> None:
    for model in (run.model, run.alone):
        _freeze(model, frozen=step == 0)


PARTS: Final[Values] = {
    "all train": Choice(is_=lambda rank, number: True),
    "frozen": Choice(both=_freeze, is_=lambda rank, number: True),
    "frozen in one step": Choice(step=_thaw, is_=lambda rank, number: True),
    "used by some ranks": Choice(is_=lambda rank, number: (rank + number) % 2 == 0),
    "never used": Choice(is_=lambda rank, number: False),
}


def _tie(net: Net) -> None:
    net.head.weight = net.first.weight


def _tie_blocks(net: Net) -> None:
    net.blocks[2].up.weight = net.blocks[0].up.weight  # type: ignore[union-attr]


TIES: Final[Values] = {
    "none": Choice(),
    "in a unit": Choice(both=_tie),
    "between units": Choice(both=_tie_blocks),
}


def _extend(run: Run) -> None:
    models.with_rows(run.model)


EXTENDED: Final[Values] = {
    "none": Choice(),
    "bytes": Choice(before=_extend, tolerance=1e-4, coarser=2.0),
}


# --- between steps ------------------------------------------------------------------------------


def _joined(run: Run) -> Any:
    return join(run.model, run.optimizer, *([run.scaler] if run.scaler is not None else []))


JOIN: Final[Values] = {"no": Choice(), "yes": Choice(around=_joined)}


def _copied(run: Run, step: int) -> None:
    if step == 1:
        run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


def _before_training(run: Run) -> None:
    run.model = copy.deepcopy(run.model)


@dataclass
class _Average:
    """The exponential moving average of ours, by one of two ways."""

    theirs: bool

    def start(self, run: Run) -> None:
        averages = get_ema_multi_avg_fn(0.5)
        run.averages = [AveragedModel(run.alone, multi_avg_fn=averages)]
        run.averages.append(
            AveragedModel(run.model, multi_avg_fn=averages)
            if self.theirs
            else EMA(run.model, decay=0.5)
        )
        if not self.theirs:  # torch's begins with the first update
            run.averages[0].n_averaged += 1

    def update(self, run: Run, step: int) -> None:
        if step:
            run.averages[0].update_parameters(run.alone)
            run.averages[1].update_parameters(run.model) if self.theirs else run.averages[
                1
            ].update()

    def compare(self, run: Run) -> None:
        expected = dict(run.averages[0].module.named_parameters())
        if self.theirs:
            run.compare("average", expected, full_parameters(run.averages[1].module))
        else:
            with run.averages[1].swap():
                run.compare("average", expected, full_parameters(run.model))


def _average(theirs: bool) -> Choice:
    average = _Average(theirs)
    return Choice(after=average.start, step=average.update, finish=average.compare)


COPIES: Final[Values] = {
    "none": Choice(),
    "a copy trains": Choice(after=_before_training),
    "copied with its optimizer": Choice(step=_copied),
    "EMA": _average(False),
    "AveragedModel": _average(True),
}


def _at_step_two(act: Callable[[Run], object]) -> Choice:
    return Choice(step=lambda run, step: act(run) if step == 2 else None)


SAVED: Final[Values] = {
    "no": Choice(),
    "state_dict": _at_step_two(
        partial(reloaded, lambda run: {n: t.clone() for n, t in run.model.state_dict().items()})
    ),
    "full_state_dict": _at_step_two(
        partial(reloaded, lambda run: full_state_dict(run.model, rank0_only=False))
    ),
    "distributed checkpoint": _at_step_two(saved_by_torch),
}


def _on_rank_0(act: Callable[[Net], object]) -> Choice:
    return _at_step_two(lambda run: act(run.model) if dist.get_rank() == 0 else None)


def _move(model: Net) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(run.batch(0, 0, run.index))


def _evaluate_in_scope(run: Run) -> None:
    """Data-parallel ranks run blocks in different orders, in a scope in which they may."""
    with keep_unsharded(run.model), torch.no_grad():
        run.model(run.batch(0, 0, run.index), turned=run.index == 0)


class _LostError(Exception):
    """Raised by all ranks alike."""


def _raise(*_: Any) -> None:
    raise _LostError


def _lose(run: Run, *, forward: bool) -> None:
    """A step that raises on all ranks is given up."""
    hook = run.model.head.register_forward_pre_hook(_raise) if forward else None
    with suppress(_LostError):
        loss = run.loss(run.model, 0, 0, run.index)
        loss.register_hook(_raise)
        loss.backward()
    if hook is not None:
        hook.remove()
    run.zero_grad(run.optimizer)


def _edit(run: Run) -> None:
    with summon_full_params(run.model), torch.no_grad():
        for model in (run.model, run.alone):
            for parameter in model.parameters():
                parameter.mul_(0.5)


EVENTS: Final[Values] = {
    "none": Choice(),
    "all evaluate": _at_step_two(_evaluate),
    "all lose a forward": _at_step_two(partial(_lose, forward=True)),
    "all lose a backward": _at_step_two(partial(_lose, forward=False)),
    "all edit whole parameters": _at_step_two(_edit),
    "all refresh": _at_step_two(lambda run: refresh(run.model)),
    "all add a module": _at_step_two(lambda run: run.model.add_module("metric", nn.Identity())),
    "a module on rank 0": _on_rank_0(lambda model: model.add_module("metric", nn.Identity())),
    "memory on rank 0": _on_rank_0(_move),
    "a hook on rank 0": _on_rank_0(
        lambda model: model.blocks[1].register_forward_hook(lambda *_: None)
    ),
    "another order in a scope": _at_step_two(_evaluate_in_scope),
}


# --- what leaves a forward, and what is written in a scope --------------------------------------


@torch.no_grad()
def _evaluate_for_weights(run: Run, step: int) -> None:
    """What an evaluation returned stays the caller's, whatever comes."""
    run.model.head.gives = True
    _, given = run.model(run.batch(step, 0, run.index))
    run.model.head.gives = False
    given = {name: full(value) for name, value in given.items()}
    run.compare(f"weights of evaluation {step}", run.alone.head.weights(), given)
    run.given.append((run.model, {name: (value, value.clone()) for name, value in given.items()}))


def _compare_given(run: Run) -> None:
    """An alias of the user's own memory sees steps, as in one process, until the parameter is moved
    away; what is gathered is kept.
    """
    if run.choices["event"] is EVENTS["memory on rank 0"] and dist.get_rank() == 0:
        return
    now = run.alone.head.weights()
    for step, (model, given) in enumerate(run.given):
        if model is not run.model:  # the one that was copied trains no more
            continue
        changed = {n: value for n, (value, then) in given.items() if not torch.equal(value, then)}
        # together: what is rounded in one small element exceeds the tolerance of that alone
        run.compare(f"given in step {step}", {name: now[name] for name in changed}, changed)


OUTPUTS: Final[Values] = {
    "computed": Choice(),
    "weights come along": Choice(step=_evaluate_for_weights, finish=_compare_given),
}


def _load_half(run: Run) -> None:
    whole = full_state_dict(run.model, rank0_only=False)
    run.model.load_state_dict({name: value * 0.5 for name, value in whole.items()})
    for parameter in run.alone.parameters():
        parameter.mul_(0.5)


def _written_in_scope(act: Callable[[Run], object]) -> Choice:
    @torch.no_grad()
    def write(run: Run) -> None:
        with keep_unsharded(run.model):
            for when in ("before", "after"):
                if when == "after":
                    act(run)
                losses = [{"": run.loss(m, 2, 0, run.index)} for m in (run.alone, run.model)]
                run.compare(f"loss {when} a write in a scope", *losses)

    return _at_step_two(write)


WRITTEN: Final[Values] = {
    "nothing": Choice(),
    "edited in keep_unsharded": _written_in_scope(_edit),
    "loaded in keep_unsharded": _written_in_scope(_load_half),
}


# --- what looks after steps ---------------------------------------------------------------------


WATCHED: Final[Values] = {
    "no": Choice(),
    "yes": Choice(around=lambda run: watch(run.model, action="raise")),
    "repeat": Choice(around=lambda run: watch(run.model, action="raise", repeat=True)),
}


@contextmanager
def _in_together(run: Run) -> Iterator[None]:
    with together(run.model) as step:
        yield
    assert not step.lost, step.why


TOGETHER: Final[Values] = {
    "no": Choice(),
    "yes": Choice(backwards=_in_together),
}


# --- the arrays ---------------------------------------------------------------------------------


def _without(values: Values, *names: str) -> Values:
    return {name: choice for name, choice in values.items() if name not in names}


_OF_BOTH: Final[dict[str, Values]] = {
    "precision": PRECISIONS,
    "accumulation": ACCUMULATIONS,
    "mesh": MESHES,
    "modules": PLACES,
    "optimizer": OPTIMIZERS,
    "clipping": CLIPPING,
    "scaling": SCALING,
    "sync_module_states": SYNC,
    "grad_reduce": DIVISORS,
    "activations": RECOMPUTE,
    "comm hook": HOOKS,
    "parts": PARTS,
    "ties": TIES,
    "extended parameters": EXTENDED,
    "watch": WATCHED,  # a rank without data leaves what is in `join` before the others
    "join": JOIN,
    "copies": COPIES,
    "saved": SAVED,
    "event": EVENTS,
    "outputs": OUTPUTS,
    "together": TOGETHER,
}
FULLY_SHARD: Final[dict[str, Values]] = {
    **_OF_BOTH,
    "reshard_after_forward": RESHARD,
    "shard_placement_fn": DIMENSIONS,
    "prefetch": PREFETCH,
    "written in a scope": WRITTEN,
}
REPLICATE: Final[dict[str, Values]] = {
    **_OF_BOTH,
    "gradient_as_bucket_view": VIEWS,
    "bucket_cap_mb": BUCKETS,
    "mesh": _without(MESHES, "hybrid"),
    "accumulation": _without(ACCUMULATIONS, "no_sync of replicas"),
    "event": _without(EVENTS, "another order in a scope"),
}
# on an accelerator, of which there is a simulated one
OFFLOADED: Final[dict[str, Values]] = {
    **FULLY_SHARD,
    "offload_policy": OFFLOAD,
    # nothing orders the streams on which torch's hook keeps what it remembers
    "comm hook": _without(HOOKS, "PowerSGD"),
}


class Array(NamedTuple):
    """A table of programs about one verb.

    Attributes:
        triples: options of which all three values meet, and not only two.
    """

    verb: Any
    options: Mapping[str, Values]
    device: str = "cpu"
    triples: tuple[str, ...] = ()


_TRIPLES: Final = ("precision", "accumulation", "mesh")
ARRAYS: Final[dict[str, Array]] = {
    "fully_shard": Array(fully_shard, FULLY_SHARD, triples=_TRIPLES),
    "replicate": Array(replicate, REPLICATE, triples=(*_TRIPLES, "gradient_as_bucket_view")),
    "offloaded": Array(fully_shard, OFFLOADED, device="sim"),
}


class Impossible(NamedTuple):
    """Values that no program has together: one of each option."""

    values: Mapping[str, Sequence[str]]
    why: str


_TWO_DTYPES: Final = ("grad_dtype", "keep_grads_in_reduce_dtype")
_DP_1: Final = ("one rank", "sequence parallel, dp 1")
_DISTRIBUTED: Final = (
    "tensor parallel",
    "sequence parallel",
    "sequence parallel, dp 1",
    "DTensors over all",
    "experts",
)
IMPOSSIBLE: Final = (
    Impossible(
        {
            "accumulation": ("set_to_none=False",),
            "mesh": _DISTRIBUTED,
            "optimizer": ("AdamW, foreach", "AdamW, fused"),
        },
        "torch's zero_grad takes DTensors of one mesh",
    ),
    Impossible(
        {"modules": ("several roots",), "parts": ("used by some ranks",)},
        "all ranks call each root",
    ),
    Impossible(
        {"copies": ("AveragedModel",), "mesh": _DISTRIBUTED},
        "torch's average takes DTensors of one mesh",
    ),
    Impossible(
        {
            "extended parameters": ("bytes",),
            "mesh": _DISTRIBUTED,
            "optimizer": ("AdamW, foreach", "AdamW, fused"),
        },
        "a class of one's own is stepped as torch does, which takes DTensors of one mesh",
    ),
    Impossible(
        {"reshard_after_forward": ("over two ranks",), "mesh": ("3 ranks", *_DP_1)},
        "2 does not divide the number of ranks",
    ),
    Impossible(
        {"comm hook": ("PowerSGD",), "precision": ("bfloat16", "weights in float16")},
        "torch's hook orthogonalises in the dtype of the reduction",
    ),
    Impossible(
        {"comm hook": ("torch's fp16", "PowerSGD"), "mesh": ("experts",)},
        "as a hook of one's own, which is refused",
    ),
    Impossible(
        {"scaling": ("GradScaler",), "precision": ("weights in float16",)},
        "torch's scaler does not unscale gradients of float16",
    ),
    Impossible(
        {
            "optimizer": ("AdamW, foreach", "AdamW, fused", "AdamW, whole matrices"),
            "precision": _TWO_DTYPES,
        },
        "torch's AdamW refuses gradients of another dtype than the parameter's",
    ),
    Impossible(
        {"clipping": ("torch's clip_grad_norm_",), "mesh": _DISTRIBUTED},
        "torch's function takes DTensors of one mesh",
    ),
    Impossible(
        {"clipping": ("torch's clip_grad_norm_",), "join": ("yes",)},
        "torch's function communicates, and a rank without data does not call it",
    ),
    Impossible(
        {"join": ("yes",), "copies": ("copied with its optimizer",)},
        "the scope knows the model and the optimizer that it was opened with",
    ),
    Impossible(
        {"join": ("yes",), "saved": ("state_dict", "full_state_dict", "distributed checkpoint")},
        "a rank without data does not save",
    ),
    Impossible(
        {
            "join": ("yes",),
            "event": ("all edit whole parameters", "all refresh", "another order in a scope"),
        },
        "a rank without data does not take part",
    ),
    Impossible(
        {"join": ("yes",), "mesh": _DP_1},
        "there is one batch in each step",
    ),
    Impossible(
        {"join": ("yes",), "copies": ("EMA", "AveragedModel")},
        "a rank without data does not update averages",
    ),
    Impossible(
        {"accumulation": ("no_sync of replicas",), "optimizer": ("in backward",)},
        "what is reduced in a backward, and so stepped, differs from unit to unit",
    ),
    Impossible(
        {"optimizer": ("in backward",), "copies": ("copied with its optimizer",)},
        "a copy of an optimizer that hooks call is called by none",
    ),
)


class Refused(NamedTuple):
    """Values that the library refuses together.

    Attributes:
        values: one of each option.
        words: that the error says.
        why: as the docs say it.
        arrays: of which.
        late: something is written before: why.
    """

    values: Mapping[str, str]
    words: str
    why: str
    late: str = ""
    arrays: tuple[str, ...] = ("fully_shard", "replicate", "offloaded")


_ON_DEVICE: Final = ("fully_shard", "replicate")
_SHARDED: Final = ("fully_shard", "offloaded")
_TP_UNITS: Final = (
    "tensor parallel",
    "sequence parallel",
    "sequence parallel, dp 1",
    "DTensors over all",
)
_NOT_TOGETHER: Final = (
    (
        "mesh",
        _TP_UNITS,
        "blocks.0",
        "tensor-parallel parameters",
        "the model runs collectives of its own",
        _ON_DEVICE,
    ),
    (
        "mesh",
        ("experts",),
        "moe.experts",
        "tensor-parallel parameters",
        "the model runs collectives of its own",
        _ON_DEVICE,
    ),
    (
        "comm hook",
        ("own", "torch's fp16"),
        "(root)",
        "a communication hook",
        "a rank that gives up its step cannot run the hook's collectives",
        (*_ON_DEVICE, "offloaded"),
    ),
    (
        "comm hook",
        ("PowerSGD",),
        "(root)",
        "a communication hook",
        "a rank that gives up its step cannot run the hook's collectives",
        _ON_DEVICE,
    ),
    (
        "reshard_after_forward",
        ("over one rank", "over two ranks"),
        "(root)",
        "reshard_after_forward with a number of ranks",
        "ranks outside of this rank's neighbours do not know what these have gathered",
        _SHARDED,
    ),
    (
        "optimizer",
        ("in backward",),
        "(root)",
        "an optimizer in backward",
        "the optimizer has already stepped when the step is given up",
        (*_ON_DEVICE, "offloaded"),
    ),
)
REFUSED: Final[tuple[Refused, ...]] = (
    *(
        Refused(
            {"mesh": mesh},
            "is tensor parallel, and offload_policy was passed",
            "parts over other dimensions stay on the device",
            arrays=("offloaded",),
        )
        for mesh in _DISTRIBUTED
    ),
    Refused(
        {"extended parameters": "bytes"},
        "is gathered in a form of its own, and cannot be offloaded",
        "its methods make what is sent where the parameter rests",
        arrays=("offloaded",),
    ),
    Refused(
        {"mesh": "experts", "join": "yes"},
        "A rank without data can stand in for units on the same ranks and device only",
        "a rank without data follows one source",
        arrays=_ON_DEVICE,
    ),
    *(
        Refused(
            {option: value, "together": "yes"},
            f"together: unit '{unit}' has {what}",
            why,
            arrays=arrays,
        )
        for option, values, unit, what, why, arrays in _NOT_TOGETHER
        for value in values
    ),
    Refused(
        {"join": "yes", "together": "yes"},
        "the scope was opened inside of join",
        "a rank without data already follows the others, so it cannot follow a rank that raises",
    ),
    Refused(
        {"optimizer": "in backward", "scaling": "GradScaler"},
        "a GradScaler came to step this optimizer, but backward has stepped",
        "a step that was made cannot be skipped",
        late="backward cannot know that its loss is scaled",
    ),
    Refused(
        {"mesh": "experts", "comm hook": "own"},
        "is on another mesh than the module that the hook is for",
        "a hook reduces over one group: register one for each part that is on one mesh",
        arrays=_ON_DEVICE,
    ),
    Refused(
        {"extended parameters": "bytes", "shard_placement_fn": "the last"},
        "is gathered in a form of its own, and cannot be cut along dimension 1",
        "its methods split rows only",
        arrays=("fully_shard",),
    ),
    *(
        Refused(
            {"extended parameters": "bytes", "reshard_after_forward": f"over {ranks}"},
            "is gathered in a form of its own, and cannot be kept over",
            "what some ranks keep is gathered by a second message in another form",
            arrays=("fully_shard",),
        )
        for ranks in ("one rank", "two ranks")
    ),
    Refused(
        {"optimizer": "in backward", "clipping": "composable.clip_grad_norm_"},
        "is stepped in backward (apply_optimizer_in_backward)",
        "backward frees each gradient after its step, so they never exist at the same time",
    ),
    *(
        Refused(
            {"modules": modules, "ties": "between units"},
            "is tied to",
            "a tied parameter has one unit",
            arrays=_SHARDED,
        )
        for modules in ("a list", "several roots")
    ),
    *(
        Refused(
            {"modules": modules, "ties": ties, "precision": precision},
            "cast in the forward of that unit only",
            "a tied parameter that is cast has one unit",
            arrays=("replicate",),
        )
        for modules in ("several roots", "a list")
        for precision in ("bfloat16", "bfloat16, reduced in float32")
        for ties in ("in a unit", "between units")
        if (modules, ties) != ("a list", "in a unit")
    ),
    Refused(
        {"modules": "several roots", "ties": "in a unit"},
        "is tied to",
        "a tied parameter has one unit",
        arrays=_SHARDED,
    ),
)


class Fault(NamedTuple):
    """Values with which a program is not as in one process yet.

    Attributes:
        values: some of each option.
        seen: what happens.
        arrays: in which.
    """

    values: Mapping[str, Sequence[str]]
    seen: str
    arrays: tuple[str, ...] = ("fully_shard", "replicate", "offloaded")


FAULTS: Final[tuple[Fault, ...]] = (
    Fault(
        {"precision": ("autocast",)}, "the simulated accelerator has no autocast", ("offloaded",)
    ),
)
