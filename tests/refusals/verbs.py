"""Annotations and their arguments that cannot be."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint,
    fully_shard,
    offload_activations,
    registry,
    replicate,
)
from composable.api import arguments
from tests.helpers.battery.odd import Layer, Nested
from tests.helpers.battery.transformers import Block, Transformer
from tests.helpers.placed import placed
from tests.helpers.world import current_device
from tests.refusals.table import Refusals, annotating, row

VERBS: Final[dict[str, Any]] = {"fully_shard": fully_shard, "replicate": replicate, "checkpoint": checkpoint}
BOTH: Final = {name: VERBS[name] for name in ("fully_shard", "replicate")}


def _transformer() -> Transformer:
    torch.manual_seed(0)
    return placed(Transformer(), current_device())


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(current_device())


# --- order and repetition -----------------------------------------------------------------------


@row(2)
def a_child_after_its_parent() -> Refusals:
    for outer, what, inner, more in (
        (fully_shard, "sharded", fully_shard, ", or use policy="),
        (fully_shard, "sharded", replicate, ""),
        (replicate, "replicated", replicate, ", or use policy="),
        (replicate, "replicated", fully_shard, ""),
    ):
        model = outer(_transformer())
        for sync in ("check", "off"):
            act = annotating(lambda model, sync=sync, inner=inner: inner(model.blocks[0], sync_module_states=sync), model)
            yield act, f"AnnotationError: 'blocks.0' is inside already-{what} '(root)'; annotate children first{more}"


@row(2)
def the_same_verb_twice() -> Refusals:
    for name, verb in VERBS.items():
        model = _transformer()
        verb(model.blocks[1])
        verb(model.blocks[0])
        yield annotating(lambda model, verb=verb: verb(model.blocks[1]), model), f"AlreadyAnnotatedError: {name} was already applied to 'blocks.1' (at FILE:LINE); to apply it anew, call remove(module, {name}) first"


@row(2)
def a_module_both_sharded_and_replicated() -> Refusals:
    model = _transformer()
    replicate(model.blocks[0])
    fully_shard(model.blocks[1])
    said = "ClashError: '{}' is managed by {}; a module can be sharded or replicated, not both. Call remove(module, {}) first"
    yield annotating(lambda model: fully_shard(model.blocks[0]), model), said.format("blocks.0", "replicate", "replicate")
    yield annotating(lambda model: replicate(model.blocks[1]), model), said.format("blocks.1", "fully_shard", "fully_shard")


# --- what cannot be a unit ----------------------------------------------------------------------


@row(2)
def a_parameter_in_two_units_by_hand() -> Refusals:
    model = _transformer()
    fully_shard(model.embedding)
    for part in (model, model.head):
        yield annotating(lambda _, part=part: fully_shard(part), model), "TiedParametersError: parameter 'head.weight' is tied to 'embedding.weight', which was sharded as part of another unit already. Annotate both modules alike, as one unit: fully_shard([a, b]) or replicate([a, b]); or name the units in policy=, which keeps tied parameters together"


@row(2)
def containers_without_a_forward() -> Refusals:
    model, heads = _transformer(), nn.ModuleDict({"a": nn.Linear(2, 2)})
    said = "AnnotationError: {} has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy="
    yield annotating(lambda model: fully_shard(model.blocks), model), said.format("ModuleList 'blocks'")
    yield annotating(lambda model: replicate(model.blocks), model), said.format("ModuleList 'blocks'")
    yield annotating(lambda model: checkpoint(model.blocks), model), "AnnotationError: ModuleList 'blocks' has no forward, so there is no forward to run again; annotate its children, or pass policy="
    yield annotating(fully_shard, heads), said.format("ModuleDict")
    yield annotating(fully_shard, model, policy={nn.ModuleList}), said.format("ModuleList 'blocks'")


@row(2)
def the_projection_that_attention_reads_itself() -> Refusals:
    model = nn.MultiheadAttention(4, 2).to(current_device())
    yield annotating(lambda model: fully_shard(model.out_proj), model), "AnnotationError: fully_shard: 'out_proj' is read by its parent (MultiheadAttention) without being called, so nothing would gather its parameters; annotate the MultiheadAttention instead"


@row(None, pytest.mark.filterwarnings("ignore:`torch.jit"))
def parameters_of_torchscript() -> Refusals:
    for name, verb in BOTH.items():
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
        yield annotating(verb, model), f"AnnotationError: {name}: parameter '1.weight' of a RecursiveScriptModule cannot be managed: modules of TorchScript register parameters in their own way. Annotate a module that is not scripted, or leave it out with ignored_params"


@row(2)
def lazy_modules() -> Refusals:
    model, norm = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), nn.LazyBatchNorm1d(affine=False)
    said = "AnnotationError: {} is uninitialised; run a lazy module once before annotating it"
    yield lambda: replicate(model), said.format("parameter '1.weight'")
    yield lambda: replicate(model, policy={nn.LazyLinear}), said.format("parameter '1.weight'")  # named below the whole model
    yield lambda: fully_shard(model), said.format("parameter '1.weight'")
    yield lambda: replicate(norm), said.format("buffer 'running_mean'")


# --- ranks that differ --------------------------------------------------------------------------


@row(2)
def different_weights() -> Refusals:
    model = _layers()
    with torch.no_grad():
        for number, layer in enumerate(model):
            for parameter in layer.parameters():
                parameter.fill_(number * dist.get_rank())
    for name, verb in BOTH.items():
        yield annotating(verb, model, sync_module_states="check"), f"RanksDisagreeError: {name}: the ranks differ in values: rank 0 has parameter '1.weight' with fingerprint 0, rank 1 has parameter '1.weight' with fingerprint d841331a00. Pass sync_module_states='broadcast', or seed equally."


@row(2)
def different_verbs() -> Refusals:
    yield annotating(fully_shard if dist.get_rank() else replicate, _layers()), "RanksDisagreeError: replicate: the ranks differ in verbs: rank 0 has replicate, rank 1 has fully_shard. Every rank must call the same verbs."


@row(2)
def different_parameters() -> Refusals:
    def head(width: int = 2, **options: Any) -> nn.Linear:
        return nn.Linear(3, width, **options)

    usual = "'head.weight' (2, 3) float32"
    for other, first, second in (  # rank 1's modules, and what the ranks have where they differ first
        ({"body": nn.Linear(3, 3), "head": head(bias=False)}, "'head.bias' (2,) float32", "nothing there"),
        ({"body": nn.Linear(3, 3), "tail": head()}, usual, "'tail.weight' (2, 3) float32"),
        ({"head": head(), "body": nn.Linear(3, 3)}, "'body.weight' (3, 3) float32", usual),
        ({"body": nn.Linear(3, 3), "head": head(4)}, usual, "'head.weight' (4, 3) float32"),
        ({"body": nn.Linear(3, 3), "head": head(dtype=torch.float64)}, usual, "'head.weight' (2, 3) float64"),
        ({"body": nn.Linear(3, 3), "head": head().requires_grad_(False)}, usual, f"{usual}, frozen"),
    ):
        model = nn.Sequential()
        for name, module in (other if dist.get_rank() else {"body": nn.Linear(3, 3), "head": head()}).items():
            model.add_module(name, module.to(current_device()))
        yield annotating(fully_shard, model), f"RanksDisagreeError: fully_shard: the ranks differ in parameters: rank 0 has {first}, rank 1 has {second}. Every rank must build the same module in the same order."


# --- arguments ----------------------------------------------------------------------------------


@row(2)
def keywords_that_fully_shard_does_not_have() -> Refusals:
    for name, answer in {
        "auto_wrap_policy": "use policy= instead",
        "use_orig_params": "parameters always keep their identity and names; leave it out",
        "sharding_strategy": "write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or call replicate()",
        "device_id": "the mesh says which device; leave it out",
        "reshard_after_froward": "did you mean 'reshard_after_forward'? It takes: mesh, policy, reshard_after_forward, prefetch, mp_policy, offload_policy, shard_placement_fn, grad_reduce, ignored_params, sync_module_states, dp_mesh_dims",
        "cpu_offload": "use offload_policy=CPUOffloadPolicy() instead",
        "find_unused_parameters": "unused parameters need no flag; leave it out",
        "mixed_precision": "use mp_policy= instead",
    }.items():
        yield annotating(fully_shard, _layers(), **{name: None}), f"UnknownArgumentError: fully_shard() has no argument '{name}'; {answer}"


@row(2)
def keywords_of_ddp() -> Refusals:
    model = _layers()
    yield annotating(replicate, model, find_unused_parameters=True), "UnknownArgumentError: replicate() has no argument 'find_unused_parameters'; unused parameters need no flag; leave it out"
    yield annotating(replicate, model, device_ids=[0]), "UnknownArgumentError: replicate() has no argument 'device_ids'; the module's own device is used; leave it out"
    yield annotating(replicate, model, bucket_cap_mb=0), "ArgumentError: replicate: bucket_cap_mb must be a positive number that is not infinite, got 0"
    yield annotating(replicate, model, sync_module_states=True), "AnnotationError: sync_module_states must be one of check, broadcast, off, got True; what FSDP1 and DDP mean by that is 'broadcast'"


@row(2)
def keywords_that_checkpoint_does_not_take() -> Refusals:
    model = _layers()
    for given in (True, False):
        yield annotating(checkpoint, model, use_reentrant=given), "UnknownArgumentError: checkpoint() has no argument 'use_reentrant'; checkpointing is never reentrant here; leave it out, or use torch.utils.checkpoint.checkpoint"
    yield annotating(checkpoint, model, preserve_rng=True), "UnknownArgumentError: checkpoint() has no argument 'preserve_rng'; did you mean 'preserve_rng_state'? It takes: policy, preserve_rng_state, context_fn, determinism_check, debug, early_stop"
    yield annotating(checkpoint, model, determinism_check="sometimes"), "ArgumentError: checkpoint: determinism_check must be 'default' or 'none', got the str 'sometimes'"
    yield annotating(checkpoint, model, debug=True, context_fn=nullcontext), "AnnotationError: checkpoint: debug=True records with contexts of its own and cannot be given with context_fn"


@row(2)
def ignored_parameters_that_match_nothing() -> Refusals:
    model = _transformer()
    for verb in BOTH.values():
        yield annotating(verb, model, ignored_params=["embd.*"]), "AnnotationError: ignored_params: pattern 'embd.*' matched nothing; did you mean 'embedding'?"
    yield annotating(fully_shard, model, ignored_params=[3]), "AnnotationError: ignored_params takes parameters, modules, FQNs and globs, got int"


@row(2)
def policies_that_match_nothing() -> Refusals:
    for verb in VERBS.values():
        yield annotating(verb, Nested(1).to(current_device()), policy={Block}), "PolicyError: policy matched 0 modules; classes present: Nested x2, Linear x10, Sequential x2, ReLU x2, Layer x2; modules that repeat make good units: Linear x2 ('inner.plain.*'), Linear x2 ('plain.*')"


@row()
def what_is_no_way_to_reduce() -> Refusals:
    for value in ("average", 0, -1.0, float("nan"), float("inf"), True, None):
        for verb in BOTH.values():
            yield lambda verb=verb, value=value: verb(nn.Linear(1, 1), grad_reduce=value), "ArgumentError: ...grad_reduce must be 'mean', 'sum' or a positive number..."


@row()
def buffers_that_are_broadcast_in_part() -> Refusals:
    yield annotating(replicate, nn.Linear(2, 2), broadcast_buffers=["running_mean"]), "ArgumentError: replicate: broadcast_buffers must be True or False, got a list of str"


@row()
def activations_that_cannot_be_offloaded() -> Refusals:
    model = nn.Linear(2, 2)
    for given in (-1, 1.5, True):
        yield annotating(offload_activations, model, min_bytes=given), "ArgumentError: offload_activations: min_bytes must be a whole number of at least 0, got..."
    yield annotating(offload_activations, model, pin_memory="yes"), "ArgumentError: offload_activations: pin_memory must be True or False, got the str 'yes'"
    assert not registry(model)
    assert not model._forward_hooks


# --- precision and offload ----------------------------------------------------------------------


@row()
def what_is_no_precision() -> Refusals:
    dtypes = "must be one of torch.float64, float32, bfloat16 and float16, or its name, e.g. 'bf16'; got"
    yield lambda: fully_shard(nn.Linear(2, 2), mp_policy=torch.int8), f"AnnotationError: MixedPrecisionPolicy: param_dtype {dtypes} torch.int8"
    yield lambda: MixedPrecisionPolicy(reduce_dtype="bf61"), f"AnnotationError: MixedPrecisionPolicy: reduce_dtype {dtypes} 'bf61'"
    yield lambda: MixedPrecisionPolicy(buffer_dtype={"steps": "int8"}), f"AnnotationError: MixedPrecisionPolicy: buffer_dtype['steps'] {dtypes} 'int8'"
    given: Any = "no"
    yield lambda: MixedPrecisionPolicy("bf16", cast_forward_inputs=given), "ArgumentError: MixedPrecisionPolicy: cast_forward_inputs must be True or False, got the str 'no'"
    given = torch.bfloat16
    yield lambda: MixedPrecisionPolicy(given, param_dtype_override_fn=given), "ArgumentError: ...param_dtype_override_fn must be a function..."
    for verb in BOTH:
        yield annotating(BOTH[verb], nn.Linear(2, 2), mp_policy=True), f"ArgumentError: {verb}: mp_policy must be a MixedPrecisionPolicy (composable's or torch's), or a floating-point dtype or its name, e.g. 'bf16', got True"
    for wrong in ("LayerNorm", int, [nn.LayerNorm, 3]):
        yield lambda wrong=wrong: MixedPrecisionPolicy("bf16", full_precision_classes=wrong), f"AnnotationError: MixedPrecisionPolicy: full_precision_classes must be a class of modules, or several, got {wrong!r}"


@row()
def a_buffer_that_is_not_there() -> Refusals:
    model = nn.Sequential(nn.BatchNorm1d(2))
    policy = MixedPrecisionPolicy("bf16", buffer_dtype={"0.runing_mean": "bf16"})
    yield annotating(fully_shard, model, mp_policy=policy), "AnnotationError: fully_shard: buffer_dtype names '0.runing_mean', which matches no floating-point buffer; close to it: 0.running_mean, 0.running_var"


@row(2)
def a_third_dtype() -> Refusals:
    policy = MixedPrecisionPolicy("bf16", param_dtype_override_fn=lambda parameter: torch.float16)
    yield annotating(fully_shard, _layers(), mp_policy=policy), "AnnotationError: ...param_dtype_override_fn returned torch..."


@row()
def what_is_no_offload_policy() -> Refusals:
    model, given = _layers(), {True: True, "'cpu'": "cpu"}
    for _, wrong in given.items():
        said = "ArgumentError: fully_shard: offload_policy must be a CPUOffloadPolicy (composable's or torch's), or None for parameters that rest on the mesh's device, got..."
        yield annotating(fully_shard, model, offload_policy=wrong), said
        yield annotating(fully_shard, model, policy={"0": {"offload_policy": wrong}}), said
    yield lambda: CPUOffloadPolicy(pin_memory=1), "ArgumentError: CPUOffloadPolicy: pin_memory must be True or False, got 1"
    yield annotating(replicate, model, offload_policy=CPUOffloadPolicy()), "UnknownArgumentError: replicate() has no argument 'offload_policy'; replicated parameters stay on their device; leave it out, or shard with fully_shard(offload_policy=)"
    with mock.patch.object(arguments, "has_streams", return_value=True):  # as on an accelerator
        yield annotating(fully_shard, model, offload_policy=CPUOffloadPolicy()), "AnnotationError: fully_shard: offload_policy needs a process group. Without one nothing is sharded, and parameters stay where they are, on cpu. Call torch.distributed.init_process_group first, for one process alone, too; or leave offload_policy out"


@row()
def several_processes_without_a_group() -> Refusals:
    for name, verb in BOTH.items():
        with mock.patch.dict(os.environ, WORLD_SIZE="2"):
            yield annotating(verb, Layer()), f"MeshError: {name}: WORLD_SIZE is 2, but there is no process group. Call torch.distributed.init_process_group first."
        with mock.patch.dict(os.environ, WORLD_SIZE="1"):
            verb(Layer())
    assert not dist.is_initialized()
