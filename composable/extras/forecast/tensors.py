"""Tensors without values: operations take time and memory on the simulated machine, and compute
nothing.

Outputs are host tensors whose pages are never touched, so storages, views and version counters are
real. A small tensor is computed if all its inputs were computed, because programs read such
tensors: step counters, sizes, indices, masks, and positions and tokens of a batch. Parameters,
buffers and outputs of collectives are never computed. Their values are unknown, whatever their
size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from composable.errors import ForecastError
from composable.extras.forecast.machine import (
    Machine,
    MemoryKind,
    is_unknown,
    note_unknown,
    refuse,
    tensors_in,
)
from composable.memory.elastic import is_elastic
from composable.torch_private import (
    CAN_SWAP,
    WRAPPERS,
    accumulates,
    group_named,
    local_tensor,
    on_resize,
)

_SMALL: Final = 1 << 18  # elements of tensors that are computed
_HUGE: Final = 1 << 30  # bytes
_NOT_RESERVED: Final[dict[str, int]] = (
    {"flags": MAP_PRIVATE | MAP_ANONYMOUS | 0x4000} if sys.platform == "linux" else {}
)  # with MAP_NORESERVE, which Python has no name for
_TAKES_TIME: Final = 1000  # floating elements of what is computed on the device; fewer are free
_REAL: Final = ("set_", "resize_", "_unsafe_view", "_fused_sdp_choice", "is_pinned", "lift")
_MADE: Final = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
)  # fmt: skip
_CONSTANT: Final = (  # of which only the shape depends on what is given
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
)  # fmt: skip
_COLLECTIVES: Final = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
_PICKS: Final = ("index", "_unsafe_index", "masked_select")
# each access makes another object, and all of them are equal
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_READS: Final = ("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose")


class NoValues(TorchDispatchMode):
    """Operations of the body take time and leave memory as it is.

    Args:
        model: has the names of parameters for messages.
    """

    def __init__(self, machine: Machine, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine
        self._model = model
        self._outputs_of: dict[Any, Any] = {}
        # when results of collectives that a DTensor has launched are there
        self._arrivals: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()
        self._resizes = on_resize(self._note_resized)

    def _note_resized(self, storage: torch.UntypedStorage, before: int) -> None:
        machine = self.machine
        if CAN_SWAP and not machine.device.accelerator and is_elastic(storage):
            machine.keeps_idle(before, storage.nbytes())
        machine.hold(storage)

    def __enter__(self) -> Any:
        self._resizes.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._resizes.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not WRAPPERS.isdisjoint(types):
            return NotImplemented  # what they do to plain tensors comes here again
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        if name in _READS:
            self.refuse_to_read(name, args)
            return func(*args)
        if func.namespace == "_c10d_functional":
            return self._collective(func, name, args, kwargs)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if func.namespace == "profiler" or name in _REAL or views:
            if name == "detach" and accumulates():
                self.machine.claim(args[0].untyped_storage(), MemoryKind.GRADIENTS)
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        # its input is a part of its output, which its schema does not say
        if name == "all_gather_copy_in":
            self._take(name, 2 * _bytes_of(args[0]), 0.0)
            return args[1].narrow(0, args[3] * args[4], args[3]), args[1]
        if torch.device("meta") == kwargs.get("device") or any(t.is_meta for t in given):
            made = func(*args, **kwargs)
            for tensor in tensors_in(made):
                if not tensor.is_meta:  # it gets memory
                    self._hold(tensor, unknown=True)
            return made
        if name in _PICKS:
            func, args = _by_numbers(func, name, args)
        if name in _MADE:
            if kwargs.get("pin_memory"):
                made = func(*args, **{**kwargs, "pin_memory": False})
                self.machine.hold_on_host(made.untyped_storage())
                return made
            made = func(*args, **kwargs)
            self._hold(made, unknown=not _is_small(made))
            return made
        known = all(map(_is_known, given))
        if (known or name in _CONSTANT) and self._makes_small(func, args, kwargs):
            made = func(*args, **kwargs)
            outputs = tensors_in(made)
            for tensor in outputs:
                self._hold(tensor)
            if not known or any(map(_takes_time, [*given, *outputs])):
                self._take(name, _bytes_of(given) + _bytes_of(outputs), 0.0)
            return made
        return self._skip(func, name, returns, given, args, kwargs)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A collective of DTensors: on a stream of its own, until something waits for it."""
        machine = self.machine
        if name == "wait_tensor":
            machine.wait_until(self._arrivals.get(args[0].untyped_storage(), 0.0))
            return args[0]
        if name == "_wrap_tensor_autograd":
            return func(*args)
        group, kind = group_named(args[-1]), _COLLECTIVES.get(name)
        if kind is None:
            refuse(group, name)
        made = args[0]
        if not name.endswith("_"):
            made, _ = self._outputs(func, args, kwargs, True)
            self._hold(made, unknown=True)
        stream = kind if machine.device.accelerator else machine.current
        with machine.fork(stream):
            group.take(kind, [made if kind == "all_gather" else args[0]])
            self._arrivals[made.untyped_storage()] = machine.ready[stream]
        return made

    def _skip(
        self, func: Any, name: str, returns: Any, given: Sequence[Tensor], args: Any, kwargs: Any
    ) -> Any:
        fresh = bool(returns) and not all(r.alias_info for r in returns)
        made, products = self._outputs(func, args, kwargs, fresh)
        arguments = func._schema.arguments
        values = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        targets = [values[a.name] for a in arguments if a.alias_info and a.alias_info.is_write]
        note_unknown(*tensors_in(targets))
        outputs = tensors_in(made)
        for tensor in outputs:
            self._hold(tensor, unknown=True)
        if name == "copy_" and any(t.untyped_storage() in self.machine.pinned for t in given):
            self.machine.run(args[1].nbytes / self.machine.device.to_host, name)
        else:
            self._take(name, _bytes_of(given) + _bytes_of(outputs), products)
        if fresh or not returns:
            return made
        return targets[0] if len(returns) == 1 else tuple(targets)

    def _makes_small(self, func: Any, args: Any, kwargs: Any) -> bool:
        try:
            return all(map(_is_small, tensors_in(self._outputs(func, args, kwargs, True)[0])))
        except RuntimeError:  # the shape depends on values, and these are known
            return True

    def _outputs(self, func: Any, args: Any, kwargs: Any, fresh: bool) -> tuple[Any, float]:
        """What the operation returns, without values, and the operations of its products.

        Models repeat themselves: shapes are worked out once for each kind of call.
        """
        leaves, tree = tree_flatten((args, kwargs))
        key: Any = (
            func,
            tree,
            *[
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ],
        )
        try:
            found = self._outputs_of.get(key)
        except TypeError:  # an argument that has no hash, or a symbolic one
            key = found = None
        if found is None:
            like = None
            if fresh:
                options = dict(kwargs)
                if options.get("device") is not None or not tensors_in((args, kwargs)):
                    options["device"] = torch.device("meta")
                try:
                    like = _like(func, _meta_of(args), _meta_of(options))
                except RuntimeError as error:  # `nonzero`, and what picks by a mask
                    by_values = torch.Tag.dynamic_output_shape in func.tags
                    if not (by_values or isinstance(error, NotImplementedError)):
                        raise
                    said = f"the shape of what {func.name()} returns"
                    raise self._refused(said, (args, kwargs)) from error
            products = _flops(func, args, kwargs, like)
            floating = (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point())
            found = like, products / self.machine.device.flops_of(next(floating, torch.float32))
            if key is not None:
                self._outputs_of[key] = found
        like, seconds = found
        return tree_map_only(Tensor, _hollow, like) if fresh else None, seconds

    def _take(self, what: str, nbytes: float, products: float) -> None:
        """It takes `products` seconds, or as long as its bytes."""
        device = self.machine.device
        moves = nbytes / (device.memory * device.memory_reached)
        self.machine.run(device.launch + max(moves, products), what)

    # --- what is known of values -----------------------------------------------------------------

    def _hold(self, tensor: Tensor, *, unknown: bool = False) -> None:
        self.machine.hold(tensor.untyped_storage())
        if unknown:
            note_unknown(tensor)

    def refuse_to_read(self, name: str, tensors: Any) -> None:
        if not all(tensor.is_meta or _is_known(tensor) for tensor in tensors_in(tensors)):
            raise self._refused(f"a value ({name})", tensors)

    def _refused(self, what: str, tensors: Any) -> ForecastError:
        machine = self.machine
        module = f", module '{machine.module}'" if machine.module else ""
        return ForecastError(
            f"forecast: the program reads {what} in {machine.place}{module}"
            f"{self._named(tensors_in(tensors))}, and tensors have no values here. Leave the"
            " reading out for the forecast (a flag of the model, a loss that is not printed), or"
            " give the part a fixed shape"
        )

    def _named(self, tensors: Sequence[Tensor]) -> str:
        """The parameter or buffer of which one of the tensors is a part, for a message."""
        model = self._model
        for name, member in (*model.named_parameters(), *model.named_buffers()):
            if any(_is_part(tensor, local_tensor(member)) for tensor in tensors):
                kind = "parameter" if isinstance(member, nn.Parameter) else "buffer"
                return f", {kind} '{name}'"
        return ""


