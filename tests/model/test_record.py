"""Records travel with copies of their modules, and copies do not disturb the original."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
)
from composable.model.contract import (
    contract,
    registry,
    remove,
)
from composable.model.record import NotCarried
from tests.model.verbs import (
    COPIERS,
    Block,
    Model,
    Undoing,
    mark,
    mark_undoably,
    message,
    through_pickle,
)


@COPIERS
def test_records_travel_with_the_module_and_are_the_copys_own(duplicate: Callable[[nn.Module], nn.Module]):
    model = Model()
    mark(model.emb, level=3, note=[model.enc])
    mark([model.layers[0], model.layers[1]], level=4)
    twin = duplicate(model)
    record = registry(twin.emb)["mark"]
    assert (record.name, record.place) == ("mark", registry(model.emb)["mark"].place)
    assert record.kwargs["level"] == 3
    assert record.kwargs["note"][0] is twin.enc
    assert record.state is not mark.state(model.emb)
    assert mark.state(twin.emb).modules[0] is twin.emb
    assert registry(twin.layers[0])["mark"] is registry(twin.layers[1])["mark"]
    assert mark.state(twin.layers[0]).modules[1] is twin.layers[1]
    with pytest.raises(AlreadyAnnotatedError):
        mark(twin.emb)


@COPIERS
def test_an_original_is_removed_without_touching_its_copy(duplicate: Callable[[nn.Module], nn.Module]):
    model = mark(Block())
    twin = duplicate(model)
    remove(model, mark)
    assert dict(registry(model)) == {}
    assert list(registry(twin)) == ["mark"]
    assert len(twin._forward_hooks) == 1


def test_removing_from_a_copy_is_refused_where_the_state_cannot_undo():
    model = mark(Block())
    twin = copy.deepcopy(model)
    assert_text(
        message(AnnotationError, lambda: remove(twin, mark)),
        """mark cannot be removed from a copy of a module: its state, a Level, has no undo(module). Remove it before copying, or copy a module that was never annotated""",
    )
    assert list(registry(twin)) == ["mark"]
    assert len(model._forward_hooks) == 1


@COPIERS
def test_removing_from_a_copy_asks_the_states_to_undo(duplicate: Callable[[nn.Module], nn.Module]):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    mark_undoably(model, depth=2)
    twin = duplicate(model)
    remove(twin, mark_undoably)
    assert [list(registry(module)) for module in twin.modules()] == [[], [], []]
    assert all(hasattr(module, "was_undone") for module in twin.modules())
    assert not any(hasattr(module, "was_undone") for module in model.modules())
    assert [list(registry(module)) for module in model.modules()] == [["mark_undoably"]] * 3


def test_what_the_caller_lent_is_shared_by_a_copy_and_described_where_it_cannot_be_pickled():
    lent = threading.Lock()
    block = mark(Block(), note=lent)
    assert registry(copy.deepcopy(block))["mark"].kwargs["note"] is lent
    carried = registry(through_pickle(block))["mark"].kwargs["note"]
    assert carried == NotCarried("lock (cannot pickle '_thread.lock' object)")


def test_a_module_that_was_annotated_alone_is_not_kept_alive_by_its_record():
    @contract()
    def tag(module):
        return module

    block = tag(Block())
    gone = weakref.ref(block)
    del block
    assert gone() is None


def test_where_one_of_the_nested_states_cannot_undo_nothing_is_removed_from_a_copy():
    @contract(state_cls=Undoing)
    def mark_both(module):
        mark(module[0])

    model = nn.Sequential(nn.Linear(2, 2))
    mark_both(model)
    twin = copy.deepcopy(model)
    assert message(AnnotationError, lambda: remove(twin, mark_both)).startswith("mark cannot be removed from a copy")
    assert [list(registry(module)) for module in twin.modules()] == [["mark_both"], ["mark"]]
    assert not hasattr(twin, "was_undone")
