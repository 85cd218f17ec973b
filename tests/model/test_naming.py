"""What modules are called in messages, and which of them cannot be called."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import torch
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
)
from composable.model.contract import (
    contract,
    module_name,
    naming,
    require_callable,
)
from tests.model.verbs import (
    Block,
    Model,
    mark,
    message,
)


def test_modules_are_called_by_the_outermost_name_that_is_known():
    model = Model()
    up = model.layers[2].up
    assert module_name(up) == "'layers.2.up'"
    assert module_name(model) == "Model"
    with naming(nn.ModuleDict({"net": model})), naming(model.layers[2]):
        assert module_name(up) == "'net.layers.2.up'"
        assert module_name(model) == "'net'"


def test_the_caller_of_a_helper_need_not_know_the_model():
    def annotate(part: nn.Module) -> None:
        mark(part)

    def whole() -> str:
        model = Model()
        annotate(model.enc[0])
        return message(AlreadyAnnotatedError, lambda: annotate(model.enc[0]))

    assert whole().startswith("mark was already applied to 'enc.0'")


def test_a_container_without_a_forward_is_refused_and_one_with_it_is_not():
    class Stack(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Model()
    assert_text(
        message(AnnotationError, lambda: require_callable(model.layers)),
        """ModuleList 'layers' has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=""",
    )
    assert_text(
        message(AnnotationError, lambda: require_callable(nn.ModuleDict(), so="there is nothing to run again")),
        """ModuleDict has no forward, so there is nothing to run again; annotate its children, or pass policy=""",
    )
    require_callable(Stack([Block()]))
    require_callable(nn.Sequential())
    lent = nn.ModuleList([Block()])
    lent.forward = model.forward  # type: ignore[method-assign]
    require_callable(lent)


def test_a_container_is_refused_by_name_from_inside_a_verb_too():
    @contract()
    def wrap(module):
        require_callable(module)

    model = Model()
    assert message(AnnotationError, lambda: wrap(model.layers)).startswith("ModuleList 'layers' has no forward")


def test_of_several_models_that_are_held_the_outermost_gives_the_name():
    model = Model()
    block = model.layers[1]
    mark(block.up)
    assert message(AlreadyAnnotatedError, lambda: (block, mark(model.layers[1].up))).startswith(
        "mark was already applied to 'layers.1.up'"
    )
