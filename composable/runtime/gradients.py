"""One unit's gradients: they arrive, are held or reduced together; knows neither order nor other units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from composable.device.collectives import TagSequence
from composable.device.labels import labelled, profiled
from composable.device.user_hooks import WaitingHooks
from composable.errors import DifferentiationError, PhaseError
from composable.plan.phases import GradEvent, GradPhase, advance_gradients
from composable.runtime.accumulation import Accumulation, Pass
from composable.runtime.early_steps import refuse_again
from composable.runtime.gradient_group import GradientGroup
from composable.runtime.gradient_group import reduce_by as reduce_group_by
from composable.runtime.gradient_hooks import Watch
from composable.runtime.hooked_stages import StageHooks


class UnitGradients:
    """EMPTY -> ARRIVING -> REDUCING (-> ALL_REDUCING) -> EMPTY, or by HELD, see `composable.plan.phases`.

    Attributes:
        accumulation: whether what arrives is reduced now.
        on_unexpected: called at a gradient of a backward that has not reached the unit, or has left it.
        comm_hooks: of the user's, which make stages of the reduction; see `reduce_by`.
        watch: what autograd calls when a gradient is there.
        hooks: of the user's, to be called when this backward has ended: they find all of its gradients there.
        tags, replica_tags: of the two hops; the second is for hybrid meshes only.
        rounds: backwards in which the unit was reduced; the same on every rank, because all take part in that.
    """

    __slots__ = (
        "__weakref__",
        "_label",
        "_reduced",
        "accumulation",
        "comm_hooks",
        "groups",
        "hooks",
        "on_unexpected",
        "phase",
        "replica_tags",
        "rounds",
        "tags",
        "unit",
        "watch"
    )  # fmt: skip

    def __init__(self) -> None:
        self.phase = GradPhase.EMPTY
        self.on_unexpected: Callable[[], object] = _ignore
        self.groups: tuple[GradientGroup, ...] = ()
        self.comm_hooks: StageHooks | None = None
        self.tags: TagSequence | None = None
        self.replica_tags: TagSequence | None = None
        self.unit = ""
        self._label = ""
        self.rounds = 0
        self._reduced = False  # in this backward
        self.accumulation = Accumulation()
        self.hooks = WaitingHooks()
        self.watch = Watch(self._take_note)

    def rename(self, unit: str) -> None:
        """Take the unit's name for messages."""
        self.unit = unit
        by = "" if self.comm_hooks is None else f" by {self.comm_hooks.name}"
        self._label = f"gradient reduction of unit '{unit}'{by}"

    def expect(self) -> None:
        """Backward has reached the unit, which is going to be reduced whatever arrives until then."""
        if self._reduced and self.accumulation.early:
            refuse_again(self.accumulation.early, self.unit)
        self.watch.expecting = True
        self.watch.count(0, _ignore)

    def _take_note(self) -> None:
        """The first gradient that nobody expected. Others may follow; they are reduced with it."""
        if self._reduced and self.accumulation.early:
            refuse_again(self.accumulation.early, self.unit)
        self.finish()
        self.on_unexpected()
        self.phase = advance_gradients(self.phase, GradEvent.ARRIVE, unit=self.unit)
        self.watch.expecting = True

    def end(self) -> None:
        """Backward has ended, and whatever arrived was reduced."""
        if self.phase is not GradPhase.EMPTY:
            self.finish()
        decide(self)
        if self.accumulation.early:
            _end_steps(self)
        self._end_round()

    def _end_round(self) -> None:
        self.watch.expecting = False
        self.rounds += self._reduced
        self._reduced = False
        if self.accumulation.holds:
            self.accumulation.end_pass()

    @property
    def due(self) -> bool:
        """Whether a backward that reduces has to reduce what earlier ones left, whatever it brings itself."""
        accumulation = self.accumulation
        if not accumulation.passes or self.phase is GradPhase.REDUCING:
            return False
        return accumulation.now is Pass.REDUCES

    def adopt(self, groups: tuple[GradientGroup, ...]) -> None:
        """The unit's parameters have been taken into other buffers."""
        self.groups = groups
        for each in groups:
            if self.comm_hooks is not None:
                reduce_group_by(each, self.comm_hooks)
            each.terms.weigh(self.accumulation.weight)
        if self.accumulation.passes:
            for each in groups:
                each.go_on_holding()

    def reduce_or_hold(self) -> None:
        """The unit has been left: reduce what arrived, or hold it until a backward does."""
        accumulation = self.accumulation
        if accumulation.now is Pass.HOLDS:
            self.finish()
            self.phase = advance_gradients(self.phase, GradEvent.HOLD, unit=self.unit)
            accumulation.holds = True
            self.watch.expecting = False
            for each in self.groups:
                each.hold()
        elif accumulation.now is Pass.HOLDS_SHARDS and self.replica_tags is not None:
            tags = self._begin_reduction()  # of the first hop alone; what it brings is held
            accumulation.holds = True
            for each in self.groups:
                each.reduce_shards(tags, self._label)
        else:
            self.reduce()

    def reduce(self) -> None:
        """Launch the reduction of what arrived; what did not counts as zero, and stays None if it did nowhere."""
        tags = self._begin_reduction()
        self._reduced = True
        label, accumulation = self._label, self.accumulation
        passes = accumulation.passes
        if self.replica_tags is not None:
            self.replica_tags.decisions = tags.decisions
        if passes:
            label = f"{label} after {passes} {'backward' if passes == 1 else 'backwards'} under no_sync"
        if passes or accumulation.holds:
            accumulation.end_window(tags.steps)
        if profiled():
            labelled(label, _launch, self.groups, tags, label)
        else:
            _launch(self.groups, tags, label)

    def _begin_reduction(self) -> TagSequence:
        if self.phase is not GradPhase.EMPTY:
            self.finish()
        decide(self)
        self.phase = advance_gradients(self.phase, GradEvent.REDUCE, unit=self.unit)
        self.watch.expecting = False
        assert self.tags is not None, "no forward has opened it"
        self.tags.decisions = self.accumulation.passes
        if self.comm_hooks is not None:  # a rank that alone has, or lacks, one of them must not meet the others
            self.tags.decisions += self.comm_hooks.digest
        return self.tags

    def all_reduce(self) -> bool:
        """When the shards' sums have arrived, launch their sum over the replicas; False where there are none."""
        tags = self.replica_tags
        if tags is None or self.phase is not GradPhase.REDUCING:
            return False
        label = f"{self._label} over replicas"
        if profiled():
            labelled(label, _launch_over_replicas, self.groups, tags, label)
        else:
            _launch_over_replicas(self.groups, tags, label)
        self.phase = advance_gradients(self.phase, GradEvent.ALL_REDUCE, unit=self.unit)
        return True

    def finish(self) -> None:
        """Wait for the reduction, if there is one; the sharded parameters have their gradients afterwards."""
        if self.phase is not GradPhase.REDUCING and self.phase is not GradPhase.ALL_REDUCING:
            return
        if self.replica_tags is not None:
            self.all_reduce()
        if profiled():
            labelled(f"wait for the {self._label}", _land, self.groups, self.hooks)
        else:
            _land(self.groups, self.hooks)
        self.phase = advance_gradients(self.phase, GradEvent.FINISH, unit=self.unit)
        if self._reduced and self.accumulation.early:
            _step(self)

    def lose(self) -> None:
        """A backward raised; the next forward drops what is here."""
        for steps in self.accumulation.early:
            steps.lose()
        if self.tags is not None:
            self.accumulation.lose(self.tags.steps)

    def drop(self) -> None:
        """After an error: nothing in flight, no unreduced gradient."""
        self.lose()
        self.phase = advance_gradients(self.phase, GradEvent.DROP, unit=self.unit)
        self.hooks = WaitingHooks()
        self.accumulation.drop()
        self._end_round()
        for each in self.groups:
            each.drop_gradients()
        for each in self.groups:
            each.drop_reduction()


