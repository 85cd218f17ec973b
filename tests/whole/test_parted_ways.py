"""Ranks that run different units are told so where they wait for each other, and meet in a later step."""

from __future__ import annotations

import copy
import re
from datetime import timedelta
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import fully_shard
from composable.errors import CommunicationError, ComposableError
from tests.helpers.world import Pool

_PATIENCE: Final = 45.0  # nobody should wait for as long


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(8, 8) for _ in range(4)])
        self.calls: tuple[int, ...] = (0, 1, 2, 3)
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        for number in self.calls:
            x = self.layers[number](x)
            if self.raises and number == 1:
                raise MemoryError("as planned")
        return x


# What rank 0 calls in one of the steps.
_CALLS: Final = {"a unit less": (0, 2, 3), "another order": (3, 2, 1, 0), "a unit more": (0, 1, 2, 3, 0)}


def _train(model: _Model, rank: int, calls: tuple[int, ...], lost: int, seen: dict[int, float], errors: dict[int, str]) -> None:
    """Five steps, in one of which rank 0 makes other `calls`, or raises. Parameters stay as they are."""
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        x = torch.randn(4, 8, generator=generator)
        model.zero_grad()
        wrong = step == lost and rank == 0
        model.calls = calls if wrong and calls else (0, 1, 2, 3)
        model.raises = wrong and not calls
        try:
            loss = model(x).square().mean()
            loss.backward()
        except (MemoryError, ComposableError) as error:
            errors[step] = f"{type(error).__name__}: {error}"
            continue
        seen[step] = loss.item()


def _part(calls: tuple[int, ...], lost: int) -> tuple[dict[int, float], dict[int, float], dict[int, str]]:
    """Losses as in one process, those seen, and the errors, by step."""
    torch.manual_seed(0)
    model = _Model()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=dist.new_group(timeout=timedelta(seconds=_PATIENCE)), policy={_Layer})
    expected: dict[int, float] = {}
    seen: dict[int, float] = {}
    errors: dict[int, str] = {}
    _train(plain, -1, (), lost, expected, {})
    _train(model, dist.get_rank(), calls, lost, seen, errors)
    dist.barrier()
    return expected, seen, errors


_MUTUAL: Final = re.compile(
    r"CommunicationError: rank \d: the (all-gather|gradient reduction) of unit '[a-z0-9.()]+' failed: rank \d waits for the "
    r"(all-gather|gradient reduction) of unit '[a-z0-9.()]+', and neither rank comes to what the other waits for: in this step "
    r"they run different units, or run them in another order or another number of times, or one of them has cast the model, "
    r"or has other communication hooks\n"
)
_TOLD: Final = re.compile(r"CommunicationError: rank \d: the .* of unit '[a-z0-9.()]+' failed: rank \d has left this step: ")


@pytest.mark.host
@pytest.mark.parametrize("what", _CALLS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_run_different_units_after_the_first_step_are_told_and_meet_in_a_later_one(
    pool: Pool, ranks: int, what: str
) -> None:
    found = pool.run(ranks, _part, _CALLS[what], 2)
    texts = []
    for rank, (expected, seen, errors) in enumerate(found):
        assert [*errors] == [2], f"rank {rank}: {errors}"
        assert seen == pytest.approx({step: loss for step, loss in expected.items() if step != 2})
        texts.append(errors[2])
    assert any(map(_MUTUAL.match, texts)), texts
    assert all(_MUTUAL.match(text) or _TOLD.match(text) for text in texts), texts


def _cast_on_rank_0(dtype: torch.dtype, steps: int) -> tuple[str, float, float]:
    """What a forward says after rank 0 alone has cast the model; then what one computes when all have, and the plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = fully_shard(copy.deepcopy(plain), policy={nn.Linear})
    x = torch.ones(1, 8)
    for _ in range(steps):
        model(x).sum().backward()
    if dist.get_rank() == 0:
        model.to(dtype)
    said = ""
    try:
        model(x.to(model[0].weight.dtype))
    except CommunicationError as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    model.to(dtype)
    return said, model(x.to(dtype)).item(), plain.to(dtype)(x.to(dtype)).item()


@pytest.mark.host
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_rank_that_casts_the_model_alone_takes_nobodys_bytes_for_values(pool: Pool, steps: int, dtype: torch.dtype) -> None:
    for said, value, expected in pool.run(2, _cast_on_rank_0, dtype, steps):
        assert _MUTUAL.match(said) or _TOLD.match(said), said
        assert value == pytest.approx(expected, rel=1e-2)


@pytest.mark.host
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_others_are_told_of_a_rank_that_raises_in_the_first_forward(pool: Pool, ranks: int) -> None:
    for rank, (expected, seen, errors) in enumerate(pool.run(ranks, _part, (), 0)):
        assert seen == pytest.approx({step: loss for step, loss in expected.items() if step})
        assert [*errors] == [0]
        if rank == 0:
            assert errors[0] == "MemoryError: as planned"
        else:
            assert errors[0].startswith(
                f"CommunicationError: rank {rank}: the check of the order of units below unit '(root)' failed: rank 0 has left "
                "this step: unit '(root)' raised MemoryError: as planned\n"
            )


def _run_others_in_the_first_forward() -> tuple[dict[int, float], dict[int, float], dict[int, str]]:
    return _part((0, 2, 3), 0)


def test_ranks_that_disagree_in_the_first_forward_meet_in_the_next(pool: Pool) -> None:
    for expected, seen, errors in pool.run(2, _run_others_in_the_first_forward):
        assert seen == pytest.approx({step: loss for step, loss in expected.items() if step})
        assert errors == {
            0: "RanksDisagreeError: the ranks run their modules in different orders in the first forward: rank 0 runs "
            "'layers.2'; rank 1 runs 'layers.1'. All ranks must run the same fully sharded modules in the same order."
        }
