"""What is saved, loaded, shown and edited of a model whose parameters are tensor parallel."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable import (
    EMA,
    Streamed,
    describe,
    export,
    full_state_dict,
    fully_shard,
    materialize,
    rebind_optimizer,
    remove,
    stream_full,
    summon_full_params,
)
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import spmd
from tests.tensor_parallel.models import (
    GPT,
    MLP,
    Block,
    assert_same_parameters,
    batches,
    full,
    loss_of,
    made,
    mesh_of,
    parallelize_gpt,
    parallelize_mlp,
    train,
)


def _annotated(mesh: Any, *, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT().double()
    parallelize_gpt(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    return model


def _assert_same(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    whole = {name: full(tensor).detach() for name, tensor in found.items()}
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


def _folder() -> str:
    reported = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(reported)
    assert reported[0] is not None
    return reported[0]


@spmd(ranks=4)
def test_parameters_rest_on_one_mesh_with_the_names_of_both() -> None:
    mesh = mesh_of(2, 2)
    model = _annotated(mesh)
    found = dict(model.named_parameters())
    assert len({id(p.device_mesh) for p in found.values()}) == 1  # type: ignore[attr-defined]
    weight = model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.mesh_dim_names == ("tp", "dp")
    assert weight.placements == (Shard(1), Shard(0))
    assert weight.shape == (6, 8)
    assert weight.to_local().shape == (3, 4)
    norm = model.norm.weight
    assert isinstance(norm, DTensor)
    assert norm.placements == (Replicate(), Shard(0))
    _assert_same(model.state_dict(), made(GPT).state_dict())


@spmd(ranks=4)
def test_sizes_that_do_not_divide_are_saved_and_loaded_in_place_without_messages() -> None:
    log = Log()
    for shape, hidden in (((1, 2, 2), 7), ((1, 2, 2), 3), ((1, 2, 2), 1), ((2, 1, 2), 5)):
        mesh = mesh_of(*shape, names=("replicate", "shard", "tp"))
        dp = mesh["replicate", "shard"] if shape[0] == 2 else mesh["shard"]
        first, second = (made(lambda: MLP(hidden)) for _ in range(2))  # noqa: B023
        plain = copy.deepcopy(first)
        nn.init.zeros_(second.up.weight)  # type: ignore[union-attr, arg-type]
        with comms_wrapped_by(lambda comm: Recording(comm, log)):
            for model in (first, second):
                parallelize_mlp(model, mesh["tp"])
                fully_shard(model, mesh=dp)
        log.events.clear()
        parameters = dict(second.named_parameters())
        addresses = [p.to_local().data_ptr() for p in parameters.values()]  # type: ignore[operator]
        second.load_state_dict(first.state_dict())
        assert addresses == [p.to_local().data_ptr() for p in parameters.values()]  # type: ignore[operator]
        for name, saved in second.state_dict().items():
            whole, rests = plain.get_parameter(name), parameters[name]
            assert (saved.shape, saved.stride()) == (whole.shape, whole.stride())
            assert saved.to_local().data_ptr() == rests.to_local().data_ptr()  # type: ignore[operator]
        assert not log.events
        assert_same_parameters(second, plain)
        assert parameters["up.weight"].placements[0] == Shard(0)  # type: ignore[attr-defined]
        assert parameters["down.weight"].placements[0] == Shard(1)  # type: ignore[attr-defined]
        assert parameters["down.bias"].placements[0] == Replicate()  # type: ignore[attr-defined]
        assert all(p.placements[-1] == Shard(0) for p in parameters.values())  # type: ignore[attr-defined]


@spmd(ranks=4)
def test_a_state_dict_of_whole_tensors_loads() -> None:
    mesh = mesh_of(2, 2)
    plain = made(GPT).state_dict()
    for assign in (False, True):
        model = _annotated(mesh, seed=1)
        model.load_state_dict(plain, assign=assign)
        _assert_same(model.state_dict(), plain)
        alone = made(GPT)
        train(model, batches(model, mesh["dp"].get_local_rank(), 2, 2))
        train(alone, batches(alone, -1, 2, 2))
        assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_a_checkpoint_loads_into_other_sizes_and_from_fsdp2() -> None:
    mesh, folder = mesh_of(2, 2), _folder()
    expected = made(GPT).state_dict()
    model = _annotated(mesh)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    flat = mesh_of(4, 1)
    torch.manual_seed(1)
    over_dp = GPT().double()
    fully_shard(over_dp, mesh=flat["dp"], policy={Block})
    other = GPT().double()
    parallelize_gpt(other, mesh["tp"])
    fsdp2(other, mesh=mesh["dp"])
    swapped = _annotated(mesh_of(2, 2, names=("tp", "dp")), seed=1)
    plain = GPT().double()
    for target in (over_dp, other, swapped, plain):
        state = target.state_dict()
        dcp.load(state, checkpoint_id=folder)
        target.load_state_dict(state)
        _assert_same(target.state_dict(), expected)
    for number, source in enumerate((over_dp, other, swapped)):
        dcp.save(source.state_dict(), checkpoint_id=f"{folder}/{number}")
        model = _annotated(mesh, seed=2)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        model.load_state_dict(state)
        _assert_same(model.state_dict(), expected)


@spmd(ranks=4)
def test_whole_tensors_are_streamed_and_exported() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    mesh, folder = mesh_of(2, 2), _folder()
    model, expected = _annotated(mesh), made(GPT).state_dict()
    _assert_same(dict(stream_full(model)), expected)
    _assert_same(full_state_dict(model, rank0_only=False), expected)
    state = full_state_dict(model)
    assert bool(state) is (dist.get_rank() == 0)
    target = Path(folder) / "out"
    export(model, target)
    assert os.listdir(target) == ["model.safetensors"]
    _assert_same(safetensors.load_file(target / "model.safetensors"), expected)


@spmd(ranks=4)
def test_a_tensor_is_streamed_again_where_one_rank_changed_its_part() -> None:
    mesh, seen = mesh_of(2, 2), Streamed()
    model = _annotated(mesh)
    everything = [fqn for fqn, _ in stream_full(model, since=seen)]
    assert len(everything) == len(model.state_dict())
    assert not list(stream_full(model, since=seen))
    if dist.get_rank() == 1:
        weight = model.blocks[0].mlp.down.weight  # type: ignore[union-attr]
        weight.to_local().data.add_(1)  # type: ignore[operator, union-attr]
    assert [fqn for fqn, _ in stream_full(model, since=seen)] == ["blocks.0.mlp.down.weight"]


@spmd(ranks=4)
def test_an_export_that_fails_on_one_rank_fails_on_all() -> None:
    pytest.importorskip("safetensors")
    mesh, folder = mesh_of(2, 2), _folder()
    model = _annotated(mesh)
    (Path(folder) / "out").mkdir(exist_ok=True)
    (Path(folder) / "out" / "file").touch()
    dist.barrier()
    with pytest.raises(FileExistsError, match="is not empty"):
        export(model, Path(folder) / "out")


@spmd(ranks=4)
def test_summon_full_params_shows_and_keeps_tensor_parallel_parameters() -> None:
    mesh = mesh_of(2, 2)
    tp, rank = mesh["tp"], mesh["dp"].get_local_rank()
    model, alone = _annotated(mesh), made(GPT)
    for each, row in ((model, rank), (alone, -1)):
        loss_of(each, batches(each, row, 2, 1)[0]).backward()
    with summon_full_params(model, with_grads=True):
        for (name, shown), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(shown, DTensor), name
            assert shown.device_mesh == tp
            torch.testing.assert_close(shown.full_tensor(), plain)
            torch.testing.assert_close(full(shown.grad), plain.grad)  # type: ignore[arg-type]
            with torch.no_grad():
                shown.mul_(2.0)
                shown.grad.add_(1.0)  # type: ignore[union-attr]
    with torch.no_grad():
        for plain in alone.parameters():
            plain.mul_(2.0)
            plain.grad.add_(1.0)  # type: ignore[union-attr]
    assert_same_parameters(model, alone)
    for parameter, plain in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), plain.grad)  # type: ignore[arg-type]
    with summon_full_params(model, rank0_only=True):
        if rank == 0:
            with torch.no_grad():
                model.head.weight.add_(1.0)
    with summon_full_params(model, writeback=False), torch.no_grad():
        model.head.weight.add_(1.0)
    with torch.no_grad():
        alone.head.weight.add_(1.0)
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_remove_gives_the_tensor_parallel_parameters_back() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = GPT().double()
    parallelize_gpt(model, mesh["tp"])
    before = dict(model.named_parameters())
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    alone = made(GPT)
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 2))
    train(alone, batches(alone, -1, 2, 2))
    loss_of(model, batches(model, mesh["dp"].get_local_rank(), 2, 1)[0]).backward()
    loss_of(alone, batches(alone, -1, 2, 1)[0]).backward()
    for block in model.blocks:
        remove(block, fully_shard)
    remove(model, fully_shard)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(p.device_mesh == mesh["tp"] for p in after.values())  # type: ignore[attr-defined]
    assert_same_parameters(model, alone)
    for parameter, plain in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), plain.grad)  # type: ignore[arg-type]
    model.zero_grad()
    alone.zero_grad()
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    train(model, batches(model, mesh["dp"].get_local_rank(), 2, 2))
    train(alone, batches(alone, -1, 2, 2))
    assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_remove_keeps_gradients_in_their_dtype() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = MLP().double()
    parallelize_mlp(model, mesh["tp"])
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    expected = {name: full(p.grad) for name, p in model.named_parameters()}  # type: ignore[arg-type]
    remove(model, fully_shard)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(full(parameter.grad), expected[name], rtol=0, atol=0)


@spmd(ranks=4)
def test_describe_says_how_parameters_are_distributed() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = MLP()
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    assert "Shard(dim=1), Shard(dim=0)" in str(describe(model)) or "S(1)" in str(describe(model))


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.11 cannot gather a DTensor while its values are made: it knows no detach_",
)
@spmd(ranks=4)
def test_a_model_of_the_meta_device_gets_the_weights_of_one_process() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model, alone = GPT(), GPT()
    parallelize_gpt(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    torch.manual_seed(3)
    materialize(model)
    alone.to_empty(device="cpu")
    torch.manual_seed(3)
    alone.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    _assert_same(model.state_dict(), alone.state_dict())


@spmd(ranks=4)
def test_parameters_of_the_meta_device_are_filled_by_their_modules() -> None:
    mesh = mesh_of(2, 2)
    for hidden in (8, 3):
        with torch.device("meta"):
            model = MLP(hidden)
            parallelize_mlp(model, mesh["tp"])
            for module in (model.up, model.down, model):
                fully_shard(module, mesh=mesh["dp"])
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 1337.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of DTensor's random numbers on hosts
            for linear in (model.up, model.down):
                linear.reset_parameters()
        assert all(p.to_local().abs().lt(10).all() for p in model.parameters())  # type: ignore[operator]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        before = model.down.bias.full_tensor()  # type: ignore[operator]
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        after = model.down.bias.full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(after, before - 0.01)  # Adam's first step, against a sum


@spmd(ranks=4)
def test_rank_0_gives_its_values_to_the_others_of_its_data_parallel_ranks() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    torch.manual_seed(rank)
    with torch.device("meta" if rank else "cpu"):
        model = GPT()
    model.double()
    parallelize_gpt(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block}, sync_module_states="broadcast")
    torch.manual_seed(0)
    _assert_same(model.state_dict(), GPT().double().state_dict())


@spmd(ranks=4)
def test_averages_follow_and_an_optimizer_made_before_is_rebound() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model, alone = GPT().double(), made(GPT)
    parallelize_gpt(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    rebind_optimizer(model, optimizer)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    averages = [EMA(model, decay=0.5), EMA(alone, decay=0.5)]
    for (each, row), stepper, average in zip(
        ((model, rank), (alone, -1)), (optimizer, reference), averages, strict=True
    ):
        for batch in batches(each, row, 2, 3):
            loss_of(each, batch).backward()
            stepper.step()
            stepper.zero_grad()
            average.update()
    assert_same_parameters(model, alone)
    with averages[0].swap(), averages[1].swap():
        assert_same_parameters(model, alone)
    fresh = EMA(model, decay=0.5)
    fresh.load_state_dict(averages[1].state_dict())
    with fresh.swap(), averages[1].swap():
        assert_same_parameters(model, alone)


@spmd(ranks=4)
def test_a_copy_trains_as_the_original() -> None:
    mesh = mesh_of(2, 2)
    model = _annotated(mesh)
    clone = copy.deepcopy(model)
    rank = mesh["dp"].get_local_rank()
    train(model, batches(model, rank, 2, 2))
    train(clone, batches(clone, rank, 2, 2))
    _assert_same(clone.state_dict(), {k: full(v).detach() for k, v in model.state_dict().items()})
    assert isinstance(clone.head, nn.Linear)
