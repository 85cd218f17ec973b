"""Private parts of torch do what the library needs of them, with the installed torch and where a name is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from composable.memory import torch_private
from composable.memory.torch_private import (
    as_real,
    dtensor_like,
    gradient_hooks,
    hooks_after_accumulation,
    in_backward,
    innermost,
    is_transformed,
    launchers,
    local_of,
    made_since,
    next_node,
    on_backward_end,
    outside_transforms,
    parameter_around,
    set_versions,
    step_hooks,
    store_of,
    take_hooks,
    timeout_of,
    view_without_memory,
)
from tests.helpers.world import spmd


class _End:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.called = False

    def __call__(self) -> None:
        self.called = True
        self.seen.append("end")

    def __del__(self) -> None:
        if not self.called:
            self.seen.append("dropped")


def _backward(seen: list[str], error: Exception | None) -> None:
    def hook(gradient: Tensor) -> None:
        assert in_backward()
        on_backward_end(_End(seen))
        if error is not None:
            raise error

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()


def test_the_callback_runs_when_backward_ends() -> None:
    seen: list[str] = []
    _backward(seen, None)
    assert seen == ["end"]
    assert not in_backward()


def test_the_callback_is_dropped_before_the_caller_sees_that_backward_raised() -> None:
    seen: list[str] = []
    with pytest.raises(ValueError, match="as planned"):
        _backward(seen, ValueError("as planned"))
    assert seen == ["dropped"]


def test_nodes_of_a_forward_are_told_from_those_of_its_inputs() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    number = next_node()
    y = x + 1
    assert made_since(number, y.grad_fn)
    assert not made_since(number, x.grad_fn)


def test_transforms_are_noticed_and_left() -> None:
    buffer = torch.zeros(2)

    @outside_transforms
    def write() -> bool:
        buffer.fill_(1)
        return is_transformed()

    def function(x: Tensor) -> Tensor:
        assert is_transformed()
        assert not write()
        assert type(innermost(x)) is Tensor
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    assert not is_transformed()
    assert buffer.tolist() == [1, 1]


def test_versions_are_set_for_all_aliases() -> None:
    x = torch.zeros(3)
    alias = x[1:]
    set_versions((x,), (17,))
    assert alias._version == 17


def test_hooks_are_shared_and_removed_through_their_handle() -> None:
    one, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    handle = one.register_hook(lambda gradient: 2 * gradient)
    later = one.register_post_accumulate_grad_hook(lambda tensor: None)
    take_hooks(one, other)
    assert len(gradient_hooks(other) or ()) == len(hooks_after_accumulation(other) or ()) == 1
    handle.remove()
    later.remove()
    assert not gradient_hooks(other)
    assert not hooks_after_accumulation(other)


def test_a_view_of_an_empty_storage_has_no_memory() -> None:
    start = torch.empty(0)
    view = view_without_memory(start, (2, 3), (3, 1))
    assert view is not None
    assert view.shape == (2, 3)
    assert start.untyped_storage().nbytes() == 0


def test_step_hooks_are_those_of_the_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    before, after = step_hooks(optimizer)
    assert (len(before), len(after)) == (1, 0)


@spmd(ranks=2)
def test_dtensors_and_parameters_keep_the_mesh_of_the_tensor_that_they_are_made_like() -> None:
    mesh = init_device_mesh("cpu", (2,))
    like = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
    with torch.device("meta"), torch.inference_mode():
        made = dtensor_like(torch.ones(2, 3), like)
    local = torch.arange(8.0)[2:].view(2, 3)
    made = dtensor_like(local, like)
    assert local_of(made) is local
    assert (made.shape, made.placements, made.storage_offset()) == (like.shape, like.placements, 0)
    assert made.device_mesh is mesh
    assert parameter_around(made, requires_grad=True).device_mesh is mesh
    whole = dtensor_like(torch.ones(4, 3), DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()]), torch.device("meta"))
    assert whole.device.type == "meta"


@spmd(ranks=2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_group_launches_one_collective_and_several_at_once(asynchronous: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    ours = launchers(group, asynchronous=asynchronous)
    gather, scatter, reduce = ours.all_gather, ours.reduce_scatter, ours.all_reduce

    def launch(method: str, *args: Any) -> None:
        work = getattr(group, method)(*args)
        if work is not None:
            work.wait()

    wholes, shards = [torch.zeros(4), torch.zeros(2)], [torch.full((2,), float(rank)), torch.full((1,), 10.0 + rank)]
    launch(gather.single, wholes[0], shards[0], gather.options)
    assert wholes[0].tolist() == [0, 0, 1, 1]
    launch(gather.coalesced, wholes, shards, gather.coalesced_options)
    assert wholes[1].tolist() == [10, 11]
    launch(scatter.single, shards[0], wholes[0], scatter.options)
    assert shards[0].tolist() == [2.0 * rank] * 2
    launch(scatter.coalesced, shards, wholes, scatter.coalesced_options)
    assert shards[1].tolist() == [20.0 + 2 * rank]
    pair = torch.view_as_complex(torch.tensor([[1.0, rank]]))
    launch(reduce.single, [as_real(pair)], reduce.options)
    assert pair.tolist() == [2 + 1j]
    numbers = [torch.ones(2), torch.full((1,), float(rank))]
    launch(reduce.coalesced, numbers, reduce.coalesced_options)
    assert [each.tolist() for each in numbers] == [[2, 2], [1]]


@spmd(ranks=2)
def test_ranks_find_their_store_and_timeout() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert timeout_of(group, torch.device("cpu")) is not None
    store_of(group).set(f"rank {dist.get_rank()}", "here")
    assert store_of(group).get(f"rank {1 - dist.get_rank()}") == b"here"
    assert store_of(object()) is None  # type: ignore[arg-type]
    assert torch_private.profiled() is False
