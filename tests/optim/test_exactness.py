"""An optimizer that steps on its shards does, bit for bit, what it does without, in every
implementation that torch has.
"""

from __future__ import annotations

from typing import Final

import pytest
import torch

from composable import step_on_shards
from tests.helpers.world import Pool, need_devices, spmd
from tests.optim.copies import (
    OPTIMIZERS,
    flags_of,
    groups_of,
    make_copies,
    plain_copies,
    sharded_model,
    step_beside_plain_copies,
    torch_steps_dtensors,
)


def _train(name: str, dtype: torch.dtype) -> None:
    kind = OPTIMIZERS[name][0]
    for flag in flags_of(kind):
        if not torch_steps_dtensors(kind, flag):
            continue
        copies = make_copies(name, flag, dtype=dtype)
        for step in range(3):
            copies.step(step)
        copies.step(3, skipped=2)  # a block without gradients: nothing of it advances
        copies.step(4, keep=True)  # gradients that somebody kept lie elsewhere
        copies.step(5)
        copies.step(6)


# which torch cannot step on DTensors
_ON_TWO: Final = [(name, 2) for name in OPTIMIZERS if name != "Rprop"]


@pytest.mark.parametrize(("name", "ranks"), [*_ON_TWO, ("AdamW", 3), ("SGD with momentum", 3)])
def test_every_bit_is_what_it_would_be(pool: Pool, name: str, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _train, name, torch.float32, device=device)


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "RMSprop"])
def test_every_bit_is_what_it_would_be_in_half_precision(
    pool: Pool, name: str, device: str
) -> None:
    need_devices(device, 2)
    pool.run(2, _train, name, torch.bfloat16, device=device)


@pytest.mark.parametrize("name", OPTIMIZERS)
@spmd(ranks=2)
def test_shards_are_stepped_like_plain_tensors_even_where_torch_cannot_step_dtensors(
    name: str,
) -> None:
    kind, options = OPTIMIZERS[name]
    for flag in flags_of(kind):
        model = sharded_model()
        groups = groups_of(model, options["lr"], apart=False)
        optimizer, reference = (
            kind(each, **options, **flag) for each in (groups, plain_copies(groups))
        )  # type: ignore[call-arg]
        step_on_shards(optimizer)
        step_beside_plain_copies(model, optimizer, reference, skipped=2)
