"""What `suggest` proposes is pasted, and trains on ranks as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composable.errors import ForecastError
from composable.extras.forecast.plans import repeated
from composable.forecast import Plan, suggest
from tests.helpers.world import Pool
from tests.tensor_parallel import transformers_models
from tests.tensor_parallel.transformers_models import (
    VOCABULARY,
    assert_trains_beside,
    llama,
    made,
)

MLP: Final = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
STYLES: Final = {**MLP, "head": ColwiseParallel(output_layouts=Replicate())}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class _Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Decoder(nn.Module):
    """Without a plan of its own; called as models of transformers are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> _Output:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return _Output(nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "a plan of torch's": Decoder,
    "Llama": partial(llama, tied=False),
    "Llama, tied": partial(llama, tied=True),
    **{kind: partial(made, kind) for kind in transformers_models.KINDS},
}


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def _batch() -> dict[str, Tensor]:
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _pasted(name: str, codes: list[tuple[str, int]]) -> None:
    """Run each, and train beside one process.

    Args:
        codes: what to paste, and how many ranks share rows.
    """
    for code, tp in codes:
        model, alone = _seeded(name), _seeded(name)
        exec(code, {"model": model, "tp_plan": STYLES})
        replicas = dist.get_world_size() // tp
        assert_trains_beside(model, alone, dist.get_rank() // tp, replicas, steps=2)


def _plans(name: str, ranks: int) -> list[Plan]:
    model = _seeded(name)
    styles = STYLES if name == "a plan of torch's" else None
    lean = Plan("fully_shard", repeated(model), tp=2, tp_plan=styles)
    found = [
        replace(lean, keep=True),
        replace(lean, recomputed=1),
        replace(lean, verb="replicate"),
        replace(lean, shards=ranks // 2),
        replace(lean, offloaded=1, tp=1),
    ]
    if getattr(model, "ep_plan", None):
        found += [replace(plan, experts=True) for plan in found[:3]]
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_plan_trains_as_pasted(pool: Pool, name: str, ranks: int, half: int) -> None:
    plans = _plans(name, ranks)[half::2]
    codes = [(plan.code(ranks, "cpu"), plan.tp) for plan in plans]
    pool.run(ranks, _pasted, name, codes)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_suggested_trains_as_pasted(pool: Pool, name: str, ranks: int) -> None:
    styles = STYLES if name == "a plan of torch's" else None
    ask = partial(suggest, MODELS[name], _batch, ranks=ranks, half=False, tp_plan=styles)
    ample = ask()
    device = ample.forecast.device
    tried = sorted(each.peak for each in ample.comparison.forecasts.values())
    found = [ample]
    for peak in (tried[0], tried[len(tried) // 2]):  # what takes least, and half of what was tried
        found.append(ask(memory=(peak + 1) / (1 - device.margin)))
    codes = {each.plan.code(ranks, "cpu"): each.plan.tp for each in found}
    pool.run(ranks, _pasted, name, list(codes.items()))


def test_tensor_parallel_steps_count_for_as_many_rows() -> None:
    found = suggest(MODELS["Llama"], _batch, ranks=4, half=False).comparison
    (name, *_) = [name for name in found.forecasts if "tensor parallel over 2" in name]
    seconds, exposed = found.times(name)
    assert (seconds, exposed) == (
        2 * found.forecasts[name].seconds,
        2 * found.forecasts[name].exposed,
    )
    shown = str(found).splitlines()
    assert found.times(next(iter(found.forecasts)))[0] == min(
        found.times(each)[0] for each in found.forecasts if found.forecasts[each].fits
    )
    assert shown[3].endswith("best")


def test_ranks_that_do_not_divide_a_model_are_not_proposed() -> None:
    reported: list[str] = []
    found = suggest(partial(Decoder, 11), _batch, ranks=4, tp_plan=MLP, progress=reported.append)
    assert "tensor parallel over 2" in " ".join(found.comparison.forecasts)
    (said,) = [line for line in reported if "does not run" in line]
    assert said == (
        "fully_shard, tensor parallel over 4, bf16 does not run: suggest: 4 ranks do not divide"
        " 'up.weight', (22, 11)"
    )


def test_a_model_without_a_plan_is_not_distributed() -> None:
    found = suggest(Decoder, _batch, ranks=4)
    assert not any("tensor" in name for name in found.comparison.forecasts)
    with pytest.raises(ForecastError):
        suggest(Decoder, _batch, ranks=4, memory=100)
