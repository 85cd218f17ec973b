"""`apply_optimizer_in_backward`: the same bits as a step after backward, and never more gradients than about one unit's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from composable.model.traversal import get_handles, get_replicated_states
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
    weighted_gradients,
)
from tests.helpers import host
from tests.helpers.world import current_device, spmd

WIDTH: Final = 6
SGD: Final = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAMW: Final = (torch.optim.AdamW, {"lr": 0.05})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        x = self.norm(x)
        return x + self.down(self.up(x).tanh()) if whole else x  # type: ignore[no-any-return]


class Model(nn.Module):
    """Uses its first block twice, and its last one as a whole where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, last: bool = True) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x, whole=last or block is not self.blocks[-1])
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def _sharded(model: Model) -> None:
    fully_shard(model, policy={Block})


def _one_unit(model: Model) -> None:
    fully_shard(model, reshard_after_forward=True)


def _kept(model: Model) -> None:
    fully_shard(model, policy={Block}, reshard_after_forward=False)


def _hybrid(model: Model) -> None:
    size = dist.get_world_size()
    shape = (2, size // 2) if size > 1 else (1, 1)
    mesh = init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, policy={Block})


def _in_bfloat16(model: Model) -> None:
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _checkpointed(model: Model) -> None:
    for block in model.blocks:
        checkpoint(block)
    fully_shard(model, policy={Block})


def _frozen(model: Model) -> None:
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    fully_shard(model, policy={Block})


def _replicated(model: Model) -> None:
    replicate(model, bucket_cap_mb=0.0005)


def _replicated_in_bfloat16(model: Model) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replicate(model, bucket_cap_mb=0.0005, mp_policy=policy)


def _hooked(model: Model) -> None:
    replicate(model, bucket_cap_mb=0.0005)
    register_comm_hook(model, fp16_compress_hook)


def _mixed(model: Model) -> None:
    replicate(model.blocks[1])
    fully_shard(model, policy={Block})


def _tied(model: Model) -> None:
    model.blocks[2].down.weight = model.blocks[0].down.weight
    _sharded(model)


def _tied_and_replicated(model: Model) -> None:
    model.blocks[2].down.weight = model.blocks[0].down.weight
    _replicated(model)


def _neither(model: Model) -> None:
    return


SCHEMES: Final[dict[str, Callable[[Model], None]]] = {
    "units": _sharded,
    "one unit": _one_unit,
    "kept": _kept,
    "hybrid": _hybrid,
    "bfloat16": _in_bfloat16,
    "checkpointed": _checkpointed,
    "frozen": _frozen,
    "replicated": _replicated,
    "replicated in bfloat16": _replicated_in_bfloat16,
    "hooked": _hooked,
    "mixed": _mixed,
    "tied": _tied,
    "tied and replicated": _tied_and_replicated,
}


def _twins(annotate: Callable[[Model], None]) -> tuple[Model, Model]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Model().to(current_device()))
        annotate(made[-1])
    return made[0], made[1]


def _batches(count: int) -> Iterator[Tensor]:
    torch.manual_seed(100 + dist.get_rank() if dist.is_initialized() else 100)
    for _ in range(count):
        yield torch.randn(3, WIDTH).to(current_device())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assert_same_bits(one: nn.Module, other: nn.Module, note: object = "") -> None:
    for (name, expected), actual in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(_local(actual), _local(expected)), f"{name} {note}"


Step = Callable[[nn.Module, Tensor, int], None]


def _plain_step(model: nn.Module, x: Tensor, turn: int) -> None:
    model(x).square().mean().backward()


def _accumulated(model: nn.Module, x: Tensor, turn: int) -> None:
    """The last micro-batch does not use all of the last block."""
    for number in range(2):
        with nullcontext() if number else no_sync(model):
            model(x * (1 + number), last=not number).square().mean().backward()


def _ended_by_hand(model: nn.Module, x: Tensor, turn: int) -> None:
    with no_sync(model):
        for number in range(2):
            model(x * (1 + number)).square().mean().backward()
    reduce_gradients(model)


def _used_on_one_rank(model: nn.Module, x: Tensor, turn: int) -> None:
    model(x, last=dist.get_rank() == turn % 2).square().mean().backward()


def _weighted(model: nn.Module, x: Tensor, turn: int) -> None:
    for number in range(2):
        with weighted_gradients(model, weight=1.0 + dist.get_rank() + number, more=number == 0):
            model(x * (1 + number), last=number == 0).square().mean().backward()


