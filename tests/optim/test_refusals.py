"""Optimizers that do not step element by element are refused by name, and what is vouched for is
checked where it can be.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn, optim
from torch.optim import Optimizer

from composable import step_on_shards
from composable.errors import OptimizerError
from tests.helpers.refusals import refusal
from tests.helpers.world import spmd
from tests.optim.twins import (
    Exchanging,
    Sign,
    groups_of,
    plain_copies,
    sharded_model,
    step_beside_plain_copies,
)


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


class Louder(optim.AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Named(optim.AdamW):
    """A subclass that steps like its base."""


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, optim.Muon, optim.SparseAdam])
def test_what_looks_at_more_than_elements_is_refused_even_if_vouched_for(
    kind: type[Optimizer],
) -> None:
    optimizer = kind(_parameters())  # type: ignore[call-arg]
    for vouched in (False, True):
        with pytest.raises(
            OptimizerError, match=f"{kind.__name__} does not step element by element"
        ):
            step_on_shards(optimizer, elementwise=vouched)
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_messages() -> None:
    texts = [
        refusal(lambda: step_on_shards(optim.Muon(_parameters()))),
        refusal(lambda: step_on_shards(Louder(_parameters()))),
        refusal(lambda: step_on_shards(Sign(_parameters(), {"lr": 0.1}))),
        refusal(lambda: step_on_shards(optim.Adam(_parameters(), differentiable=True))),
        refusal(lambda: step_on_shards(nn.Linear(1, 1))),  # type: ignore[arg-type]
    ]
    lines = [line for text in texts for line in textwrap.wrap(text, 110)]
    assert_expected_inline(
        "\n".join(lines),
        """\
OptimizerError: step_on_shards: Muon does not step element by element. Leave step_on_shards out, or give
parameters that another optimizer could step to one of their own
OptimizerError: step_on_shards: Louder is not known here, or changes how its base class steps. If it updates
each element from that element of the parameter, its gradient and its state alone, say so:
step_on_shards(optimizer, elementwise=True); otherwise leave it out
OptimizerError: step_on_shards: Sign is not known here, or changes how its base class steps. If it updates
each element from that element of the parameter, its gradient and its state alone, say so:
step_on_shards(optimizer, elementwise=True); otherwise leave it out
OptimizerError: step_on_shards: this Adam is differentiable: its steps become part of a graph that local
tensors would be missing from. Leave step_on_shards out, or differentiable=True
OptimizerError: step_on_shards: expected a torch.optim.Optimizer, got Linear""",  # noqa: E501
    )


def test_a_subclass_that_steps_like_its_base_is_accepted() -> None:
    optimizer = Named(_parameters())
    handle = step_on_shards(optimizer)
    assert step_on_shards(optimizer) is handle


@spmd(ranks=2)
def test_an_optimizer_that_is_vouched_for_steps_on_shards() -> None:
    """One that keeps numbers as state, makes new tensors, and writes to its groups and to
    itself.
    """
    for kind in (Sign, Exchanging):
        model = sharded_model()
        groups = groups_of(model, 0.1, apart=False)
        optimizer, reference = kind(groups, {"lr": 0.1}), kind(plain_copies(groups), {"lr": 0.1})
        step_on_shards(optimizer, elementwise=True)
        step_beside_plain_copies(model, optimizer, reference)
        rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, reference)]
        assert rates[0] == rates[1]
        assert optimizer.calls == reference.calls == 5
