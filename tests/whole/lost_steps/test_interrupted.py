"""What ends a program ends it in a forward, too, and its `finally` writes a checkpoint: torch tells
forward hooks of no `BaseException`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

import composable
from composable.engine.step.unit import units_below
from composable.errors import HooksRemovedError
from composable.fsdp2 import fully_shard as fsdp2_fully_shard
from tests.helpers.compare import full, full_parameters
from tests.helpers.world import Pool, current_device, need_devices


class Block(nn.Module):
    """Raises in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return torch.tanh(self.linear(x))


def _shard_as_fsdp2(model: nn.Sequential) -> None:
    for module in (*model, model):
        fsdp2_fully_shard(module)


VERBS: Final[dict[str, Callable[[nn.Sequential], object]]] = {
    "fully_shard": partial(composable.fully_shard, policy={Block}),
    "a cast": partial(composable.fully_shard, policy={Block}, mp_policy="bf16"),
    "fsdp2": _shard_as_fsdp2,
    "replicate": composable.replicate,
    "replicate, a cast": partial(composable.replicate, mp_policy="bf16"),
}
Values = dict[str, Tensor]


def _of_state_dict(model: nn.Module, _: Any) -> Values:
    return {name: full(value) for name, value in model.state_dict().items()}


def _of_get_state_dict(model: nn.Module, optimizer: Any) -> Values:
    values, state = get_state_dict(model, optimizer)
    assert len(state["state"]) == len(values), "all of its state, by name"
    return {name: full(value) for name, value in values.items()}  # type: ignore[arg-type]


def _of_parameters_after(first: Callable[[nn.Module], object], model: nn.Module, _: Any) -> Values:
    first(model)
    return full_parameters(model)


ENDS: Final[dict[str, Callable[[nn.Module, Any], Values]]] = {
    "state_dict": _of_state_dict,
    "get_state_dict": _of_get_state_dict,
    "full_state_dict": lambda model, _: composable.full_state_dict(model, rank0_only=False),
    "reshard": partial(_of_parameters_after, composable.reshard),
    "reset": partial(_of_parameters_after, composable.reset),
    "state_dict, then parameters": partial(_of_parameters_after, nn.Module.state_dict),
    "reduce_gradients": partial(_of_parameters_after, composable.reduce_gradients),
}


def _model(verb: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(6, 2)).to(current_device())
    VERBS[verb](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def _step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _end_in_forward(verb: str) -> None:
    sharded = dist.is_initialized() and "replicate" not in verb
    x = torch.ones(3, 6, device=current_device())
    undisturbed, its_optimizer = _model(verb)
    model, optimizer = _model(verb)
    kinds = [SystemExit, KeyboardInterrupt, GeneratorExit]
    for number, end in enumerate(ENDS):
        if end == "reshard" and "replicate" in verb:  # which has no shards
            continue
        for each in ((undisturbed, its_optimizer), (model, optimizer)):
            _step(*each, x)
        expected = copy.deepcopy(full_parameters(undisturbed))
        block = model[number % 2]
        block.error = kinds[number % 3]("stop")
        try:
            with torch.set_grad_enabled(number % 3 != 0):
                model(x)
        except BaseException:
            found = ENDS[end](model, optimizer)  # while it is handled
            for name, value in expected.items():
                assert torch.equal(found[name], value), (end, name)
            if sharded:
                assert all(isinstance(each, DTensor) for each in model.state_dict().values())
        block.error = None
    for each in ((undisturbed, its_optimizer), (model, optimizer)):
        _step(*each, x)
    for each in (undisturbed, model):  # gradients are there when the forward ends
        each(x).float().sum().backward()
    model[1].error = SystemExit()
    with pytest.raises(SystemExit):
        model(x)
    its_optimizer.step()
    optimizer.step()
    found = ENDS["state_dict"](model, optimizer)
    for name, value in full_parameters(undisturbed).items():
        assert torch.equal(found[name], value), name
    composable.reset(model)  # which frees what its forward keeps for the next unit


@pytest.mark.unsampled
@pytest.mark.parametrize("verb", VERBS)
def test_a_checkpoint_after_an_exit_in_forward_is_right_in_one_process(verb: str) -> None:
    _end_in_forward(verb)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_after_an_exit_in_forward_is_right_on_ranks(
    pool: Pool, ranks: int, verb: str, device: str
) -> None:
    need_devices(device, ranks)
    pool.run(ranks, _end_in_forward, verb, device=device)


class Headed(nn.Module):
    """A head behind an encoder, which other models have as well."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", [composable.fully_shard, composable.replicate])
def test_models_go_on_after_an_exit_in_the_encoder_that_they_share(verb: Any) -> None:
    encoder, x = Block(), torch.ones(3, 6)
    actor, critic = Headed(encoder), Headed(encoder)
    plain = copy.deepcopy(actor)
    for module in (encoder, actor, critic):
        verb(module)
    for number, goes_on in enumerate((actor, critic, actor)):
        encoder.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            actor(x)
        encoder.error = None
        if number == 2:
            composable.reset(actor)
        goes_on(x)  # nobody uses it
        for model in (actor, plain):
            model.zero_grad()
            model(x).sum().backward()
        expected = [parameter.grad for parameter in plain.parameters()]
        for parameter, gradient in zip(actor.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            torch.testing.assert_close(full(parameter.grad), gradient)


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_that_is_refused_ends_no_unshard(grad: bool) -> None:
    model, x = nn.Sequential(Block(), nn.Linear(6, 2)), torch.ones(3, 6)
    composable.fully_shard(model, policy={Block})
    model(x).sum().backward()
    composable.unshard(model)
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    hooks, model[0]._forward_hooks = model[0]._forward_hooks, OrderedDict()
    with torch.set_grad_enabled(grad), pytest.raises(HooksRemovedError):
        model(x)
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    (root,) = {unit.root for unit in units_below([model])}
    assert root is not None
    assert root.step.forward is None
    model[0]._forward_hooks = hooks
    model(x).sum().backward()  # uses it up
    assert not any(unit.kept_by for unit in units_below([model]))
