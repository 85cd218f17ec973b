"""A model whose units return their tensors in every kind of container; knows no annotation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from tests.helpers.battery.case import Case, mean_square, rows


@dataclass
class Record:
    hidden: Tensor
    note: str = "kept"


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    hidden: Tensor


class Pair(NamedTuple):
    number: int
    hidden: Tensor


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.inside = {"deep": [hidden]}


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Wordy(OrderedDict[str, Any]):
    """A mapping with attributes, as model libraries return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


# How to put a tensor into the container, and how to get it out again.
CONTAINERS: Final[dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]] = {
    "dict": (lambda x: {"count": 3, "hidden": x}, lambda out: out["hidden"]),
    "nested": (lambda x: (None, [{"a": (x,)}]), lambda out: out[1][0]["a"][0]),
    "dataclass": (Record, lambda out: out.hidden),
    "slotted dataclass": (SlottedRecord, lambda out: out.hidden),
    "named tuple": (lambda x: Pair(1, x), lambda out: out.hidden),
    "plain object": (Plain, lambda out: out.inside["deep"][0]),
    "slotted object": (Slotted, lambda out: out.hidden),
    "mapping with attributes": (lambda x: Wordy(hidden=x), lambda out: out.hidden),
    "view": (
        lambda x: x.view(-1, 2, 3).transpose(0, 1),
        lambda out: out.transpose(0, 1).reshape(-1, 6),
    ),
    "list of views": (lambda x: x.unbind(1), lambda out: torch.stack(out, 1)),
}


class Wrapping(nn.Module):
    """A linear layer that returns its result in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.kind][0](self.linear(torch.tanh(x)))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({kind: Wrapping(kind) for kind in CONTAINERS})

    def forward(self, x: Tensor) -> Record:
        for kind, layer in self.layers.items():
            x = x + CONTAINERS[kind][1](layer(x))
        return Record(x)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).hidden.square().mean()


class InPlace(nn.Module):
    """Writes in place into the view that a unit returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Wrapping("view")
        self.second = Wrapping("view")
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2).add_(1)
        z = self.second(y.transpose(0, 1).reshape(-1, 6))
        z[0].add_(3)
        return self.head(z)


class Maker(nn.Module):
    """Makes a hidden state, and a bias that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bias = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.bias(x)


class Passing(nn.Module):
    """A decoder layer: what it was given goes on, what it measured is added to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.router = nn.Linear(6, 2)

    def forward(
        self, x: Tensor, memory: Tensor, bias: Tensor, logits: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        measured = self.router(x) + bias
        return (
            x + self.down(torch.tanh(self.up(x + memory)) * measured.sum(-1, True)),
            memory,
            bias,
            logits + (measured,),
        )


class Picking(nn.Module):
    """Has no parameters: hands on a part of what it got, and a view of another."""

    def forward(
        self, x: tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor]:
        return x[0], x[1].view(-1, 2, 3)[:, 1]


class Borrowing(nn.Module):
    """Computes before and after a unit that it calls and does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.after = nn.Linear(6, 6)

    def forward(self, x: Tensor, borrowed: nn.Module) -> Tensor:
        y, bias = borrowed(torch.tanh(self.before(x)))
        return self.after(y) * bias.sum(-1, True)


class HandingOn(nn.Module):
    """Units return what other units made."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = Maker()
        self.layers = nn.ModuleList([Passing() for _ in range(3)])
        self.picking = Picking()
        self.borrowing = Borrowing()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        memory, bias = self.maker(x)
        state = memory, memory, bias, ()
        for layer in self.layers:
            state = layer(*state)
        last, part = self.picking(state)
        x = self.borrowing(last, self.maker)
        return self.head(x) + part.mean(-1, True) + sum(logits.square() for logits in state[3])


OUTPUTS: Final = (
    Case("outputs in containers", Outputs, rows(4, 6), _loss, (Wrapping,)),
    Case(
        "outputs handed on",
        HandingOn,
        rows(4, 6),
        mean_square,
        (Maker, Passing, Picking, Borrowing),
    ),
    Case("views written in place", InPlace, rows(4, 6), mean_square, (Wrapping,)),
)
