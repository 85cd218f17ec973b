"""What a forward returns of its parameters is the caller's: copies of the values that they had in
that forward, wherever the memory that was gathered goes.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable
from composable.contract.values import tensors_in
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices

Form = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Boxed:
    """A container with a tensor."""

    tensor: Tensor


class Slotted:
    """An object that is no container, with a tensor in a slot."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Computed:
    """An object that makes its tensor when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.read = iter([tensor])


FORMS: Final[dict[str, Form]] = {
    "itself": lambda weight: weight,
    "an element": lambda weight: weight[0, 0],
    "a row": lambda weight: weight[1],
    "transposed": lambda weight: weight.T,
    "detached": lambda weight: weight.detach(),
    "its data": lambda weight: weight.data,
    "its data's view": lambda weight: weight.data[2:].view(-1),
    "expanded": lambda weight: weight[0].expand(50, -1),
    "with strides": lambda weight: weight[:, ::2],
}
PACKED: Final[dict[str, Callable[[Tensor], Any]]] = {
    "bare": lambda tensor: tensor,
    "in a tuple": lambda tensor: (1, tensor),
    "in a dict": lambda tensor: {"weight": [tensor]},
    "in a dataclass": Boxed,
    "in an attribute": lambda tensor: SimpleNamespace(tensor=tensor),
    "in a slot": lambda tensor: [Slotted(tensor)],
    "in attributes of attributes": lambda tensor: SimpleNamespace(one=SimpleNamespace(a=[tensor])),
    "in a UserDict": lambda tensor: UserDict(tensor=tensor),
}
MODES: Final[dict[str, Callable[[], Any]]] = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
_TO_DOUBLE: Final = composable.MixedPrecisionPolicy(
    param_dtype=torch.float64, reduce_dtype=torch.float64
)
# a form with each container, a container with each form
CASES: Final = [
    *[(form, packed) for form in FORMS for packed in ("bare", "in a tuple")],
    *[(form, packed) for form in ("itself", "a row", "detached") for packed in PACKED],
]


class Inner(nn.Module):
    """Returns its weight in some form, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.form: Form = FORMS["itself"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight.T, self.form(self.weight)


class Outer(nn.Module):
    """Returns parameters of its own, a frozen one, and what two units inside return, which it
    computes with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.frozen = nn.Parameter(torch.rand(6, 6), requires_grad=False)
        self.form: Form = FORMS["itself"]
        self.pack = PACKED["bare"]

    def follow(self, form: str, packed: str) -> None:
        """Return parameters in this form, and in this container."""
        self.form = self.first.form = FORMS[form]
        self.pack = PACKED[packed]

    def whole(self) -> list[Tensor]:
        """The parameters of which it returns forms."""
        return [self.weight, self.frozen, self.first.weight]

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x, given = self.first(x)
        x, _ = self.second(torch.tanh(x))
        x, _ = self.first(x)  # once more
        x = torch.tanh(x) @ (self.weight + self.frozen).T + given.sum()
        mine = [self.form(self.weight), self.form(self.frozen)]
        return x, [self.pack(tensor) for tensor in (*mine, given)]


def _model(verb: str, cast: bool) -> tuple[Outer, bool]:
    """A model, and whether its parameters are computed with in memory that comes and goes."""
    torch.manual_seed(0)
    model = Outer().to(current_device())
    options: dict[str, Any] = {"mp_policy": _TO_DOUBLE} if cast else {}
    if verb == "fully_shard":
        composable.fully_shard(model, policy={Inner}, **options)
    else:
        composable.replicate(model, **options)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return model, cast or (verb == "fully_shard" and ranks > 1)


class Kept:
    """Outputs, and the values that they are to have."""

    def __init__(self, model: Outer, *, copies: bool, dtype: torch.dtype) -> None:
        self._model, self._copies, self._dtype = model, copies, dtype
        self._kept: list[tuple[Any, list[Tensor], Form]] = []

    def _now(self, form: Form) -> list[Tensor]:
        return [form(full(each).to(self._dtype)).detach() for each in self._model.whole()]

    def keep(self, output: Any, form: Form) -> list[Tensor]:
        found = list(tensors_in(output))
        self._kept.append((output, [tensor.clone() for tensor in self._now(form)], form))
        if self._copies:
            for tensor, viewed in zip(found, self._now(form), strict=True):
                sizes = zip(viewed.shape, viewed.stride(), strict=True)
                elements = prod([size for size, stride in sizes if stride])
                assert tensor.untyped_storage().nbytes() == elements * viewed.element_size()
        return found

    def check(self, where: str) -> None:
        for output, then, form in self._kept:
            values = then if self._copies else self._now(form)
            for tensor, value in zip(tensors_in(output), values, strict=True):
                assert tensor.dtype == value.dtype
                assert tensor.shape == value.shape
                assert torch.equal(tensor.detach(), value), where


def _is_free(model: nn.Module) -> bool:
    units = composable.engine.step.unit.units_below([model])  # type: ignore[attr-defined]
    return not any(
        buffer.held for unit in units for group in unit.groups if group.gather
        for buffer in group.gather.buffers
    )  # fmt: skip


def _run_steps(
    model: Outer, kept: Kept, mode: str, case: tuple[str, str], *, copies: bool, scope: Any
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    x = torch.ones(2, 6, device=current_device())
    model.follow(*case)
    with scope(model):
        for _ in range(3):
            with MODES[mode]():
                out, given = model(x)
                found = kept.keep(given, model.form)
            assert mode == "gradients" or not copies or not any(t.requires_grad for t in found)
            assert not any(tensor.is_inference() for tensor in found)
            kept.check("after the forward")
            if mode == "gradients":
                used = [tensor.float().square().sum() for tensor in found if tensor.requires_grad]
                (out.float().sum() + sum(used)).backward()
                kept.check("after the backward")
            elif scope is nullcontext:
                assert _is_free(model), "nothing that was returned keeps a unit"
            with torch.no_grad():
                model(x)
            kept.check("after the next forward")
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            kept.check("after the optimizer's step")
            with MODES[mode]():
                model(x)  # which gathers anew, and has no backward
            kept.check("after a forward behind the step")
    kept.check("after all")


SCOPES: Final = {"": nullcontext, "kept": composable.keep_unsharded}


def _check_table(verb: str, cast: bool, scope: str, every: int = 1) -> None:
    for mode in MODES:
        model, copies = _model(verb, cast)
        for case in CASES[::every]:
            kept = Kept(model, copies=copies, dtype=torch.float64 if cast else torch.float32)
            try:
                _run_steps(model, kept, mode, case, copies=copies, scope=SCOPES[scope])
            except Exception as error:
                error.add_note(f"{mode}, {' '.join(case)}")
                raise


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
def test_one_process_keeps_what_a_forward_returns_of_its_parameters(verb: str, cast: bool) -> None:
    _check_table(verb, cast, "")


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize(
    ("verb", "scope"), [("fully_shard", ""), ("fully_shard", "kept"), ("replicate", "")]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_keep_what_a_forward_returns_of_its_parameters(
    pool: Pool, ranks: int, verb: str, cast: bool, scope: str, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _check_table, verb, cast, scope, 3, device=device)
