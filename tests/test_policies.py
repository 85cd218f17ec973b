"""Policies: what they pick, and in which order; what is no policy is refused with words; one of the
user's own works.
"""

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

from composable.errors import PolicyError
from composable.policies import (
    CustomPolicy,
    ModelPolicy,
    ModuleWrapPolicy,
    NamePolicy,
    Policy,
    SizePolicy,
    as_policy,
    repeated_modules,
    select_modules,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + self.attn(x, x, x)[0])


class WideBlock(Block):
    pass


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), WideBlock(), Block()])
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fqns(root: nn.Module, picked: dict[nn.Module, Any]) -> list[str]:
    names = {module: name for name, module in root.named_modules()}
    return [names[module] for module in picked]


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(PolicyError) as caught:
        call()
    return str(caught.value)


# --- what is picked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({Block}),
        ModuleWrapPolicy(Block),
        CustomPolicy(lambda module: isinstance(module, Block)),
        CustomPolicy(lambda module: {} if isinstance(module, Block) else False),
        NamePolicy({"blocks.*": {}}),
        NamePolicy({"blocks.2": None, "blocks.1": True, "blocks.0": {}}),
        SizePolicy(sum(p.numel() for p in Block().parameters())),
    ],
    ids=repr,
)
def test_every_policy_gives_what_enumerating_by_hand_gives_in_the_same_order(policy: Policy):
    model = GPT()
    by_hand: dict[nn.Module, dict[str, Any]] = {
        module: {} for module in model.modules() if isinstance(module, Block)
    }
    picked = policy.select(model)
    assert picked == by_hand
    assert list(picked) == list(by_hand)
    assert fqns(model, picked) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Linear, nn.Embedding, GPT}),
        CustomPolicy(lambda module: isinstance(module, (GPT, nn.Embedding, nn.Linear))),
        NamePolicy({"head": {}, "**.out_proj": {}, "**.mlp.[02]": {}, "emb": {}, "": {}}),
    ],
    ids=repr,
)
def test_the_order_is_that_of_modules_and_the_root_may_be_picked(policy: Policy):
    model = GPT()
    expected = [
        module for module in model.modules() if isinstance(module, (GPT, nn.Embedding, nn.Linear))
    ]
    assert list(policy.select(model)) == expected
    assert expected[0] is model
    assert len(expected) == 1 + 1 + 3 * 3 + 1


def _all_policies(model: nn.Module) -> list[Policy]:
    return [
        ModuleWrapPolicy(nn.Linear),
        CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        NamePolicy({"second": {}, "third": {}}),
        SizePolicy(4),
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_shared_module_is_picked_once_at_its_first_place(index: int):
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(2, 2))
    model.second = nn.Linear(2, 2)
    model.third = model.first[0]
    assert fqns(model, _all_policies(model)[index].select(model)) == ["first.0", "second"]


def test_overrides_come_with_the_modules_and_are_the_callers_to_change():
    model = GPT()
    shared = {"reshard_after_forward": False}
    policy = CustomPolicy(
        lambda module: shared if isinstance(module, WideBlock) else isinstance(module, Block)
    )
    picked = policy.select(model)
    assert list(picked.values()) == [{}, {"reshard_after_forward": False}, {}]
    picked[model.blocks[1]]["more"] = 1
    assert shared == {"reshard_after_forward": False}


def test_a_function_is_asked_once_for_every_module():
    asked: list[nn.Module] = []
    model = GPT()
    CustomPolicy(lambda module: asked.append(module) or True).select(model)
    assert asked == list(model.modules())


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[!1].mlp", ["blocks.0.mlp", "blocks.2.mlp"]),
        ("**.mlp", ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]),
        (
            "blocks.0.**",
            [
                "blocks.0",
                *[
                    f"blocks.0.{n}"
                    for n in ("attn", "attn.out_proj", "mlp", "mlp.0", "mlp.1", "mlp.2")
                ],
            ],
        ),
        ("blocks.**.2", ["blocks.0.mlp.2", "blocks.1.mlp.2", "blocks.2", "blocks.2.mlp.2"]),
        ("h*", ["head"]),
        ("*", ["emb", "blocks", "head"]),
        ("", [""]),
    ],
)
def test_a_glob_matches_within_one_part_and_two_stars_over_any_number(
    pattern: str, expected: list[str]
):
    model = GPT()
    assert fqns(model, NamePolicy([pattern]).select(model)) == expected


