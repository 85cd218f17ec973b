"""Sharded checkpoints through `torch.distributed.checkpoint`.

Every rank writes its own shards, and the files can be read by any number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from examples.demo.options import DemoError, Options


@dataclass
class Progress:
    """How far a run has come: steps done, the training loss of each, and pairs of step and
    validation loss.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def save(
    options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write a checkpoint and make it the one that `--resume` finds; called by all ranks."""
    folder = _folder(options, progress.step)
    if dist.get_rank() == 0 and folder.exists():
        shutil.rmtree(folder)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    write_shards({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dist.barrier()
    if dist.get_rank() == 0:
        # Older checkpoints are removed only after the new one is complete: a run that ends while it
        # saves can be resumed from the one before.
        draft = folder.with_name("latest.json.new")
        draft.write_text(json.dumps({"options": options.fixed(), **asdict(progress)}))
        os.replace(draft, _latest(options))
        for other in sorted(folder.parent.glob("step-*")):
            if other != folder:
                shutil.rmtree(other)
    return folder


def load(options: Options, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Fill `model` and `optimizer` from the latest checkpoint; called by all ranks."""
    progress = read(options)
    weights, state = get_state_dict(model, optimizer)
    read_shards(
        {"model": weights, "optimizer": state}, checkpoint_id=_folder(options, progress.step)
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return progress


def saved_step(options: Options) -> int:
    """The step of the checkpoint in `--out`; 0 where there is none."""
    path = _latest(options)
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def read(options: Options) -> Progress:
    """What the latest checkpoint holds, after a check that this run can continue it.

    Raises:
        DemoError: there is none, it belongs to a run with other options, or it has no steps left to
            do.
    """
    if not _latest(options).exists():
        raise DemoError(f"--resume: there is no checkpoint in {options.out}")
    record = json.loads(_latest(options).read_text())
    made_with = record.pop("options")
    for name, value in options.fixed().items():
        if made_with[name] != value:
            flag = "--" + name.replace("_", "-")
            raise DemoError(
                f"--resume: the checkpoint was made with {flag} {made_with[name]}, not {value}"
            )
    progress = Progress(**record)
    if options.until(progress.step) <= progress.step:
        raise DemoError(
            f"--resume: the checkpoint is at step {progress.step} already; --steps must go beyond"
            " that"
        )
    return progress


def _folder(options: Options, step: int) -> Path:
    return options.out / "checkpoint" / f"step-{step:06d}"


def _latest(options: Options) -> Path:
    return options.out / "checkpoint" / "latest.json"
