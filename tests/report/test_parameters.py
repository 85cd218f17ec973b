"""`describe(model, by="parameter")`: how each parameter rests, and which rank has which rows."""

# Tables are compared word for word, each row on one line.
# ruff: noqa: E501

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable import (
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    keep_unsharded,
    offload_to_host,
    replicate,
    summon_full_params,
)
from composable.report.describe import ParameterDescription
from composable.torch_private import local_tensor
from tests.extensions.rows import Net, Rows, with_rows
from tests.helpers.world import Pool, current_device, spmd
from tests.meshes.mixtral import Experts, Mixtral, MoE, distribute_experts
from tests.meshes.test_dims import Dims
from tests.tensor_parallel.models import (
    GPT,
    MLP,
    Block,
    made,
    mesh_of,
    parallelize_gpt,
    parallelize_mlp,
)
from tests.tensor_parallel.test_parts import PartMLP

Wholes = dict[str, Tensor]  # by name, before anything was annotated
Program = Callable[[], tuple[nn.Module, Wholes]]


def _wholes(model: nn.Module) -> Wholes:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in named}


def _linears() -> nn.Sequential:
    """Seven rows and three: uneven over two ranks; over four, the last one has none of three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[1].scale = nn.Parameter(torch.ones(()))
    model.to(current_device())
    model[3].other = model[3].weight  # tied
    return model


def _uneven() -> tuple[nn.Module, Wholes]:
    model = _linears()
    wholes = _wholes(model)
    fully_shard(model, policy={nn.Linear})
    return model, wholes


def _columns() -> tuple[nn.Module, Wholes]:
    model = _linears()
    wholes = _wholes(model)
    fully_shard(
        model, shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None
    )
    return model, wholes


def _mixed() -> tuple[nn.Module, Wholes]:
    """Both verbs, a frozen layer, and one that no verb reaches."""
    model = nn.Sequential(*_linears(), nn.Linear(3, 2, device=current_device()))
    model[3].requires_grad_(False)
    wholes = _wholes(model)
    replicate(model[2])
    for each in (model[0], model[1], model[3]):
        fully_shard(each)
    return model, wholes


def _hybrid() -> tuple[nn.Module, Wholes]:
    model = _linears()
    wholes = _wholes(model)
    mesh = init_device_mesh(current_device().type, (dist.get_world_size() // 2, 2))
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    return model, wholes


def _tensor_parallel() -> tuple[nn.Module, Wholes]:
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    model: Any = made(lambda: GPT(tied=True))
    wholes = _wholes(model)
    parallelize_gpt(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block})
    return model, wholes


def _uneven_tensor_parallel() -> tuple[nn.Module, Wholes]:
    """Seven rows over two ranks, and over two more: the rows of a rank are shards of a part."""
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    model = made(lambda: MLP(hidden=7))
    wholes = _wholes(model)
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, wholes


def _replicated_tensor_parallel() -> tuple[nn.Module, Wholes]:
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    model = made(lambda: MLP(hidden=8))
    wholes = _wholes(model)
    parallelize_mlp(model, mesh["tp"])
    replicate(model, mesh=mesh["dp"])
    return model, wholes


def _declared_parts() -> tuple[nn.Module, Wholes]:
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    model, wholes = PartMLP(mesh["tp"], hidden=7), _wholes(PartMLP(hidden=7))
    fully_shard(model, mesh=mesh["dp"])
    return model, wholes


def _experts() -> tuple[nn.Module, Wholes]:
    """Experts over one dimension of the mesh, sharded over the other; the rest over both."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("efsdp", "ep"))
    model: Any = made(Mixtral)
    wholes = _wholes(model)
    distribute_experts(model, mesh["ep"])
    of_experts = {
        id(parameter)
        for each in model.modules()
        if isinstance(each, Experts)
        for parameter in each.parameters()
    }

    def place(parameter: nn.Parameter) -> Any:
        return (Shard(0), mesh["efsdp"]) if id(parameter) in of_experts else None

    fully_shard(
        model, policy={MoE}, mesh=mesh, dp_mesh_dims=Dims(("efsdp", "ep")), shard_placement_fn=place
    )
    return model, wholes


def _extended() -> tuple[nn.Module, Wholes]:
    model = with_rows(Net(hidden=5))
    wholes = _wholes(Net(hidden=5))
    fully_shard(model, policy={nn.Sequential})
    return model, wholes


