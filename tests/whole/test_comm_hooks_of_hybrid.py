"""Hooks on hybrid meshes, where gradients are reduced in two stages: each takes a hook, and the library makes the other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    describe,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
)
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import all_accelerators, all_ordered
from tests.helpers.compare import full_gradients
from tests.helpers.hooked_models import FAILURES, Fails, Model, assert_same, fails_and_goes_on, loss_of, wanted
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device, need_devices

_WIRES: Final[dict[str, Callable[[Any], Any]]] = {
    "messages": lambda comm: comm,
    "ordered": all_ordered,
    "accelerator": all_accelerators,
}
_BOTH: Final = ("reduce_scatter", "all_reduce")
_STAGES: Final = [("all_reduce",), ("reduce_scatter",), _BOTH]


def _mesh(replicas: int = 2) -> Any:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))


def _plain() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())  # another order of dimensions
    model.head.last.bias.requires_grad_(False)
    return model.to(current_device())


def _model(mesh: Any = None, **options: Any) -> Model:
    return fully_shard(_plain(), policy=wanted, mesh=mesh or _mesh(), **options)


class _Calls:
    """What a hook of one stage is handed; it makes means as the library does."""

    def __init__(self, stage: str, ranks: list[int]) -> None:
        self.stage, self.ranks = stage, ranks
        self.backwards: list[list[tuple[int, tuple[str, ...]]]] = [[]]

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(bucket.group) == self.ranks
        assert bucket.scale == 1 / group.size()
        assert bucket.buffer().numel() == sum(gradient.numel() for gradient in bucket.gradients())
        whole = self.stage == "reduce_scatter"
        expected = [(parameter if whole else parameter.to_local()).shape for parameter in bucket.parameters()]
        assert [each.shape for each in bucket.gradients()] == expected
        self.backwards[-1].append((bucket.index(), bucket.fqns))
        if bucket.is_last():
            self.backwards.append([])
        return allreduce_hook(group, bucket)


def _ranks_of(stage: str) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size() // 2
    first = rank // size * size
    return list(range(first, first + size)) if stage == "reduce_scatter" else [rank % size, rank % size + size]


def _same_as_without(way: str, stages: tuple[str, ...], precision: MixedPrecisionPolicy | None = None) -> None:
    rank, options = dist.get_rank(), {} if precision is None else {"mp_policy": precision}
    mesh = _mesh()
    with comms_wrapped_by(_WIRES[way]):
        models = [_model(mesh, **options) for _ in range(2)]
    # The comms of the simulated accelerator launch in a thread. A hook that launches elsewhere needs another group there.
    groups = {"reduce_scatter": mesh["shard"].get_group(), "all_reduce": mesh["replicate"].get_group()}
    states = groups if way == "accelerator" else {}
    calls = {stage: _Calls(stage, _ranks_of(stage)) for stage in stages}
    handles = [register_comm_hook(models[1], hook, states.get(stage), stage=stage) for stage, hook in calls.items()]
    assert describe(models[1]).rows[0].comm_hook == ", ".join(f"_Calls ({stage})" for stage in sorted(stages, reverse=True))
    for step in range(8):
        if step == 6:
            for handle in handles:
                handle.remove()
            assert describe(models[1]).rows[0].comm_hook == ""
        spare = [True, True, rank == 0, False, rank == 3, True, True, False][step]
        for model in models:
            with no_sync(model, enabled=step in (1, 4), level="replicate" if step == 4 else "all"):
                loss_of(model, step, spare=spare).backward()
        if step not in (1, 4):
            assert_same(models, step)
            assert (full_gradients(models[1])["head.spare.bias"] is None) == (step in (3, 7))
            for model in models:
                model.zero_grad()
    trained = [(name, parameter) for name, parameter in models[1].named_parameters() if parameter.requires_grad]
    names = {name: parameter.to_local().numel() for name, parameter in trained if isinstance(parameter, DTensor)}
    for stage, hook in calls.items():
        assert hook.backwards.pop() == []
        assert len(hook.backwards) == (5 if stage == "reduce_scatter" else 4)  # without steps 1, and 4 over replicas
        for backward in hook.backwards:
            handed = [name for name, rows in names.items() if stage == "reduce_scatter" or rows]
            assert sorted(name for _, fqns in backward for name in fqns) == sorted(handed)
            assert dict(backward) == dict(hook.backwards[0])


_WAYS: Final = [
    *[("messages", stages) for stages in _STAGES],
    *[(way, _BOTH) for way in ("ordered", "accelerator")],
    ("accelerator", ("all_reduce",)),  # where rows are uneven, and flags are read late
]


@pytest.mark.parametrize(("way", "stages"), _WAYS)
def test_a_hook_that_makes_means_changes_no_bit_and_sees_each_gradient_once(
    pool: Pool, way: str, stages: tuple[str, ...]
) -> None:
    pool.run(4, _same_as_without, way, stages, device="cpu")


_PRECISIONS: Final = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bfloat16, summed in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "summed in bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("precision", _PRECISIONS)
def test_hooks_see_gradients_in_the_dtype_that_they_are_summed_in(pool: Pool, precision: str) -> None:
    pool.run(4, _same_as_without, "messages", _BOTH, _PRECISIONS[precision], device="cpu")


# --- what hooks do, by hand -----------------------------------------------------------------------------------------------


def _mean_of(gradient: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    term = gradient.to(dtype).contiguous() / group.size()
    dist.all_reduce(term, group=group)
    return term.to(gradient.dtype)


_DTYPES: Final[dict[str, tuple[Callable[..., Any], torch.dtype]]] = {
    "all-reduce": (allreduce_hook, torch.float32),
    "bfloat16": (bf16_compress_hook, torch.bfloat16),
    "float16": (fp16_compress_hook, torch.float16),
}


def _over_replicas(name: str) -> None:
    """What a hook makes of shards, from those that a hook leaves alone."""
    hook, dtype = _DTYPES[name]
    mesh = _mesh()
    models = [_model(mesh) for _ in range(2)]
    register_comm_hook(models[0], noop_hook, stage="all_reduce")
    register_comm_hook(models[1], hook, stage="all_reduce")
    plain = _plain()
    for step in range(3):
        for model in (*models, plain):
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        given = [{name: parameter.grad for name, parameter in model.named_parameters()} for model in models]
        for name, parameter in plain.named_parameters():
            left, made = (shards[name] for shards in given)
            if parameter.grad is None:
                assert left is made is None
                continue
            assert isinstance(left, DTensor)
            assert isinstance(made, DTensor)
            own = _mean_of(parameter.grad, mesh["shard"].get_group(), torch.float32)
            rows = (*own.chunk(2), own[:0])[mesh["shard"].get_local_rank()]
            assert left.to_local().equal(rows), name
            assert made.to_local().equal(_mean_of(rows, mesh["replicate"].get_group(), dtype)), name


@pytest.mark.parametrize("name", _DTYPES)
def test_a_hook_over_replicas_gets_the_means_of_its_replica_and_makes_means(pool: Pool, name: str, device: str) -> None:
    need_devices(device, 4)
    pool.run(4, _over_replicas, name, device=device)


def _low_rank(stage: str) -> None:
    models = [_model() for _ in range(2)]
    state = PowerSGDState(None, matrix_approximation_rank=7, start_powerSGD_iter=2, min_compression_rate=0.1)
    register_comm_hook(models[1], powerSGD_hook, state, stage=stage)
    for step in range(5):
        for model in models:
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        assert_same(models, step, 1e-5)  # of full rank it is the mean
    assert state.process_group is None
    without_rows = stage == "all_reduce" and dist.get_rank() % 2
    assert len(state.error_dict) == len(describe(models[1]).rows) - without_rows
    assert state.iter == 5


@pytest.mark.beyond_sim("PowerSGD gives NaN there, under DistributedDataParallel as well")
@pytest.mark.parametrize("stage", _BOTH)
def test_power_sgd_compresses_either_stage(pool: Pool, stage: str, device: str) -> None:
    need_devices(device, 4)
    pool.run(4, _low_rank, stage, device=device)


def _scaled(what: str) -> None:
    options: dict[str, Any] = {"grad_reduce": "sum"} if what == "a sum" else {}
    if what == "rest":
        options["offload_policy"] = CPUOffloadPolicy()  # on a mesh of CPUs that means nothing
    for stages in _STAGES:
        models = [_model(**options) for _ in range(2)]
        handles = [register_comm_hook(models[1], allreduce_hook, stage=stage) for stage in stages]
        before = [parameter.detach().clone() for parameter in models[1].parameters()]
        if what == "steps in backward":
            for model in models:
                apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for number in range(3):
            for model in models:
                if what == "explicitly":
                    with no_sync(model, level="replicate" if number else "all"):
                        loss_of(model, number, spare=True).backward()
                else:
                    loss_of(model, number, spare=True).backward()
        for model in models:
            if what == "explicitly":
                reduce_gradients(model)
        if what == "steps in backward":
            for first, second, was in zip(*(model.parameters() for model in models), before, strict=True):
                assert first.to_local().equal(second.to_local()), what
                stepped = second.requires_grad and second.to_local().numel() > 0
                assert second.to_local().equal(was.to_local()) != stepped, what
            continue
        assert_same(models, what)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("what", ["a sum", "explicitly", "rest", "steps in backward"])
def test_what_scales_and_moves_gradients_or_says_when_does_so_around_hooks(pool: Pool, what: str, device: str) -> None:
    need_devices(device, 4)
    pool.run(4, _scaled, what, device=device)


def _on_thin_meshes() -> None:
    for replicas in (1, 2):
        models = [_model(_mesh(replicas), grad_reduce="sum") for _ in range(2)]
        calls = {stage: _Calls(stage, [0, 1]) for stage in _BOTH}
        for stage, hook in calls.items():
            register_comm_hook(models[1], hook, stage=stage)
        for model in models:
            loss_of(model, 0, spare=True).backward()
        assert_same(models, replicas)
        called = {stage: len(hook.backwards) - 1 for stage, hook in calls.items()}
        assert called == {"reduce_scatter": 2 - replicas, "all_reduce": replicas - 1}


def test_a_stage_of_one_rank_calls_no_hook(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _on_thin_meshes, device=device)


# --- what is refused, and what fails --------------------------------------------------------------------------------------


def _refusals(which: str) -> str:
    if which == "one within":
        torch.manual_seed(0)
        model = Model()
        fully_shard(model.head)
        fully_shard(model, mesh=_mesh())
        return refusal(lambda: register_comm_hook(model, noop_hook, stage="reduce_scatter"))
    model = _model()
    if which == "neither":
        return refusal(lambda: register_comm_hook(model, noop_hook))
    if which == "no such":
        return refusal(lambda: register_comm_hook(model, noop_hook, stage="all_gather"))
    if which == "differs":
        return refusal(lambda: register_comm_hook(model, noop_hook, stage=_BOTH[dist.get_rank() == 3]))
    register_comm_hook(model.head, noop_hook, stage="all_reduce")
    register_comm_hook(model.head, noop_hook, stage="reduce_scatter")
    return refusal(lambda: register_comm_hook(model, noop_hook, stage="all_reduce"))


_TEXTS: Final = {
    "neither": "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced in two stages: 'reduce_scatter' "
    "among the ranks that hold one replica together, and 'all_reduce' of shards among the replicas. Say which of them the hook "
    "replaces: stage='all_reduce', for example. A hook for the other one is registered by itself",
    "no such": "AnnotationError: register_comm_hook: stage must be 'reduce_scatter' or 'all_reduce', got 'all_gather'",
    "one within": "MeshError: register_comm_hook: unit 'head' is on another mesh than the module that the hook is for. "
    "Register a hook for each, with a state of its own",
    "twice": "AlreadyAnnotatedError: register_comm_hook: unit 'head' has the communication hook 'noop_hook' for all_reduce "
    "already. Remove it first, by the handle that registering it returned",
}


@pytest.mark.parametrize("which", _TEXTS)
def test_what_cannot_be_is_refused_by_name(pool: Pool, which: str) -> None:
    assert same_on_all(pool.run(4, _refusals, which)) == _TEXTS[which]


def test_ranks_that_name_different_stages_are_told(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(4, _refusals, "differs")):
        other = 0 if rank == 3 else 3
        stages = ["all_reduce" if number == 3 else "reduce_scatter" for number in (other, rank)]
        assert text == (
            f"RanksDisagreeError: register_comm_hook: rank {other} registers noop_hook for {stages[0]}, and rank {rank} "
            f"registers noop_hook for {stages[1]}; no rank registers a hook. All ranks register the same hooks, in the same "
            "order"
        )


def _fails_and_goes_on(how: str, stage: str) -> str:
    models = [_model() for _ in range(2)]
    for each in _BOTH:
        register_comm_hook(models[0], allreduce_hook, stage=each)
        register_comm_hook(models[1], Fails(how) if each == stage else allreduce_hook, stage=each)
    return fails_and_goes_on(models, how)


@pytest.mark.parametrize("stage", _BOTH)
@pytest.mark.parametrize("how", FAILURES)
def test_after_a_hook_that_failed_on_all_ranks_the_next_step_works(pool: Pool, how: str, stage: str) -> None:
    assert pool.run(4, _fails_and_goes_on, how, stage, device="cpu") == [FAILURES[how]] * 4
