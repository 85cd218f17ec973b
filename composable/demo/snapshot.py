"""Sharded checkpoints through `torch.distributed.checkpoint`.

Every rank writes its own shards, and the files can be read by any number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from composable.demo.options import BadValue, Options


@dataclass(frozen=True)
class Progress:
    """How far a run has come: steps done, the training loss of each, and (step, validation loss) pairs."""

    step: int
    losses: list[float]
    validation: list[tuple[int, float]]


def save(options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Write a checkpoint and make it the one that `--resume` finds; called by all ranks."""
    folder = _home(options) / f"step-{progress.step:06d}"
    if dist.get_rank() == 0 and folder.exists():
        shutil.rmtree(folder)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    write_shards({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dist.barrier()
    if dist.get_rank() == 0:
        # Older checkpoints are removed only after the new one is complete: a run that ends while it saves can be
        # resumed from the one before.
        record = {
            "folder": folder.name,
            "step": progress.step,
            "options": options.fixed(),
            "losses": progress.losses,
            "validation": progress.validation,
        }
        draft = _home(options) / "latest.json.new"
        draft.write_text(json.dumps(record))
        os.replace(draft, _home(options) / "latest.json")
        for other in sorted(_home(options).glob("step-*")):
            if other != folder:
                shutil.rmtree(other)
    return folder


def load(options: Options, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill `model` and `optimizer` from the latest checkpoint; called by all ranks."""
    record = read_record(options)
    weights, state = get_state_dict(model, optimizer)
    read_shards({"model": weights, "optimizer": state}, checkpoint_id=_home(options) / record["folder"])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return Progress(record["step"], record["losses"], [(step, loss) for step, loss in record["validation"]])


def saved_step(options: Options) -> int:
    """The step of the checkpoint in `--out`; 0 where there is none, or none that can be read."""
    try:
        record = json.loads((_home(options) / "latest.json").read_text())
        return int(record["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def read_record(options: Options) -> dict[str, Any]:
    """What is known of the latest checkpoint, after a check that this run can continue it.

    Raises:
        BadValue: there is none, it belongs to a run with other options, or it has no steps left to do.
    """
    latest = _home(options) / "latest.json"
    if not latest.exists():
        raise BadValue(f"--resume: there is no checkpoint in {options.out}")
    record: dict[str, Any] = json.loads(latest.read_text())
    for name, value in options.fixed().items():
        if record["options"][name] != value:
            flag = "--" + name.replace("_", "-")
            raise BadValue(f"--resume: the checkpoint was made with {flag} {record['options'][name]}, not {value}")
    if options.until(record["step"]) <= record["step"]:
        raise BadValue(f"--resume: the checkpoint is at step {record['step']} already; --steps must go beyond that")
    return record


def _home(options: Options) -> Path:
    return options.out / "checkpoint"
