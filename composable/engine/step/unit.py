"""What one call of a verb leaves on its modules: the parameter groups, and their gradient buckets.

`fully_shard` and `replicate` make the same class. They differ in the mesh info (over which ranks
parameters are sharded and gradients summed) and, for a model that is only replicated, in when
gradients are reduced (`Buckets`).

In this file: the values that a unit is made of (`UnitSpec`, `UnitCall`, `UnitStep`, `Relations`),
and `Unit`: construction, which parameters modules hold, unshard and reshard, what a step does to
it, gradients. It is passive: `visit.py`, `root.py` and `gather_order.py` say what happens in a
step, and `engine/edits/` between steps (state dicts, removal, copies, rest on the host).

Why parameters stay gathered (`must_stay`), and why modules hold compute parameters
(`hold_at_rest`):

| reason | gathered | held | a program |
|---|---|---|---|
| `step.calls` | yes | yes | a forward of its module |
| `step.to_run` | yes | yes | losses fused with the head, `[norm, head]`: until both have run |
| `ROOT_RUNS` in `step.needed_by` | yes | yes | it reads a weight replicated next to shards |
| `BACKWARD` there | yes | yes | backward is in the unit; checkpointed parts run again there |
| `UNSEEN` there | yes | no | a unit inside returns a parameter, or an output is detached |
| `LENT` there | yes | no | the same without gradients: until the root's forward ends |
| `GRAPH` there | yes | no | gradient penalties, `create_graph=True` |
| `BY_HAND` there | yes | by `EXPLICIT` | zero-bubble pipelines (`features/split_backwards.py`) |
| `EXPLICIT` in `kept_by` | yes | yes | `unshard(model)`, until a forward with gradients |
| a scope in `kept_by` | yes | by `EXPLICIT` | `keep_unsharded(model)` |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable.comm.base import Comm
from composable.comm.mesh_info import MeshInfo
from composable.compilation import untraced
from composable.config import MixedPrecisionPolicy
from composable.contract.contract import known_fqn
from composable.contract.tree import SHARD, Place, names_below, states_below
from composable.contract.values import tensors_in
from composable.engine.gradients.agreed import Agreed, InputGradMode
from composable.engine.gradients.sparse import only_looked_up
from composable.engine.gradients.unit_gradients import GradientSpec, Stages, UnitGradients, UnitKind
from composable.engine.params.param import ManagedParam, ParameterSwap, ParamInfo, owner_of
from composable.engine.params.param_group import (
    Grouping,
    GroupKey,
    ParamGroup,
    ReplicatedGroup,
    ShardedState,
)
from composable.engine.params.precision import BufferCasts, BufferHolder, resolve
from composable.errors import PhaseError, unit_name
from composable.torch_private import in_backward, locals_of

if TYPE_CHECKING:
    from composable.engine.step.root import Root  # which a unit tells what changed

# `Unit.shown_by` of a scope in which ranks hold different things
RANK0_ONLY: Final = "summon_full_params(rank0_only=True)"


class Need:
    """Why the parameters of a unit stay as they are, see the table at the top of this file."""

    # In `Unit.kept_by`. Modules hold whole parameters outside of forwards, too, after `unshard` or
    # in `keep_unsharded`: until `reshard`, the end of the scope, a forward with gradients, or a
    # backward.
    EXPLICIT: Final = "unshard()"
    # the others in `UnitStep.needed_by`
    BACKWARD: Final = "backward is in the unit"
    # An output aliases a parameter, or none was found to watch.
    UNSEEN: Final = "backward may come to the unit unseen"
    # An output of a call inside of the root's aliases a parameter.
    LENT: Final = "the forward around it may read the parameters"
    GRAPH: Final = "backward may go through a graph of create_graph=True"
    BY_HAND: Final = "split backwards bring gradients, outside of forwards and backwards"
    ROOT_RUNS: Final = "the root computes, and may read the parameters at any time"
    HELD: Final = frozenset((BACKWARD, ROOT_RUNS))  # for these, modules hold compute parameters


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What an annotation asks of one unit.

    Attributes:
        verb: "fully_shard" or "replicate".
        reshard_after_forward: as the user spelled it: None, True, False or a number of ranks.
        prefetch: how many units to gather ahead of need when this one is entered.
        buffer_holders: modules whose buffers are cast while they compute.
        grouping: `fully_shard`: which groups its parameters are in, and where shards rest.
        divisor: what sums of gradients are divided by; None for the number of ranks (a mean).
        bucket_bytes: `replicate`: bytes of small gradients that share a message.
        keeps_buckets: `replicate`: gradients live in their buckets from step to step.
        broadcast_buffers: `replicate`: buffers that follow rank 0 in training forwards.
        left_alone: where ignored parameters are registered.
    """

    verb: str
    modules: tuple[nn.Module, ...]
    params: tuple[ParamInfo, ...]
    mesh_info: MeshInfo
    reshard_after_forward: bool | int | None = None
    prefetch: int = 1
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    buffer_holders: tuple[BufferHolder, ...] = ()
    divisor: float | None = None
    grouping: Grouping = field(default_factory=Grouping)
    bucket_bytes: int = 25 << 20
    keeps_buckets: bool = False
    broadcast_buffers: tuple[Place, ...] = ()
    left_alone: tuple[Place, ...] = ()

    @property
    def on_host(self) -> bool:
        """Whether shards rest on the host."""
        return self.grouping.on_host


