"""Weight norm, spectral norm and other parametrizations: part of a model before it is annotated, refused by name afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from textwrap import fill
from typing import Any, Final

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from composable import fully_shard, remove, replicate
from composable.errors import ForeignParameterError
from tests.helpers.compare import full_gradients
from tests.helpers.refusals import refusal
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


def _after(scheme: str) -> str:
    """Of every kind, before and after a step; and the model is as it was."""
    model, reference = _model(), _model()
    _SCHEMES[scheme](model)
    said = []
    for _ in range(2):
        said += [refusal(lambda parametrize=parametrize: parametrize(model[0])) for parametrize in _KINDS.values()]
        for each in (model, reference):
            each.zero_grad()
            _step(each)
    torch.testing.assert_close(full_gradients(model), {name: p.grad for name, p in reference.named_parameters()})
    assert said == said[:1] * len(said)
    remove(model, fully_shard)
    if scheme == "next to shards":
        remove(model[0], replicate)
    parametrizations.weight_norm(model[0])
    fully_shard(model)
    _step(model)
    return said[0]


def test_what_is_parametrized_after_sharding_is_refused_before_anything_happens(pool: Pool) -> None:
    found = {scheme: pool.run(2, _after, scheme) for scheme in _SCHEMES}
    assert all(by_rank[0] == by_rank[1] for by_rank in found.values())
    assert_text(
        "\n".join(fill(f"{scheme}: {by_rank[0]}", 110) for scheme, by_rank in found.items()),
        """\
sharded: ShardedParameterError: parameter '0.weight' of unit '(root)' is sharded, and a parametrization
(weight norm, spectral norm and the like) begins with a plain one. Register parametrizations before
annotating: call remove(module, fully_shard), register them, and annotate again. Nothing was registered
units: ShardedParameterError: parameter 'weight' of unit '0' is sharded, and a parametrization (weight norm,
spectral norm and the like) begins with a plain one. Register parametrizations before annotating: call
remove(module, fully_shard), register them, and annotate again. Nothing was registered
next to shards: ShardedParameterError: parameter 'weight' of unit '0' is replicated, and rests as a DTensor
because others are sharded, and a parametrization (weight norm, spectral norm and the like) begins with a
plain one. Register parametrizations before annotating: call remove(module, fully_shard), and remove(module,
replicate) on the one that is replicated, register them, and annotate again. Nothing was registered""",
    )


def _after_replicating() -> None:
    for parametrize in _KINDS.values():
        model = replicate(_model())
        parametrize(model[0])
        for _ in range(2):
            with pytest.raises(ForeignParameterError, match=r"came into the module after replicate was called.*call remove"):
                _step(model)
        remove(model, replicate)  # the cure
        replicate(model)
        _step(model)


def test_what_is_parametrized_after_replicating_is_refused_at_the_next_forward(pool: Pool) -> None:
    pool.run(2, _after_replicating)


@spmd(ranks=2)
def test_who_reads_or_removes_a_sharded_parametrization_outside_of_a_forward_is_told_how() -> None:
    model = _model()
    fully_shard(parametrizations.weight_norm(model[0]))
    fully_shard(model)
    said = refusal(lambda: model[0].weight)
    assert said == refusal(lambda: remove_parametrizations(model[0], "weight"))
    assert_text(
        fill(said, 110),
        """\
ShardedParameterError: parameter 'parametrizations.weight.original0' of unit '0' is sharded and was used
outside a forward call; it is a parametrization's, which computes whenever its result is read: read that in a
forward of the annotated module (ParametrizedLinear), or, to remove the parametrization, call remove(module,
fully_shard) first""",
    )
    _step(model)
    for module in (model, model[0]):
        remove(module, fully_shard)
    weight = model[0].weight.detach().clone()
    remove_parametrizations(model[0], "weight")
    assert torch.equal(model[0].weight, weight)
    fully_shard(model)
    _step(model)
