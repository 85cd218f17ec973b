"""The guide for moving from other libraries has an answer for each of their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, Final

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import composable
from composable import fully_shard, replicate
from composable.errors import UnknownArgumentError
from docs.generate import ROOT

GUIDE: Final = (ROOT / "docs" / "guides" / "moving.md").read_text()
DEEPSPEED: Final = (ROOT / "docs" / "guides" / "deepspeed.md").read_text()
# DeepSpeed is not installed here: the keys of its configuration, and of `zero_optimization`, as of
# https://www.deepspeed.ai/docs/config-json/, deepspeed/runtime/constants.py and
# deepspeed/runtime/zero/config.py, and what of its interface scripts call.
OF_DEEPSPEED: Final = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
managed_gradient_accumulation dataloader_drop_last optimizer scheduler gradient_clipping
communication_data_type seq_parallel_comm_data_type prescale_gradients gradient_predivide_factor
gradient_allreduce_op sparse_gradients disable_allgather fp16 bf16 torch_autocast amp data_types
zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio tensor_parallel
expert_parallel pipeline activation_checkpointing compile checkpoint hybrid_engine elasticity
compression_training sparse_attention data_efficiency curriculum_learning progressive_layer_drop
eigenvalue graph_harvesting disable_python_gc use_data_before_expert_parallelism steps_per_print
wall_clock_breakdown memory_breakdown dump_state autotuning flops_profiler tensorboard wandb comet
csv_monitor comms_logger

auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
min_loss_scale fused_mode fp16_master_weights_and_grads immediate_grad_update check_grad_overflow
bf16_master_weights_and_grads bf16_optimizer_states grad_accum_dtype lower_precision_safe_modules

stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size compute_grad_norm overlap_comm load_from_fp32_weights
elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
stage3_allgather_sequential stage3_partition_stream_chunk_size
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint
override_module_apply log_trace_cache_warnings enable_sanity_checks
save_muon_momentum_buffer_in_memory leaf_module

device nvme_path pin_memory buffer_count buffer_size max_in_cpu ratio fast_init

partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
synchronize_checkpoint_boundary autotp_size preset_model partition_config tp_overlap_comm
tag_validation load_universal use_node_local_storage parallel_write pipeline_stage deepcompile

initialize init_distributed Init GatheredParameters register_external_parameter TiledLinear
backward step no_sync is_gradient_accumulation_boundary set_gradient_accumulation_boundary
get_global_grad_norm was_step_applied module save_checkpoint load_checkpoint save_16bit_model
zero_to_fp32 get_fp32_state_dict_from_zero_checkpoint offload_states reload_states train_batch
safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param
safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
safe_set_local_optimizer_state
"""
_OF_ALL_MODULES: Final = {
    "self",
    "module",
    "apply",
    "forward",
    "named_buffers",
    "named_parameters",
    "train",
}


def _arguments(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _methods(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def _below(heading: str) -> str:
    """The part of the guide below a heading."""
    (text,) = [
        part for part in re.split(r"^## ", GUIDE, flags=re.M) if part.startswith(heading + "\n")
    ]
    return text


def _unanswered(text: str, names: Iterable[str]) -> list[str]:
    """The names that are in the left column of no table of a text."""
    left = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    return [name for name in names if not re.search(rf"\b{name}\b", left)]


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("FSDP2", _arguments(fsdp2) + _methods(FSDPModule)),
        (
            "FSDP1",
            _arguments(FullyShardedDataParallel.__init__)
            + _methods(FullyShardedDataParallel)
            + _arguments(MixedPrecision),
        ),
        ("DDP", _arguments(DistributedDataParallel.__init__) + _methods(DistributedDataParallel)),
    ],
    ids=["FSDP2", "FSDP1", "DDP"],
)
def test_every_name_of_the_other_library_has_an_answer(heading: str, names: Iterable[str]) -> None:
    asked = [name for name in names if name not in _OF_ALL_MODULES]
    assert _unanswered(_below(heading), asked) == []


def test_every_key_of_deepspeed_has_an_answer() -> None:
    assert _unanswered(DEEPSPEED, OF_DEEPSPEED.split()) == []


def test_a_key_without_an_answer_is_noticed() -> None:
    table = "| key | here |\n|---|---|\n| `stage`: 0 | `replicate` |\n"
    assert _unanswered(table, ["stage", "replicate"]) == ["replicate"]


def test_arguments_that_answer_keys_of_deepspeed_exist() -> None:
    """Words such as `prefetch=` in the right column."""
    public = (getattr(composable, name) for name in composable.__all__)
    known = {
        name
        for each in public
        if inspect.isfunction(each) or is_dataclass(each)
        for name in _arguments(each)
    }
    of_torch = {
        "dtype",
        "foreach",
        "growth_interval",
        "init_scale",
        "sparse",
        "drop_last",
        "weight_decay",
    }
    of_deepspeed = {"modifier_rank"}
    cells = [line.split("|")[2] for line in DEEPSPEED.splitlines() if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"\b([a-z_]+)=", cell)}
    assert named - known - of_torch - of_deepspeed == set()


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        (fully_shard, _arguments(FullyShardedDataParallel.__init__)),
        (fully_shard, _arguments(fsdp2)),
        (replicate, _arguments(DistributedDataParallel.__init__)),
    ],
    ids=["FSDP1", "FSDP2", "DDP"],
)
def test_a_keyword_of_another_library_is_taken_or_answered(
    verb: Callable[..., Any], names: Iterable[str]
) -> None:
    """A message of its own, in place of a guess by spelling."""
    unanswered = []
    for name in names:
        if name in _OF_ALL_MODULES or name in _arguments(verb):
            continue
        with pytest.raises(UnknownArgumentError) as refused:
            verb(nn.Linear(2, 2), **{name: None})
        if "it takes: " in str(refused.value).lower():  # the message for an unknown word
            unanswered.append(f"{name}: {refused.value}")
    assert unanswered == []
