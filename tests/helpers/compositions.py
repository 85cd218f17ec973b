"""Combinations of features: which are drawn, how a model is annotated and trained with one, and the
same by hand.

Every feature has its own tests; these show that features do not break each other. An axis is one
feature, and its values are the ways to use it; combinations are drawn until every two values of two
axes have met. The reference computes what a combination stands for by hand: copies of the model on
each rank in the dtype of the combination, whose gradients are cast, weighted and summed.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    fully_shard,
    no_sync,
    offload_activations,
    reduce_gradients,
    register_comm_hook,
    replicate,
    step_on_shards,
)
from composable.errors import ComposableError
from tests.helpers.compare import full, full_gradients
from tests.helpers.world import current_device

MICRO_BATCHES: Final = 3
STEPS: Final = 2
WIDTH: Final = 5

AXES: Final[dict[str, tuple[str, ...]]] = {
    "verbs": (
        "shard", "keep", "neighbours", "hybrid", "replicate",
        "replicate in shard", "shard in replicate", "experts",
    ),
    "precision": ("full", "bf16", "bf16 summed in fp32"),
    "reduced": ("each time", "at last", "explicitly", "shards each time"),
    "mean": ("ranks", "sum", "tokens"),
    "recomputed": ("nothing", "blocks", "everything"),
    "offloaded": ("nothing", "activations", "parameters", "both"),
    "hooks": ("none", "on tensors", "in place of sums"),
    "frozen": ("nothing", "a block", "biases"),
    "step": ("on shards", "on DTensors", "in backward"),
}  # fmt: skip

# Each backward would be a step of its own.
OTHERWISE: Final = {("reduced=each time", "step=in backward")}

FOUR_RANKS: Final = {"neighbours", "experts"}  # on two they are nothing of their own

# What is refused, by name: each pair is a test, too.
REFUSED: Final[dict[tuple[str, str], str]] = {
    ("verbs=experts", "hooks=in place of sums"): "on another mesh",
    ("verbs=replicate", "offloaded=parameters"): "offload_policy",
    ("verbs=replicate", "offloaded=both"): "offload_policy",
}


@dataclass(frozen=True)
class Combination:
    """One value of each axis."""

    verbs: str
    precision: str
    reduced: str
    mean: str
    recomputed: str
    offloaded: str
    hooks: str
    frozen: str
    step: str

    def __str__(self) -> str:
        return ", ".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))

    @property
    def values(self) -> list[str]:
        return [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]

    @property
    def pairs(self) -> set[tuple[str, str]]:
        return set(itertools.combinations(self.values, 2))


def possible(combination: Combination, ranks: int) -> bool:
    return not combination.pairs & (REFUSED.keys() | OTHERWISE) and (
        ranks == 4 or combination.verbs not in FOUR_RANKS
    )


def pairs_of(ranks: int) -> list[tuple[str, str]]:
    """Every two values of two axes that can meet."""
    return [
        (f"{a}={x}", f"{b}={y}")
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
        if (f"{a}={x}", f"{b}={y}") not in REFUSED.keys() | OTHERWISE
        and (ranks == 4 or x not in FOUR_RANKS)
    ]


def combinations_of(ranks: int, seed: int = 0) -> list[Combination]:
    """Few combinations in which every two values of two axes meet that can; the same ones for the
    same seed.
    """
    draw = random.Random(seed)
    names = list(AXES)
    left = dict.fromkeys(pairs_of(ranks))
    chosen: list[Combination] = []
    while left:
        wanted = dict(value.split("=", 1) for value in next(iter(left)))
        tries = [
            Combination(**{name: wanted.get(name) or draw.choice(AXES[name]) for name in names})
            for _ in range(60)
        ]
        best = max(
            (each for each in tries if possible(each, ranks)),
            key=lambda each: len(each.pairs & left.keys()),
        )
        chosen.append(best)
        for pair in best.pairs:
            left.pop(pair, None)
    return chosen


# --- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 7),
            nn.Linear(7, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def made(combination: Combination) -> Model:
    """The model as it is before annotation, the same on every rank."""
    torch.manual_seed(0)
    model = Model().to(
        current_device(), torch.float64 if combination.precision == "full" else torch.float32
    )
    if combination.frozen == "a block":
        model.blocks[1].requires_grad_(False)
    if combination.frozen == "biases":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))
    return model


def batch_of(step: int, micro_batch: int) -> tuple[Tensor, int]:
    """This rank's rows, and how many tokens they stand for: none on rank 1 in the first
    micro-batch.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + dist.get_rank())
    tokens = (
        0 if (micro_batch, dist.get_rank()) == (0, 1) else 1 + micro_batch + 2 * dist.get_rank()
    )
    return torch.randn(4, 3, generator=generator).to(current_device()), tokens


