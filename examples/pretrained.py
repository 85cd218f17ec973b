"""Shard a Hugging Face model, built from a configuration here, and feed it rank by rank; needs `pip
install transformers`.

torchrun --standalone --nproc-per-node=2 examples/pretrained.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable import checkpoint, describe, fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)  # or from_pretrained(...) on every rank

    checkpoint(model, policy={LlamaDecoderLayer})
    # embedding and head are one tied parameter: it belongs to the model itself
    fully_shard(model, policy={LlamaDecoderLayer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(12):
        start = torch.randint(0, 256, (8, 1))
        words = (start + torch.arange(24)) % 256  # the task: count up
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"step {step + 1:2}: loss {mean.item() / dist.get_world_size():.3f}")
    if dist.get_rank() == 0:
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
