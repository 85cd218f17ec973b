"""`offload_to_host`: a model leaves the device between two phases, and trains on as before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    fully_shard,
    keep_unsharded,
    offload_to_host,
    remove,
    replicate,
    stream_full,
    unshard,
)
from composable.engine.params.param_group import ReplicatedGroup, ShardedGroup
from composable.errors import PhaseError
from composable.memory.offload import HostHome
from composable.state import offload_to_host as of_verb
from composable.torch_private import can_take_data, local_of
from tests.helpers.world import Pool, current_device, spmd

WIDTH: Final = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.shift.mul_(0.9)
        x = x + self.shift.to(x.dtype)
        return x + self.norm(self.down(self.up(x).relu())) * self.scale


def _model() -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    return model.to(current_device())


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy={Block}, mesh=mesh)


def _both(model: Any) -> None:
    fully_shard(model[0])
    replicate(model)


ANNOTATIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={Block}),
    "mixed precision": lambda model: fully_shard(model, policy={Block}, mp_policy="bf16"),
    "kept until backward": lambda model: fully_shard(
        model, policy={Block}, reshard_after_forward=False
    ),
    "hybrid": _hybrid,
    "fully_shard inside replicate": _both,
    "replicate": replicate,
    "replicate in bf16": lambda model: replicate(model, policy={Block}, mp_policy="bf16"),
}


def _backward(model: Any, number: int) -> Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    with torch.device("cpu"):
        x = torch.randn(4, WIDTH)
    loss: Tensor = model(x.to(current_device())).float().square().mean()
    loss.backward()
    return loss.detach()


def _trained(scheme: str, offloads: Callable[[Any, Any], None]) -> list[Tensor]:
    """Losses, and what this rank has at the end."""
    model = _model()
    ANNOTATIONS[scheme](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, landed = [], []
    model[2].bias.register_post_accumulate_grad_hook(
        lambda parameter: landed.append(_local(parameter.grad).cpu())
    )
    for number in range(4):
        losses.append(_backward(model, number))
        if number == 1:
            offloads(model, optimizer)  # with gradients
        optimizer.step()
        if number == 2:
            offloads(model, optimizer)  # once more, with the gradients of before the step
        optimizer.zero_grad()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*model.parameters(), *model.buffers(), *states]
    assert len(landed) == 4
    return [*losses, *landed, *(_local(tensor).cpu() for tensor in tensors)]


def _local(tensor: Tensor) -> Tensor:
    return (local_of(tensor) if hasattr(tensor, "placements") else tensor).detach()  # type: ignore[arg-type]


def _bytes_on_device() -> int:
    device = current_device()
    if device.type == "sim":
        from tests.accelerator import sim  # noqa: PLC0415, it is there only then

        sim.synchronize(device)
        return int(sim.native.memory(device.index)[0])
    return int(torch.get_device_module(device).memory_allocated())


def _is_offloaded_and_restored(model: Any, optimizer: Any) -> None:
    on_device = current_device().type != "cpu"
    before = {id(p): p for p in model.parameters()}
    ranks_share = current_device().type == "cuda"
    held = _bytes_on_device() if on_device else 0
    values = [_local(p).cpu() for p in model.parameters()]
    with offload_to_host(model, optimizer):
        if on_device:
            largest = sum(_local(p).nbytes for p in model.parameters())
            assert largest > 10_000 or dist.get_world_size() > 2
            assert _bytes_on_device() <= held / 20 or ranks_share
        tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        tensors += [*model.buffers(), *optimizer.state[model[0].scale].values()]
        assert {_local(tensor).device.type for tensor in tensors} == {"cpu"}
        for value, parameter in zip(values, model.parameters(), strict=True):
            assert torch.equal(_local(parameter), value)
    assert before == {id(p): p for p in model.parameters()}
    if on_device:
        assert _bytes_on_device() >= held / 2


@contextmanager
def _copied_on_the_host_too() -> Iterator[None]:
    """On ranks of the host, copy as an accelerator's do, to ordinary memory."""
    with ExitStack() as stack:
        if current_device().type == "cpu":
            stack.enter_context(mock.patch.object(of_verb, "has_streams", return_value=True))
            home = mock.patch.object(
                of_verb, "HostHome", lambda device, pin_memory: HostHome(device, pin_memory=False)
            )
            stack.enter_context(home)
        yield


