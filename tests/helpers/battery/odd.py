"""Models of odd sizes, uses and freezes; knows no annotation."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from tests.helpers.battery.case import Case, mean_square, rows


class Layer(nn.Module):
    """A small residual layer; the unit of most cases here."""

    def __init__(self, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Nested(nn.Module):
    """Units within units, with plain modules between them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.inner = Nested(depth - 1) if depth else None
        self.plain = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        if self.inner is not None:
            x = self.inner(x)
        return self.layer(self.plain(x))


class Reused(nn.Module):
    """One unit called three times in a forward, before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Layer()
        self.other = Layer()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        x = self.shared(self.other(x))
        return self.head(self.shared(x))


class OddSizes(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, one element, no dimension, a
    transposed weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.single_row = nn.Parameter(torch.randn(1, 7))
        self.two_rows = nn.Parameter(torch.randn(2, 7))
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.cube = nn.Parameter(torch.randn(3, 1, 7))
        self.transposed = nn.Parameter(torch.randn(7, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(x)) * self.single_row + self.two_rows.sum(0)
        x = x * self.one + self.scalar
        return (x + self.cube.sum((0, 1))) @ self.transposed.t()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = OddSizes()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.second = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)


class Frozen(nn.Module):
    """A frozen unit, a half frozen one, and one whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer()
        self.adapter = Layer()
        self.branch = Layer()
        self.head = nn.Linear(6, 2)
        self.encoder.requires_grad_(False)
        self.adapter.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.adapter(self.encoder(x))
        return self.head(y + self.branch(y.detach()))


class FrozenInside(nn.Module):
    """Frozen units between trained ones: gradients must flow through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.middle = Layer()
        self.last = Layer()
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Unused(nn.Module):
    """A unit that never runs, one whose output is dropped, a parameter and an output that nobody
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = Layer()
        self.never = Layer()
        self.dropped = Layer()
        self.loose = nn.Parameter(torch.randn(3, 3))
        self.used.extra = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.head(self.used(x))


class MixedDtypes(nn.Module):
    """Two dtypes in one unit, also of parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.head(y.to(self.head.weight.dtype)).to(x.dtype)


def _single_precision_head(model: nn.Module, rank: int) -> None:
    assert isinstance(model, MixedDtypes)
    model.head.to(torch.float32)


def _two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x), model(x.flip(1))
    return (first * second.sigmoid()).square().mean()


def _gradient_of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.clone().requires_grad_()).square().mean()


ODD: Final = (
    Case("nested", lambda: Nested(2), rows(4, 6), mean_square, (Nested, Layer)),
    Case("a unit used several times", Reused, rows(4, 6), mean_square, (Layer,)),
    Case("odd sizes", Odd, rows(3, 5), mean_square, (OddSizes,)),
    Case("frozen units", Frozen, rows(4, 6), mean_square, (Layer,)),
    Case("frozen between trained", FrozenInside, rows(4, 6), mean_square, (Layer,)),
    Case("unused units and parameters", Unused, rows(4, 6), mean_square, (Layer,)),
    Case(
        "two dtypes",
        MixedDtypes,
        rows(4, 6),
        mean_square,
        (Layer,),
        personalize=_single_precision_head,
    ),
    Case(
        "two forwards, one backward", lambda: Nested(1), rows(4, 6), _two_forwards, (Nested, Layer)
    ),
    Case("inputs that need gradients", Reused, rows(4, 6), _gradient_of_inputs, (Layer,)),
)
