"""The trainers of TRL."""

from __future__ import annotations

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.trainers.programs.cpu_ranks import tiny_llama
from tests.trainers.programs.recording import Record, digest, exported
from tests.trainers.programs.with_transformers import LLAMA, Noted, arguments


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *[f"w{number}" for number in range(61)]]
    ids = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _text(start: int, length: int) -> str:
    return " ".join(f"w{(start + number) % 61}" for number in range(length))


def texts(number: int) -> Dataset:
    return Dataset.from_list([{"text": _text(start, 10)} for start in range(number)])


def sft(record: Record, folder: str) -> None:
    """Fine-tune, save, export, resume."""

    def trainer() -> SFTTrainer:
        return SFTTrainer(
            model=tiny_llama(),
            args=arguments(
                folder, "FULL_STATE_DICT", LLAMA, of=SFTConfig, bf16=False, max_length=12
            ),
            train_dataset=texts(64),
            processing_class=tokenizer(),
            callbacks=[Noted(record)],
        )

    first = trainer()
    first.train()
    record.note("trained on", digest(first.model))
    first.save_model(f"{folder}/final")
    dist.barrier()
    record.note("exported", exported(f"{folder}/final"))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    record.note("resumed", digest(again.model))


def dpo(record: Record, folder: str) -> None:
    """Train against a reference model, which TRL shards by itself."""
    pairs = [
        {"prompt": _text(n, 4), "chosen": _text(n + 4, 4), "rejected": _text(n + 30, 4)}
        for n in range(32)
    ]
    trainer = DPOTrainer(
        model=tiny_llama(),
        ref_model=tiny_llama(),
        args=arguments(
            folder,
            "FULL_STATE_DICT",
            LLAMA,
            of=DPOConfig,
            bf16=False,
            max_length=12,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        callbacks=[Noted(record)],
    )
    trainer.train()
    record.note("trained", digest(trainer.model))
