"""Two optimizers of two equal models, one of which steps on its shards; knows how to tell whether
they are still equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, replicate, step_on_shards
from tests.helpers.world import current_device

# Name, class, options. Rates are large, so that a wrong update shows.
OPTIMIZERS: Final[dict[str, tuple[type[Optimizer], dict[str, Any]]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    ),
    "SGD with Nesterov's momentum": (
        optim.SGD,
        {"lr": 0.001, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "Adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AMSGrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.4, 0.7)}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW that maximizes": (optim.AdamW, {"lr": 0.01, "maximize": True, "amsgrad": True}),
    "NAdam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.05, "weight_decay": 0.1, "t0": 2.0}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "centered RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}
_FUSED: Final = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
Flag = dict[str, bool]


def flags_of(kind: type[Optimizer]) -> list[Flag]:
    """The implementations that torch has of an optimizer."""
    flags = [{"foreach": False}, {"foreach": True}]
    return [*flags, {"fused": True}] if kind in _FUSED else flags


def torch_steps_dtensors(kind: type[Optimizer], flag: Flag) -> bool:
    """Whether torch has rules for DTensors in all operations of an implementation."""
    return kind is not optim.Rprop and ("fused" not in flag or kind in (optim.Adam, optim.AdamW))


class Block(nn.Module):
    """Sizes that no number of ranks divides, shards that are empty, and padding between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.square = nn.Parameter(torch.eye(6, 32))
        self.second = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        bent: Tensor = self.second(torch.tanh(self.first(x)))
        return x + self.scale * bent + (x @ self.square) @ self.square.t() / 8


class Model(nn.Module):
    """Blocks, some of them skipped at times, one in another dtype, one copied to all ranks, and
    tied and frozen weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(5, 6) / 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].second.weight.requires_grad_(False)
        self.copied = nn.Linear(6, 6)
        self.precise = nn.Linear(6, 6, dtype=torch.float64)
        self.own = nn.Parameter(torch.ones(6))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.embedding

    def forward(self, tokens: Tensor, skipped: int = -1) -> Tensor:
        x = self.embedding[tokens] * self.own
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        x = self.copied(x)
        x = self.precise(x.double()).to(self.embedding.dtype)
        logits: Tensor = self.tied(x) * self.temperature
        return logits


def sharded_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    model = Model().to(dtype).to(current_device())
    model.precise.double()
    replicate(model.copied)
    fully_shard(model, policy={Block}, ignored_params=[model.own])
    return model


def train(model: nn.Module, step: int, skipped: int = -1) -> Tensor:
    """Forward and backward on this rank's own batch of one step; the loss."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(5, (8,), generator=generator).to(current_device())
    loss = model(tokens, skipped).float().square().mean()
    loss.backward()
    # Each rank trains it by itself.
    dist.all_reduce(model.own.grad)  # type: ignore[arg-type]
    return loss.detach()


def groups_of(model: nn.Module, rate: float, *, apart: bool) -> list[dict[str, Any]]:
    """Groups whose members alternate in memory; `apart`: torch's code cannot take plain tensors and
    DTensors in one list.
    """
    named = list(model.named_parameters())
    groups: dict[str, list[nn.Parameter]] = {"fast": [], "slow": [], "plain": []}
    for name, parameter in named:
        slow = "slow" if name.endswith("bias") or ".1." in name else "fast"
        groups["plain" if apart and not isinstance(parameter, DTensor) else slow].append(parameter)
    options = {"fast": {}, "slow": {"lr": rate / 2, "weight_decay": 0.03}, "plain": {}}
    return [
        {"params": parameters, **options[name]} for name, parameters in groups.items() if parameters
    ]


