"""Replicated parameters that one rank freezes, unfreezes or casts alone: named on all ranks, and nothing is averaged wrongly."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.compare import averaged_gradients
from tests.helpers.means import Parts, assert_means, batch_of, twins
from tests.helpers.quiet import errors_only
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool

_CHANGES: Final[dict[str, tuple[Callable[[nn.Module], object], Callable[[nn.Module], object], str, str]]] = {
    "frozen": (
        lambda model: model.layers[0].bias.requires_grad_(False),
        lambda model: model.layers[0].bias.requires_grad_(True),
        "layers.0.bias",
        "float64, frozen",
    ),
    "cast": (lambda model: model.layers[1].float(), lambda model: model.layers[1].double(), "layers.1.weight", "float32"),
}


class _Casting(Parts):
    def forward(self, x: torch.Tensor, order: object) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@errors_only()
def _changed_alone(change: str, steps: int) -> str:
    """Rank 1 changes something after so many steps, and takes it back when that has been refused."""
    there, back, _, _ = _CHANGES[change]
    plain, ours = twins(_Casting)

    def step(number: int) -> None:
        for model in (plain, ours):
            model.zero_grad()
        plain(batch_of(number), ()).sum().backward()
        expected = averaged_gradients(plain)
        ours(batch_of(number), ()).sum().backward()
        assert_means(expected, ours)

    for number in range(steps):
        step(number)
    if dist.get_rank() == 1:
        there(ours)
    ours.zero_grad()
    said = refusal(lambda: ours(batch_of(7), ()).sum().backward())
    if dist.get_rank() == 1:
        back(ours)
    dist.barrier()
    for number in range(3):
        step(number)
    return said


@pytest.mark.host
@pytest.mark.beyond_sim("groups of accelerators do not notice that sizes differ, and ranks that once agreed ask no more")
@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_one_rank_changed_is_named_on_all_ranks(pool: Pool, change: str, steps: int) -> None:
    _, _, name, kind = _CHANGES[change]
    said = same_on_all(pool.run(2, _changed_alone, change, steps))
    expected = f"RanksDisagreeError: replicate(unit '(root)'): parameter '{name}' is float64 on rank 0, and {kind} on rank 1, so gradients cannot be averaged. Freeze, unfreeze and cast parameters (requires_grad_(), half(), to()) on all ranks alike. Clear the gradients before going on"
    assert said == expected
