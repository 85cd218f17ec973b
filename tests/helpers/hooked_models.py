"""A model whose shards are awkward for communication hooks, and hooks that make means, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable import fully_shard, replicate
from tests.helpers.communicators import all_accelerators, all_ordered
from tests.helpers.compare import full_gradients
from tests.helpers.world import current_device

BOTH: Final = ("reduce_scatter", "all_reduce")
STAGES: Final[list[tuple[str, ...]]] = [("all_reduce",), ("reduce_scatter",), BOTH]
WIRES: Final[dict[str, Callable[[Any], Any]]] = {
    "messages": lambda comm: comm,
    "ordered": all_ordered,
    "accelerator": all_accelerators,
}


class Head(nn.Module):
    """Some ranks leave out its `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.spare = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        return self.last(x) + self.spare(x) if spare else self.last(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Rows that do not divide evenly, and a unit of one row, of which some ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 7)
        self.head = Head()
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh() * self.scale
        return self.head(x, spare)  # type: ignore[no-any-return]


def model_of() -> Model:
    torch.manual_seed(0)
    return Model().to(current_device())


def odd_model() -> Model:
    """One weight has another order of dimensions, and one parameter is frozen."""
    model = model_of()
    model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())
    model.head.last.bias.requires_grad_(False)
    return model


def wanted(module: nn.Module) -> bool:
    """The units inside."""
    return isinstance(module, Head) or (isinstance(module, nn.Linear) and module.out_features == 7)


def mesh_of(replicas: int = 2) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))


_CAP: Final = 150 / (1 << 20)  # bytes: several buckets in a unit
KINDS: Final[dict[str, Callable[..., Any]]] = {
    "replicated": lambda **options: replicate(odd_model(), bucket_cap_mb=_CAP, **options),
    "replicated units": lambda **options: replicate(
        odd_model(), policy=wanted, bucket_cap_mb=_CAP, **options
    ),
    "sharded": lambda **options: fully_shard(odd_model(), policy=wanted, **options),
    "hybrid": lambda **options: fully_shard(
        odd_model(), policy=wanted, **({"mesh": mesh_of()} | options)
    ),
}


def loss_of(model: nn.Module, step: int, **options: Any) -> Tensor:
    """Of another batch on each rank."""
    torch.manual_seed(10 * step + dist.get_rank())
    outputs: Tensor = model(torch.randn(5, 6).to(current_device()), **options)
    return outputs.float().square().mean()


def assert_same(models: list[Any], where: object, tolerance: float = 0.0) -> None:
    """Both have the same gradients, and the same ones have none."""
    expected, actual = (full_gradients(model) for model in models)
    for name, gradient in expected.items():
        other = actual[name]
        assert (gradient is None) == (other is None), f"{where}: {name}"
        if gradient is not None and other is not None:
            same = (
                torch.allclose(gradient, other, rtol=0, atol=tolerance)
                if tolerance
                else torch.equal(gradient, other)
            )
            assert same, f"{where}: {name} {gradient} {other}"


class Calls:
    """What a hook of one stage is handed, backward by backward; it makes means as the library
    does.
    """

    def __init__(self, stage: str | None, ranks: list[int]) -> None:
        self.stage, self.ranks = stage, ranks
        self.backwards: list[list[tuple[int, tuple[str, ...]]]] = [[]]

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        assert (
            dist.get_process_group_ranks(group)
            == dist.get_process_group_ranks(bucket.group)
            == self.ranks
        )
        assert bucket.scale == 1 / group.size()
        parameters, gradients = bucket.parameters(), bucket.gradients()
        expected = [
            (each.to_local() if self.stage == "all_reduce" else each).shape for each in parameters
        ]
        assert [each.shape for each in gradients] == expected
        assert bucket.buffer().shape == (sum(each.numel() for each in gradients),)
        if not isinstance(parameters[0], DTensor):
            assert torch.equal(torch.cat([each.flatten() for each in gradients]), bucket.buffer())
        self.backwards[-1].append((bucket.index(), bucket.fqns))
        if bucket.is_last():
            self.backwards.append([])
        return allreduce_hook(group, bucket)


class Fails:
    """A hook that fails at its second call, on all ranks."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._calls = 0

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        self._calls += 1
        if self._calls != 2:
            return allreduce_hook(group, bucket)
        if self._how == "raises":
            raise MemoryError("as planned")
        if self._how == "raises afterwards":
            return allreduce_hook(group, bucket).then(fail)
        return None if self._how == "returns nothing" else bucket.buffer()[1:]


def fail(_: object) -> Any:
    raise MemoryError("as planned")
