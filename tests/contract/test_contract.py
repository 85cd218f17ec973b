"""`contract`, `registry` and `remove`: records, clashes, states and undoing."""

# Messages are compared word for word, each on one line.

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import _RECORDS as KEY
from composable.contract.contract import (
    contract,
    on_undo,
    registry,
    remove,
)
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ClashError,
    ComposableError,
    NotAnnotatedError,
)
from tests.contract.verbs import (
    Block,
    Level,
    Model,
    everything_about,
    fully_shard,
    mark,
    mark_tree,
    message,
    pass_through,
    replicate,
    this_line,
)


def test_a_verb_returns_its_argument():
    model, pair = Model(), [Block(), Block()]
    assert mark(model) is model
    assert mark(pair) is pair
    assert mark(module=model.emb) is model.emb


def test_the_registry_has_names_arguments_and_call_sites_in_the_order_of_the_calls():
    block = Block()
    replicate(block)
    place = this_line() + 1
    mark(block, level=3)
    assert list(registry(block)) == ["replicate", "mark"]
    record = registry(block)["mark"]
    assert dict(record.kwargs) == {"level": 3}
    assert record.call_site == f"{Path(__file__).name}:{place}"
    assert record.state is mark.state(block)
    assert_text(repr(record).split(" at ")[0], """<mark(level=3)""")


def test_positional_arguments_are_recorded_by_name():
    @contract()
    def scale(module, factor, *, twice=False):
        return module

    block = Block()
    scale(block, 2, twice=True)
    assert dict(registry(block)["scale"].kwargs) == {"factor": 2, "twice": True}


def test_reading_the_registry_and_states_changes_nothing():
    block = Block()
    before = everything_about(block)
    assert dict(registry(block)) == {}
    assert mark.state(block) is None
    with pytest.raises(NotAnnotatedError):
        remove(block, mark)
    assert everything_about(block) == before


