"""Legal programs, drawn at random, in which `watch` must find nothing.

    python -m tests.algorithms.generated_watch --minutes 10 --seed 0
    # one of them again
    python -m tests.algorithms.generated_watch --count 1 --seed 4711 --ranks 2
    # without running units again
    python -m tests.algorithms.generated_watch --minutes 10 --no-repeat

A program is a kind of block, an annotation, an optimizer, a way of training a step, and up to three
habits: what happens between steps, or around them. `kinds()` counts them.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import CosineAnnealingLR

from composable import (
    EMA,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    average_parameters,
    checkpoint,
    clip_grad_norm_,
    describe,
    full_state_dict,
    fully_shard,
    join,
    keep_unsharded,
    local_steps,
    no_sync,
    offload_activations,
    reduce_gradients,
    register_comm_hook,
    replicate,
    reshard,
    skipped,
    step_on_shards,
    summon_full_params,
    together,
    unshard,
    watch,
)
from composable.torch_private import local_tensor
from tests.helpers.world import Pool, RanksFailed

WIDTH: Final = 6
STEPS: Final = 4

# --- blocks --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two layers and a residual; subclasses do something else between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def between(self, y: Tensor) -> Tensor:
        return y.tanh()

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.between(self.up(x)))


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)

    def between(self, y: Tensor) -> Tensor:
        return self.norm(y).relu()


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def between(self, y: Tensor) -> Tensor:
        return self.dropout(y)


class DropoutUnused(Dropping):
    def between(self, y: Tensor) -> Tensor:
        return y


class FunctionalDropout(Block):
    def between(self, y: Tensor) -> Tensor:
        return F.dropout(y, 0.2, self.training)


class BatchNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def between(self, y: Tensor) -> Tensor:
        normed: Tensor = self.norm(y)
        return normed.relu_()


class BatchNormedAlone(BatchNormed):
    """Without a moving mean; statistics are those of all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7, momentum=None)


class Masked(Block):
    """An infinity below zero in a buffer, and in what the forward makes."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(7)
        mask[0] = -torch.inf
        self.register_buffer("mask", mask)

    def between(self, y: Tensor) -> Tensor:
        return (y + self.mask.to(y.dtype)).softmax(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        y: Tensor = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0])
        return y


class Mixed(Block):
    """Parameters of two dtypes: a unit with two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def between(self, y: Tensor) -> Tensor:
        return (y * self.scale).to(y.dtype).tanh()


class Unused(Block):
    """A layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)


class Sometimes(Block):
    """A layer that this rank calls in some forwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(7, 7)
        self.calls = 0

    def between(self, y: Tensor) -> Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        uses = (self.calls + _rank()) % 2 == 0
        return self.extra(y).tanh() if uses else y


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class AllFrozen(Block):
    """Nothing is trained here, but in the first layer and the last one of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Adapted(Block):
    """A frozen layer and a low rank that is trained, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        nn.init.zeros_(self.b.weight)

    def between(self, y: Tensor) -> Tensor:
        return y + self.b(self.a(y))


class Cosines(Block):
    """A cache of cosines, which grows with the longest input."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if len(x) > len(self.cos):
            self.cos = torch.arange(float(len(x)))[:, None].cos()
        return super().forward(x * self.cos[: len(x)].to(x.dtype))


class Cache(Block):
    """What evaluation writes: the last keys, as generation keeps them."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 7), persistent=False)

    def between(self, y: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.keys.zero_()
            self.keys[: len(y)] = y[:4]
        return y.tanh()


class Counting(Block):
    """A buffer that training forwards replace."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, y: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + y.detach().float().abs().mean()
        return y.tanh()


class ManyOutputs(Block):
    """A dict, with a loss of its own."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"hidden": y, "loss": y.float().square().mean() * 0.01, "nothing": None}


class Pair(Block):
    """Two outputs, of which one is not used."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.abs()


class Detaching(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + super().forward(x.detach())


class Identity(Block):
    """Its input, unchanged, is an output."""

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.up(x)), x


class InPlace(Block):
    def between(self, y: Tensor) -> Tensor:
        return F.relu(y, inplace=True)


class Logarithm(Block):
    """An infinity below zero that does no harm."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, (y.detach() * 0).abs().log()


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)


