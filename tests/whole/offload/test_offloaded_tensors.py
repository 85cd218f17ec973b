"""What leaves a device, what stays on it, and what comes back, how often and in which form."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from composable import fully_shard, offload_activations, replicate
from composable.features.activations import AHEAD
from tests.helpers.offloading import Line, inputs_of, line, offloading
from tests.helpers.world import Pool, current_device, need_devices, spmd


@spmd(ranks=1)
def test_storages_leave_once_and_parameters_and_buffers_never() -> None:
    class Views(Line):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8))
            self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
            self.register_buffer("table", torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x * self.table) * self.scale[None]
            return x @ self.frozen.t() @ self.frozen.detach() * self.up.weight[:8].detach()[0]

    with offloading() as seen:
        model = offload_activations(Views().to(current_device()), **seen.options)
        model(inputs_of()).sum().backward()
        # What `up` gets; the ReLU's result, which it and `down` save; and what is scaled.
        assert sorted(seen.left) == [4 * 8, 4 * 8, 4 * 24]


def _left_of_shards(verbs: str) -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), Line()).to(current_device())
    _VERBS_OF_LINES[verbs](model)
    with offloading() as seen:
        offload_activations(model, **seen.options)
        with torch.no_grad():
            model(inputs_of())
        assert not seen.left
        for _ in range(2):  # in the second one some are cast ahead, on devices with streams
            seen.left.clear()
            model(inputs_of()).float().sum().backward()
        return seen.left


_VERBS_OF_LINES: Final[dict[str, Callable[[nn.Module], object]]] = {
    "nothing else": lambda model: None,
    "fully_shard": lambda model: fully_shard(model, policy={Line}),
    "as one": fully_shard,
    "bfloat16": lambda model: fully_shard(model, policy={Line}, mp_policy="bf16"),
    "replicate": replicate,
    "replicate in bfloat16": lambda model: replicate(model, mp_policy="bf16"),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_summon_full_params_and_replicated_parameters_never_leave(
    pool: Pool, ranks: int, device: str
) -> None:
    need_devices(device, ranks)
    expected = [4 * 8, 4 * 24] * 2
    for verbs in _VERBS_OF_LINES:
        assert pool.run(ranks, _left_of_shards, verbs, device=device) == [expected] * ranks, verbs


@spmd(ranks=1)
def test_what_is_small_stays() -> None:
    with offloading() as seen:
        line(**{**seen.options, "min_bytes": 4 * 24 * 4})(inputs_of()).sum().backward()
        assert seen.left == [4 * 24], "4 bytes each: the input has fewer"
        seen.left.clear()
        wide = offload_activations(Square(), **{**seen.options, "min_bytes": 64})
        wide(inputs_of(1, 8).requires_grad_().expand(1000, 8)).sum().backward()
        assert seen.left == [], "8 numbers, however often they are seen"


class Square(nn.Module):
    """Saves its input as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


@spmd(ranks=1)
def test_tensors_come_back_with_their_strides() -> None:
    makers: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.t(),
        "expanded": lambda x: x[:, :1].expand(16, 12),
        "channels last": lambda x: x.view(1, 4, 6, 8).to(memory_format=torch.channels_last),
        "every other": lambda x: x[::2, 1::3],
        "a corner": lambda x: x[-2:, -2:],
        "diagonal": lambda x: x.diagonal(),
        "a window": lambda x: x.unfold(1, 4, 2),
        "a number": lambda x: x[3, 5],
    }
    with offloading() as seen:
        module = offload_activations(Square(), **seen.options)
        for name, make in makers.items():
            x = inputs_of(16, 12)
            saved = make(x).requires_grad_()
            y = module(saved)
            back = y.grad_fn._saved_self
            assert back.stride() == saved.stride(), name
            assert torch.equal(back, saved), name
            assert back.data_ptr() % 64 == saved.data_ptr() % 64, name
            y.sum().backward()
            assert torch.equal(saved.grad, 2 * make(x)), name
            seen.left.clear()
        y = module(inputs_of(1000, 12)[3:5].requires_grad_())
        assert sum(seen.left) <= 2 * 12 + 128, (
            "and not the other rows, which lie in the same memory"
        )


