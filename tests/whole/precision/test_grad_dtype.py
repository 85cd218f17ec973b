"""`param.grad_dtype`: `.grad` of another dtype than its parameter, accumulated, reduced and kept in
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from composable import MixedPrecisionPolicy, fully_shard, no_sync, remove, replicate
from composable.api import arguments
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, spmd

BF16: Final = torch.bfloat16
F32: Final = torch.float32


class Net(nn.Module):
    """Weights in bfloat16; gradients of all but one are to be in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 6, dtype=BF16)
        self.down = nn.Linear(6, 2, dtype=BF16)
        for name, parameter in self.named_parameters():
            if name != "down.bias":
                parameter.grad_dtype = F32

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _on_device(kind: type[nn.Module]) -> Any:
    with current_device():  # some devices make new parameters when a module is moved to them
        return kind()


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, dist.get_world_size() // 2))
    fully_shard(model, policy={nn.Linear}, mesh=mesh)


def _mixed(model: Any) -> None:
    fully_shard(model.up)
    replicate(model)


ANNOTATIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={nn.Linear}),
    "replicate": replicate,
    "bucket views": lambda model: replicate(model, gradient_as_bucket_view=True),
    "both verbs": _mixed,
    "hybrid": _hybrid,
}


def _accumulate(model: Any, scales: tuple[int, ...], *, held: bool) -> None:
    """Run one backward per scale; a gradient is the scale times that of the first."""
    x = torch.ones(1, 4, dtype=BF16, device=current_device())
    for number, scale in enumerate(scales, start=1):
        with no_sync(model) if held and number < len(scales) else nullcontext():
            (model(x) * scale).sum().backward()


def _dtypes(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.dtype
        for name, parameter in model.named_parameters()
    }


WANTED: Final = {"up.weight": F32, "up.bias": F32, "down.weight": F32, "down.bias": BF16}


def _sums_like_one_process(scheme: str, *, held: bool) -> None:
    plain, model = _on_device(Net), _on_device(Net)
    ANNOTATIONS[scheme](model)
    scales = (256, 1, -256)  # in bfloat16 256 + 1 is 256
    if held:
        _accumulate(plain, scales, held=False)
        _accumulate(model, scales, held=True)
    else:
        _accumulate(plain, scales[:2], held=False)
        _accumulate(model, scales[:2], held=False)
    assert _dtypes(model) == _dtypes(plain) == WANTED
    for (name, parameter), expected in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.equal(full(parameter.grad), expected.grad), name
        if name != "down.bias":
            assert parameter.grad_dtype == F32


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("scheme", list(ANNOTATIONS))
def test_gradients_add_up_and_are_reduced_in_the_dtype_that_the_parameter_asks_for(
    pool: Pool, scheme: str, held: bool
) -> None:
    ranks = 4 if scheme == "hybrid" else 2
    pool.run(ranks, _sums_like_one_process, scheme, held=held)


