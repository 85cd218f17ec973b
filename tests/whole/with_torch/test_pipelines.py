"""torch's pipelines over annotated stages: gradients of one process, and one reduction per unit and
step, under schedules that call backward and those that split it.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable import no_sync, reduce_gradients, remove, replicate
from composable.errors import OptimizerError
from tests.helpers.pipelines import (
    SCHEDULES,
    SPLIT,
    WIDTH,
    LaterStage,
    Looking,
    Part,
    Pipeline,
    installed,
)
from tests.helpers.world import Pool

WHOLE = [name for name in SCHEDULES if name not in SPLIT]


def _train(name: str, dp: int, way: str, **options: Any) -> None:
    with installed():
        pipeline = Pipeline(name, dp, way, **options)
        sums = way.startswith("sums")
        optimizers = pipeline.optimizers()
        for seed in range(3):
            pipeline.run(seed, factor=dp if sums else 1.0)
            pipeline.check()
            reductions, units = pipeline.reductions(), 1 if "repl" in way else 2
            if dp > 1 and seed:  # in the first step there was a backward that infers shapes
                assert reductions == units * len(pipeline.parts)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pipeline.check(values=True)


@pytest.mark.parametrize("dp", [2, 1])
@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_as_one_process_and_reduce_once_per_unit_and_step(
    pool: Pool, schedule: str, verb: str, dp: int
) -> None:
    pool.run(4, _train, schedule, dp, verb)


@pytest.mark.parametrize(
    "way",
    [
        "face",
        "both verbs",
        "resharded",
        "kept",
        "sharded and recomputed",
        "replicated and recomputed",
        "sums of shards",
        "sums of replicas",
    ],
)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_stages_train_however_they_are_annotated(pool: Pool, schedule: str, way: str) -> None:
    pool.run(4, _train, schedule, 2, way)


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_stages_of_torch_2_15_train(pool: Pool, schedule: str, verb: str) -> None:
    pool.run(4, _train, schedule, 2, verb, stage=LaterStage)


def _train_in_bfloat16(name: str, way: str) -> None:
    far = []
    for schedule in (name, "1F1B"):
        with installed():
            pipeline = Pipeline(schedule, 2, way, local=1 if schedule == "1F1B" else 2)
            pipeline.run(0)
            pipeline.check(0.05)
            far.append(pipeline.distance())
    assert far[0] < 2 * far[1]  # no sums of micro-batches in bfloat16


@pytest.mark.parametrize("way", ["sharded bfloat16", "replicated bfloat16"])
def test_gradients_of_micro_batches_are_summed_in_the_dtype_of_gradients(
    pool: Pool, way: str
) -> None:
    pool.run(4, _train_in_bfloat16, "ZBVZeroBubble", way)


def _train_hybrid() -> None:
    with installed():
        pipeline = Pipeline("InterleavedZeroBubble", 4, "hybrid")
        for seed in range(2):
            pipeline.run(seed)
            pipeline.check()
            found = pipeline.reductions()
            assert found == 4 or not seed  # two of each part's one unit
            for optimizer in pipeline.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        pipeline.check(values=True)


def test_a_hybrid_mesh_reduces_over_both_dimensions_once(pool: Pool) -> None:
    pool.run(4, _train_hybrid)


def test_stages_are_freed_and_gathered_again_within_a_step(pool: Pool) -> None:
    """torch keeps three stages of a rank unsharded."""
    pool.run(2, _train, "InterleavedZeroBubble", 2, "resharded", local=4)


def _accumulate(name: str, verb: str, *, by_scope: bool) -> None:
    with installed():
        pipeline = Pipeline(name, 2, verb, scale_grads=False)
        stages = nn.ModuleList(pipeline.parts.values())
        for seed in range(3):
            # the first step infers shapes
            pipeline.reductions()
            with no_sync(stages, enabled=by_scope and seed < 2):
                pipeline.run(seed, factor=pipeline.n)
            if by_scope and seed < 2:
                assert pipeline.reductions() == 0 or seed == 0
        pipeline.check(1e-4)
        assert pipeline.reductions() == len(pipeline.parts) * (1 if verb == "replicate" else 2)
        for optimizer in pipeline.optimizers():
            optimizer.step()
        pipeline.check(1e-4, values=True)


@pytest.mark.parametrize("by_scope", [False, True])
@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_gradients_of_several_steps_add_up(
    pool: Pool, schedule: str, verb: str, by_scope: bool
) -> None:
    pool.run(4, _accumulate, schedule, verb, by_scope=by_scope)


def _look_up(name: str, verb: str) -> None:
    with installed():
        pipeline = Pipeline(name, 2, verb, make=Looking)
        for seed in range(3):
            pipeline.run(seed)
            pipeline.check()
            for optimizer in pipeline.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        pipeline.check(values=True)


@pytest.mark.parametrize(
    ("schedule", "verb"), [("ZBVZeroBubble", "replicate"), ("InterleavedZeroBubble", "both verbs")]
)
def test_parameters_that_no_input_reaches_train(pool: Pool, schedule: str, verb: str) -> None:
    pool.run(4, _look_up, schedule, verb)


def _freeze(name: str, verb: str) -> None:
    with installed():
        pipeline = Pipeline(name, 2, verb)
        frozen = {1, 2} if verb == "fully_shard" else {1}
        for model in (pipeline.plain, pipeline.parts):
            for at in frozen:
                if isinstance(model, nn.Module) or at in model:
                    model[at].requires_grad_(False)  # type: ignore[index]
        pipeline.run(0)
        pipeline.check()


@pytest.mark.parametrize(
    ("schedule", "verb"), [("ZBVZeroBubble", "replicate"), ("DualPipeV", "fully_shard")]
)
def test_a_frozen_stage_passes_gradients_on(pool: Pool, schedule: str, verb: str) -> None:
    pool.run(4, _freeze, schedule, verb)


def _evaluate_between(name: str, verb: str) -> None:
    with installed():
        pipeline = Pipeline(name, 2, verb)
        pipeline.run(0)
        batch = torch.zeros(2 * pipeline.n, WIDTH)
        pipeline.check()
        optimizers = pipeline.optimizers()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            pipeline.step(pipeline.schedule.eval, batch, batch)
        pipeline.run(1)
        pipeline.check()
        for optimizer in optimizers:
            optimizer.step()
        pipeline.check(values=True)
        for part in pipeline.parts.values():
            assert hasattr(part, "set_requires_gradient_sync")
            remove(part, replicate)
            assert not hasattr(part, "set_requires_gradient_sync")


def test_a_schedule_may_evaluate_between_steps_and_stages_be_taken_back(pool: Pool) -> None:
    pool.run(4, _evaluate_between, "InterleavedZeroBubble", "replicate")


class Failing(Part):
    """Raises once, in a forward of the first stage, when the second has had half a backward."""

    calls = count()

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == 6:
            raise ArithmeticError("a loss that is no number")
        return super().forward(x)


def _fail(name: str, verb: str) -> None:
    with installed():
        pipeline = Pipeline(name, 2, verb, make=Failing)
        optimizers = pipeline.optimizers()
        Failing.calls = count()
        with pytest.raises(Exception, match="failed to run forward"):
            pipeline.run(0)
        Failing.calls = count(100)
        pipeline.make_schedule()
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipeline.run(1)
        pipeline.check()


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
def test_a_step_that_fails_leaves_no_gradients_behind(pool: Pool, verb: str) -> None:
    pool.run(2, _fail, "InterleavedZeroBubble", verb)


# --- without install() ---------------------------------------------------------------------------


def _train_alone(name: str, way: str, dp: int, *, by_scope: bool) -> None:
    pipeline = Pipeline(name, dp, way)
    stages = nn.ModuleList(pipeline.parts.values())
    for seed in range(2):
        pipeline.reductions()
        with no_sync(stages) if by_scope else nullcontext():
            pipeline.run(seed)
        if by_scope:
            assert not seed or pipeline.reductions() == 0
            reduce_gradients(stages)
            assert pipeline.reductions() == len(pipeline.parts) * (1 if way == "replicate" else 2)
        pipeline.check()
        for optimizer in pipeline.optimizers():
            optimizer.step()
            optimizer.zero_grad()
    pipeline.check(values=True)


@pytest.mark.parametrize("by_scope", [False, True])
@pytest.mark.parametrize("way", ["fully_shard", "replicate"])
@pytest.mark.parametrize("schedule", WHOLE)
def test_schedules_that_call_backward_need_no_installation(
    pool: Pool, schedule: str, way: str, by_scope: bool
) -> None:
    pool.run(4, _train_alone, schedule, way, 2, by_scope=by_scope)


def _refuse(name: str, way: str, dp: int, *, install: bool) -> None:
    with installed() if install else nullcontext():
        pipeline = Pipeline(name, dp, way)
        pipeline.run(0)
        with pytest.raises(OptimizerError, match=r"was called by Schedule\w+, which takes grad"):
            pipeline.optimizers()[0].step()
        pipeline.optimizers()[0].zero_grad()
        pipeline.plain.zero_grad()
        pipeline.check(values=True)  # nothing was changed


@pytest.mark.parametrize(
    ("way", "dp", "install"),
    [("blocks", 2, False), ("blocks", 2, True)],
)
@pytest.mark.parametrize("schedule", SPLIT)
def test_split_backwards_that_nothing_reduces_are_refused_by_the_optimizers_step(
    pool: Pool, schedule: str, way: str, dp: int, install: bool
) -> None:
    pool.run(4, _refuse, schedule, way, dp, install=install)


@pytest.mark.parametrize("way", ["fully_shard", "replicate"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_schedules_that_split_backwards_need_no_installation(
    pool: Pool, schedule: str, way: str
) -> None:
    pool.run(4, _train_alone, schedule, way, 2, by_scope=False)


def test_split_backwards_of_stages_of_one_rank_need_no_installation(pool: Pool) -> None:
    pool.run(2, _train_alone, "InterleavedZeroBubble", "replicate", 1, by_scope=False)


def _train_what_is_not_known(schedule: str) -> None:
    for install in (False, True):
        with installed() if install else nullcontext():
            pipeline = Pipeline(schedule, 2, "fully_shard")
            vars(pipeline.schedule).pop("pipeline_order")  # in another version of torch
            pipeline.run(0)
            pipeline.check()
            pipeline.optimizers()[0].step()


def test_a_schedule_of_which_torch_does_not_tell_counts_as_one_that_splits(pool: Pool) -> None:
    pool.run(4, _train_what_is_not_known, "ZBVZeroBubble")