PROGRAMS: Final[dict[str, Program]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _uneven,
        _columns,
        _mixed,
        _hybrid,
        _tensor_parallel,
        _uneven_tensor_parallel,
        _replicated_tensor_parallel,
        _declared_parts,
        _experts,
        _extended,
    )
}


def _wrong_slices(model: nn.Module, found: ParameterDescription, wholes: Wholes) -> list[str]:
    """The parameters of which this rank has something else than its slices of the whole."""
    held = dict(model.named_parameters())
    wrong = []
    for row in found.rows:
        local = local_tensor(held[row.name].detach())
        local = local.values if isinstance(local, Rows) else local
        cut = wholes[row.name][tuple(slice(*ends) for ends in row.slices)]
        if row.shape != tuple(wholes[row.name].shape) or not torch.equal(local.cpu(), cut.cpu()):
            wrong.append(row.name)
    return wrong


@pytest.mark.parametrize("program", PROGRAMS)
@spmd(ranks=[2, 4])
def test_the_slices_of_a_rank_are_what_it_has_of_the_whole(program: str) -> None:
    model, wholes = PROGRAMS[program]()
    found = describe(model, by="parameter")
    assert [row.name for row in found.rows] == [name for name, _ in model.named_parameters()]
    assert _wrong_slices(model, found, wholes) == []


@spmd(ranks=2)
def test_slices_of_another_rank_are_noticed() -> None:
    model, wholes = _uneven()
    (row, *rest) = describe(model, by="parameter").rows
    other = row.parts[1 - dist.get_rank()].slices
    described = ParameterDescription((replace(row, slices=other), *rest))
    assert _wrong_slices(model, described, wholes) == ["0.weight"]


@pytest.mark.parametrize("program", PROGRAMS)
@spmd(ranks=[2, 4])
def test_each_rank_says_of_the_others_what_they_say_of_themselves(program: str) -> None:
    model, _ = PROGRAMS[program]()
    own = {row.name: row for row in describe(model, by="parameter").rows}
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, {name: row.slices for name, row in own.items()})
    for name, row in own.items():
        ranks = [rank for part in row.parts for rank in part.ranks]
        assert len(ranks) == len(set(ranks))
        assert dist.get_rank() in ranks or not ranks
        for part in row.parts:
            assert {reported[rank][name] for rank in part.ranks} == {part.slices}


@pytest.mark.parametrize("program", ["uneven", "columns", "mixed", "hybrid", "extended"])
@spmd(ranks=4)
def test_with_its_padding_a_shard_is_as_large_as_that_of_any_rank(program: str) -> None:
    model, _ = PROGRAMS[program]()
    held = dict(model.named_parameters())
    rows = describe(model, by="parameter").rows
    own = [local_tensor(held[row.name]).numel() + row.padding for row in rows]
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, own)
    assert reported == [own] * dist.get_world_size()


def _annotated() -> str:
    model = nn.Sequential(*_linears(), nn.Linear(3, 2, device=current_device()))
    model[3].requires_grad_(False)
    replicate(model[2])
    kept = id(model[1].weight)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda parameter: (
            parameter.dtype if id(parameter) == kept else None
        ),
    )
    fully_shard(model, policy={nn.Linear}, mp_policy=policy, ignored_params=[model[4].bias])
    return str(describe(model, by="parameter"))


def test_a_row_says_how_a_parameter_rests_and_in_what_it_is_computed_with(pool: Pool) -> None:
    first, last = pool.run(2, _annotated)
    assert_text(
        first,
        """\
parameter           unit       shape   at rest       dtype    computes in  reduced in  this rank  on ranks
--------------------------------------------------------------------------------------------------------------------
0.weight            0          7 x 5   DTensor S(0)  float32  bfloat16     float32     [0:4]      0: [0:4]  1: [4:7]
0.bias              0          7       DTensor S(0)  float32  bfloat16     float32     [0:4]      0: [0:4]  1: [4:7]
1.weight            1          3 x 7   DTensor S(0)  float32  float32      float32     [0:2]      0: [0:2]  1: [2:3]
1.bias              1          3       DTensor S(0)  float32  bfloat16     float32     [0:2]      0: [0:2]  1: [2:3]
1.scale             1          scalar  DTensor R     float32  bfloat16     float32     all        0,1: all
2.weight            2          3       DTensor R     float32  float32      float32     all        0,1: all
2.bias              2          3       DTensor R     float32  float32      float32     all        0,1: all
3.weight = 3.other  3          3 x 3   DTensor S(0)  float32  bfloat16     frozen      [0:2]      0: [0:2]  1: [2:3]
3.bias              3          3       DTensor S(0)  float32  bfloat16     frozen      [0:2]      0: [0:2]  1: [2:3]
4.weight            4          2 x 3   DTensor S(0)  float32  bfloat16     float32     [0:1]      0: [0:1]  1: [1:2]
4.bias              (ignored)  2       plain         float32  -            -           all        -""",
    )
    assert_text(
        last.splitlines()[2],
        """0.weight            0          7 x 5   DTensor S(0), padded by 5  float32  bfloat16     float32     [4:7]      0: [0:4]  1: [4:7]""",
    )


