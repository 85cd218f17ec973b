"""`Repeat`, a dispatch mode that runs each operator of one unit twice and compares the bits.

`watch` finds the units with which this is possible (`candidates_in`) and repeats one of them in
each step, in turn.

Each operator of the unit's forward and backward runs again at once, on the same tensors, and its
bits are compared. Nothing can change the tensors in between. No code of the user runs twice:
modules, hooks, custom autograd functions and recomputations call each operator only once. If bits
differ, the operator runs some more times. If these runs differ from each other, the kernel is not
deterministic, and nothing is reported. The same holds for sums whose order is not fixed, because
their runs may agree by chance. Otherwise the first run has computed a wrong value.

| not run again                              | since                                           |
|--------------------------------------------|-------------------------------------------------|
| what is not torch's own (namespace `aten`) | it may do more than compute: collectives        |
| views; memory that is not filled           | there is nothing to compare                     |
| tensors of subclasses, sparse, on several  | operators on plain tensors below may be seen;   |
| devices                                    | copies between devices go on behind             |
| where other dispatch modes are below       | they may answer for an operator, as selective   |
|                                            | checkpointing does                              |

Units that contain units are left out, because their forward communicates. Tensor-parallel and
compiled units are left out, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from composable.compilation import backward_will_be_compiled
from composable.contract.values import map_tensors, tensors_in
from composable.errors import first_line
from composable.extras.watch.incident import generator_state, set_generator
from composable.seams import Unit, units_in
from composable.torch_private import (
    enter_mode,
    in_backward,
    is_transformed,
    leave_mode,
    made_since,
    modes_are_on,
    next_node,
)

NOT_DETERMINISTIC: Final = "its kernels are not deterministic"
MORE: Final = 4  # runs that must agree where the first two do not
# They answer with memory as it is, or write to the statistics that they say they read.
_NOT_FILLED: Final = ("empty", "set_", "resize", "record_stream", "lstsq")
_STATISTICS: Final = ("running_mean", "running_var")
# Operators that add as threads come, unless a program asks for deterministic algorithms.
_IN_ANY_ORDER: Final = ("index_put", " put")
_ON_ACCELERATORS: Final = (
    "index_add",
    "index_reduce",
    "scatter",
    "embedding_dense",
    "embedding_bag",
)
_ALIGNED: Final = 64  # bytes: where all memory of torch begins
_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Repeat:
    """The unit whose operators run again in this step."""

    unit: Unit
    _twice: _Twice = field(default_factory=lambda: _Twice())
    _open: list[tuple[bool, int]] = field(default_factory=list)  # calls: do operators run again

    @property
    def found(self) -> tuple[str, str]:
        """What has computed other bits than all later runs, and why nothing can be said of some.

        The first of each.
        """
        return self._twice.differs, self._twice.why

    def begin(self, module: nn.Module, *, looks: bool) -> None:
        """A module of the unit is about to compute."""
        again = looks and not (
            is_transformed()
            or modes_are_on()
            or _is_compiled(module)
            or _is_captured(self.unit.mesh_info.device)
        )
        self._open.append((again, next_node()))
        if again:
            enter_mode(self._twice)

    def end(self, output: Any) -> None:
        """It has computed. Where backward comes to what it made, operators run again, too."""
        if (since := self.stop()) is not None and not backward_will_be_compiled():
            for node in _nodes_since(since, tensors_in(output)):
                node.register_prehook(self._twice.enter_node)

    def stop(self) -> int | None:
        """It has computed, or raised. Returns its first node by number, if operators ran again."""
        again, since = self._open.pop() if self._open else (False, 0)
        if again:
            leave_mode(self._twice)
        return since if again else None

    def drop(self) -> None:
        """The step has ended; graphs that somebody keeps have the hooks."""
        self._twice.is_over = True


class _Twice(TorchDispatchMode):
    """Runs operators again.

    Attributes:
        differs, why: see `Repeat.found`.
        is_over: the step has ended.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differs = self.why = ""
        self.is_over = False

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    def enter_node(self, gradients: Any) -> None:
        """Backward is about to run a node. Behind it autograd has this thread's modes of before."""
        if not (self.is_over or modes_are_on()):
            enter_mode(self)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written_by(func)
        tensors = () if written is None else tensors_in((args, kwargs))
        if (
            written is None
            or not tensors
            or kwargs.get("generator") is not None
            or not _can_be_compared(tensors)
            or modes_are_on()
        ):
            return func(*args, **kwargs)
        # On the tensors themselves, but for those that it writes to.
        names = dict(zip([each.name for each in func._schema.arguments], args, strict=False))
        names |= kwargs
        targets = [names[name] for name in written if isinstance(names.get(name), Tensor)]
        if not _are_apart(targets, tensors):
            return func(*args, **kwargs)
        kept = {id(each): (each, _copy_of(each)) for each in targets}
        device = tensors[0].device
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = generator_state(device) if draws else None
        output = func(*args, **kwargs)
        after = generator_state(device) if draws else None
        first = [*_made(output, kept), *(tensor for tensor, _ in kept.values())]
        if not _can_be_compared([*tensors, *first]):
            return output

        def again() -> list[Tensor]:
            copies = {number: _copy_of(copy) for number, (_, copy) in kept.items()}
            if state is not None:
                set_generator(device, state)
            found = func(*_with(args, copies), **_with(kwargs, copies))
            return [*_made(found, map(id, copies.values())), *copies.values()]

        try:
            self._compare(func, first, again)
        except Exception as error:  # such as memory; of this rank, whose step goes on
            why = f"{_name(func)} raised {type(error).__name__} as it ran again"
            self.why = self.why or f"{why}: {first_line(error)}"
        finally:
            if after is not None:
                set_generator(device, after)
        return output

    def _compare(
        self, func: Any, first: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]
    ) -> None:
        second = again()
        index = _differs(first, second)
        if index is None:
            return
        for number in range(MORE):
            # where memory is not filled, no two runs find the same
            for each in first:
                torch.full_like(each, number % 2)
            if _differs(second, again()) is not None:
                break
        else:
            if _is_proof(func, second, again):
                phase = "backward" if in_backward() else "forward"
                self.differs = self.differs or f"output {index} of {_name(func)} in {phase}"
                return
        self.why = self.why or f"{NOT_DETERMINISTIC} ({_name(func)})"


