"""Module trees for the tests of traversal."""

from __future__ import annotations

from torch import Tensor, nn, ones


class Leaf(nn.Module):
    """A module with one parameter and some children, which all run."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(ones(4))
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for child in self.children():
            x = child(x)
        return x


def tree() -> Leaf:
    """mod(submod1, submod2(subsubmod))"""
    return Leaf(submod1=Leaf(), submod2=Leaf(subsubmod=Leaf()))


def names_of(root: nn.Module, modules: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(module)] for module in modules]
