"""Arguments that annotations cannot take are refused at once, with words that say what to pass instead."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import checkpoint, describe, fully_shard, replicate
from tests.helpers.battery.odd import Layer, Nested
from tests.helpers.battery.transformers import Block, Transformer
from tests.helpers.compare import full_parameters
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, spmd


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer().to(current_device())


# --- meshes -----------------------------------------------------------------------------------------------------------


def _meshes() -> list[str]:
    kind = current_device().type
    model = _transformer()
    three = init_device_mesh(kind, (1, 2, 1), mesh_dim_names=("x", "y", "z"))
    four = init_device_mesh(kind, (1, 1, 2), mesh_dim_names=("pp", "dp_shard", "dp_replicate"))
    two = init_device_mesh(kind, (1, 2), mesh_dim_names=("dp", "tp"))
    twice = init_device_mesh(kind, (2, 1), mesh_dim_names=("dp_shard", "cp_shard"))
    cut = init_device_mesh(kind, (1, 2), mesh_dim_names=("replicate", "shard"))
    return [
        refused(model, lambda: fully_shard(model, mesh=three)),
        refused(model, lambda: fully_shard(model, mesh=four)),
        refused(model, lambda: fully_shard(model, mesh=two)),
        refused(model, lambda: fully_shard(model, mesh=twice)),
        refused(model, lambda: replicate(model, mesh=three)),
        refused(model, lambda: fully_shard(model, mesh="cpu")),
        refused(model, lambda: fully_shard(model, reshard_after_forward=3)),
        refused(model, lambda: fully_shard(model, mesh=cut, reshard_after_forward=3)),
        refused(model, lambda: fully_shard(model, reshard_after_forward="yes")),
    ]


def _follow_the_advice() -> str:
    """On the first two of three ranks; every rank takes part in making meshes."""
    ranks = torch.tensor([[0], [1]])
    kind = current_device().type
    mesh = DeviceMesh(kind, ranks)
    flat = DeviceMesh(mesh.device_type, mesh.mesh.flatten())
    if dist.get_rank() == 2:
        return ""
    model = _transformer()
    said = refused(model, lambda: replicate(model, mesh=mesh))
    assert "DeviceMesh(mesh.device_type, mesh.mesh.flatten())" in said
    replicate(model, mesh=flat)
    assert describe(model).to_dict()["units"][0]["ranks"] == 2
    return said


def test_a_mesh_of_several_dimensions_over_some_ranks_is_refused_with_the_way_to_flatten_it(pool: Pool) -> None:
    first, second, _ = pool.run(3, _follow_the_advice)
    assert_text(
        same_on_all([first, second]),
        """MeshError: replicate takes a mesh of one dimension; this one has 2. To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...].""",
    )


def test_meshes_that_do_not_fit_are_refused_with_an_example(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(2, _meshes)[0]),
        """\
MeshError: fully_shard takes a mesh of one dimension, or of two: one to replicate over and one to shard over; this one has 3: ('x', 'y', 'z'). To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...].
MeshError: fully_shard takes a mesh of one dimension, or of two: one to replicate over and one to shard over; this one has 3: ('pp', 'dp_shard', 'dp_replicate'). To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...].
MeshError: fully_shard: of a mesh of two dimensions, one is sharded over and the other one replicated over. The names of this one, ('dp', 'tp'), do not say which: let one contain 'replicate' and the other one 'shard'. To shard over one dimension alone, pass mesh["dp"] or mesh["tp"].
MeshError: fully_shard: of a mesh of two dimensions, one is sharded over and the other one replicated over. The names of this one, ('dp_shard', 'cp_shard'), do not say which: let one contain 'replicate' and the other one 'shard'. To shard over one dimension alone, pass mesh["dp_shard"] or mesh["cp_shard"].
MeshError: replicate takes a mesh of one dimension; this one has 3: ('x', 'y', 'z'). To use all of its ranks together, pass mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...].
MeshError: fully_shard: expected a DeviceMesh, a ProcessGroup or None as mesh, got str.
MeshError: reshard_after_forward=3: parameters are sharded over 2 ranks, which 3 does not divide.
MeshError: reshard_after_forward=3: parameters are sharded over 2 ranks, which 3 does not divide.
AnnotationError: reshard_after_forward must be None, True, False or a number of ranks, got the str 'yes'""",
    )


def _unordered() -> str:
    kind = current_device().type
    model = _transformer()
    return "\n".join(
        refused(model, lambda mesh=mesh: fully_shard(model, mesh=mesh))
        for mesh in (DeviceMesh(kind, [1, 0]), DeviceMesh(kind, [[1], [0]], mesh_dim_names=("shard", "replicate")))
    )


def test_meshes_that_list_ranks_otherwise_than_process_groups_are_refused(pool: Pool) -> None:
    """Loading a state dict would cut for the rank that the mesh says, and a gather take the pieces in the group's order."""
    assert_text(
        same_on_all(pool.run(2, _unordered)),
        """\
MeshError: fully_shard: the mesh [1, 0] does not list its ranks in ascending order along dimension 0, which is sharded over, as process groups do. Make it by init_device_mesh, or of mesh.mesh.sort(0).values.
MeshError: fully_shard: the mesh [[1], [0]] does not list its ranks in ascending order along dimension 0, which is sharded over, as process groups do. Make it by init_device_mesh, or of mesh.mesh.sort(0).values.""",
    )


