"""State dicts of plain tensors, or distributed in any way, are loaded into sharded models, which go
on like the plain one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composable import fully_shard, remove
from composable.errors import ForeignParameterError
from tests.helpers.compare import full
from tests.helpers.world import current_device, spmd


class Tied(nn.Module):
    """An embedding that is the head's weight, a layer, a buffer, a parameter without dimensions and
    one cut elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.embed(x))) * self.scale
        return result


def _made(seed: int, device: torch.device | str | None = None) -> Tied:
    torch.manual_seed(seed)
    with torch.device(current_device() if device is None else device):
        return Tied()


def _shard(model: Tied) -> Tied:
    return fully_shard(
        model,
        policy={nn.Linear},
        shard_placement_fn=lambda p: Shard(1) if p.shape == (6, 5) else None,
    )


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.arange(6, device=current_device()) + step
        optimizer.zero_grad()
        model(x % 7).square().mean().backward()
        optimizer.step()


def _assert_trains_like(model: nn.Module, plain: nn.Module) -> None:
    _train(model)
    _train(plain)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) is (
            name in dict(model.named_parameters(remove_duplicate=False))
        ), name
        torch.testing.assert_close(full(value), expected[name], msg=name)


def _files() -> dict[str, Callable[[Tied], dict[str, Any]]]:
    """The same contents in several forms."""

    def sharded(plain: Tied) -> dict[str, Any]:
        return _shard(copy.deepcopy(plain)).state_dict()

    def distribute(placement: Any) -> Callable[[Tied], dict[str, Any]]:
        def form(plain: Tied) -> dict[str, Any]:
            mesh = next(
                p.device_mesh
                for p in _shard(copy.deepcopy(plain)).parameters()
                if isinstance(p, DTensor)
            )
            return {
                name: distribute_tensor(value, mesh, [placement]) if value.ndim == 2 else value
                for name, value in plain.state_dict().items()
            }

        return form

    return {
        "plain tensors": lambda plain: plain.state_dict(),
        "parameters": (
            lambda plain: (
                dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
            )
        ),
        "shards": sharded,
        "cut along columns": distribute(Shard(1)),
        "replicated": distribute(Replicate()),
        "one place of the tied weight": lambda plain: {
            name: value for name, value in plain.state_dict().items() if name != "embed.weight"
        },
        "with keys that nobody knows": lambda plain: plain.state_dict() | {"more": torch.ones(3)},
    }


_FILES: Final = tuple(_files())
_LOOSE: Final = ("one place of the tied weight", "with keys that nobody knows")


@pytest.mark.parametrize("form", _FILES)
@pytest.mark.parametrize(
    ("assign", "start"),
    [(False, "fresh"), (False, "after a step"), (True, "after a step"), (True, "meta")],
)
@spmd(ranks=2)
def test_a_loaded_model_goes_on_like_the_plain_one(form: str, assign: bool, start: str) -> None:
    plain = _made(1)
    _train(plain)
    file = {name: value.detach().clone() for name, value in _files()[form](plain).items()}
    made = _made(0, "meta" if start == "meta" else None)
    kept = list(made.parameters())
    model = _shard(made)
    if start == "after a step":
        _train(model)
    found = model.load_state_dict(file, strict=form not in _LOOSE, assign=assign)
    assert found.missing_keys == (
        ["embed.weight"] if form == "one place of the tied weight" else []
    )
    assert found.unexpected_keys == (["more"] if form == "with keys that nobody knows" else [])
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, DTensor)
    assert all(type(buffer) is Tensor for buffer in model.buffers())
    _assert_trains_like(model, plain)
    remove(model, fully_shard)
    assert model.head.weight is model.embed.weight
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert {parameter.is_meta for parameter in kept} == {start == "meta"}, (
        "those that a user has kept do not move"
    )


@pytest.mark.parametrize("assign", [False, True])
@spmd(ranks=2)
def test_parts_of_a_model_and_what_contains_it_load_by_their_own_names(assign: bool) -> None:
    plain, model = _made(1), _shard(_made(0))
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    model.body.load_state_dict(plain.body.state_dict(), assign=assign)
    for name, value in model.state_dict().items():
        expected = plain.state_dict()[name] if name.startswith("body.") else before[name]
        assert torch.equal(full(value), expected), name
    wrapper = nn.ModuleDict({"inner": model})
    wrapper.load_state_dict(
        {f"inner.{name}": value for name, value in plain.state_dict().items()}, assign=assign
    )
    _assert_trains_like(model, plain)
    second = _made(2)
    model.load_state_dict(second.state_dict(), assign=assign)
    _assert_trains_like(model, second)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float64), (4, torch.float32)])
