"""Activations of offloaded modules wait on the host, and training does not notice: bit for bit, in
every composition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    checkpoint,
    describe,
    fully_shard,
    offload_activations,
    registry,
    remove,
    replicate,
)
from tests.helpers.battery import BATTERY
from tests.helpers.battery.transformers import Block, Transformer, next_token_loss
from tests.helpers.compare import full_gradients
from tests.helpers.offloading import Line, inputs_of, offloading
from tests.helpers.world import Pool, current_device, need_devices, spmd

# --- parity --------------------------------------------------------------------------------------


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy={Block}, mesh=mesh)


def _mixed(model: nn.Module) -> None:
    replicate(model.blocks[0])
    fully_shard(model, policy={Block})


_VERBS: Final[dict[str, Callable[[nn.Module], object]]] = {
    "nothing else": lambda model: None,
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "without resharding": lambda model: fully_shard(
        model, policy={Block}, reshard_after_forward=False
    ),
    "bfloat16": lambda model: fully_shard(model, policy={Block}, mp_policy="bf16"),
    "replicate": lambda model: replicate(model, bucket_cap_mb=0.0002),
    "both": _mixed,
    "hybrid": _hybrid,
}
Policy = set[type[nn.Module]] | None
# The policies of recomputation, and those of offload.
_KEPT: Final[dict[str, tuple[list[Policy], list[Policy]]]] = {
    "blocks": ([], [{Block}]),
    "the model": ([], [None]),
    "one in the other": ([], [None, {nn.Linear}]),
    "blocks that are recomputed": ([{Block}], [{Block}]),
    "around blocks that are recomputed": ([{Block}], [None]),
    "inside of blocks that are recomputed": ([{Block}], [{nn.Linear, nn.LayerNorm}]),
    "blocks of a model that is recomputed": ([None], [{Block}]),
}


def _tokens(step: int = 0) -> Tensor:
    (tokens,) = BATTERY["transformer with tied embedding"].inputs(
        0, step, dist.get_rank(), current_device()
    )
    return tokens


def _transformer(dropout: float = 0.0) -> Transformer:
    torch.manual_seed(0)
    return Transformer(dropout=dropout).to(current_device())


def _one_backward(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens())
    loss.backward()
    return [loss]


def _two_forwards_before_a_backward(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens()) + 2 * next_token_loss(model, _tokens(1))
    loss.backward()
    return [loss]


def _backward_twice(model: nn.Module) -> list[Tensor]:
    loss = next_token_loss(model, _tokens())
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


_PROGRAMS: Final = (_one_backward, _two_forwards_before_a_backward, _backward_twice)


def _compare(verbs: str, kept: str) -> None:
    recomputed, offloaded = _KEPT[kept]
    plain, model = _transformer(0.2), _transformer(0.2)
    for each in (plain, model):
        _VERBS[verbs](each)
        for policy in recomputed:
            checkpoint(each, policy=policy)
    with offloading() as seen:
        for policy in offloaded:
            offload_activations(model, policy=policy, **seen.options)
        for program in _PROGRAMS:
            if program is _backward_twice and "recomputed" in kept:
                continue  # torch frees what was recomputed
            results = []
            for each in (plain, model):
                torch.manual_seed(100 + dist.get_rank())
                results.append([*program(each), *full_gradients(each).values()])
                each.zero_grad()
            assert seen.left, "something left the device"
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), (
                verbs,
                kept,
                program.__name__,
            )
            assert not seen.alive


def _compare_all(verbs: str, kept: tuple[str, ...]) -> None:
    for each in kept:
        _compare(verbs, each)


_ALL: Final = tuple(_KEPT)
_SOME: Final = ("blocks", "blocks that are recomputed", "inside of blocks that are recomputed")


@pytest.mark.parametrize(
    ("ranks", "verbs", "kept"),
    [
        (1, "nothing else", _ALL),
        (1, "fully_shard", _SOME[:1]),
        (2, "fully_shard", _ALL),
        (2, "without resharding", _SOME[:1]),
        (2, "bfloat16", _SOME[:2]),
        (2, "replicate", _SOME),
        (2, "both", _SOME[1:]),
        (4, "hybrid", _SOME[:2]),
    ],
)
def test_losses_and_gradients_are_the_same_to_the_last_bit(
    pool: Pool, ranks: int, verbs: str, kept: tuple[str, ...], device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _compare_all, verbs, kept, device=device)


# --- the verb -----------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_copied_and_describe_says_so() -> None:
    model = nn.Sequential(Line(), Line())
    assert offload_activations(model, policy={Line}, min_bytes=0) is model
    seen: list[object] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor
    ):
        model(torch.randn(4, 8)).sum().backward()
    assert seen, "nobody stands before the hooks around"
    assert "offload_activations: nothing is copied where modules are on the CPU: 0, 1" in str(
        describe(model)
    )
    assert describe(model).to_dict()["elsewhere"] == {"offload_activations": ["0", "1"]}


@pytest.mark.parametrize("there", [True, False])
def test_describe_says_so_of_modules_that_are_nowhere_yet_only_without_an_accelerator(
    there: bool,
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Line(), nn.Softmax(-1))
    offload_activations(model, policy={Line, nn.Softmax})
    with mock.patch("composable.report.describe.any_has_streams", return_value=there):
        assert describe(model).to_dict()["not_offloaded"] == ([] if there else ["0", "1"])


@spmd(ranks=1)
def test_remove_undoes_it() -> None:
    with offloading() as seen:
        model = nn.Sequential(Line(), Line()).to(current_device())
        offload_activations(model, policy={Line}, **seen.options)
        assert [list(registry(line)) for line in model] == [["offload_activations"]] * 2
        assert not registry(model)
        for line in model:
            remove(line, offload_activations)
            assert not registry(line)
            assert not line._forward_hooks
            assert not line._forward_pre_hooks
        model(inputs_of()).sum().backward()
        assert not seen.left