@spmd(ranks=2)
def test_a_dimension_picked_by_name_and_a_process_group_are_meshes() -> None:
    kind = current_device().type
    mesh = init_device_mesh(kind, (1, 2), mesh_dim_names=("replicate", "shard"))
    for given in (mesh["shard"], dist.group.WORLD, dist.new_group([0, 1])):
        model = _transformer()
        expected = {name: value.detach().clone() for name, value in model.named_parameters()}
        fully_shard(model, mesh=given)
        assert describe(model).to_dict()["units"][0]["ranks"] == 2
        for name, value in full_parameters(model).items():
            assert torch.equal(value, expected[name])


@spmd(ranks=2)
def test_a_process_group_is_a_mesh_for_replicate_too() -> None:
    model = nn.Linear(4, 1, device=current_device())
    replicate(model, mesh=dist.new_group([0, 1]))
    model(torch.full((1, 4), float(dist.get_rank()), device=current_device())).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5] * 4]


def _what_is_no_mesh(verb: Callable[..., Any]) -> list[str]:
    others = dist.new_group([0])  # on rank 1 a number that stands for no group
    unnamed = init_device_mesh(current_device().type, (1, 1, 2))
    model = _transformer()
    given: list[Any] = [unnamed, [dist.group.WORLD], 2]
    if dist.get_rank() == 1:
        given.append(others)
    return [refused(model, lambda each=each: verb(model, mesh=each)) for each in given]


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_what_is_no_mesh_is_refused_with_what_would_be_one(pool: Pool, verb: Callable[..., Any]) -> None:
    first, *others = pool.run(2, _what_is_no_mesh, verb)[1]
    takes = "one dimension, or of two: one to replicate over and one to shard over" if verb is fully_shard else "one dimension"
    assert first == (
        f"MeshError: {verb.__name__} takes a mesh of {takes}; this one has 3. To use all of its ranks together, pass "
        "mesh=DeviceMesh(mesh.device_type, mesh.mesh.flatten()); to train a model on each part of them, pass a slice, mesh[...]."
    )
    assert_text(
        "\n".join(others).replace(verb.__name__, "VERB"),
        """\
MeshError: VERB: expected a DeviceMesh, a ProcessGroup or None as mesh, got list.
MeshError: VERB: expected a DeviceMesh, a ProcessGroup or None as mesh, got int.
MeshError: VERB: expected a DeviceMesh, a ProcessGroup or None as mesh, got int, which new_group() returns on ranks outside of the group: annotate the module on the ranks of the group alone.""",
    )


def test_without_a_process_group_one_process_runs_alone_and_several_are_asked_to_form_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not dist.is_initialized()
    for value in (None, "1"):
        if value is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", value)
        torch.manual_seed(0)
        plain, model = Layer(), Layer()
        model.load_state_dict(plain.state_dict())
        checkpoint(model)
        fully_shard(model)
        replicated = Layer()
        replicated.load_state_dict(plain.state_dict())
        replicate(replicated)
        x = torch.randn(3, 6)
        for each in (plain, model, replicated):
            each(x).square().sum().backward()
        for one, *others in zip(plain.parameters(), model.parameters(), replicated.parameters(), strict=True):
            assert all(other.grad is not None and torch.equal(one.grad, other.grad) for other in others)
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Layer()
    for verb in (fully_shard, replicate):
        assert refused(model, lambda verb=verb: verb(model)) == (
            f"MeshError: {verb.__name__}: WORLD_SIZE is 2, but there is no process group. Call "
            "torch.distributed.init_process_group first."
        )


# --- arguments --------------------------------------------------------------------------------------------------------


def _refused_by(verb: Callable[..., Any], *unknown: dict[str, Any]) -> str:
    model = _transformer()
    return "\n".join(refused(model, lambda given=given: verb(model, **given)) for given in unknown)


_UNKNOWN: Final[list[dict[str, Any]]] = [
    {"auto_wrap_policy": None},
    {"use_orig_params": True},
    {"sharding_strategy": "FULL_SHARD"},
    {"device_id": 0},
    {"reshard_after_froward": True},
    {"cpu_offload": None},
    {"find_unused_parameters": True},
]