# --- with annotations ---------------------------------------------------------------------------


def _precision_of(combination: Combination) -> MixedPrecisionPolicy | None:
    if combination.precision == "full":
        return None
    return MixedPrecisionPolicy("bf16", "fp32" if combination.precision.endswith("fp32") else None)


def _mesh(*names: str) -> Any:
    return init_device_mesh(
        current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=names
    )


def annotate(model: Model, combination: Combination) -> None:
    options: dict[str, Any] = {} if combination.mean == "ranks" else {"grad_reduce": "sum"}
    if (precision := _precision_of(combination)) is not None:
        options["mp_policy"] = precision
    shard = partial(
        fully_shard,
        offload_policy=CPUOffloadPolicy() if offloads_parameters(combination) else None,
        **options,
    )
    match combination.verbs:
        case "shard":
            shard(model, policy={Block})
        case "keep":
            shard(model, policy={Block}, reshard_after_forward=False)
        case "neighbours":
            shard(model, policy={Block}, reshard_after_forward=2)
        case "hybrid":
            shard(model, policy={Block}, mesh=_mesh("replicate", "shard"))
        case "replicate":
            on_the_host = (
                {"offload_policy": CPUOffloadPolicy()} if offloads_parameters(combination) else {}
            )
            replicate(model, bucket_cap_mb=0.0005, **options, **on_the_host)
        case "replicate in shard":
            replicate(model.blocks[1], **options)
            shard(model, policy={Block})
        case "shard in replicate":
            shard(model.blocks[0])
            shard(model.blocks[2])
            replicate(model, **options)
        case "experts":
            shard(model.blocks[1], mesh=_mesh("experts", "copies")["copies"])
            shard(model, policy={Block})
    # Each of the blocks, or the model around all of them.
    if combination.recomputed == "blocks":
        checkpoint(model, policy={Block})
    if combination.recomputed == "everything":
        checkpoint(model)
    if combination.offloaded in ("activations", "both"):
        offload_activations(model, policy={Block}, min_bytes=0)
    if combination.hooks == "in place of sums":
        below = {"replicate in shard": [1], "shard in replicate": [0, 2]}.get(combination.verbs, [])
        for module in (model, *(model.blocks[index] for index in below)):
            for stage in (
                ("reduce_scatter", "all_reduce") if combination.verbs == "hybrid" else (None,)
            ):
                register_comm_hook(module, None, _mean, stage=stage)
    for parameter in model.parameters():
        hook_on(parameter, combination)


def _mean(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """What is done without a hook."""
    summed = dist.all_reduce(bucket.buffer(), group=bucket.group, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0] * bucket.scale)


def offloads_parameters(combination: Combination) -> bool:
    return combination.offloaded in ("parameters", "both")


def hook_on(parameter: nn.Parameter, combination: Combination) -> None:
    """Hooks that are linear: it does not matter in how many parts a gradient comes, but whether
    each part is seen once.
    """
    if parameter.requires_grad and combination.hooks == "on tensors":
        parameter.register_hook(lambda gradient: gradient * 0.5)


def _tokens_in(step: int) -> float:
    """On all ranks and in all micro-batches: what losses are divided by for a mean over tokens."""
    total = torch.tensor(
        sum(float(batch_of(step, micro_batch)[1]) for micro_batch in range(MICRO_BATCHES))
    )
    dist.all_reduce(total := total.to(current_device()))
    return total.item()


def _scopes(
    model: Model, combination: Combination, micro_batch: int
) -> AbstractContextManager[object]:
    scopes, last = ExitStack(), micro_batch == MICRO_BATCHES - 1
    if combination.reduced == "shards each time":
        scopes.enter_context(no_sync(model, enabled=not last, level="replicate"))
    elif combination.reduced != "each time":
        scopes.enter_context(
            no_sync(model, enabled=combination.reduced == "explicitly" or not last)
        )
    return scopes