def _is_as_if_it_had_not_slept(scheme: str) -> None:
    if "replicate" in scheme and not can_take_data(
        torch.empty(0, device=current_device()), torch.empty(0, device="cpu")
    ):
        pytest.skip("torch moves no tensors of this device in place")
    with _copied_on_the_host_too():
        offloaded = _trained(scheme, _is_offloaded_and_restored)
    kept = _trained(scheme, lambda model, optimizer: None)
    for one, other in zip(offloaded, kept, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scheme", list(ANNOTATIONS))
def test_the_steps_after_waking_have_the_bits_of_a_model_that_never_slept(
    pool: Pool, scheme: str
) -> None:
    pool.run(4 if scheme == "hybrid" else 2, _is_as_if_it_had_not_slept, scheme)


_ON_HOST: Final[tuple[tuple[type, str], ...]] = ((HostHome, "take"),)
_ON_DEVICE: Final[tuple[tuple[type, str], ...]] = (
    (ShardedGroup, "_make_shard"),
    (ReplicatedGroup, "_make_at_rest"),
    (of_verb.HostOffload, "_back"),
)


@contextmanager
def _memory_for(number: int, allocations: tuple[tuple[type, str], ...]) -> Iterator[None]:
    """Of these allocations, the ones after the first `number` raise."""
    left = iter(range(number))

    def limited(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise MemoryError
            return allocate(*args, **kwargs)

        return act

    with ExitStack() as stack:
        for owner, name in allocations:
            patch = mock.patch.object(owner, name, limited(getattr(owner, name)))
            stack.enter_context(patch)
        yield


def _repeats_what_fails(model: Any, optimizer: Any) -> None:
    x = torch.ones(2, WIDTH, device=current_device())
    before = {id(p): (p.grad is None) for p in model.parameters()}
    for number in count():
        try:
            with _memory_for(number, _ON_HOST):
                handle = offload_to_host(model, optimizer)
            break
        except MemoryError:
            with torch.no_grad():
                kept = [buffer.clone() for buffer in model.buffers()]
                model(x)
                for buffer, value in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(value)
    assert number > 6
    for number in count():
        try:
            with _memory_for(number, _ON_DEVICE):
                handle.restore()
            break
        except MemoryError:
            with pytest.raises(PhaseError, match=r"Call restore\(\)"):
                model(x)
    assert number > 6
    assert before == {id(p): (p.grad is None) for p in model.parameters()}


def _is_as_if_nothing_had_failed(scheme: str) -> None:
    with _copied_on_the_host_too():
        failed = _trained(scheme, _repeats_what_fails)
    awake = _trained(scheme, lambda model, optimizer: None)
    for one, other in zip(failed, awake, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scheme", ["fully_shard inside replicate", "kept until backward"])
def test_offload_and_restore_may_be_repeated_after_they_ran_out_of_memory(
    pool: Pool, scheme: str
) -> None:
    pool.run(2, _is_as_if_nothing_had_failed, scheme)


@spmd(ranks=2)
def test_an_offloaded_model_is_refused_by_name() -> None:
    model = fully_shard(_model(), policy={Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _backward(model, 0)
    handle = offload_to_host(model, optimizer)
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: _backward(model, 0),
        "unshard": lambda: unshard(model),
        "stream_full": lambda: stream_full(model),
        "offload_to_host": lambda: offload_to_host(model),
        "remove": lambda: remove(model, fully_shard),
        "copy.deepcopy": lambda: copy.deepcopy(model),
        "SGD.step": optimizer.step,
    }
    for name, use in uses.items():
        with pytest.raises(PhaseError, match=f"^{name}: unit '.*' rests on the host since"):
            use()
    assert set(model.state_dict()) == set(_model().state_dict())
    handle.restore()
    handle.restore()
    optimizer.step()
    _backward(model, 1)
    with keep_unsharded(model), torch.no_grad():
        model(torch.ones(2, WIDTH, device=current_device()))
    remove(model, fully_shard)
