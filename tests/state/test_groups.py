"""State of which groups of ranks hold their own: never saved as if it were everybody's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable import (
    EMA,
    Streamed,
    declare_part,
    export,
    full_state_dict,
    fully_shard,
    replicate,
    stream_full,
)
from composable.errors import RanksDisagreeError
from tests.helpers.logged import logged
from tests.helpers.mixtures import SCHEMES, Mixture, mixture, sharded
from tests.helpers.world import spmd
from tests.tensor_parallel.models import mesh_of

_SAVING: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "full_state_dict": full_state_dict,
    "stream_full": lambda model: dict(stream_full(model)),
    "stream_full since": lambda model: dict(stream_full(model, since=Streamed())),
    "export": lambda model: export(model, _folder() / "out"),
}


def _folder() -> Path:
    reported = [tempfile.mkdtemp()]
    dist.broadcast_object_list(reported)
    return Path(reported[0])


@spmd(ranks=[2, 4])
def test_experts_of_which_each_group_has_others_are_refused_on_all_ranks() -> None:
    match = r"'expert\..*' is on \d of the . ranks of the model, and rank .*declare_part\(\)"
    for annotate in SCHEMES.values():
        model, mesh = mixture(annotate)
        for save in _SAVING.values():
            with pytest.raises(RanksDisagreeError, match=match):
                save(model)
        # by itself, on the ranks that share it
        mine = full_state_dict(model.expert, rank0_only=False)
        expected = Mixture(mesh.get_local_rank("experts")).expert
        torch.testing.assert_close(mine, dict(expected.state_dict()))


@spmd(ranks=[2, 4])
def test_modules_on_meshes_of_their_own_are_saved_where_all_groups_have_the_same() -> None:
    for annotate in SCHEMES.values():
        model, _ = mixture(annotate)
        same = Mixture(3)
        model.load_state_dict(same.state_dict())
        for save in _SAVING.values():
            save(model)
        found = full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(found, dict(same.state_dict()))


@spmd(ranks=4)
def test_single_parameters_on_a_mesh_of_their_own_are_refused_if_plain_and_saved_as_parts() -> None:
    mesh = mesh_of(2, 2, names=("dp", "ep"))
    for how in ("plain", "part", "DTensor"):
        torch.manual_seed(0)
        model, whole = nn.Linear(6, 4), torch.randn(4, 6)
        own = whole.chunk(2)[mesh.get_local_rank("ep")].clone()
        weight = nn.Parameter(own)
        if how == "part":
            declare_part(weight, mesh["ep"], [Shard(0)])
        elif how == "DTensor":
            weight = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)]))
        model.weight = weight

        def place(parameter: nn.Parameter, own: nn.Parameter = weight) -> Any:
            return (Shard(0), mesh["dp"]) if parameter is own else None

        fully_shard(model, mesh=mesh["dp", "ep"]._flatten("all"), shard_placement_fn=place)
        if how == "plain":
            with pytest.raises(RanksDisagreeError, match=r"'weight' is on 2 of the 4 ranks"):
                full_state_dict(model)
        else:
            found = full_state_dict(model, rank0_only=False)["weight"]
            torch.testing.assert_close(found, whole)


@spmd(ranks=4)
def test_a_state_dict_of_plain_experts_says_once_that_it_has_those_of_one_group() -> None:
    model, _ = mixture(sharded)
    with logged() as lines:
        assert isinstance(model.expert.state_dict()["up.weight"], DTensor)
        full_state_dict(model.expert)
        EMA(model.expert, decay=0.5).state_dict()
    assert not lines
    with logged() as lines:
        for _ in range(2):
            get_model_state_dict(model)
    (line,) = lines
    assert "of unit 'expert', which is on 2 of the 4 ranks" in line
    assert "declare_part()" in line
    again, _ = mixture(sharded)
    with logged() as lines:
        EMA(again, decay=0.5).state_dict()
    assert len(lines) == 1


@spmd(ranks=4)
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_stages_of_pipelines_and_models_on_one_mesh_are_nobodys_parts(
    verb: Callable[..., nn.Module],
) -> None:
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    torch.manual_seed(mesh.get_local_rank("pp"))
    stage = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    expected = {name: value.clone() for name, value in stage.state_dict().items()}
    fully_shard(stage[0], mesh=mesh["dp"])
    verb(stage, mesh=mesh["dp"])
    with logged() as lines:
        stage.state_dict()
        torch.testing.assert_close(full_state_dict(stage, rank0_only=False), expected)
    assert not lines
