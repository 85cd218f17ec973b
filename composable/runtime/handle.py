"""One fully sharded module at run time: unshard, show, hide, reshard. Knows neither order nor other units."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable.config import AfterForward, Free, MixedPrecisionPolicy, ReshardTo
from composable.device.collectives import Communicator, Steps, TagSequence, Work
from composable.device.memory import MemoryPool
from composable.device.parameter_swap import Owner, ParameterSlots
from composable.errors import PhaseError, few, still_on_meta, unit_name
from composable.model.hooks import Guard, GuardRow
from composable.plan.layout import Layout
from composable.plan.phases import Event, Phase, advance
from composable.runtime.dtype_group import print_of_dtypes
from composable.runtime.gradients import UnitGradients
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.parameters import UnitParameters, Versions

logger = logging.getLogger("composable")


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that it takes to make a handle around the parameters that its owners hold; copied with the module."""

    owners: tuple[tuple[Owner, ...], ...]
    names: tuple[str, ...]
    placements: tuple[int | None, ...]
    strides: tuple[tuple[int, ...], ...]  # of the parameters as they were
    mesh_info: MeshInfo
    after_forward: AfterForward
    mp_policy: MixedPrecisionPolicy
    holders: tuple[nn.Module, ...]  # modules whose buffers are cast

    def build(self, pool: MemoryPool) -> Handle:
        slots = []
        for owners in self.owners:
            registered = owners[0].module._parameters[owners[0].name]
            assert registered is not None
            slots.append(ParameterSlots(owners, registered))
        return Handle(slots, self, pool)


