"""Calls of verbs of any kind: the target, the arguments, and the names that a verb changes."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

from torch import nn

from composable.contract.contract import contract, registry
from tests.contract.verbs import Block, Model, everything_about, fully_shard, mark, replicate
from tests.refusals.table import Refusals, row


@row()
def targets_that_are_no_module() -> Refusals:
    for target, kind in (
        (None, "NoneType"), ("layers.0", "str"), (nn.Linear, "the class Linear"), ((m for m in [nn.ReLU()]), "generator"), ([], "an empty list"),
    ):
        yield lambda target=target: mark(target), f"AnnotationError: mark() takes a module or a list of modules, and got {kind}"
    block, given = Block(), [nn.ReLU(), "x"]
    yield lambda: mark(given), "AnnotationError: mark() got a str at position 1 of its list of modules"
    yield lambda: mark([block.up, block.norm, block.up]), "AnnotationError: mark() got 'up' twice in its list of modules"
    yield lambda: mark(), "UnknownArgumentError: mark(): missing a required argument: 'module'; call it as mark(module, level=, note=)"


@row()
def arguments_that_a_verb_does_not_have() -> Refusals:
    @contract()
    def scale(module: nn.Module, factor: int) -> nn.Module:
        return module

    block = Block()
    for verb, name, answer in (
        (fully_shard, "auto_wrap_policy", "use policy= instead"),
        (fully_shard, "sharding_strategy", "use reshard_after_forward= instead"),
        (fully_shard, "device_id", "the mesh says which device; leave it out"),
        (fully_shard, "foo", "it takes: mesh, policy, reshard_after_forward"),
        (fully_shard, "reshard_after_foward", "did you mean 'reshard_after_forward'? It takes: mesh, policy, reshard_after_forward"),
        (replicate, "foo", "it takes: none"),
    ):
        given: Any = {name: 1}
        yield lambda verb=verb, given=given: verb(block, **given), f"UnknownArgumentError: {verb.__name__}() has no argument '{name}'; {answer}"
    yield lambda: fully_shard(block, "mesh"), "UnknownArgumentError: fully_shard(): too many positional arguments; call it as fully_shard(module, mesh=, policy=, reshard_after_forward=)"
    yield lambda: scale(block, 2, factor=3), "UnknownArgumentError: scale(): multiple values for argument 'factor'; call it as scale(module, factor=)"
    yield lambda: scale(block), "UnknownArgumentError: ...factor..."
    assert dict(registry(block)) == {}


@row()
def verbs_that_change_names_or_their_order() -> Refusals:
    @contract()
    def wrap_up(module: Any) -> None:
        module.up = nn.Sequential(module.up)

    @contract()
    def reorder(module: Any) -> None:
        module._parameters["weight"] = module._parameters.pop("weight")

    @contract()
    def hide(module: Any) -> None:
        del module.norm._buffers["running_var"]

    @contract()
    def add(module: Any) -> None:
        module.extra = nn.Identity()

    @contract()
    def strip(module: Any) -> None:
        for child in module:
            child._parameters.clear()

    model, block = Model(), Block()
    before = everything_about(model), everything_about(block)
    said = "NamesChangedError: {}, or their order; before: {}; after: {}. It was taken back"
    yield lambda: wrap_up(model.layers[1]), said.format("wrap_up changed the names of parameters in 'layers.1'", "up.weight, up.bias", "up.0.weight, up.0.bias")
    yield lambda: reorder(block.up), said.format("reorder changed the names of parameters in 'up'", "weight, bias", "bias, weight")
    yield lambda: hide(block), said.format("hide changed the names of buffers in Block", "norm.running_var", "nothing")
    yield lambda: add(block), said.format("add changed the names of modules in Block", "nothing", "extra")
    assert (everything_about(model), everything_about(block)) == before
    many = nn.Sequential(*[nn.Linear(1, 1) for _ in range(50)])
    yield lambda: strip(many), said.format("strip changed the names of parameters in Sequential", "0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias, 3.weight, 3.bias and 92 more", "nothing")


@row()
def a_registration_that_a_verb_removes() -> Refusals:
    @contract()
    def untie(module: Any) -> None:
        module[1].weight = nn.Parameter(module[1].weight.detach().clone())

    @contract()
    def lose(module: Any) -> None:
        module[1].weight = None

    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    untie(tied())
    # Without duplicates the names would be the same before and after: the second place counts.
    yield lambda: lose(tied()), "NamesChangedError: ...before: 1.weight; after: nothing..."


@row()
def a_verb_that_returns_something_else() -> Refusals:
    @contract()
    def wrap(module: Any) -> nn.Sequential:
        return nn.Sequential(module)

    block = Block()
    before = everything_about(block)
    yield lambda: wrap(block), "AnnotationError: wrap returned a Sequential; an annotation works in place and must return what it was given, or nothing"
    assert everything_about(block) == before
