"""All uses of private parts of torch, except those of torch.compile (`composable/compilation.py`).

The text at each name says why torch's public interface is not enough. All of them exist in torch
2.11.0, 2.13.0 and 2.14.1, except where a fallback says that one does not.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from itertools import repeat
from operator import attrgetter, is_
from traceback import walk_stack
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.optim.optimizer as torch_optimizer
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.amp.grad_scaler import GradScaler
from torch.autograd import profiler
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from composable.compilation import untraced

P = ParamSpec("P")
R = TypeVar("R")

# Classes of tensors whose operations become operations on the plain tensors in them.
WRAPPERS: Final = frozenset({DTensor, AsyncCollectiveTensor})

# A work that is done, which process groups in Python must return (`composable.extras.forecast`).
DoneWork: Final = FakeWork


def name_of_group(group: dist.ProcessGroup) -> Any:
    """As torch knows it; a process group in Python does not have its name itself."""
    return str(dist.distributed_c10d._world.pg_names[group])


def group_named(name: Any) -> Any:
    """The process group that an operation of functional collectives was given, mostly by name."""
    if isinstance(name, dist.ProcessGroup):
        return name
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


# --- autograd ------------------------------------------------------------------------------------

# The number of the backward pass that this thread runs, -1 outside of one. A nested pass has a
# number of its own. No public call tells a recomputation inside a backward from an ordinary
# forward.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def accumulates() -> bool:
    """Whether autograd runs the node that accumulates a gradient; no public call tells the node."""
    node: Any = torch._C._current_autograd_node()  # None outside of backward
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return backward_id() != -1


# `on_backward_end(callback)`: the engine calls `callback` when the running backward pass ends
# without an error. If backward raises, the engine drops it without a call, so an object whose
# `__del__` cleans up learns of the error: on a host before the caller of backward sees the error,
# on an accelerator, where a thread of the engine holds the pass, up to a few milliseconds later.
# DDP and FSDP2 queue their callbacks in the same way.
on_backward_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# The number of the next autograd node that this thread makes; backward runs the highest numbers
# first. Tells which nodes a forward has made from those of its inputs.
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


def made_since(number: int, node: torch.autograd.graph.Node) -> bool:
    """Whether this thread made `node` after `next_node()` returned `number`."""
    return node._sequence_nr() >= number


def current_node() -> int:
    """The number of the node that this thread's backward runs."""
    return torch._C._current_autograd_node()._sequence_nr()


# Sets the version counter of each tensor. torch has a context that restores counters with it, which
# FSDP2 uses.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# The version counter of a tensor. The quickest way to ask many.
version_of: Callable[[Tensor], int] = attrgetter("_version")

