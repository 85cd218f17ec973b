"""The programs of the guide to trainers, one after another, as by `composable.fsdp2 --cpu`."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from docs.generate import ROOT
from tests.trainers.programs.cpu_ranks import Rows, tiny_llama
from tests.trainers.programs.recording import Record, start_over
from tests.trainers.programs.with_transformers import tiny_t5

_PAGE = ROOT / "docs" / "guides" / "trainers.md"


def _missing(source: str) -> list[str]:
    packages = re.findall(r"^(?:from|import) (\w+)", source, re.M)
    return [package for package in packages if find_spec(package) is None]


def run(record: Record, folder: str) -> None:
    """Run them with the names that the page says they have, and note which ones ran."""
    names: dict[str, Any] = {
        "make_model": tiny_llama, "make_t5": tiny_t5, "dataset": [*Rows(16)],
    }  # fmt: skip
    if find_spec("trl") is not None:
        from tests.trainers.programs import with_trl  # noqa: PLC0415

        names |= {"texts": with_trl.texts(16), "tokenizer": with_trl.tokenizer()}
    os.chdir(folder)
    for source in re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.M | re.S):
        missing = _missing(source)
        if not missing:
            os.environ["ACCELERATE_USE_CPU"] = "true"
            exec(compile(source, str(_PAGE), "exec"), names)
            start_over()
        record.note("missing", missing)
    dist.barrier()
    record.note("files", sorted(os.listdir(folder)))
    os.chdir(ROOT)