def candidates_in(units: Iterable[Unit]) -> list[Unit]:
    """Units whose operators can run again; the same on all ranks."""
    return [
        unit
        for unit in units
        if {*units_in(*unit.modules)} <= {unit} and all(param.is_whole for param in unit.params)
    ]


def _is_compiled(module: nn.Module) -> bool:
    return any(each._compiled_call_impl is not None for each in module.modules())


def _is_captured(device: torch.device) -> bool:
    """Whether operators go to a CUDA graph; to read a result would end that."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _written_by(func: Any) -> tuple[str, ...] | None:
    """The names of what an operator writes to; None for those that do not run again."""
    # of the second kind results are views of memory that a copy does not have
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return None
    schema = func._schema
    name = schema.name.partition("::")[2]
    # a write has an alias, too, as its result
    views = [each.alias_info for each in schema.returns]
    if any(each is not None and not each.is_write for each in views) or not schema.returns:
        return None
    if any(each in name for each in _NOT_FILLED) or name == "copy_":
        return None
    written = [
        (each.name, each.type)
        for each in schema.arguments
        if each.name in _STATISTICS or (each.alias_info is not None and each.alias_info.is_write)
    ]
    if any("List" in str(kind) for _, kind in written):
        return None
    return tuple(name for name, _ in written)


def _is_proof(func: Any, found: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether equal runs prove anything: threads that add in any order may agree many times.

    Not if torch has another algorithm, or none, for programs that ask for deterministic ones.
    """
    asked = torch.get_deterministic_debug_mode()
    host = found[0].device.type == "cpu"
    names = _IN_ANY_ORDER if host else (*_IN_ANY_ORDER, *_ON_ACCELERATORS)
    if not asked and any(each in f" {_name(func).removeprefix('aten.')}" for each in names):
        return False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.set_deterministic_debug_mode("warn")
        try:
            other = again()
        finally:
            torch.set_deterministic_debug_mode(asked)
    return _differs(found, other) is None and not any(
        "does not have a deterministic implementation" in str(each.message) for each in said
    )


def _name(func: Any) -> str:
    return str(func.overloadpacket)


def _can_be_compared(tensors: Sequence[Tensor]) -> bool:
    """Plain ones of one device."""
    device = tensors[0].device
    return device.type != "meta" and all(
        type(each) in (Tensor, nn.Parameter)
        and each.device == device
        and each.layout is torch.strided
        and not (each.is_nested or each.is_quantized or each._is_zerotensor())
        for each in tensors
    )


def _are_apart(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether what an operator writes to shares no memory with what else it was given."""
    ids = {id(each) for each in targets}
    memory = {each.untyped_storage().data_ptr() for each in targets}
    others = (each for each in tensors if id(each) not in ids)
    return len(memory) == len(targets) and not any(
        each.untyped_storage().data_ptr() in memory for each in others
    )


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as `tensor` does: kernels go by strides and by alignment."""
    if not tensor.numel():
        return tensor.clone()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = tensor.data_ptr() % _ALIGNED // tensor.element_size()
    memory = tensor.new_empty(start + extent)
    memory[start:].copy_(tensor.as_strided((extent,), (1,), tensor.storage_offset()))
    return memory.as_strided(tensor.shape, tensor.stride(), start)


def _made(output: Any, written: Iterable[int]) -> list[Tensor]:
    """Results, without what was written to: these ids."""
    ids = {*written}
    return [each for each in tensors_in(output) if id(each) not in ids]


def _with(value: Any, copies: dict[int, Tensor]) -> Any:
    return map_tensors(value, lambda each: copies.get(id(each), each)) if copies else value


def _differs(one: Sequence[Tensor], other: Sequence[Tensor]) -> int | None:
    """The first whose bits are others."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((index for index, pair in pairs if not _is_same(*pair)), None)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.dtype is torch.uint8 or one.dtype != other.dtype or one.shape != other.shape:
        return one.dtype is torch.uint8  # space for later, which kernels need not fill
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_NUMBERS[tensor.element_size()])


def _nodes_since(number: int, tensors: Iterable[Tensor]) -> Iterable[Node]:
    """The nodes of autograd that made `tensors` since `next_node()` was `number`."""
    seen = set[Node]()
    pending = [each.grad_fn for each in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in seen or not made_since(number, node):
            continue
        seen.add(node)
        above = [each for each, _ in node.next_functions]
        if above:  # a leaf's has none, and hooks on it would outlive the step
            yield node
            pending += above