@pytest.mark.parametrize("verb", [fully_shard, replicate])
def test_one_process_alone_keeps_gradients_in_the_dtype_that_the_parameter_asks_for(
    verb: Any,
) -> None:
    model, plain = verb(Net()), Net()
    for each in (model, plain):
        _accumulate(each, (256, 1), held=False)
    assert _dtypes(model) == _dtypes(plain)
    assert all(
        torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


class _WeightGradient(torch.autograd.Function):
    """A product of bfloat16 whose weight gradient is computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.float().t() @ x.float()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=BF16))
        self.weight.grad_dtype = F32

    def forward(self, x: Tensor) -> Tensor:
        return _WeightGradient.apply(x, self.weight)


@spmd(ranks=2)
def test_a_weight_gradient_that_is_computed_in_float32_is_never_rounded() -> None:
    x = torch.tensor([[256.0, 256.0], [1.0, 1.0]], dtype=BF16, device=current_device())
    for verb in (fully_shard, replicate):
        model = verb(_on_device(Fused))
        model(x).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((4, 2), 257.0, device=x.device))


@spmd(ranks=2)
def test_the_dtype_stays_where_parameters_are_loaded_copied_moved_and_given_back() -> None:
    for verb in (fully_shard, replicate):
        model = _on_device(Net)
        verb(model)
        clone = copy.deepcopy(model)
        model.load_state_dict(model.state_dict(), assign=True)
        for each in (model, clone):
            _accumulate(each, (1,), held=False)
            assert _dtypes(each) == WANTED
            remove(each, verb)
            assert _dtypes(each) == WANTED
            each.zero_grad()
            _accumulate(each, (1,), held=False)
            assert _dtypes(each) == WANTED


@spmd(ranks=2)
def test_the_dtype_may_be_set_after_the_annotation_between_steps() -> None:
    for verb in (fully_shard, replicate):
        model = nn.Linear(4, 2, dtype=BF16, device=current_device())
        verb(model)
        _accumulate(model, (1,), held=False)
        model.zero_grad()
        model.weight.grad_dtype = F32
        _accumulate(model, (256, 1), held=False)
        assert _dtypes(model) == {"weight": F32, "bias": BF16}
        assert full(model.weight.grad).eq(257.0).all()


@spmd(ranks=2)
def test_a_policy_casts_and_the_parameter_says_the_dtype_of_its_gradient() -> None:
    policy = MixedPrecisionPolicy(F32, reduce_dtype=F32)
    for verb in (fully_shard, replicate):
        model = _on_device(Net)
        verb(model, mp_policy=policy)
        model.up.register_forward_hook(
            lambda module, args, output: setattr(module, "computed_in", output.dtype)
        )
        _accumulate(model, (1,), held=False)
        assert model.up.computed_in == F32
        assert _dtypes(model) == WANTED


# --- torch's policy of 2.15 ---------------------------------------------------------------------


@dataclass(frozen=True)
class Newer(fsdp.MixedPrecisionPolicy):
    """torch's policy as it is from 2.15 on."""

    param_dtype_override_fn: Any = None


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.router.weight.dtype, self.expert.weight.dtype, x.dtype
        return self.expert(x) * self.router(x.float()).softmax(-1).to(x.dtype)


def _exact_router(model: Routed) -> Callable[[nn.Parameter], torch.dtype | None]:
    exact = {id(p) for p in model.router.parameters()}
    return lambda parameter: parameter.dtype if id(parameter) in exact else None


@spmd(ranks=2)
def test_a_function_says_which_parameters_of_a_unit_keep_their_dtype() -> None:
    for verb in (fully_shard, replicate):
        for policy in (Newer, MixedPrecisionPolicy):
            model = Routed().to(current_device())
            chosen: Any = policy(
                param_dtype=BF16, reduce_dtype=F32, param_dtype_override_fn=_exact_router(model)
            )
            verb(model, mp_policy=chosen)
            model(torch.ones(2, 4, device=current_device())).float().sum().backward()
            assert model.seen == (F32, BF16, BF16)
            assert all(p.grad is not None and p.grad.dtype == F32 for p in model.parameters())


def test_torchs_policy_without_a_reduce_dtype_means_what_it_does_in_that_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16)
    monkeypatch.setattr(arguments, "_FOLLOWS_GRAD_DTYPE", False)
    assert arguments.precision_policy("fully_shard", policy).reduce_dtype is None
    monkeypatch.setattr(arguments, "_FOLLOWS_GRAD_DTYPE", True)
    assert arguments.precision_policy("fully_shard", policy).reduce_dtype == "grad_dtype"
    said = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    assert arguments.precision_policy("fully_shard", said).reduce_dtype == BF16


@spmd(ranks=2)
def test_reduce_dtype_may_be_that_of_the_gradient() -> None:
    policy = MixedPrecisionPolicy(BF16, reduce_dtype="grad_dtype")
    for verb in (fully_shard, replicate):
        model = nn.Linear(1, 1, bias=False, device=current_device())
        verb(model, mp_policy=policy)
        # the mean of 256 and 1 is 128.5, which is rounded in bfloat16
        x = torch.full((1, 1), 256.0 if dist.get_rank() else 1.0, device=current_device())
        model(x).sum().backward()
        assert full(model.weight.grad).item() == 128.5
