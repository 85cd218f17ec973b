"""One fully sharded module at run time: unshard, reshard, reduce. Knows neither order nor other units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.config import AfterForward, Free, Regroup
from composable.device.collectives import Arrival, Channel, GatherPart, Wire
from composable.device.memory import ElasticBuffer, MemoryPool
from composable.device.parameters import Owner, ParameterSlots, Stage, adopt_local, cut, make_sharded, make_unsharded
from composable.device.private import local_of
from composable.device.storage import FlatParameters
from composable.errors import AnnotationError
from composable.model.hooks import Guard
from composable.plan.layout import Layout, ParamSpec, plan_layout
from composable.plan.phases import Event, GradEvent, GradPhase, Phase, advance, advance_gradients
from composable.runtime.epoch import optimizer_steps
from composable.runtime.reduction import Reduction


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a unit's parameters are spread: a mesh, its wire, and the wire among neighbours for `Regroup`.

    Without a mesh there is one rank and no process group: parameters stay the plain tensors that they are.
    """

    mesh: DeviceMesh | None
    wire: Wire
    near: Wire | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def __deepcopy__(self, memo: dict[int, object]) -> Ground:
        return self  # copies of a model train over the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mesh is not None:
            raise AnnotationError(
                "a sharded or replicated module stands on process groups and cannot be pickled; save its state_dict() "
                "(torch.distributed.checkpoint writes it from all ranks), or call remove(module, fully_shard) first"
            )
        return Ground, (None, self.wire)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that it takes to make a handle around the parameters that its owners hold; copied with the module."""

    owners: tuple[tuple[Owner, ...], ...]
    names: tuple[str, ...]
    placements: tuple[int | None, ...]
    strides: tuple[tuple[int, ...], ...]  # of the parameters as they were
    ground: Ground
    after_forward: AfterForward

    def build(self, pool: MemoryPool) -> Handle:
        slots = []
        for owners in self.owners:
            registered = owners[0].module._parameters[owners[0].name]
            assert registered is not None
            slots.append(ParameterSlots(owners, registered))
        return Handle(slots, self, pool)


class _Part:
    """The parameters of one dtype: their buffers, their reduction, and the coarse shard kept after forward."""

    def __init__(self, flat: FlatParameters, members: Sequence[ParameterSlots], ground: Ground) -> None:
        self.flat = flat
        self.members = tuple(members)
        self.sharded = [member.sharded for member in members]
        self.wire = ground.wire
        self._reductions: dict[tuple[bool, ...], Reduction] = {}
        self.trainable: tuple[bool, ...] = ()
        self.coarse: ElasticBuffer | None = None
        self.near = ground.near
        if self.near is not None and flat.layout.gathered:
            ways = self.near.ways
            self.coarse = ElasticBuffer(flat.layout.full_numel // ways, flat.dtype, flat.device, flat.pool)
            flat.full.allocate()
            whole = flat.full.tensor
            start = self.near.rank * self.coarse.tensor.numel()
            self.coarse_of_whole = whole[start : start + self.coarse.tensor.numel()]
            self.near_plan = self.near.prepare([GatherPart(self.coarse.tensor, whole, whole.numel())])
            flat.full.free()
            self.coarse.free()

    def release(self) -> None:
        for reduction in self._reductions.values():
            reduction.release()

    def reduction(self) -> Reduction:
        if self.trainable not in self._reductions:
            self._reductions[self.trainable] = Reduction(self.flat, self.sharded, self.wire, self.trainable)
        return self._reductions[self.trainable]


class Handle:
    """The run-time object of one fully sharded module: its parameters are unsharded, resharded and reduced together.

    Life: SHARDED -> GATHERING -> UNSHARDED -> SHARDED, see `composable.plan.phases`. A handle never decides when.
    """

    def __init__(self, slots: Sequence[ParameterSlots], recipe: Recipe, pool: MemoryPool) -> None:
        ground = recipe.ground
        self.name = ""  # the FQN under the root, once there is a root
        self.slots = tuple(slots)
        self.names = recipe.names  # FQNs relative to the annotated module
        self.ground = ground
        self.after_forward = recipe.after_forward
        self._placements = recipe.placements
        self._strides = recipe.strides
        self.phase = Phase.SHARDED
        self.grad_phase = GradPhase.EMPTY
        self.pins = 0  # scopes and explicit calls that keep the parameters unsharded
        self.backwards = 0  # that have ended
        self.uses = 0  # forwards whose backward has not been entered yet
        self.depth = 0  # calls of its modules that are running, and its backward
        self.guards: Sequence[Guard] = ()
        self.on_first_gradient: Callable[[Handle], None] = _ignore
        self.on_gradients_complete: Callable[[Handle], None] = _ignore
        self.on_backward: Callable[[Handle], None] = _ignore
        self._pool = pool
        self._channel: Channel = ground.wire.open_channel()
        self._near_channel: Channel | None = ground.near.open_channel() if ground.near is not None else None
        self._arrivals: list[Arrival] = []
        self._from_neighbours = False
        self._gathered = (-1, -1, -1)
        self._arrived = bytearray(len(self.slots))
        self._awaited = 0
        self._parts: list[_Part] = []
        self._stage = Stage(())
        self._shards: list[tuple[DTensor, Tensor]] = []  # sharded parameters, and where their data should be
        self._rebuild()

    # --- parameters come and go -------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """(Re)build the buffers around the parameters as they are now: plain tensors, or DTensors of our placement."""
        mesh = self.ground.mesh
        if mesh is None:
            for slot in self.slots:
                registered = slot.registered
                assert isinstance(registered, nn.Parameter)
                slot.sharded = slot.unsharded = registered
            return
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, slot in enumerate(self.slots):
            tensor = slot.registered
            assert tensor is not None
            local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            stays = local.device.type in ("meta", self.ground.device.type)
            groups.setdefault((tensor.dtype, local.device if stays else self.ground.device), []).append(index)
        # Everything that can fail happens before the first parameter of the module changes.
        parts = []
        for (dtype, device), indices in groups.items():
            parts.append((indices, self._flat(dtype, device, indices)))
        self._parts = []
        for indices, flat in parts:
            for position, index in enumerate(indices):
                self._settle_in(flat, position, index)
            self._parts.append(_Part(flat, [self.slots[index] for index in indices], self.ground))
        self._stage = Stage(self.slots)
        self._shards = [(slot.sharded, local_of(slot.sharded)) for slot in self.slots if isinstance(slot.sharded, DTensor)]
        self.sync_requires_grad()

    def _flat(self, dtype: torch.dtype, device: torch.device, indices: Sequence[int]) -> FlatParameters:
        wire = self.ground.wire
        layout = self._layout(indices, dtype)
        flat = FlatParameters(layout, dtype=dtype, device=device, wire=wire, pool=self._pool)
        with torch.no_grad():
            for position, index in enumerate(indices):
                tensor = self.slots[index].registered
                assert tensor is not None
                view = flat.shard_view(position).data
                if isinstance(tensor, DTensor):
                    view.copy_(local_of(tensor).view(view.shape))
                elif device.type != "meta":
                    view.copy_(cut(tensor.data, layout.slots[position], wire.rank))
        return flat

    def _layout(self, indices: Sequence[int], dtype: torch.dtype) -> Layout:
        wire = self.ground.wire
        specs = []
        for index in indices:
            tensor = self.slots[index].registered
            assert tensor is not None
            specs.append(ParamSpec(self.names[index], tuple(tensor.shape), self._placements[index]))
        direct = -(-wire.direct_bytes // dtype.itemsize)
        if len(specs) > Channel.PARTS // 2:
            direct = max(direct, sorted(max(1, _numel(s)) // wire.ways for s in specs)[-Channel.PARTS // 2])
        return plan_layout(specs, ways=wire.ways, direct_numel=direct, align=max(1, 64 // dtype.itemsize))

    def _settle_in(self, flat: FlatParameters, position: int, index: int) -> None:
        slot, mesh = self.slots[index], self.ground.mesh
        assert mesh is not None
        registered = slot.registered
        assert isinstance(registered, nn.Parameter)
        view = flat.shard_view(position)
        if isinstance(registered, DTensor):
            adopt_local(registered, view)
            slot.sharded = registered
        else:
            sharded = make_sharded(view, flat.layout.slots[position], mesh, requires_grad=registered.requires_grad)
            slot.replace(sharded)
            slot.sharded = sharded
        slot.unsharded = make_unsharded(flat.full_views[position], requires_grad=True)
        slot.unsharded.register_post_accumulate_grad_hook(lambda _, index=index: self._gradient_arrived(index))

    def refresh(self) -> None:
        """Notice parameters that were moved, cast or replaced since the last step, and adopt them."""
        if self._parts:
            if not self._stage.intact() or not all(local_of(sharded) is view for sharded, view in self._shards):
                self._adopt_foreigners()
        else:
            for slot in self.slots:
                slot.sharded = slot.unsharded = slot.registered  # type: ignore[assignment]

    def _adopt_foreigners(self) -> None:
        for slot in self.slots:
            registered = slot.registered
            if isinstance(registered, nn.Parameter):
                for owner in slot.owners[1:]:
                    if owner.module._parameters.get(owner.name) is slot.sharded:
                        slot.replace(registered)
                slot.sharded = registered
        if all(isinstance(slot.registered, nn.Parameter) for slot in self.slots):
            self._rebuild()

    def sync_requires_grad(self) -> None:
        """Unsharded parameters follow what users freeze and unfreeze on the sharded ones."""
        for part in self._parts:
            trainable = tuple([p.requires_grad for p in part.sharded])
            if trainable != part.trainable:
                part.trainable = trainable
                for member, wanted in zip(part.members, trainable, strict=True):
                    member.unsharded.requires_grad_(wanted)
        self._awaited = sum(sum(part.trainable) for part in self._parts)

    @property
    def trainable(self) -> bool:
        return self._awaited > 0 or (not self._parts and any(slot.sharded.requires_grad for slot in self.slots))

    # --- unshard and reshard ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Launch the all-gather unless the parameters are, or will be, there."""
        before = self.phase
        self.phase = advance(before, Event.UNSHARD, unit=self.name)
        if self.phase is before:
            return
        near = self._from_neighbours = before is Phase.REGROUPED
        self._gathered = self._edition()
        for part in self._parts:
            if not part.flat.layout.gathered:
                continue
            part.flat.full.allocate()
            label = f"all-gather of unit '{self.name}'"
            if near:
                assert part.near is not None
                assert self._near_channel is not None
                arrival = part.near.all_gather(part.near_plan, label=label, tag=self._near_channel.next_tag())
            else:
                arrival = part.wire.all_gather(part.flat.gather_plan, label=label, tag=self._channel.next_tag())
            self._arrivals.append(arrival)

    def land(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.phase is not Phase.GATHERING:
            self.phase = advance(self.phase, Event.LAND, unit=self.name)
            return
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.wait()
        for part in self._parts:
            if not self._from_neighbours:
                part.flat.copy_out()
            elif part.coarse is not None:
                part.coarse.free()
        self.phase = advance(self.phase, Event.LAND, unit=self.name)

    def reshard(self) -> None:
        """Free the unsharded parameters; a gather in flight is waited for first."""
        if self.phase is Phase.GATHERING:
            self.land()
        self.phase = advance(self.phase, Event.RESHARD, unit=self.name)
        for part in self._parts:
            part.flat.full.free()
            if part.coarse is not None:
                part.coarse.free()

    def settle_after_forward(self) -> None:
        """Free, keep or regroup, as the user asked."""
        if self.phase is not Phase.UNSHARDED or self.pins:
            return
        match self.after_forward:
            case Free():
                self.reshard()
            case Regroup():
                self._regroup()

    def _regroup(self) -> None:
        self.phase = advance(self.phase, Event.REGROUP, unit=self.name)
        for part in self._parts:
            if part.coarse is not None:
                part.coarse.allocate()
                part.coarse.tensor.data.copy_(part.coarse_of_whole.data)
                part.flat.full.free()

    def _edition(self) -> tuple[int, int, int]:
        """Changes whenever the shards may have changed; see Note [Stale parameters]."""
        versions = sum([part.flat.shard._version for part in self._parts])
        versions += sum([sharded._version for sharded, _ in self._shards])
        return versions, optimizer_steps(), self.backwards

    @property
    def stale(self) -> bool:
        """Whether what was gathered may no longer be what the shards say."""
        return self.phase is not Phase.SHARDED and self._gathered != self._edition()

    def show(self) -> None:
        """Modules compute with the unsharded parameters from here on; nests."""
        self.depth += 1
        if self.depth == 1:
            self._stage.show()
            for guard in self.guards:
                guard.step_aside()

    def hide(self) -> None:
        """Modules hold the sharded parameters again, whether or not the unsharded ones still exist."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self._stage.hide()
            for guard in self.guards:
                guard.stand()

    def aliases(self, tensor: Tensor) -> bool:
        """Whether `tensor` is, or views, an unsharded parameter that is about to be freed."""
        if not (tensor._is_view() or isinstance(tensor, nn.Parameter)):
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(part.flat.full.tensor.untyped_storage().data_ptr() == address for part in self._parts)

    # --- gradients --------------------------------------------------------------------------------------------------

    def _gradient_arrived(self, index: int) -> None:
        if self.grad_phase is GradPhase.REDUCING:
            self.finish_reduction()
        if self.grad_phase is GradPhase.EMPTY:
            self.on_first_gradient(self)
        self.grad_phase = advance_gradients(self.grad_phase, GradEvent.ARRIVE, unit=self.name)
        self._arrived[index] = 1
        # One by one would be too early: a unit's gradients travel together.
        if sum(self._arrived) == self._awaited:
            self.on_gradients_complete(self)

    def reduce(self) -> None:
        """Launch the reduction of what arrived; what did not counts as zero, and stays None if it did nowhere."""
        if self.grad_phase is GradPhase.REDUCING:
            self.finish_reduction()
        self.grad_phase = advance_gradients(self.grad_phase, GradEvent.REDUCE, unit=self.name)
        self._arrived = bytearray(len(self.slots))
        label = f"gradient reduction of unit '{self.name}'"
        for part in self._parts:
            if any(part.trainable):
                part.reduction().launch(_take_gradients(part.members), self._channel, label)

    def finish_reduction(self) -> None:
        """Wait for the reduction; the sharded parameters have their gradients afterwards."""
        if self.grad_phase is not GradPhase.REDUCING:
            return
        for part in self._parts:
            if any(part.trainable):
                part.reduction().finish()
        self.grad_phase = advance_gradients(self.grad_phase, GradEvent.FINISH, unit=self.name)

    def release_gradients(self) -> None:
        """Give back the memory of sharded gradients that were set to None."""
        for part in self._parts:
            part.release()

    def reset(self) -> None:
        """After an error: nothing in flight, nothing unsharded, no unreduced gradient, modules hold sharded parameters."""
        self.depth = 1
        self.hide()
        self.uses = 0
        try:
            self._wait_quietly()
        finally:
            self.phase, self.grad_phase = Phase.SHARDED, GradPhase.EMPTY
            self._arrived = bytearray(len(self.slots))
            for part in self._parts:
                part.flat.full.free()
                if part.coarse is not None:
                    part.coarse.free()
                _take_gradients(part.members)

    def _wait_quietly(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.wait()
        if self.grad_phase is GradPhase.REDUCING:
            for part in self._parts:
                part.reduction().drop()

    # --- leaving ----------------------------------------------------------------------------------------------------

    def dissolve(self, originals: Sequence[nn.Parameter | None]) -> None:
        """Give the module whole plain parameters back: `originals` where they still exist, new ones elsewhere."""
        if not self._parts:
            return
        self.refresh()
        self.unshard()
        self.land()
        for slot, original, stride in zip(self.slots, originals, self._strides, strict=True):
            self._give_back(slot, original, stride)
        self.reshard()
        self._parts = []

    @staticmethod
    def _give_back(slot: ParameterSlots, original: nn.Parameter | None, stride: tuple[int, ...]) -> None:
        whole = slot.unsharded.data
        if original is not None and original.shape == whole.shape and original.dtype == whole.dtype:
            if original.device == whole.device and whole.device.type != "meta":
                original.data.copy_(whole)
        else:
            copy = torch.empty_strided(whole.shape, stride, dtype=whole.dtype, device=whole.device)
            original = nn.Parameter(copy.copy_(whole))
        original.requires_grad_(slot.sharded.requires_grad)
        gradient = slot.sharded.grad
        if isinstance(gradient, DTensor):
            original.grad = gradient.full_tensor()
        slot.replace(original)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Where each parameter lies, one layout per dtype; empty on one rank without a process group."""
        return tuple(part.flat.layout for part in self._parts)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._parts[0].flat.device if self._parts else torch.device("cpu")


def _numel(spec: ParamSpec) -> int:
    result = 1
    for size in spec.shape:
        result *= size
    return result


def _take_gradients(members: Sequence[ParameterSlots]) -> list[Tensor | None]:
    gradients: list[Tensor | None] = []
    for member in members:
        gradients.append(member.unsharded.grad)
        member.unsharded.grad = None
    return gradients


def _ignore(handle: Handle) -> None:
    return None
