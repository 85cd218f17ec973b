"""Hooks that reduce the gradients of fully sharded modules: they see whole gradients, and each rank takes its shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
)
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import all_accelerators, all_ordered
from tests.helpers.compare import full_gradients
from tests.helpers.hooked_models import FAILURES, Fails, Head, Model, assert_same, fails_and_goes_on, loss_of, wanted
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device, need_devices

_WIRES: Final[dict[str, Callable[[Any], Any]]] = {
    "messages": lambda comm: comm,
    "ordered": all_ordered,
    "accelerator": all_accelerators,
}


def _model(**options: Any) -> Model:
    torch.manual_seed(0)
    return fully_shard(Model().to(current_device()), policy=wanted, **options)  # type: ignore[no-any-return]


def _group_of_hooks(way: str) -> dist.ProcessGroup | None:
    """The comms of the simulated accelerator launch in a thread. A hook that launches elsewhere needs another group there."""
    return dist.group.WORLD if way == "accelerator" else None


class _Calls:
    """What a hook is handed; the hook makes means as the library does."""

    def __init__(self) -> None:
        self.backwards: list[list[tuple[int, tuple[str, ...]]]] = [[]]

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        assert all(isinstance(parameter, DTensor) for parameter in bucket.parameters())
        assert [each.shape for each in bucket.gradients()] == [each.shape for each in bucket.parameters()]
        assert bucket.buffer().numel() == sum(parameter.numel() for parameter in bucket.parameters())
        assert bucket.scale == 1 / bucket.group.size() == 1 / group.size()
        self.backwards[-1].append((bucket.index(), bucket.fqns))
        if bucket.is_last():
            self.backwards.append([])
        return allreduce_hook(group, bucket)


def _same_as_without(way: str) -> None:
    calls, rank = _Calls(), dist.get_rank()
    with comms_wrapped_by(_WIRES[way]):
        models = [_model() for _ in range(2)]
    handle = register_comm_hook(models[1], calls, _group_of_hooks(way))
    assert describe(models[1]).rows[0].comm_hook == "_Calls"
    for step in range(7):
        if step == 5:
            handle.remove()
        spare = [True, True, rank == 0, False, True, True, False][step]
        for model in models:
            with no_sync(model, enabled=step == 1):
                loss_of(model, step, spare=spare).backward()
        if step != 1:
            assert_same(models, step, 1e-7)
            assert (full_gradients(models[1])["head.spare.bias"] is None) == (step in (3, 6))
            for model in models:
                model.zero_grad()
    assert calls.backwards.pop() == []
    assert len(calls.backwards) == 4  # one less for no_sync
    for backward in calls.backwards:
        assert sorted(name for _, fqns in backward for name in fqns) == sorted(name for name, _ in models[0].named_parameters())
        assert sorted(index for index, _ in backward) == list(range(len(backward)))
        assert dict(backward) == dict(calls.backwards[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", _WIRES)
def test_a_hook_that_makes_means_changes_nothing_and_sees_each_gradient_once(pool: Pool, way: str, ranks: int) -> None:
    if ranks == 2 or way == "messages":
        pool.run(ranks, _same_as_without, way, device="cpu")


def _as_replicas(name: str) -> None:
    """A hook does the same arithmetic for shards as for replicas with the same buckets."""
    hook, state = _HOOKS[name]
    torch.manual_seed(0)
    plain = Model().to(current_device())
    sharded = fully_shard(copy.deepcopy(plain))
    replicate(plain)
    register_comm_hook(plain, hook, state())
    register_comm_hook(sharded, hook, state())
    for step in range(5):
        for model in (plain, sharded):
            loss_of(model, step, spare=True).backward()
        if step:
            assert_same([plain, sharded], step)
        for model in (plain, sharded):
            model.zero_grad()


_HOOKS: Final[dict[str, tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "all-reduce": (allreduce_hook, lambda: None),
    "bfloat16": (bf16_compress_hook, lambda: None),
    "all-reduce in float16": (fp16_compress_wrapper(allreduce_hook), lambda: None),
}


@pytest.mark.parametrize("name", _HOOKS)
def test_torchs_hooks_do_for_shards_what_they_do_for_replicas(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _as_replicas, name, device=device)


def _low_rank() -> None:
    models = [_model() for _ in range(2)]
    state = PowerSGDState(None, matrix_approximation_rank=7, start_powerSGD_iter=2, min_compression_rate=0.1)
    register_comm_hook(models[1], powerSGD_hook, state)
    for step in range(5):
        for model in models:
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        assert_same(models, step, 1e-5)  # of full rank it is the mean
    assert state.process_group is None
    assert len(state.error_dict) == len(describe(models[1]).rows)
    assert state.iter == 5


@pytest.mark.beyond_sim("PowerSGD gives NaN there, under DistributedDataParallel as well")
def test_power_sgd_keeps_its_memory_for_each_unit_and_counts_backwards(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _low_rank, device=device)


def _scaled(what: str) -> None:
    options: dict[str, Any] = {"grad_reduce": "sum"} if what == "a sum" else {}
    if what == "rest":
        options["offload_policy"] = CPUOffloadPolicy()  # on a mesh of CPUs that means nothing
    if what == "precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [_model(**options) for _ in range(2)]
    with register_comm_hook(models[1], allreduce_hook):
        for number in range(2):
            for model in models:
                loss_of(model, number, spare=True).backward()
        assert_same(models, what, 1e-6)
    for model in models:
        model.zero_grad()
        loss_of(model, 5, spare=True).backward()
    assert_same(models, "afterwards")


@pytest.mark.parametrize("what", ["a sum", "precision", "rest"])
def test_what_scales_casts_and_moves_gradients_does_so_around_a_hook(pool: Pool, what: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _scaled, what, device=device)


def _mixed() -> None:
    torch.manual_seed(0)
    first = Model().to(current_device())
    models = [first, copy.deepcopy(first)]
    for model in models:
        replicate(model.first)
        fully_shard(model, policy={Head})
    register_comm_hook(models[1], allreduce_hook)
    register_comm_hook(models[1].first, allreduce_hook)
    assert [row.comm_hook for row in describe(models[1]).rows] == ["allreduce_hook"] * 3
    for step in range(3):
        for model in models:
            with no_sync(model, enabled=step == 1):
                loss_of(model, step, spare=dist.get_rank() == 0).backward()
            if step == 1:
                reduce_gradients(model)
        assert_same(models, step, 1e-7)


def test_sharded_and_replicated_modules_of_one_model_have_hooks_side_by_side(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _mixed, device=device)


def _alone() -> None:
    torch.manual_seed(0)
    model = fully_shard(Model(), grad_reduce="sum")
    with register_comm_hook(model, noop_hook):
        loss_of(model, 0, spare=True).backward()
    assert all(gradient is not None for gradient in full_gradients(model).values())


def test_one_rank_alone_calls_no_hook(pool: Pool) -> None:
    pool.run(1, _alone)


# --- what is refused, and what fails --------------------------------------------------------------------------------------


def _refusals(which: str) -> str:
    model = _model()
    if which == "stage":
        return refusal(lambda: register_comm_hook(model, noop_hook, stage="all_reduce"))
    if which == "window":
        with no_sync(model):
            return refusal(lambda: register_comm_hook(model, noop_hook))
    register_comm_hook(model.head, noop_hook)
    return refusal(lambda: register_comm_hook(model, noop_hook))


_TEXTS: Final = {
    "stage": "AnnotationError: register_comm_hook: sharded gradients are reduced in one stage, 'reduce_scatter'; leave "
    "stage= out",
    "window": "PhaseError: register_comm_hook: unit '(root)' is inside of no_sync, or has accumulated gradients, which "
    "would be reduced in another way than they were made for. Do it between two steps",
    "twice": "AlreadyAnnotatedError: register_comm_hook: unit 'head' has the communication hook 'noop_hook' already. Remove it "
    "first, by the handle that registering it returned",
}


@pytest.mark.parametrize("which", _TEXTS)
def test_what_cannot_be_is_refused_by_name(pool: Pool, which: str) -> None:
    assert same_on_all(pool.run(2, _refusals, which)) == _TEXTS[which]


def _fails_and_goes_on(how: str) -> str:
    models = [_model() for _ in range(2)]
    register_comm_hook(models[0], allreduce_hook)
    register_comm_hook(models[1], Fails(how))
    return fails_and_goes_on(models, how)


@pytest.mark.parametrize("how", FAILURES)
def test_after_a_hook_that_failed_on_all_ranks_the_next_step_works(pool: Pool, how: str) -> None:
    assert pool.run(3, _fails_and_goes_on, how, device="cpu") == [FAILURES[how]] * 3