class Handle:
    """The run-time object of one fully sharded module: its parameters are unsharded, resharded and reduced together.

    Life: SHARDED -> GATHERING -> UNSHARDED -> SHARDED, see `composable.plan.phases`. A handle never decides when.
    """

    __slots__ = (
        "__weakref__", "_calls", "_checks", "_dtypes", "_gathered", "_gathered_anew", "_gathers_post_forward", "_guards",
        "_label", "_left", "_opened", "_post_forward_tags", "_strides", "_tags", "_works", "after_forward", "depth",
        "exact_values", "fqn", "gradients", "kept_by", "mesh_info", "name", "names", "on_backward", "on_foreigners",
        "parameters", "phase", "slots", "uses", "versions", "whole_gradients"
    )  # fmt: skip

    def __init__(self, slots: Sequence[ParameterSlots], recipe: Recipe, pool: MemoryPool) -> None:
        mesh_info = recipe.mesh_info
        self.slots = tuple(slots)
        self.names = recipe.names  # FQNs relative to the annotated module
        self.mesh_info = mesh_info
        self.after_forward = recipe.after_forward
        self._strides = recipe.strides
        self.phase = Phase.SHARDED
        self.kept_by: dict[object, None] = {}  # scopes and graphs that keep the parameters unsharded
        self.uses = 0  # forwards whose backward has not been entered yet
        self.depth = 0  # calls of its modules that are running, and its backward
        self._calls = 0  # the former alone
        self.on_foreigners: Callable[[], None] = _ignore  # somebody registered or moved parameters; may raise
        self.on_backward: Callable[[bool], None] = _ignore  # backward goes through an output, and builds a graph or not
        self._guards = GuardRow(())
        self._tags: TagSequence | None = None
        self._post_forward_tags: TagSequence | None = None
        self._checks: TagSequence | None = None
        self._opened: list[tuple[Communicator, TagSequence]] = []  # these and the gradients', by what they are used over
        self._works: list[Work] = []
        self._gathers_post_forward = False
        self.versions: Versions = []  # of the shards, as last looked up; the same object until somebody writes to one
        self._gathered = (self.versions, 0)  # the edition of the shards when they were gathered
        self._gathered_anew = 0  # how often, because they had changed
        self.exact_values: Sequence[Tensor | None] = ()  # while the unit is being removed
        self.whole_gradients: Sequence[Tensor | None] = ()
        self._left = False  # its modules have whole parameters again
        self.gradients = UnitGradients()
        self.parameters = UnitParameters(
            self.slots,
            recipe.names,
            recipe.placements,
            mesh_info,
            recipe.mp_policy,
            recipe.holders,
            pool,
            on_gradient=self.gradients.watch.arrived,
        )
        self.gradients.groups = self.parameters.gradient_groups
        self._dtypes = print_of_dtypes(self.parameters.groups)
        self.rename("")

    def open_channels(self) -> None:
        """Before the first collective of the unit. Every rank comes to it, which is not so of looking at a copied module."""
        if self._tags is None:
            mesh_info, self._opened = self.mesh_info, []
            self.gradients.tags = self._open(mesh_info.shard)
            self._checks = self._open(mesh_info.all)
            if mesh_info.replicate is not None:
                self.gradients.replica_tags = self._open(mesh_info.replicate)
            if mesh_info.post_forward is not None:
                self._post_forward_tags = self._open(mesh_info.post_forward)
            self._tags = self._open(mesh_info.shard)
            self.count_by(self._tags.steps)

    def _open(self, communicator: Communicator) -> TagSequence:
        """For messages of one kind: a rank that is one collective ahead must not take a gather for a reduction."""
        tags = communicator.open_tags()
        self._opened.append((communicator, tags))
        return tags

    def count_by(self, steps: Steps) -> None:
        """Messages belong to `steps` from now on."""
        for _, tags in self._opened:
            steps.behind = steps.behind or tags.steps.behind
            tags.steps = steps

    @property
    def steps(self) -> Steps:
        self.open_channels()
        assert self._tags is not None
        return self._tags.steps

    @property
    def checks(self) -> TagSequence:
        """Of what ranks compare in a step."""
        self.open_channels()
        assert self._checks is not None
        return self._checks

    def say_farewell(self, why: str) -> None:
        """Tell the other ranks that this one has left the step."""
        for communicator, tags in self._opened:
            communicator.leave(tags, why)

    def rename(self, fqn: str) -> None:
        """Take the FQN under the root, if there is one, for messages."""
        self.fqn = fqn
        self.name = name = unit_name(fqn)
        self._label = f"all-gather of unit '{name}'"
        self.parameters.rename(name)
        self.gradients.rename(name)

    def guarded_by(self, guards: Sequence[Guard]) -> None:
        """`guards` stand wherever one of the parameters is registered, while they are sharded."""
        self._guards = GuardRow(guards)

    @property
    def trainable(self) -> bool:
        return self.parameters.trainable

    # --- between steps ----------------------------------------------------------------------------------------------

    def look_into_parameters(self) -> None:
        """Notice what users did to parameters since the last forward of the root, and refuse what nobody can compute with."""
        parameters = self.parameters
        if not parameters.registered.intact():
            self.on_foreigners()
            self._take_in_foreigners()
        if parameters.on_meta:
            raise PhaseError(still_on_meta(parameters.on_meta[0], self.name))
        parameters.follow()

    def refresh(self) -> None:
        """Before a forward of the root: nothing is kept that nobody holds, or that may be out of date."""
        for group in self.gradients.groups:
            for reduction in group.worth_releasing:
                reduction.release()
        self._gathered_anew = 0
        if self.phase is not Phase.SHARDED:
            self.drop_if_stale()

    def _take_in_foreigners(self) -> None:
        """Parameters that were moved, cast or replaced become the unit's own."""
        parameters = self.parameters
        if parameters.registered.adopt_replaced(self.name):
            self.reshard()  # into the old buffers
            parameters.rebuild()
            self.gradients.adopt(parameters.gradient_groups)
            self._dtypes = print_of_dtypes(parameters.groups)

    def look_up_edition(self) -> tuple[Versions, int]:
        """Notice what was written to shards: graphs that were made before cannot go back through what it was written to."""
        versions = self.parameters.versions()
        if versions != self.versions:
            self.parameters.outdate(self.versions, versions)
            self.versions = versions
        return self.versions, self.gradients.rounds

    def drop_if_stale(self) -> None:
        """Free what was gathered, if it may no longer be what the shards say; see Note [Stale parameters]."""
        if self.phase is not Phase.SHARDED and self._gathered != self.look_up_edition():
            self._gathered_anew += 1
            self.reshard()

    def tell_of_writes(self, before: Versions) -> None:
        """Backward is about to go through a forward whose parameters were written to since."""
        if not self.parameters.groups:
            raise PhaseError(
                f"fully_shard was removed from unit '{self.name}' between a forward and its backward: the parameters that this "
                "backward goes to are no longer the module's. Run the backward first, or the forward again"
            )
        names = self.parameters.written_since(before)
        logger.warning(
            "unit '%s': %s changed between a forward and its backward, by an optimizer's step, by load_state_dict or in place. "
            "If that backward needs the former values, autograd refuses it ('modified by an inplace operation'), as it does "
            "without fully_shard; run the backward first",
            self.name,
            few([f"'{name}'" for name in names]),
        )

    # --- unshard and reshard ----------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Launch the all-gather unless the parameters are, or will be, there. Users may write to what is gathered."""
        self.steps.open()  # ranks may have left the last one at different places
        self.unshard_in_step(for_user=True)

    def unshard_in_step(self, *, for_user: bool = False) -> None:
        """`unshard` for modules to compute with: nobody should write to what is gathered."""
        before = self.phase
        self.phase = advance(before, Event.UNSHARD, unit=self.name)
        if self.phase is before:
            return
        post_forward = self._gathers_post_forward = before is Phase.SHARDED_POST_FORWARD
        self._gathered = self.look_up_edition()
        if self._tags is None:
            self.open_channels()
        tags = self._post_forward_tags if post_forward else self._tags
        assert tags is not None
        tags.decisions = self._gathered_anew + self._dtypes
        for each in self.parameters.groups:
            if post_forward:
                work = each.gather_post_forward(tags, self._label)
            else:
                work = each.gather(tags, self._label, for_user=for_user)
            if work is not None:
                self._works.append(work)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.phase is Phase.GATHERING:
            works, self._works = self._works, []
            for work in works:
                work.wait()
            for each in self.parameters.groups:
                each.wait_for_unshard(post_forward=self._gathers_post_forward)
        self.phase = advance(self.phase, Event.WAIT, unit=self.name)

    def reshard(self) -> None:
        """Free the unsharded parameters; a gather in flight is waited for first."""
        if self.phase is Phase.SHARDED:
            return
        if self.phase is Phase.GATHERING:
            self.wait_for_unshard()
        self.phase = advance(self.phase, Event.RESHARD, unit=self.name)
        written: list[str] = []
        for each in self.parameters.groups:
            written += each.free()
        if written:
            raise PhaseError(
                f"parameter '{written[0]}' of unit '{self.name}' was written to in place while it was unsharded; such a write "
                "is lost when the parameter is resharded. Compute a new tensor, or write to the sharded parameter, outside of "
                "forward."
            )

    def settle_after_forward(self) -> None:
        """Free, keep or regroup, as the user asked."""
        if self.phase is not Phase.UNSHARDED or self.kept_by:
            return
        match self.after_forward:
            case Free():
                self.reshard()
            case ReshardTo():
                self.phase = advance(self.phase, Event.RESHARD_POST_FORWARD, unit=self.name)
                for each in self.parameters.groups:
                    each.reshard_post_forward()

    # --- what modules see -------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Modules compute with the unsharded parameters from here on; nests."""
        self.depth += 1
        if self.depth == 1:
            self.parameters.swap.show()

    def hide(self) -> None:
        """Modules hold the sharded parameters again, whether or not the unsharded ones still exist."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            self.parameters.swap.hide()

    def begin_call(self) -> None:
        """`show`, for a call of one of its modules: the modules inside, too, are called as they should be."""
        self.show()
        self._calls += 1
        if self._calls == 1:
            self._guards.step_aside()

    def end_call(self) -> None:
        """`hide`, at the end of a call."""
        self.hide()
        self._calls = max(0, self._calls - 1)
        if self._calls == 0:
            self._guards.stand()

    def withdraw(self) -> None:
        """Give a gather up that has not landed."""
        if self.phase is Phase.GATHERING:
            self._give_up_arrivals()

    def show_for(self, calls: int) -> None:
        """Whatever was shown or hidden before: show for so many calls of its modules, and no backward."""
        if not calls:
            self.parameters.swap.hide()
            self._guards.stand()
        self.depth = self._calls = calls

    # --- leaving ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """After an error: nothing in flight, nothing unsharded, no unreduced gradient, modules hold sharded parameters."""
        self.show_for(0)
        self.uses = 0
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
            self.phase = Phase.SHARDED
            for each in self.parameters.groups:
                each.free()  # whatever was written: the step is lost anyway

    def adopt_replaced(self) -> None:
        """Parameters that were moved, cast or replaced by hand become the unit's own."""
        if not self.parameters.registered.intact():
            self._take_in_foreigners()

    def restore(self, originals: Sequence[nn.Parameter | None]) -> None:
        """Give the module whole plain parameters back, which are here: `originals` where they still exist, new ones elsewhere.
        What an interrupt ended is done again."""
        if self.parameters.groups:
            if not self._left:
                self.parameters.leave(originals, self._strides, self.exact_values, self.whole_gradients)
                self._left = True
            self.reshard()
            self.parameters.forget()
        self.gradients.groups = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Where each parameter lies, one layout per dtype; empty on one rank without a process group."""
        return tuple(group.flat.layout for group in self.parameters.groups)

    @property
    def device(self) -> torch.device:
        """Where the parameters are, or would be."""
        groups = self.parameters.groups
        return groups[0].flat.device if groups else self.mesh_info.device


def _ignore(*_: bool) -> None:
    return None
