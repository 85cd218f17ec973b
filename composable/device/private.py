"""The only use of torch's private parts, each with its reason and its fallback; knows nothing of this project.

Checked with torch 2.11.0, 2.13.0 (CPU build) and 2.15.0. Where a name is missing in another version the fallback is correct,
only slower.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from operator import attrgetter
from threading import get_ident
from typing import Any, Final, ParamSpec, TypeVar

import torch
import torch.distributed._composable
import torch.utils.checkpoint
from torch._functorch import pyfunctorch
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composable.compilation import untraced, untraced_alone

P = ParamSpec("P")
R = TypeVar("R")


def in_backward() -> bool:
    """Whether this thread is inside a backward pass. No public call tells a recomputation from an ordinary forward."""
    return bool(torch._C._current_graph_task_id() != -1)


# The number of the backward pass that this thread is in, -1 outside of one; nested passes have their own.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


# The node of a backward that this thread runs, None outside of them: a backward that ends there is inside of another one.
node_that_runs: Callable[[], object] = getattr(torch._C, "_current_autograd_node", lambda: None)


class _Ending:
    """What the engine calls when a backward pass ends, and drops without a call when it raises."""

    __slots__ = ("_callback", "_otherwise")

    def __init__(self, callback: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self._callback = callback
        self._otherwise: Callable[[], None] | None = otherwise

    @untraced
    def __call__(self) -> None:
        try:
            try:
                self._callback()
                self._otherwise = None
            except BaseException:
                self.give_up()  # at once: the traceback will keep this frame, and with it this object
                raise
        except BaseException:
            self.give_up()  # whole, if an interrupt has ended it
            raise

    @untraced
    def give_up(self) -> None:
        """The pass has raised, as somebody has seen before it was dropped. Done twice is done once."""
        if self._otherwise is not None:
            self._otherwise()
            self._otherwise = None

    @untraced
    def __del__(self) -> None:
        try:
            self.give_up()
        except BaseException:
            self.give_up()
            raise


class _CallsOfTheEngine:
    """The calls of autograd's engine that run now, and what each of them has to end. An accelerator's part of a backward runs
    in a thread of the engine's, which drops the pass a little after the caller has its error: milliseconds, in which
    parameters would not be back. So whoever called the engine does what the drop would have done, before anybody sees it.
    """

    def __init__(self) -> None:
        self._of_threads: dict[int, list[list[_Ending]]] = {}

    @untraced_alone
    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        endings: list[_Ending] = []
        self._of_threads.setdefault(thread, []).append(endings)
        try:
            try:
                return call(*args, **kwargs)
            except BaseException:
                self._give_up(endings)
                raise
        except BaseException:
            self._give_up(endings)  # whole, if an interrupt has ended it
            raise
        finally:
            endings.clear()
            calls = self._of_threads[thread]
            calls.pop()
            if not calls:
                del self._of_threads[thread]

    @staticmethod
    @untraced
    def _give_up(endings: list[_Ending]) -> None:
        for ending in endings:
            ending.give_up()

    def take(self, ending: _Ending) -> None:
        """It belongs to the innermost call of this thread, or of the only one that has any. Whose it is that a thread of the
        engine's came upon is not known while several threads call the engine: then it is left to the drop."""
        calls = self._of_threads.get(get_ident())
        if calls is None and len(self._of_threads) == 1:
            (calls,) = self._of_threads.values()
        if calls:
            calls[-1].append(ending)


_calls: Final = _CallsOfTheEngine()


@cache
def end_backwards_where_they_are_called() -> None:
    """From here on, what is to be done after a backward that raised is done by the thread that called it, before the error
    goes on; for accelerators. There is no public way to be told; torch replaces this function in the same way where it traces
    backward. A torch without it drops what it was to call when it gets to it."""
    engine = getattr(torch.autograd, "_engine_run_backward", None)
    if engine is not None:

        @wraps(engine)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _calls.run(engine, *args, **kwargs)

        for module in (torch.autograd.graph, torch.autograd):
            module._engine_run_backward = untraced_alone(run)  # type: ignore[attr-defined]


def _nothing() -> None:
    return None


def at_end_of_backward(callback: Callable[[], None], otherwise: Callable[[], None] = _nothing) -> None:
    """Run `callback` when the running backward pass ends without an error, `otherwise` when it raised. The engine offers the
    first only here, and the second not at all: but the pass drops what it was to call before the error reaches the caller,
    or we do. `otherwise` must not raise, and wait for nobody; an interrupt may end it, then it is called again."""
    ending = _Ending(callback, otherwise)
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    _calls.take(ending)


