"""Groups of sharded parameters that are gathered, or rest, in another way, and `GroupingByForm`,
which picks one for each parameter.

`OffloadedGroup`: shards rest on the host, and come to the device before they are gathered
(`memory/offload.py`).

`ExtendedGroup`: parameters are gathered in a form of their own, FSDP2's extension protocol. A
tensor class with two methods chooses what is sent of a shard, and builds the whole parameter from
what arrives. It may send fewer bytes than the parameter has (fp8 of torchao, 4-bit `NF4Tensor`), or
another form:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (whole, inner tensors)

A third method may say that the whole parameter does not use the memory of the outputs, so this
memory is freed as soon as the whole is filled (MXFP8 weights; pytorch/pytorch#194114):

    fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool

| | |
|---|---|
| at rest | a `DTensor(Shard(0))` around a local tensor with the protocol, cut by `torch.chunk` |
| message | bytes; one row per rank, with space for each tensor of each parameter |
| gathered | an `ElasticBuffer` per tensor |
| compute | a parameter around the whole that `fsdp_post_all_gather` returned; it is made once |

When the group is built, the second method makes the whole parameter once, with undefined values.
After each gather it fills this parameter again (`out=`), so modules, hooks and autograd see one
compute parameter as long as the group exists. Gradients are plain tensors and are reduced like all
others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from composable.comm.base import DONE, Again, Comm, Work
from composable.comm.launch import Launch
from composable.comm.mesh_info import MeshInfo
from composable.config import CPUOffloadPolicy, MixedPrecisionPolicy
from composable.engine.params.layout import Slot
from composable.engine.params.param import ManagedParam, Sends, memory_order
from composable.engine.params.param_group import (
    Gather,
    Grouping,
    GroupKey,
    ParamGroup,
    ShardedGroup,
)
from composable.engine.step.unit import Unit
from composable.errors import AnnotationError, PhaseError, first_line
from composable.memory.elastic import ElasticBuffer, note_resized
from composable.memory.offload import ComingShards, HostHome
from composable.memory.streams import has_streams
from composable.tensors import POST, PRE, RELEASE, cloned, cut_along, has_protocol, plain_parts
from composable.torch_private import local_of, local_tensor, storage_key, up_to_collectives

_ALIGN: Final = 16  # bytes; kernels that copy read as many at once


# --- parameters in a form of their own -----------------------------------------------------------


class _Plain:
    """A parameter without the protocol, in the message of others that have it.

    Attributes:
        local: its shard.
        rows: of the largest shard.
        buffers: memory of each tensor that is sent, of all ranks; none on the meta device.
        outputs: its views that `fsdp_post_all_gather` is given.
        compute: the parameter around the whole; on the meta device, one without memory.
    """

    def __init__(self, param: ManagedParam, slot: Slot, local: Tensor, dtype: torch.dtype) -> None:
        self.param, self.local, self._dtype = param, local, dtype
        self._shape = torch.Size(slot.shape)
        self.rows = slot.local_shape(0)[0]
        self.buffers: list[ElasticBuffer] = []
        self.outputs: tuple[Tensor, ...] = ()
        self.compute = nn.Parameter(torch.empty(slot.shape, dtype=dtype, device="meta"), False)

    def ask(self) -> list[Tensor]:
        """What this rank sends."""
        return [self.local.to(self._dtype)]

    def ask_agreed(self) -> list[Tensor]:
        """The same, which must fit into what all ranks have agreed on."""
        tensors, sends = self.ask(), self.param.sends
        assert sends is not None
        if [tensor.dtype for tensor in tensors] != [dtype for _, dtype in sends] or any(
            tensor.numel() > math.prod(shape)
            for tensor, (shape, _) in zip(tensors, sends, strict=True)
        ):
            raise PhaseError(
                f"parameter '{self.param.fqn}': {PRE}() returned tensors of other dtypes or sizes"
                " than all ranks agreed on when the module was annotated. They must stay the same."
                " If its shard was exchanged, call refresh(model) on all ranks, after all have"
                " exchanged it"
            )
        return tensors

    def try_out(self) -> None:
        """Raise what `ask` would raise before the class's first collective, if it has one."""
        with up_to_collectives():
            self.ask()

    def describe(self) -> Sends:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.ask()]

    def make(self, comm: Comm) -> None:
        """Make the memory and the compute parameter."""
        assert self.param.sends is not None
        outputs = []
        for shape, dtype in self.param.sends:
            buffer = ElasticBuffer(math.prod(shape) * comm.size, dtype, comm.device)
            buffer.allocate()
            self.buffers.append(buffer)
            output = buffer.tensor.data.view(-1, *shape[1:])
            # Padding is between the last rows and the end; nobody sees it.
            outputs.append(output[: self._shape[0]] if shape[:1] == (self.rows,) else output)
        self.outputs = tuple(outputs)
        whole = self._whole()
        trains = self.param.current.requires_grad
        if whole.shape != self._shape or (trains and whole.dtype != self._dtype):
            raise AnnotationError(
                f"{POST}() returned a tensor of shape {tuple(whole.shape)} and {whole.dtype},"
                f" where the parameter has {tuple(self._shape)} and computes in {self._dtype}"
            )
        self.compute = self.param.info.form.compute_parameter(
            whole.detach(), requires_grad=whole.is_floating_point() or whole.is_complex()
        )

    def _whole(self) -> Tensor:
        """The whole parameter of what all ranks send."""
        return self.outputs[0]

    def fill(self) -> None:
        """All tensors are there: let the compute parameter have their values."""

    def free(self) -> None:
        """Free what the compute parameter has of its own."""


