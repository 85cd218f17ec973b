"""`describe`: the units of a model as a table and as plain values."""

# Tables are compared word for word, each row on one line.
# ruff: noqa: E501

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import (
    checkpoint,
    contract,
    describe,
    fully_shard,
    keep_unsharded,
    replicate,
    unshard,
)
from composable.report.describe import readable_bytes
from tests.helpers.logged import logged
from tests.helpers.world import Pool, current_device, spmd


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))[..., :16]
        return y


def _model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


def test_a_model_without_annotations_is_one_line() -> None:
    assert_text(
        str(describe(_model())),
        """\
unit             module      annotation  params  numel     bytes  per rank  dtype    placement  after fwd  state
----------------------------------------------------------------------------------------------------------------
(not annotated)  Sequential  -               10  1,284  5.02 KiB  5.02 KiB  float32  local      -          -
----------------------------------------------------------------------------------------------------------------
total                                        10  1,284  5.02 KiB  5.02 KiB""",
    )


def test_without_a_process_group_parameters_are_local_and_nothing_is_gathered() -> None:
    model = _model()
    model[2].half()
    checkpoint(model[0])
    fully_shard(model, policy={Block}, reshard_after_forward=False)
    assert_text(
        str(describe(model)),
        """\
unit    module      annotation                params  numel     bytes  per rank  dtype    placement  after fwd  state
---------------------------------------------------------------------------------------------------------------------
(root)  Sequential  fully_shard                    2     68     136 B     136 B  float16  local      keep       -
0       Block       fully_shard + checkpoint       4    608  2.38 KiB  2.38 KiB  float32  local      keep       -
1       Block       fully_shard                    4    608  2.38 KiB  2.38 KiB  float32  local      keep       -
---------------------------------------------------------------------------------------------------------------------
total                                             10  1,284  4.88 KiB  4.88 KiB""",
    )


def test_replicated_sharded_and_other_parameters_have_rows_of_their_own() -> None:
    model = _model()
    replicate(model[0])
    fully_shard([model[1].linear, model[1].norm])
    assert_text(
        str(describe(model)),
        """\
unit             module              annotation   params  numel     bytes  per rank  dtype    placement   after fwd  state
--------------------------------------------------------------------------------------------------------------------------
0                Block               replicate         4    608  2.38 KiB  2.38 KiB  float32  replicated  -          -
1.linear         Linear + LayerNorm  fully_shard       4    608  2.38 KiB  2.38 KiB  float32  local       keep last  -
(not annotated)  Sequential          -                 2     68     272 B     272 B  float32  local       -          -
--------------------------------------------------------------------------------------------------------------------------
total                                                 10  1,284  5.02 KiB  5.02 KiB""",
    )


@contract()
def log_calls(module: nn.Module) -> None:
    """A verb that manages no parameters."""


def test_verbs_that_make_no_unit_are_named_with_their_modules() -> None:
    model = _model()
    log_calls(model)
    log_calls(model[0])
    checkpoint(model, policy={nn.Linear})
    fully_shard(model[0])
    assert_text(
        str(describe(model)),
        """\
unit    module      annotation               params  numel     bytes  per rank  dtype    placement  after fwd  state
--------------------------------------------------------------------------------------------------------------------
0       Block       fully_shard + log_calls       4    608  2.38 KiB  2.38 KiB  float32  local      keep last  -
(rest)  Sequential  log_calls                     6    676  2.64 KiB  2.64 KiB  float32  local      -          -
--------------------------------------------------------------------------------------------------------------------
total                                            10  1,284  5.02 KiB  5.02 KiB
log_calls, on modules that are no unit: (root)
checkpoint, on modules that are no unit: 0.linear, 1.linear, 2""",
    )
    assert describe(model).to_dict()["elsewhere"] == {
        "log_calls": ["(root)"],
        "checkpoint": ["0.linear", "1.linear", "2"],
    }


def test_a_model_with_other_verbs_is_not_called_unannotated() -> None:
    model = checkpoint(_model())
    assert [(row.unit, row.annotation) for row in describe(model).rows] == [
        ("(rest)", "checkpoint")
    ]


