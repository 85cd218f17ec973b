"""What is gathered and reduced when: the order of the last forward predicts the next, and a wrong
guess does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from composable.comm.backends import comms_wrapped_by
from composable.errors import AnnotationError
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import Pool, current_device, need_devices


class Block(nn.Module):
    """Notes when it computes."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.add("run", self.name)
        return self.linear(x).tanh()


class Model(nn.Module):
    """Runs its blocks in the order that it is given; block 9 raises."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(str(index), log) for index in range(4))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            if index == 9:
                raise ValueError("as planned")
            x = self.blocks[index](x)
        return x


def _model(log: Log, *, reshard: bool | None = True, prefetch: int = 1) -> tuple[Model, Model]:
    """An un-annotated model and one whose blocks are units; the root has no parameters."""
    torch.manual_seed(0)
    plain, ours = (Model(each).to(current_device()) for each in (Log(), log))
    ours.load_state_dict(plain.state_dict())
    with comms_wrapped_by(partial(Recording, log=log)):
        fully_shard(ours, policy={Block}, reshard_after_forward=reshard, prefetch=prefetch)
    return plain, ours


def _short(log: Log) -> str:
    """Events since the last call, such as "gather 0, wait 0, run 0"."""
    words = []
    for event, label in log.events:
        unit = label.rpartition("blocks.")[2][0]
        if event == "run":
            words.append(f"run {label}")
        elif "all-gather" in label:
            words.append(f"{'gather' if event == 'launch' else 'wait'} {unit}")
        elif "reduction" in label:
            words.append(f"{'reduce' if event == 'launch' else 'land'} {unit}")
    log.events.clear()
    return ", ".join(words)


def _forwards(orders: Sequence[Sequence[int]]) -> list[str]:
    log = Log()
    _, ours = _model(log)
    found = []
    for order in orders:
        with torch.no_grad():
            raises = pytest.raises(ValueError, match="as planned") if 9 in order else nullcontext()
            with raises:
                ours(torch.ones(2, 4, device=current_device()), order)
        found.append(_short(log))
    return found


_WITHOUT_1: Final = (
    "gather 0, gather 1, wait 0, run 0, gather 2, gather 3, wait 2, run 2, wait 3, run 3, wait 1"
)
_FORWARDS: Final[dict[str, tuple[list[list[int]], str]]] = {
    "without a record, units are gathered as they are entered": (
        [[0, 1, 2]],
        "gather 0, wait 0, run 0, gather 1, wait 1, run 1, gather 2, wait 2, run 2",
    ),
    "the next unit of the record is gathered while this one computes": (
        [[0, 1, 2]] * 2,
        "gather 0, gather 1, wait 0, run 0, gather 2, wait 1, run 1, wait 2, run 2",
    ),
    "a unit that runs twice is gathered twice": (
        [[0, 1, 0, 2]] * 2,
        (
            "gather 0, gather 1, wait 0, run 0, gather 0, wait 1, run 1, gather 2, wait 0, run 0,"
            " wait 2, run 2"
        ),
    ),
    # What was gathered for nothing is freed at the end.
    "a skipped unit does not disturb the guess for those after it": (
        [[0, 1, 2, 3], [0, 2, 3]],
        _WITHOUT_1,
    ),
    "a forward that raised leaves the record as it was": (
        [[0, 1, 2, 3], [0, 2, 9], [0, 2, 3]],
        _WITHOUT_1,
    ),
    "a unit out of turn leaves the guess where it was": (
        [[0, 1, 2], [0, 3, 1, 2]],
        (
            "gather 0, gather 1, wait 0, run 0, gather 3, wait 3, run 3, gather 2, wait 1, run 1,"
            " wait 2, run 2"
        ),
    ),
    # Each rank may evaluate what it likes in scopes: only a backward that has landed replaces it.
    "forwards without gradients leave the record of the first as it was": (
        [[0, 1, 2], [2, 0], [2, 0]],
        "gather 0, gather 2, wait 2, run 2, wait 0, run 0",
    ),
}


@pytest.mark.parametrize("what", _FORWARDS)
def test_the_last_forward(pool: Pool, device: str, what: str) -> None:
    need_devices(device, 2)
    orders, expected = _FORWARDS[what]
    assert [found[-1] for found in pool.run(2, _forwards, orders, device=device)] == [expected] * 2


# --- whole steps --------------------------------------------------------------------------------


def _steps(orders: Sequence[Sequence[int]], reshard: bool | None, prefetch: int) -> str:
    log = Log()
    plain, ours = _model(log, reshard=reshard, prefetch=prefetch)
    found = ""
    for order in orders:
        for model in (plain, ours):
            model.zero_grad()
            output = model(torch.ones(2, 4, device=current_device()), order)
            if model is ours:
                forward = _short(log)
            output.sum().backward()
        # what was launched before each wait
        found = f"{forward}\n\n{_short(log)}".replace(", wait", ",\nwait")
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            mine = None if other.grad is None else other.grad.full_tensor()
            torch.testing.assert_close(mine, one.grad)
    return found


# Backward goes from the newest forward to the oldest; one reduction stays in flight while the next
# is launched.
_A_STEP = """\
gather 0, gather 1,
wait 0, run 0, gather 2,
wait 1, run 1, gather 3,
wait 2, run 2,
wait 3, run 3

