"""Models made of torch's own layers, with the traps that those layers hold; knows no annotation."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.helpers.battery.case import Case, mean_square, rows


class Convolutions(nn.Module):
    """Ordinary, grouped and transposed convolutions."""

    def __init__(self, *, frozen_statistics: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Conv2d(6, 10, 3, groups=2), nn.GroupNorm(2, 10), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(10, 5, 2, stride=2), nn.Tanh())
        self.head = nn.Linear(5, 3)
        if frozen_statistics:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.body(self.stem(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """nn.LSTM keeps a list of its weights of its own, `_flat_weights`, next to its registered
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        _, last = self.gru(outputs)
        return self.head(last[0])


class Mixer(nn.MultiheadAttention):
    """A unit of its own, while the attention inside an encoder layer is none: torch's checkpoints
    cannot be nested there, since attention asks whether its inputs are the same object, and those
    of a recomputation are not.
    """


class Attention(nn.Module):
    """nn.MultiheadAttention reads the parameters of its `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Mixer(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.layer(x + mixed))


def _parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 7)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(7, 7)),
        nn.Tanh(),
        nn.Linear(7, 2),
    )


class Containers(nn.Module):
    """Parameters in lists and dicts, and layers with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(5, 5) * 0.3) for _ in range(3)])
        self.scales = nn.ParameterDict(
            {"b": nn.Parameter(torch.ones(5)), "a": nn.Parameter(torch.zeros(5))}
        )
        self.pair = nn.Bilinear(5, 5, 4)
        self.heads = nn.ModuleDict({"z": nn.Linear(4, 2), "y": nn.Linear(4, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        y = self.pair(x, x * self.scales["b"] + self.scales["a"])
        return torch.cat([self.heads["y"](y), self.heads["z"](y)], dim=-1)


READY_MADE: Final = (
    Case(
        "convolutions with frozen statistics",
        lambda: Convolutions(frozen_statistics=True),
        rows(2, 3, 6, 6),
        mean_square,
        (nn.Sequential,),
    ),
    Case(
        "convolutions with BatchNorm",
        lambda: Convolutions(frozen_statistics=False),
        rows(2, 3, 6, 6),
        mean_square,
        (nn.Sequential,),
        joined=False,
    ),
    Case("recurrent", Recurrent, rows(3, 4, 5), mean_square, (nn.LSTM, nn.GRU)),
    Case("attention", Attention, rows(2, 4, 8), mean_square, (Mixer, nn.TransformerEncoderLayer)),
    Case("parametrized", _parametrized, rows(4, 5), mean_square, (nn.Linear,)),
    Case("parameter containers", Containers, rows(4, 5), mean_square, (nn.Bilinear, nn.Linear)),
)
