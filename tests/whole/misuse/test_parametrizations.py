"""Weight norm and other parametrizations that come after an annotation are refused by name. Those
of before: the battery.
"""

from __future__ import annotations

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
from tests.helpers.world import current_device, spmd


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


_KINDS: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "weight norm": parametrizations.weight_norm,
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
    "replicated": replicate,
}


def _step(model: nn.Module) -> None:
    model(torch.ones(3, 4, device=current_device())).square().mean().backward()


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("kind", _KINDS)
@spmd(ranks=2)
def test_what_is_parametrized_after_annotating_is_refused_at_the_next_forward(
    scheme: str, kind: str
) -> None:
    model = _model()
    _SCHEMES[scheme](model)
    _KINDS[kind](model[0])
    # it is the same parameter, at another place
    if (scheme, kind) == ("replicated", "one of the user's"):
        model.double().float()
        _step(model)
        reference = _model()
        _KINDS[kind](reference[0])
        _step(reference)
        torch.testing.assert_close(
            full_gradients(model), {name: p.grad for name, p in reference.named_parameters()}
        )
        return
    for _ in range(2):
        with pytest.raises(
            (AnnotationError, ForeignParameterError),
            match=r"parametrizations\.weight\.original.* call remove|Call remove",
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
        assert all(
            parameter.grad is not None
            for parameter in model.get_submodule("0").parametrizations.parameters()
        )