# The number of the next autograd node that this thread makes. Backward runs the highest numbers first. No public call tells
# what a call of a module has made from what it was given; without this one, everything counts as made.
next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)


def made_since(number: int, node: torch.autograd.graph.Node) -> bool:
    """Whether `node` was made after `next_node` gave `number`, by the same thread."""
    return node._sequence_nr() >= number


_is_wrapped: Callable[[torch.Tensor], bool] = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of `torch.func`'s transforms (`grad`, `vmap`, ...); they have no storage of their own."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# Whether a transform of `torch.func` is at work. To ask for their stack would make one for this thread, which every node of
# autograd's would copy from then on: 2 % of the instructions of a small model's step.
if hasattr(torch._C, "_dispatch_tls_is_dispatch_key_included"):
    is_transformed: Callable[[], bool] = partial(
        torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    )
else:
    _stack: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
    is_transformed = lambda: _stack() is not None  # noqa: E731
_without_transforms: Callable[[], AbstractContextManager[Any]] = getattr(
    pyfunctorch, "temporarily_clear_interpreter_stack", nullcontext
)


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, not seen by the transforms of `torch.func` that it is called in. They refuse writes to memory from outside
    of what they transform, and what is gathered is such memory. There is no public way; a torch without this one refuses."""

    @wraps(function)
    def apart(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_transformed():
            return function(*args, **kwargs)
        with _without_transforms():
            return function(*args, **kwargs)

    return apart


def active_ddp() -> Any:
    """The `DistributedDataParallel` whose forward is running; None where there is none, or this torch does not tell."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


# Under which attributes of a module torch's own verbs (`fully_shard`, `replicate`) note a state of theirs, and that they were
# applied. There is no public way to ask, or to tell them; where a torch has none, nobody is told.
_contract: Final = sys.modules.get("torch.distributed._composable.contract")
STATES_OF_VERBS: Final[str | None] = getattr(_contract, "STATE_KEY", None)
NAMES_OF_VERBS: Final[str | None] = getattr(_contract, "REGISTRY_KEY", None)


# Whether a profiler of torch's runs in this process: labels cost 2 us each whether or not somebody reads them. There is no
# public way to ask; a torch that does not tell gets none. Made in C, because it is asked for every launch and every wait.
profiled: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", False)


def flattened_by_torch(parameter: torch.Tensor) -> bool:
    """Whether a `FullyShardedDataParallel` has a part of `parameter` in a flat one of its own."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as pairs of real numbers, if it holds complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# `chunk_cat(tensors, dim, num_chunks, out=)` cuts each tensor into `num_chunks` chunks, pads them, and lays chunk i of all
# tensors into row i of `out`. Public operations need a view, or two, and a copy per tensor: 16 us for the 12 of a block, not 5.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


def _cannot_swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    raise NotImplementedError("this torch cannot exchange the memory of two storages")


CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# Exchanges the memory of two storages, views and all; only if `CAN_SWAP`. `resize_(0)` and back returns memory to the system
# and faults every page in again: about 8 ms for 32 MiB.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", _cannot_swap
)


CAN_COUNT_USERS = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")

# How many tensors and handles share the storage with this key, and how many references from C++ (a `.grad` slot, a graph) hold
# a tensor; meaningless where this torch cannot tell (`CAN_COUNT_USERS`).
storage_users: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda key: 0)
tensor_users: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 0)


def storage_key(tensor: torch.Tensor) -> int:
    """What `storage_users` knows a tensor's storage by, while the tensor lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def view_without_memory(start: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor | None:
    """A view of a storage from where `start`, an empty tensor, lies; None where this device has none that does without memory.

    Whatever is public asks whether the storage is large enough now.
    """
    try:
        view: torch.Tensor = torch.ops.aten._reshape_alias(start, shape, strides)
    except (AttributeError, NotImplementedError):
        return None
    return view


# Gives each tensor's version counter a number. `torch.autograd._unsafe_preserve_version_counter` does so around a block of
# code, and torch's own fully_shard stands on it, too.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


