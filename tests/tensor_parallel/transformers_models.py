"""Small mixtures of experts of transformers, built from configurations, and their training beside
one process.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen3MoeConfig,
)

from tests.helpers.compare import full

VOCABULARY: Final = 50  # which no number of ranks here divides
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "use_cache": False,
}


def _mixtral(experts: int) -> Any:
    return MixtralConfig(**_COMMON, num_key_value_heads=2, num_local_experts=experts)


def _qwen3(experts: int) -> Any:
    return Qwen3MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=4,
        moe_intermediate_size=16,
        num_experts=experts,
        num_experts_per_tok=2,
    )


def _deepseek(experts: int) -> Any:
    """One dense layer, and one with a shared expert; attention of low rank."""
    return DeepseekV3Config(
        **_COMMON,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )


KINDS: Final[dict[str, Callable[[int], Any]]] = {
    "Mixtral": _mixtral,
    "Qwen3-MoE": _qwen3,
    "DeepSeek-V3": _deepseek,
}


def made(kind: str, experts: int = 4, seed: int = 0, implementation: str | None = None) -> Any:
    """A model of float32, since `grouped_mm` takes no float64. Experts that few tokens go to get
    small gradients, so weights are larger than those of transformers.
    """
    torch.manual_seed(seed)
    config = KINDS[kind](experts)
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def llama(*, tied: bool = False) -> Any:
    """Without experts."""
    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_key_value_heads=2, tie_word_embeddings=tied))


def saved(model: Any) -> str:
    """A folder that `from_pretrained` of all ranks reads."""
    reported = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(reported)
    assert reported[0] is not None
    if dist.get_rank() == 0:
        model.save_pretrained(reported[0])
    dist.barrier()
    return reported[0]


def concrete(model: Any, plan: dict[str, str]) -> dict[str, str]:
    """A plan of transformers with the numbers of this model's layers in place of stars."""
    found: dict[str, str] = model._expand_parallel_plan(plan)
    return found


def batches(replicas: int, steps: int = 3) -> list[Tensor]:
    """Two rows for each data-parallel rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2 * replicas, 7), generator=generator) for _ in range(steps)]


def _step(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def assert_trains_beside(
    model: Any, alone: Any, replica: int, replicas: int, steps: int = 3
) -> None:
    """Train `model`, and `alone` in this process on the rows of all; compare losses, gradients and
    updates.

    Args:
        replica: which of the `replicas` parts of the batch this rank has.
    """
    alone = copy.deepcopy(alone).train()
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for each in (model.train(), alone)
    ]
    for tokens in batches(replicas, steps):
        loss = _step(model, tokens[2 * replica : 2 * replica + 2])
        dist.all_reduce(loss)
        expected = _step(alone, tokens)
        torch.testing.assert_close(loss / dist.get_world_size(), expected, rtol=1e-5, atol=1e-6)
        found = dict(model.named_parameters())
        for name, parameter in alone.named_parameters():
            gradient = found[name].grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                _assert_near(f"gradient of {name}", full(gradient), parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, alone)


def _assert_near(name: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}"
    )


def assert_same_values(model: Any, alone: Any) -> None:
    found = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        _assert_near(name, full(found[name].detach()), parameter.detach())


def mesh_of_experts(efsdp: int, ep: int) -> DeviceMesh:
    """With a dimension of one rank for what transformers slices the batch over."""
    return DeviceMesh(
        "cpu",
        torch.arange(efsdp * ep).view(efsdp, ep, 1),
        mesh_dim_names=("efsdp", "ep", "tp"),
    )
