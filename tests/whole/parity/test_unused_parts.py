"""Parts that a step does not use, on some ranks or on all, train as in one process: in every row,
however they are annotated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import checkpoint, fully_shard, join, no_sync, replicate
from tests.helpers.compare import full_parameters
from tests.helpers.world import Pool, current_device

WIDTH: Final = 4
STEPS: Final = 3


# --- modules ------------------------------------------------------------------------------------


class Part(nn.Module):
    """Subclasses say what they do in a forward that uses them, and in one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class Branch(Part):
    def forward(self, x: Tensor, use: Any) -> Tensor:
        return self.layer(x) if use else x  # type: ignore[no-any-return]


class Dropped(Part):
    """LayerDrop: without the layer its input is left."""

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return x + self.layer(x) if use else x  # type: ignore[no-any-return]


class Detached(Part):
    def forward(self, x: Tensor, use: Any) -> Tensor:
        y = self.layer(x)
        return x + (y if use else y.detach())  # type: ignore[no-any-return]


class Constant(Part):
    """A tower that some ranks have no input for."""

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return self.layer(x) if use else torch.ones_like(x, requires_grad=False)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A forward that does not use them sends no token to the first expert; the second never gets
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return x + self.experts[0](x) if use else x  # type: ignore[no-any-return]


class Temperature(nn.Module):
    """A parameter that is read, but not trained by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return x * self.scale.detach() + 0.5


class Heads(nn.Module):
    """Two heads, of which the loss may take one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, use: Any) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Around(nn.Module):
    """A part between two layers of the root."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.part, self.after = (
            nn.Linear(WIDTH, WIDTH),
            part(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return self.after(self.part(self.before(x), use))  # type: ignore[no-any-return]


class First(Around):
    """The part comes first, and its input needs no gradient."""

    def forward(self, x: Tensor, use: Any) -> Tensor:
        return self.after(self.before(self.part(x.detach(), use)))  # type: ignore[no-any-return]


class RecomputedFirst(Around):
    """The part, and a layer of the root behind it, run again in backward."""

    def forward(self, x: Tensor, use: Any) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            return self.before(self.part(x, use))  # type: ignore[no-any-return]

        return self.after(torch_checkpoint(inside, x.detach(), use_reentrant=False))  # type: ignore[no-any-return]


class Body(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class OwnParameter(nn.Module):
    """All that the root owns is one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.out = Body(), nn.Parameter(torch.full((WIDTH,), 0.5)), Body()

    def forward(self, x: Tensor, use: Any) -> Tensor:
        y = self.out(self.body(x))
        return y * self.extra if use else y  # type: ignore[no-any-return]