@dataclass(slots=True, eq=False)
class UnitCall:
    """One call of a unit's module.

    Attributes:
        step: of the unit; a backward that comes after it was lost counts nowhere.
        since: the number of autograd's next node when the call began.
        root: of the forward; None if the call recomputes what checkpointing dropped, or belongs to
            no forward.
        outermost: of the root.
        anchors: outputs get a node also where this rank used no parameter, because other ranks may
            have. A recomputation repeats what its forward did.
        watched: backward comes to its outputs, where a hook is called.
        waits: backward has not come to them yet. Several outputs count once.
        number: `Forward.number` of the root's; None for a recomputation, which does not count.
    """

    unit: Unit
    step: UnitStep
    module: nn.Module
    since: int
    root: Root | None
    outermost: bool = False
    anchors: bool = False
    watched: bool = False
    waits: bool = False
    number: int | None = None

    def take_place(self, number: int | None, *, outermost: bool, is_entered: bool) -> None:
        """It begins in a forward of the root, and it is known what ranks give the unit.

        Args:
            number: None for a recomputation.
            is_entered: backward enters the unit on all ranks.
        """
        self.number, self.outermost = number, outermost
        self.anchors = is_entered and self.unit.mesh_info.all.size > 1

    def await_backward(self) -> None:
        """Backward will come to its outputs."""
        self.watched = self.waits = True
        self.step.pending += 1

    def note_backward(self) -> None:
        """Backward has come to an output."""
        if self.waits:
            self.waits = False
            self.step.pending -= 1


@dataclass(slots=True, eq=False)
class UnitStep:
    """What a unit knows of what is under way in its root. It lives from step to step, and is
    dropped when one is lost.

    Attributes:
        calls: of its modules that compute, for which it was gathered; innermost last.
        pending: forwards whose backward has not come.
        to_run: of several modules, those that have not run in this forward, or recomputation.
            Until all have, modules hold compute parameters: code between two of them reads the
            weight of the next (losses that are fused with the head do).
        needed_by: `BACKWARD`, `UNSEEN`, `LENT`, `GRAPH`, `BY_HAND`; `ROOT_RUNS` of replicated
            units next to shards.
    """

    calls: list[UnitCall] = field(default_factory=list)
    pending: int = 0
    to_run: dict[nn.Module, None] = field(default_factory=dict)
    needed_by: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Relations:
    """Of one unit to others; sets in the order in which they came.

    A unit keeps alive what is below it, and not what is around it, which may be dropped. When that
    is collected differs between ranks, so that decisions which all ranks make alike go by numbers.

    Attributes:
        number: of the annotation.
        around: annotated around it, and it itself, by number; of dropped ones the numbers stay.
        below: annotated before it, in its modules.
        readers: whose modules read parameters of it.
        ran_inside: whose forward began at some time while one of it was running.
        is_shared: it lies below several annotated models, see `Root.shared`.
        model_group: of all ranks of an annotation around it, for an expert on a mesh of its own.
    """

    number: int = field(default_factory=partial(next, count()))
    around: dict[int, ref[Unit]] = field(default_factory=dict)
    below: dict[Unit, None] = field(default_factory=dict)
    readers: dict[Unit, None] = field(default_factory=dict)
    ran_inside: dict[Unit, None] = field(default_factory=dict)
    is_shared: bool = False
    model_group: ref[dist.ProcessGroup] | None = None

    def note_inside(self, unit: Unit) -> None:
        """The forward of `unit` began while one of this one was running."""
        self.ran_inside[unit] = None

    def share(self) -> None:
        """It lies below several annotated models."""
        self.is_shared = True

    def units_around(self) -> list[Unit]:
        """Those of `around` that are alive."""
        return [unit for to_unit in self.around.values() if (unit := to_unit()) is not None]

    def note_reader(self, reader: Unit) -> None:
        self.readers[reader] = None

    def surround(self, own: Unit, below: Sequence[Unit]) -> None:
        """`own`, whose relations these are, was annotated around `below`."""
        self.below = dict.fromkeys(below)
        for unit in (own, *below):
            unit.relations.around[self.number] = ref(own)

    def end(self, own: Unit) -> list[Unit]:
        """`own` is no unit any more. Returns those around it and below, and what is below these."""
        around, below = self.units_around(), [*self.below]
        self.around, self.below = {}, {}
        for unit in below:
            unit.relations.around.pop(self.number, None)
        for unit in around:
            unit.relations.below.pop(own, None)
            unit.relations.ran_inside.pop(own, None)
        return [
            *dict.fromkeys((*below, *around, *(each for u in around for each in u.relations.below)))
        ]

    def copy_from(self, original: Relations, copies: Mapping[Unit, Unit]) -> None:
        """Those of a copy, among the units that were copied with it."""
        self.below, self.readers = (
            {copies[unit]: None for unit in related if unit in copies}
            for related in (original.below, original.readers)
        )
        around = [unit for unit in original.units_around() if unit in copies]
        self.around = {copies[unit].relations.number: ref(copies[unit]) for unit in around}
        group = original.model_group
        known = group is not None and group() in [unit.mesh_info.all.group for unit in around]
        self.model_group = group if known else None


