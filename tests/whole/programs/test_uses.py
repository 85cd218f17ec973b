"""What programs do with a model between two optimizer steps, other than one forward and one
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from tests.helpers.battery import BATTERY, Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.battery.odd import Layer
from tests.helpers.compare import assert_same_gradients
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import Pool, need_devices


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def several_forwards_before_a_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = _loss(model(x)) + _loss(model(2 * x)) * 3 + _loss(model(x.sin()))
    loss.backward()
    return loss


def several_forwards_and_a_backward_each_in_reverse(model: nn.Module, x: Tensor) -> None:
    losses = [_loss(model(scale * x)) for scale in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()


def several_forwards_and_a_backward_each_in_order(model: nn.Module, x: Tensor) -> None:
    losses = [_loss(model(scale * x)) for scale in (1, 2, 3)]
    for loss in losses:
        loss.backward()


def two_backwards_through_one_forward(model: nn.Module, x: Tensor) -> None:
    loss = _loss(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def backwards_of_two_losses_of_one_forward(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    _loss(output).backward(retain_graph=True)
    output.sin().sum().backward()


def forwards_without_gradients_before_a_step(model: nn.Module, x: Tensor) -> Tensor:
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            model(x)
    loss = _loss(model(x))
    loss.backward()
    return loss


def forwards_without_gradients_between_forward_and_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = _loss(model(x))
    with torch.inference_mode():
        model(2 * x)
    with torch.no_grad():
        target = model(2 * x)
    loss = loss + _loss(target)
    loss.backward()
    return loss


def evaluation_after_a_step(model: nn.Module, x: Tensor) -> Tensor:
    _loss(model(x)).backward()
    model.eval()
    with torch.no_grad():
        result = model(x)
    model.train()
    return result


def an_unused_output_kept_over_the_step(model: nn.Module, x: Tensor) -> Tensor:
    kept = model(2 * x)
    loss = _loss(model(x))
    loss.backward()
    return kept


def gradients_of_inputs_only(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(model(x)), x)
    return gradient


def gradients_of_inputs_then_a_step(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(model(x)), x)
    _loss(model(x + 0.1 * gradient)).backward()
    return gradient


def freezing_and_unfreezing(model: nn.Module, x: Tensor) -> None:
    first = next(model.parameters())
    first.requires_grad_(False)
    _loss(model(x)).backward()
    assert first.grad is None
    first.requires_grad_(True)
    _loss(model(2 * x)).backward()


def parameters_changed_between_two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    model(x)  # what it gathered may still be there
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    loss = _loss(model(x))
    loss.backward()
    return loss


def a_part_called_before_the_whole(model: nn.Module, x: Tensor) -> Tensor:
    part = model.shared
    assert isinstance(part, nn.Module)
    loss = _loss(part(x))
    loss.backward()
    loss = _loss(model(x))
    loss.backward()
    return loss


def a_part_and_the_whole_in_one_backward(model: nn.Module, x: Tensor) -> Tensor:
    part = model.shared
    assert isinstance(part, nn.Module)
    loss = _loss(part(x)) + _loss(model(x))
    loss.backward()
    return loss


PROGRAMS: Final[dict[str, Callable[[nn.Module, Tensor], object]]] = {
    program.__name__: program
    for program in (
        several_forwards_before_a_backward,
        several_forwards_and_a_backward_each_in_reverse,
        several_forwards_and_a_backward_each_in_order,
        two_backwards_through_one_forward,
        backwards_of_two_losses_of_one_forward,
        forwards_without_gradients_before_a_step,
        forwards_without_gradients_between_forward_and_backward,
        evaluation_after_a_step,
        an_unused_output_kept_over_the_step,
        gradients_of_inputs_only,
        gradients_of_inputs_then_a_step,
        freezing_and_unfreezing,
        parameters_changed_between_two_forwards,
        a_part_called_before_the_whole,
        a_part_and_the_whole_in_one_backward,
    )
}
_SCHEMES: Final = (
    "fully_shard by policy",
    "fully_shard as one unit",
    "fully_shard without resharding",
    "replicate",
    "fully_shard inside replicate",
    "replicate inside fully_shard",
    "checkpoint, then fully_shard",
)


def _run(program: str, scheme: str) -> None:
    assert_same_gradients(
        BATTERY["a unit used several times"], SCHEMES[scheme].annotate, PROGRAMS[program]
    )


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_the_plain_model(
    pool: Pool, program: str, scheme: str, device: str
) -> None:
    need_devices(device, 2)
    if program.startswith("a_part") and scheme == "fully_shard as one unit":
        pytest.skip(
            "the part is no unit here; calling it alone is refused, see"
            " test_misuse_while_running.py"
        )
    pool.run(2, _run, program, scheme, device=device)


# --- units of several modules -------------------------------------------------------------------


class Chain(nn.Module):
    """Between the modules of one unit there are so many others that all of their reductions cannot
    be in flight at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared = Layer()
        self.between = nn.ModuleList([Layer() for _ in range(4)])
        self.last = Layer()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for layer in self.between:
            x = layer(x)
        return self.head(self.last(x))


_CHAIN: Final = Case("units of several modules", Chain, rows(4, 6), mean_square, (Layer,))


def _first_and_last(model: Chain, *, reshard: bool) -> None:
    fully_shard([model.shared, model.last], reshard_after_forward=reshard)
    for layer in model.between:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


def _across_each_other(model: Chain) -> None:
    first, second, third, fourth = model.between
    fully_shard([model.shared, second, fourth])
    fully_shard(first)
    fully_shard([third, model.head])
    fully_shard(model)


def _a_part_of_one_with_another(model: Chain) -> None:
    first, *others, last = model.between
    fully_shard([model.shared.up, model.last])
    fully_shard([first, last])
    for layer in others:
        fully_shard(layer)
    fully_shard(model)


SHAPES: Final[dict[str, Callable[[Chain], None]]] = {
    "first and last": partial(_first_and_last, reshard=True),
    "first and last, without resharding": partial(_first_and_last, reshard=False),
    "across each other": _across_each_other,
    "a part of one with another": _a_part_of_one_with_another,
}


def _run_in_shape(program: str, shape: str) -> None:
    assert_same_gradients(_CHAIN, lambda model, case: SHAPES[shape](model), PROGRAMS[program])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_units_of_several_modules_have_the_gradients_of_the_plain_model(
    pool: Pool, program: str, shape: str, device: str
) -> None:
    need_devices(device, 2)
    if program.startswith("a_part") and shape == "a part of one with another":
        pytest.skip(
            "the part is no unit here; calling it alone is refused, see"
            " test_misuse_while_running.py"
        )
    pool.run(2, _run_in_shape, program, shape, device=device)
