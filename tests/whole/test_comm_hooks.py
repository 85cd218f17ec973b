"""Hooks that reduce replicated gradients: torch's own give the bits that they give under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    describe,
    fully_shard,
    no_sync,
    register_comm_hook,
    replicate,
)
from composable.comm import comms_wrapped_by
from tests.helpers.communicators import all_accelerators, all_ordered
from tests.helpers.compare import full_gradients, full_parameters, sgd
from tests.helpers.world import Pool, current_device, need_devices


class Model(nn.Module):
    """Some ranks leave out its `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 24)
        self.last, self.spare = nn.Linear(24, 3), nn.Linear(24, 3)

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return self.last(x) + self.spare(x) if spare else self.last(x)


def _model() -> Model:
    torch.manual_seed(0)
    return Model().to(current_device())


def _batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(5, 12).to(current_device())


def _loss(model: nn.Module, step: int, **options: Any) -> Tensor:
    return model(_batch(step), **options).square().mean()  # type: ignore[no-any-return]


def _power(**options: Any) -> PowerSGDState:
    return PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


def _local() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)


# Under DistributedDataParallel those that quantise fail over gloo, whose futures are not as NCCL's, and PowerSGD of whole
# buckets everywhere, in torch 2.13.
_HOOKS: Final[dict[str, tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "all-reduce": (allreduce_hook, lambda: None),
    "float16": (fp16_compress_hook, lambda: None),
    "bfloat16": (bf16_compress_hook, lambda: None),
    "all-reduce in float16": (fp16_compress_wrapper(allreduce_hook), lambda: None),
    "no-op": (noop_hook, lambda: None),
    "PowerSGD": (powerSGD_hook, _power),
    "PowerSGD, same shapes together": (powerSGD_hook, lambda: _power(batch_tensors_with_same_shape=True)),
    "PowerSGD in bfloat16": (bf16_compress_wrapper(powerSGD_hook), _power),
    "post-local SGD": (post_localSGD_hook, _local),
}


def _train_both(name: str, unused: bool) -> None:
    hook, state = _HOOKS[name]
    plain, annotated = _model(), _model()
    device = current_device()
    rival = DistributedDataParallel(
        plain, device_ids=[device] if device.type == "cuda" else None, find_unused_parameters=unused
    )
    # As a function without a name: DistributedDataParallel takes bfloat16 on accelerators only.
    rival.register_comm_hook(state(), lambda state, bucket: hook(state, bucket))
    register_comm_hook(replicate(annotated), hook, state())
    optimizers = sgd(plain), sgd(annotated)
    for step in range(6):
        spare = not unused or step == 0 or (step == 1 and dist.get_rank() == 0)
        if step == 3:
            with rival.no_sync(), no_sync(annotated):
                for model in (rival, annotated):
                    _loss(model, 10, spare=spare).backward()
        for model in (rival, annotated):
            _loss(model, step, spare=spare).backward()
        # In the first step buckets hold parameters in other orders, and sums of more than two depend on their place.
        if unused or step:
            expected, actual = full_gradients(plain), full_gradients(annotated)
            for parameter, gradient in expected.items():
                mine = actual[parameter]
                assert (gradient is None) == (mine is None), f"step {step}, '{parameter}'"
                if gradient is not None and mine is not None:
                    assert torch.equal(gradient, mine), f"step {step}, '{parameter}': {(gradient - mine).abs().max()}"
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _with_rival(name: str, ranks: int, unused: bool) -> Any:
    fails = "PowerSGD" in name or name == "all-reduce in float16"
    return pytest.param(
        name, ranks, unused, marks=pytest.mark.beyond_sim("DistributedDataParallel fails there") if fails else ()
    )


# Where parameters may be unused DistributedDataParallel keeps an order of its own, in which PowerSGD begins otherwise.
@pytest.mark.parametrize(
    ("name", "ranks", "unused"),
    [
        *(_with_rival(name, 2, "PowerSGD" not in name) for name in _HOOKS),
        *(_with_rival(name, 4, False) for name in ("all-reduce", "float16", "no-op", "PowerSGD")),
    ],
)
def test_torchs_hooks_give_the_bits_that_they_give_under_ddp(
    pool: Pool, name: str, ranks: int, unused: bool, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _train_both, name, unused, device=device)


# --- without a rival ------------------------------------------------------------------------------------------------------

_WIRES: Final[dict[str, Callable[[Any], Any]]] = {
    "messages": lambda comm: comm,
    "ordered": all_ordered,
    "accelerator": all_accelerators,
}
_CAP: Final = 600 / (1 << 20)  # bytes: several buckets in a unit


def _group_of_hooks(way: str) -> dist.ProcessGroup | None:
    """The comms of the simulated accelerator launch in a thread. A hook that launches elsewhere needs another group there."""
    return dist.group.WORLD if way == "accelerator" else None


class _Calls:
    """What a hook is handed, backward by backward; the hook makes means as the library does."""

    def __init__(self) -> None:
        self.backwards: list[list[Any]] = [[]]

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        assert bucket.buffer().shape == (sum(parameter.numel() for parameter in bucket.parameters()),)
        assert [each.shape for each in bucket.gradients()] == [each.shape for each in bucket.parameters()]
        assert torch.equal(torch.cat([each.flatten() for each in bucket.gradients()]), bucket.buffer())
        assert bucket.scale == 1 / bucket.group.size() == 1 / group.size()
        self.backwards[-1].append((bucket.index(), bucket.fqns, bucket.is_last()))
        if bucket.is_last():
            self.backwards.append([])
        return allreduce_hook(group, bucket)


def _annotated(shape: str) -> Model:
    model = _model()
    if shape == "several units":
        return replicate(model, policy={nn.Linear}, bucket_cap_mb=_CAP)  # type: ignore[no-any-return]
    return replicate(model, bucket_cap_mb=_CAP)  # type: ignore[no-any-return]


def _same_as_without(shape: str, way: str) -> None:
    calls = _Calls()
    with comms_wrapped_by(_WIRES[way]):
        models = [_annotated(shape) for _ in range(2)]
    handle = register_comm_hook(models[1], calls, _group_of_hooks(way))
    rank = dist.get_rank()
    for step in range(7):
        if step == 5:
            handle.remove()
        spare = [True, True, rank == 0, False, True, True, False][step]
        for model in models:
            with no_sync(model, enabled=step == 1):
                _loss(model, step, spare=spare).backward()
        if step == 1:
            continue
        expected, actual = (full_gradients(model) for model in models)
        for name, gradient in expected.items():
            other = actual[name]
            assert (gradient is None) == (other is None) == (name.startswith("spare") and step in (3, 6)), f"{step} {name}"
            assert gradient is None or other is None or torch.equal(gradient, other), f"{step} {name}"
            models[0].get_parameter(name).grad = models[1].get_parameter(name).grad = None
    assert calls.backwards.pop() == []
    assert len(calls.backwards) == 4  # one less for no_sync
    names = {}
    for backward in calls.backwards:
        assert [last for _, _, last in backward] == [False] * (len(backward) - 1) + [True]
        assert sorted(name for _, fqns, _ in backward for name in fqns) == sorted(
            name for name, _ in _model().named_parameters()
        )
        for index, fqns, _ in backward:
            assert names.setdefault(index, fqns) == fqns  # what is kept by index lies in this order
    assert len(dict.fromkeys(tuple(sorted(fqns)) for fqns in names.values())) == len(names) >= 3


@pytest.mark.parametrize("way", _WIRES)
@pytest.mark.parametrize("shape", ["one unit", "several units"])
def test_a_hook_that_makes_means_changes_no_bit_and_sees_each_gradient_once(pool: Pool, shape: str, way: str) -> None:
    pool.run(2, _same_as_without, shape, way, device="cpu")


def _scaled() -> None:
    models = [replicate(_model(), grad_reduce="sum") for _ in range(2)]
    register_comm_hook(models[1], allreduce_hook)
    gradients = []
    for model in models:
        for number in range(2):
            _loss(model, number).backward()
        gradients.append(full_gradients(model))
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is None or other is None or torch.allclose(gradient, other, atol=1e-6), name


def test_what_scales_gradients_does_so_before_a_hook_sees_them(pool: Pool) -> None:
    pool.run(2, _scaled)


def _with(what: str, verb: str) -> None:
    options: dict[str, Any] = {}
    if what == "sums in bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    annotate = fully_shard if verb == "fully_shard" else replicate
    models = [annotate(_model(), **options) for _ in range(2)]
    register_comm_hook(models[1], allreduce_hook)
    for model in models:
        if what == "steps in backward":
            apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for step in range(3):
        for model in models:
            _loss(model, step, spare=True).backward()
    values = [full_gradients(model) if what != "steps in backward" else full_parameters(model) for model in models]
    for name, value in values[0].items():
        other = values[1][name]
        assert value is not None
        assert other is not None
        assert torch.equal(value, other), name


@pytest.mark.parametrize("verb", ["replicate", "fully_shard"])
@pytest.mark.parametrize("what", ["sums in bfloat16", "steps in backward"])
def test_a_hook_goes_with_precision_and_with_steps_in_backward(pool: Pool, what: str, verb: str, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _with, what, verb, device=device)


def _over_part() -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("one", "other"))["other"]
    models = [replicate(_model(), mesh=mesh) for _ in range(2)]
    register_comm_hook(models[1], powerSGD_hook, _power())
    for step in range(2):
        for model in models:
            _loss(model, step).backward()
    expected, actual = (full_gradients(model) for model in models)
    for name, gradient in expected.items():
        other = actual[name]
        assert gradient is None or other is None or torch.equal(gradient, other), name


def test_without_a_group_hooks_communicate_among_the_ranks_of_their_mesh(pool: Pool, device: str) -> None:
    need_devices(device, 4)
    pool.run(4, _over_part, device=device)


def _plain(_: object, bucket: Any) -> Tensor:
    """No future: a tensor of its own, in another dtype."""
    total = bucket.buffer().double()
    dist.all_reduce(total, group=bucket.group)
    return total * bucket.scale  # type: ignore[no-any-return]


def _of_tensors() -> list[str]:
    models = [_annotated("one unit") for _ in range(2)]
    handle = register_comm_hook(models[1], _plain)
    for model in models:
        _loss(model, 0).backward()
    expected, actual = (full_gradients(model) for model in models)
    for name, gradient in expected.items():
        other = actual[name]
        assert gradient is None or other is None or torch.allclose(gradient, other, atol=1e-7), name
    rows = [describe(models[1]).rows[0]]
    handle.remove()
    handle.remove()
    rows.append(describe(models[1]).rows[0])
    return [row.comm_hook for row in rows]


def test_a_hook_may_return_a_tensor_and_describe_names_it_until_it_is_removed(pool: Pool) -> None:
    assert pool.run(2, _of_tensors) == [["_plain", ""]] * 2


def test_one_rank_calls_no_hook() -> None:
    model = replicate(nn.Linear(2, 1))
    with register_comm_hook(model, noop_hook):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
