"""LoRA adapters of PEFT under the Trainer."""

from __future__ import annotations

import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

from tests.trainers.programs.cpu_ranks import Rows, tiny_llama
from tests.trainers.programs.recording import Record, digest, exported
from tests.trainers.programs.with_transformers import LLAMA, Noted, arguments


def run(record: Record, folder: str) -> None:
    """Train adapters only, save them, load them onto the base model; resume."""

    def trainer() -> Trainer:
        base = tiny_llama()
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = get_peft_model(base, config)
        return Trainer(
            model=model, args=arguments(folder, "FULL_STATE_DICT", LLAMA), train_dataset=Rows(64),
            callbacks=[Noted(record)],
        )  # fmt: skip

    first = trainer()
    first.train()
    record.note("trained on", digest(first.model))
    first.save_model(f"{folder}/final")
    dist.barrier()
    record.note("adapters", exported(f"{folder}/final"))
    loaded = PeftModel.from_pretrained(tiny_llama(), f"{folder}/final")
    record.note("loaded", digest(loaded))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    record.note("resumed", digest(again.model))