class Functions(TorchFunctionMode):
    """What is seen of a program before it becomes operations.

    What reads memory without an operation is refused. For an accelerator, functions that run other
    kernels on a host, and keep other things for backward, run those of accelerators.
    """

    def __init__(self, values: NoValues) -> None:
        super().__init__()
        self._values = values
        self._accelerator = values.machine.device.accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._values.refuse_to_read(func.__name__, args[:1])
        elif func == _SET_DATA and type(args[0]) is Tensor:
            before, data = args
            # another storage over the same memory (`with_own_storage`)
            if is_unknown(before) and before.data_ptr() == data.data_ptr():
                note_unknown(data)
        if not self._accelerator:
            return func(*args, **kwargs)
        if func is torch.dropout:
            probability, training = args[1], args[2]
            if training and 0.0 < probability < 1.0:
                return torch.native_dropout(args[0], probability, True)[0]
        if func is torch.rms_norm:
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            eps = args[3] if len(args) > 3 else kwargs.get("eps")
            if weight is None or weight.dtype == args[0].dtype:
                return torch.ops.aten._fused_rms_norm(args[0], list(args[1]), weight, eps)[0]
        return func(*args, **kwargs)


def _is_part(tensor: Tensor, whole: Tensor) -> bool:
    if tensor.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return False
    return 0 <= tensor.data_ptr() - whole.data_ptr() < whole.nbytes


