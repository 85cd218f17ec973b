"""How both models train: optimizer, learning rate, one step."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from composable.demo.model import loss_of

WARM_UP_STEPS: Final = 20


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters of `model`, which may be annotated."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int) -> None:
    """Linear warm-up, then the inverse square root of the step.

    It depends on the step alone and not on how long the run will be, so a continued run follows the same curve.
    """
    scale = min((step + 1) / WARM_UP_STEPS, (WARM_UP_STEPS / (step + 1)) ** 0.5)
    for group in optimizer.param_groups:
        group["lr"] = peak * scale


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, idx: Tensor, targets: Tensor, *, peak: float, step: int
) -> Tensor:
    """One step; returns the loss of this process's rows, a scalar without a graph."""
    set_learning_rate(optimizer, peak, step)
    loss = loss_of(model, idx, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
