"""A model whose shards are awkward for communication hooks, and what hooks in place of its reductions must give."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from composable.errors import CommHookError
from tests.helpers.compare import full_gradients
from tests.helpers.world import current_device


class Head(nn.Module):
    """Some ranks leave out its `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.spare = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        return self.last(x) + self.spare(x) if spare else self.last(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Rows that do not divide evenly, and a unit of one row, of which some ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 7)
        self.head = Head()
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh() * self.scale
        return self.head(x, spare)  # type: ignore[no-any-return]


def wanted(module: nn.Module) -> bool:
    """The units inside."""
    return isinstance(module, Head) or (isinstance(module, nn.Linear) and module.out_features == 7)


def loss_of(model: nn.Module, step: int, **options: Any) -> Tensor:
    """Of another batch on each rank."""
    torch.manual_seed(10 * step + dist.get_rank())
    outputs: Tensor = model(torch.randn(5, 6).to(current_device()), **options)
    return outputs.float().square().mean()


def assert_same(models: list[Model], where: object, tolerance: float = 0.0) -> None:
    """Both have the same gradients, and the same ones have none."""
    expected, actual = (full_gradients(model) for model in models)
    for name, gradient in expected.items():
        other = actual[name]
        assert (gradient is None) == (other is None), f"{where}: {name}"
        if gradient is not None and other is not None:
            assert torch.allclose(gradient, other, rtol=0, atol=tolerance), f"{where}: {name} {gradient} {other}"


class Fails:
    """A hook that fails at its second call, on all ranks."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._calls = 0

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        self._calls += 1
        if self._calls == 2:
            if self._how == "raises":
                raise MemoryError("as planned")
            if self._how == "returns nothing":
                return None
        return allreduce_hook(group, bucket)


# How all ranks fail, and what they raise then; "elsewhere" is in backward, and in no hook.
FAILURES: Final = {"raises": "MemoryError", "returns nothing": "CommHookError", "elsewhere": "MemoryError"}


def fail(_: object) -> None:
    raise MemoryError("as planned")


def _spoiled(model: Model) -> Tensor:
    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    with model.second.register_forward_hook(spoil):
        return loss_of(model, 0, spare=True)


def fails_and_goes_on(models: list[Model], how: str) -> str:
    """The second model's first backward fails; then it trains on like the first, which did not. Returns what it raised."""
    said = ""
    loss = loss_of(models[1], 0, spare=True) if how != "elsewhere" else _spoiled(models[1])
    try:
        loss.backward()
    except (MemoryError, CommHookError) as error:
        said = type(error).__name__
    for step in range(1, 4):
        for model in models:
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        assert_same(models, step)
    return said
