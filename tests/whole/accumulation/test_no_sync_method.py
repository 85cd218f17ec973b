"""`model.no_sync()`, where loops written for DDP and FSDP1, and trainers, look for it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial

import composable.fsdp2
from composable import fully_shard, no_sync, remove, replicate
from composable.errors import NotAnnotatedError
from tests.helpers.compare import full_gradients
from tests.helpers.world import current_device, spmd

VERBS: Final[dict[str, Callable[..., Any]]] = {
    "fully_shard": fully_shard,
    "replicate": replicate,
    "the face": composable.fsdp2.fully_shard,
}


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(current_device())


def _batch(number: int) -> Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, 4).to(current_device())


def _accumulated(model: Any, scope: Callable[[Any], Any]) -> dict[str, Any]:
    for number in range(3):
        with scope(model) if number < 2 else nullcontext():
            model(_batch(number)).square().sum().backward()
        gradient = model[0].weight.grad
        assert getattr(gradient, "placements", [Partial()])[0].is_partial() or number == 2
    return full_gradients(model)


@pytest.mark.parametrize("verb", VERBS)
@spmd(ranks=2)
def test_the_method_is_the_scope(verb: str) -> None:
    by_method = _accumulated(
        VERBS[verb](_layers()), lambda model: getattr(model, "no_sync", nullcontext)()
    )
    by_scope = _accumulated(VERBS[verb](_layers()), no_sync)
    assert by_method.keys() == by_scope.keys()
    for name, gradient in by_scope.items():
        assert torch.equal(gradient, by_method[name]), name


@spmd(ranks=2)
def test_only_the_modules_that_a_verb_was_called_with_have_it_and_remove_takes_it_back() -> None:
    for verb in (fully_shard, replicate):
        model = _layers()
        before = set(vars(model))
        verb(model, policy={nn.Linear})
        assert "no_sync" in vars(model)
        assert not any("no_sync" in vars(layer) for layer in model)
        remove(model, verb)
        assert set(vars(model)) == before
    pair = [*_layers()]
    fully_shard(pair)
    assert all("no_sync" in vars(layer) for layer in pair)


class Named(nn.Linear):
    def no_sync(self) -> str:
        return "mine"


@spmd(ranks=2)
def test_a_name_that_the_model_uses_is_not_taken() -> None:
    for verb in VERBS.values():
        of_class, of_object = Named(4, 4), nn.Linear(4, 4)
        of_object.no_sync = lambda: "own"  # type: ignore[assignment]
        for model, said in ((of_class, "mine"), (of_object, "own")):
            verb(model.to(current_device()))
            assert model.no_sync() == said  # type: ignore[operator]
            remove(model, "replicate" if verb is replicate else "fully_shard")
            assert model.no_sync() == said  # type: ignore[operator]


@spmd(ranks=2)
def test_a_copy_has_its_own_a_pickle_none_and_the_module_is_not_kept() -> None:
    model = replicate(_layers())
    clone = copy.deepcopy(model)
    with clone.no_sync():
        for each in (model, clone):
            each(_batch(0)).square().sum().backward()
    # replicated gradients that are not reduced differ between ranks
    summed = [each[0].bias.grad.clone() for each in (model, clone)]
    for gradient, alike in zip(summed, (True, False), strict=True):
        every = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(every, gradient)
        assert torch.equal(*every) is alike
    clone.zero_grad()
    remove(clone, replicate)
    assert "no_sync" not in vars(clone)
    assert "no_sync" not in vars(pickle.loads(pickle.dumps(model)))
    method, gone = model.no_sync, weakref.ref(model)
    del model, each
    gc.collect()
    assert gone() is None
    with pytest.raises(NotAnnotatedError, match="the module of this method is gone"):
        method()
