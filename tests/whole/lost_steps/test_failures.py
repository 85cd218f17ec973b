"""Rows of the failure model (docs/failures.md) that no other file tests, on gloo."""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    describe,
    fully_shard,
    keep_unsharded,
    no_sync,
    offload_activations,
    replicate,
    reset,
    unshard,
)
from composable.comm import ledger
from composable.comm.base import Work
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.params.param_group import Gather, ShardedState
from composable.engine.step.unit import units_below
from composable.errors import CommunicationError, RanksDisagreeError
from tests.helpers import world
from tests.helpers.compare import assert_mean_gradients
from tests.helpers.logged import logged
from tests.helpers.world import Pool, RanksFailed, current_device, spmd

WIDTH: Final = 8


class Block(nn.Module):
    """Calls `act` in forward and in backward, where these are set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_forward: Callable[[], object] | None = None
        self.in_backward: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward is not None:
            self.in_forward()
        y: Tensor = self.linear(x).tanh()
        if self.in_backward is not None and y.requires_grad:
            act = self.in_backward
            y.register_hook(lambda gradient: act() and None)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.skipped:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _mixed(model: Model) -> None:
    replicate(model.head)
    fully_shard(model, policy={Block})


VERBS: Final[dict[str, Callable[[Model], object]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "fully_shard as one unit": fully_shard,
    "replicate": lambda model: replicate(model, bucket_cap_mb=1e-4),
    "both": _mixed,
}


def _annotated(verb: str) -> Model:
    model = Model()
    VERBS[verb](model)
    return model


def _batch(number: int = 0) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def _loss(model: nn.Module, number: int = 0) -> Tensor:
    return model(_batch(number)).square().mean()  # type: ignore[no-any-return]


def _assert_good_step(model: Model, *, skipped: int = -1) -> None:
    """A step has the gradients of a plain model with the same parameters, which are those of a new
    one.
    """
    model.zero_grad()
    plain = Model()
    plain.skipped = skipped
    for each in (plain, model):
        _loss(each, 5).backward()
    assert_mean_gradients(plain, model, rtol=1e-5, atol=1e-7)


def _fail(kind: type[BaseException]) -> None:
    raise kind("as planned")


def _lose_step(model: Model, where: str, kind: type[BaseException] = MemoryError) -> None:
    """A step that raises in the second block's forward or backward."""

    block: Any = model.blocks[1]
    setattr(block, f"in_{where}", partial(_fail, kind))
    with pytest.raises(kind, match="as planned"):
        _loss(model).backward()
    setattr(block, f"in_{where}", None)


# --- all ranks raise ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
@spmd(ranks=2, everywhere=True)
def test_reset_frees_and_drops_everything_at_once(where: str, verb: str) -> None:
    model = _annotated(verb)
    _assert_good_step(model)
    model.zero_grad()
    with no_sync(model):
        _loss(model).backward()
    if where == "between":
        _loss(model)
    else:
        _lose_step(model, where)
    reset(model)
    assert {row.state for row in describe(model).rows} <= {"SHARDED", "-"}
    assert [
        name for name, parameter in model.named_parameters() if parameter.grad is not None
    ] == []
    with logged() as lines:
        _assert_good_step(model)
    assert lines == [], "nothing is left to reset"


@spmd(ranks=2)
def test_an_unshard_that_runs_out_of_memory_keeps_nothing_gathered() -> None:
    model = _annotated("fully_shard")
    _assert_good_step(model)
    for phase in ("launch", "land"):
        act, calls = getattr(Gather, phase), []

        def limited(*args: Any, act: Any = act, calls: list[Any] = calls) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise MemoryError
            return act(*args)

        with mock.patch.object(Gather, phase, limited), pytest.raises(MemoryError):
            unshard(model)
        assert {row.state for row in describe(model).rows} <= {"SHARDED", "-"}, phase
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        with torch.no_grad():
            _loss(model)
        assert {row.state for row in describe(model).rows} <= {"SHARDED", "-"}, phase
    unshard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@spmd(ranks=2)
