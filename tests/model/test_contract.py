"""The contract: what a verb records, and what it refuses to do twice or next to another verb."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    ClashError,
    NotAnnotatedError,
)
from composable.model.contract import (
    contract,
    on_undo,
    registry,
    remove,
)
from composable.model.record import KEY
from tests.model.verbs import (
    Block,
    Level,
    Model,
    everything_about,
    fully_shard,
    mark,
    mark_tree,
    message,
    replicate,
    this_line,
)


def test_a_verb_returns_what_it_was_given():
    model, pair = Model(), [Block(), Block()]
    assert mark(model) is model
    assert mark(pair) is pair
    assert mark(module=model.emb) is model.emb


def test_the_registry_has_names_arguments_and_places_in_the_order_of_the_calls():
    block = Block()
    replicate(block)
    place = this_line() + 1
    mark(block, level=3)
    assert list(registry(block)) == ["replicate", "mark"]
    record = registry(block)["mark"]
    assert dict(record.kwargs) == {"level": 3}
    assert record.place == f"{Path(__file__).name}:{place}"
    assert record.state is mark.state(block)
    assert_text(repr(record).split(" at ")[0], """<mark(level=3)""")


def test_positional_arguments_are_recorded_by_name():
    @contract()
    def scale(module, factor, *, twice=False):
        return module

    block = Block()
    scale(block, 2, twice=True)
    assert dict(registry(block)["scale"].kwargs) == {"factor": 2, "twice": True}


def test_reading_never_writes():
    block = Block()
    before = everything_about(block)
    assert dict(registry(block)) == {}
    assert mark.state(block) is None
    with pytest.raises(NotAnnotatedError):
        remove(block, mark)
    assert everything_about(block) == before


def test_the_registry_cannot_be_written_to():
    block = mark(Block())
    with pytest.raises(TypeError):
        registry(block)["x"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        registry(block)["mark"].kwargs["level"] = 2  # type: ignore[index]


def test_the_state_can_be_seen_while_the_verb_runs_and_the_record_only_after():
    seen: list[Any] = []

    @contract(state_cls=Level)
    def look(module):
        seen.append((look.state(module), look.state(module[0]), dict(registry(module))))

    model = nn.Sequential(nn.Linear(2, 2))
    look(model)
    assert seen == [(look.state(model), None, {})]
    assert isinstance(look.state(model), Level)
    assert list(registry(model)) == ["look"]


def test_without_a_state_class_the_state_takes_any_attribute():
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
        """mark.state() takes one module, or a list that was annotated as one; these were annotated apart""",
    )
    assert_text(
        message(AnnotationError, lambda: mark.state("emb")),  # type: ignore[arg-type]
        """mark.state() takes a module or a list of modules, and got str""",
    )


def test_nothing_of_it_is_seen_by_torch():
    plain, model = Model(), Model()
    mark(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    assert {key for key in vars(model) if key not in vars(plain)} == {KEY}


def test_a_verb_stays_a_function_that_pickles_and_documents_itself():
    assert inspect.isfunction(mark_tree)
    assert (mark_tree.__name__, mark_tree.__doc__) == (
        "mark_tree",
        "Applies itself to the children, then to the module.",
    )
    assert list(inspect.signature(mark).parameters) == ["module", "level", "note"]
    assert pickle.loads(pickle.dumps(mark)) is mark


def test_a_second_application_says_where_the_first_one_was():
    model = Model()
    place = f"{Path(__file__).name}:{this_line() + 1}"
    fully_shard(model.layers[3])
    text = message(AlreadyAnnotatedError, lambda: fully_shard(model.layers[3]))
    assert_text(
        text.replace(place, "train.py:41"),
        """fully_shard was already applied to 'layers.3' (at train.py:41); to apply it anew, call remove(module, fully_shard) first""",
    )


def test_a_module_that_nobody_holds_by_name_is_called_by_its_class():
    place = f"{Path(__file__).name}:{this_line() + 1}"
    text = message(AlreadyAnnotatedError, lambda: mark(mark(Block())))
    assert_text(
        text.replace(place, "train.py:41"),
        """mark was already applied to Block (at train.py:41); to apply it anew, call remove(module, mark) first""",
    )


def test_a_record_remembers_the_fqn_that_a_policy_knew():
    def annotate() -> nn.Module:
        model = Model()
        mark_tree(model.layers)
        return model.layers[2].up

    up = annotate()
    assert registry(up)["mark_tree"].fqn == "2.up"
    text = message(AlreadyAnnotatedError, lambda: mark_tree(up))
    assert_text(text.split(" (at ")[0], """mark_tree was already applied to '2.up'""")


def test_a_verb_that_is_being_applied_cannot_be_applied_inside_itself():
    @contract()
    def twice(module):
        twice(module)

    text = message(AlreadyAnnotatedError, lambda: twice(Block()))
    assert_text(text.split(" (at ")[0], """twice is being applied to Block""")


def test_one_module_of_a_list_that_is_annotated_already_refuses_the_list():
    model = Model()
    mark(model.enc)
    before = everything_about(model)
    assert "'enc'" in message(AlreadyAnnotatedError, lambda: mark([model.emb, model.enc]))
    assert everything_about(model) == before


def test_clashes_are_refused_with_their_reason_in_either_order():
    model = Model()
    replicate(model.enc)
    assert_text(
        message(ClashError, lambda: fully_shard(model.enc)),
        """'enc' is managed by replicate; a module can be sharded or replicated, not both. Call remove(module, replicate) first""",
    )
    fully_shard(model.emb)
    assert_text(
        message(ClashError, lambda: replicate(model.emb)),
        """'emb' is managed by fully_shard; replicate cannot be applied to the same module""",
    )
    assert list(registry(model.enc)) == ["replicate"]
    assert list(registry(model.emb)) == ["fully_shard"]


def test_remove_gives_back_the_module_as_it_was():
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


def test_removing_from_one_module_of_a_list_removes_from_all():
    model = Model()
    before = everything_about(model)
    mark([model.emb, model.enc])
    remove(model.enc, mark)
    assert everything_about(model) == before
    mark([model.emb, model.enc])
    remove([model.emb, model.enc], mark)
    assert everything_about(model) == before


def test_remove_says_what_is_there_instead():
    model = Model()
    assert_text(message(NotAnnotatedError, lambda: remove(model.emb, mark)), """mark was not applied to 'emb'; nothing was""")
    place = f"{Path(__file__).name}:{this_line() + 1}"
    replicate(model.emb)
    assert_text(
        message(NotAnnotatedError, lambda: remove(model.emb, "mark")).replace(place, "train.py:41"),
        """mark was not applied to 'emb'; what is there: replicate (at train.py:41)""",
    )


def test_remove_inside_a_verb_is_refused():
    @contract()
    def swap(module):
        remove(module, mark)

    block = mark(Block())
    assert_text(
        message(AnnotationError, lambda: swap(block)),
        """remove(..., mark) was called while swap is being applied; it could not be taken back if that failed. Remove first, then annotate""",
    )
    assert list(registry(block)) == ["mark"]


def test_a_removal_that_raises_still_runs_to_its_end():
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
