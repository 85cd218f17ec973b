"""Annotations and arguments that cannot be are refused at once, with words that say what to do, and
leave the module as it was.
"""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable import checkpoint, describe, fully_shard, offload_activations, registry, replicate
from composable.fsdp2 import fully_shard as face
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.odd import Layer, Nested
from tests.helpers.battery.transformers import Block, Transformer
from tests.helpers.compare import assert_same_training, full_parameters
from tests.helpers.logged import logged
from tests.helpers.placed import placed
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, spmd

Verb = Callable[..., Any]
Refuse = Callable[[], list[str]]
REFUSED: Final[dict[str, tuple[Refuse, list[str]]]] = {}


def says(*texts: str) -> Callable[[Refuse], Refuse]:
    """What the decorated function does is refused with these words, on both of two ranks."""

    def add(refuse: Refuse) -> Refuse:
        REFUSED[refuse.__name__] = refuse, list(texts)
        return refuse

    return add


def _refused_by(verb: Verb, *given: dict[str, Any], model: nn.Module | None = None) -> list[str]:
    model = _transformer() if model is None else model
    return [refused(model, lambda each=each: verb(model, **each)) for each in given]


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return placed(Transformer(), current_device())


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(current_device().type, shape, mesh_dim_names=names)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_parameters_of_torchscript_are_refused_by_name(verb: Verb) -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    assert (
        refused(model, lambda: verb(model))
        == f"AnnotationError: {verb.__name__}: parameter '1.weight' of a RecursiveScriptModule"
        " cannot be managed: modules of TorchScript register parameters in their own way."
        " Annotate a module that is not scripted, or leave it out with ignored_params"
    )


# --- order and repetition -----------------------------------------------------------------------


@says(
    *[
        "AnnotationError: 'blocks.0' is inside already-sharded '(root)'; annotate children first,"
        " or use policy="
    ]
    * 2,
    *["AnnotationError: 'blocks.0' is inside already-sharded '(root)'; annotate children first"]
    * 2,
    *[
        "AnnotationError: 'blocks.0' is inside already-replicated '(root)'; annotate children"
        " first, or use policy="
    ]
    * 2,
    *["AnnotationError: 'blocks.0' is inside already-replicated '(root)'; annotate children first"]
    * 2,
)
def a_child_after_its_parent() -> list[str]:
    said = []
    for outer, inner in (
        (fully_shard, fully_shard),
        (fully_shard, replicate),
        (replicate, replicate),
        (replicate, fully_shard),
    ):
        model = outer(_transformer())
        for sync in ("check", "off"):
            said.append(refused(model, lambda: inner(model.blocks[0], sync_module_states=sync)))  # noqa: B023
    return said


@says(
    *[
        f"AlreadyAnnotatedError: {verb} was already applied to 'blocks.1' (at FILE:LINE); to apply"
        f" it anew, call remove(module, {verb}) first"
        for verb in ("fully_shard", "replicate", "checkpoint")
    ]
)
def the_same_verb_twice() -> list[str]:
    said = []
    for verb in (fully_shard, replicate, checkpoint):
        model = _transformer()
        verb(model.blocks[1])
        verb(model.blocks[0])
        said += _refused_by(
            lambda _, verb=verb, model=model: verb(model.blocks[1]), {}, model=model
        )
    return said


@says(
    "ClashError: 'blocks.0' is managed by replicate; a module can be sharded or replicated, not"
    " both. Call remove(module, replicate) first",
    "ClashError: 'blocks.1' is managed by fully_shard; a module can be sharded or replicated, not"
    " both. Call remove(module, fully_shard) first",
)
def a_module_both_sharded_and_replicated() -> list[str]:
    model = _transformer()
    replicate(model.blocks[0])
    fully_shard(model.blocks[1])
    return [
        refused(model, lambda: fully_shard(model.blocks[0])),
        refused(model, lambda: replicate(model.blocks[1])),
    ]


# --- what cannot be a unit ----------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_a_parameter_in_two_units_of_a_policy_goes_to_the_module_around_both() -> None:
    def annotate(model: nn.Module, case: Case) -> None:
        fully_shard(model, policy={nn.Embedding, nn.Linear, Block})
        assert model.get_parameter("embedding.weight") is model.get_parameter("head.weight")

    assert_same_training(BATTERY["transformer with tied embedding"], annotate)


