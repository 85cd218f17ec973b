"""Mixtures of experts of transformers train as in one process: as they are, tensor parallel and
expert parallel by the plans of their configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

from composable import apply_tp_plan, fully_shard, load, no_sync, replicate
from composable.api import arguments
from composable.fsdp2 import fully_shard as face
from tests.helpers.compare import full
from tests.helpers.world import spmd
from tests.tensor_parallel.models import mesh_of
from tests.tensor_parallel.transformers_models import (
    KINDS,
    assert_same_values,
    assert_trains_beside,
    batches,
    concrete,
    made,
    mesh_of_experts,
    saved,
)

# --- as they are --------------------------------------------------------------------------------


def _without_padding(model: Any) -> None:
    with mock.patch.object(arguments, "PADDING", 1):  # these parameters are small
        fully_shard(model, policy=model)
    few = dist.get_world_size() > 2
    assert model.model.layers[1].mlp.experts.down_proj.placements == (Shard(int(few)),)


_VERBS: Final[dict[str, Callable[[Any], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy=model),
    "fully_shard along other dimensions": _without_padding,
    "replicate": replicate,
    "FSDP2's": lambda model: [face(each) for each in (*model.model.layers, model)],
}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("verb", _VERBS)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=[2, 4])
def test_experts_train_as_in_one_process(kind: str, verb: str, implementation: str) -> None:
    # 3 experts leave one of 4 ranks empty, 2 of them two
    experts = 2 if _VERBS[verb] is _without_padding else 3
    model, alone = (made(kind, experts, implementation=implementation) for _ in range(2))
    _VERBS[verb](model)
    assert_trains_beside(model, alone, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=4)
def test_a_rank_without_an_expert_loads_what_transformers_saved(kind: str) -> None:
    alone, model = made(kind, 3), fully_shard(made(kind, 3, seed=1))
    assert model.model.layers[1].mlp.experts.down_proj.placements == (Shard(0),)
    load(model, saved(alone))
    assert_same_values(model, alone)


# --- as transformers loads them -----------------------------------------------------------------


def _loaded(alone: Any, folder: str = "", **sizes: Any) -> Any:
    folder = folder or saved(alone)
    # what `install` does, in a process where torch's may be in use, too
    with mock.patch("transformers.distributed.fsdp.fully_shard", face):
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**sizes)
        )


_ON_TWO: Final = (
    {"fsdp_size": 2},
    {"fsdp_size": 2, "ep_size": 2},
    {"dp_replicate_size": 2},
)
_ON_FOUR: Final = (
    {"fsdp_size": 4, "ep_size": 2},
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 2, "tp_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    {"dp_replicate_size": 2, "tp_size": 2},
    {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
)


def _train_loaded(kind: str, sizes: dict[str, Any]) -> Any:
    alone = made(kind)
    model = _loaded(alone, **sizes)
    replicas = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    replica = dist.get_rank() // sizes.get("tp_size", 1)
    assert_trains_beside(model, alone, replica, replicas)
    return model


@pytest.mark.parametrize("sizes", _ON_TWO, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=2)
def test_a_model_that_transformers_distributes_over_two_ranks_trains_as_in_one_process(
    kind: str, sizes: dict[str, Any]
) -> None:
    _train_loaded(kind, sizes)


@pytest.mark.parametrize("sizes", _ON_FOUR, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=4)
def test_a_model_that_transformers_distributes_trains_as_in_one_process(
    kind: str, sizes: dict[str, Any]
) -> None:
    model = _train_loaded(kind, sizes)
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    names = experts.device_mesh.mesh_dim_names
    assert ("ep" in names) == ("ep_size" in sizes)


@spmd(ranks=4)
def test_what_transformers_saves_of_such_a_model_loads_into_other_sizes() -> None:
    alone = made("Mixtral")
    model = _loaded(alone, fsdp_size=2, tp_size=2)
    folders = saved(alone), saved(alone)
    model.save_pretrained(folders[0], distributed_checkpoint=True)
    model.save_pretrained(folders[1], is_main_process=dist.get_rank() == 0)
    dist.barrier()
    for folder in folders:
        for sizes in ({"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 2, "tp_size": 2}):
            assert_same_values(_loaded(made("Mixtral", seed=1), folder, **sizes), alone)


# --- under the verbs ----------------------------------------------------------------------------


_OF_TENSOR_PARALLEL: Final[dict[str, Callable[..., Any]]] = {
    "fully_shard": lambda model, mesh: fully_shard(model, policy=model, mesh=mesh),
    "columns": lambda model, mesh: fully_shard(
        model, policy=model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "replicate": lambda model, mesh: replicate(model, mesh=mesh),
}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("verb", _OF_TENSOR_PARALLEL)
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=4)
def test_a_tensor_parallel_model_trains_as_in_one_process(
    kind: str, verb: str, experts: bool
) -> None:
    mesh, model, alone = mesh_of(2, 2), made(kind), made(kind)
    apply_tp_plan(model, mesh["tp"], experts=experts)
    _OF_TENSOR_PARALLEL[verb](model, mesh["dp"])
    assert_trains_beside(model, alone, mesh["dp"].get_local_rank(), 2)


@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
@spmd(ranks=4)
def test_norms_between_heads_accumulate(verb: str) -> None:
    # a hook of transformers sums all of `.grad` over tp, which plain accumulation gets wrong
    mesh, model, alone = mesh_of(2, 2), made("Qwen3-MoE"), made("Qwen3-MoE")
    apply_tp_plan(model, mesh["tp"])
    _OF_TENSOR_PARALLEL[verb](model, mesh["dp"])
    start = 2 * mesh["dp"].get_local_rank()
    for number, tokens in enumerate(batches(2)):
        with no_sync(model, enabled=number < 2):
            rows = tokens[start : start + 2]
            model(input_ids=rows, labels=rows).loss.backward()
        alone(input_ids=tokens, labels=tokens).loss.backward()
    for layer, expected in zip(model.model.layers, alone.model.layers, strict=True):
        for name in ("q_norm", "k_norm"):
            found, norm = (getattr(each.self_attn, name).weight for each in (layer, expected))
            torch.testing.assert_close(full(found.grad), norm.grad, rtol=1e-4, atol=1e-5)


def _experts_of(model: Any) -> list[nn.Module]:
    return [each for name, each in model.named_modules() if name.endswith("mlp.experts")]


def _expert_parallel(model: Any, mesh: Any) -> None:
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], concrete(model, model.ep_plan))


def _sharded_experts(model: Any, mesh: Any) -> None:
    for experts in _experts_of(model):
        fully_shard(experts, mesh=mesh["efsdp"], grad_reduce=4.0)
    every = DataParallelMeshDims(shard=("efsdp", "ep"))
    fully_shard(model, policy=model, mesh=mesh, dp_mesh_dims=every)


def _replicated_experts(model: Any, mesh: Any) -> None:
    for experts in _experts_of(model):
        replicate(experts, mesh=mesh["efsdp"], grad_reduce=4.0)
    replicate(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=("efsdp", "ep")))


@pytest.mark.parametrize("annotate", [_sharded_experts, _replicated_experts])
@pytest.mark.parametrize("kind", KINDS)
@spmd(ranks=4)
def test_an_expert_parallel_model_trains_as_in_one_process(
    kind: str, annotate: Callable[..., None]
) -> None:
    mesh, model, alone = mesh_of_experts(2, 2), made(kind, 6), made(kind, 6)
    _expert_parallel(model, mesh)
    annotate(model, mesh)
    experts = _experts_of(model)[0].gate_up_proj
    assert isinstance(experts, DTensor)
    assert "ep" in (experts.device_mesh.mesh_dim_names or ())
    assert_trains_beside(model, alone, dist.get_rank(), 4)
