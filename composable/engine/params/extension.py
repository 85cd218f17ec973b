"""Parameters that are gathered in a form of their own: FSDP2's extension protocol.

A tensor with two methods says what of its shard is sent, and makes the whole of what came, in fewer
bytes than the parameter has (fp8 of torchao, 4-bit `NF4Tensor`) or in another form:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (whole, inner tensors)

| | |
|---|---|
| at rest | a `DTensor(Shard(0))` around a local tensor with the protocol, cut by `torch.chunk` |
| message | bytes; one row per rank, with room for each tensor of each parameter |
| gathered | an `ElasticBuffer` per tensor |
| compute | a parameter around the whole that `fsdp_post_all_gather` returned; it is made once |

The whole is asked for once when the group is built, with undefined contents, and by `out=` after
each gather: modules, hooks and autograd know one compute parameter as long as the group lives.
Gradients are plain tensors and are reduced as all others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from composable.comm.base import Again, Comm, Work
from composable.comm.mesh_info import MeshInfo
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.engine.params.gather import Gather
from composable.engine.params.layout import Slot, round_up
from composable.engine.params.offloaded import OffloadedGroup
from composable.engine.params.param import ManagedParam, cut, memory_order
from composable.engine.params.param_group import ParamGroup
from composable.engine.params.precision import Precision
from composable.engine.params.protocol import POST, PRE, has_protocol, shard_of
from composable.engine.params.sharded import ShardedGroup
from composable.errors import AnnotationError, PhaseError, first_line
from composable.memory.elastic import ElasticBuffer
from composable.memory.streams import has_streams
from composable.memory.torch_private import local_of, locals_of, storage_key, up_to_collectives

_ALIGN: Final = 16  # bytes; casts of bytes to any dtype start at multiples of it


@dataclass(slots=True)
class _Sent:
    """One tensor of a parameter in the message.

    Attributes:
        buffer: memory of all ranks'.
        output: its view that `fsdp_post_all_gather` is given.
        start, nbytes: in a row of the message.
    """

    buffer: ElasticBuffer
    output: Tensor
    start: int
    nbytes: int


class _Plain:
    """A parameter without the protocol, in the message of others that have it.

    Attributes:
        local: its shard.
        rows: of the largest shard.
        sent: empty on the meta device.
        compute: the parameter around the whole; on the meta device, one without memory.
    """

    def __init__(self, param: ManagedParam, slot: Slot, local: Tensor, dtype: torch.dtype) -> None:
        self.param, self.local, self._dtype = param, local, dtype
        self._shape = torch.Size(slot.shape)
        self.rows = slot.local_shape(0)[0]
        self._trains = param.registered is not None and param.registered.requires_grad
        self.sent: list[_Sent] = []
        self.compute = nn.Parameter(torch.empty(slot.shape, dtype=dtype, device="meta"), False)

    @property
    def sends(self) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        assert self.param.sends is not None
        return self.param.sends

    def ask(self) -> list[Tensor]:
        """What this rank sends."""
        return [self.local.to(self._dtype)]

    def describe(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.ask()]

    def leaves_empty(self, ranks: int) -> bool:
        """Whether a rank has no rows, which a class may refuse."""
        return False

    def try_out(self) -> None:
        """Raise what `ask` would raise before the class's first collective, if it has one."""
        with up_to_collectives():
            self.ask()

    def make(self, said: Sequence[tuple[tuple[int, ...], torch.dtype]], comm: Comm) -> None:
        """Make the memory and the compute parameter.

        Args:
            said: shapes and dtypes of the tensors that the largest rank sends.
        """
        for shape, dtype in said:
            numel = math.prod(shape)
            buffer = ElasticBuffer(numel * comm.size, dtype, comm.device)
            buffer.allocate()
            rows = shape[0] * comm.size if shape else comm.size
            # Padding is between the last rows and the end; nobody sees it.
            if shape and shape[0] == self.rows:
                rows = self._shape[0]
            output = buffer.tensor.data.view(-1, *shape[1:])[:rows]
            self.sent.append(_Sent(buffer, output, 0, numel * dtype.itemsize))
        whole, inner = self._whole(tuple(each.output for each in self.sent))
        if whole.shape != self._shape or (self._trains and whole.dtype != self._dtype):
            raise AnnotationError(
                f"{POST}() returned a tensor of shape {tuple(whole.shape)} and {whole.dtype},"
                f" where the parameter has {tuple(self._shape)} and computes in {self._dtype}"
            )
        self.compute = nn.Parameter(
            whole.detach(), requires_grad=whole.is_floating_point() or whole.is_complex()
        )
        self._note(inner)

    def _whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Sequence[Tensor]]:
        """The whole parameter of what all ranks send, and other tensors that it consists of."""
        return outputs[0], ()

    def _note(self, inner: Sequence[Tensor]) -> None:
        """Note what is to be freed with the parameter."""

    def fill(self) -> None:
        """All tensors are there: let the compute parameter have their values."""

    def free(self) -> None:
        """Free what `_note` has noted."""


