"""What is gathered and reduced when: the order of the last forward predicts the next, and a wrong guess does no harm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import fully_shard
from composable.comm import comms_wrapped_by
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
    """Runs its blocks in the order that it is told; block 9 raises."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(str(index), log) for index in range(4))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            if index == 9:
                raise ValueError("as planned")
            x = self.blocks[index](x)
        return x


def _model(log: Log, *, reshard: bool | None = True) -> tuple[Model, Model]:
    """An un-annotated model and one whose blocks are units; the root has no parameters."""
    torch.manual_seed(0)
    plain, ours = (Model(each).to(current_device()) for each in (Log(), log))
    ours.load_state_dict(plain.state_dict())
    with comms_wrapped_by(partial(Recording, log=log)):
        fully_shard(ours, policy={Block}, reshard_after_forward=reshard)
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


def _last(pool: Pool, device: str, *orders: Sequence[int]) -> str:
    need_devices(device, 2)
    first, second = pool.run(2, _forwards, orders, device=device)
    assert first == second
    return str(first[-1])


def test_without_a_record_units_are_gathered_as_they_are_entered(pool: Pool, device: str) -> None:
    expected = "gather 0, wait 0, run 0, gather 1, wait 1, run 1, gather 2, wait 2, run 2"
    assert _last(pool, device, [0, 1, 2]) == expected


def test_the_next_unit_of_the_record_is_gathered_while_this_one_computes(pool: Pool, device: str) -> None:
    expected = "gather 0, gather 1, wait 0, run 0, gather 2, wait 1, run 1, wait 2, run 2"
    assert _last(pool, device, [0, 1, 2], [0, 1, 2]) == expected


def test_a_unit_that_runs_twice_is_gathered_twice(pool: Pool, device: str) -> None:
    expected = "gather 0, gather 1, wait 0, run 0, gather 0, wait 1, run 1, gather 2, wait 0, run 0, wait 2, run 2"
    assert _last(pool, device, [0, 1, 0, 2], [0, 1, 0, 2]) == expected


@pytest.mark.parametrize("others", [[], [[0, 2, 9]]], ids=["", "raised in between"])
def test_a_skipped_unit_does_not_disturb_the_guess_for_those_after_it(pool: Pool, device: str, others: list[list[int]]) -> None:
    """What was gathered for nothing is freed at the end. A forward that raised leaves the record as it was."""
    found = _last(pool, device, [0, 1, 2, 3], *others, [0, 2, 3])
    assert found == "gather 0, gather 1, wait 0, run 0, gather 2, gather 3, wait 2, run 2, wait 3, run 3, wait 1"


def test_a_unit_out_of_turn_leaves_the_guess_where_it_was(pool: Pool, device: str) -> None:
    found = _last(pool, device, [0, 1, 2], [0, 3, 1, 2])
    assert found == "gather 0, gather 1, wait 0, run 0, gather 3, wait 3, run 3, gather 2, wait 1, run 1, wait 2, run 2"


def test_the_last_forward_is_the_record(pool: Pool, device: str) -> None:
    expected = "gather 2, gather 0, wait 2, run 2, wait 0, run 0"
    assert _last(pool, device, [0, 1, 2], [2, 0], [2, 0]) == expected


# --- whole steps --------------------------------------------------------------------------------------------------------


def _steps(orders: Sequence[Sequence[int]], reshard: bool | None) -> str:
    log = Log()
    plain, ours = _model(log, reshard=reshard)
    found = ""
    for order in orders:
        for model in (plain, ours):
            model.zero_grad()
            output = model(torch.ones(2, 4, device=current_device()), order)
            if model is ours:
                forward = _short(log)
            output.sum().backward()
        found = f"{forward}\n\n{_short(log)}".replace(", wait", ",\nwait")  # what was launched before each wait
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            mine = None if other.grad is None else other.grad.full_tensor()
            torch.testing.assert_close(mine, one.grad)
    return found


def _step(pool: Pool, device: str, *orders: Sequence[int], reshard: bool | None = True) -> Any:
    need_devices(device, 2)
    first, second = pool.run(2, _steps, orders, reshard, device=device)
    assert first == second
    return first


def test_a_step(pool: Pool, device: str) -> None:
    """Backward goes from the newest forward to the oldest; one reduction stays in flight while the next is launched."""
    assert_text(
        _step(pool, device, [0, 1, 2, 3], [0, 1, 2, 3]),
        """\
gather 0, gather 1,
wait 0, run 0, gather 2,
wait 1, run 1, gather 3,
wait 2, run 2,
wait 3, run 3

gather 3, gather 2,
wait 3, reduce 3, gather 1,
wait 2, reduce 2, land 3, gather 0,
wait 1, reduce 1, land 2,
wait 0, reduce 0, land 1, land 0""",
    )


def test_the_last_unit_stays_for_backward_which_needs_it_first(pool: Pool, device: str) -> None:
    assert_text(
        _step(pool, device, [0, 1, 2], [0, 1, 2], reshard=None),
        """\
gather 0, gather 1,
wait 0, run 0, gather 2,
wait 1, run 1,
wait 2, run 2

gather 1, reduce 2, gather 0,
wait 1, reduce 1, land 2,
wait 0, reduce 0, land 1, land 0""",
    )


def test_a_unit_that_ran_twice_is_reduced_after_its_older_use(pool: Pool, device: str) -> None:
    assert_text(
        _step(pool, device, [0, 1, 0], [0, 1, 0]),
        """\
gather 0, gather 1,
wait 0, run 0, gather 0,
wait 1, run 1,
wait 0, run 0

gather 0, gather 1,
wait 0, gather 0,
wait 1, reduce 1,
wait 0, reduce 0, land 1, land 0""",
    )
