"""Tensors that cannot be gathered in a form of their own: one error on every rank, nothing
changed; and the nearest programs that can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable import average_parameters, fully_shard, offload_to_host
from composable.errors import AnnotationError, PhaseError
from tests.extensions.rows import Net, Rows, with_rows
from tests.helpers.world import spmd


class Halved(Tensor):
    """A subclass with one of the two methods."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError


class OnlyReleases(Tensor):
    """A subclass with the third method alone."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        raise AssertionError


class Itself(Rows):
    """A whole that is what was gathered."""

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        return (self.values,), None

    def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


class ReleasesItself(Itself):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Without(Tensor):
    """A subclass without the protocol."""


class Blocks(Rows):
    """Inner tensors that have a size of their own, as an `NF4Tensor`'s."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor:
            assert args[0].values.numel() % 32 == 0, "the blocks of 32 elements do not divide"
        return super().__torch_dispatch__(func, types, args, kwargs)


class ForgetsRows(Rows):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made[:-1] if func is torch.ops.aten.split.Tensor else made


class CopiedPlain(Rows):
    """One that only its own class could copy, and cannot."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return inner["values"]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made.values if func is torch.ops.aten.new_zeros.default else made


class OnRankOne(Rows):
    """One whose method fails on one rank."""

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            raise ValueError("no scales here")
        return super().fsdp_pre_all_gather(*args)


class OtherDtypes(Rows):
    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        (octets, scales), metadata = super().fsdp_pre_all_gather(*args)
        return (octets, scales.to((torch.float32, torch.float64)[torch.distributed.get_rank()])), (
            metadata
        )


class PaddedWhole(Rows):
    def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
        whole, inner = super().fsdp_post_all_gather(*args, out=out)
        return nn.functional.pad(whole, (0, 0, 0, 1)), inner


class ReducesSums(Rows):
    """One with a collective of its own, in which every rank takes part."""

    def _number(self) -> Tensor:
        return self.values.abs().sum()

    def fsdp_pre_all_gather(self, mesh: Any, *args: Any) -> Any:
        torch.distributed.all_reduce(self._number(), group=mesh.get_group())
        return super().fsdp_pre_all_gather(mesh, *args)


class ReducesMaxima(ReducesSums):
    """One that does not take empty shards, as fp8 of torchao."""

    def _number(self) -> Tensor:
        return self.values.abs().max()


def _subclass(kind: type[Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda values: values.as_subclass(kind)


_REFUSED: Final[dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], str]]] = {
    "half of the protocol": (_subclass(Halved), {}, r"and no fsdp_post_all_gather\(\)"),
    "a release alone": (_subclass(OnlyReleases), {}, r"and no fsdp_pre_all_gather\(\)"),
    "a release of itself": (ReleasesItself, {}, "says that it is needed no more"),
    "no protocol": (_subclass(Without), {}, "is of class Without; only a plain"),
    "inner sizes": (Blocks, {}, "over 2 ranks.*the blocks of 32 elements do not divide"),
    "lost rows": (ForgetsRows, {}, r"over 2 ranks.*torch.chunk gives shapes \["),
    "a copy of another class": (CopiedPlain, {}, r"new_zeros\(\) makes a Tensor, which is not"),
    "another dimension": (
        Rows,
        {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
        "cannot be cut along dimension 1",
    ),
    "a number of ranks": (Rows, {"reshard_after_forward": 2}, "cannot be kept over 2 ranks"),
    "one rank fails": (OnRankOne, {}, "rank 1: ValueError: no scales here"),
    "ranks differ": (OtherDtypes, {}, "ranks send tensors of different dtypes"),
    "another shape": (PaddedWhole, {}, r"rank 0: .*returned a tensor of shape \(\d+, \d+\)"),
}


@pytest.mark.unsampled
@spmd(ranks=2)
def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for make, options, match in _REFUSED.values():
        model = Net(hidden=5)
        for linear in model.linears():
            linear.weight = nn.Parameter(make(linear.weight.detach()))
        before = dict(model.named_parameters())
        with pytest.raises(AnnotationError, match=match) as caught:
            fully_shard(model, **options)
        assert "'blocks.0.0.weight'" in str(caught.value)
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())
    fully_shard(with_rows(Net(hidden=5)), reshard_after_forward=False)
    x = torch.ones(2, 6)
    itself = fully_shard(with_rows(Net(hidden=5), Itself))
    torch.testing.assert_close(itself(x), Net(hidden=5)(x))
    sixteen = nn.Linear(8, 8)
    sixteen.weight = nn.Parameter(Blocks(sixteen.weight.detach()))
    fully_shard(sixteen)


@spmd(ranks=2)
def test_a_failure_of_an_empty_shard_before_a_collective_of_its_class_is_reported_to_all() -> None:
    def made(kind: type[Rows]) -> nn.Linear:
        linear = nn.Linear(8, 1)
        linear.weight = nn.Parameter(kind(linear.weight.detach()))
        return linear

    with pytest.raises(AnnotationError, match=r"'weight' cannot be.*rank 1: .*max\(\)"):
        fully_shard(made(ReducesMaxima))
    x = torch.ones(2, 8)
    assert fully_shard(made(ReducesSums))(x).shape == (2, 1)


@spmd(ranks=2)
def test_what_needs_plain_shards_is_refused_by_name() -> None:
    model = fully_shard(with_rows(Net(hidden=5)))
    with pytest.raises(AnnotationError, match=r"offload_to_host: .*in a form of their own"):
        offload_to_host(model)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(with_rows(Net(hidden=5)), mesh=mesh)
    with pytest.raises(AnnotationError, match=r"averages of parameters: .*in a form of their own"):
        average_parameters(model)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    distributed = nn.Linear(4, 4)
    local = Rows(torch.ones(2, 4))
    distributed.weight = nn.Parameter(DTensor(local, _spec_of(mesh), requires_grad=False))
    with pytest.raises(
        AnnotationError, match="around a Rows that is gathered in a form of its own"
    ):
        fully_shard(distributed, mesh=mesh["dp"], sync_module_states="off")


def _spec_of(mesh: Any) -> Any:
    return DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)], run_check=False)._spec


class Grows(Rows):
    extra = 0

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        (octets, scales), metadata = super().fsdp_pre_all_gather(*args)
        return (octets, torch.cat([scales, scales[:1].expand(self.extra)])), metadata


@spmd(ranks=2)
def test_a_message_that_grows_is_refused_where_it_is_sent() -> None:
    model = fully_shard(with_rows(Net(hidden=6), Grows))
    x = torch.ones(2, 6)
    model(x).sum().backward()
    Grows.extra = 1
    try:
        with pytest.raises(
            PhaseError, match=r"'blocks.0.0.weight': fsdp_pre_all_gather\(\) returned"
        ):
            model(x)
    finally:
        Grows.extra = 0
