"""Models that are annotated by composable's own verb before a trainer gets them, which is asked for
FSDP2 and otherwise left at its defaults: they save, resume and evaluate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from composable import fully_shard
from tests.trainers.programs.cpu_ranks import Rows, tiny_llama
from tests.trainers.programs.recording import Record, digest


def _annotated() -> LlamaForCausalLM:
    return fully_shard(tiny_llama(), policy={LlamaDecoderLayer})


def _saved_and_resumed(record: Record, folder: str, make: Callable[[], Any]) -> None:
    first = make()
    first.train()
    assert isinstance(first.model, LlamaForCausalLM)
    record.note("trained on", digest(first.model))
    record.note("eval_loss", first.evaluate()["eval_loss"])
    first.save_model(f"{folder}/final")
    dist.barrier()
    record.note("loaded", digest(LlamaForCausalLM.from_pretrained(f"{folder}/final")))
    again = make()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    record.note("resumed", digest(again.model))


_STEPS: dict[str, Any] = {
    "max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "fsdp": True,
    "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def by_trainer(record: Record, folder: str) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as --cpu says; start_over has taken it away
    args = TrainingArguments(output_dir=folder, **_STEPS)
    _saved_and_resumed(
        record,
        folder,
        lambda: Trainer(
            model=_annotated(), args=args, train_dataset=Rows(64), eval_dataset=Rows(8)
        ),
    )


def by_sft(record: Record, folder: str) -> None:
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    from tests.trainers.programs.with_trl import texts, tokenizer  # noqa: PLC0415

    os.environ["ACCELERATE_USE_CPU"] = "true"
    # on accelerators TRL's default is bf16, which needs one
    args = SFTConfig(output_dir=folder, bf16=False, **_STEPS)
    _saved_and_resumed(
        record,
        folder,
        lambda: SFTTrainer(
            model=_annotated(), args=args, train_dataset=texts(64), eval_dataset=texts(8),
            processing_class=tokenizer(),
        ),
    )  # fmt: skip


def by_accelerate(record: Record, folder: str) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model: Any = _annotated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(16), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert type(model) is LlamaForCausalLM

    def train() -> None:
        model.train()
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            losses = [model(**batch).loss for batch in loader]
        return float(accelerator.gather_for_metrics(torch.stack(losses)).mean())

    train()
    accelerator.save_state(f"{folder}/state")
    train()
    record.note("trained on", digest(model))
    record.note("eval_loss", evaluate())
    accelerator.save_model(model, f"{folder}/weights")
    accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM(model.config)  # what save_model writes is no whole folder of a model
    loaded.load_state_dict(load_file(f"{folder}/weights/model.safetensors"))
    record.note("loaded", digest(loaded))
    accelerator.load_state(f"{folder}/state")
    train()
    record.note("resumed", digest(model))
