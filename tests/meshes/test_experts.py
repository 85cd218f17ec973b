"""Experts over a dimension of their own train as in one process: as units on another mesh, and as
parameters on another mesh than the rest of their unit.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from importlib import import_module
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import (
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    joinable,
    no_sync,
    register_comm_hook,
    remove,
    summon_full_params,
)
from composable.errors import MeshError
from composable.fsdp2 import fully_shard as face
from tests.helpers.refusals import refused
from tests.helpers.world import spmd
from tests.meshes.mixtral import Experts, Mixtral, MoE, distribute_experts
from tests.meshes.test_dims import Dims
from tests.tensor_parallel.models import (
    MLP,
    OPTIMIZERS,
    assert_same_parameters,
    assert_trains_as_one_process,
    batches,
    full,
    made,
    mesh_of,
    parallelize_mlp,
    train,
)

ALL: Final = Dims(("efsdp", "ep"))
_TORCHS: Final[Any] = import_module("torch.distributed.fsdp._fully_shard._fsdp_common")


def _as_units(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    distribute_experts(model, mesh["ep"])
    for block in model.blocks:
        # tokens of all four ranks come to the experts, which two ranks share
        fully_shard(block.experts, mesh=mesh["efsdp"], grad_reduce=4.0, **options)
    fully_shard(model, mesh=mesh, dp_mesh_dims=ALL, policy={MoE}, **options)


def _as_parameters(model: Any, mesh: DeviceMesh, torchs: bool = False, **options: Any) -> None:
    distribute_experts(model, mesh["ep"])
    theirs: Any = Shard(0), mesh["efsdp"]
    rest: Any = None
    if torchs:  # as torchtitan calls it, with the unit's own mesh for the rest
        every = mesh["efsdp", "ep"]._flatten("efsdp_ep")
        theirs, rest = (
            _TORCHS.ShardPlacementResult(Shard(0), _TORCHS.FSDPMeshInfo(each, shard_mesh_dim=0))
            for each in (mesh["efsdp"], every)
        )
    ids = {
        id(p) for each in model.modules() if isinstance(each, Experts) for p in each.parameters()
    }

    def place(parameter: nn.Parameter) -> Any:
        return theirs if id(parameter) in ids else rest

    options = {"mesh": mesh, "dp_mesh_dims": ALL, "shard_placement_fn": place, **options}
    if torchs:
        for block in model.blocks:
            face(block, **options)
            block.set_gradient_divide_factor(4.0)
        face(model, **options)
        return
    fully_shard(model, policy={MoE}, grad_reduce=4.0, **options)


_FORMS: Final[dict[str, Any]] = {
    "units": _as_units,
    "parameters": _as_parameters,
}
if hasattr(_TORCHS, "ShardPlacementResult"):
    _FORMS["torch's result"] = partial(_as_parameters, torchs=True)
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "SGD": {},
    "AdamW, uneven": {"optimizer": "AdamW", "kind": partial(Mixtral, 6)},
    "checkpoint": {"checkpointed": True},
    "clip": {"clip": clip_grad_norm_},
    "reshard to one rank": {"reshard_after_forward": 1},
}


@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("form", _FORMS)
@spmd(ranks=4)
def test_experts_train_as_one_process(form: str, options: str) -> None:
    mesh, given = mesh_of(2, 2, names=("efsdp", "ep")), dict(_OPTIONS[options])
    kind, checkpointed = given.pop("kind", Mixtral), given.pop("checkpointed", False)
    how = {name: given.pop(name) for name in ("optimizer", "clip") if name in given}

    def annotate(model: Any) -> None:
        for block in model.blocks if checkpointed else ():
            checkpoint(block)
        _FORMS[form](model, mesh, **given)

    model: Any = assert_trains_as_one_process(kind, annotate, mesh, steps=5, **how)
    up = model.blocks[0].experts.up
    assert up.device_mesh.mesh_dim_names == ("ep", "efsdp")
    assert model.blocks[0].router.weight.device_mesh.size() == 4


@pytest.mark.parametrize("form", ["units", "parameters"])
@spmd(ranks=4)
def test_experts_accumulate_and_are_looked_into(form: str) -> None:
    mesh = mesh_of(2, 2, names=("efsdp", "ep"))
    model: Any = made(Mixtral)
    alone = copy.deepcopy(model)
    _FORMS[form](model, mesh)
    for each, rank in ((model, dist.get_rank()), (alone, -1)):
        optimizer = OPTIMIZERS["AdamW"](each.parameters())
        for number, batch in enumerate(batches(each, rank, 4, 4)):
            with no_sync(each, enabled=number % 2 == 0) if each is model else torch.enable_grad():
                each(batch).square().mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(model, alone)
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value)
    with torch.no_grad(), summon_full_params(model, rank0_only=True):
        if mesh["efsdp"].get_local_rank() == 0:
            model.blocks[0].experts.up.mul_(2)
    assert_close(full(model.blocks[0].experts.up), 2 * alone.blocks[0].experts.up)


@spmd(ranks=4)
def test_experts_are_copied_saved_skipped_together_and_given_back() -> None:
    mesh, rank = mesh_of(2, 2, names=("efsdp", "ep")), dist.get_rank()
    model: Any = made(Mixtral)
    alone: Any = copy.deepcopy(model)
    _as_parameters(model, mesh)
    train(alone, batches(alone, -1, 4, 2))
    for each in (copy.deepcopy(model), model):  # the copy is trained first
        train(each, batches(each, rank, 4, 2))
        assert_same_parameters(each, alone)
    other = fully_shard(made(Mixtral))  # loads by names, whatever the meshes
    other.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    assert_same_parameters(other, alone)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(batches(model, rank, 4, 1)[0]).square().mean()).backward()
    if rank == 3:
        model.blocks[0].experts.up.grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for each in (*model.blocks, model):
        remove(each, fully_shard)
    assert_same_parameters(model, alone)
    assert model.blocks[0].experts.up.device_mesh == mesh["ep"]
    assert not isinstance(model.blocks[0].router.weight, DTensor)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.detach(), other.detach())


@spmd(ranks=4)
def test_experts_train_as_with_fsdp2_in_bf16_too() -> None:
    mesh = mesh_of(2, 2, names=("efsdp", "ep"))
    dp = mesh["efsdp", "ep"]._flatten("efsdp_ep")
    for policy in (None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        options = {} if policy is None else {"mp_policy": policy}
        other: Any = made(Mixtral).float()
        models = [copy.deepcopy(other) for _ in range(2)]
        distribute_experts(other, mesh["ep"])
        for block in other.blocks:
            fsdp2(block.experts, mesh=mesh["efsdp"], **options)
            fsdp2(block, mesh=dp, **options)
        fsdp2(other, mesh=dp, **options)
        for each in other.modules():
            if hasattr(each, "set_force_sum_reduction_for_comms"):  # divisors need it on gloo
                each.set_force_sum_reduction_for_comms(True)
                each.set_gradient_divide_factor(4.0)
        inputs = [batch.float() for batch in batches(other, dist.get_rank(), 4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # FSDP2 warns of an output that is a view
            expected = train(other, inputs)
        plain = made(Mixtral).float()
        plain.load_state_dict({name: p.full_tensor() for name, p in other.named_parameters()})
        for annotate, model in zip((_as_units, _as_parameters), models, strict=True):
            annotate(model, mesh, **options)
            torch.testing.assert_close(train(model, inputs), expected)
            assert_same_parameters(model, plain)


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.moe, self.head = MLP(), MoE(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x + self.mlp(x)))


# By shape over (dp, b, tp): the dimensions of tensor parallel and expert parallel, and those over
# which experts are sharded: less ranks than the rest of their unit, and more.
_BORROWED: Final = {
    (2, 1, 2): ("tp", ("dp", "tp"), "b"),
    (1, 2, 2): (("b", "tp"), "tp", "b"),
}


@pytest.mark.unsampled
@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11's redistribution looks for dimensions of the mesh in another order",
)
@pytest.mark.parametrize("shape", _BORROWED)
@spmd(ranks=4)
def test_experts_are_over_ranks_that_are_tensor_parallel_elsewhere(
    shape: tuple[int, ...],
) -> None:
    mesh = mesh_of(*shape, names=("dp", "b", "tp"))
    tp, ep, own = (
        mesh[names] if isinstance(names, str) else mesh[names]._flatten("_".join(names))
        for names in _BORROWED[shape]
    )
    dp = mesh["dp"]
    model: Any = made(_Both)
    alone: Any = copy.deepcopy(model)
    parallelize_mlp(model.mlp, tp)
    model.blocks = [model.moe]
    distribute_experts(model, ep)
    ids = {id(parameter) for parameter in model.moe.experts.parameters()}

    def place(parameter: nn.Parameter) -> Any:
        return (None, own) if id(parameter) in ids else None

    fully_shard(model, mesh=dp, shard_placement_fn=place, grad_reduce=float(dp.size()))
    said = []
    for each, rank in ((model, dp.get_local_rank()), (alone, -1)):
        optimizer = OPTIMIZERS["SGD"](each.parameters())
        for batch in batches(each, rank, dp.size()):
            each(batch).square().mean().backward()
            for parameter in each.moe.experts.parameters() if each is model else ():
                parameter.grad.div_(tp.size())  # so many ranks send each token
            said.append(clip_grad_norm_(each.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(said[:3], said[3:])
    assert_same_parameters(model, alone)


# --- meshes of parameters that hold no DTensors, and what is refused -----------------------------


@spmd(ranks=4)
def test_plain_parameters_may_be_on_meshes_of_their_own() -> None:
    mesh = mesh_of(2, 2, names=("outer", "inner"))
    hybrid = mesh_of(2, 2, names=("replicate", "shard"))

    def place(parameter: nn.Parameter) -> Any:
        return None if parameter.ndim == 1 else (Shard(1), hybrid)

    annotate = partial(
        fully_shard, mesh=mesh, dp_mesh_dims=Dims(("outer", "inner")), shard_placement_fn=place
    )
    for clip in (None, clip_grad_norm_):
        model: Any = assert_trains_as_one_process(MLP, annotate, mesh, optimizer="AdamW", clip=clip)
    assert model.up.weight.placements == (Replicate(), Shard(1))
    assert model.up.bias.placements == (Shard(0),)


@spmd(ranks=4)
def test_what_cannot_be_a_mesh_of_a_parameter_is_refused_on_all_ranks() -> None:
    mesh, rank = mesh_of(2, 2, names=("outer", "inner")), dist.get_rank()
    inner, outer = mesh["inner"], mesh["outer"]
    whole = init_device_mesh("cpu", (4,))
    model: Any = made(MLP)
    one_rank = Shard(0), inner if rank == 0 else outer
    for given, over, sync, match in (
        ((Shard(0), "inner"), whole, "check", "and a DeviceMesh; got the str"),
        ((0, inner), whole, "check", "must return Shard or None, got int"),
        ((Shard(0), whole), inner, "check", "is no part of the mesh"),
        (one_rank, whole, "check", "differ in arguments|differ in"),
        (one_rank, whole, "off", "the ranks differ in"),
        ((Shard(0), inner) if rank else None, whole, "off", "the ranks differ in"),
    ):
        options = {"mesh": over, "sync_module_states": sync}
        said = refused(
            model,
            lambda: fully_shard(model, shard_placement_fn=lambda _: given, **options),  # noqa: B023
        )
        assert match.partition("|")[0] in said, said
    with torch.no_grad():
        model.up.bias.add_(rank == 3)
    # values are compared along the mesh, and all ranks of the unit report it
    said = refused(model, lambda: fully_shard(model, shard_placement_fn=lambda _: (None, outer)))
    assert "differ in values" in said or "another rank of the module failed" in said, said
    fully_shard(model, sync_module_states="broadcast", shard_placement_fn=lambda _: (None, outer))
    for verb in (lambda: joinable(model), lambda: register_comm_hook(model, None, lambda *_: None)):
        with pytest.raises(MeshError, match=r"and others of|are on meshes of their own"):
            verb()
    train(model, batches(model, rank, 4, 1))