def _shapes_of_a_mesh() -> str:
    return str(describe(_hybrid()[0], by="parameter"))


def test_copies_of_a_hybrid_mesh_are_named_together(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(4, _shapes_of_a_mesh)[3].splitlines()[:5]),
        """\
parameter           unit    shape   at rest                       dtype    computes in  reduced in  this rank  on ranks
-------------------------------------------------------------------------------------------------------------------------------------
0.weight            0       7 x 5   DTensor R, S(0), padded by 5  float32  float32      float32     [4:7]      0,2: [0:4]  1,3: [4:7]
0.bias              0       7       DTensor R, S(0), padded by 1  float32  float32      float32     [4:7]      0,2: [0:4]  1,3: [4:7]
1.weight            1       3 x 7   DTensor R, S(0), padded by 7  float32  float32      float32     [2:3]      0,2: [0:2]  1,3: [2:3]""",
    )


def _of_tensor_parallel() -> str:
    return str(describe(_uneven_tensor_parallel()[0], by="parameter"))


def test_rows_of_tensor_parallel_parameters_are_those_of_the_whole(pool: Pool) -> None:
    assert_text(
        pool.run(4, _of_tensor_parallel)[1],
        """\
parameter    unit    shape  at rest             dtype    computes in  reduced in  this rank   on ranks
--------------------------------------------------------------------------------------------------------------------------------------------------------
up.weight    (root)  7 x 6  DTensor S(0), S(0)  float64  float64      float64     [4:6]       0: [0:2]  1: [4:6]  2: [2:4]  3: [6:7]
up.bias      (root)  7      DTensor S(0), S(0)  float64  float64      float64     [4:6]       0: [0:2]  1: [4:6]  2: [2:4]  3: [6:7]
down.weight  (root)  6 x 7  DTensor S(1), S(0)  float64  float64      float64     [0:3, 4:7]  0: [0:3, 0:4]  1: [0:3, 4:7]  2: [3:6, 0:4]  3: [3:6, 4:7]
down.bias    (root)  6      DTensor R, S(0)     float64  float64      float64     [0:3]       0,1: [0:3]  2,3: [3:6]""",
    )


def _of_extension() -> str:
    return str(describe(_extended()[0], by="parameter"))


def test_a_class_with_the_extension_protocol_is_named(pool: Pool) -> None:
    assert_text(
        pool.run(2, _of_extension)[0].splitlines()[2],
        """blocks.0.0.weight  blocks.0  5 x 6  DTensor S(0), Rows  float32  float32      float32     [0:3]      0: [0:3]  1: [3:5]""",
    )


@spmd(ranks=2)
def test_modules_compute_in_what_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(current_device())
    policy = MixedPrecisionPolicy(torch.bfloat16, full_precision_classes=(nn.LayerNorm,))
    fully_shard(model, mp_policy=policy, sync_module_states="broadcast")
    seen: dict[str, str] = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda module, *_, name=name: seen.update(
                {f"{name}.weight": str(module.weight.dtype).removeprefix("torch.")}
            )
        )
    model(torch.ones(2, 4, device=current_device()))
    said = {row.name: row.computes_in for row in describe(model, by="parameter").rows}
    assert seen == {name: said[name] for name in seen}
    assert set(seen.values()) == {"bfloat16", "float32"}


