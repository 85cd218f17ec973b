"""The Trainer of transformers with its own FSDP options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch.distributed import fsdp
from transformers import (
    AutoModelForCausalLM,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

from tests.trainers.programs.cpu_ranks import Rows, rows, tiny_llama, tiny_mixtral
from tests.trainers.programs.recording import Record, digest, exported

transformers.logging.set_verbosity_error()
LLAMA: Final = "LlamaDecoderLayer"


class Noted(TrainerCallback):
    """Notes what the trainer logs."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for key in ("loss", "grad_norm", "eval_loss", "rewards/margins"):
            if key in (logs or {}):
                self.record.note(key, float(logs[key]))


def arguments(
    folder: str,
    kind: str,
    *layers: str,
    of: Callable[..., Any] = TrainingArguments,
    **more: Any,
) -> Any:
    options = {
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": True,
            "transformer_layer_cls_to_wrap": list(layers),
            "state_dict_type": kind,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if layers else "NO_WRAP",
        },
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "seed": 0,
        "disable_tqdm": True,
    }
    return of(output_dir=folder, **{**options, **more})


def causal(record: Record, folder: str, *, kind: str, **more: Any) -> None:
    """Accumulate, clip, evaluate, save, load the best, predict and export; then resume."""

    def trainer() -> Trainer:
        return Trainer(
            model=tiny_llama(),
            args=arguments(folder, kind, LLAMA, eval_strategy="steps", eval_steps=2, **more),
            train_dataset=Rows(64),
            eval_dataset=Rows(8),
            callbacks=[Noted(record)],
        )

    first = trainer()
    first.train()
    record.note("trained on", digest(first.model))
    record.note("eval_loss", first.evaluate()["eval_loss"])
    record.note("predicted", float(abs(first.predict(Rows(8)).predictions).sum()))
    first.model.eval()
    start = rows(8)[dist.get_rank()][None, :4]  # ranks stop at different lengths
    record.note("tokens", first.model.generate(start, max_new_tokens=2 + 2 * dist.get_rank()))
    first.save_model(f"{folder}/final")
    if kind == "FULL_STATE_DICT":
        dist.barrier()
        record.note("exported", exported(f"{folder}/final"))
        record.note("loaded", digest(type(first.model).from_pretrained(f"{folder}/final")))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    record.note("resumed", digest(again.model))


def _marian() -> Any:
    torch.manual_seed(0)
    return MarianMTModel(
        MarianConfig(
            vocab_size=64, decoder_vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
            bos_token_id=2, decoder_start_token_id=0, forced_eos_token_id=None,
            share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
        )
    )  # fmt: skip


def tiny_t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _sharded_t5() -> Any:
    """Its embedding is in three places, two of them in no unit of accelerate's plan: FSDP2 and
    composable refuse that one. What the user has sharded, trainers take as it is.
    """
    model = tiny_t5()
    for block in [*model.encoder.block, *model.decoder.block]:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def encoder_decoder(record: Record, folder: str, *, tied: bool) -> None:
    """Train, evaluate, predict by generate and export; then resume."""
    layers = [] if tied else ["MarianEncoderLayer", "MarianDecoderLayer"]
    options = arguments(
        folder, "FULL_STATE_DICT", *layers, of=Seq2SeqTrainingArguments, max_steps=3,
        predict_with_generate=True, generation_max_length=6,
    )  # fmt: skip

    def trainer() -> Seq2SeqTrainer:
        return Seq2SeqTrainer(
            model=_sharded_t5() if tied else _marian(),
            args=options,
            train_dataset=Rows(64),
            eval_dataset=Rows(6),
            callbacks=[Noted(record)],
        )

    first = trainer()
    first.train()
    record.note("trained on", digest(first.model))
    record.note("eval_loss", first.evaluate()["eval_loss"])
    record.note("tokens", first.predict(Rows(6)).predictions.tolist())
    first.save_model(f"{folder}/final")
    dist.barrier()
    kind = T5ForConditionalGeneration if tied else MarianMTModel
    record.note("loaded", digest(kind.from_pretrained(f"{folder}/final")))
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    record.note("resumed", digest(again.model))


def loaded_sharded(record: Record, folder: str, *, experts: bool = False) -> None:
    """Load by transformers' own distribution, which shards while it loads, experts over the same
    ranks; train and export.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        (tiny_mixtral() if experts else tiny_llama()).save_pretrained(f"{folder}/saved")
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/saved",
        distributed_config=DistributedConfig(fsdp_size=2, ep_size=1 + experts),
        dtype=torch.float32,
    )
    options = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=options, train_dataset=Rows(64), callbacks=[Noted(record)]
    )  # fmt: skip
    trainer.train()
    record.note("trained", digest(model))
    model.save_pretrained(f"{folder}/final")
    dist.barrier()
    record.note("loaded", digest(AutoModelForCausalLM.from_pretrained(f"{folder}/final")))
