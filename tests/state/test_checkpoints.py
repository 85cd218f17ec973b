"""Checkpoints by `torch.distributed.checkpoint`: other numbers of ranks, other plans, asynchronous,
Hugging Face.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import Optimizer

from composable import EMA, full_state_dict, fully_shard, materialize
from tests.helpers.world import Pool, current_device, need_devices, spmd
from tests.state.models import PLANS, Block, Net, plain, train

# What torch's checkpoints warn of by themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


def _optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _annotated(plan: str | None, seed: int = 0) -> Net:
    model = plain(seed)
    if plan == "fsdp2":
        for block in model.blocks:
            fsdp2(block)
        fsdp2(model)
    elif plan is not None:
        PLANS[plan](model)
    return model


def _save(plan: str, folder: str) -> list[float]:
    model = _annotated(plan)
    optimizer = _optimizer(model)
    train(model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return train(model, optimizer, range(2, 4))


def _resume(plan: str | None, folder: str) -> list[float]:
    model = _annotated(plan, seed=9)
    optimizer = _optimizer(model)
    weights, state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    return train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("saved", ["fully_shard", "hybrid", "replicate inside fully_shard"])
def test_another_number_of_ranks_and_another_plan_train_on(
    pool: Pool, saved: str, device: str, tmp_path: Path
) -> None:
    need_devices(device, 4)
    expected = pool.run(4, _save, saved, str(tmp_path), device=device)[0]
    for ranks, plans in {
        1: ("fully_shard", None),
        2: ("fully_shard", "replicate", "hybrid", None),
        3: ("fully_shard", "replicate inside fully_shard"),
        4: ("hybrid", "replicate", "one unit"),
    }.items():
        for plan in plans:
            for losses in pool.run(ranks, _resume, plan, str(tmp_path), device=device):
                torch.testing.assert_close(
                    losses, expected, rtol=1e-4, atol=1e-6, msg=f"{plan} on {ranks} ranks"
                )


@pytest.mark.beyond_sim(
    "torch's own gradients lie in memory of its reduction's stream, which the detector takes for a"
    " race"
)
def test_checkpoints_go_to_and_from_fsdp2(pool: Pool, device: str, tmp_path: Path) -> None:
    need_devices(device, 2)
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected = pool.run(2, _save, "fsdp2", theirs, device=device)
    losses = [
        pool.run(2, _save, "fully_shard", ours, device=device),
        pool.run(2, _resume, "fully_shard", theirs, device=device),
        pool.run(2, _resume, "fsdp2", ours, device=device),
    ]
    for each in losses:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-6)


@spmd(ranks=2)
def test_plain_files_load_and_ours_load_there(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.pt"
    expected = plain(1)
    torch.save(expected.state_dict(), path)
    model = _annotated("fully_shard")
    model.load_state_dict(torch.load(path))
    full = full_state_dict(model, rank0_only=False)
    torch.save(full, path)
    plain().load_state_dict(torch.load(path))
    for name, value in expected.state_dict().items():
        assert torch.equal(full[name], value.cpu()), name


@spmd(ranks=2)
def test_a_file_of_one_rank_is_refused_on_another(tmp_path: Path) -> None:
    model = _annotated("fully_shard")
    path = tmp_path / "model.pt"
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    before = full_state_dict(model, rank0_only=False)
    loaded = torch.load(path, weights_only=False)
    if dist.get_rank():
        with pytest.raises(
            RuntimeError,
            match=(
                r'"blocks\.0\.up\.weight" is the shard of another rank, whose state dict'
                r" torch\.save"
            ),
        ):
            model.load_state_dict(loaded)
    else:
        model.load_state_dict(loaded)
    after = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@spmd(ranks=2)
def test_a_model_of_the_meta_device_takes_rank_0s_weights() -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model, policy={Block})
    torch.manual_seed(0)
    materialize(model)
    expected = plain(7)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(
        model, expected.state_dict() if dist.get_rank() == 0 else {}, options=options
    )
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, expected.state_dict()[name].cpu()), name


@spmd(ranks=2)
def test_a_part_of_a_checkpoint_loads(tmp_path: Path) -> None:
    model = _annotated("fully_shard")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    other = _annotated("fully_shard", seed=1)
    wanted = {
        "model": {
            name: value
            for name, value in other.state_dict().items()
            if name.startswith("blocks.0.")
        }
    }
    dcp.load(wanted, checkpoint_id=tmp_path)
    other.load_state_dict(wanted["model"], strict=False)
    found, saved = full_state_dict(other, rank0_only=False), plain().state_dict()
    kept = plain(1).state_dict()
    for name, value in found.items():
        assert torch.equal(value, (saved if name.startswith("blocks.0.") else kept)[name].cpu()), (
            name
        )


@spmd(ranks=2)
def test_optimizer_state_goes_by_name_and_leaves_frozen_parameters_out() -> None:
    model = _annotated("fully_shard")
    model.blocks[0].up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer, range(1))
    state = get_optimizer_state_dict(model, optimizer)
    assert "blocks.1.up.weight" in state["state"]
    assert "blocks.0.up.weight" not in state["state"]


def _asynchronous(folder: str, process: bool) -> None:
    model = _annotated("fully_shard")
    optimizer = _optimizer(model)
    train(model, optimizer, range(1))
    weights = get_model_state_dict(model)
    expected = full_state_dict(model, rank0_only=False)
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    if process:  # which a rank of the tests, a daemon, may not start otherwise
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    stager = DefaultStager(StagingOptions(False, True, True, False))
    # collectives of two threads in one group would be paired wrongly
    group = dist.new_group(backend="gloo")
    response = dcp.async_save(
        {"model": weights},
        checkpoint_id=folder,
        async_checkpointer_type=kind,
        async_stager=stager,
        process_group=group,
    )
    response.staging_completion.result()  # before parameters change
    train(model, optimizer, range(1, 3))
    response.upload_completion.result()
    stager.close()
    other = _annotated("fully_shard", seed=1)
    loaded = {"model": get_model_state_dict(other)}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    for name, value in full_state_dict(other, rank0_only=False).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_an_asynchronous_save_has_the_weights_of_its_time(
    pool: Pool, process: bool, device: str, tmp_path: Path
) -> None:
    need_devices(device, 2)
    pool.run(2, _asynchronous, str(tmp_path), process, spoils=process, device=device)


@pytest.mark.parametrize("consolidated", [False, True])
@spmd(ranks=2)
def test_safetensors_of_hugging_face_are_written_and_read(
    tmp_path: Path, consolidated: bool
) -> None:
    model = _annotated("fully_shard")
    weights = {
        name: value for name, value in get_model_state_dict(model).items() if name != "head.weight"
    }
    if consolidated:  # torch 2.13 consolidates no integers
        weights = {name: value for name, value in weights.items() if value.is_floating_point()}
    names = dict.fromkeys(weights, 1)
    writer = HuggingFaceStorageWriter(
        tmp_path, names, save_distributed=True, enable_consolidation=consolidated
    )
    dcp.save(weights, storage_writer=writer)
    expected = plain().state_dict()
    if consolidated and dist.get_rank() == 0:
        (file,) = tmp_path.glob("*.safetensors")
        read = load_file(file)
        assert all(torch.equal(read[name], expected[name].cpu()) for name in weights)
    if not consolidated:
        other = _annotated("hybrid", seed=1)
        loaded = {
            name: value for name, value in other.state_dict().items() if name != "head.weight"
        }
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(tmp_path))
        for name, value in full_state_dict(other, rank0_only=False).items():
            assert torch.equal(value, expected[name].cpu()), name


def _save_averages(folder: str) -> dict[str, Tensor]:
    model = _annotated("fully_shard")
    ema, optimizer = EMA(model, decay=0.5), _optimizer(model)
    train(model, optimizer, range(2))
    ema.update()
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder)
    with ema.swap():
        return full_state_dict(model, rank0_only=False)


def _load_averages(folder: str, expected: dict[str, Tensor]) -> None:
    model = _annotated("hybrid", seed=1)
    ema = EMA(model, decay=0.1)
    loaded = {"ema": ema.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    ema.load_state_dict(loaded["ema"])
    assert ema.state_dict()["decay"] == 0.5
    with ema.swap():
        found = full_state_dict(model, rank0_only=False)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_averages_are_loaded_by_another_number_of_ranks(
    pool: Pool, device: str, tmp_path: Path
) -> None:
    need_devices(device, 4)
    expected = pool.run(4, _save_averages, str(tmp_path), device=device)[0]
    pool.run(2, _load_averages, str(tmp_path), expected, device=device)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@spmd(ranks=2)
def test_files_of_each_rank_go_on_where_they_were_saved(tmp_path: Path, mmap: bool) -> None:
    model = _annotated("fully_shard")
    optimizer = _optimizer(model)
    train(model, optimizer, range(2))
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = train(model, optimizer, range(2, 4))
    fresh = _annotated("fully_shard", seed=1)
    again = _optimizer(fresh)
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    assert train(fresh, again, range(2, 4)) == expected


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW for each": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
}


def _with_a_number() -> Net:
    """A parameter without dimensions, whose state looks like one number for all elements."""
    model = plain()
    model.temperature = nn.Parameter(torch.tensor(1.5, device=current_device()))
    model.register_forward_hook(lambda module, args, output: output * module.temperature)
    PLANS["fully_shard"](model)
    return model


@pytest.mark.parametrize("kind", _OPTIMIZERS)
@spmd(ranks=2)
def test_an_optimizer_goes_on_from_a_full_state_dict(kind: str) -> None:
    """Of fresh ones, and of those that it is of."""
    options = StateDictOptions(full_state_dict=True)
    model = _with_a_number()
    first = _OPTIMIZERS[kind](model.parameters())
    train(model, first, range(2))
    weights, state = copy.deepcopy(get_state_dict(model, first, options=options))
    expected = train(model, first, range(2, 4))
    fresh = _with_a_number()
    for each, stepping in ((fresh, _OPTIMIZERS[kind](fresh.parameters())), (model, first)):
        set_state_dict(
            each,
            stepping,
            model_state_dict=weights,
            optim_state_dict=copy.deepcopy(state),
            options=options,
        )
        torch.testing.assert_close(train(each, stepping, range(2, 4)), expected)
