"""One managed parameter: where it is registered, what users see at rest, and what modules compute
with.

Autograd always accumulates on the compute form; gradients land on the at-rest form. Both are one
object where nothing is sharded or cast:

| case                            | at rest                  | compute                             |
|---------------------------------|--------------------------|-------------------------------------|
| `fully_shard`                   | `DTensor` over the       | `nn.Parameter` over the full buffer |
|                                 | shard buffer             |                                     |
| `replicate` in a tree of shards | `DTensor(Replicate)`     | the user's own parameter            |
|                                 | over the user's memory   |                                     |
| `replicate` alone, or one rank  | the user's own parameter | the same object                     |
| the last two with a cast        | as above                 | `nn.Parameter` over the full buffer |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm.mesh_info import MeshInfo
from composable.contract.tree import Place
from composable.engine.params.layout import Route, Slot
from composable.engine.params.tensor_parallel import ModelSpec, whole_over_units
from composable.errors import few
from composable.memory.torch_private import (
    dtensor_like,
    local_of,
    parameter_around,
    set_local,
)

gradient_of: Final = attrgetter("grad")  # in C: it is asked of every parameter in every step
trainability: Final = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What an annotation asks of one parameter.

    Attributes:
        fqn: below the annotated module.
        places: every place where it is registered (several for tied weights).
        shard_dim: the dimension to shard; None for a parameter that is not sharded.
        exact: it keeps its dtype, whatever the mixed precision policy says.
        keeps: it computes in its dtype (`param_dtype_override_fn`).
        model: of a tensor-parallel parameter, how the user spread it.
        mesh_info: of a parameter on a mesh of its own (`shard_placement_fn`); None for that of its
            unit.
    """

    fqn: str
    places: tuple[Place, ...]
    shard_dim: int | None = None
    exact: bool = False
    keeps: bool = False
    model: ModelSpec | None = None
    mesh_info: MeshInfo | None = None


class Owner(Protocol):
    """The unit that manages a parameter, as far as this file looks."""

    mesh_info: MeshInfo
    relations: Any


# --- labels: what a parameter is to its unit, for optimizers, clipping, scalers and messages ----

_LABEL: Final = "_composable_label"


class ParamLabel:
    """What a parameter is to its unit.

    Attributes:
        unit, fqn: the names of both.
        form: "at_rest", "compute", "original" (replaced by the annotation, or when it was adopted),
            "replaced" (by the user, afterwards) or "removed" (replaced by `remove`).
        owner: of an at-rest or original parameter, the unit.
        places: modules, weakly, and names at which the unit's parameter is registered.
        holds_unreduced: its gradient, a plain tensor, was accumulated under `no_sync`.
        mesh_info: as of `ParamInfo`.
        joint: of a tensor-parallel parameter, as of `ModelSpec`.
    """

    __slots__ = ("form", "fqn", "holds_unreduced", "joint", "mesh_info", "owner", "places", "unit")

    def __init__(self, unit: str, fqn: str, form: str) -> None:
        self.unit, self.fqn, self.form = unit, fqn, form
        self.owner: ref[Any] | None = None
        self.places: tuple[tuple[ref[nn.Module], str], ...] = ()
        self.holds_unreduced = False
        self.mesh_info: MeshInfo | None = None
        self.joint: DeviceMesh | None = None

    @override
    def __str__(self) -> str:
        return f"parameter '{self.fqn}' of unit '{self.unit}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy, and what a file holds, belongs to no unit


def label_of(parameter: Tensor) -> ParamLabel | None:
    """What `parameter` is to the unit that manages it; None if no unit does."""
    return getattr(parameter, _LABEL, None)


def labels_of(parameters: Sequence[Tensor]) -> list[ParamLabel | None]:
    """`label_of` each; a loop in C."""
    return list(map(getattr, parameters, repeat(_LABEL), repeat(None)))


def set_label(
    parameter: nn.Parameter, info: ParamInfo, unit: str, form: str, owner: object = None
) -> None:
    label = label_of(parameter)
    if label is None:
        label = ParamLabel(unit, info.fqn, form)
        setattr(parameter, _LABEL, label)
    label.unit, label.fqn, label.form = unit, info.fqn, form
    label.mesh_info = info.mesh_info
    label.joint = None if info.model is None else info.model.joint
    label.places = tuple((ref(place.module), place.name) for place in info.places)
    if owner is not None:
        label.owner = ref(owner)


