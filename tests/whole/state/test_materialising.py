"""Models that are annotated before they have values, or get new ones, in place: made, loaded,
initialised.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from composable import fully_shard, replicate
from tests.helpers.compare import full
from tests.helpers.refusals import refusal
from tests.helpers.world import current_device, spmd


def _blank(annotate: Callable[[nn.Module], object]) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    annotate(model)
    return model


def _shard(model: nn.Module) -> None:
    fully_shard(model, policy={nn.Linear})


def _mix(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    replicate(model[0])
    fully_shard(model)


_VERBS = {"fully_shard": _shard, "replicate": replicate, "replicate inside fully_shard": _mix}


_UNITS: Final = {
    "fully_shard": ("weight' of unit '0", "weight' of unit '1"),
    "replicate": ("0.weight' of unit '(root)", "1.weight' of unit '(root)"),
    "replicate inside fully_shard": ("1.weight' of unit '(root)", "1.weight' of unit '(root)"),
}


@pytest.mark.parametrize("cure", ["load", "to_empty"])
@pytest.mark.parametrize("verb", _VERBS)
@spmd(ranks=2)
def test_a_forward_on_the_meta_device_is_refused_by_name_and_trains_once_there_are_values(
    verb: str, cure: str
) -> None:
    model = _blank(_VERBS[verb])
    assert isinstance(model, nn.Sequential)
    x = torch.ones(2, 4, device=current_device())

    def assert_refused(parameter: str) -> None:
        assert (
            refusal(lambda: model(x))
            == f"PhaseError: parameter '{parameter}' is still on the meta device: it has a shape,"
            " but no values to compute with. Materialise the model before its first forward:"
            " call model.to_empty(device=...) and initialise it, or"
            " model.load_state_dict(state_dict, assign=True)"
        )

    first, second = _UNITS[verb]
    assert_refused(first)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(current_device())
    for number, parameter in enumerate(plain.parameters()):
        nn.init.constant_(parameter, 0.5 + number)
    if cure == "load":
        model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    else:
        model[0].to_empty(device=current_device())
        assert_refused(second)
        model[1].to_empty(device=current_device())
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.5 + number)
    for each in (model, plain):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other.detach())


# --- initialisation in place --------------------------------------------------------------------


# No fewer than 48 numbers in each: the variance of a dozen lies outside the bounds below once in 30
# draws.
_RESETS: Final[dict[str, Callable[[], nn.Module]]] = {
    "Linear": lambda: nn.Linear(64, 48),
    "Embedding": lambda: nn.Embedding(48, 16),
    "LayerNorm": lambda: nn.LayerNorm(48),
    "BatchNorm": lambda: nn.BatchNorm1d(48),
    "Conv": lambda: nn.Conv2d(16, 48, 3),
    "LSTM": lambda: nn.LSTM(24, 32),
    "MultiheadAttention": lambda: nn.MultiheadAttention(32, 4),
}


def _reset(module: nn.Module) -> None:
    again = (
        module._reset_parameters
        if isinstance(module, nn.MultiheadAttention)
        else module.reset_parameters
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        again()  # type: ignore[operator]


@pytest.mark.parametrize("dim", [0, 1])
@spmd(ranks=2)
def test_modules_reset_their_sharded_parameters(dim: int) -> None:
    """Every rank draws its shards from a seed of its own; together they look as one process draws
    them.
    """
    for name, make in _RESETS.items():
        torch.manual_seed(0)
        plain, model = (make().to(current_device()) for _ in range(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(100.0)
        fully_shard(model, shard_placement_fn=lambda p: Shard(dim) if p.ndim > dim else None)
        torch.manual_seed(1 + dist.get_rank())
        _reset(model)
        _reset(plain)
        for (fqn, one), other in zip(
            model.named_parameters(), map(torch.detach, plain.parameters()), strict=True
        ):
            if fqn == "out_proj.weight":
                continue  # a MultiheadAttention leaves it as its Linear made it
            assert isinstance(one, DTensor)
            whole, label = full(one), f"{name}.{fqn}"
            if not other.std():
                assert torch.equal(whole, other), label
                continue
            assert 0.6 < float(whole.std() / other.std()) < 1.6, label
            assert float(whole.abs().max() / other.abs().max()) < 2.0, label
            axis = dim if one.ndim > dim else 0
            first, second = whole.chunk(2, axis)
            assert not torch.equal(first, second), label


@spmd(ranks=2, everywhere=True)
def test_a_shard_that_was_resized_is_named_and_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model, policy={nn.Linear})
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError) as caught:
        nn.init.eye_(model[1].weight)  # type: ignore[arg-type]
    if "no valid sharding strategy" in str(caught.value):
        pytest.skip("this torch refuses before anything is resized")
    assert "not resizable" in str(caught.value)
    assert (
        refusal(lambda: model(x))
        == "ForeignParameterError: parameter 'weight' of unit '1': its shard was resized by an"
        " operator with out=, as torch.nn.init.eye_ calls one. The shard has its shape and its"
        " values again. Initialise the parameter before fully_shard, or load_state_dict() the"
        " whole tensor"
    )
    for parameter, former in zip(model.parameters(), before, strict=True):
        assert torch.equal(full(parameter), former)
    model.load_state_dict({"1.weight": torch.eye(4)}, strict=False)
    model(x).sum().backward()
    assert torch.equal(full(model[1].weight), torch.eye(4))  # type: ignore[arg-type]
