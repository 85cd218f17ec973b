"""One fully sharded module at run time: unshard, wait, reshard. Knows neither order nor other units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn
from weakref import WeakSet

from torch import nn

from composable.config import AfterForward, CPUOffloadPolicy, Free, FreeUnlessLast, MixedPrecisionPolicy, ReshardTo
from composable.device.buffer_swap import BufferHolder
from composable.device.collectives import TagSequence, Work
from composable.device.labels import labelled, profiled
from composable.device.memory import HOST_MEMORY, NO_POOL, MemoryPool
from composable.device.parameter_swap import ParamInfo, ShardedParam
from composable.errors import PhaseError, unit_name
from composable.plan.phases import Event, Phase, advance
from composable.runtime.dtype_group import digest_of_dtypes
from composable.runtime.gradients import UnitGradients
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.outputs import UnitOutputs
from composable.runtime.parameters import UnitParameters
from composable.runtime.shard_versions import ShardVersions
from composable.runtime.unit_calls import UnitCalls
from composable.runtime.unit_precision import UnitPrecision
from composable.runtime.unit_tags import UnitTags


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """All that it takes to make a handle around the parameters that are registered; copied with the module."""

    params: tuple[ParamInfo, ...]
    mesh_info: MeshInfo
    after_forward: AfterForward
    mp_policy: MixedPrecisionPolicy
    holders: tuple[BufferHolder, ...]  # modules whose buffers are cast
    exact: tuple[nn.Module, ...] = ()  # modules that keep their dtype where the unit computes in another one
    divisor: float | None = None  # what sums of gradients are divided by, if not by the number of ranks
    offload: CPUOffloadPolicy | None = None

    def build(self) -> Handle:
        pool = HOST_MEMORY if self.mesh_info.shard.capabilities.pools_memory else NO_POOL
        params = []
        for info in self.params:
            held = [place.registered for place in info.places]
            params += [ShardedParam(info, registered) for registered in held if registered is not None][:1]
        return Handle(params, self, pool)


class Handle:
    """The run-time object of one fully sharded module: its parameters are unsharded, resharded and reduced together.

    Life: SHARDED -> GATHERING -> UNSHARDED -> SHARDED, see `composable.plan.phases`. A handle never decides when.

    Attributes:
        is_last: its forward has ended, and it is unsharded for its backward alone; see Note [Last units].
    """

    __slots__ = (
        "__weakref__", "_dtypes", "_gathered", "_gathered_anew", "_gathers_post_forward", "_label", "_works",
        "after_forward", "calls", "fqn", "gradients", "is_last", "kept_by", "mesh_info", "name", "outputs", "parameters",
        "phase", "tags", "versions"
    )  # fmt: skip

    def __init__(self, params: Sequence[ShardedParam], spec: UnitSpec, pool: MemoryPool) -> None:
        mesh_info = spec.mesh_info
        self.mesh_info = mesh_info
        self.after_forward = spec.after_forward
        self.phase = Phase.SHARDED
        self.kept_by: dict[object, None] = {}  # the reasons to keep the parameters unsharded
        self.is_last = False
        self._works: list[Work] = []
        self._gathers_post_forward = False
        self.gradients = UnitGradients()
        self.parameters = UnitParameters(
            params,
            mesh_info,
            UnitPrecision(spec.mp_policy, spec.holders),
            pool,
            on_gradient=self.gradients.watch.arrived,
            divisor=spec.divisor,
            offload=spec.offload,
        )
        self.gradients.groups = self.parameters.gradient_groups
        self.tags = UnitTags(mesh_info, self.gradients)
        self.calls = UnitCalls(self.parameters)
        self.versions = ShardVersions(self.parameters, self.gradients)
        self.outputs = UnitOutputs(self.parameters, self.versions)
        self._gathered = (self.versions.seen, 0)  # the edition of the shards when they were gathered
        self._gathered_anew = 0  # how often, because they had changed
        self._dtypes = digest_of_dtypes(self.parameters.groups)
        self.rename("")
        HANDLES.add(self)

    def rename(self, fqn: str) -> None:
        """Take the FQN under the root, if there is one, for messages."""
        self.fqn = fqn
        self.name = name = unit_name(fqn)
        self._label = f"all-gather of unit '{name}'"
        self.parameters.rename(name)
        self.gradients.rename(name)
        self.outputs.rename(name)

    # --- between steps ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Before a forward of the root: nothing is kept that nobody holds, or that may be out of date."""
        for group in self.gradients.groups:
            for reduction in group.large_reductions:
                reduction.release()
        self._gathered_anew = 0
        if self.phase is not Phase.SHARDED:
            self.drop_if_stale()

    def adopt_replaced(self) -> None:
        """Parameters that were moved, cast or replaced by hand become the unit's own."""
        parameters = self.parameters
        if parameters.registered.adopt_replaced(self.name):
            self.reshard()  # into the old buffers
            parameters.rebuild()
            self.gradients.adopt(parameters.gradient_groups)
            self._dtypes = digest_of_dtypes(parameters.groups)

    def drop_if_stale(self) -> None:
        """Free what was gathered, if it may no longer be what the shards say; see Note [Stale parameters]."""
        if self.phase is not Phase.SHARDED and self._gathered != self.versions.look_up():
            self._gathered_anew += 1
            self.reshard()

    # --- unshard and reshard ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Launch the all-gather unless the parameters are, or will be, there. Users may write to what is gathered."""
        self.tags.steps.open()  # ranks may have left the last one at different places
        self.unshard_in_step(for_user=True)

    def unshard_in_step(self, *, for_user: bool = False) -> None:
        """`unshard` for modules to compute with: nobody should write to what is gathered."""
        before = self.phase
        self.phase = advance(before, Event.UNSHARD, unit=self.name)
        if self.phase is before:
            return
        post_forward = self._gathers_post_forward = before is Phase.SHARDED_POST_FORWARD
        self._gathered = self.versions.look_up()
        if self.tags.gather is None:
            self.tags.open()
        tags = self.tags.gather_post_forward if post_forward else self.tags.gather
        assert tags is not None
        tags.decisions = self._gathered_anew + self._dtypes
        if self.parameters.groups:
            if profiled():
                labelled(self._label, _launch, self, tags, for_user)
            else:
                _launch(self, tags, for_user)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.phase is Phase.GATHERING:
            works, self._works = self._works, []
            if works and profiled():
                labelled(f"wait for the {self._label}", _land, self, works)
            else:
                _land(self, works)
        self.phase = advance(self.phase, Event.WAIT, unit=self.name)

    def reshard(self) -> None:
        """Free the unsharded parameters; a gather in flight is waited for first."""
        self.is_last = False
        if self.phase is Phase.SHARDED:
            return
        if self.phase is Phase.GATHERING:
            self.wait_for_unshard()
        self.phase = advance(self.phase, Event.RESHARD, unit=self.name)
        written: list[str] = []
        for each in self.parameters.groups:
            written += each.free()
        if written:
            refuse_write(written[0], self.name)

    def keep_for(self, reason: object) -> None:
        """The parameters stay unsharded once they are, while there is a reason: a scope, or a graph."""
        self.kept_by[reason] = None

    def keep_no_longer_for(self, reason: object) -> None:
        """Done twice is done once. Frees nothing by itself."""
        self.kept_by.pop(reason, None)

    def reshard_after_forward(self) -> None:
        """Free, keep or regroup, as the user asked."""
        if self.phase is not Phase.UNSHARDED or self.kept_by:
            return
        match self.after_forward:
            case Free() | FreeUnlessLast():
                self.reshard()
            case ReshardTo():
                self.phase = advance(self.phase, Event.RESHARD_POST_FORWARD, unit=self.name)
                written = [name for each in self.parameters.groups for name in each.reshard_post_forward()]
                if written:
                    refuse_write(written[0], self.name)

    def withdraw(self) -> None:
        """Give a gather up that has not landed."""
        if self.phase is Phase.GATHERING:
            self._give_up_arrivals()

    # --- leaving ----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """After an error: nothing in flight, nothing unsharded, no unreduced gradient, modules hold sharded parameters."""
        self.calls.set_to(0)
        self.outputs.pending = 0
        try:
            self._give_up_arrivals()
        finally:
            self.gradients.drop()

    def _give_up_arrivals(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.abort()
        finally:
            self.is_last = False
            self.phase = Phase.SHARDED
            for each in self.parameters.groups:
                each.free()  # whatever was written: the step is lost anyway


HANDLES: Final[WeakSet[Handle]] = WeakSet()  # all that live


def written_to(handle: Handle) -> bool:
    """Whether somebody has written to the shards of an unsharded unit since they were gathered."""
    return handle._gathered[0] is not handle.versions.look_up()[0]


def gather_completed(handle: Handle) -> bool:
    """Whether `wait_for_unshard` would find everything there. To ask may take what has come."""
    works = handle._works
    if works and profiled():
        return bool(labelled(f"wait for the {handle._label}", _progress, works))
    for work in works:  # noqa: SIM110 - a generator would cost more than what it asks
        if not work.progress():
            return False
    return True


def refuse_write(parameter: str, unit: str) -> NoReturn:
    raise PhaseError(
        f"parameter '{parameter}' of unit '{unit}' was written to in place while it was unsharded; such a write "
        "is lost when the parameter is resharded. Compute a new tensor, or write to the sharded parameter, outside of "
        "forward."
    )


def _launch(handle: Handle, tags: TagSequence, for_user: bool) -> None:
    for each in handle.parameters.groups:
        if handle._gathers_post_forward:
            work = each.gather_post_forward(tags, handle._label)
        else:
            work = each.gather(tags, handle._label, for_user=for_user)
        if work is not None:
            handle._works.append(work)


def _progress(works: Sequence[Work]) -> bool:
    return all(work.progress() for work in works)


def _land(handle: Handle, works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
    for each in handle.parameters.groups:
        each.wait_for_unshard(post_forward=handle._gathers_post_forward)