def test_overrides_of_several_globs_are_merged_and_the_later_counts():
    model = GPT()
    policy = NamePolicy({"blocks.*": {"a": 1, "b": 1}, "blocks.1": {"b": 2}, "emb": True})
    assert list(policy.select(model).values()) == [
        {},
        {"a": 1, "b": 1},
        {"a": 1, "b": 2},
        {"a": 1, "b": 1},
    ]
    assert NamePolicy({"blocks.1": {"b": 2}, "blocks.*": {"b": 1}}).select(model)[
        model.blocks[1]
    ] == {"b": 1}


# --- sizes --------------------------------------------------------------------------------------


def _sized(**sizes: int) -> nn.Module:
    model = nn.Sequential()
    for name, size in sizes.items():
        model.add_module(name, nn.Linear(size, 1, bias=False))
    return model


def test_sizes_are_counted_from_the_bottom_and_what_is_picked_does_not_count_above():
    model = nn.Sequential(_sized(a=10, b=4), _sized(c=5, d=4), _sized(e=1))
    # a is large enough; b alone is not and neither is [b], so it is left to the root with e; c and
    # d are, together.
    assert fqns(model, SizePolicy(9).select(model)) == ["0.a", "1"]
    assert fqns(model, SizePolicy(5).select(model)) == ["", "0.a", "1.c"]
    assert fqns(model, SizePolicy(24).select(model)) == [""]


def test_a_shared_parameter_counts_once():
    model = _sized(a=6, b=6)
    model.b.weight = model.a.weight
    assert "6 elements in all" in refused(lambda: SizePolicy(7).select(model))
    assert fqns(model, SizePolicy(6).select(model)) == ["a"]


def test_containers_without_a_forward_and_excluded_classes_are_not_picked_but_what_they_hold_counts():
    model = nn.Sequential(nn.ModuleList([_sized(a=6), _sized(b=6)]))
    assert fqns(model, SizePolicy(12).select(model)) == [""]
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 1, bias=False)))
    assert fqns(model, SizePolicy(6).select(model)) == ["0.0"]
    assert "matched 0 modules" in refused(
        lambda: SizePolicy(6, exclude=[nn.Linear, nn.Sequential]).select(model)
    )


def test_attention_is_picked_as_a_whole_since_it_does_not_call_its_projection():
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    size = sum(p.numel() for p in model[0].out_proj.parameters())
    assert fqns(model, SizePolicy(size).select(model)) == ["0"]
    assert fqns(model, SizePolicy(size, force_leaf=()).select(model)) == ["0", "0.out_proj"]


# --- shorthands ---------------------------------------------------------------------------------


def test_shorthands_stand_for_policies():
    def blocks(module: nn.Module) -> bool:
        return isinstance(module, Block)

    policy = SizePolicy(1)
    shorthands = [
        Block,
        {Block},
        frozenset({Block}),
        (Block,),
        [Block, nn.Linear],
        {"blocks.*": {}},
        blocks,
        policy,
    ]
    assert_text(
        "\n".join(repr(as_policy(each)) for each in shorthands).replace(
            blocks.__qualname__, "blocks"
        ),
        """\
ModuleWrapPolicy(Block)
ModuleWrapPolicy(Block)
ModuleWrapPolicy(Block)
ModuleWrapPolicy(Block)
ModuleWrapPolicy(Block, Linear)
NamePolicy(blocks.*)
CustomPolicy(blocks)
SizePolicy(1)""",
    )
    assert as_policy(policy) is policy