gather 3, gather 2,
wait 3, reduce 3, gather 1,
wait 2, reduce 2, land 3, gather 0,
wait 1, reduce 1, land 2,
wait 0, reduce 0, land 1, land 0"""
_THE_LAST_UNIT_STAYS_FOR_BACKWARD = """\
gather 0, gather 1,
wait 0, run 0, gather 2,
wait 1, run 1,
wait 2, run 2

gather 1, reduce 2, gather 0,
wait 1, reduce 1, land 2,
wait 0, reduce 0, land 1, land 0"""
_A_UNIT_THAT_RAN_TWICE_IS_REDUCED_AFTER_ITS_OLDER_USE = """\
gather 0, gather 1,
wait 0, run 0, gather 0,
wait 1, run 1,
wait 0, run 0

gather 0, gather 1,
wait 0, gather 0,
wait 1, reduce 1,
wait 0, reduce 0, land 1, land 0"""

_NOTHING_IS_GATHERED_AHEAD = """\
gather 0,
wait 0, run 0, gather 1,
wait 1, run 1, gather 2,
wait 2, run 2

gather 2,
wait 2, reduce 2, gather 1,
wait 1, reduce 1, land 2, gather 0,
wait 0, reduce 0, land 1, land 0"""
_TWO_UNITS_AHEAD = """\
gather 0, gather 1, gather 2,
wait 0, run 0, gather 3,
wait 1, run 1,
wait 2, run 2,
wait 3, run 3

gather 3, gather 2, gather 1,
wait 3, reduce 3, gather 0,
wait 2, reduce 2, land 3,
wait 1, reduce 1, land 2,
wait 0, reduce 0, land 1, land 0"""


@pytest.mark.parametrize(
    ("order", "reshard", "prefetch", "expected"),
    [
        ([0, 1, 2, 3], True, 1, _A_STEP),
        ([0, 1, 2], None, 1, _THE_LAST_UNIT_STAYS_FOR_BACKWARD),
        ([0, 1, 0], True, 1, _A_UNIT_THAT_RAN_TWICE_IS_REDUCED_AFTER_ITS_OLDER_USE),
        ([0, 1, 2], True, 0, _NOTHING_IS_GATHERED_AHEAD),
        ([0, 1, 2, 3], True, 2, _TWO_UNITS_AHEAD),
    ],
    ids=["each unit freed", "the last one stays", "one runs twice", "prefetch=0", "prefetch=2"],
)
def test_a_step(
    pool: Pool, device: str, order: list[int], reshard: bool | None, prefetch: int, expected: str
) -> None:
    need_devices(device, 2)
    assert pool.run(2, _steps, [order, order], reshard, prefetch, device=device) == [expected] * 2


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_prefetch_is_a_number_of_units(wrong: object) -> None:
    with pytest.raises(AnnotationError, match="prefetch must be a whole number"):
        fully_shard(nn.Linear(2, 2), prefetch=wrong)  # type: ignore[arg-type]
