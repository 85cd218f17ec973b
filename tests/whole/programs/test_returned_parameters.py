"""What a forward returns of its parameters is the caller's: copies of the values that they had in
that forward, wherever the memory that was gathered goes.
"""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import composable
from composable.contract.values import tensors_in
from composable.engine.step.unit import units_below
from composable.errors import OutputError
from tests.extensions.rows import Rows
from tests.helpers.compare import full
from tests.helpers.world import Pool, current_device, need_devices, spmd

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
    units = units_below([model])
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


# --- other units ---------------------------------------------------------------------------------


class Both(nn.Module):
    """One parameter, returned as it is and in part, beside what is computed."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Any:
        return (x * self.scale()).sum(), {"weight": self.weight, "part": self.weight.detach()}

    def scale(self) -> Tensor:
        return self.weight.square().sum()


def _values(returned: dict[str, Tensor]) -> list[Tensor]:
    return [full(tensor).detach() for tensor in returned.values()]


def _keep(model: nn.Module, call: Callable[..., Any] | None = None) -> None:
    """What `call` returns in a training step and without gradients stays as it was."""
    call = call or model
    x = torch.ones(2, device=current_device())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        out, trained = call(x)
        values = _values(trained)
        then = [value.clone() for value in values]
        assert torch.equal(values[0], values[1])
        out.backward()
        with torch.no_grad():
            _, evaluated = call(x)
            again = _values(evaluated)
        assert all(map(torch.equal, again, then))
        before = [full(each).detach().clone() for each in model.parameters()]
        optimizer.step()
        assert not all(
            torch.equal(full(each), old)
            for each, old in zip(model.parameters(), before, strict=True)
        ), "the returned parameter is not out of the graph"
        optimizer.zero_grad()
        call(x)
        assert all(map(torch.equal, _values(trained), then))
        assert all(map(torch.equal, _values(evaluated), then))


def _whole_parameter() -> Both:
    torch.manual_seed(0)
    return Both(torch.rand(8, 4, device=current_device()))


def _with_options(**options: Any) -> None:
    model = _whole_parameter()
    composable.fully_shard(model, **options)
    _keep(model)


def _over_tensor_parallel_parameters() -> None:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.rand(8, 4, device=current_device()), mesh["tp"], [Shard(1)])
    model = Both(weight)
    model.scale = lambda: model.weight.to_local().square().sum()  # type: ignore[method-assign, attr-defined]
    composable.fully_shard(model, mesh=mesh["dp"])
    _keep(model)


def _unsharded_by_hand() -> None:
    model = _whole_parameter()
    composable.fully_shard(model)
    with torch.no_grad():
        composable.unshard(model)
        _, returned = model(torch.ones(2, device=current_device()))
        then = [value.clone() for value in _values(returned)]
        composable.reshard(model)
    assert all(map(torch.equal, _values(returned), then))


def _by_another_method() -> None:
    model = _whole_parameter()
    composable.fully_shard(model)
    model.encode = model.forward  # type: ignore[assignment]
    composable.register_forward_method(model, "encode")
    _keep(model, model.encode)  # type: ignore[arg-type]


def _checkpointed() -> None:
    model = _whole_parameter()
    composable.checkpoint(model)
    composable.fully_shard(model)
    _keep(model)


def _compiled() -> None:
    model = _whole_parameter()
    composable.fully_shard(model)
    model.compile(backend="eager")
    _keep(model)


class Around(nn.Module):
    """Two modules that were annotated by themselves, of which one is replicated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = Both(torch.rand(8, 4, device=current_device()))
        self.two = Both(torch.rand(4, 4, device=current_device()))

    def forward(self, x: Tensor) -> Any:
        out, returned = self.one(x)
        with torch.no_grad():  # which autograd does not see; and once more, for nothing
            _, lent = self.two(x)
            self.one(x)
            used = lent["weight"].sum()
        return out * used + self.two(x)[0], returned


