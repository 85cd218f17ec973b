"""The Trainer of transformers with its own FSDP options: accumulate, clip, save, resume."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.fsdp2.programs.cpu_ranks import rows, take_cpu_ranks_for_accelerators, tiny_llama

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.rows = rows(64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Printed(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in (logs or {}) and dist.get_rank() == 0:
                print(f"{key} {float(logs[key]):.5f}", flush=True)


def trainer_in(folder: str) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=3,
        save_strategy="steps",
        report_to=[],
        seed=0,
        disable_tqdm=True,
    )
    return Trainer(
        model=tiny_llama(), args=args, train_dataset=Rows(),
        eval_dataset=torch.utils.data.Subset(Rows(), range(8)), callbacks=[Printed()],
    )  # fmt: skip


def main(folder: str) -> None:
    take_cpu_ranks_for_accelerators()
    trainer = trainer_in(folder)
    trainer.train()
    if dist.get_rank() == 0:
        print(f"class {type(trainer.model_wrapped).__name__}")
    trainer.evaluate()
    trainer_in(folder).train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