def test_the_registry_is_read_only():
    block = mark(Block())
    with pytest.raises(TypeError):
        registry(block)["x"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        registry(block)["mark"].kwargs["level"] = 2  # type: ignore[index]


def test_the_state_exists_while_the_verb_runs_and_the_record_only_after():
    seen: list[Any] = []

    @contract(state_cls=Level)
    def look(module):
        seen.append((look.state(module), look.state(module[0]), dict(registry(module))))

    model = nn.Sequential(nn.Linear(2, 2))
    look(model)
    assert seen == [(look.state(model), None, {})]
    assert isinstance(look.state(model), Level)
    assert list(registry(model)) == ["look"]


def test_the_default_state_takes_any_attribute():
    @contract()
    def tag(module):
        tag.state(module).colour = "red"

    assert tag.state(tag(Block())).colour == "red"


def test_modules_that_are_annotated_as_one_share_one_state():
    model = Model()
    mark([model.emb, model.enc], level=7)
    assert mark.state(model.emb) is mark.state(model.enc)
    assert mark.state(model.emb).value == 7
    assert registry(model.emb)["mark"] is registry(model.enc)["mark"]
    assert dict(registry(model)) == {}


def test_the_state_of_a_list_is_that_of_its_modules():
    model = Model()
    mark([model.emb, model.enc], level=7)
    assert mark.state([model.emb, model.enc]) is mark.state(model.emb)
    assert mark.state([model.enc[0]]) is None
    assert_text(
        message(AnnotationError, lambda: mark.state([model.emb, model.enc[0]])),
        """mark.state() takes one module, or a list that was annotated as one; these were annotated apart""",  # noqa: E501
    )
    assert_text(
        message(AnnotationError, lambda: mark.state("emb")),  # type: ignore[arg-type]
        """mark.state() takes a module or a list of modules, and got str""",
    )


def test_a_record_changes_neither_names_nor_state_dict_nor_repr():
    plain, model = Model(), Model()
    mark(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    assert {key for key in vars(model) if key not in vars(plain)} == {KEY}


def test_a_verb_pickles_and_keeps_its_name_docstring_and_signature():
    assert inspect.isfunction(mark_tree)
    assert (mark_tree.__name__, mark_tree.__doc__) == (
        "mark_tree",
        "Applies itself to the children, then to the module.",
    )
    assert list(inspect.signature(mark).parameters) == ["module", "level", "note"]
    assert pickle.loads(pickle.dumps(mark)) is mark


def test_a_second_application_is_refused_with_the_call_site_of_the_first():
    model = Model()
    place = f"{Path(__file__).name}:{this_line() + 1}"
    fully_shard(model.layers[3])
    text = message(AlreadyAnnotatedError, lambda: fully_shard(model.layers[3]))
    assert_text(
        text.replace(place, "train.py:41"),
        """fully_shard was already applied to 'layers.3' (at train.py:41); to apply it anew, call remove(module, fully_shard) first""",  # noqa: E501
    )


def test_a_module_without_a_known_fqn_is_named_by_its_class():
    place = f"{Path(__file__).name}:{this_line() + 1}"
    text = message(AlreadyAnnotatedError, lambda: mark(mark(Block())))
    assert_text(
        text.replace(place, "train.py:41"),
        """mark was already applied to Block (at train.py:41); to apply it anew, call remove(module, mark) first""",  # noqa: E501
    )


def test_a_record_keeps_the_fqn_below_the_outer_verbs_target():
    def annotate() -> nn.Module:
        model = Model()
        mark_tree(model.layers)
        return model.layers[2].up

    up = annotate()
    assert registry(up)["mark_tree"].fqn == "2.up"
    text = message(AlreadyAnnotatedError, lambda: mark_tree(up))
    assert_text(text.split(" (at ")[0], """mark_tree was already applied to '2.up'""")


def test_a_running_verb_cannot_be_applied_to_the_same_module():
    @contract()
    def twice(module):
        twice(module)

    text = message(AlreadyAnnotatedError, lambda: twice(Block()))
    assert_text(text.split(" (at ")[0], """twice is being applied to Block""")


def test_a_list_with_one_annotated_module_is_refused():
    model = Model()
    mark(model.enc)
    before = everything_about(model)
    assert "'enc'" in message(AlreadyAnnotatedError, lambda: mark([model.emb, model.enc]))
    assert everything_about(model) == before


def test_clashing_verbs_are_refused_in_either_order_with_the_reason():
    model = Model()
    replicate(model.enc)
    assert_text(
        message(ClashError, lambda: fully_shard(model.enc)),
        """'enc' is managed by replicate; a module can be sharded or replicated, not both. Call remove(module, replicate) first""",  # noqa: E501
    )
    fully_shard(model.emb)
    assert_text(
        message(ClashError, lambda: replicate(model.emb)),
        """'emb' is managed by fully_shard; replicate cannot be applied to the same module""",
    )
    assert list(registry(model.enc)) == ["replicate"]
    assert list(registry(model.emb)) == ["fully_shard"]


def test_remove_restores_the_module():
    model = Model()
    before = everything_about(model)
    mark(model.layers[0])
    replicate(model.layers[0])
    assert remove(model.layers[0], mark) is model.layers[0]
    assert list(registry(model.layers[0])) == ["replicate"]
    assert mark.state(model.layers[0]) is None
    remove(model.layers[0], "replicate")
    assert everything_about(model) == before
    mark(model.layers[0])


def test_remove_of_one_module_of_a_list_removes_from_all():
    model = Model()
    before = everything_about(model)
    mark([model.emb, model.enc])
    remove(model.enc, mark)
    assert everything_about(model) == before
    mark([model.emb, model.enc])
    remove([model.emb, model.enc], mark)
    assert everything_about(model) == before


def test_remove_of_a_missing_annotation_names_those_that_exist():
    model = Model()
    assert_text(
        message(NotAnnotatedError, lambda: remove(model.emb, mark)),
        """mark was not applied to 'emb'; nothing was""",
    )
    place = f"{Path(__file__).name}:{this_line() + 1}"
    replicate(model.emb)
    assert_text(
        message(NotAnnotatedError, lambda: remove(model.emb, "mark")).replace(place, "train.py:41"),
        """mark was not applied to 'emb'; what is there: replicate (at train.py:41)""",
    )


def test_remove_without_a_verb_removes_all_annotations_of_and_below_a_module():
    model = Model()
    before = everything_about(model)
    mark([model.emb, model.enc])
    replicate(model.emb)
    mark_tree(model)
    replicate(model)
    assert remove(model) is model
    assert everything_about(model) == before
    assert_text(
        message(NotAnnotatedError, lambda: remove(model)),
        """remove: Model has no annotation, and no module below has one""",
    )


def test_remove_inside_a_verb_is_refused():
    @contract()
    def swap(module):
        remove(module, mark)

    block = mark(Block())
    assert_text(
        message(AnnotationError, lambda: swap(block)),
        """remove() was called while swap is being applied. Remove first, then annotate""",
    )
    assert list(registry(block)) == ["mark"]


def test_remove_runs_all_callbacks_even_if_one_raises():
    calls: list[str] = []

    @contract()
    def brittle(module):
        on_undo(lambda: calls.append("first"))
        on_undo(lambda: 1 / 0)

    block = brittle(Block())
    with pytest.raises(ZeroDivisionError):
        remove(block, brittle)
    assert calls == ["first"]
    assert dict(registry(block)) == {}


class Asked(Level):
    """A state that is asked before its annotation is removed, and may refuse."""

    refused = False
    log: list[Any] = []  # noqa: RUF012

    @staticmethod
    def before_removal(states: list[Asked]) -> None:
        Asked.log.append(states)
        if Asked.refused:
            raise ArithmeticError("not now")


@contract(state_cls=Asked, before_removal=Asked.before_removal)
def ask(module, *, inside=()):
    on_undo(lambda: Asked.log.append("undone"))
    for child in inside:
        ask(child)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(Asked, "log", [])
    return Asked.log


def test_before_removal_gets_all_states_once_and_before_anything_is_undone(
    asked: list[Any],
):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ask(model, inside=list(model))
    states = [ask.state(module) for module in (model, *model)]
    remove(model, ask)
    assert asked == [states, "undone", "undone", "undone"]


def test_before_removal_gets_no_state_of_an_annotation_that_was_removed_separately(
    asked: list[Any],
):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    ask(model, inside=list(model))
    remove(model[0], ask)
    states = [ask.state(module) for module in (model, model[1])]
    asked.clear()
    remove(model, ask)
    assert asked == [states, "undone", "undone"]


def test_nothing_is_undone_if_before_removal_raises(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
):
    block = ask(Block())
    monkeypatch.setattr(Asked, "refused", True)
    with pytest.raises(ArithmeticError):
        remove(block, ask)
    assert asked == [[ask.state(block)]]
    monkeypatch.setattr(Asked, "refused", False)
    remove(block, ask)
    assert dict(registry(block)) == {}


@contract(only_submodules_with="policy")
def mark_below(module, *, policy=None):
    if policy is None:
        on_undo(module.register_forward_hook(pass_through).remove)
        return
    for child in policy:
        mark_below(child)


def test_a_verb_that_annotates_submodules_only_leaves_no_record_on_its_argument():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert mark_below(model, policy=list(model)) is model
    assert [list(registry(module)) for module in (model, *model)] == [
        [],
        ["mark_below"],
        ["mark_below"],
    ]
    remove(model[0], mark_below)
    mark_below(model[0])
    with pytest.raises(NotAnnotatedError):
        remove(model, mark_below)


def test_an_outer_verb_owns_what_a_verb_inside_it_annotated_on_submodules_only():
    @contract()
    def outer(module):
        mark_below(module, policy=list(module))

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    before = everything_about(model)
    outer(model)
    assert [list(registry(module)) for module in (model, *model)] == [
        ["outer"],
        ["mark_below"],
        ["mark_below"],
    ]
    remove(model, outer)
    assert everything_about(model) == before


# --- arguments ----------------------------------------------------------------------------------


def test_an_unknown_argument_raises_a_type_error_that_is_a_composable_error():
    for kind in (TypeError, ValueError, ComposableError):
        with pytest.raises(kind):
            fully_shard(Block(), foo=1)


def test_a_verb_with_var_keywords_takes_any_keyword():
    @contract()
    def note(module, **words):
        return module

    block = Block()
    note(block, a=1, b=2)
    assert dict(registry(block)["note"].kwargs) == {"a": 1, "b": 2}
