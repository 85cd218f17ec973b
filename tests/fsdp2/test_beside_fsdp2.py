"""Programs written for FSDP2 run over torch's FSDP2 and over composable's, on the same ranks, and
give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from composable import fsdp2
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.world import spmd

pytestmark = pytest.mark.beyond_sim("FSDP2 does not know the device")


class Net(nn.Module):
    """Blocks, a norm and a head; the head is left to the caller if `chunked`."""

    def __init__(self, *, chunked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chunked = chunked
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        x = self.norm(x)
        return x if self.chunked else self.head(x)

    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x) + self.first.bias.sum()


def _sharded(api: Any, *, together: bool = False, chunked: bool = False, **options: Any) -> Any:
    model = Net(chunked=chunked)
    for block in model.blocks:
        api.fully_shard(block, **options)
    if together:
        api.fully_shard([model.norm, model.head], **options)
    return api.fully_shard(model, **options)


def _batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator)


class Run:
    """What a program saw."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, dict[str, Any]()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def note(self, name: str, value: Any) -> None:
        self.seen[f"{len(self.seen)}: {name}"] = value

    def backward(self, number: int) -> None:
        loss = self.model(_batch(number)).square().mean()
        loss.backward()
        self.note("loss", loss.detach())

    def step(self) -> None:
        self.note("gradients", full_gradients(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note("parameters", full_parameters(self.model))


def _accumulation(api: Any) -> Run:
    run = Run(_sharded(api))
    for number in range(6):
        run.model.set_requires_gradient_sync(number % 3 == 2)
        run.backward(number)
        if number % 3 == 2:
            run.step()
    return run


def _read_in_backward(api: Any) -> Run:
    run = Run(_sharded(api))
    for number in range(4):
        run.model.set_requires_gradient_sync(number % 2 == 0)
        loss = run.model(_batch(number)).square().mean()
        run.model.set_requires_gradient_sync(number % 2 == 1)
        loss.backward()
        if number % 2 == 1:
            run.step()
    return run


def _accumulation_module_by_module(api: Any) -> Run:
    run = Run(_sharded(api, together=True))
    for number in range(4):
        for module in run.model.modules():
            if isinstance(module, api.FSDPModule):
                module.set_requires_gradient_sync(number % 2 == 1, recurse=False)
        run.backward(number)
        if number % 2 == 1:
            run.step()
    return run


def _accumulation_of_one_block(api: Any) -> Run:
    run = Run(_sharded(api))
    for number in range(4):
        run.model.blocks[0].set_requires_gradient_sync(number % 2 == 1, recurse=False)
        run.backward(number)
        if number % 2 == 1:
            run.step()
    return run


def _accumulation_on_a_list_member(api: Any) -> Run:
    run = Run(_sharded(api, together=True))
    for number in range(4):
        run.model.head.set_requires_gradient_sync(number % 2 == 1, recurse=False)
        run.backward(number)
        if number % 2 == 1:
            run.step()
    return run


def _not_recursive_at_the_root(api: Any) -> Run:
    run = Run(_sharded(api))
    run.model.set_requires_gradient_sync(False)
    run.backward(0)
    run.model.set_requires_gradient_sync(True, recurse=False)
    run.backward(1)
    run.model.set_requires_gradient_sync(True)
    run.backward(2)
    run.step()
    return run


def _hybrid(api: Any, **options: Any) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return Run(_sharded(api, mesh=mesh, **options))


def _replicas_wait(api: Any) -> Run:
    run = _hybrid(api)
    for number in range(6):
        run.model.set_requires_all_reduce(number % 3 == 2)
        run.backward(number)
        if number % 3 == 2:
            run.step()
    return run


def _gradient_sync_ends_what_all_reduce_began(api: Any) -> Run:
    run = _hybrid(api)
    run.model.set_requires_all_reduce(False)
    run.backward(0)
    run.model.set_requires_gradient_sync(True)
    run.backward(1)
    run.step()
    return run


def _both_setters(api: Any) -> Run:
    run = _hybrid(api)
    run.model.set_requires_gradient_sync(False)
    run.model.set_requires_all_reduce(True)  # does not begin the reduction again
    run.backward(0)
    run.model.set_requires_all_reduce(False)
    run.backward(1)
    run.model.set_requires_gradient_sync(True)
    run.backward(2)
    run.step()
    return run


def _divisors(api: Any) -> Run:
    run = Run(_sharded(api))
    for module in run.model.modules():
        if isinstance(module, api.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sums of FSDP2
    run.model.set_gradient_divide_factor(3.0)
    run.model.blocks[1].set_gradient_divide_factor(1)
    for number in range(2):
        run.backward(number)
        run.step()
    run.model.blocks[1].set_gradient_divide_factor(5.0)
    run.backward(2)
    run.step()
    return run


def _divisors_of_replicas(api: Any) -> Run:
    run = _hybrid(api)
    for module in run.model.modules():
        if isinstance(module, api.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(2.0)
    run.backward(0)
    run.step()
    return run


def _reshard_after_forward(api: Any) -> Run:
    run = Run(_sharded(api))
    for number, after in enumerate((False, True, False)):
        run.model.set_reshard_after_forward(after, recurse=number != 1)
        run.backward(number)
        run.step()
    return run


def _reshard_after_backward(api: Any) -> Run:
    run = Run(_sharded(api))
    for number in range(6):
        last = number % 3 == 2
        run.model.set_is_last_backward(last)
        run.model.set_reshard_after_backward(last)
        run.model.set_requires_gradient_sync(last)
        run.backward(number)
        if last:
            run.step()
    return run


def _chunked_loss(api: Any) -> Run:
    """As torchtitan does: the root leaves the head out, which then runs once per chunk."""
    run = Run(_sharded(api, together=True, chunked=True))
    model, head = run.model, run.model.head
    for number in range(2):
        hidden = model(_batch(number))
        leaf = hidden.detach().requires_grad_()
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
        chunks = leaf.chunk(2)
        for index, chunk in enumerate(chunks):
            if index == len(chunks) - 1:
                head.set_requires_gradient_sync(True, recurse=False)
                head.set_reshard_after_backward(True)
            loss = head(chunk).square().sum()
            loss.backward()
            run.note("loss", loss.detach())
        head.reshard()
        head.set_reshard_after_forward(True)
        hidden.backward(leaf.grad)
        run.step()
    return run


def _unsharded(api: Any) -> Run:
    run = Run(_sharded(api))
    model = run.model
    model.unshard()
    model.unshard()
    run.note("below", type(model.blocks[0].weight) is DTensor or model.blocks[0].weight.shape)
    run.note("own", model.first.weight.detach().clone())
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    handle.wait()
    run.note("handle", isinstance(handle, api.UnshardHandle))
    run.note("of the block", model.blocks[0].weight.detach().clone())
    run.backward(0)
    run.step()
    model.blocks[1].unshard()
    for _ in range(2):
        for module in (model, *model.blocks):
            module.reshard()
    at_rest = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    run.note("at rest", at_rest)
    run.backward(1)
    run.step()
    return run


def _forward_method(api: Any) -> Run:
    run = Run(_sharded(api))
    api.register_fsdp_forward_method(run.model, "generate")
    api.register_fsdp_forward_method(nn.Linear(1, 1), "generate")  # does nothing
    run.note("generated", run.model.generate(_batch(7)).detach())
    model = run.model
    model.score = lambda x: model.forward(x) * model.first.bias.sum()  # set on the module
    api.register_fsdp_forward_method(model, "score")
    api.register_fsdp_forward_method(model, "score")
    run.note("scored", model.score(_batch(6)).detach())
    run.model.generate(_batch(8)).square().mean().backward()
    run.step()
    return run


def _prefetch(api: Any) -> Run:
    run = Run(_sharded(api))
    run.model.set_modules_to_forward_prefetch([*run.model.blocks])
    run.model.blocks[1].set_modules_to_backward_prefetch([run.model.blocks[0]])
    run.model.blocks[0].set_unshard_in_backward(True)
    if hasattr(run.model, "set_reduce_scatter_unused_params"):  # torch's from 2.12 on
        run.model.set_reduce_scatter_unused_params(True)
    run.model._set_unshard_async_op(False)
    api.share_comm_ctx([run.model])
    for number in range(2):
        run.backward(number)
        run.step()
    return run


def _after_an_error(api: Any) -> Run:
    run = Run(_sharded(api))
    run.backward(0)
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError):
        run.model(torch.zeros(4, 5))
    run.model.reset_iter_state()
    run.backward(1)
    run.step()
    return run


def _hooks(api: Any) -> Run:
    """Of modules and of parameters."""
    run = Run(_sharded(api, reshard_after_forward=True))
    model, landed = run.model, dict[str, Tensor]()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model.blocks[1].register_forward_hook(lambda module, args, output: output.sin())
    model.blocks[0].register_full_backward_hook(lambda module, into, out: (into[0] / 3,))
    for name, parameter in model.named_parameters():

        def note(shard: Tensor, name: str = name) -> None:
            landed[name] = shard.grad.to_local().clone()  # type: ignore[union-attr]

        parameter.register_post_accumulate_grad_hook(note)
    for number in range(2):
        run.backward(number)
        run.note("landed", [landed[name] for name in sorted(landed)])
        run.step()
    return run


def _state_dicts(api: Any) -> Run:
    run = Run(_sharded(api, together=True))
    run.backward(0)
    run.step()
    options = StateDictOptions(full_state_dict=True)
    run.note("whole", get_model_state_dict(run.model, options=options))
    shards = get_model_state_dict(run.model)
    run.note("names", list(shards))
    run.note("placements", [str(shard.placements) for shard in shards.values()])
    run.note("shards", [shard.to_local() for shard in shards.values()])
    return run


def _mixed_precision(api: Any) -> Run:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = Run(_sharded(api, mp_policy=policy, offload_policy=api.OffloadPolicy()))
    run.note("dtype", run.model._get_fsdp_state()._mp_policy.param_dtype)
    run.backward(0)
    run.step()
    return run


def _one_set_of_ignored_parameters(api: Any) -> Run:
    """As accelerate does: every call gets all of them, also those that lie in no module of it."""
    model = Net()
    ignored = {*model.norm.parameters(), model.blocks[1].bias}
    for block in model.blocks:
        api.fully_shard(block, ignored_params=ignored)
    run = Run(api.fully_shard(model, ignored_params=ignored))
    run.note("sharded", [isinstance(parameter, DTensor) for parameter in model.parameters()])
    for number in range(2):
        run.backward(number)
        run.step()
    return run


def _replicas_by_name(api: Any) -> Run:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ddp",))
    model = Net()
    distribute_module(model, mesh)
    model.register_forward_pre_hook(
        lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False),)
    )
    model.register_forward_hook(lambda _, args, output: output.to_local().clone())
    dims = api.DataParallelMeshDims(replicate="ddp")
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    run = Run(api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims))
    run.note("are modules", [isinstance(module, api.FSDPModule) for module in model.modules()])
    run.note("placements", [str(p.placements) for p in model.parameters()])  # type: ignore[attr-defined]
    for number in range(4):
        model.set_requires_gradient_sync(number % 2 == 1)
        run.backward(number)
        if number % 2 == 1:
            run.step()
    return run


