"""An optimizer that steps whole matrices on their owners does, bit for bit, what it does in one
process that is given the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from composable import (
    clip_grad_norm_,
    fully_shard,
    local_steps,
    no_sync,
    replicate,
    step_on_matrices,
)
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from composable.comm.launch import Launch
from tests.helpers.communicators import Around
from tests.helpers.world import current_device, spmd
from tests.optim.matrix_models import (
    OPTIMIZERS,
    Net,
    OneProcess,
    Shampoo,
    Stacked,
    backward,
    made,
    muon,
)
from tests.tensor_parallel.models import GPT, MLP, WIDTH, mesh_of, parallelize_mlp


@spmd(ranks=[1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_one_process(name: str) -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](model.parameters())
    assert step_on_matrices(optimizer) is optimizer
    alone.step_beside(optimizer, range(4), dist.get_rank(), 7)


@spmd(ranks=2)
def test_a_difference_of_one_bit_is_noticed() -> None:
    """Of the comparison that the tests here use."""
    model = made(Net)
    fully_shard(model)
    alone = OneProcess(model, Shampoo)
    alone.check()
    with torch.no_grad():
        alone.copies[3][0].view(torch.int64)[0, 0] ^= 1
    with pytest.raises(AssertionError, match="parameter 3"):
        alone.check()


@spmd(ranks=[1, 2, 4])
@pytest.mark.parametrize("name", ["Shampoo", "whitening"])
def test_a_stack_of_experts_is_stepped_slice_by_slice(name: str) -> None:
    for experts in (3, 4):
        model = made(Stacked, experts)
        fully_shard(model)
        alone = OneProcess(model, OPTIMIZERS[name])
        optimizer = step_on_matrices(OPTIMIZERS[name](model.parameters()))
        alone.step_beside(optimizer, range(3), dist.get_rank(), 5)


@spmd(ranks=[2, 3])
def test_columns_come_together_as_rows_do() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear}, shard_placement_fn=lambda _: Shard(1))
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)


@spmd(ranks=4)
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_replicas_of_shards_share_the_work(name: str) -> None:
    mesh = init_device_mesh(current_device().type, (2, 2))
    model = made(Net)
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    alone = OneProcess(model, OPTIMIZERS[name])
    optimizer = step_on_matrices(OPTIMIZERS[name](model.parameters()))
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)
    assert _owned(optimizer) < len(alone.parameters) / 2


@spmd(ranks=[2, 3])
def test_replicated_matrices_are_stepped_by_one_rank_each() -> None:
    model = made(Net)
    replicate(model)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)
    assert 0 < _owned(optimizer) < len(alone.parameters)


@spmd(ranks=[2, 3])
def test_replicated_matrices_next_to_shards() -> None:
    model = made(Net)
    for layer in list(model.layers)[::2]:  # type: ignore[arg-type]
        replicate(layer)
    fully_shard(model)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)


@spmd(ranks=4)
def test_tensor_parallel_matrices_come_together_at_their_owners() -> None:
    torch.manual_seed(0)
    mesh = mesh_of(2, 2)
    model = MLP(hidden=7).double().to(current_device())
    parallelize_mlp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    alone = OneProcess(model, Shampoo)
    matrices = [each for each in model.parameters() if each.ndim == 2]
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step, mesh["dp"].get_local_rank(), WIDTH)
        alone.take_gradients()
        optimizer.step()
        alone.optimizer.step()
        alone.check(f"step {step}")
    owned = torch.tensor(float(_owned(optimizer)))
    dist.all_reduce(owned)
    assert owned.item() == len(matrices)


@spmd(ranks=4)
def test_experts_on_a_mesh_of_their_own_stay_on_its_ranks() -> None:
    """Each half of the ranks has other experts."""
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("experts", "copies"))
    model = made(Stacked, 4)
    torch.manual_seed(mesh.get_local_rank("experts"))
    expert = nn.Linear(5, 5, bias=False).double().to(current_device())
    model.expert = expert
    fully_shard(expert, mesh=mesh["copies"])
    fully_shard(model)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        batch = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        x = batch.to(current_device())
        (model(x).square().mean() + expert(x).square().mean()).backward()
        alone.take_gradients()
        optimizer.step()
        alone.optimizer.step()
        alone.check(f"step {step}")


def _owned(optimizer: torch.optim.Optimizer) -> int:
    return sum(bool(state) for state in optimizer.state.values())


# --- other parameters ----------------------------------------------------------------------------


@spmd(ranks=[2, 3])
def test_vectors_are_stepped_on_their_shards() -> None:
    model = made(Net, biases=True)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)
    assert (8,) not in optimizer.seen
    assert optimizer.param_groups[0]["count"] == optimizer.calls == 3


@spmd(ranks=[2, 3])
@pytest.mark.parametrize("by", ["a function", "names", "parameters"])
def test_what_is_selected_is_stepped_whole(by: str) -> None:
    model = made(Net, biases=True)
    fully_shard(model, policy={nn.Linear})
    named = {name: p for name, p in model.named_parameters() if p.shape[0] > 3}
    which: Any = {
        "a function": lambda parameter: parameter.shape[0] > 3,
        "names": list(named),
        "parameters": named.values(),
    }[by]
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo([p for p in model.parameters() if p.shape[0] > 3]), which)
    alone.optimizer = Shampoo([copies[0] for copies in alone.copies if copies[0].shape[0] > 3])
    alone.step_beside(optimizer, range(3), dist.get_rank(), 7)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, optimizer.seen)
    assert (8,) in [shape for each in seen for shape in each]


# --- traffic and work ----------------------------------------------------------------------------


@dataclass
class _Traffic:
    """What this rank sent to others, by label."""

    elements: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)


class _Counting(Around):
    def __init__(self, inner: Comm, traffic: _Traffic) -> None:
        super().__init__(inner)
        self._traffic = traffic

    def all_to_all(
        self, out: Tensor, out_sizes: Any, source: Tensor, sizes: Any, launch: Launch
    ) -> Any:
        sent = sum(sizes) - sizes[self._inner.rank]
        traffic = self._traffic
        text = launch.text
        traffic.elements[text] = traffic.elements.get(text, 0) + sent
        traffic.messages[text] = traffic.messages.get(text, 0) + 1
        return self._inner.all_to_all(out, out_sizes, source, sizes, launch)


@contextmanager
def _counted() -> Iterator[_Traffic]:
    traffic = _Traffic()
    wrap: Callable[[Comm], Comm] = lambda comm: _Counting(comm, traffic)  # noqa: E731
    with comms_wrapped_by(wrap):
        yield traffic


@spmd(ranks=[2, 4])
def test_gradients_go_to_the_owner_and_rows_come_back_and_no_more() -> None:
    """Of matrices that all ranks have as much of, each rank sends the N-th part of gradients and of
    new rows, less its own part of those.
    """
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(8)]).double()
    model.to(current_device())
    fully_shard(model, policy={nn.Linear})
    with _counted() as traffic:
        optimizer = step_on_matrices(Shampoo(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step, dist.get_rank(), 8)
            traffic.elements.clear()
            traffic.messages.clear()
            optimizer.seen.clear()
            optimizer.step()
            whole = 8 * 8 * 8
            part = whole // ranks * (ranks - 1) // ranks
            # the first step brings parameters to the owners, too
            gradients = part * (2 if step == 0 else 1)
            assert traffic.elements == {
                "gradients of matrices": gradients,
                "rows of matrices": part,
            }
            assert traffic.messages["gradients of matrices"] == 8 // ranks
            assert len(optimizer.seen) == 8 // ranks


@spmd(ranks=2)
def test_whole_slices_are_stepped_where_they_are() -> None:
    torch.manual_seed(0)
    model = made(Stacked, 4)
    fully_shard(model)
    with _counted() as traffic:
        optimizer = step_on_matrices(Shampoo([model.experts]))
        backward(model, 0, dist.get_rank(), 5)
        optimizer.step()
    assert not traffic.elements
    assert optimizer.seen == [(6, 4)] * 2


@spmd(ranks=[2, 4])
def test_work_is_about_the_same_on_all_ranks() -> None:
    torch.manual_seed(0)
    sizes = [(16, 16)] * 6 + [(16, 4)] * 9 + [(12, 16)] * 5
    model = nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes]).to(current_device())
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    work = torch.tensor(float(sum(a * b * min(a, b) for a, b in optimizer.seen)))
    every = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, work)
    assert max(every) < 1.15 * sum(every) / len(every)


# --- as any optimizer ----------------------------------------------------------------------------


@spmd(ranks=2)
def test_accumulation_clipping_schedules_and_frozen_parameters() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    model.layers[2].weight.requires_grad_(False)
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    schedules = [
        torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5)
        for each in (optimizer, alone.optimizer)
    ]
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            model.layers[2].weight.requires_grad_(True)
            model.layers[4].weight.requires_grad_(False)
        with no_sync(model):
            backward(model, 2 * step, dist.get_rank(), 7)
        backward(model, 2 * step + 1, dist.get_rank(), 7)
        clip_grad_norm_(model, 0.01)
        alone.take_gradients()
        for each in (optimizer, alone.optimizer, *schedules):
            each.step()
        alone.check(f"step {step}")


@spmd(ranks=2)
def test_a_scaler_unscales_and_skips() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 7, dtype=torch.float64, device=current_device()) * (step + 1)
        loss = model(x).square().mean() * (torch.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        alone.take_gradients()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            alone.optimizer.step()
        alone.check(f"step {step}")
    assert optimizer.calls == 2


@spmd(ranks=2)
@pytest.mark.parametrize("loss", [7.0, None])
def test_a_closure_is_called_once(loss: float | None) -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    calls = []

    def closure() -> float | None:
        optimizer.zero_grad()
        backward(model, len(calls), dist.get_rank(), 7)
        alone.take_gradients()
        calls.append(1)
        return loss

    for step in range(2):
        assert optimizer.step(closure) == loss
        alone.optimizer.step()
        alone.check(f"step {step}")
    assert len(calls) == 2


@spmd(ranks=2)
def test_hooks_of_users_are_called_once_and_see_the_optimizer_that_they_have() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    seen: list[object] = []

    def halve(one: Any, args: Any, kwargs: Any) -> None:
        seen.append(one)
        for parameter in one.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        alone.take_gradients()

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(
        lambda one, *_: seen.append(len(one.param_groups[0]["params"]))
    )
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, dist.get_rank(), 7)
        optimizer.step()
        alone.optimizer.step()
        alone.check(f"step {step}")
    assert seen == [optimizer, 10] * 2


@spmd(ranks=[2, 3])
def test_a_group_that_is_added_later_is_stepped_too() -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, Shampoo)
    parameters, copies = list(model.parameters()), [each[0] for each in alone.copies]
    optimizer, alone.optimizer = step_on_matrices(Shampoo(parameters[3:])), Shampoo(copies[3:])
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    optimizer.add_param_group({"params": parameters[:3], "lr": 0.02})
    alone.optimizer.add_param_group({"params": copies[:3], "lr": 0.02})
    alone.step_beside(optimizer, range(2, 4), dist.get_rank(), 7)


@spmd(ranks=[2, 3])
@pytest.mark.parametrize(
    "way", ["an operator", "a local tensor", "one rank's local tensor", "a load"]
)
def test_what_is_written_between_steps_is_stepped_from(way: str) -> None:
    model = made(Net)
    fully_shard(model, policy={nn.Linear})
    alone = OneProcess(model, muon)
    optimizer = step_on_matrices(muon(model.parameters()))
    alone.step_beside(optimizer, range(2), dist.get_rank(), 7)
    weight = model.layers[4].weight
    with torch.no_grad():
        if way == "an operator":
            weight.mul_(2)
        elif way == "a local tensor":
            weight.to_local().mul_(2)
        elif way == "one rank's local tensor":
            if dist.get_rank() == 1:
                weight.to_local()[:1] = 3.0
        else:
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        for copies, parameter in zip(alone.copies, alone.parameters, strict=True):
            copies[0].copy_(parameter.full_tensor())
    alone.step_beside(optimizer, range(2, 4), dist.get_rank(), 7)


@spmd(ranks=4)
def test_replicas_that_train_apart_step_all_matrices_of_theirs() -> None:
    """Owners change when `local_steps` begins and ends, and state goes with them."""
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = made(Net)
    fully_shard(model, policy={nn.Linear}, mesh=mesh)
    alone = OneProcess(model, muon)
    optimizer = step_on_matrices(muon(model.parameters()))
    alone.step_beside(optimizer, range(1), dist.get_rank(), 7)
    apart = local_steps(model, optimizer, every=3)
    alone.step_beside(optimizer, range(1, 3), dist.get_rank(), 7)
    assert _differ_over(model, mesh["replicate"])
    apart.remove()
    assert not _differ_over(model, mesh["replicate"])
    backward(model, 3, dist.get_rank(), 7)
    optimizer.step()
    assert not _differ_over(model, mesh["replicate"])


def _differ_over(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether replicas have other parameters."""
    flat = torch.cat([p.to_local().reshape(-1).detach() for p in model.parameters()])  # type: ignore[attr-defined]
    every = [torch.empty_like(flat) for _ in range(mesh.size())]
    dist.all_gather(every, flat, group=mesh.get_group())
    return any(not torch.equal(each, flat) for each in every)


@spmd(ranks=2)
def test_gpt_with_embeddings_and_norms_trains() -> None:
    torch.manual_seed(0)
    model = GPT(tied=True).double().to(current_device())
    fully_shard(model, policy={nn.Linear, nn.Embedding})
    alone = OneProcess(model, Shampoo)
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(12, (2, 4), generator=torch.Generator().manual_seed(step))
        model(tokens.to(current_device())).square().mean().backward()
        alone.take_gradients()
        optimizer.step()
        alone.optimizer.step()
        alone.check(f"step {step}")
