"""Refused calls of verbs: the target, the arguments, and the names that a verb changes."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from typing import Any

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import (
    contract,
    registry,
)
from composable.errors import (
    AnnotationError,
    ComposableError,
    NamesChangedError,
    UnknownArgumentError,
)
from tests.contract.verbs import (
    Block,
    Model,
    everything_about,
    fully_shard,
    mark,
    message,
    replicate,
)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (None, "mark() takes a module or a list of modules, and got NoneType"),
        ("layers.0", "mark() takes a module or a list of modules, and got str"),
        (nn.Linear, "mark() takes a module or a list of modules, and got the class Linear"),
        ((m for m in [nn.ReLU()]), "mark() takes a module or a list of modules, and got generator"),
        ([], "mark() takes a module or a list of modules, and got an empty list"),
        ([nn.ReLU(), "x"], "mark() got a str at position 1 of its list of modules"),
    ],
)
def test_a_target_that_is_not_a_module_is_refused_with_its_type(target: Any, text: str):
    assert message(AnnotationError, lambda: mark(target)) == text


def test_a_missing_target_and_a_module_given_twice_are_refused():
    block = Block()
    text = message(AnnotationError, lambda: mark())
    assert_text(
        text,
        """mark(): missing a required argument: 'module'; call it as mark(module, level=, note=)""",
    )
    text = message(AnnotationError, lambda: mark([block.up, block.norm, block.up]))
    assert_text(text, """mark() got 'up' twice in its list of modules""")


@pytest.mark.parametrize(
    ("verb", "given", "text"),
    [
        (fully_shard, {"auto_wrap_policy": None}, "fully_shard() has no argument 'auto_wrap_policy'; use policy= instead"),
        (fully_shard, {"sharding_strategy": True}, "fully_shard() has no argument 'sharding_strategy'; use reshard_after_forward= instead"),
        (fully_shard, {"device_id": 0}, "fully_shard() has no argument 'device_id'; the mesh says which device; leave it out"),
        (fully_shard, {"foo": 1}, "fully_shard() has no argument 'foo'; it takes: mesh, policy, reshard_after_forward"),
        (fully_shard, {"reshard_after_foward": 1}, "fully_shard() has no argument 'reshard_after_foward'; did you mean 'reshard_after_forward'? It takes: mesh, policy, reshard_after_forward"),
        (replicate, {"foo": 1}, "replicate() has no argument 'foo'; it takes: none"),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_refused_with_its_equivalent(
    verb: Any, given: dict[str, Any], text: str
):
    block = Block()
    assert message(UnknownArgumentError, lambda: verb(block, **given)) == text
    assert dict(registry(block)) == {}


def test_an_argument_by_position_is_refused_with_the_keywords():
    block = Block()
    assert_text(
        message(UnknownArgumentError, lambda: fully_shard(block, "mesh")),
        """fully_shard(): too many positional arguments; call it as fully_shard(module, mesh=, policy=, reshard_after_forward=)""",
    )
    assert dict(registry(block)) == {}


def test_an_unknown_argument_raises_a_type_error_that_is_a_composable_error():
    for kind in (TypeError, ValueError, ComposableError):
        with pytest.raises(kind):
            fully_shard(Block(), foo=1)


def test_an_argument_given_twice_and_a_missing_argument_are_refused():
    @contract()
    def scale(module, factor):
        return module

    block = Block()
    text = message(UnknownArgumentError, lambda: scale(block, 2, factor=3))
    assert_text(
        text,
        """scale(): multiple values for argument 'factor'; call it as scale(module, factor=)""",
    )
    with pytest.raises(TypeError, match="factor"):
        scale(block)
    assert dict(registry(block)) == {}


def test_a_verb_with_var_keywords_takes_any_keyword():
    @contract()
    def note(module, **words):
        return module

    block = Block()
    note(block, a=1, b=2)
    assert dict(registry(block)["note"].kwargs) == {"a": 1, "b": 2}


def test_a_verb_that_renames_is_refused_with_both_orders_and_undone():
    @contract()
    def wrap_up(module):
        module.up = nn.Sequential(module.up)

    model = Model()
    before = everything_about(model)
    text = message(NamesChangedError, lambda: wrap_up(model.layers[1]))
    assert_text(
        text,
        """wrap_up changed the names of parameters in 'layers.1', or their order; before: up.weight, up.bias; after: up.0.weight, up.0.bias. It was taken back""",
    )
    assert everything_about(model) == before


def test_a_verb_that_reorders_removes_or_adds_is_refused():
    @contract()
    def reorder(module):
        module._parameters["weight"] = module._parameters.pop("weight")

    @contract()
    def hide(module):
        del module.norm._buffers["running_var"]

    @contract()
    def add(module):
        module.extra = nn.Identity()

    block = Block()
    before = everything_about(block)
    assert_text(
        message(NamesChangedError, lambda: reorder(block.up)),
        """reorder changed the names of parameters in 'up', or their order; before: weight, bias; after: bias, weight. It was taken back""",
    )
    assert_text(
        message(NamesChangedError, lambda: hide(block)),
        """hide changed the names of buffers in Block, or their order; before: norm.running_var; after: nothing. It was taken back""",
    )
    assert_text(
        message(NamesChangedError, lambda: add(block)),
        """add changed the names of modules in Block, or their order; before: nothing; after: extra. It was taken back""",
    )
    assert everything_about(block) == before


def test_untying_a_parameter_is_allowed_and_removing_a_registration_is_not():
    @contract()
    def untie(module):
        module[1].weight = nn.Parameter(module[1].weight.detach().clone())

    @contract()
    def lose(module):
        module[1].weight = None

    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    untie(tied())
    # Without duplicates the names would be the same before and after: the second place counts.
    assert "before: 1.weight; after: nothing" in message(NamesChangedError, lambda: lose(tied()))


def test_a_long_difference_of_names_is_shortened():
    @contract()
    def strip(module):
        for child in module:
            child._parameters.clear()

    text = message(
        NamesChangedError, lambda: strip(nn.Sequential(*[nn.Linear(1, 1) for _ in range(50)]))
    )
    assert_text(
        text,
        """strip changed the names of parameters in Sequential, or their order; before: 0.weight, 0.bias, 1.weight, 1.bias, 2.weight, 2.bias, 3.weight, 3.bias and 92 more; after: nothing. It was taken back""",
    )


def test_a_verb_that_returns_something_else_is_refused():
    @contract()
    def wrap(module):
        return nn.Sequential(module)

    block = Block()
    before = everything_about(block)
    assert_text(
        message(AnnotationError, lambda: wrap(block)),
        """wrap returned a Sequential; an annotation works in place and must return what it was given, or nothing""",
    )
    assert everything_about(block) == before
