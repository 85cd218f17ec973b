"""How a unit's parameters come into its buffers, stay there and leave them; knows neither phases nor order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.config import MixedPrecisionPolicy
from composable.device.buffer_swap import swap_of
from composable.device.collectives import TagSequence
from composable.device.flat_parameters import FlatParameters, dtype_named, memory_order, name_of
from composable.device.memory import MemoryPool
from composable.device.parameter_swap import (
    ParameterSlots,
    ParameterSwap,
    adopt_local,
    copy_attributes,
    cut,
    describe_mesh,
    keep_gradients_in,
    make_sharded,
    make_unsharded,
)
from composable.device.private import as_tensors, innermost, local_of
from composable.errors import ForeignParameterError
from composable.plan.layout import Layout, ParamSpec, plan_layout
from composable.plan.precision import Precision, resolve
from composable.runtime.dtype_group import DtypeGroup
from composable.runtime.gradient_group import GradientGroup
from composable.runtime.gradient_hooks import call_when_accumulated
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.optimizers import Form, note
from composable.runtime.restoring import restore

Versions = list[list[int]]  # of each group's shards

_requires_grad: Final = attrgetter("requires_grad")
_version: Final = Tensor._version.__get__  # type: ignore[attr-defined]  # quicker than any other way to ask many
_HOW_TO_CAST: Final = (
    "Cast the module before fully_shard, so that the forward has nothing to do, or let fully_shard cast what it computes with "
    "(mp_policy=); or cast a copy of the weight for the computation alone; or compute under torch.autocast"
)
_CACHE_LINE: Final = 64  # bytes
_VECTOR: Final = 16  # bytes that an accelerator reads at once, if they are aligned


class UnitParameters:
    """A unit's parameters: where they are registered, the groups that hold them, what modules see of them.

    A group holds those of one precision on one device. Without a mesh parameters stay what they are, and only those that are
    cast have a group.
    """

    __slots__ = (
        "_holders", "_in_place", "_mesh_info", "_names", "_on_gradient", "_own", "_placements", "_policy", "_pool", "_unit",
        "gradient_groups", "groups", "locals", "numels", "on_meta", "sharded", "slots", "swap", "trainable"
    )  # fmt: skip

    def __init__(
        self,
        slots: Sequence[ParameterSlots],
        names: Sequence[str],
        placements: Sequence[int | None],
        mesh_info: MeshInfo,
        policy: MixedPrecisionPolicy,
        holders: Sequence[nn.Module],
        pool: MemoryPool,
        on_gradient: Callable[[Tensor], None],
    ) -> None:
        self.slots = tuple(slots)
        self._names = names
        self._placements = placements
        self._mesh_info = mesh_info
        self._in_place = mesh_info.mesh is None
        self._policy = policy
        self._holders = holders  # modules whose buffers follow the policy
        self._pool = pool
        self._on_gradient = on_gradient
        self.groups: tuple[DtypeGroup, ...] = ()
        self.gradient_groups: tuple[GradientGroup, ...] = ()
        self.swap = ParameterSwap(())
        self.trainable = False  # any of them
        self.on_meta: tuple[str, ...] = ()  # names of those that have no values yet
        self.sharded: tuple[DTensor, ...] = ()
        self.locals: tuple[Tensor, ...] = ()  # where the sharded parameters' data should be
        self.numels: list[int] = []  # of these
        self._own: list[tuple[object, ...]] = []
        self._unit = ""
        self.rebuild()

    # --- coming -----------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """(Re)build the buffers around the parameters as they are now: plain tensors, or DTensors of our placement."""
        alike: dict[tuple[Precision, torch.device], list[int]] = {}
        for index, slot in enumerate(self.slots):
            tensor = slot.registered
            assert tensor is not None
            local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            stays = self._in_place or local.device.type in ("meta", self._mesh_info.device.type)
            precision = self.precision_of(tensor.dtype)
            if precision.changes or not self._in_place:
                alike.setdefault((precision, local.device if stays else self._mesh_info.device), []).append(index)
        # Everything that can fail happens before the first parameter of the module changes.
        flats = [(indices, self._flat(precision, device, indices)) for (precision, device), indices in alike.items()]
        groups = []
        for indices, flat in flats:
            for position, index in enumerate(indices):
                self._settle_in(flat, position, self.slots[index])
            groups.append(DtypeGroup(flat, [self.slots[index] for index in indices], self._mesh_info))
        self.groups = tuple(groups)
        self.gradient_groups = tuple(
            GradientGroup(group.flat, group.sharded, group.unsharded, self._mesh_info) for group in groups
        )
        self.on_meta = tuple(self._names[i] for indices, flat in flats if flat.device.type == "meta" for i in indices)
        self.rename(self._unit)
        self.trainable = False
        two_forms = [slot for slot in self.slots if slot.unsharded is not slot.sharded]
        self.swap = swap_of(two_forms, self._holders, self._policy.buffer_dtype)
        self._own = self._look_at_own()
        self.sharded = tuple(slot.sharded for slot in self.slots if isinstance(slot.sharded, DTensor))
        self.locals = tuple(map(local_of, self.sharded))
        self.numels = list(map(Tensor.numel, self.locals))
        self.follow()

    @property
    def precisions(self) -> list[Precision]:
        """Of each parameter."""
        return [self.precision_of(slot.sharded.dtype) for slot in self.slots]

    def precision_of(self, dtype: torch.dtype) -> Precision:
        """What the policy means for a parameter of `dtype`."""
        policy = self._policy
        param, reduce = ((None if asked is None else name_of(asked)) for asked in (policy.param_dtype, policy.reduce_dtype))
        return resolve(name_of(dtype), param, reduce, keep_reduced=policy.keep_grads_in_reduce_dtype)

    def _flat(self, precision: Precision, device: torch.device, indices: Sequence[int]) -> FlatParameters:
        communicator = self._mesh_info.shard
        layout = self._layout(indices, precision, device)
        own = [tensor for index in indices if (tensor := self.slots[index].registered) is not None] if self._in_place else ()
        flat = FlatParameters(layout, precision=precision, device=device, communicator=communicator, pool=self._pool, own=own)
        if own:
            return flat
        with torch.no_grad():
            for position, index in enumerate(indices):
                tensor = self.slots[index].registered
                assert tensor is not None
                view = flat.shard_view(position).data
                if isinstance(tensor, DTensor):
                    view.copy_(local_of(tensor).reshape(view.shape))
                elif device.type != "meta":
                    view.copy_(cut(tensor.data, layout.slots[position], communicator.rank))
        return flat

    def _layout(self, indices: Sequence[int], precision: Precision, device: torch.device) -> Layout:
        communicator = self._mesh_info.shard
        specs = []
        for index in indices:
            tensor = self.slots[index].registered
            assert tensor is not None
            order, dim = memory_order(tensor), self._placements[index]
            shape = tuple(tensor.shape[axis] for axis in order) if order else tuple(tensor.shape)
            specs.append(ParamSpec(self._names[index], shape, order.index(dim) if order and dim is not None else dim, order))
        sent = dtype_named(precision.compute).itemsize
        smallest = min(sent, dtype_named(precision.original).itemsize)
        direct = -(-communicator.capabilities.direct_bytes // sent)
        if len(specs) > TagSequence.PARTS // 2:
            direct = max(
                direct, sorted(max(1, math.prod(s.shape)) // communicator.size for s in specs)[-TagSequence.PARTS // 2]
            )
        return plan_layout(
            specs,
            num_shards=communicator.size,
            direct_numel=direct,
            align=max(1, _CACHE_LINE // smallest),
            packed_align=1 if device.type == "cpu" else max(1, _VECTOR // smallest),
            copied=precision.compute != precision.original,
            staging_apart=communicator.capabilities.saves_memory,
        )

    def _settle_in(self, flat: FlatParameters, position: int, slot: ParameterSlots) -> None:
        mesh, registered = self._mesh_info.mesh, slot.registered
        assert isinstance(registered, nn.Parameter)
        slot.sharded = registered
        if mesh is not None and isinstance(registered, DTensor):
            adopt_local(registered, flat.local(position))
        elif mesh is not None:
            local, mesh_dim = flat.local(position), self._mesh_info.shard_dim
            whole = flat.layout.slots[position]
            slot.sharded = make_sharded(local, whole, mesh, mesh_dim, requires_grad=registered.requires_grad)
            slot.replace(slot.sharded)
        keep_gradients_in(flat.gradient_dtype, slot.sharded)
        differentiable = flat.compute_dtype.is_floating_point or flat.compute_dtype.is_complex
        slot.unsharded = make_unsharded(flat.full_views[position], requires_grad=differentiable)
        if differentiable:
            call_when_accumulated(slot.unsharded, self._on_gradient)
        copy_attributes(registered, slot.sharded)
        copy_attributes(registered, slot.unsharded)

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self._unit = unit
        for fqn, slot in zip(self._names, self.slots, strict=True):
            if slot.unsharded is not slot.sharded:
                note(slot.unsharded, Form.UNSHARDED, unit, fqn)
            note(slot.sharded, Form.SHARDED if self._mesh_info.mesh is not None else Form.WHOLE, unit, fqn)

    # --- staying ----------------------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Whether modules hold the parameters that we put there, and these hold our memory."""
        if self._in_place:  # they are the user's own: what they are is looked up each time
            return bool(self.groups) and self._own == self._look_at_own()
        if not self.swap.intact() or not all(map(is_, map(local_of, self.sharded), self.locals)):
            return False
        return list(map(Tensor.numel, self.locals)) == self.numels

    def adopt_replaced(self) -> bool:
        """Take parameters that somebody registered, or moved, for the unit's own; True when `rebuild` has to follow."""
        if self._in_place:
            return self._look_up_own()
        self._refuse_resized()
        # Whatever is refused is refused before the first parameter changes.
        newcomers = [self._newcomer(name, slot) for name, slot in zip(self._names, self.slots, strict=True)]
        for name, slot, newcomer in zip(self._names, self.slots, newcomers, strict=True):
            if newcomer is not None:
                note(slot.sharded, Form.REPLACED, self._unit, name)
                slot.replace(newcomer)
                slot.sharded = newcomer
        return all(isinstance(slot.registered, nn.Parameter) for slot in self.slots)

    def _look_at_own(self) -> list[tuple[object, ...]]:
        """What the casts of the user's own parameters depend on."""
        held = [slot.registered for slot in self.slots] if self._in_place and self.groups else []
        return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in held if tensor is not None]

    def _look_up_own(self) -> bool:
        held = [slot.registered for slot in self.slots]
        casts = bool(self.groups) or any(tensor is not None and self.precision_of(tensor.dtype).changes for tensor in held)
        if casts and not all(isinstance(tensor, nn.Parameter) for tensor in held):
            return False  # functional_call, which brings its own tensors for one call
        for slot, tensor in zip(self.slots, held, strict=True):
            slot.sharded = slot.unsharded = tensor  # type: ignore[assignment]
        return casts

    def _refuse_resized(self) -> None:
        """An operator with `out=` resizes this rank's shard to the whole, fails since the memory is not its own, and leaves a
        tensor that is larger than its memory: whoever writes to it next writes to what is behind it."""
        resized = ""
        for group in self.groups:
            for position, sharded in enumerate(group.sharded):
                assert isinstance(sharded, DTensor)
                local, view = local_of(sharded), group.flat.shard_view(position)
                if local.numel() != view.numel() and any(local is ours for ours in self.locals):
                    local.as_strided_(view.shape, view.stride())
                    resized = resized or group.flat.layout.slots[position].name
        if resized:
            raise ForeignParameterError(
                f"parameter '{resized}' of unit '{self._unit}': its shard was resized by an operator with out=, as "
                "torch.nn.init.eye_ calls one, which cannot work on shards. The shard has its shape again, and the values "
                "from before. Initialise the parameter before fully_shard, or load_state_dict() the whole tensor, which is "
                "sharded then"
            )

    def refuse_strays(self) -> None:
        """A forward registered parameters in place of ours: ours come back, and it is refused."""
        replaced = ""
        for name, slot in zip(self._names, self.slots, strict=True):
            strays = [held for held in slot.held if isinstance(held, nn.Parameter) and held is not slot.sharded]
            if strays:
                slot.replace(slot.sharded)
                replaced = replaced or f"'{name}' ({slot.sharded.dtype}) by another one ({strays[0].dtype})"
        self.swap.strays = False
        if replaced:
            raise ForeignParameterError(
                f"the forward of unit '{self._unit}' replaced its parameter {replaced}, which would get this rank's gradient "
                f"alone. The parameter from before is there again. {_HOW_TO_CAST}"
            )

    def refuse_moved(self) -> None:
        """A forward gave unsharded parameters other memory: they get ours again, and it is refused."""
        moved = [(name, dtype, group.flat.compute_dtype) for group in self.groups for name, dtype in group.move_back()]
        if moved:
            name, dtype, kept = moved[0]
            raise ForeignParameterError(
                f"the forward of unit '{self._unit}' gave its parameter '{name}' other memory ({dtype}, where the unit keeps "
                f"{kept}), as `.data = ...` and a module's `.to()` do; what is gathered would not reach it any more. "
                f"The parameter is as before. {_HOW_TO_CAST}"
            )

    def _newcomer(self, name: str, slot: ParameterSlots) -> nn.Parameter | None:
        """The parameter that somebody registered in place of ours, at any of its places; None if nobody did."""
        held = [other for other in slot.held if isinstance(other, Tensor) and other is not slot.sharded]
        if any(not isinstance(other, nn.Parameter) and isinstance(innermost(other), DTensor) for other in held):
            raise ForeignParameterError(
                f"parameter '{name}' of unit '{self._unit}' was replaced by a DTensor that is no nn.Parameter, as "
                "torch.func.functional_call does with what torch.func.grad and the like hand to it; nothing would gather it. "
                "Gradients of sharded parameters come by backward(); transforms over inputs, torch.func.grad(...)(x), work"
            )
        others = {id(other): other for other in held if isinstance(other, nn.Parameter)}
        if not others:
            return None
        if len(others) > 1:
            raise ForeignParameterError(
                f"parameter '{name}' is tied: it has {len(slot.owners)} places, and different parameters were registered at "
                "them. Register one parameter at all of them; to untie them, call remove(module, fully_shard) first"
            )
        (other,) = others.values()
        if type(other) is not nn.Parameter and not isinstance(other, DTensor):
            raise ForeignParameterError(
                f"parameter '{name}' was replaced by a {type(other).__name__}; only an nn.Parameter can be sharded"
            )
        sharded = slot.sharded
        if isinstance(other, DTensor) and isinstance(sharded, DTensor):
            ours, theirs = (sharded.device_mesh, sharded.placements), (other.device_mesh, other.placements)
            if ours != theirs:
                raise ForeignParameterError(
                    f"parameter '{name}' was replaced by a DTensor that is spread otherwise: {other.placements} over "
                    f"{describe_mesh(other.device_mesh)}, where the unit has {sharded.placements} over "
                    f"{describe_mesh(sharded.device_mesh)}. Register its full_tensor() as a parameter, or load it with "
                    "load_state_dict(), which spreads it anew"
                )
        return other

    def follow(self) -> None:
        """Unsharded parameters follow what users freeze and unfreeze on the sharded ones."""
        for group in self.gradient_groups:
            trainable = tuple(map(_requires_grad, group.sharded))
            if trainable != group.trainable:
                group.follow(trainable)
                self.trainable = any(other.trains for other in self.gradient_groups)
        if self._in_place:
            self.trainable = any(slot.sharded.requires_grad for slot in self.slots)

    def versions(self) -> Versions:
        """Changes whenever somebody wrote to a shard; see Note [Stale parameters]."""
        with as_tensors():
            return [list(map(_version, group.counted)) for group in self.groups]

    def outdate(self, before: Versions, now: Versions) -> None:
        """Unsharded parameters count as written to where the sharded ones were."""
        for group, former, versions in zip(self.groups, before, now, strict=False):  # none of a unit that was built anew
            if former != versions:
                group.outdate(former, versions)

    def written_since(self, before: Versions) -> list[str]:
        """Names of the parameters that were written to."""
        pairs = zip(self.groups, before, self.versions(), strict=False)
        return [name for group, former, versions in pairs for name in group.written_since(former, versions)]

    def aliased_by(self, tensor: Tensor) -> bool:
        """Whether `tensor` is, or views, an unsharded parameter."""
        # What is computed is neither; asked first, since the second question takes Python.
        if not tensor._is_view() and (type(tensor) is Tensor or not isinstance(tensor, nn.Parameter)):
            return False
        return any(group.holds(tensor) for group in self.groups)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def gather_exact(self, tags: TagSequence, label: str) -> list[Tensor | None]:
        """All of every parameter that modules compute with in another dtype than it rests in, in the latter; for the others
        None."""
        exact: dict[int, Tensor] = {}
        for group in () if self._in_place else self.groups:
            if group.flat.compute_dtype != group.flat.dtype:
                exact.update(zip(map(id, group.sharded), group.gather_exact(tags, label), strict=True))
        return [exact.get(id(slot.sharded)) for slot in self.slots]

    def leave(
        self,
        originals: Sequence[nn.Parameter | None],
        strides: Sequence[tuple[int, ...]],
        exact: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Register whole plain parameters: `originals` where they still exist, new ones elsewhere. All must be unsharded.

        Args:
            exact: what `gather_exact` returned.
        """
        self.swap.hide()
        if self._in_place:
            for slot in self.slots:
                keep_gradients_in(slot.sharded.dtype, slot.sharded)
            return
        for slot, original, stride, value, gradient in zip(self.slots, originals, strides, exact, gradients, strict=True):
            restore(slot, slot.unsharded.data if value is None else value, original, stride, gradient)

    def forget(self) -> None:
        """The parameters are somebody else's."""
        self.groups = ()
        self.gradient_groups = ()
