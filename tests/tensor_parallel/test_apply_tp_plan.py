"""`apply_tp_plan`: what it refuses, and models that are not the same on all ranks. How models train
is tested in `test_transformers.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable import apply_tp_plan, checkpoint, fully_shard
from composable.errors import AnnotationError, RanksDisagreeError
from tests.helpers.compare import full
from tests.helpers.world import spmd
from tests.tensor_parallel.models import mesh_of
from tests.tensor_parallel.transformers_models import VOCABULARY, llama


@spmd(ranks=4)
def test_what_cannot_be_is_refused() -> None:
    mesh = mesh_of(2, 2)
    with pytest.raises(AnnotationError, match="the Linear has no tp_plan, as many models"):
        apply_tp_plan(nn.Linear(2, 2), mesh["tp"])
    with pytest.raises(AnnotationError, match="the LlamaForCausalLM has no ep_plan"):
        apply_tp_plan(llama(), mesh["tp"], experts=True)
    torch.manual_seed(0)
    model = llama()
    with pytest.raises(AnnotationError, match=r"mesh must have one dimension"):
        apply_tp_plan(model, mesh)
    checkpoint(model.model.layers[0])
    fully_shard(model.lm_head, mesh=mesh["dp"])
    with pytest.raises(AnnotationError, match="'lm_head' is annotated already"):
        apply_tp_plan(model, mesh["tp"])


@spmd(ranks=2)
def test_what_was_done_before_is_refused_by_name() -> None:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - seconds

    tp = mesh_of(1, 2)["tp"]
    torch.manual_seed(0)
    model = apply_tp_plan(llama(), tp)
    with pytest.raises(AnnotationError, match=r"weight' is a DTensor already"):
        apply_tp_plan(model, tp)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        around = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(AnnotationError, match="no module of the plan is in this PeftModel"):
        apply_tp_plan(around, tp)
    assert not any(isinstance(p, DTensor) for p in around.parameters())


@spmd(ranks=4)
def test_ranks_of_one_mesh_choose_one_dimension_where_parts_are_uneven() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    whole = torch.randn(3, 1024, 512)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    placements = [None] * 4
    dist.all_gather_object(placements, str(model.weight.placements))
    assert len(set(placements)) == 1
    assert torch.equal(full(model.weight), whole)


@spmd(ranks=2)
def test_a_model_that_is_checkpointed_before_is_taken() -> None:
    torch.manual_seed(0)
    model = llama()
    checkpoint(model.model.layers[0])
    apply_tp_plan(model, mesh_of(1, 2)["tp"])
    assert model.model.layers[0].mlp.down_proj.weight.placements == (Shard(1),)


@spmd(ranks=2)
def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    model = apply_tp_plan(llama(tied=True), mesh_of(1, 2)["tp"])
    weight: Any = model.lm_head.weight  # type: ignore[union-attr]
    assert weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert full(weight).shape == (VOCABULARY, 16)


@spmd(ranks=2)
def test_ranks_with_other_weights_are_reported_or_get_those_of_the_first() -> None:
    mesh = mesh_of(1, 2)
    torch.manual_seed(dist.get_rank())
    model = llama()
    with pytest.raises(RanksDisagreeError, match=r"apply_tp_plan.*seed equally"):
        apply_tp_plan(model, mesh["tp"])
    torch.manual_seed(0)
    expected = llama()
    apply_tp_plan(model, mesh["tp"], sync_module_states="broadcast")
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), parameter)
