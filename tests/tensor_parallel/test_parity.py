"""Tensor-parallel parameters under `fully_shard` train as one process does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable import checkpoint, clip_grad_norm_, fully_shard, replicate
from tests.helpers.world import current_device, spmd
from tests.tensor_parallel.models import (
    GPT,
    MLP,
    Block,
    assert_same_parameters,
    assert_trains_as_one_process,
    batches,
    made,
    mesh_of,
    parallelize_gpt,
    parallelize_mlp,
    train,
)


def _annotate(model: nn.Module, tp: DeviceMesh, **options: Any) -> None:
    if isinstance(model, GPT):
        parallelize_gpt(model, tp)
        options.setdefault("policy", {Block})
    else:
        parallelize_mlp(model, tp)
    fully_shard(model, **options)


_KINDS: Final[dict[str, Callable[[], nn.Module]]] = {
    "MLP": MLP,
    "MLP of uneven sizes": partial(MLP, 7),
    "MLP with less rows than ranks": partial(MLP, 3),
    "MLP with less rows than tensor-parallel ranks": partial(MLP, 1),
    "GPT": GPT,
    "GPT with a tied head": partial(GPT, tied=True),
}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("kind", _KINDS)
@spmd(ranks=4)
def test_it_trains_as_one_process(kind: str, optimizer: str) -> None:
    mesh = mesh_of(2, 2)
    annotate = partial(_annotate, tp=mesh["tp"], mesh=mesh["dp"])
    assert_trains_as_one_process(_KINDS[kind], annotate, mesh["dp"], optimizer=optimizer, steps=5)


@pytest.mark.parametrize("after", [True, False, 2])
@spmd(ranks=4)
def test_it_does_not_depend_on_what_forward_leaves(after: bool | int) -> None:
    mesh = mesh_of(2, 2)
    annotate = partial(_annotate, tp=mesh["tp"], mesh=mesh["dp"], reshard_after_forward=after)
    assert_trains_as_one_process(GPT, annotate, mesh["dp"])


@spmd(ranks=4)
def test_the_other_dimension_may_be_sharded() -> None:
    mesh = mesh_of(2, 2)
    annotate = partial(
        _annotate,
        tp=mesh["tp"],
        mesh=mesh["dp"],
        shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1),
    )
    for kind in (GPT, partial(MLP, 5)):
        assert_trains_as_one_process(kind, annotate, mesh["dp"])


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@spmd(ranks=2)
def test_one_of_the_dimensions_may_have_one_rank(shape: tuple[int, int]) -> None:
    mesh = mesh_of(*shape)
    annotate = partial(_annotate, tp=mesh["tp"], mesh=mesh["dp"])
    for clip in (None, clip_grad_norm_):
        assert_trains_as_one_process(
            GPT, annotate, mesh["dp"], optimizer="AdamW", clip=clip, steps=2
        )


@spmd(ranks=4)
def test_tensor_parallel_ranks_may_be_apart() -> None:
    mesh = mesh_of(2, 2, names=("tp", "dp"))
    annotate = partial(_annotate, tp=mesh["tp"], mesh=mesh["dp"])
    assert_trains_as_one_process(GPT, annotate, mesh["dp"])


@spmd(ranks=4)
def test_hybrid_with_one_rank_in_a_dimension_trains_as_one_process() -> None:
    for shape in ((2, 1, 2), (1, 2, 2), (2, 2, 1)):
        mesh = mesh_of(*shape, names=("replicate", "shard", "tp"))
        dp = mesh["replicate", "shard"]
        annotate = partial(_annotate, tp=mesh["tp"], mesh=dp)
        assert_trains_as_one_process(GPT, annotate, dp)


@pytest.mark.in_full_only
@spmd(ranks=8)
def test_hybrid_trains_as_one_process() -> None:
    mesh = mesh_of(2, 2, 2, names=("replicate", "shard", "tp"))
    dp = mesh["replicate", "shard"]
    annotate = partial(_annotate, tp=mesh["tp"], mesh=dp)
    model = assert_trains_as_one_process(GPT, annotate, dp, optimizer="AdamW", steps=2)
    weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr,index]
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0), Replicate(), Shard(0))
    assert weight.device_mesh.mesh_dim_names == ("tp", "replicate", "shard")


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=4)
def test_meshes_may_have_no_names_or_the_same_ones(verb: Any) -> None:
    mesh = mesh_of(2, 2)
    groups = {name: mesh[name].get_group() for name in ("dp", "tp")}
    x, y = (
        DeviceMesh.from_group(
            groups[name], current_device().type, mesh=mesh[name].mesh, mesh_dim_names=("x",)
        )
        for name in ("dp", "tp")
    )

    def annotate(model: Any, tp: DeviceMesh, given: Any) -> None:
        parallelize_gpt(model, tp)
        verb(model, mesh=given)

    for tp, given in ((mesh["tp"], groups["dp"]), (y, x)):
        assert_trains_as_one_process(
            GPT, partial(annotate, tp=tp, given=given), mesh["dp"], clip=clip_grad_norm_
        )


@spmd(ranks=4)
def test_the_model_may_be_distributed_over_two_dimensions() -> None:
    mesh = mesh_of(1, 2, 2, names=("dp", "ep", "tp"))
    over = mesh["ep", "tp"]

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.weight, DTensor):
                return super().forward(x)
            distributed = DTensor.from_local(x, self.weight.device_mesh, [Replicate()] * 2)
            return super().forward(distributed).full_tensor()

    def annotate(model: nn.Module) -> None:
        for name, placements in (("weight", [Shard(0), Shard(1)]), ("bias", [Replicate()] * 2)):
            whole = getattr(model[0], name).detach()  # type: ignore[index]
            setattr(model[0], name, nn.Parameter(distribute_tensor(whole, over, placements)))  # type: ignore[index]
        fully_shard(model, mesh=mesh["dp"])
        weight = model[0].weight  # type: ignore[index]
        assert weight.device_mesh.mesh_dim_names == ("ep", "tp", "dp")

    def kind() -> nn.Module:
        return nn.Sequential(Linear(6, 5))

    assert_trains_as_one_process(kind, annotate, mesh["dp"], clip=clip_grad_norm_)


@spmd(ranks=4)
def test_a_part_of_the_model_may_be_plain() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        layers = list(model.children())
        parallelize_mlp(layers[1], mesh["tp"])
        fully_shard(model, mesh=mesh["dp"], policy={MLP})

    def kind() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), MLP(), nn.Linear(6, 6))

    for clip in (None, clip_grad_norm_):
        assert_trains_as_one_process(kind, annotate, mesh["dp"], clip=clip)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
@spmd(ranks=4)
def test_clipping_counts_each_element_once(norm: float) -> None:
    mesh = mesh_of(2, 2)
    annotate = partial(_annotate, tp=mesh["tp"], mesh=mesh["dp"])
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        if norm != 2.0 and clip is not clip_grad_norm_:
            continue  # torch's cannot take the largest of two dimensions
        assert_trains_as_one_process(GPT, annotate, mesh["dp"], clip=clip, norm=norm, steps=2)


@spmd(ranks=4)
def test_a_checkpointed_model_trains_as_one_process() -> None:
    mesh = mesh_of(2, 2)

    def annotate(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            checkpoint(block)
        _annotate(model, mesh["tp"], mesh=mesh["dp"])

    assert_trains_as_one_process(GPT, annotate, mesh["dp"])


@spmd(ranks=4)
def test_frozen_parameters_stay() -> None:
    mesh = mesh_of(2, 2)

    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name or "norm2" in name or name == "head.weight")

    def kind() -> nn.Module:
        model = GPT()
        freeze(model)
        return model

    def annotate(model: nn.Module) -> None:
        parallelize_gpt(model, mesh["tp"])  # type: ignore[arg-type]
        freeze(model)  # torch has unfrozen the norms
        fully_shard(model, mesh=mesh["dp"], policy={Block})

    assert_trains_as_one_process(kind, annotate, mesh["dp"])


@spmd(ranks=4)
def test_it_trains_as_fsdp2_does_in_bf16_too() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for policy in (None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = made(GPT).float()
        other = copy.deepcopy(model)
        parallelize_gpt(other, mesh["tp"])  # type: ignore[arg-type]
        options = {} if policy is None else {"mp_policy": policy}
        for block in other.blocks:  # type: ignore[union-attr]
            fsdp2(block, mesh=mesh["dp"], **options)
        fsdp2(other, mesh=mesh["dp"], **options)
        _annotate(model, mesh["tp"], mesh=mesh["dp"], **options)
        inputs = batches(model, rank, 2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # FSDP2 warns of an output that is a view
            expected = train(other, inputs)
        torch.testing.assert_close(train(model, inputs), expected)
        plain = {name: p.full_tensor() for name, p in other.named_parameters()}
        alone = made(GPT).float()
        alone.load_state_dict(plain)
        # FSDP2 rounds sums over tp to the compute dtype, also where more are asked for
        assert_same_parameters(
            model, alone, **({} if policy is None else {"atol": 1e-3, "rtol": 0})
        )
