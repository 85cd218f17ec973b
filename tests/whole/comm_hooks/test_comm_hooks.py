"""Hooks that reduce gradients: torch's own give the bits that they give under
DistributedDataParallel; shards take them, too.

What scales, casts, accumulates, offloads and steps around hooks is in test_compositions.
"""

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
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from composable import (
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    no_sync,
    register_comm_hook,
    remove,
    replicate,
)
from composable.comm.backends import comms_wrapped_by
from tests.helpers.compare import full_gradients, sgd
from tests.helpers.hooked_models import (
    BOTH,
    KINDS,
    STAGES,
    WIRES,
    Calls,
    assert_same,
    loss_of,
    mesh_of,
    model_of,
    odd_model,
)
from tests.helpers.world import Pool, current_device, spmd


def _power(**options: Any) -> PowerSGDState:
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


def _local() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)


# Under DistributedDataParallel those that quantise fail over gloo, whose futures are not as NCCL's,
# and PowerSGD of whole buckets everywhere, in torch 2.13.
_HOOKS: Final[dict[str, tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "all-reduce": (allreduce_hook, lambda: None),
    "float16": (fp16_compress_hook, lambda: None),
    "bfloat16": (bf16_compress_hook, lambda: None),
    "all-reduce in float16": (fp16_compress_wrapper(allreduce_hook), lambda: None),
    "no-op": (noop_hook, lambda: None),
    "PowerSGD": (powerSGD_hook, _power),
    "PowerSGD, same shapes together": (
        powerSGD_hook,
        lambda: _power(batch_tensors_with_same_shape=True),
    ),
    "PowerSGD in bfloat16": (bf16_compress_wrapper(powerSGD_hook), _power),
    "post-local SGD": (post_localSGD_hook, _local),
}


def _with_rival(name: str, ranks: int, unused: bool) -> Any:
    fails = "PowerSGD" in name or name == "all-reduce in float16"
    return pytest.param(
        name,
        ranks,
        unused,
        marks=pytest.mark.beyond_sim("DistributedDataParallel fails there") if fails else (),
    )


# Where parameters may be unused DistributedDataParallel keeps an order of its own, in which
# PowerSGD begins otherwise, and with torch's wrapper gives them gradients in float16 (torch 2.11,
# and on CUDA).
@pytest.mark.parametrize(
    ("name", "ranks", "unused"),
    [
        *(
            _with_rival(name, 2, "PowerSGD" not in name and name != "all-reduce in float16")
            for name in _HOOKS
        ),
        *(_with_rival(name, 4, False) for name in ("all-reduce", "float16", "no-op", "PowerSGD")),
    ],
)
@spmd()
def test_torchs_hooks_give_the_bits_that_they_give_under_ddp(name: str, unused: bool) -> None:
    hook, state = _HOOKS[name]
    plain, annotated = model_of(), model_of()
    device = current_device()
    rival = DistributedDataParallel(
        plain, device_ids=[device] if device.type == "cuda" else None, find_unused_parameters=unused
    )
    # As a function without a name: DistributedDataParallel takes bfloat16 on accelerators only.
    rival.register_comm_hook(state(), lambda state, bucket: hook(state, bucket))
    register_comm_hook(replicate(annotated), state(), hook)
    optimizers = sgd(plain), sgd(annotated)
    for step in range(6):
        spare = not unused or step == 0 or (step == 1 and dist.get_rank() == 0)
        if step == 3:
            with rival.no_sync(), no_sync(annotated):
                for model in (rival, annotated):
                    loss_of(model, 10, spare=spare).backward()
        for model in (rival, annotated):
            loss_of(model, step, spare=spare).backward()
        # In the first step buckets hold parameters in other orders, and sums of more than two
        # depend on their place.
        if unused or step:
            assert_same([plain, annotated], step)
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


# --- without a rival ----------------------------------------------------------------------------


def _ranks_of(stage: str | None) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size() // 2
    if stage is None:
        return list(range(2 * size))
    first = rank // size * size
    return (
        list(range(first, first + size))
        if stage == "reduce_scatter"
        else [rank % size, rank % size + size]
    )


def _same_as_without(kind: str, way: str, stages: tuple[str | None, ...], **options: Any) -> None:
    rank, mesh = dist.get_rank(), mesh_of() if kind == "hybrid" else None
    if mesh is not None:
        options["mesh"] = mesh
    with comms_wrapped_by(WIRES[way]):
        models = [KINDS[kind](**options) for _ in range(2)]
    # The comms of the simulated accelerator launch in a thread. A hook that launches elsewhere
    # needs another group there.
    groups: dict[Any, Any] = {None: dist.group.WORLD}
    if mesh is not None:
        groups |= {
            "reduce_scatter": mesh["shard"].get_group(),
            "all_reduce": mesh["replicate"].get_group(),
        }
    calls = {stage: Calls(stage, _ranks_of(stage)) for stage in stages}
    handles = [
        register_comm_hook(
            models[1], groups[stage] if way == "accelerator" else None, hook, stage=stage
        )
        for stage, hook in calls.items()
    ]
    names = [
        f"Calls ({stage})" if stage else "Calls" for stage in sorted(stages, key=str, reverse=True)
    ]
    assert describe(models[1]).rows[0].comm_hook == ", ".join(names)
    exact = kind != "sharded" or dist.get_world_size() == 2
    for step in range(8):
        if step == 6:
            for handle in handles:
                handle.remove()
            assert describe(models[1]).rows[0].comm_hook == ""
        spare = [True, True, rank == 0, False, rank == 1, True, True, False][step]
        for model in models:
            with no_sync(model, enabled=step in (1, 4), level="replicate" if step == 4 else "all"):
                loss_of(model, step, spare=spare).backward()
        if step not in (1, 4):
            assert_same(models, step, 0.0 if exact else 1e-7)
            assert (full_gradients(models[1])["head.spare.bias"] is None) == (step in (3, 7))
            for model in models:
                model.zero_grad()
    trained = {name: p for name, p in models[1].named_parameters() if p.requires_grad}
    for stage, hook in calls.items():
        assert hook.backwards.pop() == []
        names: dict[int, tuple[str, ...]] = {}
        over_replicas = stage == "all_reduce" or "replicated" in kind
        # without steps 1, and 4 over replicas
        assert len(hook.backwards) == (4 if over_replicas else 5)
        for backward in hook.backwards:
            handed = [
                name for name, p in trained.items() if stage != "all_reduce" or p.to_local().numel()
            ]
            assert sorted(name for _, fqns in backward for name in fqns) == sorted(handed)
            for index, fqns in backward:
                assert names.setdefault(index, fqns) == fqns, (
                    "what is kept by index lies in this order"
                )
            assert "replicated" in kind or dict(backward) == dict(hook.backwards[0])
        assert len(dict.fromkeys(tuple(sorted(fqns)) for fqns in names.values())) == len(names) >= 3


_WAYS: Final = [
    *[
        (2, kind, way, (None,))
        for kind in ("replicated", "replicated units", "sharded")
        for way in WIRES
    ],
    (4, "sharded", "messages", (None,)),
    *[(4, "hybrid", "messages", stages) for stages in STAGES],
    *[(4, "hybrid", way, BOTH) for way in ("ordered", "accelerator")],
    (4, "hybrid", "accelerator", ("all_reduce",)),  # where rows are uneven, and flags are read late
]
# A thread stands for the accelerator's stream, and notes its launches when it comes to them; the
# host notes the calls of the hook meanwhile.
_IN_A_THREAD: Final = pytest.mark.launches_not_compared("a thread and the host launch in one group")


@pytest.mark.parametrize(
    ("ranks", "kind", "way", "stages"),
    [pytest.param(*way, marks=[_IN_A_THREAD] if way[2] == "accelerator" else []) for way in _WAYS],
)
def test_a_hook_that_makes_means_changes_no_bit_and_sees_each_gradient_once(
    pool: Pool, ranks: int, kind: str, way: str, stages: tuple[str | None, ...]
) -> None:
    pool.run(ranks, _same_as_without, kind, way, stages, device="cpu")


_PRECISIONS: Final = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bfloat16, summed in float32": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "summed in bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("ranks", "kind", "stages"),
    [(2, "replicated", (None,)), (2, "sharded", (None,)), (4, "hybrid", BOTH)],
)
@pytest.mark.parametrize("precision", _PRECISIONS)
def test_hooks_see_gradients_in_the_dtype_that_they_are_summed_in(
    pool: Pool, precision: str, ranks: int, kind: str, stages: tuple[str | None, ...]
) -> None:
    pool.run(
        ranks,
        _same_as_without,
        kind,
        "messages",
        stages,
        device="cpu",
        mp_policy=_PRECISIONS[precision],
    )