class _OwnComm:
    """What both protocols of FSDP2 need: memory of its own, and a look at what is sent."""

    def __init__(self) -> None:
        self.memory, self.calls = set[int](), 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        self.memory.add(made.untyped_storage().data_ptr())
        return made

    def look(self, *tensors: Tensor) -> None:
        assert all(tensor.untyped_storage().data_ptr() in self.memory for tensor in tensors)
        self.calls += 1


class _OwnGather(_OwnComm, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.look(output_tensor, input_tensor)
        assert output_tensor.numel() == group.size() * input_tensor.numel()
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _OwnReduction(_OwnComm, ReduceScatter):
    """It is done when the call returns, as one that computes in Python is."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.look(output_tensor, input_tensor)
        _reduce_scatter(output_tensor, input_tensor, group=group, op=op)


# torch's names of before 2.13
_all_gather: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _custom_communication(api: Any, mesh: Any = None) -> Run:
    """Of one block; between two steps, so that the optimizer has state."""
    run = Run(_sharded(api, mesh=mesh))
    run.backward(0)
    run.step()
    gathers, reductions = _OwnGather(), _OwnReduction()
    run.model.blocks[0].set_custom_all_gather(gathers)
    run.model.blocks[0].set_custom_reduce_scatter(reductions)
    for number in (1, 2):
        run.model.set_requires_gradient_sync(False)
        run.backward(number)
        run.model.set_requires_gradient_sync(True)
        run.backward(2 * number)
        run.step()
    run.note("gathers", gathers.calls)
    run.note("reductions", reductions.calls)
    return run


def _custom_communication_with_replicas(api: Any) -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _custom_communication(api, mesh)


_PROGRAMS: Final[dict[str, Callable[[Any], Run]]] = {
    program.__name__.lstrip("_"): program
    for program in (
        _accumulation, _read_in_backward, _accumulation_module_by_module,
        _accumulation_of_one_block, _accumulation_on_a_list_member, _not_recursive_at_the_root,
        _divisors, _reshard_after_forward, _reshard_after_backward, _chunked_loss, _unsharded,
        _forward_method, _one_set_of_ignored_parameters, _replicas_by_name, _prefetch,
        _after_an_error, _hooks, _state_dicts, _mixed_precision, _custom_communication,
    )
}  # fmt: skip
_OVER_REPLICAS: Final[dict[str, Callable[[Any], Run]]] = {
    program.__name__.lstrip("_"): program
    for program in (
        _replicas_wait, _gradient_sync_ends_what_all_reduce_began, _both_setters,
        _divisors_of_replicas, _custom_communication_with_replicas,
    )
}  # fmt: skip


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _assert_same(program: Callable[[Any], Run]) -> None:
    apis: list[ModuleType] = [fsdp, fsdp2]
    theirs, ours = (program(api).seen for api in apis)
    assert list(theirs) == list(ours)
    for name, expected in theirs.items():
        for one, other in zip(_flat(expected), _flat(ours[name]), strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(other, one, msg=lambda text, n=name: f"{n}: {text}")
            else:
                assert other == one, name


@pytest.mark.parametrize("name", _PROGRAMS)
@spmd(ranks=2)
def test_a_program_gives_the_numbers_of_fsdp2(name: str) -> None:
    _assert_same(_PROGRAMS[name])


@pytest.mark.parametrize("name", _OVER_REPLICAS)
@spmd(ranks=4)
def test_a_program_of_hybrid_sharding_gives_the_numbers_of_fsdp2(name: str) -> None:
    _assert_same(_OVER_REPLICAS[name])


@spmd(ranks=2)
def test_gradients_that_were_not_reduced_are_noticed() -> None:
    """The comparison can fail."""

    def program(api: Any) -> Run:
        run = Run(_sharded(api))
        if api is fsdp2:
            run.model.set_gradient_divide_factor(1.0)
        run.backward(0)
        run.step()
        return run

    with pytest.raises(AssertionError, match="gradients"):
        _assert_same(program)


@spmd(ranks=2)
def test_the_state_that_pipelines_read_is_of_the_library_that_annotated() -> None:
    of_both: Any = fsdp2.fully_shard
    theirs: Any = _sharded(fsdp)
    assert of_both.state(theirs) is fsdp.fully_shard.state(theirs)  # type: ignore[attr-defined]
    assert len(of_both.state(_sharded(fsdp2)).all_states) == 3
    plain = nn.Linear(1, 1)
    attributes = {*vars(plain)}
    assert of_both.state(plain) is None
    assert {*vars(plain)} == attributes
