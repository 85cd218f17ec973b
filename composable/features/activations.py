"""What becomes of activations between forward and backward: they are computed again
(`checkpoint`), or are in host memory (`offload_activations`). Each is a bracket around the forward
of one module.

Each direction of copies has a stream of its own, and the host waits for neither.
Device memory is allocated and freed on the compute stream. The last few tensors (`AHEAD`) stay on
the device until their copies have ended; the compute stream waits for the copy of an older one
before its memory is freed, so memory stays bounded if the link is slower than the computation.
Backward reads saved tensors from the newest to the oldest, so a read launches the copies of the
next older ones. If the order differs a copy is wasted, and the values are still right.

What stays on the device:
* parameters, their views and their casts by autocast, memory that comes and goes, and buffers: an
  unsharded parameter is gathered again before backward, and the others stay on the device anyway;
* tensors that are not plain and strided, and those below `min_bytes`: a copy costs the host time
  whatever the size.

Autograd raises if a saved tensor was written to before backward, but not where hooks of saved
tensors replace it: backward would compute with the old values, or with new ones. So versions are
compared here, also for tensors that stay.

Autograd calls the innermost hooks only. Checkpointing inside of an offloaded module saves inputs
only, and these are offloaded. An offloaded module inside of a checkpointed one keeps its
activations on the host, and what is around it is recomputed. With both on one module offload is the
outer one and does nothing during the recomputation (`recomputing`), whose saved tensors belong to
checkpointing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import chain, count
from operator import methodcaller
from threading import local
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn
from typing_extensions import override

from composable.compilation import call_compiled, running_compiler, untraced, untraced_alone
from composable.engine.step.observer import OBSERVERS, Observer
from composable.errors import SavedTensorError
from composable.memory.elastic import is_elastic
from composable.memory.streams import Mark, Streams, any_has_streams, has_streams, streams_of
from composable.torch_private import checkpoint_generator, innermost, locals_of

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Tensors that may be on their way in one direction. Attention saves four tensors, and its backward
# reads all at once.
AHEAD: Final = 4
_MAX_SKIPPED: Final = 32  # how many older copies are looked at to find `AHEAD` that still exist
# bytes: kernels may round differently at another alignment; no allocator aligns to more
_ALIGNMENT: Final = 512

TO_HOST_STREAM: Final = "offload activations"
TO_DEVICE_STREAM: Final = "reload activations"


# --- copies -------------------------------------------------------------------------------------


class _OnDevice:
    """A 1-D device tensor that another stream copies from or to. Before its memory is freed the
    stream on which it was allocated waits for the copy.
    """

    __slots__ = ("_streams", "end", "flat", "stream")

    def __init__(
        self, flat: Tensor, host: Tensor, streams: Streams, on: str, after: Mark | None = None
    ) -> None:
        self.flat = flat
        self.stream = streams.here()
        self._streams = streams
        self.end: Mark | None = None  # of the copy
        target, source = (host, flat) if on == TO_HOST_STREAM else (flat, host)
        with streams.fork(on):
            if after is not None:
                after.join()
            target.copy_(source, non_blocking=host.is_pinned())
            self.end = streams.mark()

    def wait(self) -> None:
        """Make the current stream wait for the end of the copy."""
        if self.end is not None:
            self.end.join()

    def __del__(self) -> None:
        with self._streams.on(self.stream):
            self.wait()


class HostCopy:
    """The contents that a stretch of device memory had when it was saved. They are never written
    to.

    Several saved tensors may read one copy: views of one storage, and tensors that several nodes
    save.

    Attributes:
        near: the contents on the device, or on their way back to it.
        source: a weak reference to the storage that they are of.
    """

    __slots__ = ("__weakref__", "_arrived", "_copies", "_on_host", "index", "near", "source")

    def __init__(self, flat: Tensor, copies: HostCopies, index: int, *, pin_memory: bool) -> None:
        self.index = index
        self._copies = copies
        self.source = ref(flat.untyped_storage())
        # Pinned memory comes from torch's caching allocator, which does not hand out freed memory
        # before the copies that do not block have ended.
        self._on_host = torch.empty(
            flat.shape, dtype=flat.dtype, device="cpu", pin_memory=pin_memory
        )
        self.near: _OnDevice | None = _OnDevice(flat, self._on_host, copies.streams, TO_HOST_STREAM)
        self._arrived = self.near.end

    def bring_back(self) -> _OnDevice:
        """Launch the copy back, for the current stream, unless the contents are near on that
        stream.
        """
        copies = self._copies
        if self.near is not None and self.near.stream == copies.streams.here():
            return self.near
        flat = torch.empty(self._on_host.shape, dtype=self._on_host.dtype, device=copies.device)
        _keep_near(copies.returning, self, 2 * AHEAD)
        self.near = _OnDevice(
            flat, self._on_host, copies.streams, TO_DEVICE_STREAM, after=self._arrived
        )
        return self.near

    def read(self) -> Tensor:
        """The contents on the device, ordered before later work of the current stream."""
        near = self.bring_back()
        self._copies.bring_back_older(self.index)
        near.wait()
        return near.flat


class HostCopies:
    """All copies on the host of tensors of one device, in the order in which they were made.

    Attributes:
        returning: copies that are on their way back to the device, or have arrived there.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.device = device
        self.streams = streams
        self.returning: deque[ref[HostCopy]] = deque()
        self._leaving: deque[ref[HostCopy]] = deque()
        self._numbers = count()
        self._by_index: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()
        self._by_stretch: WeakValueDictionary[tuple[Any, ...], HostCopy] = WeakValueDictionary()

    @property
    def alive(self) -> int:
        """The number of copies that a graph still holds."""
        return len(self._by_index)

    def copy_of(self, tensor: Tensor, start: int, stop: int, *, pin_memory: bool) -> HostCopy:
        """The copy of elements `start` to `stop` of the storage of `tensor`, made now if there is
        none.
        """
        storage = tensor.untyped_storage()
        key = (id(storage), start, stop, tensor.dtype, tensor._version)
        found = self._by_stretch.get(key)
        # an id may have been used again
        if found is not None and found.source() is storage:
            return found
        flat = tensor.detach().as_strided((stop - start,), (1,), start)
        made = HostCopy(flat, self, next(self._numbers), pin_memory=pin_memory)
        self._by_index[made.index] = self._by_stretch[key] = made
        _keep_near(self._leaving, made, AHEAD)
        return made

    def bring_back_older(self, index: int) -> None:
        """Launch the copies back of the `AHEAD` copies that were made before `index`."""
        older = map(self._by_index.get, range(index - 1, max(index - 1 - _MAX_SKIPPED, -1), -1))
        for copy, _ in list(zip(filter(None, older), range(AHEAD), strict=False)):
            if copy.near is None:
                copy.bring_back()