def _hollow(like: Tensor) -> Tensor:
    nbytes = like.untyped_storage().nbytes()
    if nbytes < _HUGE:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    # Linux refuses single allocations above all of its memory, unless it need not reserve them
    pages = mmap(-1, nbytes, **_NOT_RESERVED)
    made = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(made, 0, like.shape, like.stride())


def _by_numbers(func: Any, name: str, args: Any) -> tuple[Any, Any]:
    """The same pick of elements by their numbers, or by how many they are: its shape is known then,
    as the mask is.
    """
    if name == "masked_select":
        tensor, mask = args
        if not _is_known(mask):
            return func, args
        whole = prod(torch.broadcast_shapes(tensor.shape, mask.shape))
        count = int(mask.count_nonzero()) * whole // max(mask.numel(), 1)
        return torch.ops.aten.new_empty.default, (tensor, [count])
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype is torch.bool and _is_known(index):
            indices += index.nonzero().unbind(1)
        else:
            indices.append(index)
    return func, (args[0], indices)


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation returns for tensors on the meta device."""
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    # experts side by side: kernels take more dtypes than torch's function for the meta device
    a, b, *ends = args
    for each in (a, b):
        if max(each.stride()[-2:]) * each.element_size() % 16:  # as the kernels
            raise RuntimeError("strides should be multiple of 16 bytes")
    rows, columns = a.shape[-2], b.shape[-1]
    experts = [] if a.dim() != b.dim() else [len(ends[0] if a.dim() == 2 else a)]
    return a.new_empty([*experts, rows, columns])


def _meta_of(value: Any) -> Any:
    return tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        value,
    )


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() < _SMALL


def _takes_time(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= _TAKES_TIME


def _is_known(tensor: Tensor) -> bool:
    return _is_small(tensor) and not is_unknown(tensor)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    name = func.overloadpacket.__name__
    if "flash_attention_for_cpu" in name:  # causal: half of the products
        backward = "backward" in name
        query, key = args[1 if backward else 0], args[2 if backward else 1]
        batch, heads, length, width = query.shape
        products: float = 2.0 * batch * heads * length * key.shape[2] * width
        return products * (2.5 if backward else 1.0)
    if name == "_grouped_mm":
        a, b = args[:2]
        experts = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1
        products = 2.0 * a.numel() * b.shape[-1] / experts
        return products
    count: Callable[..., Any] | None = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
