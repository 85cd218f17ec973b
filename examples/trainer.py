"""Train with the Trainer of transformers from a folder of weights, without the whole model on any
rank; needs `pip install transformers accelerate safetensors`.

torchrun --standalone --nproc-per-node=2 examples/trainer.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable import describe, fully_shard, load
from composable.fsdp2 import install


def write_folder(folder):
    """Write the files that a model hub would have; this example downloads nothing."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step:2}: loss {float(logs['loss']):.3f}")


def main(folder):
    install(cpu=True)  # the Trainer shards with composable, also on CPUs
    args = TrainingArguments(  # makes the process group
        output_dir=folder,
        fsdp=True,  # type: ignore[arg-type]  # the annotation does not have bool yet
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        max_steps=24,
        logging_steps=8,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    where = [folder]
    dist.broadcast_object_list(where)  # all ranks use rank 0's folder
    args.output_dir = where[0]
    pretrained, tuned = Path(where[0]) / "pretrained", Path(where[0]) / "tuned"
    if dist.get_rank() == 0:
        write_folder(pretrained)
    dist.barrier()

    model = AutoModelForCausalLM.from_pretrained(pretrained, device_map="meta")  # no memory yet
    fully_shard(model, policy={LlamaDecoderLayer})
    load(model, pretrained)  # each rank reads its shards

    start = torch.randint(0, 256, (200, 1), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in (start + torch.arange(24)) % 256]
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[PrintLoss()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()  # the Trainer does not shard a sharded model again

    trainer.save_model(str(tuned))
    dist.barrier()
    alone = AutoModelForCausalLM.from_pretrained(tuned)  # as another program would read it
    words = dataset[0]["input_ids"][None]
    with torch.no_grad():
        model.eval()
        same = torch.equal(model(input_ids=words).logits, alone(input_ids=words).logits)
    if dist.get_rank() == 0:
        print(f"read back, it computes the same: {same}")
        print(describe(model))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