def _keep_near(recent: deque[ref[HostCopy]], copy: HostCopy, most: int) -> None:
    """Add `copy` to those on the device; the oldest leave it so that `most` remain."""
    alive = [
        each
        for each in (reference() for reference in recent)
        if each is not None and each is not copy and each.near is not None
    ]
    for each in alive[: max(len(alive) + 1 - most, 0)]:
        each.near = None
    recent.clear()
    recent.extend(map(ref, (*alive[-most + 1 :], copy)))


# By device, which has an index if there are several of its kind.
_COPIES: Final[dict[torch.device, HostCopies]] = {}
_SIMULATED: Final[list[HostCopies]] = []  # of tensors of the host


def copies_of(device: torch.device) -> HostCopies | None:
    """The copies of tensors of `device`; None of a host's, which stay where they are."""
    if not has_streams(device):
        return _SIMULATED[-1] if _SIMULATED and device.type == "cpu" else None
    if device not in _COPIES:
        _COPIES[device] = HostCopies(device, streams_of(device))
    return _COPIES[device]


@contextmanager
def offloading_from_host(streams: Streams) -> Iterator[None]:
    """In the body tensors of the host are offloaded, too, over `streams`: they are those of a
    simulated accelerator.
    """
    _SIMULATED.append(HostCopies(torch.device("cpu"), streams))
    try:
        yield
    finally:
        _SIMULATED.pop()


# --- what autograd holds in place of a saved tensor ---------------------------------------------