# --- what hooks do to shards --------------------------------------------------------------------

_DTYPES: Final[dict[str, tuple[Callable[..., Any], torch.dtype]]] = {
    "all-reduce": (allreduce_hook, torch.float32),
    "bfloat16": (bf16_compress_hook, torch.bfloat16),
    "float16": (fp16_compress_hook, torch.float16),
}


@pytest.mark.parametrize("name", _DTYPES)
@spmd(ranks=2)
def test_torchs_hooks_do_for_shards_what_they_do_for_replicas(name: str) -> None:
    """A hook does the same arithmetic for shards as for replicas with the same buckets."""
    models = [replicate(model_of()), fully_shard(model_of())]
    for model in models:
        register_comm_hook(model, None, _DTYPES[name][0])
    for step in range(5):
        for model in models:
            loss_of(model, step, spare=True).backward()
        if step:
            assert_same(models, step)
        for model in models:
            model.zero_grad()


def _mean_of(gradient: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    term = gradient.to(dtype).contiguous() / group.size()
    dist.all_reduce(term, group=group)
    return term.to(gradient.dtype)


@pytest.mark.parametrize("name", _DTYPES)
@spmd(ranks=4)
def test_a_hook_over_replicas_gets_the_means_of_its_replica_and_makes_means(name: str) -> None:
    """What a hook makes of shards, from those that a hook leaves alone."""
    hook, dtype = _DTYPES[name]
    mesh = mesh_of()
    models = [KINDS["hybrid"](mesh=mesh) for _ in range(2)]
    register_comm_hook(models[0], None, noop_hook, stage="all_reduce")
    register_comm_hook(models[1], None, hook, stage="all_reduce")
    plain = odd_model()
    for step in range(3):
        for model in (*models, plain):
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        given = [
            {name: parameter.grad for name, parameter in model.named_parameters()}
            for model in models
        ]
        for name, parameter in plain.named_parameters():
            left, made = (shards[name] for shards in given)
            if parameter.grad is None:
                assert left is made is None
                continue
            own = _mean_of(parameter.grad, mesh["shard"].get_group(), torch.float32)
            rows = (*own.chunk(2), own[:0])[mesh["shard"].get_local_rank()]
            assert left.to_local().equal(rows), name
            assert made.to_local().equal(_mean_of(rows, mesh["replicate"].get_group(), dtype)), name


@pytest.mark.parametrize(
    ("ranks", "kind", "stage"), [(2, "sharded", None), *((4, "hybrid", stage) for stage in BOTH)]
)
@spmd()
def test_power_sgd_keeps_its_memory_for_each_unit_and_counts_backwards(
    kind: str, stage: str | None
) -> None:
    models = [KINDS[kind]() for _ in range(2)]
    state = PowerSGDState(
        None, matrix_approximation_rank=7, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    register_comm_hook(models[1], state, powerSGD_hook, stage=stage)
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
# --- groups, results, and where there is nothing to reduce ----------------------------------------


@spmd(ranks=4)
def test_without_a_group_hooks_communicate_among_the_ranks_of_their_mesh() -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("one", "other"))["other"]
    models = [replicate(model_of(), mesh=mesh) for _ in range(2)]
    register_comm_hook(models[1], _power(), powerSGD_hook)
    for step in range(2):
        for model in models:
            loss_of(model, step).backward()
    assert_same(models, "over a part")


def _plain(_: object, bucket: Any) -> Tensor:
    """No future: a tensor of its own, in another dtype."""
    total = bucket.buffer().double()
    dist.all_reduce(total, group=bucket.group)
    return total * bucket.scale  # type: ignore[no-any-return]


@spmd(ranks=2, everywhere=True)
def test_a_hook_may_return_a_tensor_and_describe_names_it_until_it_is_removed() -> None:
    models = [KINDS["replicated"]() for _ in range(2)]
    handle = register_comm_hook(models[1], None, _plain)
    for model in models:
        loss_of(model, 0).backward()
    assert_same(models, "of tensors", 1e-7)
    assert describe(models[1]).rows[0].comm_hook == "_plain"
    handle.remove()
    handle.remove()
    assert describe(models[1]).rows[0].comm_hook == ""


@pytest.mark.parametrize("verb", [replicate, fully_shard])
@spmd(ranks=2)
def test_modules_that_are_one_unit_have_one_hook(verb: Any) -> None:
    parts = [model_of(), model_of()]
    verb(parts[1].head)
    verb(parts)
    calls = Calls(None, [0, 1])
    handle = register_comm_hook(parts, None, calls)
    for step in range(2):  # the first one finds the order of buckets
        for part in parts:
            part.zero_grad()
        torch.stack([loss_of(part, step, spare=True) for part in parts]).sum().backward()
    seen = {name for _, fqns in calls.backwards[-2] for name in fqns}
    assert seen == {
        f"{n}.{name}" for n, part in enumerate(parts) for name, _ in part.named_parameters()
    }
    handle.remove()


@spmd(ranks=2)
def test_a_stage_of_one_rank_calls_no_hook() -> None:
    for replicas in (1, 2):
        models = [KINDS["hybrid"](mesh=mesh_of(replicas), grad_reduce="sum") for _ in range(2)]
        calls = {stage: Calls(stage, [0, 1]) for stage in BOTH}
        for stage, hook in calls.items():
            register_comm_hook(models[1], None, hook, stage=stage)
        for model in models:
            loss_of(model, 0, spare=True).backward()
        assert_same(models, replicas)
        called = {stage: len(hook.backwards) - 1 for stage, hook in calls.items()}
        assert called == {"reduce_scatter": 2 - replicas, "all_reduce": replicas - 1}


@spmd(ranks=1)
def test_one_rank_calls_no_hook() -> None:
    for annotate in (fully_shard, replicate):
        model = annotate(model_of(), grad_reduce="sum")
        with register_comm_hook(model, None, noop_hook):
            loss_of(model, 0, spare=True).backward()
        assert all(gradient is not None for gradient in full_gradients(model).values())


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_the_last_bucket_is_said_to_be_the_last_also_after_a_part_was_removed(verb: Any) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    verb(model, policy={nn.Linear})
    lasts: list[list[bool]] = []

    def hook(group: dist.ProcessGroup, bucket: Any) -> Any:
        lasts[-1].append(bucket.is_last())
        return allreduce_hook(group, bucket)

    register_comm_hook(model, None, hook)
    for parts in (3, 2):
        if parts == 2:
            remove(model[0], verb)
            model[0].requires_grad_(False)
        lasts.append([])
        model(torch.ones(2, 4)).sum().backward()
        assert lasts[-1] == [False] * (parts - 1) + [True]
        model.zero_grad()