def drop_label(parameter: nn.Parameter) -> None:
    vars(parameter).pop(_LABEL, None)


def copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target` the Python attributes that users have set on `source`."""
    # What the constructor of a tensor subclass sets is on each of its tensors.
    own = vars(source.detach()) if type(source) not in (nn.Parameter, DTensor) else {}
    vars(target).update(
        {
            name: value
            for name, value in vars(source).items()
            if name not in (_LABEL, "_is_param") and name not in own
        }
    )


def owner_of(parameter: Tensor) -> Owner | None:
    """The unit that manages `parameter`; `unit_of` knows it as one."""
    label = label_of(parameter)
    return (
        None if label is None or label.owner is None or label.form == "original" else label.owner()
    )


def unit_mesh_of(parameter: Tensor) -> tuple[DeviceMesh | None, object]:
    """The mesh over which the parameter's gradient is reduced, and the number of the outermost
    annotation around.

    The mesh is None for one rank; both are None for a parameter that no unit manages.
    """
    owner, label = owner_of(parameter), label_of(parameter)
    if owner is None or label is None:
        return None, None
    return (label.mesh_info or owner.mesh_info).mesh, next(reversed(owner.relations.around), owner)


def model_group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The group of all ranks that train the model of which `parameter` is a part (an expert on a
    mesh of its own).

    None if the parameter's own mesh has all of them.
    """
    owner, label = owner_of(parameter), label_of(parameter)
    if owner is None or label is None:
        return None
    own = label.mesh_info
    group: ref[dist.ProcessGroup] | None = owner.relations.model_group
    if group is None and own is not None and own.all.size < owner.mesh_info.all.size:
        return owner.mesh_info.all.group
    return None if group is None else group()


def set_holds_unreduced(parameter: Tensor, *, holds: bool) -> None:
    if (label := label_of(parameter)) is not None:
        label.holds_unreduced = holds


def holds_unreduced(parameter: Tensor) -> bool:
    """Whether the gradient of an at-rest parameter was accumulated under `no_sync` and is not the
    mean over all ranks yet: a `DTensor` says so by `Partial`, a plain tensor by a mark.
    """
    label = label_of(parameter)
    marked = label is not None and label.holds_unreduced and parameter.grad is not None
    return marked or is_unreduced(parameter.grad)


# --- the managed parameter ----------------------------------------------------------------------


def _no_parameter() -> None:
    """`ManagedParam.original` of a copy."""


class ManagedParam:
    """One parameter of a unit.

    Attributes:
        info: what the annotation asked for; `places` may grow by tied places of other units.
        own: the user's parameter, for units that leave its memory where it is; None where the unit
            has shards.
        original: weakly, the parameter that was registered before the annotation, or that the user
            assigned later.
        at_rest, compute: see the table at the top of this file.
        grad_dtype: what the user has set `grad_dtype` of the parameter to; None if it is its dtype.
        sends: of a parameter that is gathered in a form of its own, shapes and dtypes of what the
            largest rank sends, as all ranks have told each other (`extension.py`).
    """

    __slots__ = (
        "__weakref__",
        "at_rest",
        "by_setattr",
        "compute",
        "grad_dtype",
        "info",
        "original",
        "own",
        "sends",
        "tables",
    )

    original: Callable[[], nn.Parameter | None]

    def __init__(self, info: ParamInfo) -> None:
        self.start(info)
        self.original = ref(self.at_rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> ManagedParam:
        return ManagedParam.__new__(ManagedParam)  # the copy of its unit starts it

    def start(self, info: ParamInfo) -> None:
        """Manage what is registered now."""
        registered = next(place.registered for place in info.places if place.registered is not None)
        self.original = _no_parameter
        self.own: nn.Parameter | None = None
        self.at_rest: nn.Parameter = registered
        self.compute: nn.Parameter = registered
        self.grad_dtype = chosen_grad_dtype(registered)
        self.sends: Sequence[tuple[tuple[int, ...], torch.dtype]] | None = None
        self.set_info(info)

    def start_as(self, original: ManagedParam, info: ParamInfo) -> None:
        """As the copy of `original`."""
        self.start(info)
        self.grad_dtype = original.grad_dtype  # copy.deepcopy drops it
        self.sends = original.sends

    def set_info(self, info: ParamInfo) -> None:
        self.info = info
        # RNNs keep a list of their own of their parameters, which only `setattr` updates.
        self.by_setattr = tuple(
            p for p in info.places if type(p.module).__setattr__ is not nn.Module.__setattr__
        )
        self.tables = tuple(
            (p.module._parameters, p.name) for p in info.places if p not in self.by_setattr
        )

    def drop_original(self) -> None:
        """It is the user's own, which torch cannot move (`Module.to` swaps `DTensor`s) while there
        are weak references to it.
        """
        self.original = _no_parameter

    def agree_anew(self) -> None:
        self.sends = None

    @property
    def fqn(self) -> str:
        return self.info.fqn

    @property
    def registered(self) -> nn.Parameter | None:
        return next(
            (found for place in self.info.places if (found := place.registered) is not None), None
        )

    def move(self, move: Callable[[Tensor], Tensor], shard: Tensor | None = None) -> None:
        """Let the at-rest parameter and its gradient be on another device.

        Args:
            move: makes a copy there.
            shard: the copy of its shard; None for a parameter that has memory of its own.
        """
        at_rest, own = self.at_rest, self.own
        gradient, at_rest.grad = at_rest.grad, None
        if own is not None:
            own.data = move(own.data)
            shard = own.detach()
        if isinstance(at_rest, DTensor):
            assert shard is not None
            at_home(at_rest, shard)
        if isinstance(gradient, DTensor):
            at_rest.grad = gradient_like(move(local_of(gradient)), at_rest)
        elif gradient is not None:
            at_rest.grad = move(gradient)

    def register(self, parameter: nn.Parameter) -> None:
        """Register `parameter` at all places. A place that was deleted, or set to None, stays
        so.
        """
        for table, name in self.tables:
            if table.get(name) is not None:
                table[name] = parameter
        for place in self.by_setattr:
            place.register(parameter)


class ParameterSwap:
    """Which form of a unit's parameters its modules hold. A tensor that the user registered stays
    where it is.
    """

    __slots__ = ("_in", "_is_in", "_out")

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        swapped = [param for param in params if param.at_rest is not param.compute]
        tables = [(table, name, p.at_rest, p.compute) for p in swapped for table, name in p.tables]
        by_setattr = [
            (place.module, place.name, p.at_rest, p.compute)
            for p in swapped
            for place in p.by_setattr
        ]
        self._is_in = False  # since the last `swap_out`
        self._in = tables, by_setattr
        self._out = (
            [(*at, after, before) for *at, before, after in tables],
            [(*at, after, before) for *at, before, after in by_setattr],
        )

    def swap_in(self) -> None:
        """Register the compute parameters."""
        self._is_in = True
        _exchange(*self._in)

    def swap_out(self) -> None:
        """Register the at-rest parameters again."""
        if self._is_in:
            _exchange(*self._out)
            self._is_in = False


def _exchange(tables: Sequence[Any], by_setattr: Sequence[Any]) -> None:
    # Plain loops over flat tuples: they run for every parameter four times per step.
    for table, name, before, after in tables:
        if table.get(name) is before:
            table[name] = after
    for module, name, before, after in by_setattr:
        if module._parameters.get(name) is before:
            setattr(module, name, after)


# --- memory order: shards of dense parameters that are not contiguous (channels_last) -----------


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; empty for a
    contiguous one.
    """
    if tensor.is_contiguous():
        return ()
    # As torch lays out a tensor like this one: what is not dense becomes so.
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    strides = torch.empty_like(bare).stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.ndim)) else order


def as_parameter(tensor: Tensor, slot: Slot) -> Tensor:
    """A tensor whose dimensions are in memory order, with the parameter's order of dimensions."""
    return (
        tensor.permute(sorted(range(tensor.ndim), key=slot.order.__getitem__))
        if slot.order
        else tensor
    )


def whole_shape(slot: Slot) -> Tensor:
    """A meta tensor with the shape and strides of the whole parameter."""
    return as_parameter(torch.empty(slot.shape, dtype=torch.float32, device="meta"), slot)


def cut(whole: Tensor, slot: Slot, rank: int) -> Tensor:
    """The shard of a whole tensor that `rank` has: a view."""
    if slot.route is Route.WHOLE:
        return whole
    return whole.narrow(slot.cut_dim, *slot.extent(rank))


# --- DTensors -----------------------------------------------------------------------------------


def wrap(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """A `DTensor` around `local`, without a collective."""
    if local.device.type not in ("meta", mesh.device_type):
        # A local tensor on the host, on a mesh of accelerators (CPU offload): `from_local` would
        # move it.
        bare = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        return dtensor_like(
            local,
            DTensor.from_local(bare, mesh, placements, run_check=False, shape=shape, stride=stride),
        )
    # Around a stand-in: a DTensor takes over the storage offset of what it is made around, and then
    # cannot be copied; and operators of a tensor subclass may not know `view_as`.
    plain = type(local) in (Tensor, nn.Parameter)
    stand_in = local if plain and not local.storage_offset() else _like(local)
    made = DTensor.from_local(
        stand_in, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    set_local(made, local)
    return made


def _like(local: Tensor) -> Tensor:
    """A plain tensor like `local`, of whatever class that is."""
    return torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)


def dtensor_parameter(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    *,
    requires_grad: bool,
) -> nn.Parameter:
    """A parameter around `local`. Around a stand-in first, since a Parameter is a detached copy of
    what it is made of.
    """
    made = wrap(_like(local), mesh, placements, shape, stride)
    parameter = parameter_around(made, requires_grad=requires_grad)
    assert isinstance(parameter, DTensor)
    set_local(parameter, local)
    return parameter


def at_home(registered: nn.Parameter, local: Tensor) -> nn.Parameter:
    """The at-rest parameter keeps its identity when its data moves into `local`, on any device."""
    assert isinstance(registered, DTensor)
    if registered.device == local.device:
        set_local(registered, local)
        return registered
    # It was moved away, and DTensors remember their device: let it take over a new one's insides.
    gradient, registered.grad = registered.grad, None
    made = dtensor_parameter(
        local, registered.device_mesh, registered.placements,
        registered.shape, registered.stride(), requires_grad=registered.requires_grad,
    )  # fmt: skip
    copy_attributes(registered, made)
    made.grad_dtype = registered.grad_dtype
    torch.utils.swap_tensors(registered, made)
    if isinstance(gradient, DTensor):
        from_host = local_of(gradient).to(local.device)
        registered.grad = gradient_like(from_host, registered)
    return registered


def shard_placements(slot: Slot, mesh: DeviceMesh, mesh_dim: int) -> list[Placement]:
    """The placements of a sharded parameter: cut over `mesh_dim`, the same along other dimensions
    of the mesh.
    """
    uncut = slot.route is Route.WHOLE and (slot.num_shards > 1 or not slot.shape)
    along: Placement = Replicate() if uncut else Shard(slot.cut_dim)
    return [along if dim == mesh_dim else Replicate() for dim in range(mesh.ndim)]


def gradient_like(local: Tensor, parameter: Tensor) -> Tensor:
    """`local` as a gradient of `parameter`: a `DTensor` of the same placements, or itself."""
    if not isinstance(parameter, DTensor):
        return local
    own = local_of(parameter)
    if local.shape == own.shape and local.stride() == own.stride() and local.dtype == own.dtype:
        return dtensor_like(local, parameter)  # the usual case, 5 us instead of 50
    return wrap(
        local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    )


def unreduced_gradient(
    local: Tensor, parameter: Tensor, model: ModelSpec | None, kept: Sequence[Placement] = ()
) -> Tensor:
    """This rank's whole gradient of `parameter`, not yet reduced: the mean over all ranks is the
    gradient.

    Args:
        kept: of a tensor-parallel parameter, its placements over the user's dimensions.
    """
    if not isinstance(parameter, DTensor):
        return local
    mesh, like = parameter.device_mesh, local if model is None else model.like
    placements = [*kept, *[Partial("avg")] * (mesh.ndim - len(kept))]
    made = wrap(local, mesh, placements, like.shape, like.stride())
    # torch refuses a gradient on another device than its parameter; under CPU offload this one is
    # on its way there.
    return (
        made
        if made.device.type == parameter.device.type
        else dtensor_like(local, made, parameter.device)
    )


def gradient_of_shards(local: Tensor, parameter: Tensor, first: int, shard_dim: int) -> Tensor:
    """A gradient that is reduced over the shard dimension of the mesh, and not yet over the
    replicate dimension. The unit's dimensions of the mesh begin with `first`.
    """
    assert isinstance(parameter, DTensor)
    placements = [
        each if dim < first or dim == shard_dim else Partial("avg")
        for dim, each in enumerate(parameter.placements)
    ]
    return wrap(local, parameter.device_mesh, placements, parameter.shape, parameter.stride())


def is_unreduced(gradient: Tensor | None) -> bool:
    """Whether `gradient`, of a `DTensor`, was accumulated under `no_sync` and is not the mean over
    all ranks yet.
    """
    return isinstance(gradient, DTensor) and any(
        placement.is_partial() for placement in gradient.placements
    )


@torch.no_grad()
def unsharded_of(tensor: Tensor, model: ModelSpec | None) -> Tensor:
    """Gather what modules compute with: all of a plain parameter, and of a tensor-parallel one the
    local tensor on the user's mesh. All ranks of the unit's mesh call this.
    """
    if model is None or not isinstance(tensor, DTensor):
        return whole_of(tensor)
    mesh, local = tensor.device_mesh, local_of(tensor)
    if local.device.type not in ("meta", mesh.device_type):  # at rest on the host
        moved = gradient_like(local.to(mesh.device_type), tensor)
        assert isinstance(moved, DTensor)
        tensor, local = moved, local_of(moved)
    whole = whole_over_units(tensor, model)
    return whole.clone() if whole.data_ptr() == local.data_ptr() else whole


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """Gather a whole copy of a parameter, gradient or optimizer state; all ranks of its mesh call
    this.

    One all-gather of one tensor, torch's own, which knows uneven shards and every placement.
    """
    if not isinstance(tensor, DTensor):
        return cloned(tensor.detach())
    local = local_of(tensor)
    if local.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if local.device.type != tensor.device_mesh.device_type:  # at rest on the host
        moved = gradient_like(local.to(tensor.device_mesh.device_type), tensor)
        assert isinstance(moved, DTensor)
        tensor = moved
    whole = tensor.full_tensor()
    # Replicated, or over one rank, the whole is the local tensor itself.
    return cloned(whole) if whole.data_ptr() == local.data_ptr() else whole


def cloned(tensor: Tensor) -> Tensor:
    """A copy of a tensor that shares no memory with it. Of one with FSDP2's extension protocol, a
    copy of what it is made of: `clone` of an `NF4Tensor` quantises again, and its `new_zeros` keeps
    some of the memory.
    """
    if not hasattr(tensor, "fsdp_pre_all_gather"):
        return tensor.clone()
    if hasattr(tensor, "__tensor_flatten__"):
        kind: Any = type(tensor)
        names, context = tensor.__tensor_flatten__()
        inner = {name: cloned(getattr(tensor, name)) for name in names}
        found: Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return found
    made = tensor.new_zeros(tensor.shape)
    made.copy_(tensor)
    return made


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one with FSDP2's extension protocol is made of; else the tensor."""
    if not hasattr(tensor, "fsdp_pre_all_gather") or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def describe_mesh(mesh: DeviceMesh) -> str:
    """Like `the (2,) cpu mesh of ranks 0, 1`."""
    return (
        f"the {tuple(mesh.shape)} {mesh.device_type} mesh of ranks"
        f" {few([str(r) for r in mesh.mesh.flatten().tolist()])}"
    )


def chosen_grad_dtype(parameter: nn.Parameter) -> torch.dtype | None:
    """What `parameter.grad_dtype` was set to. None if it is the parameter's dtype, and where any
    dtype is allowed: ranks send messages of one dtype.
    """
    found = parameter.grad_dtype
    return None if found == parameter.dtype else found


def keep_gradients_in(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    """Let the parameter's gradient have `dtype`; torch accepts the parameter's own only, unless
    told otherwise.
    """
    if getattr(parameter, "grad_dtype", dtype) != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)