@cache
def _without_memory(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _KeptTensor:
    """A saved tensor that stays on the device. `_alias` shares its version counter."""

    __slots__ = ("_alias", "_version", "_where")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self._alias = tensor.detach()
        self._version = tensor._version
        self._where = where

    def unpack(self) -> Tensor:
        """The tensor, for backward; an error if it was written to after forward."""
        self._check_version(self._alias.shape)
        return self._alias

    def _check_version(self, shape: torch.Size) -> None:
        if (version := self._alias._version) != self._version:
            raise SavedTensorError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: [{self._alias.type()} {list(shape)}], which {self._where}"
                f" saved for backward, is at version {version}; expected version {self._version}"
                " instead. Write to a copy of it, or after backward;"
                " torch.autograd.set_detect_anomaly(True) shows the operation that cannot compute"
                " its gradient"
            )


class _Offloaded(_KeptTensor):
    """A saved tensor whose contents are on the host, or on their way there."""

    __slots__ = ("_copy", "_offset", "_shape", "_strides")

    def __init__(self, tensor: Tensor, where: str, copy: HostCopy, start: int) -> None:
        super().__init__(tensor, where)
        # the version counter stays, the memory does not
        self._alias.data = _without_memory(tensor.dtype, tensor.device)
        self._copy = copy
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - start

    def unpack(self) -> Tensor:
        self._check_version(self._shape)
        with torch.no_grad():
            flat = self._copy.read()
            return flat.as_strided(self._shape, self._strides, flat.storage_offset() + self._offset)


def _extent(tensor: Tensor) -> int:
    """The number of elements from the first to the last one of `tensor` in its storage."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _stretch_around(tensor: Tensor, extent: int) -> tuple[int, int]:
    """The elements of the storage to copy: all, because several tensors may share it, unless half
    of it or more is something else. Two halves are two copies: a kernel may write the second half
    after the first was saved without a new version.
    """
    item = tensor.element_size()
    start, whole = int(tensor.storage_offset()), tensor.untyped_storage().nbytes() // item
    if 2 * extent > whole:
        return 0, whole
    return start - start % (_ALIGNMENT // item), start + extent


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and innermost(tensor) is tensor
    )


def _comes_from_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, a view of one, or a view of its cast by autocast, whose node has
    the parameter as input.
    """
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    if isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    leaf: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return isinstance(leaf, nn.Parameter) or (
        type(leaf) is Tensor and is_elastic(leaf.untyped_storage())
    )


def _storages_of(module: nn.Module) -> dict[int, torch.UntypedStorage]:
    """The storages of its parameters and buffers by their ids."""
    tensors = chain(module.parameters(), module.buffers())
    plain = locals_of(list(tensors))
    storages = (
        each.untyped_storage()
        for each in plain
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
    )
    return {id(storage): storage for storage in storages}


# --- the bracket of offloaded modules -----------------------------------------------------------


class _OfThread(local):
    def __init__(self) -> None:
        # Of offloaded modules whose forward runs, innermost last: the bracket, and what takes
        # autograd's hooks away again.
        self.open: list[tuple[OffloadBracket, ExitStack]] = []
        # whose own checkpointing runs them again, innermost last
        self.recomputed: list[nn.Module] = []


_of_thread: Final = _OfThread()


@contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Around the recomputation of a checkpointed module, which calls `module` itself."""
    _of_thread.recomputed.append(module)
    try:
        yield
    finally:
        _of_thread.recomputed.pop()


def is_recomputed(module: nn.Module) -> bool:
    """Whether the checkpointing of `module` itself runs it again, and not only that of a module
    around it.
    """
    return any(module is other for other in _of_thread.recomputed)


class OffloadBracket:
    """Around each forward of an offloaded module: autograd saves host copies of the tensors that
    forward makes.

    Args:
        min_bytes: smaller tensors stay on the device.
        pin_memory: without pinned memory every copy to the host blocks the host.
        name: of the module, for error messages.
    """

    def __init__(self, min_bytes: int, pin_memory: bool, name: str) -> None:
        self.min_bytes = min_bytes
        self.pin_memory = pin_memory
        self.name = name

    @untraced
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hooks = ExitStack()
        _of_thread.open.append((self, hooks))  # first: `post_forward` and `on_error` expect it
        if (_SIMULATED or any_has_streams()) and not is_recomputed(module):
            save = partial(self._save, cache(partial(_storages_of, module)))
            hooks.enter_context(saved_tensors_hooks(save, methodcaller("unpack")))
        return args, kwargs

    @untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.on_error(module)
        return output

    @untraced
    def on_error(self, module: nn.Module) -> None:
        forwards = _of_thread.open
        if any(bracket is self for bracket, _ in forwards):
            # Forwards above this one ended by a KeyboardInterrupt, of which torch does not tell
            # forward hooks. Autograd keeps hooks on a stack, so these end first.
            bracket = None
            while bracket is not self:
                bracket, hooks = forwards.pop()
                hooks.close()

    def _save(
        self, storages_that_stay: Callable[[], Mapping[int, object]], tensor: Tensor
    ) -> _KeptTensor:
        copies = copies_of(tensor.device)
        if copies is not None and _is_plain(tensor) and tensor.numel():
            extent, storage = _extent(tensor), tensor.untyped_storage()
            is_small = extent * tensor.element_size() < self.min_bytes
            stays = (
                is_small
                or is_elastic(storage)
                or _comes_from_parameter(tensor)
                or id(storage) in storages_that_stay()
            )
            if not stays:
                start, stop = _stretch_around(tensor, extent)
                copy = copies.copy_of(tensor, start, stop, pin_memory=self.pin_memory)
                return _Offloaded(tensor, self.name, copy, start)
        return _KeptTensor(tensor, self.name)


def close_interrupted() -> None:
    """End all forwards that this thread has open; none may be running. A KeyboardInterrupt leaves
    autograd with the hooks of the forwards that it ended, and everything saved later would be
    offloaded, too.
    """
    forwards = _of_thread.open
    while forwards:
        forwards.pop()[1].close()


class _Interrupts(Observer):
    @override
    def interrupted(self) -> None:
        close_interrupted()


OBSERVERS.add(_Interrupts())


# --- activations that are computed again ---------------------------------------------------------


class RecomputeOptions(NamedTuple):
    """What `torch.utils.checkpoint.checkpoint` takes, by the same names."""

    preserve_rng_state: bool
    context_fn: Contexts | None
    determinism_check: str
    debug: bool
    early_stop: bool


class RecomputeBracket:
    """Saves a module's inputs only, and runs its forward again when backward asks for the rest.

    The second run goes through the module's hooks again, but for this bracket: the annotations
    around it see it.
    """

    def __init__(self, options: RecomputeOptions) -> None:
        self._options = options._replace(context_fn=options.context_fn or noop_context_fn)
        self._open: list[Any] = []  # generators of forwards that are under way, innermost last
        self._recomputing = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": [], "_recomputing": 0}

    @untraced_alone
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self._recomputing:
            self._begin(module, args, kwargs, running_compiler())
        return args, kwargs

    @untraced
    def _begin(self, module: nn.Module, args: Any, kwargs: Any, compiler: Any) -> None:
        generator = checkpoint_generator(
            partial(self._again, module, compiler), *self._options, *args, **kwargs
        )
        self._open.append(generator)
        next(generator)

    @untraced
    def _again(self, module: nn.Module, compiler: Any, *args: Any, **kwargs: Any) -> None:
        self._recomputing += 1
        statistics = _hide_statistics(module)
        try:
            with recomputing(module):
                call_compiled(compiler, module, args, kwargs)
        finally:
            for norm, name, buffer in statistics:
                norm._buffers[name] = buffer
            self._recomputing -= 1

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if not self._recomputing:
            with suppress(StopIteration):
                next(self._open.pop())
        return output

    def on_error(self, module: nn.Module) -> None:
        if not self._recomputing and self._open:
            self._open.pop().close()


def _hide_statistics(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Let norms that train count into clones while they run again: each batch counts once.

    What the second run counts cannot be written back: autograd has saved the statistics, and would
    notice.
    """
    hidden = []
    for norm in module.modules():
        if (
            "running_mean" in norm._buffers
            and norm.training
            and getattr(norm, "track_running_stats", True)
        ):
            for name, buffer in norm._buffers.items():
                if buffer is not None:
                    hidden.append((norm, name, buffer))
                    norm._buffers[name] = buffer.clone()
    return hidden