class _Extended(_Plain):
    """A parameter with the protocol, as its group gathers it.

    Attributes:
        inner: storages of other tensors that `fsdp_post_all_gather` returned to be freed, with
            their bytes.
    """

    def __init__(
        self,
        param: ManagedParam,
        slot: Slot,
        local: Tensor,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(param, slot, local, dtype)
        strides = torch.empty(slot.shape, device="meta").stride()
        # torch's first form of the protocol takes the mesh alone
        self._args: tuple[Any, ...] = (
            (mesh,)
            if _takes_one(getattr(local, PRE))
            else (mesh, self._shape, strides, param.info.places[0].module, policy)
        )
        self._metadata: Any = None
        self.inner: list[tuple[torch.UntypedStorage, int]] = []

    @override
    def ask(self) -> list[Tensor]:
        tensors, self._metadata = getattr(self.local, PRE)(*self._args)
        return [tensors] if isinstance(tensors, Tensor) else list(tensors)

    @override
    def leaves_empty(self, ranks: int) -> bool:
        return self.rows * (ranks - 1) >= self._shape[0]

    @override
    def _whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Sequence[Tensor]]:
        whole, inner = getattr(self.local, POST)(outputs, self._metadata, self._dtype)
        return whole, inner

    @override
    def _note(self, inner: Sequence[Tensor]) -> None:
        self._metadata = None
        ours = {storage_key(each.buffer.tensor) for each in self.sent}
        for tensor in inner:
            storage = tensor.untyped_storage()
            if (key := storage_key(tensor)) not in ours and storage.nbytes():
                ours.add(key)
                self.inner.append((storage, storage.nbytes()))

    @override
    def fill(self) -> None:
        for storage, nbytes in self.inner:
            storage.resize_(nbytes)
        metadata, self._metadata = self._metadata, None
        outputs = tuple(each.output for each in self.sent)
        getattr(self.local, POST)(outputs, metadata, self._dtype, out=self.compute)

    @override
    def free(self) -> None:
        for storage, _ in self.inner:
            storage.resize_(0)