def test_a_gather_that_fails_in_a_reset_keeps_no_other_group_of_its_unit() -> None:
    class Failed:
        def __init__(self, work: Work) -> None:
            self._work = work

        def wait(self) -> None:
            self._work.wait()
            raise CommunicationError("as planned")

    model = nn.Sequential(*(nn.Sequential(Block(), nn.LayerNorm(WIDTH)) for _ in range(2)))
    mixed = MixedPrecisionPolicy(torch.bfloat16, full_precision_classes=(nn.LayerNorm,))
    for part in model:
        fully_shard(part, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    _loss(model).backward()  # the next forward gathers ahead
    (ahead,) = units_below([model[1]])
    first, second = ahead.groups

    def fail() -> None:
        assert [group.state for group in ahead.groups] == [ShardedState.UNSHARDING] * 2
        first._work = Failed(first._work)
        raise MemoryError("as planned")

    block: Any = model[0][0]
    block.in_forward = fail
    with logged() as lines, pytest.raises(MemoryError):
        _loss(model)
    assert [group.state for group in (first, second)] == [ShardedState.SHARDED] * 2
    assert len(lines) == 2
    assert "was reset: as planned" in lines[1]
    block.in_forward = None
    _loss(model).backward()


@spmd(ranks=2)
def test_a_reduction_that_fails_to_launch_leaves_no_local_gradients() -> None:
    """They are added, in place, to the means of the backward before."""
    model = replicate(nn.Linear(4, 4).to(current_device()), bucket_cap_mb=1e-6)
    x = torch.randn(3, 4, device=current_device())
    for _ in range(2):
        model(x).square().mean().backward()
    no_memory = mock.patch.object(
        GradBucket, "reduce", side_effect=torch.OutOfMemoryError("on purpose")
    )
    with no_memory, pytest.raises(torch.OutOfMemoryError):
        model(x).square().mean().backward()
    reset(model)
    assert [each.grad for each in model.parameters()] == [None, None]


@pytest.mark.parametrize(
    ("where", "what"),
    [("forward", "its forward raised MemoryError"), ("backward", "its backward did not finish")],
)
@spmd(ranks=2, everywhere=True)
def test_a_failed_step_is_reported_once_with_its_unit(where: str, what: str) -> None:
    model = _annotated("fully_shard")
    with logged() as lines:
        _lose_step(model, where)
        for _ in range(2):
            _assert_good_step(model)
    assert lines == [f"WARNING: unit '(root)': {what}; the step is lost, and its state was reset"]


@pytest.mark.parametrize("verb", VERBS)
@spmd(ranks=2, everywhere=True)
def test_where_a_failed_backward_is_caught_modules_hold_what_they_hold_at_rest(verb: str) -> None:
    model = _annotated(verb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at_rest = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    block: Any = model.blocks[1]
    block.in_backward = partial(_fail, MemoryError)
    try:
        _loss(model).backward()
    except MemoryError:
        optimizer.zero_grad()
        found = model.state_dict()
        assert all(parameter is at_rest[name] for name, parameter in model.named_parameters())
    block.in_backward = None
    for name, value in found.items():
        assert type(value) is type(before[name])
        assert not isinstance(value, DTensor) or value.placements == before[name].placements
        assert torch.equal(
            *(
                each.to_local() if isinstance(each, DTensor) else each
                for each in (value, before[name])
            )
        )
    assert all(
        parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]
    )
    _assert_good_step(model)


# --- one rank ends ------------------------------------------------------------------------------


def _end_alone(verb: str, where: str, how: str) -> None:
    model = _annotated(verb)
    _assert_good_step(model)
    if dist.get_rank() == 1:
        end = (
            (lambda: os._exit(3))
            if how == "ends"
            else (lambda: os.kill(os.getpid(), signal.SIGKILL))
        )
        setattr(model.blocks[1], f"in_{where}", end)
    with mock.patch.object(ledger, "REPORT_SECONDS", 1.0):
        try:
            _loss(model).backward()
            _loss(model).backward()  # what was launched before it ended may have come
        except CommunicationError as error:
            print(error, flush=True)
            os._exit(4)  # as a program does that does not catch it: others may wait for this rank


@pytest.mark.parametrize(
    ("verb", "where", "how"),
    [
        ("fully_shard", "forward", "ends"),
        ("fully_shard", "backward", "is killed"),
        ("replicate", "backward", "ends"),
        ("both", "forward", "is killed"),
    ],
)
def test_when_one_rank_ends_the_others_are_notified_of_what_they_waited_for(
    pool: Pool, verb: str, where: str, how: str
) -> None:
    with mock.patch.object(world, "GRACE", 30.0), pytest.raises(RanksFailed) as failed:
        pool.run(3, _end_alone, verb, where, how)
    of_ranks = re.split(r"--- rank (\d):\n", str(failed.value))
    texts = dict(zip(of_ranks[1::2], of_ranks[2::2], strict=True))
    assert texts["1"].startswith(f"died with exit code {3 if how == 'ends' else -9}")
    for rank in "02":
        said = re.search(
            rf"^rank {rank}: the [a-z -]* of unit '[\w.()]+'.* failed in the (forward|backward) of"
            r" step \d+: \S",
            texts[rank],
            re.MULTILINE,
        )
        assert said, texts[rank]
        _, cure, mine, *rest = texts[rank][said.start() :].splitlines()
        assert "look for the first error among all ranks" in cure
        assert re.match(rf"Last launches of rank {rank} \(\d+ in all\): ", mine)
        assert re.search(
            r"rank (0, |)1(, 2|) has ended: its process is gone, killed or ended by os\._exit",
            "".join(rest),
        ), texts[rank]


# --- ranks that run other things ----------------------------------------------------------------


def _skip_a_unit_alone() -> str:
    model = _annotated("fully_shard")
    _assert_good_step(model)
    model.skipped = 1 if dist.get_rank() == 1 else -1
    try:
        _assert_good_step(model, skipped=1)
        _assert_good_step(model)
    except (CommunicationError, RanksDisagreeError) as error:
        return str(error)
    return "nothing happened"


@pytest.mark.launches_not_compared("one rank skips a unit")
def test_a_unit_that_one_rank_skips_later_ends_with_what_each_rank_launched(pool: Pool) -> None:
    for said in pool.run(2, _skip_a_unit_alone, spoils=True, group_timeout=8.0):
        assert re.search(r"unit 'blocks\.[12]'", said), said
        assert "rank 0" in said
        assert "rank 1" in said


@pytest.mark.parametrize("verb", VERBS)
@spmd(ranks=3, everywhere=True)
def test_ranks_may_run_other_numbers_of_forwards_without_gradients_where_nothing_is_gathered(
    verb: str,
) -> None:
    model = _annotated(verb)
    for _ in range(2):
        _assert_good_step(model)
        with keep_unsharded(model) if verb != "replicate" else torch.no_grad(), torch.no_grad():
            model(_batch())  # all ranks: it gathers
            for number in range(2 * dist.get_rank()):
                model(_batch(number))


# --- one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "verbs",
    [(fully_shard,), (replicate,), (checkpoint, fully_shard), (offload_activations, fully_shard)],
)
def test_the_cell_of_a_notebook_that_was_interrupted_can_be_run_again(
    verbs: tuple[Any, ...], where: str
) -> None:
    assert not dist.is_initialized()
    model = Model()
    plain = copy.deepcopy(model)
    for verb in verbs:
        verb(model, policy={Block})
    for _ in range(2):
        _lose_step(model, where, KeyboardInterrupt)
        # first the one that was interrupted: torch goes on saving tensors for its checkpoint
        for each in (model, plain):
            each.zero_grad()
            _loss(each).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other.grad)
