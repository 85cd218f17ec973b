"""A model of four units, and places at which a rank leaves a step by an exception; knows no verb."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Planned(MemoryError):
    """What a rank leaves a step by."""


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[Layer(8, 8) for _ in range(4)])


def leave(*_: object) -> None:
    raise Planned("as planned")


def in_the_third_layer(model: nn.Module, x: Tensor) -> None:
    with model.get_submodule("2").register_forward_pre_hook(leave):
        model(x)


def in_backward(model: nn.Module, x: Tensor) -> None:
    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(leave)

    with model.get_submodule("1").register_forward_hook(spoil):
        loss = model(x).square().mean()
    loss.backward()
