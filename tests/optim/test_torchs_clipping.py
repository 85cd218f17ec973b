"""`torch.nn.utils.clip_grad_norm_` on annotated models: any mix of gradients, and none that a rank holds alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from textwrap import fill
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grad_norm_  # as scripts have it: before anything is annotated

from composable import apply_optimizer_in_backward, fully_shard, no_sync, reduce_gradients, replicate
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, need_devices

ORDERS: Final = (1, 2.0, 3, math.inf)


def _net(dtypes: tuple[torch.dtype, ...]) -> nn.Sequential:
    """Sizes that no number of ranks divides; the last layer has fewer rows than there are ranks."""
    torch.manual_seed(0)
    sizes = (4, 5, 3, 1)
    layers = [nn.Linear(*sizes[i : i + 2]).to(dtypes[i % len(dtypes)]) for i in range(3)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda each, args: (args[0].to(each.weight.dtype),))
    return nn.Sequential(*layers).to(current_device())


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh(current_device().type, (2, dist.get_world_size() // 2), mesh_dim_names=names)


def _siblings(model: nn.Sequential) -> None:
    fully_shard(model[0])
    replicate(model[1])
    fully_shard(model[2])


def _two_meshes(model: nn.Sequential) -> None:
    fully_shard(model[0])
    fully_shard(model[1], mesh=_mesh("replicate", "shard"))
    fully_shard(model[2])


def _three_kinds(model: nn.Sequential) -> None:
    replicate(model[0])
    fully_shard(model[1], mesh=_mesh("replicate", "shard"))
    fully_shard(model[2])


def _one_kind(model: nn.Sequential) -> None:
    fully_shard(model, policy={nn.Linear})


def _ignored(model: nn.Sequential) -> None:
    fully_shard(model, ignored_params=["1"])


SCHEMES: Final[dict[str, Callable[[nn.Sequential], object]]] = {
    "siblings": _siblings,
    "two meshes": _two_meshes,
    "three kinds": _three_kinds,
    "one kind": _one_kind,
    "ignored parameters": _ignored,
}
DTYPES: Final[dict[str, tuple[torch.dtype, ...]]] = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float32 and float64": (torch.float64, torch.float32),
}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_in_the_plain_model(scheme: str, dtypes: str, foreach: bool | None) -> list[float]:
    plain, norms = _net(DTYPES[dtypes]), []
    model = copy.deepcopy(plain)
    SCHEMES[scheme](model)
    for order in ORDERS:
        for limit in (0.1, 1e6):
            for each in (plain, model):
                each.zero_grad()
                each(torch.ones(2, 4, device=current_device())).square().sum().backward()
            norm, expected = (clip_grad_norm_(each.parameters(), limit, order, foreach=foreach) for each in (model, plain))
            close: dict[str, Any] = {"rtol": 2e-2, "atol": 1e-3} if dtypes == "bfloat16" else {}
            assert norm.dtype == expected.dtype
            torch.testing.assert_close(_whole(norm), expected, **close)
            assert 0.1 < expected < 1e6, "one limit clips, the other does not"
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(_whole(one.grad), other.grad, **close)  # type: ignore[arg-type]
            norms.append(_whole(norm).item())
    return norms


@pytest.mark.parametrize("foreach", [None, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_norm_and_gradients_are_those_of_the_plain_model(
    pool: Pool, ranks: int, scheme: str, dtypes: str, foreach: bool | None, device: str
) -> None:
    need_devices(device, ranks)
    norms = pool.run(ranks, _as_in_the_plain_model, scheme, dtypes, foreach, device=device)
    assert all(each == norms[0] for each in norms), "the same bits on all ranks"


class _WithNumber(nn.Module):
    """What it multiplies by has no dimensions, and is no unit's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.number = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.number


