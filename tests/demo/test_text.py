"""The data is real, the same everywhere, and a pure function of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.demo.options import DemoError
from examples.demo.text import batch, read_corpus


def test_the_standard_library_of_this_interpreter_is_the_text() -> None:
    corpus = read_corpus()
    text = bytes(corpus.train.tolist())
    assert corpus.files > 100
    assert b"\ndef " in text
    assert b"class ArgumentParser" in text
    assert 0 < len(corpus.validation) < len(corpus.train) // 5


def test_every_twentieth_file_is_held_out_and_no_other(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"module_{number:02}.py").write_bytes(bytes([number]) * 4096)
    corpus = read_corpus(tmp_path)
    assert set(corpus.validation.tolist()) == {19, 39}
    assert set(corpus.train.tolist()) == set(range(40)) - {19, 39}


def test_an_interpreter_without_sources_is_refused_by_folder(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("pass\n")
    with pytest.raises(DemoError, match=f"too little text in {tmp_path}"):
        read_corpus(tmp_path)


def test_targets_are_the_inputs_one_byte_later() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    idx, targets = batch(data, step=3, seed=0, size=5, context=16)
    assert idx.shape == targets.shape == (5, 16)
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    assert torch.equal(targets, idx + 1)


def test_a_batch_depends_on_step_and_seed_and_on_nothing_else() -> None:
    data = torch.arange(200, dtype=torch.uint8)

    def starts(step: int, seed: int) -> list[int]:
        return batch(data, step=step, seed=seed, size=8, context=16)[0][:, 0].tolist()

    first = starts(0, 0)
    torch.manual_seed(99)
    torch.rand(5)
    assert starts(0, 0) == first
    assert starts(1, 0) != first
    assert starts(0, 1) != first
    assert starts(-1, 0) != first


def test_every_byte_of_the_data_can_be_drawn_as_a_target_or_input() -> None:
    data = torch.arange(18, dtype=torch.uint8)
    seen: set[int] = set()
    for step in range(20):
        idx, targets = batch(data, step=step, seed=0, size=8, context=16)
        seen |= set(idx.flatten().tolist()) | set(targets.flatten().tolist())
    assert seen == set(range(18))