@says(
    *[
        "TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was"
        " sharded as part of another unit already. Annotate both modules alike, as one unit:"
        " fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied"
        " parameters together"
    ]
    * 2
)
def a_parameter_in_two_units_by_hand() -> list[str]:
    model = _transformer()
    fully_shard(model.embedding)
    return [
        refused(model, lambda: fully_shard(model)),
        refused(model, lambda: fully_shard(model.head)),
    ]


_NOT_GATHERED: Final = (
    "has no forward, so its parameters cannot be gathered around one; annotate its children, or"
    " pass policy="
)


@says(
    f"AnnotationError: ModuleList 'blocks' {_NOT_GATHERED}",
    f"AnnotationError: ModuleList 'blocks' {_NOT_GATHERED}",
    "AnnotationError: ModuleList 'blocks' has no forward, so there is no forward to run again;"
    " annotate its children, or pass policy=",
    f"AnnotationError: ModuleDict {_NOT_GATHERED}",
    f"AnnotationError: ModuleList 'blocks' {_NOT_GATHERED}",
)
def containers_without_a_forward() -> list[str]:
    model = _transformer()
    heads = nn.ModuleDict({"a": nn.Linear(2, 2)})
    return [
        *[
            refused(model, lambda verb=verb: verb(model.blocks))
            for verb in (fully_shard, replicate, checkpoint)
        ],
        refused(heads, lambda: fully_shard(heads)),
        refused(model, lambda: fully_shard(model, policy={nn.ModuleList})),
    ]


@spmd(ranks=2)
def test_a_policy_passes_over_containers_without_a_forward() -> None:
    for verb in (fully_shard, replicate, checkpoint, offload_activations):
        model = _transformer()
        with logged() as lines:
            verb(model, policy=lambda _: True)
        assert lines == [
            f"WARNING: {verb.__name__}: the policy picks ModuleList 'blocks'; containers without a"
            " forward are passed over"
        ]
        assert not registry(model.blocks)
        assert all(
            verb.__name__ in registry(module) for module in (model, model.embedding, *model.blocks)
        )


