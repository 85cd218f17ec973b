"""What lets trainers that offer FSDP on accelerators only use CPU ranks: the same over both. And a
small model and data.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

_init = PartialState.__init__


def take_cpu_ranks_for_accelerators() -> None:
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        _init(self, *args, **kwargs)
        shared = PartialState._shared_state
        if shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
            self.__dict__ = shared

    PartialState.__init__ = patched


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            tie_word_embeddings=tied, use_cache=False,
        )
    )  # fmt: skip


def tiny_mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            num_local_experts=4, use_cache=False,
        )
    )  # fmt: skip


def rows(number: int) -> torch.Tensor:
    start = torch.randint(0, 64, (number, 1), generator=torch.Generator().manual_seed(1))
    return (start + torch.arange(12)) % 64


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows as language models are trained on them."""

    def __init__(self, number: int) -> None:
        self.rows = rows(number)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