class Doubled(Block):
    """Its own layer twice."""

    def between(self, y: Tensor) -> Tensor:
        return self.up(self.down(y.tanh())).tanh()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.cell(x, x)
        return h


class Embedding(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 7)

    def between(self, y: Tensor) -> Tensor:
        return (y + self.table(torch.arange(len(y)) % 5)).tanh()


BLOCKS: Final[dict[str, Callable[[], nn.Module]]] = {
    each.__name__: each
    for each in (
        Block, Normed, Dropping, DropoutUnused, FunctionalDropout, BatchNormed, BatchNormedAlone,
        Masked, Attention, Mixed, Unused, Sometimes, Frozen, AllFrozen, Adapted, Cosines, Cache,
        Counting, ManyOutputs, Pair, Detaching, Identity, InPlace, Logarithm, WeightNormed, Doubled,
        Recurrent, Embedding,
    )
}  # fmt: skip


_WITH_BUFFERS: Final = ("BatchNormed", "BatchNormedAlone", "Masked", "Cosines", "Cache", "Counting")


class Model(nn.Module):
    """Layers around blocks.

    Attributes:
        skips: ranks leave out blocks.
        reuses: the first block is called once more behind the last one.
    """

    def __init__(self, block: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[block]() for _ in range(3))
        self.skips = self.reuses = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        loss = x.new_zeros(())
        self.calls += 1
        for number, block in enumerate([*self.blocks, *([self.blocks[0]] * self.reuses)]):
            if self.skips and number and (self.calls + _rank() + number) % 3 == 0:
                x = skipped(block, x)
                continue
            out = block(x)
            if isinstance(out, dict):
                loss = loss + out["loss"]
                out = out["hidden"]
            x = out[0] if isinstance(out, tuple) else out
        y: Tensor = self.head(x) + loss
        return y


def _rank() -> int:
    return dist.get_rank()


# --- annotations ---------------------------------------------------------------------------------


def _of(model: Model) -> Any:
    return {type(model.blocks[0])}


def _shards(model: Model, **options: Any) -> None:
    fully_shard(model, policy=_of(model), **options)


def _one_unit(model: Model, **options: Any) -> None:
    fully_shard(model, **options)


def _hybrid(model: Model, **options: Any) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2) if ranks > 2 else (ranks, 1))
    fully_shard(model, policy=_of(model), mesh=mesh, **options)


def _replicas(model: Model, **options: Any) -> None:
    replicate(model, **options)


def _replicated_blocks(model: Model) -> None:
    for block in model.blocks:
        replicate(block)
    replicate(model)


def _mixed(model: Model) -> None:
    replicate(model.blocks[1])
    _shards(model)


def _parts(model: Model) -> None:
    """Several roots."""
    for each in (model.stem, *model.blocks):
        fully_shard(each)
    replicate(model.head)


def _nested(model: Model) -> None:
    """Units inside of units."""
    for block in model.blocks:
        for each in block.children():
            if isinstance(each, nn.Linear) and not nn.utils.parametrize.is_parametrized(each):
                fully_shard(each)
    _shards(model)


def _together_in_one(model: Model) -> None:
    """A unit of two modules."""
    fully_shard([model.blocks[0], model.blocks[1]])
    _shards(model)


def _checkpointed(model: Model) -> None:
    for block in model.blocks:
        checkpoint(block)
    _shards(model)


def _offloaded_activations(model: Model) -> None:
    for block in model.blocks:
        offload_activations(block, min_bytes=0)
    _shards(model)


def _compiled(model: Model) -> None:
    for block in model.blocks:
        block.compile(backend="eager")
    _shards(model)


_BF16: Final = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    full_precision_classes=(nn.LayerNorm, nn.BatchNorm1d),
)