class _Experts(nn.Module):
    """Of several, stacked in one parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(shape[0], device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.up) + self.bias[:, None]


def _sharded(*shape: int, dim: int | None = None, verb: Any = None) -> tuple[list[str], list[int]]:
    """What is logged, and along which dimensions the large parameters are sharded."""
    model = nn.Sequential(_Experts(*shape), _Experts(*shape))
    placement = None if dim is None else (lambda p: Shard(dim) if p.ndim == 3 else None)
    with logged() as lines:
        if verb is None:
            fully_shard(model, policy={_Experts}, shard_placement_fn=placement)
        else:
            verb(model, shard_placement_fn=placement)
    return lines, [unit.up.placements[0].dim for unit in model]  # type: ignore[union-attr]


@spmd(ranks=4)
def test_a_large_parameter_that_would_leave_ranks_empty_is_sharded_along_another_dimension() -> (
    None
):
    assert _sharded(2, 512, 600) == ([], [1, 1])
    assert _sharded(5, 512, 600) == ([], [1, 1])  # two, two, one and none
    assert _sharded(2, 3, 200_000) == ([], [2, 2])
    for shape in ((4, 512, 600), (7, 512, 600), (2, 64, 64)):  # for all ranks; nearly; small
        assert _sharded(*shape) == ([], [0, 0])


@spmd(ranks=4)
def test_a_large_parameter_that_is_made_to_leave_ranks_empty_is_told_once_with_what_to_write() -> (
    None
):
    told = (
        "WARNING: fully_shard: parameter '{}' of unit '{}', (2, 512, 600), is sharded along"
        " dimension 0, which leaves some of 4 ranks empty: gathered, and in messages, it takes 2.0"
        " times its size. Shard it along dimension 1: shard_placement_fn=lambda parameter: Shard(1)"
        " if parameter.shape == (2, 512, 600) else None"
    )
    assert _sharded(2, 512, 600, dim=0) == ([told.format("up", "0")], [0, 0])
    assert _sharded(2, 512, 600, verb=face) == ([told.format("0.up", "(root)")], [0, 0])
    assert _sharded(2, 512, 600, dim=1, verb=face) == ([], [1, 1])
    assert _sharded(2, 64, 64, verb=face) == ([], [0, 0])


@spmd(ranks=4)
def test_tensor_parallel_experts_are_told_of_with_the_shape_that_they_have() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for verb, dim in ((fully_shard, 1), (face, 0)):
        unit = _Experts(2, 512, 1200)
        spread = distribute_tensor(unit.up.detach(), mesh["tp"], [Shard(0)], src_data_rank=None)
        unit.up = nn.Parameter(spread)
        with logged() as lines:
            verb(unit, mesh=mesh["dp"])
        assert unit.up.placements == (Shard(0), Shard(dim))  # type: ignore[attr-defined]
        assert [line.count("parameter.shape == (2, 512, 1200)") for line in lines] == [1] * (
            not dim
        )


class _CallableList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@spmd(ranks=2)
def test_a_container_with_a_forward_is_a_unit() -> None:
    model = fully_shard(_CallableList([nn.Linear(2, 2)]).to(current_device()))
    model(torch.ones(1, 2, device=current_device())).sum().backward()
    assert model[0].weight.grad is not None


@says(
    "AnnotationError: fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without"
    " being called, so nothing would gather its parameters; annotate the MultiheadAttention instead"
)
def the_projection_that_attention_reads_itself() -> list[str]:
    model = nn.MultiheadAttention(4, 2).to(current_device())
    return [refused(model, lambda: fully_shard(model.out_proj))]


@spmd(ranks=2)
def test_the_projection_that_attention_reads_itself_is_merged_under_a_policy() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).to(current_device())
    fully_shard(
        model,
        policy={
            nn.Linear,
            nn.MultiheadAttention,
            nn.modules.linear.NonDynamicallyQuantizableLinear,
        },
    )
    model(torch.ones(1, 3, 4, device=current_device())).sum().backward()
    assert [row.unit for row in describe(model).rows] == ["", "self_attn", "linear1", "linear2"]


# --- ranks that differ --------------------------------------------------------------------------


@says(
    *[
        f"RanksDisagreeError: {verb}: the ranks differ in values: rank 0 has parameter '1.weight'"
        " with fingerprint 0, rank 1 has parameter '1.weight' with fingerprint 4ed118cf600. Pass"
        " sync_module_states='broadcast', or seed equally."
        for verb in ("fully_shard", "replicate")
    ]
)
def different_weights() -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(current_device())
    with torch.no_grad():
        for number, layer in enumerate(model):
            for parameter in layer.parameters():
                parameter.fill_(number * dist.get_rank())
    return [
        refused(model, lambda verb=verb: verb(model, sync_module_states="check"))
        for verb in (fully_shard, replicate)
    ]


@says(
    "RanksDisagreeError: replicate: the ranks differ in verbs: rank 0 has replicate, rank 1 has"
    " fully_shard. Every rank must call the same verbs."
)
def different_verbs() -> list[str]:
    return _refused_by(
        fully_shard if dist.get_rank() else replicate,
        {},
        model=nn.Linear(2, 2).to(current_device()),
    )


def _different_modules(how: str) -> str:
    second = dist.get_rank() == 1
    modules: dict[str, nn.Module] = {"body": nn.Linear(3, 3), "head": nn.Linear(3, 2)}
    if how == "count" and second:
        modules["head"] = nn.Linear(3, 2, bias=False)
    if how == "names" and second:
        modules = {"body": modules["body"], "tail": modules["head"]}
    if how == "order" and second:
        modules = dict(reversed(list(modules.items())))
    if how == "shapes" and second:
        modules["head"] = nn.Linear(3, 4)
    if how == "dtypes" and second:
        modules["head"] = modules["head"].double()
    if how == "frozen" and second:
        modules["head"].requires_grad_(False)
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module.to(current_device()))
    return refused(model, lambda: fully_shard(model))


_PLACES: Final = {
    "count": "rank 0 has 'head.bias' (2,) float32, rank 1 has nothing there",
    "names": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'tail.weight' (2, 3) float32",
    "order": "rank 0 has 'body.weight' (3, 3) float32, rank 1 has 'head.weight' (2, 3) float32",
    "shapes": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (4, 3) float32",
    "dtypes": "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (2, 3) float64",
    "frozen": (
        "rank 0 has 'head.weight' (2, 3) float32, rank 1 has 'head.weight' (2, 3) float32, frozen"
    ),
}


@pytest.mark.parametrize("how", _PLACES)
def test_different_parameters_are_refused_with_the_first_difference_not_a_hang(
    pool: Pool, how: str
) -> None:
    assert (
        same_on_all(pool.run(2, _different_modules, how))
        == f"RanksDisagreeError: fully_shard: the ranks differ in parameters: {_PLACES[how]}. Every"
        " rank must build the same module in the same order."
    )


# --- meshes -------------------------------------------------------------------------------------

_ONE_OR_TWO: Final = (
    "fully_shard takes a mesh of one dimension, or of two: one to replicate over and one to shard"
    " over; this one has 3"
)
_TO_FLATTEN: Final = (
    "To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten());"
    " to train a model on each part of them, pass a slice, mesh[...], or name the data-parallel"
    " dimensions in dp_mesh_dims=."
)
_WHICH: Final = (
    "MeshError: fully_shard: of a mesh of two dimensions, one is sharded over and the other one"
    " replicated over. The names of this one, {}, do not say which: let one contain 'replicate' and"
    " the other one 'shard'. To shard over one dimension alone, pass {}; over both, name them in"
    " dp_mesh_dims=DataParallelMeshDims(shard={})."
)
_ASCENDING: Final = (
    "MeshError: fully_shard: the mesh {} does not list its ranks in ascending order along dimension"
    " 0, which is sharded over, as process groups do. Make it by init_device_mesh, or of"
    " mesh.mesh.sort(0).values."
)


@says(
    f"MeshError: {_ONE_OR_TWO}: ('x', 'y', 'z'). {_TO_FLATTEN}",
    f"MeshError: {_ONE_OR_TWO}: ('pp', 'dp_shard', 'dp_replicate'). {_TO_FLATTEN}",
    f"MeshError: {_ONE_OR_TWO}. {_TO_FLATTEN}",
    "MeshError: replicate takes a mesh of one dimension; this one has 3: ('x', 'y', 'z')."
    f" {_TO_FLATTEN}",
    f"MeshError: replicate takes a mesh of one dimension; this one has 3. {_TO_FLATTEN}",
    _WHICH.format("('dp', 'tp')", 'mesh["dp"] or mesh["tp"]', "('dp', 'tp')"),
    _WHICH.format(
        "('dp_shard', 'cp_shard')",
        'mesh["dp_shard"] or mesh["cp_shard"]',
        "('dp_shard', 'cp_shard')",
    ),
)
def meshes_of_too_many_dimensions_or_of_two_that_do_not_say_which_is_which() -> list[str]:
    three, unnamed = _mesh(1, 2, 1, names=("x", "y", "z")), _mesh(1, 1, 2)
    four = _mesh(1, 1, 2, names=("pp", "dp_shard", "dp_replicate"))
    return [
        *_refused_by(fully_shard, {"mesh": three}, {"mesh": four}, {"mesh": unnamed}),
        *_refused_by(replicate, {"mesh": three}, {"mesh": unnamed}),
        *_refused_by(
            fully_shard,
            {"mesh": _mesh(1, 2, names=("dp", "tp"))},
            {"mesh": _mesh(2, 1, names=("dp_shard", "cp_shard"))},
        ),
    ]


@says(
    *[
        f"MeshError: {verb}: expected a DeviceMesh, a ProcessGroup or None as mesh, got {kind}."
        for verb in ("fully_shard", "replicate")
        for kind in ("str", "list", "int")
    ]
)
def what_is_no_mesh() -> list[str]:
    given: list[dict[str, Any]] = [{"mesh": "cpu"}, {"mesh": [dist.group.WORLD]}, {"mesh": 2}]
    return [*_refused_by(fully_shard, *given), *_refused_by(replicate, *given)]


@says(_ASCENDING.format("[1, 0]"), _ASCENDING.format("[[1], [0]]"))
def meshes_that_list_ranks_otherwise_than_process_groups() -> list[str]:
    """Loading a state dict would cut for the rank that the mesh says, and a gather take the pieces
    in the group's order.
    """
    kind = current_device().type
    backwards, column = (
        DeviceMesh(kind, [1, 0]),
        DeviceMesh(kind, [[1], [0]], mesh_dim_names=("shard", "replicate")),
    )
    return _refused_by(fully_shard, {"mesh": backwards}, {"mesh": column})


@says(
    *[
        "MeshError: reshard_after_forward=3: parameters are sharded over 2 ranks, which 3 does not"
        " divide."
    ]
    * 2,
    "AnnotationError: reshard_after_forward must be None, True, False or a number of ranks, got the"
    " str 'yes'",
)
def numbers_of_ranks_that_do_not_divide_the_mesh() -> list[str]:
    mesh = _mesh(1, 2, names=("replicate", "shard"))
    given = {"reshard_after_forward": 3}
    return _refused_by(
        fully_shard, given, {"mesh": mesh, **given}, {"reshard_after_forward": "yes"}
    )


def _as_a_stranger(verb: Verb) -> list[str]:
    others = dist.new_group([0])  # on rank 1 a number that stands for no group
    return _refused_by(verb, {"mesh": others}) if dist.get_rank() == 1 else []


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_a_group_without_this_rank_is_refused(pool: Pool, verb: Verb) -> None:
    assert pool.run(2, _as_a_stranger, verb)[1] == [
        f"MeshError: {verb.__name__}: expected a DeviceMesh, a ProcessGroup or None as mesh, got"
        " int, which new_group() returns on ranks outside of the group: annotate the module on the"
        " ranks of the group alone."
    ]


@spmd(ranks=3)
def test_a_mesh_of_several_dimensions_over_some_ranks_may_be_flattened_as_the_refusal_says() -> (
    None
):
    """On the first two of three ranks; every rank takes part in making meshes."""
    mesh = DeviceMesh(current_device().type, torch.tensor([[0], [1]]))
    flat = DeviceMesh(mesh.device_type, mesh.mesh.flatten())
    if dist.get_rank() < 2:
        model = _transformer()
        assert (
            refused(model, lambda: replicate(model, mesh=mesh))
            == f"MeshError: replicate takes a mesh of one dimension; this one has 2. {_TO_FLATTEN}"
        )
        replicate(model, mesh=flat)
        assert describe(model).rows[0].ranks == 2


@spmd(ranks=2)
def test_a_dimension_picked_by_name_and_a_process_group_are_meshes() -> None:
    mesh = _mesh(1, 2, names=("replicate", "shard"))
    for given in (mesh["shard"], dist.group.WORLD, dist.new_group([0, 1])):
        for verb in (fully_shard, replicate):
            model = _transformer()
            expected = {name: value.detach().clone() for name, value in model.named_parameters()}
            verb(model, mesh=given)
            assert describe(model).rows[0].ranks == 2
            for name, value in full_parameters(model).items():
                assert torch.equal(value, expected[name])


def test_without_a_process_group_several_processes_are_asked_to_form_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for verb in (fully_shard, replicate):
        monkeypatch.setenv("WORLD_SIZE", "1")
        verb(Layer())
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert _refused_by(verb, {}, model=Layer()) == [
            f"MeshError: {verb.__name__}: WORLD_SIZE is 2, but there is no process group. Call"
            " torch.distributed.init_process_group first."
        ]
    assert not dist.is_initialized()


# --- arguments ----------------------------------------------------------------------------------


@says(
    "UnknownArgumentError: fully_shard() has no argument 'auto_wrap_policy'; use policy= instead",
    "UnknownArgumentError: fully_shard() has no argument 'use_orig_params'; parameters always keep"
    " their identity and names; leave it out",
    "UnknownArgumentError: fully_shard() has no argument 'sharding_strategy'; write"
    " reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call replicate()",
    "UnknownArgumentError: fully_shard() has no argument 'device_id'; the mesh says which device;"
    " leave it out",
    "UnknownArgumentError: fully_shard() has no argument 'reshard_after_froward'; did you mean"
    " 'reshard_after_forward'? It takes: mesh, policy, reshard_after_forward, prefetch, mp_policy,"
    " offload_policy, shard_placement_fn, grad_reduce, ignored_params, sync_module_states,"
    " dp_mesh_dims",
    "UnknownArgumentError: fully_shard() has no argument 'cpu_offload'; use"
    " offload_policy=CPUOffloadPolicy() instead",
    "UnknownArgumentError: fully_shard() has no argument 'find_unused_parameters'; unused"
    " parameters need no flag; leave it out",
)
def keywords_that_fully_shard_does_not_have() -> list[str]:
    names = ("auto_wrap_policy", "use_orig_params", "sharding_strategy", "device_id", "reshard_after_froward", "cpu_offload",
             "find_unused_parameters")  # fmt: skip
    return _refused_by(fully_shard, *({name: None} for name in names))


@says(
    "UnknownArgumentError: replicate() has no argument 'find_unused_parameters'; unused parameters"
    " need no flag; leave it out",
    "UnknownArgumentError: replicate() has no argument 'device_ids'; the module's own device is"
    " used; leave it out",
    "AnnotationError: bucket_cap_mb must be a positive number of MiB, got 0",
    "AnnotationError: sync_module_states must be one of check, broadcast, off, got True; what FSDP1"
    " and DDP mean by that is 'broadcast'",
)
def keywords_of_ddp() -> list[str]:
    given: tuple[dict[str, Any], ...] = (
        {"find_unused_parameters": True},
        {"device_ids": [0]},
        {"bucket_cap_mb": 0},
    )
    return _refused_by(replicate, *given, {"sync_module_states": True})


@says(
    *[
        "UnknownArgumentError: checkpoint() has no argument 'use_reentrant'; checkpointing is never"
        " reentrant here; leave it out, or use torch.utils.checkpoint.checkpoint"
    ]
    * 2,
    "UnknownArgumentError: checkpoint() has no argument 'preserve_rng'; did you mean"
    " 'preserve_rng_state'? It takes: policy, preserve_rng_state, context_fn, determinism_check,"
    " debug, early_stop",
    "AnnotationError: determinism_check must be one of default, none, got 'sometimes'",
    "AnnotationError: checkpoint: debug=True records with contexts of its own and cannot be given"
    " with context_fn",
)
def keywords_that_checkpoint_does_not_take() -> list[str]:
    given: tuple[dict[str, Any], ...] = (
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"preserve_rng": True},
    )
    return _refused_by(
        checkpoint,
        *given,
        {"determinism_check": "sometimes"},
        {"debug": True, "context_fn": nullcontext},
    )


@says(
    "AnnotationError: ignored_params: pattern 'embd.*' matched nothing; did you mean 'embedding'?",
    "AnnotationError: ignored_params takes parameters, modules, FQNs and globs, got int",
    "AnnotationError: ignored_params: pattern 'embd.*' matched nothing; did you mean 'embedding'?",
)
def ignored_parameters_that_match_nothing() -> list[str]:
    given: list[dict[str, Any]] = [{"ignored_params": [each]} for each in ("embd.*", 3)]
    return [*_refused_by(fully_shard, *given), *_refused_by(replicate, given[0])]


@says(
    *[
        "PolicyError: policy matched 0 modules; classes present: Nested x2, Linear x10, Sequential"
        " x2, ReLU x2, Layer x2; modules that repeat make good units: Linear x2 ('inner.plain.*'),"
        " Linear x2 ('plain.*')"
    ]
    * 3
)
def policies_that_match_nothing() -> list[str]:
    model = Nested(1).to(current_device())
    return [
        refused(model, lambda verb=verb: verb(model, policy={Block}))
        for verb in (fully_shard, replicate, checkpoint)
    ]


def _refuse(what: str) -> list[str]:
    return REFUSED[what][0]()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(pool: Pool, what: str) -> None:
    assert pool.run(2, _refuse, what) == [REFUSED[what][1]] * 2