class OwnHeads(nn.Module):
    """The root owns two heads, and calls one of them, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (
            Body(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, use: Any) -> Tensor:
        y = self.body(x)
        return {"first": self.first, "second": self.second}.get(use, nn.Identity())(y)  # type: ignore[no-any-return]


class Outputs(nn.Module):
    """Two outputs, of heads that belong to the root or to a unit of their own."""

    def __init__(self, *, unit: bool) -> None:
        super().__init__()
        self.body, self.heads = Body(), _HeadsOfAUnit() if unit else Heads()

    def forward(self, x: Tensor, use: Any) -> tuple[Tensor, Tensor]:
        return self.heads(self.body(x), use)  # type: ignore[no-any-return]


class _HeadsOfAUnit(Heads):
    pass


# --- rows ---------------------------------------------------------------------------------------

UNITS: Final = {Branch, Constant, Dropped, Detached, Experts, Temperature, Body, _HeadsOfAUnit}


def _whole(output: Any, x: Tensor, use: Any) -> Tensor:
    return output.square().mean()  # type: ignore[no-any-return]


def _one_output(output: Any, x: Tensor, use: Any) -> Tensor:
    return output[use].square().mean()  # type: ignore[no-any-return]


def _with_auxiliary(output: Any, x: Tensor, use: Any) -> Tensor:
    return output[0].square().mean() + (output[1].square().mean() if use else 0.0)  # type: ignore[no-any-return]


def _after_saliency(output: Any, x: Tensor, use: Any) -> Tensor:
    torch.autograd.grad(output[0].sum(), x, retain_graph=True)
    return output[1].square().mean()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Row:
    """A model, and what ranks use of it.

    Attributes:
        use: what a rank's forward uses, by the number of the forward and the rank.
        frozen: parts that are frozen after a first backward that does not use them.
    """

    model: Callable[[], nn.Module]
    use: Callable[[int, int], Any]
    loss: Callable[[Any, Tensor, Any], Tensor] = _whole
    frozen: tuple[str, ...] = ()


ROWS: Final[dict[str, Row]] = {
    "a branch on one rank": Row(lambda: Around(Branch), lambda step, rank: rank == 0),
    "a branch not in one step": Row(lambda: Around(Branch), lambda step, rank: step != 1),
    "a constant on one rank": Row(
        lambda: Around(Constant), lambda step, rank: (step + rank) % 2 == 0
    ),
    "a first unit on one rank": Row(
        lambda: First(Branch), lambda step, rank: (step + rank) % 2 == 0
    ),
    "a recomputed first unit on one rank": Row(
        lambda: RecomputedFirst(Branch), lambda step, rank: (step + rank) % 2 == 0
    ),
    "a frozen constant on one rank": Row(
        lambda: Around(Constant), lambda step, rank: (step + rank) % 2 == 0, frozen=("part",)
    ),
    "a first unit never": Row(lambda: First(Dropped), lambda step, rank: False),
    "LayerDrop": Row(lambda: Around(Dropped), lambda step, rank: (step + rank) % 2 == 0),
    "detached always": Row(lambda: Around(Detached), lambda step, rank: False),
    "detached in one step": Row(lambda: Around(Detached), lambda step, rank: step != 1),
    "experts without tokens": Row(
        lambda: Around(Experts), lambda step, rank: (step + rank) % 2 == 0
    ),
    "the root's parameter on one rank": Row(OwnParameter, lambda step, rank: rank == 0),
    "the root's parameter never": Row(OwnParameter, lambda step, rank: False),
    "the root's heads by rank": Row(OwnHeads, lambda step, rank: "first" if rank else "second"),
    "the root's heads on one rank": Row(OwnHeads, lambda step, rank: "first" if rank else None),
    "outputs of the root in turn": Row(
        lambda: Outputs(unit=False), lambda step, rank: step % 2, _one_output
    ),
    "outputs of a unit in turn": Row(
        lambda: Outputs(unit=True), lambda step, rank: step % 2, _one_output
    ),
    "an auxiliary loss after a warm-up": Row(
        lambda: Outputs(unit=True), lambda step, rank: step > 1, _with_auxiliary
    ),
    "a parameter only read": Row(lambda: Around(Temperature), lambda step, rank: True),
    "saliency of a head that is not trained": Row(
        lambda: Outputs(unit=True), lambda step, rank: True, _after_saliency
    ),
    "frozen after a step without": Row(
        lambda: Around(Branch), lambda step, rank: step >= 0, frozen=("before", "part")
    ),
}


# --- training -----------------------------------------------------------------------------------

ANNOTATED: Final = (
    "sharded", "sharded and kept", "hybrid", "replicated", "replicated units",
    "replicated in sharded", "sharded in replicated",
)  # fmt: skip
AROUND: Final = ("nothing", "checkpoint", "no_sync", "join")
OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def _annotate(model: nn.Module, how: str) -> None:
    parts = [module for module in model.modules() if type(module) in UNITS]
    match how:
        case "sharded" | "sharded and kept":
            fully_shard(
                model, policy=UNITS, reshard_after_forward=None if how == "sharded" else False
            )
        case "hybrid":
            fully_shard(model, policy=UNITS, mesh=_hybrid_mesh())
        case "replicated":
            replicate(model)
        case "replicated units":
            replicate(model, policy=UNITS, bucket_cap_mb=0.0001)
        case "replicated in sharded" | "sharded in replicated":
            inner, outer = (
                (replicate, fully_shard)
                if how.startswith("replicated")
                else (fully_shard, replicate)
            )
            for part in parts:
                inner(part)
            outer(model)


@cache
def _hybrid_mesh() -> Any:
    return init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))


def _made(row: Row) -> nn.Module:
    torch.manual_seed(0)
    return row.model().to(current_device(), torch.float64)


def _batches_of(rank: int, around: str) -> int:
    return STEPS - rank % 2 if around == "join" else STEPS


def _backward(model: nn.Module, row: Row, number: int, rank: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(10 * (number + 1) + rank)
    x = (
        torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        .to(current_device())
        .requires_grad_()
    )
    use = row.use(number, rank)
    (row.loss(model(x, use), x, use) * weight).backward()


def _freeze(model: nn.Module, row: Row) -> None:
    model.zero_grad()
    for name in row.frozen:
        model.get_submodule(name).requires_grad_(False)


def _expected(name: str, around: str, optimizer: str) -> dict[str, Tensor]:
    """The parameters of one process that has the batches of all ranks."""
    row, ranks = ROWS[name], dist.get_world_size()
    model = _made(row)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    _freeze(model, row)
    for step in range(STEPS):
        for rank in range(ranks):
            for number in (2 * step, 2 * step + 1) if around == "no_sync" else (step,):
                if step < _batches_of(rank, around):
                    _backward(model, row, number, rank, 1 / ranks)
        stepped.step()
        stepped.zero_grad()
    return full_parameters(model)


def _train(name: str, how: str, around: str, optimizer: str) -> dict[str, Tensor]:
    """The parameters that all ranks have in the end."""
    row, rank = ROWS[name], dist.get_rank()
    model = _made(row)
    _annotate(model, how)
    if around == "checkpoint":
        for part in model.modules():
            if type(part) in UNITS:
                checkpoint(part)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    if row.frozen:
        _backward(model, row, -1, rank, 1.0)
        _freeze(model, row)
    scope: AbstractContextManager[Any] = join(model, stepped) if around == "join" else nullcontext()
    with scope:
        for step in range(_batches_of(rank, around)):
            if around == "no_sync":
                with no_sync(model):
                    _backward(model, row, 2 * step, rank, 1.0)
            _backward(model, row, 2 * step + 1 if around == "no_sync" else step, rank, 1.0)
            stepped.step()
            stepped.zero_grad()
    return full_parameters(model)


def run(how: str, everything: bool = False) -> tuple[list[str], int]:
    """What differs, by row and what is around it, and how many programs ran.

    Args:
        everything: all combinations; otherwise every row meets every annotation and everything that
            may be around it.
    """
    found, programs = [], 0
    for number, name in enumerate(ROWS):
        turn = number + ANNOTATED.index(how) + dist.get_world_size()
        for around in AROUND if everything else (AROUND[turn % len(AROUND)],):
            for optimizer in (
                OPTIMIZERS if everything else (list(OPTIMIZERS)[turn // len(AROUND) % 2],)
            ):
                case = f"{name}, {how}, {around}, {optimizer}"
                try:
                    actual = _train(name, how, around, optimizer)
                except Exception as error:
                    error.add_note(f"in the program: {case}")
                    raise
                programs += 1
                for key, value in _expected(name, around, optimizer).items():
                    if (apart := (actual[key] - value).abs().max().item()) > 1e-9:
                        found.append(f"{case}: {key} is off by {apart:.1e}")
    return found, programs


ON_RANKS: Final = {
    1: ("sharded", "replicated"),
    2: tuple(each for each in ANNOTATED if each != "hybrid"),
    3: ANNOTATED[:1],
    4: ANNOTATED,
}


@pytest.mark.parametrize(
    ("ranks", "how"), [(ranks, how) for ranks in ON_RANKS for how in ON_RANKS[ranks]]
)
def test_parts_that_a_step_does_not_use_train_as_in_one_process(
    pool: Pool, ranks: int, how: str, record_property: Callable[[str, object], None]
) -> None:
    results = pool.run(ranks, run, how)
    assert [found for found, _ in results] == [[]] * ranks
    record_property("programs with unused parts ended as in one process", results[0][1])
