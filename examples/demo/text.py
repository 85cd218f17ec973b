"""Real text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from examples.demo.options import DemoError

CAP_BYTES: Final = 4 << 20
HELD_OUT_EVERY: Final = 20
VOCABULARY: Final = 256


class Corpus(NamedTuple):
    """Bytes to train on and held-out bytes, each a 1-D uint8 tensor, and how many files they come
    from.
    """

    train: Tensor
    validation: Tensor
    files: int


def read_corpus(folder: Path | None = None) -> Corpus:
    """The modules of the standard library in alphabetical order; every twentieth file is held out
    for validation.

    All processes of a run read the same bytes, because they run the same interpreter.

    Raises:
        DemoError: this interpreter comes without its sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    files = 0
    for path in sorted(folder.glob("*.py")):
        if len(train) >= CAP_BYTES:
            break
        files += 1
        (train if files % HELD_OUT_EVERY else held_out).extend(path.read_bytes())
    if len(train) < 1 << 16 or len(held_out) < 1 << 13:
        raise DemoError(
            f"too little text in {folder}: this Python comes without the sources of its standard"
            " library"
        )
    return Corpus(
        torch.frombuffer(train, dtype=torch.uint8),
        torch.frombuffer(held_out, dtype=torch.uint8),
        files,
    )


def batch(data: Tensor, *, step: int, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step, int64 of shape (size, context).

    A pure function of its arguments: so a resumed run, another number of ranks and the un-annotated
    model all see the same batch at the same step, and no position in the data needs to be saved.
    """
    # The generator uses 32 bits of its seed and no more, so both numbers are mixed into them.
    mixed = hashlib.sha256(f"{seed} {step}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(mixed))
    starts = torch.randint(len(data) - context, (size, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
