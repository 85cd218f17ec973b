"""Records in copies of annotated modules, by deepcopy and pickling."""

# Messages are compared word for word, each on one line.

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import contract, drop_attribute, on_undo, registry, remove
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
)
from tests.contract.verbs import (
    COPIERS,
    Block,
    Model,
    mark,
    message,
    through_pickle,
)


@COPIERS
def test_a_copy_has_records_and_states_of_its_own(duplicate: Callable[[nn.Module], nn.Module]):
    model = Model()
    mark(model.emb, level=3, note=[model.enc])
    mark([model.layers[0], model.layers[1]], level=4)
    clone = duplicate(model)
    record = registry(clone.emb)["mark"]
    assert (record.name, record.call_site) == ("mark", registry(model.emb)["mark"].call_site)
    assert record.kwargs["level"] == 3
    assert record.kwargs["note"] == "<list>"
    assert record.state is not mark.state(model.emb)
    assert mark.state(clone.emb).modules[0] is clone.emb
    assert registry(clone.layers[0])["mark"] is registry(clone.layers[1])["mark"]
    assert mark.state(clone.layers[0]).modules[1] is clone.layers[1]
    with pytest.raises(AlreadyAnnotatedError):
        mark(clone.emb)


@COPIERS
def test_removing_from_the_original_does_not_change_its_copy(
    duplicate: Callable[[nn.Module], nn.Module],
):
    model = mark(Block())
    clone = duplicate(model)
    remove(model, mark)
    assert dict(registry(model)) == {}
    assert list(registry(clone)) == ["mark"]
    assert len(clone._forward_hooks) == 1


def test_a_copy_is_removed_by_copies_of_bound_methods_and_partials():
    @contract()
    def tag(module):
        module.tagged = True
        on_undo(partial(drop_attribute, module, "tagged"))
        mark(module[0], level=2)

    model = nn.Sequential(nn.Linear(2, 2))
    tag(model)
    clone = copy.deepcopy(copy.deepcopy(model))
    remove(clone, tag)
    assert not hasattr(clone, "tagged")
    assert not clone[0]._forward_hooks
    assert not registry(clone[0])
    assert model.tagged
    assert len(model[0]._forward_hooks) == 1
    assert [*registry(model[0])] == ["mark"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_copy_is_not_removed_by_functions_that_know_the_original(inside: bool):
    @contract()
    def tag(module):
        on_undo(lambda: setattr(module, "untagged", True))

    @contract()
    def around(module):
        tag(module)

    model = (around if inside else tag)(nn.Linear(2, 2))
    clone = copy.deepcopy(model)
    with pytest.raises(
        AnnotationError,
        match=r"^(tag|around) cannot be removed from a copy of a module\. Remove it before copying",
    ):
        remove(clone, around if inside else tag)
    assert not hasattr(model, "untagged")


def test_removing_from_a_pickled_copy_is_refused():
    model = mark(Block())
    clone = through_pickle(model)
    assert_text(
        message(AnnotationError, lambda: remove(clone, mark)),
        """mark cannot be removed from a copy of a module. Remove it before copying""",
    )
    assert list(registry(clone)) == ["mark"]
    assert len(model._forward_hooks) == 1


@COPIERS
def test_arguments_that_cannot_be_copied_are_named_by_their_type(
    duplicate: Callable[[nn.Module], nn.Module],
):
    block = mark(Block(), note=threading.Lock())
    assert registry(duplicate(block))["mark"].kwargs["note"] == "<lock>"


def test_a_module_and_its_record_form_no_reference_cycle():
    @contract()
    def tag(module):
        return module

    block = tag(Block())
    gone = weakref.ref(block)
    del block
    assert gone() is None


LOADS = """
import pickle, sys
from composable.contract.contract import registry
model = pickle.loads(sys.stdin.buffer.read())
print(registry(model)["mark"].kwargs["level"], registry(model)["mark"].state.value, len(model._forward_hooks))
"""  # noqa: E501


def test_a_record_survives_pickling_into_another_process():
    pickled = pickle.dumps(mark(nn.Linear(2, 2), level=5))
    done = subprocess.run(
        [sys.executable, "-c", LOADS], input=pickled, capture_output=True, check=True, timeout=120
    )
    assert done.stdout.decode().split() == ["5", "5", "1"]
