"""`register_comm_hook`: let a function of the user reduce gradients instead of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

from torch import nn

from composable.checked import ELSEWHERE, checked, takes
from composable.comm.launch import Launch
from composable.compilation import untraced
from composable.contract.contract import find_fqn, modules_of
from composable.contract.tree import SHARD, annotation_of, walk
from composable.engine.gradients.grad_bucket import SyncMode
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.step.unit import Unit, units_below
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ComposableError,
    MeshError,
    NotAnnotatedError,
    PhaseError,
    RanksDisagreeError,
    describe_module,
    first_line,
)
from composable.features.hook_stages import ALL_REDUCE, REDUCE_SCATTER, CommHook, hooks_of, set_hook

_VERB: Final = "register_comm_hook"
_TORCHS: Final = "torch.distributed.algorithms.ddp_comm_hooks."
_FSDP1: Final = "torch.distributed.algorithms._comm_hooks."
# They return what they are given. By name, since to import them takes time, and NumPy.
_LOCAL: Final = (
    f"{_TORCHS}debugging_hooks.noop_hook",
    f"{_TORCHS}post_localSGD_hook.post_localSGD_hook",
)

Hook = Callable[[Any, Any], Any]  # of a state and a bucket; returns a tensor or a future of one


class CommHookHandle:
    """What `register_comm_hook` returns.

    As a context manager it removes the hook at the end of its body.
    """

    def __init__(self, units: Sequence[Unit], stage: str) -> None:
        self._units = list(units)
        self._stage = stage

    def remove(self) -> None:
        """Reduce gradients as before the hook, from the next backward on.

        All ranks do so together. May be called again.

        Raises:
            PhaseError: as `register_comm_hook`.
        """
        # a unit has no modules after its annotation was removed
        units = [unit for unit in self._units if unit.modules]
        for unit in units:
            refuse_moment("remove a communication hook", unit)
        self._units = []
        for unit in units:
            set_hook(unit, self._stage, None)

    def __enter__(self) -> CommHookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@untraced
@checked
def register_comm_hook(
    module: nn.Module | Sequence[nn.Module],
    state: Any,
    hook: Annotated[Hook, ELSEWHERE],  # refused on all ranks together
    *,
    stage: Annotated[str | None, ELSEWHERE] = None,
) -> CommHookHandle:
    """Let `hook` reduce gradients in place of the library.

    It may compress them, count them, or keep them on their rank.

    The hook is called as `hook(state, bucket)` and returns the reduced gradients, or a
    `torch.futures.Future` of them. It replaces the sum over the ranks *and* its division, so it
    usually makes a mean. Hooks of `torch.distributed.algorithms.ddp_comm_hooks` run unchanged.

    `bucket` has the methods of `torch.distributed.GradBucket`: `buffer()`, `gradients()`,
    `parameters()`, `index()`, `is_last()` and `set_buffer(tensor)`. `buffer()` returns the
    gradients as one flat tensor that the hook may write to, and `gradients()` returns views of it.
    `bucket` also has the names of its parameters (`fqns`), the factor for the sum without a hook
    (`scale`), and its ranks (`group`).

    For a sharded unit, the bucket has the whole gradients, in the dtype of the reduction. The hook
    returns the whole reduced gradients on every rank, and each rank takes its shards.
    `parameters()` returns the sharded parameters. With an `offload_policy` these are on the host,
    but the gradients and the result of the hook are on the device.

    Hybrid sharding reduces in two stages, and each stage takes a hook. A hook for "reduce_scatter"
    reduces whole gradients over the ranks of one replica, as above. A hook for "all_reduce" reduces
    shards over the replicas. Its bucket has the means over the ranks of one replica, and for each
    parameter the rows that this rank owns.

    Hooks communicate over `bucket.group`. If `state` or `state.process_group` is None, the hook
    gets that group in its place. `grad_reduce` multiplies gradients before the hook sees them. A
    backward under `no_sync` calls no hook; the backward that reduces passes the whole sum to the
    hook. Under `no_sync(level="replicate")`, every backward calls the hook of the first stage. On
    one rank, no hook is called.

    All ranks register the same hook together, between steps.

    Args:
        module: a replicated or fully sharded module, or a list that was annotated as one unit. The
            hook applies to its unit, and to units of the same verb inside.
        state: the hook's first argument, or None. If the state stores values by `bucket.index()`,
            use it for one registration only.
        hook: the function that reduces. It must be the same on all ranks.
        stage: the stage of the reduction. Replicated gradients have only "all_reduce", and sharded
            gradients only "reduce_scatter", so you can leave it out. Hybrid sharding has both
            stages, so pass one.

    Returns:
        A handle whose `remove()` removes the hook.

    Raises:
        NotAnnotatedError: `module` is neither replicated nor fully sharded; the modules of a list
            were not annotated together.
        AlreadyAnnotatedError: a unit already has a hook for this stage.
        AnnotationError: the hook cannot be called with two arguments; there is no such stage, or
            there are two stages and you passed none; a parameter has sparse gradients; the hook is
            a torch hook that leaves gradients local (`noop_hook`, `post_localSGD_hook`), and would
            leave those of shards local; the hook is a torch hook for FSDP1.
        MeshError: units are on different meshes.
        PhaseError: a forward still waits for its backward, or the call is inside of a backward or
            of `no_sync`.
        RanksDisagreeError: another rank raises an error, or registers another hook.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        >>> handle = register_comm_hook(model, None, bf16_compress_hook)

    After `DistributedDataParallel.register_comm_hook`.
    """
    modules = modules_of(_VERB, module)
    annotation = annotation_of(modules[0])
    if annotation is None:
        raise NotAnnotatedError(
            f"{_VERB}: {describe_module(modules[0], find_fqn(modules[0]))} is not annotated; call"
            " replicate(module) or fully_shard(module) first. Of units without a module around"
            " them, each takes a hook of its own"
        )
    unit: Unit = annotation.state
    for other in modules:
        if other not in unit.modules:
            raise NotAnnotatedError(
                f"{_VERB} takes one module, or a list that was annotated as one, and"
                f" {describe_module(other, find_fqn(other))} was not annotated together with the"
                " first one. Register a hook for each, with a state of its own"
            )
    verb, mesh = unit.spec.verb, unit.mesh_info.mesh
    units = [each for each in units_below(modules) if each.spec.verb == verb]
    stages: tuple[str, ...] = (ALL_REDUCE,)
    if verb == SHARD:  # one for each dimension of the mesh
        stages = (REDUCE_SCATTER, ALL_REDUCE)[: 1 if mesh is None else mesh.ndim]
    chosen = stages[0] if stage is None and len(stages) == 1 else stage
    name = getattr(hook, "__name__", None) or type(hook).__name__
    where = f" for {chosen}" if len(stages) > 1 else ""
    mine, inside = f"registers {name}{where}", _inside(hook)
    refusal: ComposableError | None = None
    try:
        if not callable(hook):
            raise AnnotationError(
                f"{_VERB}: a hook is called as hook(state, bucket), and {name} cannot be called. It"
                " stands after its state: register_comm_hook(module, state, hook)"
            )
        if inside.startswith(_FSDP1):
            raise AnnotationError(
                f"{_VERB}: {inside} is made for FSDP1, which calls it with a tensor and not"
                f" with a bucket. Use the hooks of {_TORCHS.rstrip('.')}"
            )
        if not takes(hook, 2):
            raise AnnotationError(
                f"{_VERB}: a hook is called as hook(state, bucket), and {name} takes"
                f" {inspect.signature(hook)}. Bind other arguments with functools.partial"
            )
        if chosen not in stages:
            raise AnnotationError(
                f"{_VERB}: gradients of unit '{unit.name}' are reduced by"
                f" {' and then by '.join(stages)}; stage= must name the one that the hook replaces,"
                f" got {stage!r}"
            )
        if chosen == REDUCE_SCATTER and unit.mesh_info.shard.size > 1 and inside in _LOCAL:
            raise AnnotationError(
                f"{_VERB}: {name} leaves gradients on their rank, and the ranks of unit"
                f" '{unit.name}' hold its parameters together: each shard would be trained on the"
                " batches of one rank alone. Use it with replicate(), or for stage='all_reduce' of"
                " a mesh of two dimensions"
            )
        for each in units:
            _check_unit(each, unit, str(chosen), where)
    except ComposableError as error:
        refusal = error
        mine = f"refuses: {first_line(error)}"
    comm = unit.mesh_info.all
    said = comm.all_gather_objects(mine, Launch(f"check of {_VERB}() across ranks"))
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(said):
        if text != mine:
            raise RanksDisagreeError(
                f"{_VERB}: rank {rank} {text}, and rank {comm.rank} {mine}; no rank registers a"
                " hook. All ranks register the same hooks, in the same order"
            )
    assert chosen is not None
    names = {
        id(below): fqn
        for index, top in enumerate(modules)
        for fqn, below in walk(top, str(index) if len(modules) > 1 else "")
    }
    shared = CommHook(hook, state)
    for each in units:
        fqn = names.get(id(each.modules[0]))
        set_hook(each, chosen, shared, f"{fqn}." if fqn and each is not unit else "")
    return CommHookHandle(units, chosen)


def _inside(hook: Any) -> str:
    """Return the full name of a hook inside of partials, and of torch's wrappers.

    These wrappers compress what the hook is given.
    """
    while True:
        module = str(getattr(hook, "__module__", ""))
        encloses = getattr(getattr(hook, "__code__", None), "co_freevars", ())
        if isinstance(hook, partial):
            hook = hook.func
        elif module.startswith(_TORCHS) and "hook" in encloses:
            hook = inspect.getclosurevars(hook).nonlocals["hook"]
        else:
            return f"{module}.{getattr(hook, '__qualname__', '')}"


def _check_unit(unit: Unit, outer: Unit, stage: str, where: str) -> None:
    former = hooks_of(unit.gradients).get(stage)
    if former is not None:
        raise AlreadyAnnotatedError(
            f"{_VERB}: unit '{unit.name}' has the communication hook '{former.name}'{where}"
            " already. Remove it first, by the handle that registering it returned"
        )
    for param in (param for sparse in unit.gradients.sparse for param in sparse.params):
        raise AnnotationError(
            f"{_VERB}: the gradient of parameter '{param.fqn}' of unit '{unit.name}' is sparse, and"
            " hooks take dense ones. Make its embedding with sparse=False, or leave it to a unit"
            " without a hook"
        )
    if not unit.on_one_mesh:
        raise MeshError(
            f"{_VERB}: parameters of unit '{unit.name}' are on meshes of their own"
            " (shard_placement_fn), and a hook is given gradients of one mesh. Annotate the modules"
            " that have them as units on their mesh"
        )
    own, other = unit.mesh_info, outer.mesh_info
    if own.all is not other.all or own.replicas != other.replicas:
        raise MeshError(
            f"{_VERB}: unit '{unit.name}' is on another mesh than the module that the hook is for."
            " Register a hook for each, with a state of its own"
        )
    refuse_moment(_VERB, unit)


def refuse_moment(what: str, unit: Unit) -> None:
    """Raise if `unit` is not between two steps.

    How its gradients are reduced may change only between two steps. Replicated units of a model
    share buckets, which are filled anew.
    """
    around = () if unit.root is None or unit.kind is not UnitKind.ARRIVAL else unit.root.units
    shares = [each for each in around if each.kind is UnitKind.ARRIVAL]
    unit = next((each for each in shares if each.gradients.has_unreduced), unit)
    if unit.is_busy or unit.gradients.accumulation.now is not SyncMode.REDUCE:
        raise PhaseError(
            f"{what}: unit '{unit.name}' is in the middle of a step: in a forward or backward,"
            " between them, or in no_sync, with accumulated gradients. Do it between two steps;"
            " what is not trained on belongs under torch.no_grad()"
        )