# The local tensor itself. `to_local()` is public, but makes an alias, or an autograd node, at every call. A getter made in C,
# because it runs for every parameter in every step.
local_of: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a `DTensor` keep its identity (optimizers and users hold it) while its data moves into our buffer."""
    tensor._local_tensor = local


# Inside of it, attributes of a `DTensor` are looked up as those of a plain tensor are, in 60 ns; else 50 more go into asking
# whether its class answers in torch's place, which it does not. Nothing of the user's may run inside. There is no public way.
as_tensors: Callable[[], AbstractContextManager[Any]] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)

# A parameter's hooks of either kind, None or an ordered dict. Autograd calls them for gradients that it accumulates itself;
# nothing public tells of them. Getters made in C, because they run for every parameter in every backward.
gradient_hooks: Callable[[torch.Tensor], OrderedDict[int, Any] | None] = attrgetter("_backward_hooks")
hooks_after_accumulation: Callable[[torch.Tensor], OrderedDict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")


def take_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target` has the hooks of `source`, and those that either gets from now on if there are some: what removes one knows
    the dictionary that it is in."""
    if (hooks := gradient_hooks(source)) is not None:
        target._backward_hooks = hooks
    if (hooks := hooks_after_accumulation(source)) is not None:
        target._post_accumulate_grad_hooks = hooks


def parameter_around(tensor: DTensor, *, requires_grad: bool) -> torch.nn.Parameter:
    """A parameter that is spread over the very mesh of `tensor`.

    A Parameter is a detached copy of what it is made of, and DTensor's caches may give what comes out of an operation an equal
    mesh from before, whose groups have been destroyed or are other ones. Without these attributes it may have such a mesh.
    """
    parameter = torch.nn.Parameter(tensor, requires_grad=requires_grad)
    if getattr(tensor, "_spec", None) is not None:
        parameter._spec = tensor._spec  # type: ignore[attr-defined]
    return parameter


def dtensor_like(local: torch.Tensor, like: DTensor, says: torch.device | None = None) -> DTensor:
    """A `DTensor` around `local`, spread and shaped as `like`, whose local tensor has the same shape, strides and dtype. It
    `says` that it is on some other device, if it is told to.
    `DTensor.from_local` is public, but takes 50 us to find out what `like` knows, against 5 us.
    """
    spec = getattr(like, "_spec", None)
    if spec is None:
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    # Around another tensor first: a `DTensor` takes over the storage offset of what it is made around.
    made = DTensor(local.new_empty(0) if says is None else local.new_empty(0, device=says), spec, requires_grad=False)
    set_local(made, local)
    return made


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """An optimizer's own hooks before and after `step`, in the order in which they run.

    The public calls only append. Without them (another torch) the two are empty: then nobody can tell who runs last.
    """
    before = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    after = getattr(optimizer, "_optimizer_step_post_hooks", None)
    return OrderedDict() if before is None else before, OrderedDict() if after is None else after


def step_code(kind: type[torch.optim.Optimizer]) -> tuple[object, object]:
    """The functions that a class of optimizers steps with, without what torch wraps around `step`."""
    return inspect.unwrap(kind.step), getattr(kind, "_init_group", None)


def checkpoint_generator(function: Any, options: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
    """Non-reentrant checkpointing as a bracket: code before the first yield runs before forward, the rest after it.

    `torch.utils.checkpoint.checkpoint` calls the function itself, which hooks that leave `forward` alone cannot do.
    `options`: preserve_rng_state, context_fn, determinism_check, debug, early_stop.
    """
    return torch.utils.checkpoint._checkpoint_without_reentrant_generator(function, *options, *args, **kwargs)


def explain_mismatches(generator: Any, explain: Callable[[BaseException], None]) -> None:
    """Call `explain` with the error that a bracket of `checkpoint_generator` raises where a second run saved something else.

    A method of what holds saved tensors raises it after that run; torch's own callback for it comes with `debug` alone.
    """
    holder = generator.gi_frame.f_locals.get("new_frame")
    check = getattr(type(holder), "check_recomputed_tensors_match", None)
    if check is None:
        return
    # Weakly: it must not hold itself, and with it the inputs of a forward.
    holder.check_recomputed_tensors_match = partial(_explained, check, weakref.ref(holder), explain)


@untraced
def _explained(check: Callable[[Any, int], None], holder: Any, explain: Callable[[BaseException], None], run: int) -> None:
    try:
        check(holder(), run)
    except RuntimeError as error:
        explain(error)
        raise
