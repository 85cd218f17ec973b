"""Which change of state is legal now, as literal tables; knows no tensor and performs nothing."""

from __future__ import annotations

from enum import Enum
from typing import Final

from composable.errors import PhaseError


class _State(Enum):
    """Members hash by identity: the tables are looked up several times per unit and step."""

    __hash__ = object.__hash__


class Phase(_State):
    """What exists of a handle's parameters."""

    SHARDED = "only this rank's shard exists"
    SHARDED_POST_FORWARD = "a post-forward shard, cut over a few consecutive ranks, exists as well"
    GATHERING = "an all-gather is writing the unsharded buffer"
    UNSHARDED = "the unsharded parameters exist"


class Event(_State):
    """What can happen to a handle's parameters."""

    UNSHARD = "launch the all-gather"
    WAIT = "wait for the all-gather at the first use"
    RESHARD = "free the unsharded parameters"
    RESHARD_POST_FORWARD = "keep a post-forward shard over a few consecutive ranks and free the rest"


NEXT: Final[dict[tuple[Phase, Event], Phase]] = {
    (Phase.SHARDED, Event.UNSHARD): Phase.GATHERING,
    (Phase.SHARDED, Event.RESHARD): Phase.SHARDED,  # nothing to free
    (Phase.SHARDED_POST_FORWARD, Event.UNSHARD): Phase.GATHERING,  # among the ranks of the post-forward mesh
    (Phase.SHARDED_POST_FORWARD, Event.RESHARD): Phase.SHARDED,
    (Phase.GATHERING, Event.UNSHARD): Phase.GATHERING,  # already prefetched
    (Phase.GATHERING, Event.WAIT): Phase.UNSHARDED,
    # (GATHERING, RESHARD) is absent on purpose: a collective owns the buffer until it has landed.
    (Phase.UNSHARDED, Event.UNSHARD): Phase.UNSHARDED,  # kept since forward, or unsharded by the user
    (Phase.UNSHARDED, Event.WAIT): Phase.UNSHARDED,
    (Phase.UNSHARDED, Event.RESHARD): Phase.SHARDED,
    (Phase.UNSHARDED, Event.RESHARD_POST_FORWARD): Phase.SHARDED_POST_FORWARD,
}


class GradPhase(_State):
    """What exists of the gradients that travel together: of a sharded unit's, or of a bucket's."""

    EMPTY = "no gradient has arrived"
    ARRIVING = "some unsharded gradients have arrived and are not reduced yet"
    HELD = "earlier backwards left gradients, which a later one reduces"
    REDUCING = "the reduction is in flight"
    ALL_REDUCING = "the shards' sums are in flight between replicas"


class GradEvent(_State):
    """What can happen to them."""

    ARRIVE = "autograd finished one parameter's gradient"
    HOLD = "add up what arrived with what earlier backwards left"
    REDUCE = "launch the reduction"
    ALL_REDUCE = "wait for the reduction over the shards and launch the one over replicas"
    FINISH = "wait for the reduction and put the result on the sharded parameters"
    DROP = "forget unreduced gradients after an error, and what is in flight"


GRAD_NEXT: Final[dict[tuple[GradPhase, GradEvent], GradPhase]] = {
    (GradPhase.EMPTY, GradEvent.ARRIVE): GradPhase.ARRIVING,
    (GradPhase.EMPTY, GradEvent.HOLD): GradPhase.HELD,  # as many backwards on every rank, whatever arrived
    (GradPhase.EMPTY, GradEvent.REDUCE): GradPhase.REDUCING,  # other ranks may have gradients where this one has none
    (GradPhase.EMPTY, GradEvent.DROP): GradPhase.EMPTY,
    (GradPhase.ARRIVING, GradEvent.ARRIVE): GradPhase.ARRIVING,
    (GradPhase.ARRIVING, GradEvent.HOLD): GradPhase.HELD,
    (GradPhase.ARRIVING, GradEvent.REDUCE): GradPhase.REDUCING,
    (GradPhase.ARRIVING, GradEvent.DROP): GradPhase.EMPTY,
    (GradPhase.HELD, GradEvent.ARRIVE): GradPhase.ARRIVING,
    (GradPhase.HELD, GradEvent.HOLD): GradPhase.HELD,
    (GradPhase.HELD, GradEvent.REDUCE): GradPhase.REDUCING,
    (GradPhase.HELD, GradEvent.DROP): GradPhase.EMPTY,
    (GradPhase.REDUCING, GradEvent.ALL_REDUCE): GradPhase.ALL_REDUCING,
    (GradPhase.REDUCING, GradEvent.FINISH): GradPhase.EMPTY,  # without replicas there is no other hop
    (GradPhase.REDUCING, GradEvent.DROP): GradPhase.EMPTY,
    (GradPhase.ALL_REDUCING, GradEvent.FINISH): GradPhase.EMPTY,
    (GradPhase.ALL_REDUCING, GradEvent.DROP): GradPhase.EMPTY,
    # (REDUCING, ARRIVE) and (ALL_REDUCING, ARRIVE) are absent on purpose: what comes next first finishes the reduction before.
}


def advance(phase: Phase, event: Event, *, unit: str) -> Phase:
    """The phase after `event`, or a `PhaseError` that names the unit and what would have been legal."""
    try:
        return NEXT[phase, event]
    except KeyError:
        raise PhaseError(_refusal(unit, phase, event, [e for p, e in NEXT if p is phase])) from None


def advance_gradients(phase: GradPhase, event: GradEvent, *, unit: str) -> GradPhase:
    """The gradients' phase after `event`, or a `PhaseError` that names the unit and what would have been legal."""
    try:
        return GRAD_NEXT[phase, event]
    except KeyError:
        raise PhaseError(_refusal(unit, phase, event, [e for p, e in GRAD_NEXT if p is phase])) from None


def _refusal(unit: str, phase: Enum, event: Enum, legal: list[Event] | list[GradEvent]) -> str:
    names = ", ".join(e.name for e in legal)
    return (
        f"unit '{unit}': {event.name} ({event.value}) is not possible while {phase.name} ({phase.value}). "
        f"From here the legal events are {names}."
    )


def diagram() -> str:
    """Both tables as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2"]
    for (phase, event), after in NEXT.items():
        lines.append(f"    {phase.name} --> {after.name}: {event.name}")
    for (grad_phase, grad_event), grad_after in GRAD_NEXT.items():
        lines.append(f"    {grad_phase.name} --> {grad_after.name}: {grad_event.name}")
    return "\n".join(lines)
