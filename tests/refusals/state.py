"""State that cannot be read, filled, averaged, moved or copied."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from composable import (
    EMA,
    describe,
    export,
    full_state_dict,
    fully_shard,
    load,
    materialize,
    no_sync,
    offload_to_host,
    rebind_optimizer,
    register_comm_hook,
    replicate,
    stream_full,
    summon_full_params,
)
from tests.helpers.world import current_device
from tests.refusals.table import Refusals, row
from tests.state.models import Block, Net, initialise, plain, tokens


def _model(verb: Any = fully_shard) -> Net:
    return verb(plain(), policy={Block})  # type: ignore[no-any-return]


def _inside(scope: Any, act: Callable[[], object] = lambda: None) -> None:
    with scope:
        act()


def _train(model: Net) -> None:
    model(tokens(0)).sum().backward()


def _accumulated(model: Net) -> Net:
    with no_sync(model):
        _train(model)
    return model


def _in_a_forward(model: Net, act: Callable[[], object]) -> None:
    with model.blocks[0].up.register_forward_pre_hook(lambda *_: act()):  # type: ignore[union-attr]
        model(tokens(0))


@row()
def state_of_plain_models() -> Refusals:
    model = nn.Linear(2, 2)
    for name, act in {"full_state_dict": full_state_dict, "stream_full": stream_full, "export": lambda model: export(model, "/tmp/never"),
                      "materialize": materialize, "load": lambda model: load(model, "/tmp/never"), "summon_full_params": lambda model: _inside(summon_full_params(model))}.items():
        yield lambda act=act: act(model), f"NotAnnotatedError: {name}: ..."
    by: Any = "layer"
    yield lambda: describe(model, by=by), "ArgumentError: describe: by must be 'unit' or 'parameter', got the str 'layer'"
    assert describe(model, by="unit") == describe(model)


# --- whole parameters ---------------------------------------------------------------------------


@row(2)
def uses_inside_of_unsharded() -> Refusals:
    model = _model()
    yield lambda: _inside(summon_full_params(model), lambda: model(tokens(0))), "PhaseError: a forward of unit '(root)' was called inside of summon_full_params()..."
    _train(model)

    def reshape() -> None:
        model.blocks[0].scale.data = torch.zeros(2, device=current_device())  # type: ignore[union-attr]

    yield lambda: _inside(summon_full_params(model), reshape), "ForeignParameterError: ...'blocks.0.scale'...has the shape (2,)..."
    _train(model)
    yield lambda: _inside(summon_full_params(_accumulated(_model()), with_grads=True)), "PhaseError: ...accumulated under no_sync..."
    yield lambda: _in_a_forward(model, lambda: _inside(summon_full_params(model))), "PhaseError: ...inside of the forward..."


# --- initial values -----------------------------------------------------------------------------


def _on_meta() -> Any:
    with torch.device("meta"):
        model = Net()
    return fully_shard(model, policy={Block})


@row(2)
def values_that_no_initialiser_gives() -> Refusals:
    model = _on_meta()
    yield lambda: materialize(model, lambda module: None if isinstance(module, Block) else initialise(module)), "PhaseError: materialize: no initialiser wrote to 'blocks.0.scale', ...'blocks.0.table'..."
    torch.manual_seed(dist.get_rank())
    yield lambda: materialize(_on_meta()), "RanksDisagreeError: ...random states of the ranks differ..."


@row(2)
def what_is_no_folder_no_initialiser_and_no_dtype_of_weights() -> Refusals:
    model: Any = _on_meta()
    unset = dist.get_rank() == 0
    yield lambda: load(model, None if unset else "/tmp/never"), f"{'ArgumentError' if unset else 'RanksDisagreeError: load: rank 0: ArgumentError'}: load: folder must be a path (a string that is not empty, or os.PathLike), got None"
    for wrong, said in ((None, "None"), ("", "the str ''"), ({}, "a dict")):
        yield lambda wrong=wrong: load(model, wrong), f"ArgumentError: load: folder must be a path (a string that is not empty, or os.PathLike), got {said}"
    yield lambda: load("/tmp/never", model), "ArgumentError: load: module must be a module (nn.Module), got the str '/tmp/never'"
    yield lambda: materialize(model, "/tmp/never"), "ArgumentError: materialize: init must be a function of 1 argument or None, got the str '/tmp/never'"
    for dtype in (torch.int32, "bfloat16"):
        yield lambda dtype=dtype: load(model, "/tmp/never", dtype=dtype), "ArgumentError: load: dtype must be a torch.dtype of floating-point numbers (such as torch.bfloat16) or None, got..."
        yield lambda dtype=dtype: materialize(model, dtype=dtype), "ArgumentError: materialize: dtype must be a torch.dtype of floating-point numbers ..."
    yield lambda: load(model, "/tmp/never", rename={"a": "b"}), "ArgumentError: load: rename must be a function of 1 argument or None, got a dict"  # type: ignore[arg-type]
    assert all(each.is_meta and each.dtype == torch.float32 for each in model.parameters())


@row(1)
def how_a_folder_is_read_without_a_folder() -> Refusals:
    model = _on_meta()
    yield lambda: materialize(model, strict=False), "UnknownArgumentError: ...there is no folder=..."
    materialize(model, dtype=torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


# --- averages and optimizers --------------------------------------------------------------------


@row(2)
def averages_of_another_plan() -> Refusals:
    model = plain()
    before = EMA(model, decay=0.5)
    fully_shard(model)
    yield before.update, "ForeignParameterError: EMA: 'embed.weight'..."
    whole = before.state_dict()
    ema = EMA(model, decay=0.9)
    ema.load_state_dict(whole)
    ema.update()
    yield lambda: EMA(model, decay=2), "ArgumentError: EMA: decay must be a number from 0 to 1, got 2"
    del whole["averages"]["embed.weight"]
    yield lambda: ema.load_state_dict(whole), "KeyError: ...embed.weight..."


@row(2)
def an_optimizer_of_another_model() -> Refusals:
    optimizer = optim.SGD((other := nn.Linear(3, 3)).parameters(), lr=0.1)
    yield lambda: rebind_optimizer(fully_shard(plain()), optimizer), "OptimizerError: rebind_optimizer: SGD holds a parameter of shape (3, 3), ...which Net does not have..."
    assert optimizer.param_groups[0]["params"][0] is other.weight


# --- models that rest on the host ---------------------------------------------------------------


@row(2)
def what_cannot_leave_the_device() -> Refusals:
    model: Any = _accumulated(_model())
    yield lambda: offload_to_host(model), "PhaseError: ...with accumulated gradients; call reduce_gradients..."
    _train(model)
    yield lambda: _inside(summon_full_params(model), lambda: offload_to_host(model)), "PhaseError: ...inside of summon_full_params()..."
    yield lambda: offload_to_host(model, model), "ArgumentError: offload_to_host: optimizers must be an Optimizer, got a Net"
    yield lambda: _in_a_forward(model, lambda: offload_to_host(model)), "PhaseError: ...inside of the forward..."
    _train(model)


# --- copies -------------------------------------------------------------------------------------


@row(2)
def copies_that_cannot_be() -> Refusals:
    model = _model()
    yield lambda: _inside(summon_full_params(model, rank0_only=True), lambda: copy.deepcopy(model)), "PhaseError: copy.deepcopy of unit '...' inside of summon_full_params(rank0_only=True)..."
    _train(copy.deepcopy(model))
    hooked = _model(replicate)
    register_comm_hook(hooked, [dist.group.WORLD], lambda state, bucket: bucket.buffer())
    yield lambda: copy.deepcopy(hooked), "CommHookError: copy.deepcopy: the state of the communication hook '<lambda>' cannot be copied..."
    layers = nn.Sequential(nn.Linear(2, 2)).to(current_device())
    traced = fully_shard(torch.fx.symbolic_trace(layers))
    yield lambda: copy.deepcopy(traced), "AnnotationError: copy.deepcopy of Sequential: the __deepcopy__ of Sequential leaves out hooks..."
    inside = plain()
    replicate(inside.blocks[0])
    for whole in (model, fully_shard(inside, policy={Block})):
        for part in (whole, nn.ModuleList([whole]), whole.blocks[1]):
            yield lambda part=part: pickle.dumps(part), "AnnotationError: the annotated unit '...' is distributed over process groups, and cannot be pickled..."
        _train(whole)