@spmd(ranks=2)
def test_rows_are_the_same_while_modules_hold_whole_parameters() -> None:
    model, _ = _uneven()
    before = describe(model, by="parameter")
    with keep_unsharded(model), torch.no_grad():
        model(torch.ones(1, 5, device=current_device()))
        assert describe(model, by="parameter") == before
    with summon_full_params(model):
        assert describe(model, by="parameter") == before
    inside: list[ParameterDescription] = []
    model[1].register_forward_hook(lambda *_: inside.append(describe(model, by="parameter")))
    model(torch.ones(1, 5, device=current_device()))
    assert inside == [before]


@spmd(ranks=2)
def test_a_child_that_has_its_parent_is_described_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].parent = model
    fully_shard(model, policy={nn.Linear}, sync_module_states="broadcast")
    assert [(row.name, row.tied, row.unit) for row in describe(model, by="parameter").rows] == [
        ("0.weight", (), "0"),
        ("0.bias", (), "0"),
        ("1.weight", (), "1"),
        ("1.bias", (), "1"),
    ]


@spmd(ranks=2)
def test_a_part_of_a_model_has_the_unit_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model, sync_module_states="broadcast")
    (row, _) = describe(model[0], by="parameter").rows
    assert (row.name, row.unit, row.annotation) == ("0.weight", "(root)", "fully_shard")
    # also at a place outside of the unit, which got the parameter later
    around = nn.Sequential(nn.Linear(4, 4, bias=False), model)
    around[0].weight = model[1].weight
    tied, *_ = describe(around, by="parameter").rows
    assert (tied.name, tied.tied, tied.unit) == ("0.weight", ("1.1.weight",), "1")
    assert [(row.unit, row.parameters) for row in describe(around).rows] == [("1", 4)]


@spmd(ranks=2)
def test_a_model_that_rests_on_the_host_has_its_rows() -> None:
    model, wholes = _uneven()
    with offload_to_host(model):
        found = describe(model, by="parameter")
        assert _wrong_slices(model, found, wholes) == []
        assert {row.device for row in found.rows} == {"cpu"}
        # where ranks compute on the host, it has not moved
        computes_in = "float32" if current_device().type == "cpu" else ""
        assert {row.computes_in for row in found.rows} == {computes_in}


@spmd(ranks=2)
def test_dtensors_of_no_unit_have_their_rows() -> None:
    mesh = init_device_mesh(current_device().type, (2,))
    model = made(lambda: MLP(hidden=7))
    wholes = _wholes(model)
    parallelize_mlp(model, mesh)
    found = describe(model, by="parameter")
    assert _wrong_slices(model, found, wholes) == []
    assert isinstance(model.up.weight, DTensor)
    assert {row.unit for row in found.rows} == {"(not annotated)"}
    assert [part.ranks for part in found.rows[0].parts] == [(0,), (1,)]


def test_without_a_process_group_parameters_are_plain_and_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0])
    assert_text(
        str(describe(model, by="parameter")),
        """\
parameter  unit             shape  at rest  dtype    computes in  reduced in  this rank  on ranks
-------------------------------------------------------------------------------------------------
0.weight   0                3 x 2  plain    float32  float32      float32     all        -
0.bias     0                3      plain    float32  float32      float32     all        -
1.weight   (not annotated)  1 x 3  plain    float32  -            -           all        -
1.bias     (not annotated)  1      plain    float32  -            -           all        -""",
    )


def test_rows_are_plain_values() -> None:
    model = fully_shard(nn.Linear(2, 3, bias=False))
    assert json.loads(json.dumps(describe(model, by="parameter").to_dict())) == {
        "parameters": [
            {
                "name": "weight",
                "tied": [],
                "unit": "",
                "annotation": "fully_shard",
                "shape": [3, 2],
                "placements": [],
                "local_class": "Tensor",
                "device": "cpu",
                "dtype": "float32",
                "computes_in": "float32",
                "reduces_in": "float32",
                "padding": 0,
                "slices": [[0, 3], [0, 2]],
                "parts": [],
                "trainable": True,
            }
        ]
    }


def _in_a_terminal() -> str:
    console = pytest.importorskip("rich.console")
    model, _ = _uneven()
    written = io.StringIO()
    shown = console.Console(file=written, width=140)
    shown.print(describe(model, by="parameter"))
    shown.print(describe(model))
    return written.getvalue()


def test_rich_shows_the_same_cells(pool: Pool) -> None:
    said = pool.run(2, _in_a_terminal)[1]
    assert "0: [0:4]  1: [4:7]" in said  # not taken for markup
    assert "3.weight = 3.other" in said
    assert "Sequential" in said
    assert "total" in said
