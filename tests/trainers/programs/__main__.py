"""`python -m tests.trainers.programs FOLDER NAME...`: run programs one after another, and print
what each noted. They share imports, which take longer than the programs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import fsdp

from composable.torch_private import classes_of_fsdp2
from tests.trainers.programs.recording import Record, start_over

FULL: Final = {"kind": "FULL_STATE_DICT"}
SHARDED: Final = {"kind": "SHARDED_STATE_DICT"}

# name: module, function, arguments. The first of each trainer, and then with other options.
PROGRAMS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "accelerate": ("with_accelerate", "run", SHARDED),
    "Trainer": ("with_transformers", "causal", {**FULL, "load_best_model_at_end": True}),
    "PEFT": ("with_peft", "run", {}),
    "SFTTrainer": ("with_trl", "sft", {}),
    "Fabric": ("with_fabric", "run", {"shards": True}),
    "calls of torchtitan": ("as_torchtitan_calls", "run", {"chunked": True, "bf16": False}),
}
OPTIONS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "accelerate, bf16": (
        "with_accelerate", "run", {**FULL, "precision": "bf16", "checkpointing": True},
    ),
    "accelerate, tied weights": ("with_accelerate", "run", {**SHARDED, "tied": True}),
    "Trainer, sharded checkpoints": (
        "with_transformers", "causal", {**SHARDED, "gradient_checkpointing": True},
    ),
    "Trainer, bf16": ("with_transformers", "causal", {**FULL, "bf16": True}),
    "Seq2SeqTrainer": ("with_transformers", "encoder_decoder", {"tied": False}),
    "Seq2SeqTrainer, sharded before": ("with_transformers", "encoder_decoder", {"tied": True}),
    "transformers, sharded while loading": ("with_transformers", "loaded_sharded", {}),
    "transformers, experts": ("with_transformers", "loaded_sharded", {"experts": True}),
    "DPOTrainer": ("with_trl", "dpo", {}),
    "Fabric, one file": ("with_fabric", "run", {"shards": False}),
    "calls of torchtitan, bf16": ("as_torchtitan_calls", "run", {"chunked": False, "bf16": True}),
}  # fmt: skip

GUIDE: Final = {"the guide": ("of_the_guide", "run", {})}

# Over composable alone.
BY_HAND: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "Trainer, annotated by hand": ("by_hand", "by_trainer", {}),
    "SFTTrainer, annotated by hand": ("by_hand", "by_sft", {}),
    "accelerate, annotated by hand": ("by_hand", "by_accelerate", {}),
}

# What must be installed.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "with_accelerate": ("accelerate", "transformers"),
    "with_transformers": ("accelerate", "transformers"),
    "with_peft": ("peft", "accelerate", "transformers"),
    "with_trl": ("trl", "datasets", "accelerate", "transformers"),
    "with_fabric": ("lightning_fabric",),
    "as_torchtitan_calls": (),
    "by_hand": ("trl", "datasets", "accelerate", "transformers"),
    "of_the_guide": ("peft", "accelerate", "transformers"),
}


def _program(name: str) -> tuple[str, str, dict[str, Any]]:
    return {**PROGRAMS, **OPTIONS, **GUIDE, **BY_HAND}[name]


def main(folder: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    over_fsdp2 = not fsdp.fully_shard.__module__.startswith("composable.")
    if over_fsdp2 and any("accelerate" in NEEDS[_program(name)[0]] for name in names):
        ranks = importlib.import_module("tests.trainers.programs.cpu_ranks")
        ranks.take_cpu_ranks_for_accelerators()
    outcomes = {}
    for number, name in enumerate(names):
        file, function, arguments = _program(name)
        own = os.path.join(folder, str(number))
        os.makedirs(own, exist_ok=True)
        record, failed = Record(), ""
        try:
            program = getattr(importlib.import_module(f"tests.trainers.programs.{file}"), function)
            with record.counting():
                program(record, own, **arguments)
        except Exception:
            failed = traceback.format_exc()
        outcomes[name] = [record.numbers, record.reductions, failed]
        start_over()
    if dist.get_rank() == 0:
        sharded_by = "FSDP2" if classes_of_fsdp2() else "composable"
        print(f"{sharded_by} {json.dumps(outcomes)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