def _beside_a_number(foreach: bool | None) -> None:
    plain = _WithNumber().to(current_device())
    model = copy.deepcopy(plain)
    fully_shard(model, ignored_params=["number"])
    for order in ORDERS:
        for each in (plain, model):
            each.zero_grad()
            each(torch.ones(2, 4, device=current_device())).square().sum().backward()
        norm, expected = (clip_grad_norm_(each.parameters(), 0.1, order, foreach=foreach) for each in (model, plain))
        torch.testing.assert_close(_whole(norm), expected)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(_whole(one.grad), other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("foreach", [None, False], ids=["at once", "one by one"])
def test_a_plain_number_beside_shards_is_clipped_with_them(pool: Pool, foreach: bool | None, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _beside_a_number, foreach, device=device)


def _an_infinity_on_one_rank() -> list[bool]:
    """Of gradients that are cut, one rank has it; all ranks raise, or none."""
    model = _net((torch.float32,))
    _siblings(model)
    model(torch.ones(2, 4, device=current_device())).square().sum().backward()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    found = []
    for order in (2.0, math.inf):
        try:
            clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        except RuntimeError:
            found.append(True)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_see_an_infinity_of_one(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    assert pool.run(ranks, _an_infinity_on_one_rank, device=device) == [[True, True]] * ranks


def _held(scheme: str) -> tuple[str, str]:
    model = _net((torch.float32,))
    if scheme == "replicated":
        replicate(model)
    else:
        _siblings(model)
    x = torch.full((2, 4), 1.0 + dist.get_rank(), device=current_device())
    with no_sync(model if scheme == "replicated" else model[1]):
        model(x).square().sum().backward()
    before = [_whole(parameter.grad).clone() for parameter in model.parameters()]  # type: ignore[arg-type]
    clipped = refusal(lambda: clip_grad_norm_(model.parameters(), 0.1))
    measured = refusal(lambda: torch.nn.utils.clip_grad_norm_([model[1].weight], math.inf))
    for other in (
        lambda: torch.nn.utils.get_total_norm([model[1].weight.grad]),
        lambda: torch.nn.utils.clip_grads_with_norm_(model[1].weight, 0.1, torch.tensor(1.0)),
        lambda: torch.nn.utils.clip_grad_value_(model[1].weight, 0.1),
    ):
        assert refusal(other) == measured
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(_whole(parameter.grad), gradient)  # type: ignore[arg-type]
    reduce_gradients(model if scheme == "replicated" else model[1])
    clip_grad_norm_(model.parameters(), 0.1)
    squares = sum(_whole(parameter.grad).square().sum() for parameter in model.parameters())  # type: ignore[arg-type]
    torch.testing.assert_close(squares**0.5, torch.tensor(0.1, device=current_device()), rtol=1e-3, atol=0)  # type: ignore[operator]
    return clipped, measured


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_rank_holds_alone_is_refused_by_name(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    found = {scheme: pool.run(ranks, _held, scheme, device=device) for scheme in ("replicated", "siblings")}
    assert all(each == by_rank[0] for by_rank in found.values() for each in by_rank)
    assert_text(
        "\n".join(fill(f"{scheme}: {text}", 110) for scheme, by_rank in found.items() for text in by_rank[0]),
        """\
replicated: ClippingError: clipping by torch.nn.utils: the gradient of parameter '0.weight' of unit '(root)'
is this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Each
rank would clip by numbers of its own. Run the last backward before clipping outside of no_sync, or call
reduce_gradients(model), on all ranks
replicated: ClippingError: clipping by torch.nn.utils: the gradient of parameter '1.weight' of unit '(root)'
is this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Each
rank would clip by numbers of its own. Run the last backward before clipping outside of no_sync, or call
reduce_gradients(model), on all ranks
siblings: ClippingError: clipping by torch.nn.utils: the gradient of parameter 'weight' of unit '(root)' is
this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Each rank
would clip by numbers of its own. Run the last backward before clipping outside of no_sync, or call
reduce_gradients(model), on all ranks
siblings: ClippingError: clipping by torch.nn.utils: the gradient of parameter 'weight' of unit '(root)' is
this rank's alone: it was made under no_sync, and no backward since has averaged it over the ranks. Each rank
would clip by numbers of its own. Run the last backward before clipping outside of no_sync, or call
reduce_gradients(model), on all ranks""",
    )


def _stepped_in_backward() -> list[str]:
    found = []
    for annotate in (_siblings, _one_kind, replicate, lambda model: None):
        model = _net((torch.float32,))
        annotate(model)
        optimizer = apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        model(torch.ones(2, 4, device=current_device())).sum().backward()
        found.append(refusal(lambda model=model: clip_grad_norm_(model.parameters(), 0.1)))
        other = nn.Linear(1, 1)
        assert clip_grad_norm_(other.parameters(), 0.1) == 0, "nobody steps it"
        optimizer.remove()
        assert clip_grad_norm_(model.parameters(), 0.1) == 0
        model(torch.ones(2, 4, device=current_device())).sum().backward()
        assert _whole(clip_grad_norm_(model.parameters(), 0.1)) > 0
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_backward_has_stepped_is_refused_by_name(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    why = (
        "(apply_optimizer_in_backward), as soon as its gradient is there and before the others are; there is none left to "
        "clip. Clip, or step in backward"
    )
    names = ["parameter 'weight' of unit '(root)'", "parameter 'weight' of unit '0'", "parameter '0.weight' of unit '(root)'"]
    names.append("a parameter of shape (5, 4)")
    wanted = [f"ClippingError: torch.nn.utils.clip_grad_norm_: {name} is stepped in backward {why}" for name in names]
    assert pool.run(ranks, _stepped_in_backward, device=device) == [wanted] * ranks


def _a_sharded_window() -> None:
    """What is held of shards says itself that it is a summand: torch takes the norm of the mean, and scales all alike."""
    model = _net((torch.float32,))
    _one_kind(model)
    plain = copy.deepcopy(_net((torch.float32,)))
    with no_sync(model):
        model(torch.full((2, 4), 1.0 + dist.get_rank(), device=current_device())).square().sum().backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    reduce_gradients(model)
    for rank in range(dist.get_world_size()):
        (plain(torch.full((2, 4), 1.0 + rank, device=current_device())).square().sum() / dist.get_world_size()).backward()
    torch.testing.assert_close(_whole(norm), clip_grad_norm_(plain.parameters(), 0.1))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_whole(one.grad), other.grad)  # type: ignore[arg-type]


def test_what_is_held_of_shards_is_clipped_as_the_mean(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    pool.run(2, _a_sharded_window, device=device)


def _a_product() -> list[float]:
    model = _net((torch.float32,))
    _one_kind(model)  # from here on, torch's clipping is looked after
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    product = DTensor.from_local(torch.full((2,), 2.0, device=current_device()), mesh, [Partial("product")])
    with suppress(RuntimeError):  # torch has no answer
        torch._foreach_mul_([product], torch.tensor(3.0, device=current_device()))
    whole: list[float] = product.full_tensor().tolist()
    return whole


def test_what_is_no_sum_is_not_scaled_on_every_rank(pool: Pool, device: str) -> None:
    need_devices(device, 2)
    for whole in pool.run(2, _a_product, device=device):
        assert whole in ([4.0, 4.0], [12.0, 12.0]), "of 2 x 2, tripled or as it was, but not by both ranks"


def _no_positive_order() -> list[str]:
    model = _net((torch.float32,))
    _one_kind(model)  # some ranks have no row of the last layer
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    orders = (0, -1, -math.inf, math.nan)
    return [
        refusal(lambda order=order, foreach=foreach: clip_grad_norm_(model.parameters(), 1.0, order, foreach=foreach))
        for order in orders
        for foreach in (None, False)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_orders_that_are_not_positive_are_refused_on_all_ranks(pool: Pool, ranks: int, device: str) -> None:
    need_devices(device, ranks)
    why = "no other norm of a tensor can be put together from those of its shards"
    wanted = [
        f"ClippingError: clipping by torch.nn.utils: norm_type must be a positive number or inf, got {order}: {why}"
        for order in ("0.0", "-1.0", "-inf", "nan")
        for _ in range(2)
    ]
    assert pool.run(ranks, _no_positive_order, device=device) == [wanted] * ranks


def _compiled() -> float:
    model = nn.Linear(4, 4)
    fully_shard(nn.Linear(4, 4))  # from here on torch asks before it clips
    model(torch.ones(1, 4)).sum().backward()
    parameters = list(model.parameters())
    clip = torch.compile(lambda: clip_grad_norm_(parameters, 1.0), fullgraph=True, backend="eager")
    return float(clip())


def test_clipping_of_other_models_is_compiled_in_one_graph(pool: Pool) -> None:
    assert pool.run(1, _compiled) == pytest.approx([math.sqrt(20)])