# Hooks of a parameter: None or an ordered dict. Autograd calls them when it accumulates a gradient;
# the engine calls those of at-rest parameters, on which autograd never accumulates. Getters made in
# C, because they run per parameter and backward.
gradient_hooks: Callable[[Tensor], OrderedDict[int, Any] | None] = attrgetter("_backward_hooks")
hooks_after_accumulation: Callable[[Tensor], OrderedDict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


# Non-reentrant checkpointing as a generator: code before the first yield runs before forward, the
# rest after it. `torch.utils.checkpoint.checkpoint` calls the function itself, which forward hooks
# cannot do.
checkpoint_generator: Callable[..., Any] = (
    torch.utils.checkpoint._checkpoint_without_reentrant_generator
)


# --- torch.func ---------------------------------------------------------------------------------


def innermost(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of `torch.func`'s transforms (`grad`, `vmap`, ...), which have
    no storage of their own.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


# Whether a transform of `torch.func` is active. Asking for the stack of transforms would create one
# for this thread, which every autograd node copies from then on: 2 % of the instructions of a small
# model's step.
is_transformed: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
)


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Hide `function` from the transforms of `torch.func` that it is called in. They refuse
    in-place writes to tensors from outside of the transformed function, and the full buffers are
    such tensors.
    """

    @wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_transformed():
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return hidden


# --- memory and copies --------------------------------------------------------------------------

# `chunk_cat(tensors, dim, num_chunks, out=)` cuts each tensor into `num_chunks` chunks, pads them,
# and writes chunk i of all tensors to row i of `out`. Public operations need one or two views and a
# copy per tensor: 16 us for the 12 parameters of a transformer block in place of 5. FSDP2 uses it.
chunk_cat: Callable[..., Tensor] = torch._chunk_cat


# Swaps the memory of two storages, so that all views of one see the memory of the other; torch 2.11
# cannot. `resize_(0)` and back returns memory to the system and faults every page in again: about 8
# ms for 32 MiB.
CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


# Within `with no_views():` operations that make views make tensors of their own on the same memory,
# each with its own version counter. Autograd refuses writes, in grad mode, to views that were made
# outside of it, and writes to one view mark the others. `detach` would take longer per view, and
# shares the counter.
no_views: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._ExcludeDispatchKeyGuard,
    torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView),
)

# The method of a module that `Module.to`, `half`, `to_empty` and others call, of children first.
CONVERT: Final = "_apply"


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Exchange all parameters, gradients and buffers for what `function` makes of them, as
    `Module.to` does, which takes one dtype for all.
    """
    getattr(module, CONVERT)(function)


_reshape_alias: Final[Callable[..., Tensor]] = torch.ops.aten._reshape_alias.default


def view_without_memory(
    start: Tensor, shape: Sequence[int], strides: Sequence[int]
) -> Tensor | None:
    """A view of a storage that may be empty now, from the offset of `start`, an empty tensor.
    Public views check the size of the storage. None if the device does not implement it.
    """
    try:
        return _reshape_alias(start, shape, strides)
    except NotImplementedError:
        return None


def storage_key(tensor: Tensor) -> int:
    """The storage's identity, the same for all of its views, with and without memory. `data_ptr()`
    of a fake tensor's is 0.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


# Whether `parameter.data = tensor` is possible: not from a host to every device. `nn.Module.to`
# asks the same.
can_take_data: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type


# Whether a profiler runs in this process. A label costs 2 us even if no profiler reads it. Made in
# C, because it is asked at every launch and every wait.
profiled: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")


def as_real(tensor: Tensor) -> Tensor:
    """A view as pairs of real numbers if `tensor` is complex: the process group's own methods take
    real numbers.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Reached(BaseException):
    """A collective would have been launched."""


class _NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Reached
        return func(*args, **(kwargs or {}))


@contextmanager
def up_to_collectives() -> Iterator[None]:
    """Run the body up to its first collective, which is not launched; then leave it.

    There is no public call that observes the collectives that a tensor subclass launches.
    """
    with suppress(_Reached), _NoCollectives():  # type: ignore[no-untyped-call]
        yield


# A dispatch mode between two hooks: a `with` statement cannot begin in one and end in another. In
# backward the engine puts back a thread's modes behind each node, also behind one that has raised.
enter_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave one that was entered, whatever was entered since and not left."""
    others = []
    while torch._C._len_torch_dispatch_stack():
        top = torch._C._pop_torch_dispatch_stack(None)
        if top is mode:
            break
        others.append(top)
    for other in reversed(others):
        enter_mode(other)


def modes_are_on() -> bool:
    """Whether operators of this thread go to a dispatch mode."""
    return bool(torch._C._len_torch_dispatch_stack())


# --- in place of parts of torch, for a simulated machine -----------------------------------------


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let an attribute be `value` in the body; an inherited one is inherited again after it."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if is_own else delattr(owner, name)


def on_resize(note: Callable[[torch.UntypedStorage, int], None]) -> AbstractContextManager[None]:
    """In the body `note(storage, before)` is called when a storage of `before` bytes was resized by
    Python: that is no operator, so that dispatch modes do not see it.
    """
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        found = resize(storage, size)
        note(storage, before)
        return found

    return _replaced(torch.UntypedStorage, "resize_", noted)


def foreach_on(device_type: str) -> AbstractContextManager[None]:
    """In the body optimizers whose `foreach` is not set step parameters on this type of device
    together, and those on others one by one. No public call says which types these are.
    """
    return _replaced(
        torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: [device_type]
    )


def constructed_by(function: Callable[..., None], kind: type) -> AbstractContextManager[None]:
    """In the body `function` is called in place of `__init__` of a class and of what inherits it:
    torch's wrappers communicate in their constructors, before they can be found in a model.
    """
    return _replaced(kind, "__init__", function)


def excepthook_kept() -> AbstractContextManager[None]:
    """After the body uncaught errors are printed as before it. `init_process_group` puts the rank
    before them, once more for each group that there was, and `destroy_process_group` leaves it so.
    """
    return _replaced(sys, "excepthook", sys.excepthook)


# --- DTensor ------------------------------------------------------------------------------------

# The local tensor itself. `to_local()` makes an alias, or an autograd node, at every call.
local_of: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, and another tensor as it is."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Collection[Tensor]) -> list[Tensor]:
    """The local tensors of DTensors, and other tensors as they are. A loop in C."""
    return list(map(getattr, tensors, repeat("_local_tensor"), tensors))


# Placements that cut a dimension. transformers cuts weights that hold several ("packed", as the
# gate and the up projection of experts) by the second one, and torch has no public name for it.
SHARDS: Final = (Shard, _StridedShard)


def cut_by(placement: Placement, cut: Callable[..., Tensor], whole: Tensor) -> Tensor:
    """`cut(whole, dim=...)` along the dimension of one of `SHARDS`: all of it, or each of the parts
    into which a `_StridedShard` divides it first, side by side.
    """
    dim, parts = placement.dim, getattr(placement, "split_factor", 1)  # type: ignore[attr-defined]
    if parts == 1:
        return cut(whole, dim=dim)
    return torch.cat([cut(part, dim=dim) for part in whole.chunk(parts, dim)], dim)


def forget_meshes() -> None:
    """Let torch forget what it found for operations on DTensors. Their results keep the mesh of the
    first ones; one with equal ranks, made after its process groups were destroyed, is taken for it.
    """
    # as `torch.distributed.tensor.debug` does, which needs NumPy
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def waited_for(tensor: Tensor) -> Tensor:
    """`tensor`, or what is in it if a collective that a DTensor has launched still writes to it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def placed_alike(tensors: Collection[Tensor], others: Collection[Tensor]) -> bool:
    """Whether tensors are DTensors with the same placements pairwise, or plain. Most share their
    `_spec`, which is quicker.
    """

    def both(name: str) -> list[list[Any]]:
        return [list(map(getattr, each, repeat(name), repeat(None))) for each in (tensors, others)]

    specs, others_specs = both("_spec")
    if all(map(is_, specs, others_specs)):
        return True
    placements, others_placements = both("placements")
    return placements == others_placements


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Exchange the local tensor of a `DTensor` that keeps its identity, because optimizers and
    users hold it.
    """
    tensor._local_tensor = local


# Inside of this context attributes of a `DTensor` are looked up without
# `DTensor.__torch_function__`, which does not override them, in 60 ns in place of 110. No code of
# the user may run inside.
as_tensors: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def parameter_around(tensor: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Make a new `DTensor` a parameter.

    `nn.Parameter` would detach it: an operation on a `DTensor`, whose caches may give the result an
    equal mesh that was made earlier, whose process groups are destroyed or differ. What makes a
    tensor of a subclass a parameter is this mark.
    """
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True
    return tensor  # type: ignore[return-value]


_NOTHING: Final = nullcontext()


def outside_inference() -> AbstractContextManager[Any]:
    """No tensor that is made in the block is an inference tensor. `torch.inference_mode(False)`,
    which may turn gradients on, takes 1.5 us also where there is nothing to do.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


# The parameters of blocks that repeat have equal specs, and torch takes 20 us to make one. Each
# holds its mesh, so that no other mesh has its `id`. Weak: a mesh holds its process groups, which
# must not outlive the model.
_SPECS: Final[WeakValueDictionary[Any, DTensorSpec]] = WeakValueDictionary()


def wrap(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    device: torch.device | None = None,
) -> DTensor:
    """A `DTensor` around `local`, without a collective. `device` is what it reports, if that is not
    the device of `local`.

    Public is only `DTensor.from_local`, which moves a local tensor to the device of the mesh, and
    is an operation to autograd.
    """
    # The mesh by identity: an equal one may have other process groups.
    key = (id(mesh), tuple(placements), shape, stride, local.dtype)
    with outside_inference():
        spec = _SPECS.get(key)
        if spec is None:
            meta = TensorMeta(shape, stride, local.dtype)
            spec = _SPECS[key] = DTensorSpec(mesh, key[1], tensor_meta=meta)
        stand_in = torch.empty(0, dtype=local.dtype, device=device or local.device)
        (made,) = dtensors_around([local], [spec], stand_in)
        return made


def gather_rows(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, if all have as many. The class of `local` may implement this.

    For shards of an `NF4Tensor`, `DTensor.full_tensor` of torch 2.13 corrupted the heap on gloo,
    once in about 300 gathers on a busy host, also without this library; the cause is not known.
    This gather, which wraps nothing in an `AsyncCollectiveTensor`, did not in 3,200.
    """
    ops = torch.ops._c10d_functional
    rows = ops.all_gather_into_tensor(local, group.size(), group.group_name)
    return ops.wait_tensor(rows)  # type: ignore[no-any-return]


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A `DTensor` around `local` with the mesh, placements and global shape of `like`, whose local
    tensor has the same shape, strides and dtype.

    `DTensor.from_local` computes in 50 us what `like` knows; this takes 5 us.
    """
    with outside_inference():
        (made,) = dtensors_around([local], [like._spec], local.new_empty(0))
        return made


# `DTensor.__init__` does nothing, behind two decorators that take most of the 12 us of a
# construction.
_new_dtensor: Callable[..., DTensor] = partial(DTensor.__new__, DTensor, requires_grad=False)


def dtensors_around(
    locals_: Sequence[Tensor], specs: Iterable[Any], stand_in: Tensor
) -> list[DTensor]:
    """`dtensor_like` for many tensors: 2 us each.

    Args:
        specs: of each, the `_spec` of a DTensor whose local tensor has the shape, strides and dtype
            of that one.
        stand_in: an empty tensor of that dtype and device; a `DTensor` takes over the storage
            offset of what it is made around.
    """
    made = list(map(_new_dtensor, repeat(stand_in), specs))
    for tensor, local in zip(made, locals_, strict=True):
        tensor._local_tensor = local
    return made


# --- optimizers ---------------------------------------------------------------------------------


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks may be registered for its `step`: a wrapper may not have called the
    constructor of its base class, which makes the tables of hooks.
    """
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def step_hooks(
    optimizer: torch.optim.Optimizer,
) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The pre-hooks and post-hooks of an optimizer's `step`, in the order in which they run. The
    public calls only append.
    """
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # type: ignore[return-value]


# Of the function that torch puts around `step` of every class of optimizers that was made.
_STEP: Final = Optimizer.profile_hook_step(len).__code__


def steps_its_base(optimizer: Optimizer) -> bool:
    """Whether the hook of a step that asks runs for `super().step()` in the optimizer's own step.
    torch calls all hooks for both, if an optimizer of the base class was made in the process.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


# What is in containers and what the containers are, apart, for other ranks to build them again.
# torch has no public module for it.
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = pytree.tree_flatten
tree_unflatten: Callable[[Iterable[Any], Any], Any] = pytree.tree_unflatten


_CHECKPOINTS: Final = {
    f"torch.distributed.checkpoint.{name}"
    for name in ("state_dict", "state_dict_saver", "state_dict_loader")
}


def called_by_checkpoints() -> bool:
    """Whether a state dict is made for `torch.distributed.checkpoint`, whose functions all ranks
    call. They call `optimizer.state_dict()` as anybody does, and say nothing of it.
    """
    names = (frame.f_globals.get("__name__") for frame, _ in walk_stack(None))
    return any(name in _CHECKPOINTS for name in names)


# --- process groups -----------------------------------------------------------------------------


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of the group's collectives on `device`; None where torch does not tell. There is
    no public getter.
    """
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the group's ranks found each other, which works also after a
    collective failed; None if the group was destroyed.
    """
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


# The collectives by their argument that is of as many bytes on all ranks; None where ranks differ.
_COLLECTIVES: Final[dict[int | None, tuple[str, ...]]] = {
    0: (
        "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    ),
    1: ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    None: ("alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier"),
}  # fmt: skip
_collectives: Final = torch.library.Library("c10d", "IMPL")


def on_collectives(note: Callable[[dist.ProcessGroup, str, int | None], None]) -> None:
    """Call `note(group, kind, bytes)` before every collective of this process, also of torch's own,
    from here on. Messages between two ranks are none.

    Nothing public is called for all of them: the functional collectives, which DTensor uses, do not
    pass the methods of process groups. All are operators, though. `BackendSelect` comes right
    before their kernels, also in inference mode and below autograd, and nothing else is there.
    """
    for counted, names in _COLLECTIVES.items():
        for name in names:
            noted = _noted(getattr(torch.ops.c10d, name).default, counted, note)
            _collectives.impl(name, noted, "BackendSelect", with_keyset=True)


def _noted(operator: Any, counted: int | None, note: Callable[..., None]) -> Any:
    kind = operator._schema.name.removeprefix("c10d::").strip("_")
    arguments = [argument.name for argument in operator._schema.arguments]
    group_at = arguments.index("process_group")

    @untraced  # a graph must not take it in, where a compiled function runs a part as it is
    def noted(keyset: Any, *args: Any) -> Any:
        if not keyset.has(torch._C.DispatchKey.Meta):  # of a graph that is traced
            size = None if counted is None else bytes_in(args[counted])
            note(dist.ProcessGroup.unbox(args[group_at]), kind, size)
        # without the interpreter lock, which threads of the backend may need
        return operator.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args)

    return noted


def bytes_in(values: Any) -> int:
    """Of the tensors in lists and tuples, at any depth."""
    if isinstance(values, Tensor):
        # of sparse tensors ranks may have other numbers of rows
        return values.nbytes if values.layout is torch.strided else 0
    return sum(map(bytes_in, values)) if isinstance(values, (list, tuple)) else 0


def choose_symmetric_memory() -> None:
    """Let symmetric memory be NCCL's, for this process. torch documents the module under a name
    that is private.

    Raises:
        RuntimeError: torch was built without it; AttributeError by a version that has no pool.
    """
    symmetric.set_backend("NCCL")
    _ = symmetric.get_mem_pool


def symmetric_tensor(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> Tensor:
    """A tensor that all ranks of `group`, which make it together, have mapped. Its memory is of a
    pool of torch's, which keeps what was mapped.
    """
    with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
        made = torch.empty(size, dtype=dtype, device=device)
    symmetric.rendezvous(made, group.group_name)
    return made


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a group launches one kind of collective: names of its own methods, and their options.

    `getattr(group, single)(output, input, options)` returns a work, or None if there is nothing to
    wait for; `coalesced` takes lists of outputs and inputs, launches all at once, and takes
    `coalesced_options`. Complex tensors go in as `as_real`. The all-reduce has no outputs: both
    methods take a list of tensors that they reduce in place, `single` a list of one.
    """

    single: str
    coalesced: str
    options: Any
    coalesced_options: Any


# The options of one collective, and of several at once.
_OPTIONS: Final = {
    "all_gather": (AllgatherOptions, AllgatherOptions),
    "reduce_scatter": (ReduceScatterOptions, ReduceScatterOptions),
    "all_reduce": (AllreduceOptions, AllreduceCoalescedOptions),
}


def launchers(
    group: dist.ProcessGroup, *, asynchronous: bool, mean: bool = False
) -> dict[str, Launcher]:
    """The group's own collectives by kind. With `mean`, which gloo does not know, reductions divide
    the sum.

    torch's public functions end in these methods, after 9 us of Python checks that give the same
    result at every call. The only public way to several collectives in one launch is a context,
    which stays open if an exception ends its body.
    """
    if hasattr(group, "all_gather_single"):  # not in torch 2.11
        gathers = ("all_gather_single", "all_gather_single_coalesced")
        scatters = ("reduce_scatter_single", "reduce_scatter_single_coalesced")
    else:
        gathers = ("_allgather_base", "allgather_into_tensor_coalesced")
        scatters = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
    methods = {
        "all_gather": gathers,
        "reduce_scatter": scatters,
        "all_reduce": ("allreduce", "allreduce_coalesced"),
    }
    found = {}
    for kind, (single, coalesced) in _OPTIONS.items():
        options: list[Any] = [single(), coalesced()]
        for each in options:
            each.asyncOp = asynchronous
            if mean and kind != "all_gather":
                each.reduceOp = dist.ReduceOp.AVG
        found[kind] = Launcher(*methods[kind], *options)
    return found


def cannot_coalesce(error: RuntimeError) -> bool:
    """Whether a backend says by `error` that it cannot launch several collectives at once, and has
    launched none.
    """
    return "does not support" in str(error) or "No backend type associated" in str(error)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of one dimension over the ranks of a slice of a larger one.

    No public call makes one that the larger mesh knows by its name, so that `mesh[name]` and a
    second call return the same object, with the same process group.
    """
    return mesh._flatten(name)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a slice was taken of; no public attribute has it."""
    return mesh._get_root_mesh()


def active_ddp() -> DistributedDataParallel | None:
    """The `DistributedDataParallel` whose forward is running."""
    return DistributedDataParallel._active_ddp_module


# The class of modules that torch's own `fully_shard` has annotated, whatever
# `torch.distributed.fsdp` holds under its name later on (`composable.fsdp2.install`).
FSDP2Module: Final[type] = FSDPModule


def classes_of_fsdp2() -> list[str]:
    """The classes that torch's own `fully_shard` gave to modules of this process. Nothing public
    tells whether there are any.
    """
    return [cls.__name__ for cls in get_cls_to_fsdp_cls().values()]


# what schedules of several stages compute, but for halves of backwards
_WHOLE: Final = {"FORWARD", "FULL_BACKWARD", "OVERLAP_F_B"}


def split_backward_schedule() -> str:
    """The pipeline schedule that is running, by its class, if it splits backwards into those of
    inputs and of weights; or "".

    Nothing public tells which actions a schedule has. Those of all ranks are looked at, so that all
    ranks get one answer. A schedule whose actions another version of torch keeps elsewhere, or
    calls by other names, counts as one that splits.
    """
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    if module is None:
        return ""
    for frame, _ in walk_stack(None):
        schedule = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "eval") else None
        if isinstance(schedule, module.PipelineScheduleMulti):
            orders = getattr(schedule, "pipeline_order", {})
            found = [action for order in orders.values() for action in order if action is not None]
            found += [part for action in found for part in getattr(action, "sub_actions", ()) or ()]
            kinds = [getattr(action, "computation_type", None) for action in found]
            names = {getattr(kind, "name", "") for kind in kinds}
            return "" if names and names <= _WHOLE else type(schedule).__name__
    return ""


# The hooks that a `Join` calls on ranks without data, in order.
join_hooks: Callable[[Join], list[JoinHook]] = attrgetter("_join_hooks")


# --- what is exchanged in torch -----------------------------------------------------------------

# Nothing else of this package sets an attribute of a module or class that is not its own.

_UNSCALE: Final = "_unscale_grads_"


def wrap_unscaling(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let gradient scalers unscale the gradients of an optimizer by what `wrap` makes of torch's
    method, from here on.

    The scaler's only method that knows the optimizer, and so all parameters. An operation that
    torch lets DTensors handle knows the gradients of one device and dtype only, of which ranks may
    have different ones. There is no public hook.
    """
    for kind in (GradScaler, ShardedGradScaler):
        setattr(kind, _UNSCALE, wrap(vars(kind)[_UNSCALE]))


def wrap_join(
    made: Callable[[Callable[..., None]], Callable[..., None]],
    notified: Callable[[Callable[[Joinable], Any]], Callable[[Joinable], Any]],
) -> None:
    """Make `Join(...)` and `Join.notify_join_context` by what these make of torch's, from here on.

    A joinable knows neither the other joinables of its `Join`, nor what they broadcast.
    """
    Join.__init__ = made(Join.__init__)  # type: ignore[method-assign]
    notifies: Any = staticmethod(notified(Join.notify_join_context))
    Join.notify_join_context = notifies  # type: ignore[method-assign]


def on_zero_grad(
    owner: nn.Module | Optimizer, notify: Callable[[bool], object]
) -> Callable[[], None]:
    """Call `notify(set_to_none)` after each `owner.zero_grad()`; returns what ends it.

    torch has no hook for it, and gradients that are zero may have been so before.
    """
    own = vars(owner)
    before = own.get("zero_grad")
    own["zero_grad"] = _ZeroGrad(owner, before or owner.zero_grad, notify)

    def end() -> None:
        if before is None:
            del own["zero_grad"]
        else:
            own["zero_grad"] = before

    return end


class _ZeroGrad:
    """`zero_grad` of one module or optimizer. A copy of that has its own, which notifies nobody."""

    def __init__(
        self, owner: object, zero_grad: Callable[..., None], notify: Callable[[bool], object]
    ) -> None:
        self._owner, self._zero_grad, self._notify = owner, zero_grad, notify

    def __call__(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)
        self._notify(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._zero_grad, memo)  # a method becomes that of the owner's copy

    def __reduce__(self) -> Any:
        return getattr, (self._owner, "zero_grad")


def modules_with(wanted: Mapping[int, Any]) -> list[str]:
    """The imported modules that have one of these objects, by `id`, as an attribute."""
    return [
        name
        for name in sorted(sys.modules)
        if any(id(value) in wanted for value in _attributes(name).values())
    ]


def exchange_in_modules(names: Iterable[str], by_id: Mapping[int, Any]) -> None:
    """Exchange objects in imported modules: who has imported one by name reads it there.

    Args:
        by_id: what takes its place, by the `id` of an object.
    """
    for name in names:
        attributes = _attributes(name)
        for key, value in attributes.items():
            attributes[key] = by_id.get(id(value), value)


def _attributes(name: str) -> dict[str, Any]:
    return getattr(sys.modules[name], "__dict__", None) or {}
