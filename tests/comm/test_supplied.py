"""Messages in memory that a comm of the user's supplies."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import ref

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import fully_shard, no_sync, replicate
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from composable.comm.supplied import SuppliedComm
from composable.config import CPUOffloadPolicy
from composable.errors import AnnotationError
from tests.comm.in_process import seats
from tests.helpers.communicators import Around, Pairs
from tests.helpers.compare import full_parameters
from tests.helpers.refusals import refused, same_on_all
from tests.helpers.world import Pool, current_device, spmd


class Supply:
    """Memory of its own, all of which it remembers."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made.append(torch.full(size, 99, dtype=dtype, device=device))
        return self.made[-1]

    def has(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == address for each in self.made)


class Lent:
    """Memory that is known to be in use, or given back."""

    def __init__(self) -> None:
        self.blocks: list[ref[Any]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        block = numpy.zeros(math.prod(size) * dtype.itemsize, numpy.uint8)
        self.blocks.append(ref(block))
        return torch.from_numpy(block).view(dtype)

    @property
    def used(self) -> int:
        gc.collect()
        return sum(block() is not None for block in self.blocks)


class OwnMemory(Around):
    """A user's comm: memory of its own, and a look at what it is given to send."""

    def __init__(self, inner: Comm, supply: Supply, seen: list[str]) -> None:
        super().__init__(inner)
        self._supply, self._seen = supply, seen
        self.allocate = supply.allocate

    def _look(self, kind: str, tensors: Sequence[Tensor]) -> None:
        assert all(map(self._supply.has, tensors)), kind
        self._seen.append(kind)

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        self._look("all-gather", [tensor for pair in pairs for tensor in pair])
        return super().all_gather(pairs, launch)

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        self._look("reduce-scatter", [tensor for pair in pairs for tensor in pair])
        return super().reduce_scatter(pairs, launch, scale)

    def all_reduce(self, tensors: Sequence[Tensor], launch: Launch, scale: float = 1.0) -> Work:
        self._look("all-reduce", tensors)
        return super().all_reduce(tensors, launch, scale)


# --- programs ------------------------------------------------------------------------------------


class Block(nn.Module):
    """With sizes that two ranks cannot cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale.mean() * self.down(self.up(x).tanh())


def _train(
    annotate: Callable[[nn.Module], object], *, level: str = "", lost: bool = False
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 3)).to(current_device())
    annotate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(3):
        if lost and step == 1:
            hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4, device=current_device())).sum().backward()
            hook.remove()
            optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(2, 4, device=current_device())
            with no_sync(model, level=level or "all", enabled=bool(level) and micro == 0):
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _sharded(**options: Any) -> Callable[[nn.Module], object]:
    return partial(fully_shard, policy={Block}, **options)


def _hybrid(model: nn.Module) -> None:
    names = ("replicate", "shard")
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=names)
    fully_shard(model, mesh=mesh, policy={Block})


def _beside(model: nn.Sequential) -> None:
    replicate(model[2])
    fully_shard(model, policy={Block}, offload_policy=CPUOffloadPolicy())


_SHARDS: Final = {"all-gather", "reduce-scatter"}
_PROGRAMS: Final[dict[str, tuple[int, Callable[[], dict[str, Tensor]], set[str]]]] = {
    "sharded": (2, partial(_train, _sharded()), _SHARDS),
    "no_sync, and a lost step": (
        2, partial(_train, _sharded(), level="all", lost=True), _SHARDS,
    ),
    "mixed precision": (2, partial(_train, _sharded(mp_policy="bf16")), _SHARDS),
    "replicated": (2, partial(_train, replicate), {"all-reduce"}),
    "replicas beside offloaded shards": (2, partial(_train, _beside), {*_SHARDS, "all-reduce"}),
    "hybrid": (4, partial(_train, _hybrid, level="replicate"), {*_SHARDS, "all-reduce"}),
    "near shards after forward": (
        4, partial(_train, _sharded(reshard_after_forward=2)), _SHARDS,
    ),
}  # fmt: skip


def _program(name: str) -> None:
    _, train, kinds = _PROGRAMS[name]
    expected, supply, seen = train(), Supply(), list[str]()
    with comms_wrapped_by(lambda comm: OwnMemory(comm, supply, seen)):
        found = train()
    assert {*seen} == kinds
    assert len(supply.made) >= len(seen) >= 6
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_gives_the_same_bits_in_memory_of_the_comms_own(pool: Pool, name: str) -> None:
    pool.run(_PROGRAMS[name][0], _program, name)


def test_memory_is_given_back_when_the_work_was_waited_for_also_if_it_failed() -> None:
    supply, works = Lent(), list[Work]()
    comms = [SuppliedComm(seat, supply, supply) for seat in seats(2)]
    for comm in comms:
        works.append(comm.all_gather([(torch.zeros(6), torch.ones(3))], Launch("")))
        works.append(comm.reduce_scatter([(torch.zeros(3), torch.ones(6))], Launch(""), 0.5))
        works.append(comm.all_reduce([torch.ones(4), torch.ones(2)], Launch("")))
    assert supply.used == 2 * 5
    for work in works[1:]:
        work.wait()
    assert supply.used == 1

    def fail() -> None:
        raise ConnectionError

    works[0]._work.wait = fail  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError):
        works[0].wait()
    assert supply.used == 0


@spmd(ranks=2)
def test_memory_of_another_kind_than_was_asked_for_is_refused_in_the_step() -> None:
    class Short(Around):
        def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
            return torch.empty(size[0] - 1, **options)

    with comms_wrapped_by(Short):
        model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(AnnotationError, match=r"Short\.allocate\(\) was asked for \d+ elements"):
        model(torch.ones(1, 4))


# --- symmetric memory ----------------------------------------------------------------------------


def _refused_without_symmetric_memory() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSABLE_SYMMETRIC_MEMORY", "1")
        said = [refused(model, lambda v=verb: v(model)) for verb in (fully_shard, replicate)]
    fully_shard(model, policy={nn.Linear})(torch.ones(1, 4)).sum().backward()
    return said


def test_symmetric_memory_is_refused_where_the_backend_has_none(pool: Pool) -> None:
    said = pool.run(2, _refused_without_symmetric_memory, device="cpu")
    assert same_on_all([text for texts in said for text in texts]).startswith(
        "MeshError: messages were to be in symmetric memory, and the backend of its process group"
        " for cpu is gloo. It takes NCCL 2.27 or later"
    )


def _in_symmetric_memory() -> None:
    expected = _train(_sharded())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSABLE_SYMMETRIC_MEMORY", "1")
        for annotate in (_sharded(), replicate):
            for name, value in _train(annotate).items():
                torch.testing.assert_close(value, expected[name])


def test_symmetric_memory_gives_the_same_numbers(pool: Pool, device: str) -> None:
    if device != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("NCCL between two CUDA devices")
    pool.run(2, _in_symmetric_memory, device=device)
