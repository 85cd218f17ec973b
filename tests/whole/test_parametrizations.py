"""Weight norm, spectral norm and other parametrizations: part of a model before it is annotated, refused by name afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from composable import fully_shard, remove, replicate
from composable.errors import AnnotationError, ForeignParameterError
from tests.helpers.compare import full_gradients
from tests.helpers.world import Pool, current_device, spmd


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


_KINDS: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "one of the user's": lambda module: register_parametrization(module, "weight", Doubled()),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(current_device())


def _next_to_shards(model: nn.Module) -> None:
    replicate(model.get_submodule("0"))
    fully_shard(model)


_SCHEMES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "sharded": fully_shard,
    "units": lambda model: fully_shard(model, policy={nn.Linear}),
    "next to shards": _next_to_shards,
}


def _step(model: nn.Module) -> None:
    model(torch.ones(3, 4, device=current_device())).square().mean().backward()


def _before() -> None:
    for kind, parametrize in _KINDS.items():
        plain = _model()
        parametrize(plain[0])
        for annotate in (fully_shard, replicate, _next_to_shards):
            model = _model()
            parametrize(model[0])
            model.load_state_dict(plain.state_dict())
            annotate(model)
            reference = copy.deepcopy(plain)
            for each in (model, reference):
                _step(each)
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
                _step(each)
            wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
            torch.testing.assert_close(full_gradients(model), wanted, msg=lambda text, kind=kind: f"{kind}: {text}")


def test_what_is_parametrized_before_annotating_trains_as_in_one_process(pool: Pool) -> None:
    pool.run(2, _before)


_AFTERWARDS: Final[dict[str, Callable[[nn.Module], Any]]] = {**_SCHEMES, "replicated": replicate}


@pytest.mark.parametrize("scheme", _AFTERWARDS)
@pytest.mark.parametrize("kind", ["weight norm", "one of the user's"])
@spmd(ranks=2)
def test_what_is_parametrized_after_annotating_is_refused_at_the_next_forward(scheme: str, kind: str) -> None:
    model = _model()
    _AFTERWARDS[scheme](model)
    _KINDS[kind](model[0])
    if (scheme, kind) == ("replicated", "one of the user's"):  # it is the same parameter, at another place
        model.double().float()
        _step(model)
        reference = _model()
        _KINDS[kind](reference[0])
        _step(reference)
        torch.testing.assert_close(full_gradients(model), {name: p.grad for name, p in reference.named_parameters()})
        return
    for _ in range(2):
        with pytest.raises(
            (AnnotationError, ForeignParameterError), match=r"parametrizations\.weight\.original.* call remove|Call remove"
        ):
            _step(model)


@spmd(ranks=2)
def test_a_parametrization_is_registered_after_remove() -> None:
    for verb in (fully_shard, replicate):
        model = verb(_model())
        _step(model)
        remove(model, verb)
        parametrizations.weight_norm(model[0])
        verb(model)
        _step(model)
        assert all(parameter.grad is not None for parameter in model.get_submodule("0").parametrizations.parameters())