def test_a_set_of_classes_reads_the_same_whatever_its_order():
    classes = [nn.Linear, nn.Embedding, nn.LayerNorm, Block]
    texts = {repr(ModuleWrapPolicy(frozenset(classes[i:] + classes[:i]))) for i in range(4)}
    assert texts == {"ModuleWrapPolicy(Block, Linear, LayerNorm, Embedding)"}


# --- what is refused ----------------------------------------------------------------------------


def _model_with_counts() -> nn.Module:
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)]) for _ in range(12)])
    for child in model:
        child.__class__ = (
            type("Block", (nn.Sequential,), {}) if child is model[0] else type(model[0])
        )
    model.append(nn.Linear(1, 1))
    return model


def test_modules_that_repeat_are_named_by_class_count_and_pattern_the_outermost_of_them():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            return x

    model = nn.Module()
    model.encoder = nn.Module()
    model.encoder.layers = nn.ModuleList(Layer() for _ in range(2))
    model.decoder = nn.ModuleList([Layer(), nn.Linear(2, 2), Layer(), nn.Dropout(), nn.Dropout()])
    model.lists = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    assert repeated_modules(model) == [
        "Layer x2 ('encoder.layers.*')",
        "Layer x2 ('decoder.*')",
        "Linear x2 ('lists.*.*')",
    ]


def _answer(answer: Any) -> None:
    model = GPT()
    CustomPolicy(lambda module: answer if module is model.blocks[1].mlp else True).select(model)