class Unit:
    """See the top of this file. It is the verb's state in the registry."""

    spec: UnitSpec  # what the annotation asks for
    # prepares modules that hold its parameters for state dicts; returns what undoes it
    watch: Callable[[Iterable[nn.Module]], list[Callable[[], object]]]
    mesh_info: MeshInfo  # the ranks over which parameters are sharded, and gradients summed

    def __init__(self) -> None:
        # --- from the annotation on
        self.modules: tuple[nn.Module, ...] = ()  # as annotated; none after `remove`
        self.params: list[ManagedParam] = []
        self.name = unit_name("")  # the FQN below the root, for messages
        # how its parameters lie over the ranks, and when their gradients are reduced
        self.kind = UnitKind.LOCAL
        # of the kind BESIDE: the mesh on which its parameters rest as DTensors, see `UnitKind`
        self.rest_mesh: DeviceMesh | None = None
        self.relations = Relations()  # to other units

        # --- built around the tensors that are registered now (`build`)
        self.groups: list[ParamGroup] = []  # of parameters that are unsharded together
        self.gathers = False  # any of its groups does
        self.gradients = UnitGradients()
        self._trained: list[bool] = []  # which of its parameters require gradients
        self.trains = False  # any does
        self._swap = ParameterSwap(())  # which form of parameters modules hold
        self._is_in = False  # modules hold compute parameters: from `swap_in` to `swap_out`
        self._buffers: tuple[BufferCasts, ...] = ()  # the same for buffers: one, if some are cast

        # --- a step
        self.root: Root | None = None  # of the last forward; None after the tree changed
        self.step = UnitStep()  # dropped if it is lost
        self.compared = False  # all ranks were seen to enter it in one place
        self.agreements: list[Agreed] = []  # of roots that it was in (`agreed_by`)

        # --- what users have asked for
        self.kept_by: dict[object, None] = {}  # why it stays unsharded: scopes, `EXPLICIT`
        # the scope, if any, in which modules hold whole parameters for the user to edit; they are
        # not computed with
        self.shown_by = ""
        self.is_offloaded = False  # rests on the host, without groups, until `restore`
        self._moved = False  # `offload` has begun to move them

        self.undo: list[Callable[[], object]] = []  # of `watch`, for parameters that came later

    # --- construction ----------------------------------------------------------------------------

    def initialize(
        self,
        spec: UnitSpec,
        gradient_hooks: Sequence[Callable[[Unit, ManagedParam], None]],
        watch: Callable[[Iterable[nn.Module]], list[Callable[[], object]]],
        params: Sequence[ManagedParam] | None = None,
    ) -> None:
        """Take charge of the parameters that `spec` names; `build` follows.

        Args:
            gradient_hooks: called when autograd has accumulated a gradient on what modules compute
                with, and at rest (see `UnitGradients`).
            params: of a copy, which were copied.
        """
        self.spec, self.watch = spec, watch
        self.gradients.tell(*(partial(hook, self) for hook in gradient_hooks))
        self.modules = spec.modules
        if (fqn := known_fqn(spec.modules[0])) is not None:
            self.name = unit_name(fqn)
        self.mesh_info = spec.mesh_info
        self.params = list(map(ManagedParam, spec.params) if params is None else params)
        is_sharded = spec.verb == SHARD and spec.mesh_info.mesh is not None
        # `choose_rest` in `edits/annotations.py` looks for shards around replicated units
        self.kind = UnitKind.SHARDED if is_sharded else without_shards(spec.mesh_info)
        self._buffers = (BufferCasts(spec.buffer_holders),) if spec.buffer_holders else ()
        self.agree_anew()

    def take(self, param: ManagedParam, places: tuple[Place, ...]) -> None:
        """Manage a parameter that was another unit's, or is at more places; `build` follows."""
        watched = {id(place.module) for info in self.spec.params for place in info.places}
        more = [place.module for place in places if id(place.module) not in watched]
        self.undo += self.watch(dict.fromkeys(more))
        param.set_info(replace(param.info, fqn=places[0].fqn, places=places))
        self.spec = replace(self.spec, params=(*self.spec.params, param.info))
        self.params.append(param)

    def give(self, params: Collection[ManagedParam]) -> None:
        """Others manage these from now on; `build` follows."""
        self.params = [param for param in self.params if param not in params]

    def change_kind(self, kind: UnitKind, mesh: DeviceMesh | None) -> None:
        """Units with shards came around it, or went: how its parameters rest, see `UnitKind`."""
        if (kind, mesh) != (self.kind, self.rest_mesh):
            self.kind, self.rest_mesh = kind, mesh
            self.build()
            self.forget_root()

    def note_model_group(self, group: ref[dist.ProcessGroup] | None) -> None:
        self.relations.model_group = group

    def build(self) -> None:
        """(Re)build groups and buckets around the parameters that are registered now."""
        spec = self.spec
        self.gradients.unhook()  # its hooks are on tensors that are about to be replaced
        alike: dict[tuple[GroupKey, bool, bool], list[ManagedParam]] = {}
        for param in self.params:
            tensor = param.registered
            if tensor is None:
                continue
            (local,) = locals_of([tensor])
            stays = not self.is_sharded or local.device.type in ("meta", self.mesh_info.device.type)
            precision = resolve(
                spec.mp_policy,
                tensor.dtype,
                exact=param.info.exact,
                keeps=param.info.keeps,
                grad_dtype=param.grad_dtype,
            )
            device = local.device if stays else self.mesh_info.device
            sparse = not self.is_sharded and only_looked_up(param.info)
            in_parts = not self.is_sharded and not param.info.form.is_whole
            key = GroupKey(precision, device, param.info.mesh_info or self.mesh_info)
            alike.setdefault((key, sparse, in_parts), []).append(param)
        self.groups = []
        for (key, sparse, in_parts), members in alike.items():
            if self.is_sharded:
                self.groups += spec.grouping.groups(members, key)
                continue
            self.groups.append(  # users' own memory; nothing is gathered, but casts are made
                ReplicatedGroup(
                    members, key,
                    rest_mesh=None if sparse or in_parts else self.rest_mesh,
                    # the root shows those next to shards as long as it computes
                    read_apart=bool(self.relations.readers) and self.kind is not UnitKind.BESIDE,
                )
            )  # fmt: skip
        self.gathers = any(group.gathers for group in self.groups)
        self._swap = ParameterSwap(self.params)
        self.rename(self.name)  # and label parameters, before gradients that wait are marked
        self._build_gradients()
        if self.root is not None:
            self.root.post_backward.make_buckets()

    def forget_root(self) -> None:
        """The tree changed, or what ranks agree on: the next forward plans anew."""
        if self.root is not None:
            self.root.forget()

    def give_up_step(self) -> None:
        """A change between two steps does not wait for a backward that may come."""
        if self.root is not None and self.root.in_step and not self.root.step.running:
            self.root.reset()

    def note_agreement(self, made: Agreed) -> None:
        alive = [each for each in self.agreements if None not in each.units()]
        self.agreements = [*alive, made]  # those of dropped models go

    def agree_anew(self) -> None:
        """All ranks have changed it alike: they agree on everything again."""
        # without shards, or other ranks, there is nothing to compare
        self.compared = not self.is_sharded or self.mesh_info.all.size == 1
        self.agreements = []
        if any(group.extended for group in self.groups):
            for param in self.params:
                param.agree(None)
            self.build()

    @property
    def is_sharded(self) -> bool:
        return self.kind is UnitKind.SHARDED

    @property
    def on_one_mesh(self) -> bool:
        """Whether no parameter is on a mesh of its own."""
        return all(param.info.mesh_info is None for param in self.params)

    @property
    def replicas_info(self) -> MeshInfo:
        """The mesh that tells replicas. For a replicated unit next to hybrid shards over the same
        ranks, it is the mesh of the shards.
        """
        if self.rest_mesh is not None and self.rest_mesh.ndim == 2:
            for around in self.relations.units_around():
                for each in (around, *around.relations.below):
                    if each.is_sharded and each.spec.mesh_info.mesh is self.rest_mesh:
                        return each.spec.mesh_info
        return self.spec.mesh_info

    @property
    def is_in_backward(self) -> bool:
        """Whether backward is in the unit, and needs its parameters."""
        return Need.BACKWARD in self.step.needed_by

    @property
    def forward_number(self) -> int | None:
        """`UnitCall.number` of the innermost call that runs."""
        return self.step.calls[-1].number

    def _build_gradients(self) -> None:
        spec = self.spec
        how = GradientSpec(
            self.kind, self.mesh_info, spec.divisor, spec.bucket_bytes, spec.keeps_buckets,
            is_read_apart=bool(self.relations.readers),
        )  # fmt: skip
        self.gradients.build(how, self.params, self.groups)
        self.follow()

    def follow(self) -> None:
        """Compute parameters follow what users froze and unfroze."""
        self.gradients.follow()
        for param in self.params:
            param.compute.requires_grad_(param.at_rest.requires_grad)
        self._trained = [param.at_rest.requires_grad for param in self.params]
        self.trains = any(self._trained)

    def rename(self, fqn: str) -> None:
        """Take the FQN below the root, for messages."""
        self.name = fqn = unit_name(fqn)
        for group in self.groups:
            group.rename(fqn)
        self.gradients.rename(fqn)
        for param in self.params:
            param.set_labels(fqn, self)

    @property
    def computes_apart(self) -> bool:
        """Whether modules compute with other parameters than the at-rest ones."""
        return any(param.compute is not param.at_rest for param in self.params)

    # --- what modules hold -----------------------------------------------------------------------

    def swap_in(self) -> None:
        self._is_in = True
        self._swap.swap_in()
        for buffers in self._buffers:
            buffers.show()

    def swap_out(self) -> None:
        for buffers in self._buffers:
            buffers.hide()
        self._swap.swap_out()
        self._is_in = False

    def show_at_rest(self, module: nn.Module | None = None, *, runs: bool = False) -> None:
        """A state dict is made of what modules hold, or loaded: at-rest parameters.

        Args:
            module: the one whose entries come next. There may be many in a unit, so that what
                `unshard()` shows of the others stays.
            runs: a forward of the unit does.
        """
        if not self._is_in or runs or in_backward():
            return
        if module is None or Need.EXPLICIT not in self.kept_by:
            self.swap_out()
            return
        self._swap.swap_out_at(module)
        for buffers in self._buffers:
            buffers.hide()

    def end_show_at_rest(self, module: nn.Module) -> None:
        """After `show_at_rest`, once the entries of `module` are in a state dict."""
        if self._is_in and Need.EXPLICIT in self.kept_by and not self.step.calls:
            self._swap.swap_in_at(module)
            for buffers in self._buffers:
                buffers.show()

    def take_back(self) -> None:
        """See `ParameterSwap.take_back`."""
        if self._is_in:
            self._swap.take_back()

    def hold_at_rest(self) -> None:
        """Modules hold at-rest parameters again, unless they are to hold compute parameters: in a
        call, until all modules of the unit have run, after `unshard()`, while a backward is in it,
        and next to shards for as long as the root computes.
        """
        step = self.step
        computes = step.calls or step.to_run or not Need.HELD.isdisjoint(step.needed_by)
        if self._is_in and not computes and Need.EXPLICIT not in self.kept_by:
            self.swap_out()

    # --- unshard and reshard ---------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        for group in self.groups:  # noqa: SIM110, a generator takes a call for each
            if group.state is not ShardedState.UNSHARDED:
                return False
        return True

    def unshard(self) -> None:
        """Launch the all-gathers, unless the parameters are there or on their way, and were not
        written to since.
        """
        for group in self.groups:
            group.unshard()

    def wait_for_unshard(self) -> None:
        for group in self.groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    @property
    def must_stay(self) -> bool:
        """Whether the parameters may not be freed now."""
        step = self.step
        return bool(self.kept_by or step.calls or step.to_run or step.needed_by)

    def free(self, *, before_step: bool = False) -> None:
        """Reshard, unless the parameters must stay.

        Args:
            before_step: what was gathered for earlier steps goes, since shards may have been
                written to in a way that no version counter shows; and all ranks have made the
                writes that one shows.
        """
        for group in self.groups:
            if group.state is not ShardedState.SHARDED and group.gathers:
                if not self.must_stay:
                    group.reshard()
                elif before_step and group.is_stale:
                    group.note_written()

    def note_written(self) -> None:
        """All ranks have written to parameters at rest, see `written`."""
        for group in self.groups:
            group.note_written()

    def keep(self, reason: object, *, as_gathered: bool = False) -> None:
        """Stay unsharded once unsharded, while there is a reason.

        Args:
            as_gathered: also what the forward of a step that is under way has gathered.
        """
        if not self.kept_by and not as_gathered:
            self.free(before_step=True)
        self.kept_by[reason] = None

    def release(self, reason: object) -> None:
        """Without `reason`; reshards if it was the last one, and no forward is under way."""
        self.kept_by.pop(reason, None)
        if not self.kept_by:
            self.hold_at_rest()
            self.free()

    def show(self) -> None:
        """Modules hold compute parameters outside of forwards, as `unshard()` and scopes ask,
        unless these are out of date.
        """
        self.kept_by[Need.EXPLICIT] = None
        if self.is_unsharded and not any(group.is_stale for group in self.groups):
            self.swap_in()

    def show_again(self) -> None:
        """Modules hold what `unshard()` and scopes ask for, after a call that needed what is at
        rest.
        """
        if Need.EXPLICIT in self.kept_by and not self.step.calls and not self.shown_by:
            self.show()

    def show_whole(self, scope: str) -> None:
        """Modules hold whole parameters for the user to edit, see `shown_by`; "": no more."""
        self.shown_by = scope

    def refrozen(self) -> list[ManagedParam]:
        """Parameters that users have frozen, or unfrozen, by what modules hold in place of the
        at-rest ones.
        """
        return [
            param
            for param, trained in zip(self.params, self._trained, strict=False)
            if param.compute is not param.at_rest and param.compute.requires_grad != trained
        ]

    def end_explicit(self) -> None:
        """A step uses what `unshard()` has gathered, and frees it as usual."""
        del self.kept_by[Need.EXPLICIT]
        for param in self.refrozen():
            trains = param.compute.requires_grad
            param.at_rest.requires_grad_(trains)
            param.compute.requires_grad_(not trains)  # until `follow`, as for what is at rest

    def hide(self) -> None:
        """End what `unshard()` and scopes began: modules hold at-rest parameters again.

        Modules have held compute parameters for longer than a forward: `requires_grad_` and
        `model.to(...)` in that time mean the at-rest ones.
        """
        if Need.EXPLICIT not in self.kept_by:
            return
        self.end_explicit()
        if self.step.calls:
            return
        self.hold_at_rest()
        changed = [param for group in self.groups for param in group.recast()]
        for param in changed:
            param.at_rest.data = param.at_rest.data.to(param.compute.device, param.compute.dtype)
        if changed:
            self.reshard()
            self.build()
        else:
            for group in self.groups:
                group.put_back()

    # --- a step (`visit.py`, `root.py` and `gather_order.py` say what happens) -------------------

    def push_call(self, call: UnitCall) -> None:
        """The unit is gathered, and the module computes."""
        step = self.step
        if not step.to_run and len(self.modules) > 1:
            step.to_run = dict.fromkeys(self.modules)
        step.calls.append(call)
        self.swap_in()

    def pop_call(self) -> UnitCall:
        """The innermost call has computed, or raised."""
        call = self.step.calls.pop()
        self.step.to_run.pop(call.module, None)
        self.hold_at_rest()
        return call

    def end_forward(self) -> None:
        """The root's forward ends, or raised: modules that have not run do not run any more."""
        self.step.to_run = {}
        self.hold_at_rest()

    def count(self, more: int) -> None:
        """More forwards wait for their backward, or fewer."""
        self.step.pending += more

    def need(self, why: str) -> None:
        """The parameters are needed as they are."""
        self.step.needed_by[why] = None

    def end_need(self, why: str) -> None:
        """They are not for this reason any more."""
        self.step.needed_by.pop(why, None)
        self.hold_at_rest()

    def post_backward(self, *, in_forward: bool) -> None:
        """Backward has gone through the unit.

        Args:
            in_forward: a forward runs around the backward.
        """
        self.step.needed_by.pop(Need.BACKWARD, None)
        if not in_forward:
            self.step.to_run = {}  # a recomputation ran some of its modules only
        self.hold_at_rest()

    def end_backward(self, *, in_forward: bool, goes_on: bool) -> None:
        """The backward has ended.

        Args:
            goes_on: a forward around it, or a graph, waits for another one.
        """
        step = self.step
        if not goes_on:
            step.needed_by.pop(Need.UNSEEN, None)
            step.pending = 0  # none is expected by the forwards that have been
        if not in_forward:
            step.needed_by.pop(Need.ROOT_RUNS, None)
        if self._is_in or step.to_run or step.needed_by:
            self.post_backward(in_forward=in_forward)

    def lose_backward(self) -> None:
        """The backward raised: nothing needs the parameters. Modules hold at-rest ones."""
        self.step.needed_by = {}
        self.gradients.listen()
        if not self.step.calls:
            self.swap_out()

    def show_in_root(self) -> None:
        """A forward or backward of the root begins, and may read the parameters at any time."""
        self.need(Need.ROOT_RUNS)
        self.unshard()
        self.wait_for_unshard()
        self.swap_in()

    def follow_root(self, root: Root | None) -> None:
        """`root` is notified of changes from now on."""
        self.root = root

    def pass_comparison(self) -> None:
        """All ranks were seen to enter it in one place."""
        self.compared = True

    def input_grad_mode_of(self, inputs: object) -> InputGradMode:
        """That of a forward with these inputs."""
        if not torch.is_grad_enabled():
            return InputGradMode.NO_GRAD
        if any(tensor.requires_grad for tensor in tensors_in(inputs)):
            return InputGradMode.REQUIRED
        return InputGradMode.NOT_REQUIRED

    def aliases(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or views, a compute parameter whose memory comes and goes."""
        # `detach()` and `.data` are no views to autograd
        if type(tensor) is Tensor and tensor.grad_fn is not None and not tensor._is_view():
            return False  # it was computed
        try:
            return any(group.aliases(tensor) for group in self.groups if group.gathers)
        except (NotImplementedError, RuntimeError):
            return False  # tensors without storage: nested, sparse, wrappers

    def drop_step(self) -> None:
        """The step is lost."""
        self.step = UnitStep()
        self.gradients.drop_step()

    # --- gradients -------------------------------------------------------------------------------

    def reduce_by(self, stages: Stages) -> None:
        """Let `stages` make the reductions of gradients. Between two steps."""
        self.gradients.reduce_by(stages)
        if self.root is not None:
            self.root.post_backward.make_buckets()

    def set_mesh_info(self, mesh_info: MeshInfo) -> None:
        """Reduce gradients over other ranks; those that hold the shards together stay the same.
        Between two steps.
        """
        self.mesh_info = mesh_info
        if self.kind in (UnitKind.ARRIVAL, UnitKind.LOCAL):
            self.kind = without_shards(mesh_info)
        self._build_gradients()
        self.rename(self.name)
        self.forget_root()

    def exchange_comms(self, exchange: Callable[[Comm], Comm]) -> None:
        """Gather and reduce-scatter by other comms of the same ranks, from now on.

        Raises:
            PhaseError: a step is under way, gradients wait to be reduced, or modules hold whole
                parameters.
        """
        if self.is_busy or self.shown_by:
            _refuse_in_step(f"the communication of unit '{self.name}' was changed")
        mesh_info = self.mesh_info.with_shards_by(exchange)
        self.hide()
        self.reshard()
        self.mesh_info = mesh_info
        if not self._moved:  # `restore` builds the groups of a unit on the host
            self.build()  # messages are laid out anew
        self.forget_root()

    @property
    def is_busy(self) -> bool:
        """Whether it is in a forward or backward, between them, or has accumulated gradients."""
        in_step = self.root is not None and self.root.in_step
        return in_step or bool(self.step.calls) or in_backward() or self.gradients.has_unreduced

    def set_reshard_after_forward(self, reshard_after_forward: bool | int | None) -> None:
        """Free parameters after forward, or keep them, from the next forward on."""
        self.spec = replace(self.spec, reshard_after_forward=reshard_after_forward)

    def set_divisor(self, divisor: float) -> None:
        """Divide sums of gradients by `divisor` from now on. Between two steps.

        Raises:
            PhaseError: a step is under way, or gradients wait to be reduced.
        """
        if self.is_busy:
            _refuse_in_step(f"the divisor of gradients of unit '{self.name}' was set")
        self.spec = replace(self.spec, divisor=divisor)
        self.set_mesh_info(self.mesh_info)  # builds the buckets anew

    # --- between steps: what `engine/edits/` tells it --------------------------------------------

    def refuse_offloaded(self, what: str) -> None:
        if self.is_offloaded:
            raise PhaseError(
                f"{what}: unit '{self.name}' rests on the host since offload_to_host. Call"
                " restore() on what that returned first, on all ranks"
            )

    def offload(self, move: Callable[[Tensor], Tensor] | None) -> None:
        """Rest elsewhere, without groups; None: there is nothing to move."""
        self.is_offloaded = True
        if move is not None:
            self._moved = True
            self.gradients.clear()
            for group in self.groups:
                group.move(move)
            self.groups = []
            self._swap = ParameterSwap(())

    def restore(self) -> None:
        """The inverse of `offload`, also of one that raised. May be called again, if it raises."""
        if self._moved:
            for param in self.params:
                if param.own is not None:  # shards are brought when the groups are built
                    param.move(lambda tensor: tensor.to(self.mesh_info.device))
            self.build()
        self._moved = self.is_offloaded = False

    def remove(self) -> list[ManagedParam]:
        """It is removed: it gives up hooks, groups and modules. Returns its parameters."""
        self.gradients.clear()
        self.gradients.arrive_in(())  # hooks are not called for it any more
        for undo in reversed(self.undo):
            undo()
        self.drop_step()
        self.swap_out()
        params = self.params
        self.undo, self.params, self.groups = [], [], []
        self.root, self.modules = None, ()
        return params

    def buffers_shown(self) -> list[tuple[Tensor, Tensor]]:
        """Casts of buffers that modules hold now, each with the buffer itself."""
        return [pair for buffers in self._buffers for pair in buffers.pairs()]

    def __deepcopy__(self, memo: dict[Any, Any]) -> Unit:
        return Unit()  # if all its modules are copied, `edits/copies.py` fills it

    def is_copy(self, name: str, undo: list[Callable[[], object]]) -> None:
        """Of a unit with this name; `undo` is the copy of that unit's."""
        self.name, self.undo = name, undo


def _refuse_in_step(what: str) -> NoReturn:
    raise PhaseError(
        f"{what} in the middle of a step: in a forward or backward, between them, with accumulated"
        " gradients, or, for communication, inside of summon_full_params(). Do it between two steps"
    )


def without_shards(mesh_info: MeshInfo) -> UnitKind:
    return UnitKind.ARRIVAL if mesh_info.all.size > 1 else UnitKind.LOCAL


def units_below(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units of both verbs on `modules` and below, in `.modules()` order."""
    return states_below(modules)


def rename_below(modules: Sequence[nn.Module], units: Iterable[Unit]) -> None:
    """Give units their FQNs below `modules`; that below the first of these counts."""
    names: dict[int, str] = {}
    for module in reversed(modules):
        names |= names_below(module)
    for unit in units:
        fqn = names.get(id(unit.modules[0])) if unit.modules else None
        if fqn is not None and unit.name != unit_name(fqn):
            unit.rename(fqn)


def unit_of(parameter: Tensor) -> Unit | None:
    """The unit that manages `parameter`."""
    owner = owner_of(parameter)
    assert owner is None or isinstance(owner, Unit)
    return owner


# --- after calls between steps that all ranks make -----------------------------------------------


@untraced
def written(units: Iterable[Unit]) -> None:
    """Tell `units` that their parameters at rest have new values, on all ranks: a call that all
    ranks make has written to them. Such calls write to local tensors, for example to step shards.
    No version counter distinguishes these writes from a write of one rank alone, and no message may
    depend on such a write (`param_group.py`).

    Whatever is gathered of them is out of date. Units that a scope keeps are gathered again at
    once, since each rank may call them in an order of its own there, and modules hold what the
    scope shows. So all ranks call this, with the same units.
    """
    units = list(units)
    for unit in units:
        unit.note_written()
    kept = [unit for unit in units if unit.kept_by]
    for unit in kept:
        unit.unshard()
    for unit in kept:
        unit.wait_for_unshard()
    show_again(kept)


@contextmanager
def at_rest(units: Sequence[Unit]) -> Iterator[None]:
    """Let modules hold parameters at rest inside, but for those of a forward or backward that is
    under way; then what scopes show.
    """
    for unit in units:
        if not unit.step.calls and not in_backward():
            unit.swap_out()
    try:
        yield
    finally:
        show_again(units)


def show_again(units: Iterable[Unit]) -> None:
    """Let modules hold again what scopes show, after a call that looked at parameters at rest."""
    for unit in units:
        unit.show_again()
