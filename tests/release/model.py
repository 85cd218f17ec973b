"""A model for `python -m composable describe model:build`, and for `two_ranks.py`."""

from __future__ import annotations

from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *(Block(8) for _ in range(3)), nn.Linear(8, 1))