class ExtendedGather(Gather):
    """A `Gather` of parameters with the protocol; see there, and the top of this file."""

    def __init__(self, params: Sequence[_Plain], comm: Comm, device: torch.device) -> None:
        self._params, self._comm = params, comm
        self.buffers: tuple[ElasticBuffer, ...] = ()
        if device.type == "meta":
            return
        self._make()
        sent = [each for param in params for each in param.sent]
        ends = 0
        for each in sent:
            each.start = ends
            ends = round_up(each.start + each.nbytes, _ALIGN)
        self.buffers = tuple(each.buffer for each in sent)
        self._row = ElasticBuffer(ends, torch.uint8, device)
        self._received = ElasticBuffer(comm.size * ends, torch.uint8, device)
        self._pairs = Again([(self._received.tensor.data, self._row.tensor.data)])
        # What lies between two tensors is copied to nowhere.
        starts = [*(each.start for each in sent), ends]
        self._sizes, self._targets = [], []
        for each, (start, after) in zip(sent, pairwise(starts), strict=True):
            octets = each.buffer.tensor.data.view(torch.uint8)
            self._sizes.append(each.nbytes)
            self._targets.append(octets.view(comm.size, each.nbytes))
            if gap := after - start - each.nbytes:
                self._sizes.append(gap)
                self._targets.append(octets.new_empty(comm.size, gap))
        self.free()

    @torch.no_grad()
    def _make(self) -> None:
        """Make memory and compute parameters. One rank alone may have moved the memory of its
        shards, so nothing is asked again of what is known.
        """
        if any(param.param.sends is None for param in self._params):
            self._ask_all()
            return
        for param in self._params:
            if not _fits(param.ask(), param.sends):
                raise PhaseError(
                    f"parameter '{param.param.fqn}': its new shard sends other dtypes or sizes"
                    f" ({PRE}()) than all ranks agreed on when the module was annotated. Call"
                    " refresh(model) on all ranks, after all have exchanged it"
                )
            param.make(param.sends, self._comm)

    def _ask_all(self) -> None:
        """Ask every rank what it sends. A failure on one rank is one on all."""

        def exchanged(said: list[tuple[Any, str]]) -> list[list[tuple[Any, str]]]:
            label = "agreement on what parameters send in their own form"
            every = self._comm.all_gather_objects(said, label)
            return [list(each) for each in zip(*every, strict=True)]

        # A class may refuse an empty shard, and the other ranks would wait for this one in a
        # collective of the class (fp8 of torchao reduces its scales).
        empty = [param for param in self._params if param.leaves_empty(self._comm.size)]
        tried = exchanged([_told(param.try_out) for param in empty]) if empty else ()
        for param, said in zip(empty, tried, strict=True):
            _refuse(param, said)
        asked = exchanged([_told(param.describe) for param in self._params])
        for param, said in zip(self._params, asked, strict=True):
            _refuse(param, said)
        largest = [[_largest(each) for each in _by_tensor(said)] for said in asked]
        made = exchanged(
            [
                _told(partial(param.make, sends, self._comm))
                for param, sends in zip(self._params, largest, strict=True)
            ]
        )
        for param, said in zip(self._params, made, strict=True):
            _refuse(param, said)
        for param, sends in zip(self._params, largest, strict=True):
            param.param.agree(sends)

    @torch.inference_mode(False)  # turns gradients on, too
    @torch.no_grad()
    def launch(self, label: str) -> Work | None:
        try:
            self._row.allocate()
            self._received.allocate()
            octets = self._row.tensor.data
            for param in self._params:
                tensors = param.ask()
                # it must fit into what was asked for when the group was built
                if not _fits(tensors, param.sends):
                    raise PhaseError(
                        f"parameter '{param.param.fqn}': {PRE}() returned tensors of other dtypes"
                        " or sizes than when the module was annotated. They must stay the same"
                    )
                for tensor, sent in zip(tensors, param.sent, strict=True):
                    source = tensor.detach().contiguous().view(-1).view(torch.uint8)
                    octets[sent.start : sent.start + source.numel()].copy_(source)
            return self._comm.all_gather(self._pairs, label)
        except BaseException:
            self.free()
            raise

    @torch.inference_mode(False)  # turns gradients on, too
    @torch.no_grad()
    def land(self) -> None:
        self.end_sending()
        for buffer in self.buffers:
            buffer.allocate()
        rows = self._received.tensor.data.view(self._comm.size, -1)
        torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._targets)
        self._received.free()
        for param in self._params:
            param.fill()

    def end_sending(self) -> None:
        """The gather has read its input."""
        self._row.free()

    def free(self) -> None:
        """Give all memory back. Nothing is in flight."""
        for buffer in (self._row, self._received, *self.buffers):
            buffer.free()
        for param in self._params:
            param.free()


