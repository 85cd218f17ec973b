"""What a program notes of its numbers, and how many reductions each of its optimizer steps has."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from composable.comm.backends import comms_wrapped_by
from composable.comm.launch import Launch
from tests.helpers.communicators import Around, Pairs

# FSDP2 calls one of them, by the version of torch.
_THEIRS = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else (
    "reduce_scatter_tensor"
)  # fmt: skip


class Record:
    """Numbers by name, in the order in which they came.

    Attributes:
        numbers: what tests compare.
        reductions: of each optimizer step, how many reduce-scatters there were since the last one.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, list[Any]] = {}
        self.reductions: list[int] = []
        self._count = 0

    def note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            value = value.tolist()
        self.numbers.setdefault(name, []).append(value)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count reductions of both backends in the body."""
        record, theirs = self, getattr(dist, _THEIRS)

        class Counting(Around):
            def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Any:
                record._count += 1
                return super().reduce_scatter(pairs, launch, scale)

        def counted(*args: Any, **kwargs: Any) -> Any:
            record._count += 1
            return theirs(*args, **kwargs)

        def stepped(*_: Any) -> None:
            record.reductions.append(record._count)
            record._count = 0

        hook = register_optimizer_step_post_hook(stepped)
        try:
            with mock.patch.object(dist, _THEIRS, counted), comms_wrapped_by(Counting):
                yield
        finally:
            hook.remove()


def digest(state: nn.Module | Mapping[str, Any]) -> list[Any]:
    """The number of tensors, the sum of all values, and a hash that equal bits have alike. All
    ranks call it.
    """
    tensors = state.state_dict() if isinstance(state, nn.Module) else state
    bits, total = hashlib.sha256(), 0.0
    for name in sorted(tensors):
        value = tensors[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        value = value.detach().float().contiguous()
        bits.update(name.encode() + value.numpy().tobytes())
        total += value.double().abs().sum().item()
    return [len(tensors), total, bits.hexdigest()[:12]]


def exported(folder: str) -> list[Any]:
    """The digest of the safetensors in a folder."""

    whole: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        whole |= load_file(file)
    return digest(whole)


def start_over() -> None:
    """Let the next program start as in a process of its own."""
    if "accelerate" in sys.modules:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]  # accelerate and the Trainer hand options on in them
    gc.collect()