def test_unknown_keywords_are_refused_with_their_equivalent(pool: Pool) -> None:
    assert_text(
        pool.run(1, _refused_by, fully_shard, *_UNKNOWN)[0],
        """\
UnknownArgumentError: fully_shard() has no argument 'auto_wrap_policy'; use policy= instead
UnknownArgumentError: fully_shard() has no argument 'use_orig_params'; parameters always keep their identity and names; leave it out
UnknownArgumentError: fully_shard() has no argument 'sharding_strategy'; write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call replicate()
UnknownArgumentError: fully_shard() has no argument 'device_id'; the mesh says which device; leave it out
UnknownArgumentError: fully_shard() has no argument 'reshard_after_froward'; did you mean 'reshard_after_forward'? It takes: mesh, policy, reshard_after_forward, mp_policy, offload_policy, shard_placement_fn, grad_reduce, ignored_params, sync_module_states, dp_mesh_dims
UnknownArgumentError: fully_shard() has no argument 'cpu_offload'; use offload_policy=CPUOffloadPolicy() instead
UnknownArgumentError: fully_shard() has no argument 'find_unused_parameters'; unused parameters need no flag; leave it out""",
    )


_UNKNOWN_TO_REPLICATE: Final[list[dict[str, Any]]] = [
    {"find_unused_parameters": True},
    {"device_ids": [0]},
    {"bucket_cap_mb": 0},
    {"sync_module_states": True},
]


def test_keywords_of_ddp_are_refused_with_their_equivalent(pool: Pool) -> None:
    assert_text(
        pool.run(1, _refused_by, replicate, *_UNKNOWN_TO_REPLICATE)[0],
        """\
UnknownArgumentError: replicate() has no argument 'find_unused_parameters'; unused parameters need no flag; leave it out
UnknownArgumentError: replicate() has no argument 'device_ids'; the module's own device is used; leave it out
AnnotationError: bucket_cap_mb must be a positive number of MiB, got 0
AnnotationError: sync_module_states must be one of check, broadcast, off, got True; what FSDP1 and DDP mean by that is 'broadcast'""",
    )


_UNKNOWN_TO_CHECKPOINT: Final[list[dict[str, Any]]] = [
    {"use_reentrant": True},
    {"use_reentrant": False},
    {"preserve_rng": True},
    {"determinism_check": "sometimes"},
    {"debug": True, "context_fn": nullcontext},
]


def test_keywords_of_checkpoint_are_refused_with_their_equivalent(pool: Pool) -> None:
    assert_text(
        pool.run(1, _refused_by, checkpoint, *_UNKNOWN_TO_CHECKPOINT)[0],
        """\
UnknownArgumentError: checkpoint() has no argument 'use_reentrant'; checkpointing is never reentrant here; leave it out, or use torch.utils.checkpoint.checkpoint
UnknownArgumentError: checkpoint() has no argument 'use_reentrant'; checkpointing is never reentrant here; leave it out, or use torch.utils.checkpoint.checkpoint
UnknownArgumentError: checkpoint() has no argument 'preserve_rng'; did you mean 'preserve_rng_state'? It takes: policy, preserve_rng_state, context_fn, determinism_check, debug, early_stop
AnnotationError: determinism_check must be one of default, none, got 'sometimes'
AnnotationError: checkpoint: debug=True records with contexts of its own and cannot be given with context_fn""",
    )


def _ignored() -> list[str]:
    model = _transformer()
    stranger = nn.Linear(2, 2)
    return [
        refused(model, lambda: fully_shard(model, ignored_params=["embd.*"])),
        refused(model, lambda: fully_shard(model, ignored_params=[stranger])),
        refused(model, lambda: fully_shard(model, ignored_params=[stranger.weight])),
        refused(model, lambda: fully_shard(model, ignored_params=[3])),
        refused(model, lambda: replicate(model, ignored_params=["embd.*"])),
    ]


def test_ignored_parameters_that_match_nothing_are_refused(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(1, _ignored)[0]),
        """\
AnnotationError: ignored_params: pattern 'embd.*' matched nothing; did you mean 'embedding'?
AnnotationError: ignored_params: a Linear is not inside the module
AnnotationError: ignored_params: a parameter of shape (2, 2) is not in the module
AnnotationError: ignored_params takes parameters, modules, FQNs and globs, got int
AnnotationError: ignored_params: pattern 'embd.*' matched nothing; did you mean 'embedding'?""",
    )


def _policies(verb: Callable[..., Any]) -> str:
    model = Nested(1).to(current_device())
    return refused(model, lambda: verb(model, policy={Block}))


def test_a_policy_that_matches_nothing_is_refused_with_the_classes_that_are_there(pool: Pool) -> None:
    texts = [pool.run(1, _policies, verb)[0] for verb in (fully_shard, replicate, checkpoint)]
    assert_text(
        same_on_all(texts),
        """PolicyError: policy matched 0 modules; classes present: Nested x2, Linear x10, Sequential x2, ReLU x2, Layer x2""",
    )