def train(combination: Combination) -> Iterator[dict[str, Tensor | None]]:
    """All gradients after each step's last backward, and all parameters after its step."""
    model = made(combination)
    annotate(model, combination)
    optimizer: torch.optim.Optimizer
    if combination.step == "in backward":
        optimizer = apply_optimizer_in_backward(
            torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9}
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if combination.step == "on DTensors":
        step_on_shards(optimizer, enabled=False)
    for step in range(STEPS):
        total = _tokens_in(step)
        for micro_batch in range(MICRO_BATCHES):
            batch, tokens = batch_of(step, micro_batch)
            with _scopes(model, combination, micro_batch):
                loss = model(batch.to(model.first.weight.dtype)).square().mean()
                (
                    loss.double() * (tokens / total if combination.mean == "tokens" else 1.0)
                ).backward()
        if combination.reduced == "explicitly":
            reduce_gradients(model)
        yield {} if combination.step == "in backward" else full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        yield {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


# --- by hand ------------------------------------------------------------------------------------


def _term(
    model: Model, combination: Combination, step: int, micro_batch: int
) -> tuple[dict[str, Tensor], float]:
    """This rank's gradients of one micro-batch, in the dtype that they are summed in, and their
    weight.
    """
    low = copy.deepcopy(model)
    if combination.precision != "full":
        low.to(torch.bfloat16)
    batch, tokens = batch_of(step, micro_batch)
    low(batch.to(low.first.weight.dtype)).square().mean().float().backward()
    summed_in = torch.float32 if combination.precision.endswith("fp32") else low.first.weight.dtype
    gradients = {
        name: p.grad.to(summed_in) for name, p in low.named_parameters() if p.grad is not None
    }
    return gradients, float(tokens) if combination.mean == "tokens" else 1.0


def _over_ranks(name: str, term: Tensor, combination: Combination) -> Tensor:
    """The sum over the ranks that share a parameter, in the term's dtype."""
    every = [torch.empty_like(term) for _ in range(dist.get_world_size())]
    dist.all_gather(every, term)
    if combination.verbs == "experts" and name.startswith("blocks.1."):
        half = dist.get_world_size() // 2
        every = every[:half] if dist.get_rank() < half else every[half:]
    total = every[0].clone()
    for each in every[1:]:
        total += each
    return total if combination.mean != "ranks" else total / len(every)


def by_hand(combination: Combination) -> Iterator[dict[str, Tensor | None]]:
    """What `train` yields, with no annotation."""
    model = made(combination)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        terms = [
            _term(model, combination, step, micro_batch) for micro_batch in range(MICRO_BATCHES)
        ]
        total = _tokens_in(step) if combination.mean == "tokens" else 1.0
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            sums = [
                _over_ranks(name, gradients[name] * weight, combination)
                for gradients, weight in terms
            ]
            parameter.grad = sum(each.to(parameter.dtype) for each in sums) / total  # type: ignore[assignment]
            if combination.hooks == "on tensors":
                parameter.grad.mul_(0.5)
        seen = [] if combination.step == "in backward" else list(model.named_parameters())
        yield {name: None if p.grad is None else p.grad.clone() for name, p in seen}
        optimizer.step()
        optimizer.zero_grad()
        yield {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differences(combination: Combination) -> list[str]:
    """What differs between the two, by name."""
    # 8 bits, on both sides; what is lost is far more
    tolerance = 1e-9 if combination.precision == "full" else 1e-1
    found = []
    places = [
        f"{what} of step {step}" for step in range(STEPS) for what in ("gradients", "parameters")
    ]
    for place, actual, expected in zip(
        places, train(combination), by_hand(combination), strict=True
    ):
        for name, wanted in expected.items():
            got = actual[name]
            if (got is None) != (wanted is None):
                found.append(f"{place}, {name}: {got} and not {wanted}")
            elif got is not None and wanted is not None:
                got, wanted = got.cpu(), wanted.cpu()  # offloaded ones rest there
                apart = (got - wanted).abs().max().item()
                if got.dtype != wanted.dtype or apart > tolerance * max(
                    wanted.abs().max().item(), 1e-3
                ):
                    found.append(
                        f"{place}, {name}: {apart:.1e} apart, {got.dtype}, of"
                        f" {wanted.abs().max().item():.1e}"
                    )
    return found


def run(combinations: Sequence[Combination]) -> list[tuple[str, list[str]]]:
    """What each found, or the error that it ended with."""
    results = []
    for combination in combinations:
        try:
            results.append((str(combination), differences(combination)))
        except Exception as error:
            error.add_note(f"in the combination {combination}")
            raise
    return results


def refusal(pair: tuple[str, str]) -> None:
    """Annotating a model with two values that cannot meet, and the first of all others, is refused,
    and says what of.
    """
    values = {axis: values[0] for axis, values in AXES.items()} | dict(
        value.split("=", 1) for value in pair
    )
    combination = Combination(**values)
    with pytest.raises(ComposableError, match=REFUSED[pair]):
        annotate(made(combination), combination)
