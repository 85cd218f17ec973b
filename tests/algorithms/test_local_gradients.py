"""Hooks that leave gradients local: with averages of replicas, as under DDP; on shards they are
refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from composable import PeriodicAverager, fully_shard, register_comm_hook, replicate
from composable.errors import AnnotationError
from tests.algorithms.replicas import (
    annotated,
    assert_same_parameters,
    average_by_hand,
    backward,
    grid,
)
from tests.helpers.world import current_device, spmd
from tests.state.models import Block, plain

with warnings.catch_warnings():  # the package uses TorchScript
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer

_sgd = partial(SGD, lr=0.1, momentum=0.5)


def _state(own: Any) -> PostLocalSGDState:
    return PostLocalSGDState(
        None, own, start_localSGD_iter=3, post_local_gradient_allreduce=own is not None
    )


@pytest.mark.parametrize("averager", ["torch's", "ours"])
@pytest.mark.parametrize("pairs", [False, True], ids=["alone", "in pairs"])
@spmd(ranks=[2, 4])
def test_post_local_sgd_on_a_replicated_model_has_the_numbers_of_ddp(
    averager: str, pairs: bool
) -> None:
    device = current_device()
    own = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)][
        dist.get_rank() // 2
    ]
    subgroup = own if pairs else None
    expected, model = plain(), replicate(plain())
    rival = DistributedDataParallel(
        expected, device_ids=[device] if device.type == "cuda" else None
    )
    rival.register_comm_hook(_state(subgroup), post_localSGD_hook)
    register_comm_hook(model, _state(subgroup), post_localSGD_hook)
    theirs = PeriodicModelAverager(period=2, warmup_steps=3)
    ours: Any = (
        PeriodicAverager(model, period=2, warmup_steps=3)
        if averager == "ours"
        else PeriodicModelAverager(period=2, warmup_steps=3)
    )
    optimizers = [
        PostLocalSGDOptimizer(_sgd(expected.parameters()), theirs),
        PostLocalSGDOptimizer(_sgd(model.parameters()), ours),
    ]
    for step in range(8):
        for each, optimizer in zip((rival, model), optimizers, strict=True):
            backward(each, step, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, expected)
    assert optimizers[1].state_dict()["step"] == 8


@spmd(ranks=4)
def test_torchs_post_local_optimizer_takes_our_averager_for_shards() -> None:
    model, replica = annotated("hybrid", 2)
    register_comm_hook(model, _state(None), post_localSGD_hook, stage="all_reduce")
    optimizer = PostLocalSGDOptimizer(
        _sgd(model.parameters()), PeriodicAverager(model, period=2, warmup_steps=3)
    )  # type: ignore[arg-type]
    for step in range(6):
        # replicas agree in the warm-up
        backward(model, step + 10 * (step >= 3), replica if step >= 3 else 0)
        optimizer.step()
        optimizer.zero_grad()
    models = [plain(), plain()]
    optimizers = [_sgd(model.parameters()) for model in models]
    for step in range(6):
        for index, (each, one) in enumerate(zip(models, optimizers, strict=True)):
            backward(each, step + 10 * (step >= 3), index if step >= 3 else 0)
            one.step()
            one.zero_grad()
        if step in (3, 5):
            average_by_hand(models)
    assert_same_parameters(model, models[replica])


# --- refused on shards --------------------------------------------------------------------------

_LOCAL: Final[dict[str, tuple[Callable[..., Any], Any]]] = {
    "no-op": (noop_hook, None),
    "post-local": (post_localSGD_hook, "state"),
    "in float16": (fp16_compress_wrapper(noop_hook), None),
    "in bfloat16, bound": (bf16_compress_wrapper(partial(post_localSGD_hook)), "state"),
    "bound": (partial(fp16_compress_wrapper(noop_hook)), None),
}


@pytest.mark.parametrize("name", _LOCAL)
@spmd(ranks=4)
def test_hooks_that_leave_gradients_local_are_refused_on_shards(name: str) -> None:
    hook, state = _LOCAL[name]
    state = None if state is None else _state(None)
    message = (
        r"^register_comm_hook: .* leaves gradients on their rank, and the ranks of unit '\(root\)'"
        r" hold its parameters together"
    )
    with pytest.raises(AnnotationError, match=message):
        register_comm_hook(fully_shard(plain(), policy={Block}), state, hook)
    hybrid = fully_shard(plain(), mesh=grid(2), policy={Block})
    with pytest.raises(AnnotationError, match=message):
        register_comm_hook(hybrid, state, hook, stage="reduce_scatter")
    register_comm_hook(hybrid, state, hook, stage="all_reduce")
    register_comm_hook(replicate(plain()), state, hook)


@spmd(ranks=2)
def test_wrapped_hooks_that_reduce_are_taken_for_shards() -> None:
    register_comm_hook(fully_shard(plain()), None, fp16_compress_wrapper(partial(allreduce_hook)))
