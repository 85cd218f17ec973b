"""What may happen to a handle, and when: all pairs, from the tables and against them."""

from __future__ import annotations

import copy
import pickle

import pytest
from expecttest import assert_expected_inline as assert_text

from composable.errors import PhaseError
from composable.plan import phases
from composable.plan.phases import Event, GradEvent, GradPhase, Phase, advance, advance_gradients, diagram

# Written down a second time, on purpose: what follows from each phase, or "-" where it is refused.
PARAMETERS = """\
            UNSHARD    WAIT       RESHARD    RESHARD_POST_FORWARD
SHARDED     GATHERING  -          SHARDED    -
SHARDED_POST_FORWARD   GATHERING  -          SHARDED    -
GATHERING   GATHERING  UNSHARDED  -          -
UNSHARDED   UNSHARDED  UNSHARDED  SHARDED    SHARDED_POST_FORWARD"""

GRADIENTS = """\
             ARRIVE     HOLD       REDUCE     ALL_REDUCE     FINISH     DROP
EMPTY        ARRIVING   HELD       REDUCING   -              -          EMPTY
ARRIVING     ARRIVING   HELD       REDUCING   -              -          EMPTY
HELD         ARRIVING   HELD       REDUCING   -              -          EMPTY
REDUCING     -          -          -          ALL_REDUCING   EMPTY      EMPTY
ALL_REDUCING -          -          -          -              EMPTY      EMPTY"""


def _cells(table: str) -> list[tuple[str, str, str]]:
    head, *rows = table.splitlines()
    return [(row.split()[0], event, after) for row in rows for event, after in zip(head.split(), row.split()[1:], strict=True)]


def test_the_tables_here_name_every_phase_and_event() -> None:
    assert len(_cells(PARAMETERS)) == len(Phase) * len(Event)
    assert len(_cells(GRADIENTS)) == len(GradPhase) * len(GradEvent)


@pytest.mark.parametrize(("phase", "event", "after"), _cells(PARAMETERS))
def test_parameters_go_from_phase_to_phase_or_the_event_is_refused(phase: str, event: str, after: str) -> None:
    if after != "-":
        assert advance(Phase[phase], Event[event], unit="layers.3") is Phase[after]
        return
    with pytest.raises(PhaseError) as refused:
        advance(Phase[phase], Event[event], unit="layers.3")
    _explains(str(refused.value), phase, event, PARAMETERS)


@pytest.mark.parametrize(("phase", "event", "after"), _cells(GRADIENTS))
def test_gradients_go_from_phase_to_phase_or_the_event_is_refused(phase: str, event: str, after: str) -> None:
    if after != "-":
        assert advance_gradients(GradPhase[phase], GradEvent[event], unit="layers.3") is GradPhase[after]
        return
    with pytest.raises(PhaseError) as refused:
        advance_gradients(GradPhase[phase], GradEvent[event], unit="layers.3")
    _explains(str(refused.value), phase, event, GRADIENTS)


def _explains(message: str, phase: str, event: str, table: str) -> None:
    legal = [e for p, e, after in _cells(table) if p == phase and after != "-"]
    assert message.startswith(f"unit 'layers.3': {event} (")
    assert f"while {phase} (" in message
    assert message.endswith(f"the legal events are {', '.join(legal)}.")


def test_resharding_while_a_gather_is_in_flight_is_refused_in_words() -> None:
    with pytest.raises(PhaseError) as refused:
        advance(Phase.GATHERING, Event.RESHARD, unit="layers.3")
    assert_text(
        str(refused.value),
        """\
unit 'layers.3': RESHARD (free the unsharded parameters) is not possible while GATHERING (an all-gather is writing the \
unsharded buffer). From here the legal events are UNSHARD, WAIT.""",
    )


def test_a_gradient_that_arrives_while_the_last_ones_are_reduced_is_refused_in_words() -> None:
    with pytest.raises(PhaseError) as refused:
        advance_gradients(GradPhase.REDUCING, GradEvent.ARRIVE, unit="head")
    assert_text(
        str(refused.value),
        """\
unit 'head': ARRIVE (autograd finished one parameter's gradient) is not possible while REDUCING (the reduction is in \
flight). From here the legal events are ALL_REDUCE, FINISH, DROP.""",
    )


def test_every_phase_can_be_reached_and_left() -> None:
    for table, first in ((phases.NEXT, Phase.SHARDED), (phases.GRAD_NEXT, GradPhase.EMPTY)):
        reached = {first: None}
        for _ in range(len(table)):
            reached.update({after: None for (before, _), after in table.items() if before in reached})
        assert set(reached) == set(type(first))
        for phase in type(first):
            assert any(before is phase and after is not phase for (before, _), after in table.items())


def test_phases_survive_copies_and_pickles_as_the_same_objects() -> None:
    for phase in (*Phase, *GradPhase, *Event, *GradEvent):
        assert copy.deepcopy(phase) is phase
        assert pickle.loads(pickle.dumps(phase)) is phase


def test_the_diagram_has_one_arrow_per_legal_event() -> None:
    assert_text(
        diagram(),
        """\
stateDiagram-v2
    SHARDED --> GATHERING: UNSHARD
    SHARDED --> SHARDED: RESHARD
    SHARDED_POST_FORWARD --> GATHERING: UNSHARD
    SHARDED_POST_FORWARD --> SHARDED: RESHARD
    GATHERING --> GATHERING: UNSHARD
    GATHERING --> UNSHARDED: WAIT
    UNSHARDED --> UNSHARDED: UNSHARD
    UNSHARDED --> UNSHARDED: WAIT
    UNSHARDED --> SHARDED: RESHARD
    UNSHARDED --> SHARDED_POST_FORWARD: RESHARD_POST_FORWARD
    EMPTY --> ARRIVING: ARRIVE
    EMPTY --> HELD: HOLD
    EMPTY --> REDUCING: REDUCE
    EMPTY --> EMPTY: DROP
    ARRIVING --> ARRIVING: ARRIVE
    ARRIVING --> HELD: HOLD
    ARRIVING --> REDUCING: REDUCE
    ARRIVING --> EMPTY: DROP
    HELD --> ARRIVING: ARRIVE
    HELD --> HELD: HOLD
    HELD --> REDUCING: REDUCE
    HELD --> EMPTY: DROP
    REDUCING --> ALL_REDUCING: ALL_REDUCE
    REDUCING --> EMPTY: FINISH
    REDUCING --> EMPTY: DROP
    ALL_REDUCING --> EMPTY: FINISH
    ALL_REDUCING --> EMPTY: DROP""",
    )