@dataclass
class Copies:
    """The one that steps as torch does, and the one that steps on shards."""

    models: tuple[nn.Module, nn.Module]
    optimizers: tuple[Optimizer, Optimizer]

    def step(self, number: int, skipped: int = -1, *, keep: bool = False) -> None:
        """One step of both; `keep`: gradients stay, and are zeroed."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for parameter in model.parameters():
                if keep and parameter.grad is not None:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
            train(model, number, skipped)
            optimizer.step()
        self.check(f"step {number}")

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def both(self, act: Callable[[nn.Module, Optimizer], object]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            act(model, optimizer)

    def check(self, when: str = "") -> None:
        """Every bit of parameters and of state, and all that can be seen of state, is the same."""
        plain, quick = (list(model.named_parameters()) for model in self.models)
        assert len(plain) == len(quick)
        for (name, expected), (_, actual) in zip(plain, quick, strict=True):
            assert_same(expected, actual, f"{when}: {name}")
            there, here = (
                o.state.get(p) for o, p in zip(self.optimizers, (expected, actual), strict=True)
            )
            assert (there is None) == (here is None), f"{when}: state of {name}"
            if there is not None and here is not None:
                assert list(there) == list(here), f"{when}: keys of the state of {name}"
                for key in there:
                    assert_same(there[key], here[key], f"{when}: {key} of {name}")
        assert len(self.optimizers[0].state) == len(self.optimizers[1].state)


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def assert_same(expected: Any, actual: Any, what: str) -> None:
    """The same type, placements, shape and bits, or the same value."""
    assert type(expected) is type(actual), what
    if not isinstance(expected, Tensor):
        assert expected == actual, what
        return
    assert (expected.shape, expected.dtype, expected.device) == (
        actual.shape,
        actual.dtype,
        actual.device,
    ), what
    if isinstance(expected, DTensor):
        assert (expected.placements, expected.stride()) == (
            actual.placements,
            actual.stride(),
        ), what
    one, other = local(expected).detach(), local(actual).detach()
    assert one.shape == other.shape, what
    assert torch.equal(one, other), f"{what}: differs by up to {(one - other).abs().max()}"
    assert bool(one.isfinite().all()), f"{what}: nothing is compared where nothing is finite"


def make_copies(
    name: str, flag: dict[str, bool], *, dtype: torch.dtype = torch.float32, opt_in: bool = True
) -> Copies:
    kind, options = OPTIMIZERS[name]
    models = sharded_model(dtype), sharded_model(dtype)
    one, other = (
        kind(groups_of(model, options["lr"], apart=any(flag.values())), **options, **flag)
        for model in models
    )  # type: ignore[call-arg]
    step_on_shards(other, enabled=opt_in)
    return Copies(models, (stepped_by_torch(one), other))


def stepped_by_torch(optimizer: Optimizer) -> Optimizer:
    """It steps its parameters as they are."""
    step_on_shards(optimizer, enabled=False)
    return optimizer


def plain_copies(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with copies of the parameters' local shards in their place."""
    return [
        {**group, "params": [nn.Parameter(local(p).detach().clone()) for p in group["params"]]}
        for group in groups
    ]


def step_beside_plain_copies(
    model: nn.Module, optimizer: Optimizer, reference: Optimizer, skipped: int = -1
) -> None:
    """Five steps of both, after which parameters and state are the same; `skipped`: a step in which
    a block has no gradients.
    """
    pairs = [
        (mine, copy)
        for here, there in zip(optimizer.param_groups, reference.param_groups, strict=True)
        for mine, copy in zip(here["params"], there["params"], strict=True)
    ]
    for step in range(5):
        optimizer.zero_grad()
        train(model, step, skipped=2 if step == skipped else -1)
        for mine, copy in pairs:
            copy.grad = None if mine.grad is None else local(mine.grad).clone()
        optimizer.step()
        reference.step()
        for mine, copy in pairs:
            assert_same(copy.detach(), local(mine.detach()), f"step {step}")
            for key, value in reference.state.get(copy, {}).items():
                assert_same(value, local(optimizer.state[mine][key]), f"step {step}: {key}")


class Sign(Optimizer):
    """A user's optimizer: numbers as state, new tensors in every step, notes on itself and in its
    groups.
    """

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["mean"] = 0, torch.zeros_like(parameter)
                    state["scale"] = torch.tensor(1.0)
                state["count"] += 1
                state["scale"] = state["scale"] * 0.9
                state["mean"] = 0.9 * state["mean"] + 0.1 * parameter.grad
                parameter.sub_(
                    group["lr"] / state["count"] * state["scale"].item() * state["mean"].sign()
                )
            group["lr"] = group["lr"] * 0.99
        return loss


class Exchanging(Sign):
    """Two tensors of its state change places in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            state = self.state[parameter]
            if not state:
                state["one"], state["other"] = (
                    torch.zeros_like(parameter),
                    torch.ones_like(parameter),
                )
            state["one"], state["other"] = state["other"], state["one"]
            state["one"].add_(parameter.grad)
            parameter.sub_(0.1 * state["one"])
