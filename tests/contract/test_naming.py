"""Names of modules in messages, and containers without a forward."""

# Messages are compared word for word, each on one line.

from __future__ import annotations

import torch
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import contract, module_name, naming, require_callable
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
)
from tests.contract.verbs import (
    Block,
    Model,
    mark,
    message,
)


def test_a_module_is_named_by_its_fqn_in_the_outermost_known_model():
    model = Model()
    up = model.layers[2].up
    assert module_name(up) == "'layers.2.up'"
    assert module_name(model) == "Model"
    with naming(nn.ModuleDict({"net": model})), naming(model.layers[2]):
        assert module_name(up) == "'net.layers.2.up'"
        assert module_name(model) == "'net'"


def test_an_error_finds_the_name_in_a_model_of_any_calling_function():
    def annotate(part: nn.Module) -> None:
        mark(part)

    def whole() -> str:
        model = Model()
        annotate(model.enc[0])
        return message(AlreadyAnnotatedError, lambda: annotate(model.enc[0]))

    assert whole().startswith("mark was already applied to 'enc.0'")


def test_require_callable_refuses_containers_without_a_forward_only():
    class Stack(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Model()
    assert_text(
        message(AnnotationError, lambda: require_callable(model.layers)),
        """ModuleList 'layers' has no forward, so its parameters cannot be gathered around one; annotate its children, or pass policy=""",  # noqa: E501
    )
    assert_text(
        message(
            AnnotationError,
            lambda: require_callable(nn.ModuleDict(), so="there is nothing to run again"),
        ),
        """ModuleDict has no forward, so there is nothing to run again; annotate its children, or pass policy=""",  # noqa: E501
    )
    require_callable(Stack([Block()]))
    require_callable(nn.Sequential())
    lent = nn.ModuleList([Block()])
    lent.forward = model.forward  # type: ignore[method-assign]
    require_callable(lent)


def test_require_callable_names_the_module_inside_a_verb_too():
    @contract()
    def wrap(module):
        require_callable(module)

    model = Model()
    assert message(AnnotationError, lambda: wrap(model.layers)).startswith(
        "ModuleList 'layers' has no forward"
    )


def test_an_error_uses_the_name_in_the_outermost_of_several_models():
    model = Model()
    block = model.layers[1]
    mark(block.up)
    assert message(AlreadyAnnotatedError, lambda: (block, mark(model.layers[1].up))).startswith(
        "mark was already applied to 'layers.1.up'"
    )