@spmd()
def test_assigned_parameters_are_cast_and_cut_also_where_ranks_own_nothing(
    dtype: torch.dtype,
) -> None:
    plain, model = _made(1), _shard(_made(0))
    model.load_state_dict(plain.state_dict(), assign=True)
    _assert_trains_like(model.to(dtype), plain.to(dtype))


def _anywhere(text: str) -> str:
    """What is said, whatever the device."""
    return text.replace(f" {current_device().type} mesh", " any mesh")


@pytest.mark.parametrize("assign", [False, True])
@spmd(ranks=2, everywhere=True)
def test_what_does_not_fit_is_named(assign: bool) -> None:
    model, plain = _shard(_made(0)), _made(1)

    def fails(entries: dict[str, Any], said: str) -> None:
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(plain.state_dict() | entries, assign=assign)
        assert _anywhere(str(caught.value).partition("\n\t")[2]) == said

    fails(
        {"body.0.weight": torch.ones(5, 7)},
        "size mismatch for body.0.weight: copying a param with shape torch.Size([5, 7]) from"
        " checkpoint, the shape in current model is torch.Size([5, 6]).",
    )
    other = init_device_mesh(current_device().type, (1, 2), mesh_dim_names=("a", "b"))
    fails(
        {"body.2.weight": distribute_tensor(torch.ones(6, 5), other, [Replicate(), Replicate()])},
        '"body.2.weight" is a DTensor over the (1, 2) any mesh of ranks 0, 1, the parameter is'
        " sharded over the (2,) any mesh of ranks 0, 1; load its full_tensor() in place of it",
    )
    untied = {"head.weight": torch.ones(7, 6)}
    if assign:
        fails(
            untied,
            '"head.weight" and "embed.weight" are one parameter, and the state dict has different'
            " values for them",
        )
    else:
        model.load_state_dict(plain.state_dict() | untied)
        assert torch.equal(full(model.embed.weight), torch.ones(7, 6)), (
            "as in a plain model, the last entry counts"
        )
    model.load_state_dict(plain.state_dict(), assign=assign)
    _assert_trains_like(model, plain)


_OURS: Final = "(Shard(dim=0),) over the (2,) any mesh of ranks 0, 1"
_CURE: Final = "Register its full_tensor(), or load it with load_state_dict()"
_OTHER: Final = (
    "parameter 'weight' of unit 'body.0' was replaced by a DTensor that is distributed otherwise:"
)
_REFUSED: Final = {
    "another placement": (
        f"{_OTHER} (Shard(dim=1),) over the (2,) any mesh of ranks 0, 1, where the unit has"
        f" {_OURS}. {_CURE}"
    ),
    "another mesh": (
        f"{_OTHER} (Replicate(), Shard(dim=0)) over the (1, 2) any mesh of ranks 0, 1, where the"
        f" unit has {_OURS}. {_CURE}"
    ),
    "two for a tied one": (
        "parameter 'embed.weight' of unit '(root)' is tied: it has 2 places, and different"
        " parameters were registered at them. Register one parameter at all of them; to untie them,"
        " call remove() on the annotated modules first"
    ),
}


@pytest.mark.parametrize("what", _REFUSED)
@spmd(ranks=2, everywhere=True)
def test_a_foreign_parameter_that_cannot_be_the_units_own_is_refused_by_name(what: str) -> None:
    model = _shard(_made(0))
    mesh = model.body[0].weight.device_mesh
    kept = model.body[0].weight, model.embed.weight
    if what == "another placement":
        model.body[0].weight = nn.Parameter(
            distribute_tensor(torch.ones(6, 6)[:5], mesh, [Shard(1)])
        )
    elif what == "another mesh":
        other = init_device_mesh(current_device().type, (1, 2), mesh_dim_names=("a", "b"))
        model.body[0].weight = nn.Parameter(
            distribute_tensor(torch.ones(5, 6), other, [Replicate(), Shard(0)])
        )
    else:
        model.embed.weight = nn.Parameter(torch.ones(7, 6))
        model.head.weight = nn.Parameter(torch.ones(7, 6))
    for _ in range(2):
        with pytest.raises(ForeignParameterError) as caught:
            model(torch.arange(3))
        assert _anywhere(str(caught.value)) == _REFUSED[what]
    model.body[0].weight = kept[0]
    model.embed.weight = model.head.weight = kept[1]
    _assert_trains_like(model, _made(0))