def _roots_side_by_side() -> None:
    model = Around()
    composable.fully_shard(model.one)
    composable.fully_shard(model.two)
    _keep(model)


def _replicated_beside_shards() -> None:
    model = Around()
    composable.replicate(model.two, mp_policy=_TO_DOUBLE)
    composable.fully_shard(model)
    _keep(model)


def _gathered_in_a_form_of_its_own() -> None:
    torch.manual_seed(0)
    model = Both(Rows(torch.rand(8, 4, device=current_device())))
    composable.fully_shard(model)
    x = torch.ones(2, device=current_device())
    out, trained = model(x)
    then = [value.clone() for value in _values(trained)]
    out.backward()
    with torch.no_grad():
        _, evaluated = model(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(_values(model(x)[1])[0], then[0])
    assert all(map(torch.equal, _values(trained), then))
    assert all(map(torch.equal, _values(evaluated), then))


class OnAccess(Mapping[str, Tensor]):
    """Has its values in a function."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        return self._read()

    def __iter__(self) -> Iterator[str]:
        return iter(["weight"])

    def __len__(self) -> int:
        return 1


class Hides(Both):
    """Returns its parameter where no copy can take its place."""

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        return OnAccess(lambda: weight)


def _refused() -> None:
    model = Hides(torch.rand(8, 4, device=current_device()))
    composable.fully_shard(model)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(OutputError, match="no copy can take"):
            model(torch.ones(2, device=current_device()))


class Sparse(Both):
    """Returns sparse tensors, whose values are its parameter's; a unit inside of it lends one."""

    def __init__(self, weight: Tensor, inside: Sparse | None = None) -> None:
        super().__init__(weight)
        self.inside = inside

    def forward(self, x: Tensor) -> Any:
        rows = torch.arange(8, device=x.device)
        matrix = torch.sparse_coo_tensor(rows[None], self.weight, (8, 4), check_invariants=True)
        compressed = torch.sparse_csr_tensor(
            torch.arange(9, device=x.device), rows % 4, self.weight[:, 0], check_invariants=True
        )
        if self.inside is None:
            return matrix, compressed
        lent = [each.to_dense() for each in self.inside(x)]  # when it has computed
        return matrix, compressed, *lent


def _in_sparse_tensors() -> None:
    device = current_device()
    torch.manual_seed(0)
    plain = Sparse(torch.rand(8, 4, device=device), Sparse(torch.rand(8, 4, device=device)))
    model = copy.deepcopy(plain)
    composable.fully_shard(model, policy={Sparse})
    x = torch.ones(2, device=device)
    for mode in ("no_grad", "gradients"):
        with MODES[mode](), warnings.catch_warnings(action="ignore"):  # compressed ones: a beta
            for found, expected in zip(model(x), plain(x), strict=True):
                assert found.layout == expected.layout
                assert torch.equal(found.to_dense(), expected.to_dense())


OTHERS: Final[dict[str, Callable[[], None]]] = {
    "sparse tensors": _in_sparse_tensors,
    **{
        f"reshard_after_forward={after}": partial(_with_options, reshard_after_forward=after)
        for after in (True, False, 2)
    },
    "unshard": _unsharded_by_hand,
    "another method": _by_another_method,
    "checkpoint": _checkpointed,
    "roots side by side": _roots_side_by_side,
    "replicated beside shards": _replicated_beside_shards,
    "a form of its own": _gathered_in_a_form_of_its_own,
    "refused": _refused,
}


def _run_others() -> None:
    for name, other in OTHERS.items():
        try:
            other()
        except BaseException as error:
            error.add_note(name)
            raise


@spmd(ranks=2)
def test_other_units_give_away_copies_of_parameters_too() -> None:
    _run_others()


@pytest.mark.in_full_only
@spmd(ranks=2)
def test_compiled_units_give_away_copies_of_parameters() -> None:
    _compiled()


@pytest.mark.in_full_only
@spmd(ranks=4)
def test_tensor_parallel_parameters_are_given_away_as_copies() -> None:
    _over_tensor_parallel_parameters()