class _Extended(_Plain):
    """A parameter with the protocol, as its group gathers it.

    Attributes:
        inner: storages of other tensors that `fsdp_post_all_gather` returned to be freed, with
            their bytes.
        releases: the outputs are needed no more once the compute parameter has its values.
    """

    def __init__(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *args: Any) -> None:
        super().__init__(*args)
        strides = torch.empty(self._shape, device="meta").stride()
        module = self.param.info.places[0].module
        self._args: tuple[Any, ...] = mesh, self._shape, strides, module, policy
        if _takes_one(getattr(self.local, PRE)):  # torch's first form of the protocol
            self._args = (mesh,)
        release: Callable[[], bool] | None = getattr(self.local, RELEASE, None)
        self.releases = release is not None and release()
        self._metadata: Any = None
        self.inner: list[tuple[torch.UntypedStorage, int]] = []

    @override
    def ask(self) -> list[Tensor]:
        tensors, self._metadata = getattr(self.local, PRE)(*self._args)
        return [tensors] if isinstance(tensors, Tensor) else list(tensors)

    def _post(self, **out: Tensor) -> Any:
        metadata, self._metadata = self._metadata, None
        return getattr(self.local, POST)(self.outputs, metadata, self._dtype, **out)

    @override
    def _whole(self) -> Tensor:
        whole, inner = self._post()
        ours = {storage_key(output) for output in self.outputs}
        if self.releases and not ours.isdisjoint(map(storage_key, plain_parts(whole))):
            raise AnnotationError(
                f"{POST}() returned a tensor over the memory of what was gathered, and"
                f" {RELEASE}() says that it is needed no more"
            )
        found = {storage_key(tensor): tensor.untyped_storage() for tensor in inner}
        self.inner = [
            (storage, storage.nbytes())
            for key, storage in found.items()
            if key not in ours and storage.nbytes()
        ]
        for storage, _ in self.inner:
            note_resized(storage)
        return whole  # type: ignore[no-any-return]

    @override
    def fill(self) -> None:
        for storage, nbytes in self.inner:
            storage.resize_(nbytes)
        self._post(out=self.compute)
        for buffer in self.buffers if self.releases else ():
            buffer.free()

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
        self.buffers = tuple(buffer for param in params for buffer in param.buffers)
        self._starts: list[int] = []  # of each tensor in a row
        self._sizes, self._targets, end = list[int](), list[Tensor](), 0
        for buffer in self.buffers:
            octets, nbytes = buffer.tensor.data.view(torch.uint8), buffer.nbytes // comm.size
            self._starts.append(end)
            self._sizes.append(nbytes)
            self._targets.append(octets.view(comm.size, nbytes))
            if gap := -nbytes % _ALIGN:  # is copied to nowhere
                self._sizes.append(gap)
                self._targets.append(octets.new_empty(comm.size, gap))
            end += nbytes + gap
        self._row = ElasticBuffer(end, torch.uint8, device)
        self._received = ElasticBuffer(comm.size * end, torch.uint8, device)
        self.pairs = Again([(self._received.tensor.data, self._row.tensor.data)])
        self.free()

    @torch.no_grad()
    def _make(self) -> None:
        """Make memory and compute parameters. One rank alone may have moved the memory of its
        shards, so nothing is asked again of what is known.
        """
        if all(param.param.sends is not None for param in self._params):
            for param in self._params:
                param.ask_agreed()
                param.make(self._comm)
            return
        # A class may refuse an empty shard, and the other ranks would wait for this one in a
        # collective of the class (fp8 of torchao reduces its scales).
        self._on_all(_Plain.try_out)
        for param, said in zip(self._params, self._on_all(_Plain.describe), strict=True):
            param.param.agree(_largest(param, said))
        self._on_all(lambda param: param.make(self._comm))

    def _on_all(self, call: Callable[[_Plain], Any]) -> list[list[Any]]:
        """What a call returns for each parameter, by rank. A failure on one rank is one on all."""
        mine: list[tuple[Any, str]] = []
        for param in self._params:
            try:
                mine.append((call(param), ""))
            except Exception as error:
                mine.append((None, f"{type(error).__name__}: {first_line(error)}"))
        every = self._comm.all_gather_objects(
            mine, Launch("agreement on what parameters send in their own form")
        )
        for param, of_ranks in zip(self._params, zip(*every, strict=True), strict=True):
            for rank, (_, text) in enumerate(of_ranks):
                if text:
                    raise _refusal(param, f"rank {rank}: {text}")
        return [[value for value, _ in of_ranks] for of_ranks in zip(*every, strict=True)]

    @torch.inference_mode(False)  # turns gradients on, too
    @torch.no_grad()
    def launch(self, launch: Launch) -> Work:
        self._row.allocate()
        self._received.allocate()
        octets = self._row.tensor.data
        tensors = (tensor for param in self._params for tensor in param.ask_agreed())
        for tensor, start in zip(tensors, self._starts, strict=True):
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            octets[start : start + source.numel()].copy_(source)
        return self._comm.all_gather(self.pairs, launch)

    @torch.inference_mode(False)  # turns gradients on, too
    @torch.no_grad()
    def land(self) -> None:
        self._row.free()  # the gather has read its input
        for buffer in self.buffers:
            buffer.allocate()
        rows = self._received.tensor.data.view(self._comm.size, -1)
        torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._targets)
        self._received.free()
        for param in self._params:
            param.fill()

    def free(self) -> None:
        for buffer in (self._row, self._received, *self.buffers):
            buffer.free()
        for param in self._params:
            param.free()