def _train_twins(annotate: Callable[[Model], None], optimizer_class: Any, options: dict[str, Any], run: Step) -> Model:
    after, early = _twins(annotate)
    usual = optimizer_class(after.parameters(), **options)
    in_backward = apply_optimizer_in_backward(optimizer_class, early.parameters(), options)
    for turn, x in enumerate(_batches(2)):
        run(after, x, turn)
        usual.step()
        usual.zero_grad()
        run(early, x, turn)
        assert all(parameter.grad is None for parameter in early.parameters()), turn
        _assert_same_bits(after, early, turn)
        for each in (usual, in_backward):
            each.param_groups[0]["lr"] *= 0.5
    for one, other in zip(after.parameters(), early.parameters(), strict=True):
        for key, value in usual.state.get(one, {}).items():
            assert torch.equal(_local(in_backward.state[other][key]), _local(value)), key
    assert _local(early.scale).item() != pytest.approx(0.7), "it trained"
    return early


@spmd(ranks=[1, 2, 4])
def test_parameters_are_what_a_step_after_backward_makes_of_them() -> None:
    drawn = list(SCHEMES) if dist.get_world_size() == 2 else ["units", "hybrid", "bfloat16", "replicated", "mixed"]
    for scheme in drawn:
        _train_twins(SCHEMES[scheme], *ADAMW, _plain_step)
        _train_twins(SCHEMES[scheme], *SGD, _accumulated)


@spmd(ranks=[2, 4])
def test_nothing_is_stepped_before_its_gradient_is_complete() -> None:
    for annotate in (_sharded, _hybrid, _replicated, _mixed):
        for program in (_ended_by_hand, _used_on_one_rank, _weighted):
            _train_twins(annotate, *ADAMW, program)


def test_parameters_of_nobody_are_stepped_as_they_come() -> None:
    after, early = _twins(_neither)
    usual = torch.optim.AdamW(after.parameters(), lr=0.1)
    apply_optimizer_in_backward(torch.optim.AdamW, early.parameters(), {"lr": 0.1})
    for x in _batches(3):
        for model in (after, early):
            _plain_step(model, x, 0)
        usual.step()
        usual.zero_grad()
        _assert_same_bits(after, early)


# --- memory -----------------------------------------------------------------------------------------------------------

UNITS: Final = 12
WIDE: Final = 256


def _gradient_bytes(model: nn.Module) -> int:
    """Of all memory that gradients live in now."""
    tensors = [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for handle in get_handles(model):
        for group in handle.gradients.groups:
            tensors += [parameter.grad for parameter in group._unsharded if parameter.grad is not None]
            tensors += [shards.buffer for r in group.reductions.values() if (shards := r._shards).nbytes]
    for state in get_replicated_states(model):
        tensors += [bucket.gradients.message for bucket in state.averaging.reducer.buckets.each]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class _Watched(torch.optim.SGD):
    """Notes how many bytes of gradients there are at each step."""

    model: nn.Module
    seen: list[int]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(_gradient_bytes(self.model))
        super().step()


def _peak(annotate: Callable[[nn.Module], Any], *, early: bool) -> int:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(UNITS)]
    model = nn.Sequential(*layers).to(current_device())
    for layer in layers:  # ranks go through them together, or sums would be there when the slowest rank wants them to be
        layer.register_full_backward_hook(lambda *_: dist.barrier())
    annotate(model)
    _Watched.model, _Watched.seen = model, []
    usual = None if early else _Watched(model.parameters(), lr=0.1)
    if early:
        apply_optimizer_in_backward(_Watched, model.parameters(), {"lr": 0.1})
    for _ in range(3):
        _Watched.seen = []
        model(torch.randn(2, WIDE, device=current_device(), requires_grad=True)).sum().backward()
        if usual is not None:
            usual.step()
            usual.zero_grad()
    if early:
        assert not any(bool(_local(parameter).isnan().any()) for parameter in model.parameters())
        assert _gradient_bytes(model) <= WIDE * WIDE * 4
    return max(_Watched.seen) // (WIDE * WIDE * 4)  # in layers


@spmd(ranks=2)
def test_gradients_are_given_back_when_their_unit_has_been_stepped() -> None:
    def sharded(model: nn.Module) -> None:
        fully_shard(model, policy={nn.Linear})

    def replicated(model: nn.Module) -> None:
        replicate(model, bucket_cap_mb=0.25)

    every_layer = UNITS // dist.get_world_size()
    assert _peak(sharded, early=False) == every_layer, "the watch sees them all"
    assert _peak(sharded, early=True) <= 2
    if current_device().type == "cpu" and host.is_used():  # over sockets a sum is there when it is there
        assert _peak(replicated, early=False) >= UNITS, "the watch sees them all"
        assert _peak(replicated, early=True) <= UNITS // 2