def _launch(groups: Sequence[GradientGroup], tags: TagSequence, label: str) -> None:
    for each in groups:
        each.reduce(tags, label)


def _launch_over_replicas(groups: Sequence[GradientGroup], tags: TagSequence, label: str) -> None:
    for each in groups:
        each.all_reduce(tags, label)


def _land(groups: Sequence[GradientGroup], hooks: WaitingHooks) -> None:
    for each in groups:
        if found := each.finish():
            hooks.add(found)


def _step(gradients: UnitGradients) -> None:
    """Step what is stepped in backward, and give the memory of its gradients back. See Note [Steps in backward]."""
    accumulation = gradients.accumulation
    if not accumulation.complete:
        return
    decide(gradients)
    parameters = [parameter for each in gradients.groups for parameter in each.sharded]
    for steps in accumulation.early:
        steps.step(accumulation, parameters, gradients.hooks)
    for each in gradients.groups:
        for reduction in each.large_reductions:
            reduction.release()


def _end_steps(gradients: UnitGradients) -> None:
    """The same at the end of a backward, for what waited: gradients of a window that this one brought nothing to."""
    if gradients.accumulation.holds:
        return
    _step(gradients)
    parameters = [parameter for each in gradients.groups for parameter in each.sharded]
    for steps in gradients.accumulation.early:
        steps.end(gradients.accumulation, parameters)