def _takes_one(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return [each.kind is not each.VAR_POSITIONAL for each in parameters] == [True]


def _largest(param: _Plain, said: Sequence[Sends]) -> Sends:
    """What the largest rank sends. Raises, on all ranks alike, if it does not fit together."""
    if len({tuple(dtype for _, dtype in tensors) for tensors in said}) > 1:
        raise _refusal(param, f"ranks send tensors of different dtypes, {said}")
    sends = []
    for of_ranks in zip(*said, strict=True):
        shapes = list(dict.fromkeys(shape for shape, _ in of_ranks))
        largest = max(shapes)
        if any(shape[1:] != largest[1:] for shape in shapes) or (
            len(shapes) > 1 and largest[0] != param.rows
        ):
            raise _refusal(param, f"ranks send tensors of different shapes, {shapes}")
        sends.append((largest, of_ranks[0][1]))
    return sends


def _refusal(param: _Plain, why: str) -> AnnotationError:
    return AnnotationError(
        f"parameter '{param.param.fqn}' cannot be gathered in its own form: {why}"
    )


class ExtendedGroup(ShardedGroup):
    """A group of parameters with the protocol, and others. They have memory of their own."""

    extended = True

    def __init__(self, policy: MixedPrecisionPolicy, *args: Any) -> None:
        self._policy = policy
        super().__init__(*args)

    @override
    def _make_memory(self) -> tuple[Tensor, ...]:
        return tuple(map(self._shard_of, self.params))

    def _shard_of(self, param: ManagedParam) -> Tensor:
        if isinstance(param.current, DTensor):
            return local_of(param.current)
        return cloned(cut_along(param.current.detach(), 0, self.comm.size, self.comm.rank))

    @override
    def _local(self, slot: Slot) -> Tensor:
        return self._memory[self.slots.index(slot)]

    @override
    def _make_gather(self) -> Gather:
        dtype, mesh = self.precision.compute, _mesh_of_shards(self.mesh_info)
        self._extended = [
            _Extended(mesh, self._policy, param, slot, local, dtype)
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
    def put_back(self) -> None:
        """Their class says where that is."""

    @override
    def _is_changed(self, param: ManagedParam, slot: Slot, address: int) -> bool:
        return False  # an exchanged local tensor is seen for all kinds of groups


def _mesh_of_shards(info: MeshInfo) -> DeviceMesh:
    """The dimension of the mesh that parameters are sharded over."""
    mesh = info.mesh
    assert mesh is not None
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[info.shard_dim]]
    return DeviceMesh.from_group(mesh.get_group(info.shard_dim), mesh.device_type)


def refuse_extended(what: str, unit: Unit) -> None:
    """Raise if parameters are gathered in a form of their own, and have no shard buffer."""
    for group in unit.groups:
        if group.extended:
            raise AnnotationError(
                f"{what}: unit '{unit.name}' gathers parameters in a form of their own"
                f" (fsdp_pre_all_gather), '{group.params[0].fqn}' among them; {what} takes"
                " plain parameters only. Leave it out for this model"
            )


# --- CPU offload ---------------------------------------------------------------------------------


class OffloadedGather(Gather):
    """Sends a copy of the shards that exists as long as the gather needs it."""

    def __init__(self, group: OffloadedGroup) -> None:
        self._coming = ComingShards(group.shard, group.home)
        super().__init__(group)
        self._holds_input = True

    @override
    def _read(self, start: int, numel: int) -> Tensor:
        return self._coming.buffer.stretch(start, numel).data

    @override
    def launch(self, launch: Launch) -> Work:
        for buffer in self._in_flight:
            buffer.allocate()
        self._coming.bring(*self._casts)
        if not self.pairs:
            return DONE
        with self._coming.here():
            return self._comm.all_gather(self.pairs, launch)

    @override
    def end_sending(self) -> None:
        self._coming.end()
        super().end_sending()


class OffloadedGroup(ShardedGroup):
    """Parameters whose shards rest on the host, as their gradients do."""

    def __init__(self, home: HostHome, params: Sequence[ManagedParam], key: GroupKey) -> None:
        self.home, self.to_rest = home, home.take
        super().__init__(params, key)

    @override
    def _make_shard(self) -> Tensor:
        return self.home.zeros(self.layout.shard_numel, self.precision.original)

    @override
    def _make_gather(self) -> Gather:
        return OffloadedGather(self)

    @override
    def _aliased(self, slot: Slot) -> bool:
        return False


# --- which group a parameter is in ---------------------------------------------------------------


@dataclass(frozen=True)
class GroupingByForm(Grouping):
    """One group, which may rest on the host, or two where some parameters have FSDP2's extension
    protocol: these, with plain ones that can share their message, and the rest.

    Attributes:
        policy: that the protocol's methods are given.
    """

    policy: MixedPrecisionPolicy = field(compare=False)
    offload: CPUOffloadPolicy | None = None

    @property
    @override
    def on_host(self) -> bool:
        return self.offload is not None

    @override
    def groups(self, params: Sequence[ManagedParam], key: GroupKey) -> list[ParamGroup]:
        extended = [param for param in params if _is_extended(param)]
        together = [p for p in params if p in extended or (extended and _may_join(p))]
        rest = [param for param in params if param not in together]
        made = list[ParamGroup]()
        if together:
            made.append(ExtendedGroup(self.policy, together, key))
        if rest and self.offload and has_streams(key.device):
            home = HostHome(key.device, pin_memory=self.offload.pin_memory)
            made.append(OffloadedGroup(home, rest, key))
        elif rest:
            made += super().groups(rest, key)
        return made


def _is_extended(param: ManagedParam) -> bool:
    """A plain parameter's attributes are not its shards', so that it has no protocol."""
    is_plain = type(param.current) is nn.Parameter
    return not is_plain and param.is_whole and has_protocol(local_tensor(param.current))


def _may_join(param: ManagedParam) -> bool:
    """Whether its shards are rows in memory order."""
    rows = param.info.form.is_whole and param.info.shard_dim == 0
    return rows and not memory_order(param.current)