ANNOTATIONS: Final[dict[str, Callable[[Model], None]]] = {
    "shards": _shards,
    "shards, kept": partial(_shards, reshard_after_forward=False),
    "shards, always resharded": partial(_shards, reshard_after_forward=True),
    "shards, prefetch 2": partial(_shards, prefetch=2),
    "shards, sums": partial(_shards, grad_reduce="sum"),
    "shards, bf16": partial(_shards, mp_policy=_BF16),
    "shards on the host": partial(_shards, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "one unit": _one_unit,
    "one unit, bf16": partial(_one_unit, mp_policy=_BF16),
    "hybrid": _hybrid,
    "hybrid, bf16": partial(_hybrid, mp_policy=_BF16),
    "replicate": _replicas,
    "replicate, small buckets": partial(_replicas, bucket_cap_mb=0.0001),
    "replicate, views": partial(_replicas, gradient_as_bucket_view=True),
    "replicate, bf16": partial(_replicas, mp_policy=_BF16),
    "replicate, own buffers": partial(_replicas, broadcast_buffers=False),
    "replicated blocks": _replicated_blocks,
    "replicate in shards": _mixed,
    "several roots": _parts,
    "nested": _nested,
    "one unit of two": _together_in_one,
    "checkpoint": _checkpointed,
    "offloaded activations": _offloaded_activations,
    "compiled blocks": _compiled,
}
_SHARDED: Final = [name for name in ANNOTATIONS if "replica" not in name]

# --- a step --------------------------------------------------------------------------------------


@dataclass
class Run:
    """A program as it runs on one rank.

    Attributes:
        draw: the same on all ranks.
        own: another one on each rank.
    """

    model: Any
    optimizer: Any
    draw: random.Random
    own: random.Random
    step: int = 0
    scaler: Any = None
    watched: Any = None

    def batch(self, rows: int | None = None) -> Tensor:
        """Another one on each rank, which may have fewer rows, but for a batch norm not one."""
        rows = rows or 3 + self.own.randrange(3)
        return torch.randn(rows, WIDTH, generator=_generator(self.own))

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.batch()).float().square().mean()
        return loss

    def step_optimizer(self) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def _generator(draw: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(draw.randrange(1 << 30))


def _plainly(run: Run) -> None:
    run.loss().backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _zeroed_first(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.loss().backward()
    run.step_optimizer()


def _accumulated(run: Run, *, synced: bool = False) -> None:
    for number in range(3):
        with no_sync(run.model, enabled=number < 2 and not synced):
            run.loss().backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _reduced_by_hand(run: Run) -> None:
    with no_sync(run.model):
        for _ in range(2):
            run.loss().backward()
    reduce_gradients(run.model)
    run.step_optimizer()
    run.optimizer.zero_grad()


def _every_second_step(run: Run) -> None:
    run.loss().backward()
    if run.step % 2:
        run.step_optimizer()
        run.optimizer.zero_grad()


def _two_forwards_one_backward(run: Run) -> None:
    (run.loss() + run.loss()).backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _backward_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _forward_left_out(run: Run) -> None:
    """A forward whose output nobody uses; its backward does not come."""
    run.loss()
    _plainly(run)


def _clipped(run: Run, *, ours: bool = True) -> None:
    run.loss().backward()
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    if ours:
        clip_grad_norm_(run.model, 0.1)
    else:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.step_optimizer()
    run.optimizer.zero_grad()


def _closure(run: Run) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss.detach()

    run.optimizer.step(closure)


def _autocast(run: Run) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.loss()
    loss.backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _scaled(run: Run) -> None:
    if run.scaler is None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    run.scaler.scale(run.loss()).backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _input_gradient(run: Run) -> None:
    x = run.batch().requires_grad_()
    run.model(x).float().square().mean().backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _evaluates_before_the_step(run: Run) -> None:
    run.loss().backward()
    _evaluates(run)
    run.step_optimizer()
    run.optimizer.zero_grad()


def _skips_the_step(run: Run) -> None:
    run.loss().backward()
    if run.step % 2 == 0:
        run.step_optimizer()
    else:
        run.watched.end_step()
    run.optimizer.zero_grad()


def _in_together(run: Run) -> None:
    with together(run.model):
        run.loss().backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


def _no_loss_on_a_rank(run: Run) -> None:
    """A rank whose loss is left out takes part in backward by zeros."""
    loss = run.loss()
    (loss if (run.step + _rank()) % 2 else loss * 0).backward()
    run.step_optimizer()
    run.optimizer.zero_grad()


WAYS: Final[dict[str, Callable[[Run], None]]] = {
    "plain": _plainly,
    "zeros first": _zeroed_first,
    "no_sync": _accumulated,
    "accumulation": partial(_accumulated, synced=True),
    "reduce_gradients": _reduced_by_hand,
    "every second step": _every_second_step,
    "two forwards": _two_forwards_one_backward,
    "backward twice": _backward_twice,
    "a forward alone": _forward_left_out,
    "clip_grad_norm_": _clipped,
    "closure": _closure,
    "autocast": _autocast,
    "scaler": _scaled,
    "gradient of the input": _input_gradient,
    "evaluation before the step": _evaluates_before_the_step,
    "steps left out": _skips_the_step,
    "together": _in_together,
    "no loss on a rank": _no_loss_on_a_rank,
}

# --- optimizers ----------------------------------------------------------------------------------


class Scheduled(torch.optim.SGD):
    """With a function in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        for group in self.param_groups:
            group["schedule"] = lambda step: 1.0 / (1 + step)
            group["bound"] = self.zero_grad
            group["state"] = object()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decays = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


_sgd: Final = partial(torch.optim.SGD, lr=0.05)
OPTIMIZERS: Final[dict[str, Callable[[Any], Any]]] = {
    "SGD": lambda model: _sgd(model.parameters()),
    "SGD, momentum": lambda model: _sgd(model.parameters(), momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "AdamW, groups": lambda model: torch.optim.AdamW(_groups(model), lr=0.01),
    "Adam, tensor lr": lambda model: torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "a function in its groups": lambda model: Scheduled(model.parameters()),
    "steps on DTensors": lambda model: _on_dtensors(torch.optim.AdamW(model.parameters(), lr=0.01)),
    "trained only": lambda model: _sgd([p for p in model.parameters() if p.requires_grad]),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "in backward": lambda model: apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.05}
    ),
}


def _on_dtensors(optimizer: Any) -> Any:
    step_on_shards(optimizer, enabled=False)
    return optimizer


# --- habits --------------------------------------------------------------------------------------


def _evaluates(run: Run) -> None:
    """All ranks do, on other batches and as often."""
    run.model.eval()
    with torch.no_grad():
        for _ in range(2):
            run.model(run.batch())
    run.model.train()


def _evaluates_in_training_mode(run: Run) -> None:
    with torch.no_grad():
        run.model(run.batch())


def _kept(model: nn.Module) -> Any:
    sharded = any(isinstance(each, DTensor) for each in model.parameters())
    return keep_unsharded(model) if sharded else nullcontext()


def _generates(run: Run) -> None:
    """Each rank as often, and as long, as it likes."""
    run.model.eval()
    with _kept(run.model), torch.no_grad():
        for _ in range(run.own.randrange(3)):
            run.model(run.batch(2 + run.own.randrange(9)))
    run.model.train()


def _generates_alone(run: Run) -> None:
    with _kept(run.model), torch.no_grad():
        if _rank() == 0:
            run.model(run.batch(5 + run.step))


def _reads(run: Run) -> None:
    with summon_full_params(run.model):
        sum(float(p.detach().sum()) for p in run.model.parameters())


def _writes(run: Run) -> None:
    """To the same places on all ranks."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.is_floating_point():
                local_tensor(parameter).clamp_(-2, 2)


def _edits(run: Run) -> None:
    with summon_full_params(run.model), torch.no_grad():
        run.model.head.bias.mul_(0.5)


def _loads(run: Run) -> None:
    run.model.load_state_dict(run.model.state_dict())


def _loads_full(run: Run) -> None:
    full_state_dict(run.model)


def _loads_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _copies(run: Run) -> None:
    clone = copy.deepcopy(run.model)
    clone(run.batch()).float().square().mean().backward()


def _describes(run: Run) -> None:
    str(describe(run.model)) if _rank() == 0 else None


def _gathers(run: Run) -> None:
    unshard(run.model)
    reshard(run.model)


def _freezes(run: Run) -> None:
    run.model.stem.requires_grad_(run.step % 2 == 1)


def _hooks_modules(run: Run) -> None:
    if run.step == 0:
        block = run.model.blocks[0]
        block.register_forward_pre_hook(lambda _, args: args)
        block.register_forward_hook(lambda _, args, output: None)
        run.model.head.register_full_backward_hook(lambda *_: None)


def _hooks_parameters(run: Run) -> None:
    if run.step == 0:
        weight = run.model.head.weight
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _draws(run: Run) -> None:
    """A rank draws numbers by itself."""
    if _rank() == 0:
        torch.rand(3), random.random()


def _trains_another(run: Run) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other = fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def _adds_a_group(run: Run) -> None:
    if run.step == 1:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def _buffers_by_hand(run: Run) -> None:
    """All ranks write the same."""
    with torch.no_grad():
        for buffer in run.model.buffers():
            if buffer.is_floating_point() and buffer.dim() == 1:
                buffer.add_(0.0)


def _second_optimizer(run: Run) -> None:
    run.model.head.weight.grad = None
    torch.optim.SGD([run.model.head.weight], lr=0.1).step()


def _gradient_by_hand(run: Run) -> None:
    """`torch.autograd.grad` of an input, outside of any step."""
    x = run.batch().requires_grad_()
    torch.autograd.grad(run.model(x).float().sum(), x)


def _averages(run: Run) -> None:
    average_parameters(run.model)


# What happens between two steps.
BETWEEN: Final[dict[str, Callable[[Run], None]]] = {
    "evaluation": _evaluates,
    "evaluation in training mode": _evaluates_in_training_mode,
    "generation": _generates,
    "one rank generates": _generates_alone,
    "summon_full_params": _reads,
    "clamp": _writes,
    "edit": _edits,
    "load_state_dict": _loads,
    "full_state_dict": _loads_full,
    "optimizer's state": _loads_optimizer,
    "copy": _copies,
    "describe": _describes,
    "unshard": _gathers,
    "freeze": _freezes,
    "module hooks": _hooks_modules,
    "parameter hooks": _hooks_parameters,
    "random numbers": _draws,
    "another model": _trains_another,
    "one more group": _adds_a_group,
    "buffers": _buffers_by_hand,
    "second optimizer": _second_optimizer,
    "autograd.grad": _gradient_by_hand,
    "average_parameters": _averages,
}


@contextmanager
def _with_ema(run: Run) -> Iterator[Callable[[], object]]:
    ema = EMA(run.model, decay=0.9)
    yield ema.update


@contextmanager
def _with_scheduler(run: Run) -> Iterator[Callable[[], object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler that steps before its optimizer
        scheduler = CosineAnnealingLR(run.optimizer, 4)

        def step() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()

        yield step


@contextmanager
def _with_local_steps(run: Run) -> Iterator[Callable[[], object]]:
    with local_steps(run.model, run.optimizer, every=2):
        yield lambda: None


@contextmanager
def _with_join(run: Run) -> Iterator[Callable[[], object]]:
    with join(run.model, run.optimizer):
        yield lambda: None


@contextmanager
def _with_noop_hook(run: Run) -> Iterator[Callable[[], object]]:
    handle = register_comm_hook(run.model, None, noop_hook)
    yield lambda: average_parameters(run.model) if run.step % 2 else None
    handle.remove()


@contextmanager
def _with_skips(run: Run) -> Iterator[Callable[[], object]]:
    run.model.skips = True
    yield lambda: None


@contextmanager
def _with_reuse(run: Run) -> Iterator[Callable[[], object]]:
    run.model.reuses = True
    yield lambda: None


@contextmanager
def _with_checkpointing(run: Run) -> Iterator[Callable[[], object]]:
    for block in run.model.blocks:
        inner = block.forward
        block.forward = partial(torch.utils.checkpoint.checkpoint, inner, use_reentrant=False)
    yield lambda: None


@contextmanager
def _with_anomalies(run: Run) -> Iterator[Callable[[], object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield lambda: None


# What is around all steps; what it yields is called between two.
AROUND: Final[dict[str, Callable[[Run], Any]]] = {
    "EMA": _with_ema,
    "scheduler": _with_scheduler,
    "local_steps": _with_local_steps,
    "join": _with_join,
    "hook that keeps replicas apart": _with_noop_hook,
    "skipped": _with_skips,
    "reuse": _with_reuse,
    "checkpoint of torch's": _with_checkpointing,
    "detect_anomaly": _with_anomalies,
}

# --- programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A program, and how it is watched."""

    seed: int
    ranks: int
    block: str
    annotation: str
    optimizer: str
    way: str
    around: str
    between: tuple[str, ...]
    repeat: bool
    agree: int
    every: int

    @property
    def is_legal(self) -> bool:
        replicas = "replica" in self.annotation
        refused = (
            # what would have to be the same on ranks, or is one rank's
            self.optimizer == "LBFGS" and (self.way != "closure" or not replicas),
            # torch's flattens gradients, which `DTensor` refuses to do with uneven shards
            self.optimizer == "LBFGS" and self.annotation == "replicate in shards",
            self.optimizer == "in backward"
            and (
                self.way not in ("plain", "no_sync", "autocast", "gradient of the input")
                or self.around not in ("", "reuse", "checkpoint of torch's")
                or bool({"optimizer's state", "one more group", "second optimizer", "freeze"}
                    & {*self.between})
            ),
            self.way == "closure" and self.around in ("local_steps", "join"),
            self.around == "join" and bool(self.between),
            # groups are sent to ranks without data
            self.around == "join" and self.optimizer == "a function in its groups",
            self.around == "join" and self.way not in ("plain", "no_sync", "autocast"),
            self.around == "join" and self.annotation == "several roots",
            self.around == "local_steps"
            and (self.annotation not in ("replicate", "hybrid", "replicated blocks")),
            self.around == "hook that keeps replicas apart" and self.annotation != "replicate",
            self.around == "skipped" and self.way == "together",
            self.around == "skipped" and self.block in ("BatchNormed", "BatchNormedAlone"),
            self.around in ("skipped", "local_steps") and "freeze" in self.between,
            # of another size on each rank
            self.block == "Cosines" and replicas and self.annotation != "replicate, own buffers",
            # a unit that only some ranks call
            self.block == "Sometimes" and self.annotation == "nested",
            # which would be called or not when the block is computed again
            self.block == "Sometimes"
            and (self.annotation == "checkpoint" or self.around == "checkpoint of torch's"),
            self.around == "local_steps" and self.way == "together",
            # replicated modules broadcast their buffers
            "unshard" in self.between and replicas and self.annotation != "replicate in shards",
            bool({"generation", "one rank generates"} & {*self.between})
            and replicas
            and self.annotation != "replicate, own buffers"
            and self.block in _WITH_BUFFERS,
            "average_parameters" in self.between
            and self.annotation not in ("replicate", "hybrid", "replicated blocks"),
        )  # fmt: skip
        return not any(refused)


def plan_of(seed: int, ranks: int, *, repeat: bool = True) -> Plan:
    draw = random.Random(f"{seed} {ranks}")
    while True:
        plan = Plan(
            seed,
            ranks,
            draw.choice([*BLOCKS]),
            draw.choice([*ANNOTATIONS]),
            draw.choice([*OPTIMIZERS]),
            draw.choice([*WAYS]),
            draw.choice(["", "", *AROUND]),
            tuple(draw.sample([*BETWEEN], draw.randrange(3))),
            repeat,
            draw.choice([1, 1, 2]),
            draw.choice([1, 1, 1, 2]),
        )
        if plan.is_legal:
            return plan


def kinds() -> int:
    """How many things programs are drawn from."""
    return sum(map(len, (BLOCKS, ANNOTATIONS, OPTIMIZERS, WAYS, AROUND, BETWEEN)))


def run_plan(plan: Plan, *, watches: bool = True) -> list[str]:
    """The findings; an error of `watch` is one."""
    torch.manual_seed(plan.seed)
    model = Model(plan.block)
    ANNOTATIONS[plan.annotation](model)
    optimizer = OPTIMIZERS[plan.optimizer](model)
    rank = _rank()
    torch.manual_seed(plan.seed * 100 + rank)  # of dropout
    random.seed(plan.seed * 100 + rank)
    draws = random.Random(f"{plan.seed}"), random.Random(f"{plan.seed} {rank}")
    run = Run(model, optimizer, *draws)
    options: dict[str, Any] = {"every": plan.every, "agree": plan.agree, "repeat": plan.repeat}
    run.watched = watch(model, action="raise", **options) if watches else _Unwatched()
    around = AROUND[plan.around](run) if plan.around else nullcontext(lambda: None)
    with run.watched, around as follow:
        for run.step in range(STEPS + (rank if plan.around == "join" else 0)):
            WAYS[plan.way](run)
            follow()
            for name in plan.between:
                BETWEEN[name](run)
    weights = (local_tensor(each) for each in model.parameters())
    assert all(bool(each.detach().isfinite().all()) for each in weights), "not a program"
    return list(map(str, run.watched.findings))


class _Unwatched:
    findings: Final[list[Any]] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def end_step(self) -> None:
        return None


def run_plans(plans: Sequence[Plan], watches: bool = True) -> list[str]:
    """What went wrong, one text for each plan, empty if nothing."""
    said = []
    for plan in plans:
        try:
            with warnings.catch_warnings():
                # dynamo looks at `.grad` of everything
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                found = "\n".join(run_plan(plan, watches=watches))
        except Exception as error:
            raise AssertionError(f"{plan}: {type(error).__name__}: {error}") from error
        said.append(found and f"{plan}:\n{found}")
    return said


# --- by hand -------------------------------------------------------------------------------------


def failure(pool: Pool, plan: Plan) -> str:
    """What `watch` finds in a program, or raises that is not raised without it; or nothing."""
    text = _said(pool, plan, watches=True)
    if text and (refused := _said(pool, plan, watches=False)):
        last = refused.strip().splitlines()[-1]
        return f"ILLEGAL without watch, too: {last}"
    return text


def _said(pool: Pool, plan: Plan, *, watches: bool) -> str:
    try:
        return "\n".join(dict.fromkeys(
            each
            for some in pool.run(
                plan.ranks, run_plans, [plan], watches, timeout=60, group_timeout=25
            )
            for each in some
            if each
        ))  # fmt: skip
    except RanksFailed as error:
        pool.stop()
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch generated legal programs.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    parser.add_argument("--ranks", type=int, default=0, help="2 and 4 by turns unless given")
    parser.add_argument("--no-repeat", action="store_true", help="without running units again")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pool, done, illegal = Pool(), 0, 0
    failed: list[Plan] = []
    while time.monotonic() < end and not (options.count and done >= options.count):
        ranks = options.ranks or (2, 2, 2, 4)[done % 4]
        plan = plan_of(options.seed + done, ranks, repeat=not options.no_repeat)
        text = failure(pool, plan)
        done += 1
        if text.startswith("ILLEGAL"):
            illegal += 1
            print(f"--- {plan}\n{text}\n", flush=True)
        elif text:
            failed.append(plan)
            print(f"--- {plan}\n{text}\n", flush=True)
    print(f"{done} programs of {kinds()} parts: {len(failed)} failed, {illegal} not legal")
    for plan in failed:
        print(f"    again: --count 1 --seed {plan.seed} --ranks {plan.ranks}")
    pool.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
