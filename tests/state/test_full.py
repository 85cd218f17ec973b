"""Whole state dicts, streams of whole tensors, exported folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import Streamed, export, full_state_dict, fully_shard, replicate, stream_full
from composable.errors import RanksDisagreeError
from composable.state import full
from composable.state.full import SMALLEST_FILE, plan_files
from composable.torch_private import local_of
from tests.helpers.world import Pool, need_devices, spmd
from tests.state.models import PLANS, Net, plain, tokens


def _annotated(plan: str, seed: int = 0) -> Net:
    model = plain(seed)
    PLANS[plan](model)
    return model


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=[2, 4])
def test_whole_tensors_are_those_of_one_process(plan: str) -> None:
    model, expected = _annotated(plan), plain().state_dict()
    found = full_state_dict(model)
    if dist.get_rank():
        assert found == {}
    else:
        assert list(found) == list(expected)
        assert found["head.weight"] is found["embed.weight"], "tied tensors stay tied"
    for name, value in full_state_dict(model, rank0_only=False, dtype=torch.bfloat16).items():
        wanted = expected[name].cpu()
        assert torch.equal(value, wanted.bfloat16() if wanted.is_floating_point() else wanted), name
        assert type(value) is Tensor
        assert value.is_cpu
    for name, value in stream_full(model):
        assert not isinstance(value, DTensor)
        assert torch.equal(value.cpu(), expected[name].cpu()), name


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=2)
def test_a_stream_since_a_mark_has_what_changed_on_any_rank(plan: str) -> None:
    model, expected = _annotated(plan), plain().state_dict()
    seen = Streamed()
    assert [name for name, _ in stream_full(model, since=seen)] == list(expected)
    assert list(stream_full(model, since=seen)) == []
    last, written = next(
        (name, parameter)
        for name, parameter in reversed(list(model.named_parameters()))
        if parameter.ndim and parameter is not model.embed.weight
    )
    apart = isinstance(written, DTensor) and all(each.is_shard() for each in written.placements)
    if dist.get_rank() == 1 or not apart:
        # a write that no version counter records, on one rank where it has a shard of its own
        local = local_of(written) if isinstance(written, DTensor) else written
        local.data.view(-1)[-1:].add_(1)
    (changed,) = [(name, value.clone()) for name, value in stream_full(model, since=seen)]
    assert changed[0] == last
    assert not torch.equal(changed[1].cpu(), expected[last].cpu())
    stream = stream_full(model, since=seen)
    assert list(stream) == []
    before = dict(seen.checksums)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    model(tokens(0)).square().sum().backward()
    optimizer.step()
    trained = [name for name, _ in stream_full(model, since=seen)]
    assert trained
    assert {name for name, now in seen.checksums.items() if now != before[name]} <= set(trained)


@spmd(ranks=2)
def test_what_an_interrupted_stream_did_not_yield_is_not_marked() -> None:
    model, seen = _annotated("fully_shard"), Streamed()
    stream = stream_full(model, since=seen)
    first = next(stream)[0]
    del stream
    assert first not in seen.checksums
    stream = stream_full(model, since=seen)
    assert next(stream)[0] == first
    next(stream)
    assert list(seen.checksums) == [first]


@pytest.mark.parametrize("plan", PLANS)
@spmd(ranks=2)
def test_a_whole_state_dict_loads_into_every_plan(plan: str) -> None:
    state = full_state_dict(_annotated("fully_shard", seed=1), rank0_only=False)
    model = _annotated(plan)
    model.load_state_dict(state)
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, state[name]), name
    model(tokens(0)).sum().backward()
    plain().load_state_dict(state)


class _Aliases(nn.Module):
    """Buffers over one memory that are not one tensor, and tied entries of which the first is in no
    state dict.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(4, 4, generator=generator)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        nn.init.normal_(self.inner.weight, generator=generator)
        nn.init.zeros_(self.inner.bias)
        nn.init.ones_(self.outer.bias)
        self.register_buffer("decoder", self.inner.weight.detach().t())
        self.register_buffer("cache", table, persistent=False)
        self.register_buffer("transposed", table.t())
        self.register_buffer("table", table)
        self.register_buffer("bits", table.view(torch.int32))
        self.register_buffer("same", table)
        self.register_state_dict_post_hook(_drop_inner)

    def forward(self, x: Tensor) -> Tensor:
        return x


