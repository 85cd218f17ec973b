"""Records in copies of annotated modules, by deepcopy and pickling."""

# Messages are compared word for word, each on one line.

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import contract, registry, remove
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
)


@COPIERS
def test_a_copy_has_records_and_states_of_its_own(duplicate: Callable[[nn.Module], nn.Module]):
    model = Model()
    mark(model.emb, level=3, note=[model.enc])
    mark([model.layers[0], model.layers[1]], level=4)
    twin = duplicate(model)
    record = registry(twin.emb)["mark"]
    assert (record.name, record.call_site) == ("mark", registry(model.emb)["mark"].call_site)
    assert record.kwargs["level"] == 3
    assert record.kwargs["note"] == "<list>"
    assert record.state is not mark.state(model.emb)
    assert mark.state(twin.emb).modules[0] is twin.emb
    assert registry(twin.layers[0])["mark"] is registry(twin.layers[1])["mark"]
    assert mark.state(twin.layers[0]).modules[1] is twin.layers[1]
    with pytest.raises(AlreadyAnnotatedError):
        mark(twin.emb)


@COPIERS
def test_removing_from_the_original_does_not_change_its_copy(duplicate: Callable[[nn.Module], nn.Module]):
    model = mark(Block())
    twin = duplicate(model)
    remove(model, mark)
    assert dict(registry(model)) == {}
    assert list(registry(twin)) == ["mark"]
    assert len(twin._forward_hooks) == 1


@COPIERS
def test_removing_from_a_copy_is_refused(duplicate: Callable[[nn.Module], nn.Module]):
    model = mark(Block())
    twin = duplicate(model)
    assert_text(
        message(AnnotationError, lambda: remove(twin, mark)),
        """mark cannot be removed from a copy of a module. Remove it before copying""",
    )
    assert list(registry(twin)) == ["mark"]
    assert len(model._forward_hooks) == 1


@COPIERS
def test_arguments_that_cannot_be_copied_are_named_by_their_type(duplicate: Callable[[nn.Module], nn.Module]):
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
"""


def test_a_record_survives_pickling_into_another_process():
    pickled = pickle.dumps(mark(nn.Linear(2, 2), level=5))
    done = subprocess.run([sys.executable, "-c", LOADS], input=pickled, capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().split() == ["5", "5", "1"]