def refuse_inside_forward(gradients: UnitGradients) -> None:
    """Raise if its parameters are stepped in backward, and one has ended inside a forward, which goes on with former values."""
    if gradients.accumulation.early:
        raise PhaseError(
            f"unit '{gradients.unit}': a backward ended inside a forward, which would go on with parameters of before, and "
            "apply_optimizer_in_backward has stepped them. Run the backward outside of the forward, or step after it"
        )


def give_back(gradients: UnitGradients) -> None:
    """Wait for what was launched first of the first hop, which stays in flight, and give its messages back."""
    if gradients.phase is GradPhase.REDUCING:
        for each in gradients.groups:
            for reduction in each.reductions.values():
                reduction.give_back()


def divided(gradients: UnitGradients) -> bool:
    """Whether any of it is reduced in two parts."""
    return any(reduction.divided for each in gradients.groups for reduction in each.reductions.values())


def decide(gradients: UnitGradients) -> None:
    """Leave nothing open of what has been reduced, see `Reduction.undecided`."""
    for each in gradients.groups:
        if each.undecided and (found := each.decide()):
            gradients.hooks.add(found)


def reduce_by(gradients: UnitGradients, hooks: StageHooks | None) -> None:
    """From the next backward on `hooks` reduce, or the library again."""
    if gradients.phase is not GradPhase.EMPTY:
        gradients.finish()
    decide(gradients)
    gradients.comm_hooks = hooks
    gradients.rename(gradients.unit)
    for each in gradients.groups:
        reduce_group_by(each, hooks)
        each.terms.weigh(gradients.accumulation.weight)


def refuse_graph(gradients: UnitGradients) -> None:
    """Raise if a gradient arrived: it was made in a backward that builds a graph, and sharded gradients are in none."""
    if any(each.holds_gradients for each in gradients.groups):
        raise DifferentiationError(
            f"backward(create_graph=True) brought gradients to parameters of unit '{gradients.unit}'. They are averaged over "
            "the ranks and sharded outside of autograd's graph, so nothing could be differentiated through them. Ask for "
            "gradients of inputs only, torch.autograd.grad(loss, inputs, create_graph=True), or leave create_graph=True out"
        )


def _ignore() -> None:
    return None
