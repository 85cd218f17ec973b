"""What is refused while gradients are accumulated, and ranks that accumulate others than the
rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from textwrap import fill
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import (
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    remove,
    replicate,
    step_on_shards,
)
from composable.errors import CommunicationError, OptimizerError, RanksDisagreeError
from tests.helpers.layers import Layer, Layers
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, spmd


def _mixed(model: Layers, **options: Any) -> None:
    replicate(model[1], **options)
    fully_shard(model, policy={Layer}, **options)


_SCHEMES: Final[dict[str, Callable[..., object]]] = {
    "sharded": lambda model, **options: fully_shard(model, policy={Layer}, **options),
    "replicated": replicate,
    "mixed": _mixed,
}


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


# --- refusals -----------------------------------------------------------------------------------


_ALONE: Final = (
    "is this rank's alone, since it was accumulated under no_sync and not reduced. Run the last"
    " backward outside of no_sync, or call reduce_gradients(model), on all ranks"
)
_TO_COME: Final = (
    "where gradients are still to come. Call it when backward() has returned; or leave it out, and"
    " run the last backward outside of no_sync"
)


@pytest.mark.parametrize(
    ("scheme", "parameter", "unit"),
    [
        ("sharded", "parameter 'weight' of unit '0'", "3"),
        ("replicated", "parameter '0.weight' of unit '(root)'", "(root)"),
        ("mixed", "parameter 'weight' of unit '0'", "3"),
    ],
)
@spmd(ranks=2)
def test_what_is_held_is_refused_by_name(scheme: str, parameter: str, unit: str) -> None:
    device = current_device()
    model = Layers().to(device)
    _SCHEMES[scheme](model)
    x = torch.ones(2, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_sync(model):
        _step(model, x)
    for _ in range(2):
        assert (
            refusal(optimizer.step)
            == f"OptimizerError: SGD.step: the gradient of {parameter} {_ALONE}"
        )
        with torch.inference_mode():  # where steps are not on shards
            assert "is this rank's alone" in refusal(optimizer.step)
        step_on_shards(optimizer)
    assert (
        refusal(lambda: clip_grad_norm_(model, 1.0))
        == f"ClippingError: clip_grad_norm_: the gradient of {parameter} {_ALONE}"
    )
    assert (
        refusal(lambda: remove(model, replicate if scheme == "replicated" else fully_shard))
        == f"PhaseError: remove: unit '{unit}' has gradients that were accumulated under no_sync"
        " and not reduced. Call reduce_gradients(model) first, on all ranks, or zero_grad()"
    )
    model.zero_grad()
    optimizer.step()  # of nothing
    clip_grad_norm_(model, 1.0)
    with model[2].register_forward_hook(lambda *_: reduce_gradients(model)):
        assert (
            refusal(lambda: model(x))
            == "PhaseError: reduce_gradients was called inside the forward of unit '(root)',"
            f" {_TO_COME}"
        )
    y = model(x)
    y.register_hook(lambda _: reduce_gradients(model))
    assert (
        refusal(y.sum().backward)
        == f"PhaseError: reduce_gradients was called inside a backward, {_TO_COME}"
    )
    model.zero_grad()
    _step(model, x)
    optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- ranks that differ --------------------------------------------------------------------------


def _hold_alone(scheme: str) -> list[str]:
    """What is raised in steps of three micro-batches, in the first of which rank 1 alone
    accumulates, and reduces nothing.
    """
    model = Layers()
    _SCHEMES[scheme](model, mesh=dist.new_group(timeout=timedelta(seconds=5)))
    x, raised = torch.ones(2, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        try:
            for number in range(3):
                alone = step == 0 and dist.get_rank() == 1
                with no_sync(model, enabled=alone or (number < 2 and step > 0)):
                    _step(model, x)
            optimizer.step()
        except OptimizerError as error:
            raised.append(str(error))
        except (CommunicationError, RanksDisagreeError) as error:
            return [*raised, str(error)]
        model.zero_grad()
    return raised


def test_a_rank_that_alone_accumulates_is_named(pool: Pool) -> None:
    (first,), (refused, second) = pool.run(2, _hold_alone, "replicated", spoils=True)
    assert "is this rank's alone" in refused
    assert first == second
    assert_text(
        fill(first, 110),
        """\
gradient all-reduce of unit '(root)' ('3.bias' to '0.weight'): the ranks brought gradients of different units
or steps. Before it, rank 0 accumulated 0 backwards; rank 1 accumulated 5 backwards. Every rank must run the
same backwards, and the same of them under no_sync. These gradients are dropped""",  # noqa: E501
    )


@pytest.mark.launches_not_compared("one rank accumulates alone, and launches more")
@pytest.mark.parametrize("scheme", ["sharded", "mixed"])
def test_a_rank_that_alone_accumulates_gathers_nothing_that_another_sends_for_a_sum(
    pool: Pool, scheme: str
) -> None:
    for (text,) in pool.run(2, _hold_alone, scheme, spoils=True):
        difference = (
            r"The first difference is in launch \d+: rank 0: gradient reduction of unit '3'; rank"
            r" 1: all-gather of unit '"
        )
        assert re.search(difference, text)


@spmd(ranks=2, everywhere=True)
def test_reduce_gradients_names_ranks_that_ran_other_numbers_of_backwards() -> None:
    model = Layers()
    replicate(model)
    x = torch.ones(2, 8)
    with no_sync(model):
        for _ in range(2 * dist.get_rank()):
            _step(model, x)
    assert (
        refusal(lambda: reduce_gradients(model))
        == "RanksDisagreeError: reduce_gradients: the ranks accumulated gradients of different"
        " numbers of backwards below unit '(root)': rank 0 0, rank 1 2. Every rank must run the"
        " same backwards under no_sync. What was accumulated is dropped on all ranks"
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    _step(model, x)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@spmd(ranks=2, everywhere=True)
def test_scopes_end_with_what_leaves_them() -> None:
    for annotate in _SCHEMES.values():
        model = Layers()
        annotate(model)
        x = torch.ones(2, 8)
        for _ in range(2):
            with pytest.raises(MemoryError), no_sync(model), no_sync(model, enabled=False):
                raise MemoryError
            for _ in range(2):
                with no_sync(model):
                    break
            _step(model, x)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
