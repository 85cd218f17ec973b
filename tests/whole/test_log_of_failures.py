"""What the log says of a step that raised, once the next one begins."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn

from composable import fully_shard
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.logged import logged
from tests.helpers.world import Pool, current_device, spmd


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict(encoder=Layer(), decoder=Layer(), head=nn.Linear(6, 2))
    return nn.Sequential(layers).double().to(current_device())


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(3, 6, generator=generator, dtype=torch.float64).to(current_device())


def _step(model: nn.Module) -> None:
    """A training step gives the gradients of the plain model."""
    model.zero_grad()
    plain = _model()
    for each in (plain, model):
        each(_batch()).square().mean().backward()
    for expected, actual in zip(averaged_gradients(plain).values(), full_gradients(model).values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def _no_room(*_: object) -> None:
    raise MemoryError("no room")


def _in_forward() -> list[str]:
    model = _model()
    fully_shard(model, policy={Layer})
    inside = model.get_submodule("decoder.up")
    with logged() as lines:
        with inside.register_forward_pre_hook(_no_room), pytest.raises(MemoryError, match="no room"):
            model(_batch())
        _step(model)
    return lines


def _in_backward(clear_by: str, policy: bool) -> list[str]:
    model = _model()
    fully_shard(model, policy={Layer} if policy else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model)
    with logged() as lines:
        output = model(_batch())
        assert output.grad_fn is not None
        with output.grad_fn.register_hook(_no_room), pytest.raises(MemoryError, match="no room"):
            output.sum().backward()
        (optimizer if clear_by == "optimizer" else model).zero_grad()
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])
        model(_batch())
        optimizer.zero_grad()
        _step(model)
    return lines


def test_a_failed_step_is_reported_once_with_its_unit_and_the_next_one_is_good(pool: Pool) -> None:
    assert_text(
        "\n".join(pool.run(2, _in_forward)[0]),
        """WARNING: unit '(root)': its forward raised MemoryError; the step is lost, and its state was reset""",
    )


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize("clear_by", ["optimizer", "model"])
def test_gradients_are_within_reach_as_soon_as_a_backward_has_failed(pool: Pool, clear_by: str, policy: bool) -> None:
    first = "WARNING: unit '(root)': its backward did not finish; the step is lost, and its state was reset"
    assert pool.run(2, _in_backward, clear_by, policy)[0] == [first]


@spmd(ranks=2)
def test_gradients_from_before_the_annotation_are_told_of_when_they_go() -> None:
    model = _model()
    model(_batch()).sum().backward()
    with logged() as lines:
        fully_shard(model, policy={Layer})
    (line,) = lines
    assert line.startswith("WARNING: fully_shard: 'head.weight', 'head.bias', 'encoder.up.weight', ")
    assert line.endswith(
        " had gradients from before the annotation, which are dropped: nothing tells whether they were averaged over the "
        "ranks. Run backward after annotating"
    )
    with logged() as lines:
        _step(model)
        fully_shard(_model())
    assert lines == []