@spmd(ranks=1)
def test_views_of_one_storage_leave_together() -> None:
    class Attention(nn.Module):
        def forward(self, qkv: Tensor) -> Tensor:
            q, k, v = qkv.chunk(3, -1)
            return F.softmax(q * k, -1) * v

    with offloading() as seen:
        plain, qkv = inputs_of(4, 24).requires_grad_(), inputs_of(4, 24).requires_grad_()
        Attention()(plain).sum().backward()
        offload_activations(Attention(), **seen.options)(qkv).sum().backward()
        assert torch.equal(plain.grad, qkv.grad)
        assert sorted(seen.left) == [4 * 8, 4 * 24], "what softmax returns, and all three"


class _IntoAHalf(torch.autograd.Function):
    """Times what a kernel that autograd does not know of puts into a half of some memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: Tensor, value: float) -> Tensor:
        half.data.fill_(value)
        ctx.save_for_backward(half.detach())
        return x * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


@spmd(ranks=1)
def test_halves_of_a_storage_that_are_written_one_after_the_other_leave_as_they_were_written() -> (
    None
):
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            memory = x.detach().new_zeros(512)
            y = _IntoAHalf.apply(_IntoAHalf.apply(x, memory[:256], 2.0), memory[256:], 3.0)
            for _ in range(2 * AHEAD):  # so that neither is near any more
                y = y.sin()
            return y

    with offloading() as seen:
        plain, x = inputs_of(256).requires_grad_(), inputs_of(256).requires_grad_()
        Halves()(plain).sum().backward()
        offload_activations(Halves(), **seen.options)(x).sum().backward()
        assert torch.equal(plain.grad, x.grad)


def _line_under_autocast(model: nn.Module) -> None:
    with torch.autocast(current_device().type, dtype=torch.bfloat16):
        loss = model(inputs_of()).float().sum()
    loss.backward()


@spmd(ranks=1)
def test_casts_of_parameters_by_autocast_stay() -> None:
    if current_device().type not in ("cpu", "cuda"):
        pytest.skip("the simulated accelerator has no autocast")
    with offloading() as seen:
        model = line(**seen.options)
        _line_under_autocast(model)
        assert sorted(seen.left) == [4 * 8, 4 * 24], "the input, cast, and the ReLU's result"


@spmd(ranks=1)
def test_what_left_comes_back_once_and_the_last_ones_not_at_all() -> None:
    class Sines(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3 * AHEAD):
                x = x.sin()
            return x

    with offloading() as seen:
        offload_activations(Sines(), **seen.options)(inputs_of(8).requires_grad_()).sum().backward()
        assert (len(seen.left), seen.brought) == (3 * AHEAD, 2 * AHEAD)


@spmd(ranks=1)
def test_what_several_read_waits_for_all_of_them_on_the_device() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2 * AHEAD):
                q, k, v = torch.cat([x, x, x], -1).sin().chunk(3, -1)
                x = F.softmax(q * k, -1) * v
            return x

    with offloading() as seen:
        offload_activations(Attention(), **seen.options)(
            inputs_of(8, 8).requires_grad_()
        ).sum().backward()
        assert seen.brought < len(seen.left)


@spmd(ranks=1)
def test_what_is_left_on_the_device_after_forward_is_little() -> None:
    with offloading() as seen:
        torch.manual_seed(0)
        model = nn.Sequential(*[Line() for _ in range(6)]).to(current_device())
        offload_activations(model, policy={Line}, **seen.options)
        made: list[Any] = []
        for line in model:
            line.up.register_forward_pre_hook(lambda module, args: made.append(_reference(args[0])))
            line.down.register_forward_pre_hook(
                lambda module, args: made.append(_reference(args[0]))
            )
        loss = model(inputs_of()).sum()
        assert len(seen.left) == 12
        assert sum(reference() is not None for reference in made) <= AHEAD
        loss.backward()
        assert seen.brought >= 12 - AHEAD
        assert not seen.alive


def _reference(tensor: Tensor) -> Any:
    return weakref.ref(tensor.untyped_storage())