def _select(answer: Callable[[nn.Module], Any]) -> None:
    select_modules(Answering(answer), GPT())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: as_policy(None), "policy= takes a Policy, a set of classes, a dict of globs, a function of a module or a model that names its units, and got None"),
        (lambda: as_policy("blocks.*"), "policy= takes a Policy, a set of classes, a dict of globs, a function of a module or a model that names its units, and got the str 'blocks.*'"),
        (lambda: as_policy(Block()), "policy= got Block, which does not say what its units are: it has no _no_split_modules and no _fsdp_plan, as models of transformers have. Pass the class of its layers, policy={Block}"),
        (lambda: as_policy(SizePolicy), "policy= takes classes of modules, and got the class SizePolicy"),
        (lambda: as_policy(int), "policy= takes classes of modules, and got the class int"),
        (lambda: as_policy({"Block"}), "policy= takes classes of modules, and got the str 'Block'; for names of modules, use NamePolicy({'Block': {}})"),
        (lambda: as_policy([Block()]), "policy= takes classes of modules, and got a Block"),
        (lambda: select_modules(set(), nn.ReLU()), "policy matched 0 modules; classes present: ReLU x1"),
        (lambda: select_modules({}, nn.ReLU()), "policy matched 0 modules; classes present: ReLU x1"),
        (lambda: as_policy({Block: {}}), "NamePolicy: patterns must be globs, got the class Block as a key; for overrides by class, use CustomPolicy with a function"),
        (lambda: ModuleWrapPolicy("Block"), "ModuleWrapPolicy takes classes of modules, and got the str 'Block'"),
        (lambda: NamePolicy(3), "NamePolicy: patterns must be a dict of globs, got 3"),
        (lambda: NamePolicy({"a": 3}), "NamePolicy got 3 for 'a'; it takes a dict of overrides, or True"),
        (lambda: NamePolicy({"a": False}), "NamePolicy got False for 'a'; it takes a dict of overrides, or True"),
        (lambda: CustomPolicy(3), "CustomPolicy: decide must be a function of a module, got 3"),
        (lambda: SizePolicy(1, exclude=["Block"]), "exclude= takes classes of modules, and got the str 'Block'; for names of modules, use NamePolicy({'Block': {}})"),
        (lambda: NamePolicy(["Blocks.*"]).select(GPT()), "pattern 'Blocks.*' matched no module; close to it: blocks.2, blocks.1, blocks.0"),
        (lambda: NamePolicy({"emb": {}, "block.*": {}}).select(GPT()), "pattern 'block.*' matched no module; close to it: blocks.2, blocks.1, blocks.0"),
        (lambda: NamePolicy(["decoder"]).select(nn.Sequential(nn.ReLU(), nn.ReLU())), "pattern 'decoder' matched no module; there is: 0, 1"),
        (lambda: SizePolicy(100).select(_sized(a=6, b=6)), "policy matched 0 modules; SizePolicy(100) found none that large, and Sequential has 12 elements in all"),
        (lambda: ModuleWrapPolicy(nn.Conv2d).select(_model_with_counts()), "policy matched 0 modules; classes present: Sequential x1, Block x12, Linear x49; modules that repeat make good units: Block x12 ('*')"),
        (lambda: CustomPolicy(lambda module: False).select(_model_with_counts()), "policy matched 0 modules; classes present: Sequential x1, Block x12, Linear x49; modules that repeat make good units: Block x12 ('*')"),
        (lambda: _answer(None), "the policy's function returned None for Sequential 'blocks.1.mlp'; it must return True, False or a dict of keyword overrides"),
        (lambda: _answer(1), "the policy's function returned 1 for Sequential 'blocks.1.mlp'; it must return True, False or a dict of keyword overrides"),
        (lambda: _answer("yes"), "the policy's function returned the str 'yes' for Sequential 'blocks.1.mlp'; it must return True, False or a dict of keyword overrides"),
        (lambda: _answer(torch.ones(1)), "the policy's function returned a Tensor for Sequential 'blocks.1.mlp'; it must return True, False or a dict of keyword overrides"),
        (lambda: _answer([]), "the policy's function returned an empty list for Sequential 'blocks.1.mlp'; it must return True, False or a dict of keyword overrides"),
        (lambda: _select(lambda root: None), "Answering.select returned None; it must return a dict of modules and overrides"),
        (lambda: _select(lambda root: [root.emb]), "Answering.select returned a list of Embedding; it must return a dict of modules and overrides"),
        (lambda: _select(lambda root: {"emb": {}}), "Answering.select returned the str 'emb', which is no module of the GPT"),
        (lambda: _select(lambda root: {root.emb: None}), "Answering.select returned None for Embedding 'emb', not a dict of overrides"),
        (lambda: _select(lambda root: {Block(): {}}), "Answering.select returned a Block, which is no module of the GPT"),
        (lambda: _select(lambda root: {}), "policy matched 0 modules; classes present: GPT x1, Embedding x1, ModuleList x1, Block x2, MultiheadAttention x3, NonDynamicallyQuantizableLinear x3, Sequential x3, Linear x7, GELU x3, WideBlock x1; modules that repeat make good units: Block x2 ('blocks.*')"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused_with_what_it_is(make: Callable[[], Any], text: str):
    assert refused(make) == text


def test_an_auto_wrap_policy_of_fsdp1_is_refused_with_what_to_use():
    old = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    text = refused(lambda: as_policy(old))
    assert text.startswith(
        "a policy's function takes one argument, the module; this one takes (module: "
    )
    assert text.endswith("For an auto-wrap policy of FSDP1, use ModuleWrapPolicy or SizePolicy")


def test_an_error_of_the_users_function_is_the_users_to_see():
    with pytest.raises(ZeroDivisionError):
        CustomPolicy(lambda module: 1 / 0).select(GPT())


def test_policy_itself_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Policy()  # type: ignore[abstract]


# --- policies of the user's own -----------------------------------------------------------------


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


def test_a_model_that_names_what_is_elsewhere_picks_nothing() -> None:
    model = GPT()
    model._no_split_modules = ["Block"]
    assert fqns(model, ModelPolicy(model).select(model)) == ["blocks.0", "blocks.2"]
    with pytest.raises(PolicyError, match="GPT names Block, and none of them is in the ReLU"):
        select_modules(model, nn.ReLU())


def test_of_a_model_of_transformers_that_names_no_units_the_layers_in_lists_are_units() -> None:
    model = GPT()
    with pytest.raises(PolicyError, match="does not say what its units are"):
        ModelPolicy(model)  # of no model of transformers that is asked for
    model._no_split_modules = None  # type: ignore[assignment]
    assert fqns(model, ModelPolicy(model).select(model)) == ["blocks.0", "blocks.2"]
