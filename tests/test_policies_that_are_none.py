"""What is no policy, or answers what is no answer, is refused with words; one of the user's own works."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from composable.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    NamePolicy,
    Policy,
    SizePolicy,
    as_policy,
    select_modules,
)
from tests.helpers.gpt import GPT, Block, WideBlock, fqns, refused

# --- what is refused --------------------------------------------------------------------------------------------------


def _model_with_counts() -> nn.Module:
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)]) for _ in range(12)])
    for child in model:
        child.__class__ = type("Block", (nn.Sequential,), {}) if child is model[0] else type(model[0])
    model.append(nn.Linear(1, 1))
    return model


@pytest.mark.parametrize(
    "policy", [ModuleWrapPolicy(nn.Conv2d), CustomPolicy(lambda module: False)], ids=["classes", "function"]
)
def test_a_policy_that_matches_nothing_lists_the_classes_that_are_there(policy: Policy):
    model = _model_with_counts()
    assert_text(
        refused(lambda: policy.select(model)),
        """policy matched 0 modules; classes present: Sequential x1, Block x12, Linear x49""",
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: as_policy(None), "policy= takes a Policy, a set of classes, a dict of globs or a function of a module, and got None"),
        (lambda: as_policy("blocks.*"), "policy= takes a Policy, a set of classes, a dict of globs or a function of a module, and got the str 'blocks.*'"),
        (lambda: as_policy(Block()), "policy= takes a Policy, a set of classes, a dict of globs or a function of a module, and got a Block"),
        (lambda: as_policy(SizePolicy), "policy= got the class SizePolicy; make one: SizePolicy(...)"),
        (lambda: as_policy(int), "ModuleWrapPolicy takes classes of modules, and got the class int"),
        (lambda: as_policy({"Block"}), "ModuleWrapPolicy takes classes of modules, and got the str 'Block'; for names of modules, use NamePolicy({'Block': {}})"),
        (lambda: as_policy([Block()]), "ModuleWrapPolicy takes classes of modules, and got a Block"),
        (lambda: select_modules(set(), nn.ReLU()), "policy matched 0 modules; classes present: ReLU x1"),
        (lambda: select_modules({}, nn.ReLU()), "policy matched 0 modules; classes present: ReLU x1"),
        (lambda: as_policy({Block: {}}), "NamePolicy takes globs, and got the class Block as a key; for overrides by class, use CustomPolicy with a function"),
        (lambda: ModuleWrapPolicy("Block"), "ModuleWrapPolicy takes classes of modules, and got the str 'Block'"),
        (lambda: NamePolicy(3), "NamePolicy takes a dict of globs, and got 3"),
        (lambda: NamePolicy({"a": 3}), "NamePolicy got 3 for 'a'; it takes a dict of overrides, or True"),
        (lambda: NamePolicy({"a": False}), "NamePolicy got False for 'a'; it takes a dict of overrides, or True"),
        (lambda: CustomPolicy(3), "CustomPolicy takes a function of a module, and got int"),
        (lambda: SizePolicy(0), "SizePolicy takes a number of elements of at least 1, and got 0"),
        (lambda: SizePolicy("1M"), "SizePolicy takes a number of elements of at least 1, and got the str '1M'"),
        (lambda: SizePolicy(True), "SizePolicy takes a number of elements of at least 1, and got True"),
        (lambda: SizePolicy(1, exclude=["Block"]), "exclude= takes classes of modules, and got the str 'Block'; for names of modules, use NamePolicy({'Block': {}})"),
        (lambda: SizePolicy(1, force_leaf=nn.ReLU()), "force_leaf= takes classes of modules, and got a ReLU"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused_with_what_it_is(make: Callable[[], Any], text: str):
    assert refused(make) == text


def test_an_auto_wrap_policy_of_fsdp1_is_refused_with_what_to_use():
    old = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    text = refused(lambda: as_policy(old))
    assert text.startswith("a policy's function takes one argument, the module; this one takes (module: ")
    assert text.endswith("For an auto-wrap policy of FSDP1, use ModuleWrapPolicy or SizePolicy")


@pytest.mark.parametrize(
    ("answer", "what"),
    [(None, "None"), (1, "1"), ("yes", "the str 'yes'"), (torch.ones(1), "a Tensor"), ([], "a list")],
)
def test_an_answer_that_is_none_is_refused_with_the_name_of_the_module(answer: Any, what: str):
    model = GPT()
    text = refused(lambda: CustomPolicy(lambda module: answer if module is model.blocks[1].mlp else True).select(model))
    assert text == (
        f"the policy's function returned {what} for Sequential 'blocks.1.mlp'; "
        "it must return True, False or a dict of keyword overrides"
    )


def test_an_error_of_the_users_function_is_the_users_to_see():
    with pytest.raises(ZeroDivisionError):
        CustomPolicy(lambda module: 1 / 0).select(GPT())


def test_policy_itself_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Policy()  # type: ignore[abstract]


# --- policies of the user's own ---------------------------------------------------------------------------------------


class Answering(Policy):
    """Answers what the test wants."""

    def __init__(self, answer: Callable[[nn.Module], Any]) -> None:
        self.answer = answer

    def select(self, root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
        return self.answer(root)


def test_a_policy_of_ones_own_works_and_its_answer_is_put_in_order():
    model = GPT()
    policy = Answering(lambda root: {root.head: {"a": 1}, root.emb: {}})
    picked = select_modules(policy, model)
    assert list(picked.items()) == [(model.emb, {}), (model.head, {"a": 1})]


def test_select_modules_takes_shorthands():
    model = GPT()
    assert fqns(model, select_modules({WideBlock}, model)) == ["blocks.1"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda root: None, "Answering.select returned None; it must return a dict of modules and overrides"),
        (lambda root: [root.emb], "Answering.select returned a list; it must return a dict of modules and overrides"),
        (lambda root: {"emb": {}}, "Answering.select returned the str 'emb', which is no module of the GPT"),
        (lambda root: {root.emb: None}, "Answering.select returned None for Embedding 'emb', not a dict of overrides"),
        (lambda root: {Block(): {}}, "Answering.select returned a Block, which is no module of the GPT"),
        (lambda root: {}, "policy matched 0 modules; classes present: GPT x1, Embedding x1, ModuleList x1, Block x2, MultiheadAttention x3, NonDynamicallyQuantizableLinear x3, Sequential x3, Linear x7, GELU x3, WideBlock x1"),
    ],
)  # fmt: skip
def test_an_answer_of_a_policy_of_ones_own_is_checked(answer: Callable[[nn.Module], Any], text: str):
    model = GPT()
    assert refused(lambda: select_modules(Answering(answer), model)) == text