def _drop_inner(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    del state[prefix + "inner.weight"]


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_entries_that_share_memory_have_their_own_values(
    verb: Callable[[nn.Module], nn.Module],
) -> None:
    model, expected = (
        _Aliases(),
        {name: value.clone() for name, value in _Aliases().state_dict().items()},
    )
    verb(model)
    found = full_state_dict(model, rank0_only=False)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert found["same"] is found["table"]


def _export_aliases(folder: str) -> None:
    model = fully_shard(_Aliases())
    expected = {
        name: value.clone() for name, value in full_state_dict(model, rank0_only=False).items()
    }
    export(model, folder)
    found = _exported(Path(folder))
    assert sorted({*expected} - {*found}) == ["same"]
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_a_tied_tensor_is_exported_though_its_first_name_is_not_saved(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, _export_aliases, str(tmp_path / "model"))


@spmd(ranks=2)
def test_partial_mapped_and_cast_state_dicts_load() -> None:
    model, expected = _annotated("fully_shard"), plain(1)
    path = Path(f"/tmp/composable-test-{os.getppid()}-{dist.get_rank()}.pt")
    try:
        torch.save(
            {
                name: value.double() if value.is_floating_point() else value
                for name, value in expected.state_dict().items()
            },
            path,
        )
        mapped = torch.load(path, mmap=True)
        del mapped["blocks.0.scale"]
        result = model.load_state_dict(mapped, strict=False)
        assert result.missing_keys == ["blocks.0.scale"]
    finally:
        path.unlink(missing_ok=True)
    found = full_state_dict(model, rank0_only=False)
    for name, value in expected.state_dict().items():
        wanted = plain(0).blocks[0].scale.detach() if name == "blocks.0.scale" else value
        assert torch.equal(found[name], wanted.cpu()), name
        assert found[name].dtype == value.dtype


# --- export -------------------------------------------------------------------------------------


def _exported(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    return {name: tensor for each in names for name, tensor in load_file(folder / each).items()}


def _export(plan: str, folder: str, monkeypatched: bool) -> None:
    model = _annotated(plan)
    before = full.SMALLEST_FILE
    full.SMALLEST_FILE = 100 if monkeypatched else before  # type: ignore[misc]
    try:
        export(model, folder, dtype=torch.bfloat16)
    finally:
        full.SMALLEST_FILE = before  # type: ignore[misc]
    found = _exported(Path(folder))
    expected = plain().state_dict()
    assert sorted(found) == sorted(name for name in expected if name != "head.weight"), (
        "a tied tensor is written once"
    )
    for name, value in found.items():
        wanted = expected[name].cpu()
        assert torch.equal(value, wanted.bfloat16() if wanted.is_floating_point() else wanted), name
    with pytest.raises((FileExistsError, RanksDisagreeError), match="is not empty"):
        export(model, folder)


@pytest.mark.parametrize("in_many_files", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_an_exported_folder_is_read_by_safetensors(
    pool: Pool, plan: str, in_many_files: bool, device: str, tmp_path: Path
) -> None:
    need_devices(device, 2)
    folder = tmp_path / "model"
    pool.run(2, _export, plan, str(folder), in_many_files, device=device)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is in_many_files
    assert not folder.with_name("model.partial").exists()


def _killed(folder: str) -> None:
    model = _annotated("fully_shard")

    def die(*_: object, **__: object) -> None:
        os._exit(9)

    if dist.get_rank() == 1:
        safetensors.torch.save_file = die
    full.SMALLEST_FILE = 100  # type: ignore[misc]
    export(model, folder)


def test_an_export_that_is_killed_leaves_no_folder_of_that_name(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died with exit code"):
        pool.run(2, _killed, str(tmp_path / "model"), spoils=True, group_timeout=10.0)
    assert not (tmp_path / "model").exists()


@spmd(ranks=2)
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    model = fully_shard(nn.Linear(3, 3))
    folder = "/proc/nothing/model" if dist.get_rank() == 0 else "/tmp/composable-never-written"
    with pytest.raises((OSError, RanksDisagreeError)):
        export(model, folder)


def test_files_are_balanced() -> None:
    sizes = {f"{index}": (index % 7 + 1) * SMALLEST_FILE // 4 for index in range(40)}
    files = plan_files(sizes, ranks=8)
    totals = [sum(sizes[name] for name in names) for names in files]
    assert sorted(name for names in files for name in names) == sorted(sizes)
    assert len(files) == 8
    assert max(totals) < 1.1 * min(totals)
    assert len(plan_files(sizes, ranks=1000)) == sum(sizes.values()) // SMALLEST_FILE, (
        "files of 1 GiB are small enough"
    )
    assert len(plan_files({"a": 10}, ranks=4)) == 1