def _fits(tensors: Sequence[Tensor], sends: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Whether the tensors have the dtypes of what the largest rank sends, and are not larger."""
    return [tensor.dtype for tensor in tensors] == [dtype for _, dtype in sends] and all(
        tensor.numel() <= math.prod(shape)
        for tensor, (shape, _) in zip(tensors, sends, strict=True)
    )


def _takes_one(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return [each.kind is not each.VAR_POSITIONAL for each in parameters] == [True]


_Said = Sequence[tuple[Any, str]]  # of each rank: what it sends, and why it failed


def _told(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call returned, and of an error its text: all ranks are told of it."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {first_line(error)}"


def _by_tensor(said: _Said) -> list[tuple[tuple[tuple[int, ...], torch.dtype], ...]]:
    """Shape and dtype of each tensor of a parameter, on all ranks."""
    return list(zip(*[tensors for tensors, _ in said], strict=True))


def _largest(of_ranks: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Any:
    return max(of_ranks, key=lambda tensor: tensor[0])


def _refuse(param: _Plain, said: _Said) -> None:
    """Raise, on all ranks alike, if a rank failed, or if what ranks send does not fit together."""
    what = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text), "")
    found = [tensors for tensors, _ in said if tensors is not None]
    if not what and len({tuple(dtype for _, dtype in tensors) for tensors in found}) > 1:
        what = f"ranks send tensors of different dtypes, {found}"
    for of_ranks in () if what or not found else _by_tensor(said):
        shapes = list(dict.fromkeys(shape for shape, _ in of_ranks))
        rows = {shape[:1] for shape in shapes}
        if len({shape[1:] for shape in shapes}) > 1 or (
            len(rows) > 1 and max(rows) != (param.rows,)
        ):
            what = f"ranks send tensors of different shapes, {shapes}"
    if what:
        raise AnnotationError(
            f"parameter '{param.param.fqn}' cannot be gathered in its own form: {what}"
        )


def _is_extended(param: ManagedParam) -> bool:
    """A plain parameter's attributes are not its shards', so that it has no protocol."""
    registered = param.registered
    assert registered is not None
    if type(registered) is nn.Parameter or not param.info.form.is_whole:
        return False
    return has_protocol(local_of(registered) if isinstance(registered, DTensor) else registered)


def _may_join(param: ManagedParam) -> bool:
    """Whether its shards are rows in memory order."""
    registered = param.registered
    rows = param.info.form.is_whole and param.info.shard_dim == 0
    return rows and registered is not None and not memory_order(registered)


class ExtendedGroup(ShardedGroup):
    """A group of parameters with the protocol, and others. They have memory of their own."""

    extended = True

    def __init__(
        self,
        params: Sequence[ManagedParam],
        precision: Precision,
        device: torch.device,
        mesh_info: MeshInfo,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self._policy = policy
        super().__init__(params, precision, device, mesh_info)

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for param, slot in zip(self.params, self.slots, strict=True):
            registered = param.registered
            assert registered is not None
            if isinstance(registered, DTensor):
                found.append(local_of(registered))
            elif type(registered) is nn.Parameter:
                found.append(cut(registered.data, slot, self.comm.rank).clone())
            else:
                found.append(shard_of(registered, self.comm.size, self.comm.rank))
        return tuple(found)

    @override
    def _local(self, slot: Slot) -> Tensor:
        return self._memory[self.slots.index(slot)]

    @override
    def _make_gather(self) -> Gather:
        dtype, mesh = self.precision.compute, _mesh_of_shards(self.mesh_info)
        self._extended = [
            _Extended(param, slot, local, dtype, mesh, self._policy)
            if has_protocol(local)
            else _Plain(param, slot, local, dtype)
            for param, slot, local in zip(self.params, self.slots, self._memory, strict=True)
        ]
        return ExtendedGather(self._extended, self.comm, self.device)

    @override
    def _aliased(self, slot: Slot) -> bool:
        return False

    @override
    def _make_compute(self, param: ManagedParam, slot: Slot) -> nn.Parameter:
        return self._extended[self.slots.index(slot)].compute

    @override
    def recast(self) -> list[ManagedParam]:
        return []  # their class says in which dtype they compute

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        return locals_of([param.at_rest])[0] is not self._local(slot)


def _mesh_of_shards(info: MeshInfo) -> DeviceMesh:
    """The dimension of the mesh that parameters are sharded over."""
    mesh = info.mesh
    assert mesh is not None
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[info.shard_dim]]
    return DeviceMesh.from_group(mesh.get_group(info.shard_dim), mesh.device_type)


def sharded_groups(
    params: Sequence[ManagedParam],
    precision: Precision,
    device: torch.device,
    mesh_info: MeshInfo,
    policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
) -> list[ParamGroup]:
    """One group, or two where some parameters have the protocol: these, with plain ones that can
    share their message, and the rest.
    """
    args, together = (precision, device, mesh_info), list[ManagedParam]()
    if any(map(_is_extended, params)):
        together = [param for param in params if _is_extended(param) or _may_join(param)]
    rest = [param for param in params if param not in together]
    groups: list[ParamGroup] = [ExtendedGroup(together, *args, policy)] if together else []
    if rest and offload and has_streams(device):
        groups.append(OffloadedGroup(rest, *args, offload))
    elif rest:
        groups.append(ShardedGroup(rest, *args))
    return groups
