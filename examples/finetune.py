"""Fine-tune a model: each rank reads its shards from a folder of safetensors, and the result is
written as such a folder; needs `pip install transformers safetensors`.

torchrun --standalone --nproc-per-node=2 examples/finetune.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable import checkpoint, describe, export, fully_shard, load


def write_folder(folder):
    """Write the files that a model hub would have; this example downloads nothing."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200kB")


def words_of(rows):
    start = torch.randint(0, 256, (rows, 1))
    return (start + torch.arange(24)) % 256  # the task: count up


def main(folder):
    dist.init_process_group("gloo")
    where = [folder]
    dist.broadcast_object_list(where)  # all ranks use rank 0's folder
    pretrained, tuned = Path(where[0]) / "pretrained", Path(where[0]) / "tuned"
    if dist.get_rank() == 0:
        write_folder(pretrained)
    dist.barrier()

    with torch.device("meta"):  # shapes and no memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pretrained))
    checkpoint(model, policy={LlamaDecoderLayer})
    fully_shard(model, policy={LlamaDecoderLayer})
    load(model, pretrained)  # each rank reads its shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(12):
        words = words_of(8)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"step {step + 1:2}: loss {mean.item() / dist.get_world_size():.3f}")

    export(model, tuned)
    alone = AutoModelForCausalLM.from_pretrained(tuned)  # as another program would read it
    words = words_of(2)
    with torch.no_grad():
        same = torch.equal(model(input_ids=words).logits, alone(input_ids=words).logits)
    if dist.get_rank() == 0:
        print(f"read back, it computes the same: {same}")
        print(describe(model))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