def _placement(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def _described() -> tuple[str, str]:
    model = nn.Sequential(Block(), nn.Linear(16, 3), nn.Linear(3, 2))
    model[0].scale = nn.Parameter(torch.ones(()))
    model[2].bfloat16()
    fully_shard(model[0], shard_placement_fn=_placement)
    fully_shard(model[1], reshard_after_forward=2)
    fully_shard(model)
    return str(describe(model)), json.dumps(describe(model).to_dict(), sort_keys=True)


def test_sharded_units_have_placements_and_bytes_per_rank(pool: Pool) -> None:
    """Three rows over two ranks: the first rank holds two of them."""
    (first, first_dict), (last, last_dict) = pool.run(2, _described)
    assert_text(
        first,
        """\
unit    module      annotation   params  numel     bytes  per rank  dtype     placement      after fwd     state
------------------------------------------------------------------------------------------------------------------
(root)  Sequential  fully_shard       2      8      16 B       8 B  bfloat16  S(0)           keep last     SHARDED
0       Block       fully_shard       5    609  2.38 KiB  1.19 KiB  float32   R, S(1), S(0)  keep last     SHARDED
1       Linear      fully_shard       2     51     204 B     136 B  float32   S(0)           reshard to 2  SHARDED
------------------------------------------------------------------------------------------------------------------
total                                 9    668  2.59 KiB  1.33 KiB""",
    )
    mine, theirs = json.loads(first_dict), json.loads(last_dict)
    assert [unit.pop("bytes_per_rank") for unit in mine["units"]] == [8, 1220, 136]
    assert [unit.pop("bytes_per_rank") for unit in theirs["units"]] == [8, 1220, 68]
    assert mine["total"].pop("bytes_per_rank") == 1364
    assert theirs["total"].pop("bytes_per_rank") == 1296
    assert mine == theirs
    assert last != first


@spmd(ranks=2)
def test_bytes_of_all_ranks_add_up_to_the_bytes_of_the_unit() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))
    fully_shard(model, policy={nn.Linear})
    held = torch.tensor([row.bytes_per_rank for row in describe(model).rows])
    dist.all_reduce(held)
    assert held.tolist() == [row.bytes for row in describe(model).rows]
    assert [row.bytes for row in describe(model).rows] == [4 * 6, 4 * 42, 4 * 24]


@spmd(ranks=2)
def test_the_state_is_that_of_the_moment() -> None:
    model = _model()
    fully_shard(model, policy={Block})

    def states() -> list[str]:
        return [row.state for row in describe(model).rows]

    assert states() == ["SHARDED"] * 3
    with keep_unsharded(model), torch.no_grad():
        model(torch.ones(1, 16))
        assert states() == ["UNSHARDED"] * 3
    assert states() == ["SHARDED"] * 3
    pending = unshard(model[0], async_op=True)
    assert states() == ["SHARDED", "UNSHARDING", "SHARDED"]
    pending.wait()
    assert states() == ["SHARDED", "UNSHARDED", "SHARDED"]


def test_describing_changes_nothing() -> None:
    model = _model()
    fully_shard(model, policy={Block})
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert str(describe(model)) == str(describe(model)) == repr(describe(model))
    assert describe(model) == describe(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_rows_are_plain_values_in_the_order_of_modules() -> None:
    model = _model()
    fully_shard(model, policy={Block})
    found = json.loads(json.dumps(describe(model).to_dict()))
    assert [unit["unit"] for unit in found["units"]] == ["", "0", "1"]
    assert found["units"][1] == {
        "unit": "0",
        "module": "Block",
        "annotation": "fully_shard",
        "parameters": 4,
        "numel": 608,
        "bytes": 2432,
        "bytes_per_rank": 2432,
        "ranks": 1,
        "dtypes": ["float32"],
        "computes_in": ["float32"],
        "reduces_in": ["float32"],
        "placements": ["local"],
        "after_forward": "keep last",
        "state": "-",
        "checkpointed": False,
        "grad_reduce": "mean",
        "comm_hook": "",
        "offload": "",
    }
    assert found["total"] == {
        "parameters": 10,
        "numel": 1284,
        "bytes": 5136,
        "bytes_per_rank": 5136,
    }


def test_a_model_without_parameters_has_an_empty_table() -> None:
    assert describe(nn.ReLU()).rows == ()
    assert describe(nn.ReLU()).to_dict()["total"]["parameters"] == 0
    assert "total" in str(describe(nn.ReLU()))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3072.00 GiB"),
    ],
)
def test_bytes_have_a_unit(count: int, text: str) -> None:
    assert readable_bytes(count) == text


def test_ignored_parameters_have_a_row_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], ignored_params=[model[1].weight])
    fully_shard(model)
    found = [(row.unit, row.parameters, row.placements) for row in describe(model).rows]
    assert found[-1] == ("(ignored)", 1, ("local",))
    assert sum(row.numel for row in describe(model).rows) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@spmd(ranks=2)
def test_a_mesh_of_one_rank_in_a_world_of_more_is_said_by_a_warning_and_by_describe() -> None:
    device = current_device().type
    for verb in (fully_shard, replicate):
        alone = init_device_mesh(device, (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
        model = _model()
        with logged() as lines:
            for module in (model[0], model):  # as layer by layer
                verb(module, mesh=alone)
        assert [line.partition(":")[0] for line in lines] == ["WARNING"]
        assert "the mesh has one rank, and the world has 2: the Block is" in lines[0]
        found = describe(model)
        assert found.on_one_rank == ("", "0")
        assert "over one rank, while the world has more: nothing is sharded" in str(found)
        assert found.to_dict()["on_one_rank"] == ["", "0"]
    both = init_device_mesh(device, (1, 2), mesh_dim_names=("dp", "tp"))
    column = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(column, both["tp"], {"0": ColwiseParallel()})
    for model, mesh in ((column, both["dp"]), (_model(), None)):
        with logged() as lines:
            fully_shard(model, mesh=mesh)
        assert lines == []
        assert describe(model).on_one_rank == ()
