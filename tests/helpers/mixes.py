"""Models on which `replicate` and `fully_shard` meet, and how they are trained next to a plain one;
knows no test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import composable
from composable import checkpoint, fully_shard, replicate
from tests.helpers.compare import all_full, full
from tests.helpers.world import current_device

WIDTH: Final = 8  # no rank of four has an empty shard, of which torch can take no largest element
WORDS: Final = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Model(nn.Module):
    """Reads its embedding twice: by a call, and as the weight of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(WIDTH)

    def features(self, tokens: Tensor) -> Tensor:
        x = tokens if tokens.is_floating_point() else self.tok_emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        """Of numbers in place of tokens: what uses neither the embedding nor the head."""
        x = self.features(tokens)
        return x if tokens.is_floating_point() else F.linear(x, self.tok_emb.weight)


def in_the_readme(model: Model) -> None:
    replicate(model.tok_emb)
    fully_shard(model, policy={Block})


def shards_inside_replicated(model: Model) -> None:
    for block in model.blocks:
        fully_shard(block)
    replicate(model)


def replicated_in_a_unit(model: Model) -> None:
    replicate(model.tok_emb)
    replicate(model.blocks[0].up)  # type: ignore[arg-type]
    fully_shard(model, policy={Block})


def on_several_floors(model: Model) -> None:
    replicate(model.tok_emb)
    replicate(model.blocks[1].norm)  # type: ignore[arg-type]
    fully_shard(model.blocks[1])
    replicate(model)


def with_checkpointing(model: Model) -> None:
    checkpoint(model, policy={Block})
    in_the_readme(model)


MIXES: Final[dict[str, Callable[[Model], None]]] = {
    mix.__name__: mix
    for mix in (
        in_the_readme,
        shards_inside_replicated,
        replicated_in_a_unit,
        on_several_floors,
        with_checkpointing,
    )
}


def make_model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(current_device(), dtype)


def copies(mix: str) -> tuple[Model, Model]:
    """A plain model, and the same one annotated."""
    models = make_model(), make_model()
    MIXES[mix](models[1])
    return models


def batch_of(step: int) -> Tensor:
    """All ranks' tokens, one row per rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (dist.get_world_size(), 5), generator=generator).to(
        current_device()
    )


def losses(plain: nn.Module, mixed: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """The loss of one process on the whole batch, and this rank's on its share."""
    batch, rank = batch_of(step), dist.get_rank()
    return plain(batch).square().mean(), mixed(batch[rank : rank + 1]).square().mean()


def assert_alike(
    plain: nn.Module,
    mixed: nn.Module,
    what: str,
    of: Callable[[Tensor], Tensor | None] = lambda p: p,
) -> None:
    expected = {name: of(parameter) for name, parameter in plain.named_parameters()}
    found = dict(zip(expected, map(of, mixed.parameters()), strict=True))
    there = {name: tensor for name, tensor in found.items() if tensor is not None}
    assert there.keys() == {name for name, tensor in expected.items() if tensor is not None}, what
    for name, actual in zip(there, all_full(list(there.values())), strict=True):
        torch.testing.assert_close(
            actual,
            expected[name],
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, name=name: f"{what}: {name}: {text}",
        )


def gradient(parameter: Tensor) -> Tensor | None:
    return parameter.grad


def kinds(model: nn.Module) -> list[str]:
    """What each parameter is, in short."""
    return [str(p.placements) if isinstance(p, DTensor) else "plain" for p in model.parameters()]


# --- torch's own functions ----------------------------------------------------------------------


@dataclass(frozen=True)
class UnitSpec:
    """An optimizer of torch, and what is done around its steps."""

    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    scaled: bool = False
    clip: Callable[..., Any] | None = None
    clipping: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True


_stock_clip: Final = nn.utils.clip_grad_norm_

RECIPES: Final[dict[str, UnitSpec]] = {
    "AdamW": UnitSpec(lambda ps: torch.optim.AdamW(ps, lr=0.05), clip=_stock_clip),
    "AdamW(foreach=True)": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
        clip=_stock_clip,
        clipping={"foreach": True},
        set_to_none=False,
    ),
    "AdamW(foreach=False)": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
        clip=_stock_clip,
        clipping={"foreach": False},
    ),
    "AdamW(fused=True)": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
        clip=_stock_clip,
        clipping={"norm_type": float("inf")},
    ),
    "SGD(foreach=True)": UnitSpec(
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True)
    ),
    "GradScaler, unscaled and clipped": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05), scaled=True, clip=_stock_clip
    ),
    "GradScaler and a fused step": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True), scaled=True
    ),
    "our clipping": UnitSpec(
        lambda ps: torch.optim.AdamW(ps, lr=0.05), clip=composable.clip_grad_norm_
    ),
}


def train(plain: Model, mixed: Model, spec: UnitSpec, steps: int = 4) -> None:
    models = plain, mixed
    optimizers = [spec.make(model.parameters()) for model in models]
    kind = current_device().type
    scalers = [torch.amp.GradScaler(kind, init_scale=8.0, enabled=spec.scaled) for _ in models]
    for step in range(steps):
        for scaler, loss in zip(scalers, losses(plain, mixed, step), strict=True):
            scaler.scale(loss).backward()
        norms = []
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            if spec.clip is not None:
                scaler.unscale_(optimizer)
                norms.append(full(spec.clip(model.parameters(), 0.1, **spec.clipping)))
            scaler.step(optimizer)
            scaler.update()
        if norms:
            torch.testing.assert_close(
                norms[1].to(norms[0]), norms[0], msg="the norm counts each parameter once"
            )
            assert norms[0] > 0.1
        assert_alike(plain, mixed, f"gradients of step {step}", gradient)
        assert_alike(plain, mixed, f"parameters after step {step}")
        if step != 1:  # what is there then is added to
            for optimizer in optimizers:
                optimizer.zero_grad(spec.set_to_none)


def train_all(mix: str) -> None:
    for name, spec in RECIPES.items():
        plain, mixed = copies(mix)
        assert "plain" not in kinds(mixed)
        try:
            train(plain, mixed, spec)
        except Exception as error:
            error.add_note(name)
            raise
