"""Models of matrices and optimizers that look at whole ones, and what one process makes of the same
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.helpers.compare import all_full
from tests.helpers.world import current_device


class Shampoo(Optimizer):
    """A toy: factors of a matrix along both dimensions, and their roots every other step. It counts
    steps on itself and in its groups; vectors are stepped by their signs.
    """

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})
        self.calls = 0
        self.seen: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.seen.append(tuple(parameter.shape))
                if parameter.ndim != 2:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] / group["count"])
                    continue
                self._step_matrix(parameter, group)
        return loss

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(parameter)
            state["factors"] = [torch.eye(size).to(gradient) for size in gradient.shape]
            state["roots"] = [each.clone() for each in state["factors"]]
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(gradient)
        state["factors"][0] += gradient @ gradient.t()
        state["factors"][1] += gradient.t() @ gradient
        if self.calls % 2:
            for root, factor in zip(state["roots"], state["factors"], strict=True):
                values, vectors = torch.linalg.eigh(factor)
                root.copy_(vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.t())
        parameter.mul_(1 - 0.01 * group["lr"])
        parameter.sub_(state["roots"][0] @ state["momentum"] @ state["roots"][1], alpha=group["lr"])


class Whitening(Optimizer):
    """Gives every matrix singular values of one; keeps its state in new tensors."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = 0.8 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                self.state[parameter] = {"mean": mean, "norm": mean.norm()}
                if mean.ndim == 2 and mean.numel():
                    left, _, right = torch.linalg.svd(mean, full_matrices=False)
                    mean = left @ right
                parameter.add_(mean, alpha=-group["lr"])


def muon(parameters: Any) -> Optimizer:
    return torch.optim.Muon(parameters, lr=0.05)


OPTIMIZERS: Final[dict[str, Callable[[Any], Optimizer]]] = {
    "Muon": muon,
    "Shampoo": Shampoo,
    "whitening": Whitening,
}


class Net(nn.Module):
    """Matrices of sizes that no number of ranks divides, some of fewer rows than ranks."""

    def __init__(self, *, biases: bool = False) -> None:
        super().__init__()
        sizes = [(7, 5), (5, 7), (7, 1), (1, 6), (6, 9), (9, 2), (2, 8), (8, 8), (8, 8), (8, 3)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=biases) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.mean(-1, keepdim=True)
        return x


class Stacked(nn.Module):
    """A stack of experts between matrices."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, 6, 4) / 2)
        self.last = nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mixed = torch.einsum("bi,eij->bj", x, self.experts)
        return self.last(torch.tanh(mixed))


def made(kind: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(3)
    return kind(*args, **kwargs).double().to(current_device())


def backward(model: nn.Module, step: int, rank: int, width: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(4, width, generator=generator, dtype=torch.float64).to(current_device())
    model(batch).square().mean().backward()


class OneProcess:
    """A plain copy of a model in this process, which an optimizer of its own steps by the gradients
    of the original.

    Args:
        cut: a stack of matrices is that many parameters.
    """

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.copies: list[list[nn.Parameter]] = [
            [nn.Parameter(each.clone()) for each in (whole if whole.ndim == 3 else [whole])]
            for whole in all_full([p.detach() for p in self.parameters])
        ]
        self.optimizer = make([each for copies in self.copies for each in copies])

    def take_gradients(self) -> None:
        present = [p.grad for p in self.parameters if p.grad is not None]
        wholes = iter(all_full(present))
        for parameter, copies in zip(self.parameters, self.copies, strict=True):
            whole = None if parameter.grad is None else next(wholes)
            parts = [whole] if parameter.ndim < 3 or whole is None else whole
            for copy, part in zip(copies, parts if whole is not None else copies, strict=True):
                copy.grad = None if whole is None else part.clone()

    def check(self, when: str = "") -> None:
        """Every bit of the parameters is the same."""
        wholes = all_full([p.detach() for p in self.parameters])
        for number, (whole, copies) in enumerate(zip(wholes, self.copies, strict=True)):
            expected = torch.stack([c.detach() for c in copies]) if whole.ndim == 3 else copies[0]
            assert torch.equal(whole, expected), (
                f"{when}: parameter {number} of shape {tuple(whole.shape)} differs by"
                f" {(whole - expected).abs().max()}"
            )

    def step_beside(
        self, optimizer: Optimizer, steps: Sequence[int], rank: int, width: int
    ) -> None:
        for number in steps:
            optimizer.zero_grad()
            self.model.zero_grad()
            backward(self.model, number, rank, width)
            self.take_gradients()
            optimizer.step()
            self.optimizer.step()
            self.check(f"step {number}")


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
