"""Verbs that raise leave no trace, alone and nested; `on_undo`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline as assert_text
from torch import nn

from composable.contract.contract import (
    contract,
    on_undo,
    registry,
    remove,
)
from composable.errors import (
    AnnotationError,
)
from tests.contract.verbs import (
    Block,
    Model,
    everything_about,
    mark,
    mark_tree,
    message,
    pass_through,
    this_line,
)


def _register_all_hooks(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_state_dict_post_hook(lambda *_: None)
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    module.register_load_state_dict_pre_hook(lambda *_: None)


def _replace_everything(module: nn.Module) -> None:
    module.enc[1].weight_ih_l0 = nn.Parameter(torch.zeros(16, 4))
    module.emb._parameters = {}
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.layers.append(Block())
    module.flag = True
    del module.layers[0].training


@pytest.mark.parametrize("damage", [_register_all_hooks, _replace_everything])
@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_verb_that_raises_leaves_no_trace_even_without_on_undo(
    damage: Callable[..., None], error: BaseException
):
    failing = True

    @contract()
    def careless(module):
        if failing:
            damage(module)
            raise error

    model = Model()
    kept = model.register_forward_hook(pass_through)
    before = everything_about(model)
    with pytest.raises(type(error)) as caught:
        careless(model)
    assert caught.value is error
    assert everything_about(model) == before
    assert careless.state(model) is None

    failing = False
    careless(model)
    assert list(registry(model)) == ["careless"]
    # The tables are the same objects as before, or the handle could not find its hook.
    kept.remove()
    assert not model._forward_hooks


def test_the_snapshot_covers_every_table_that_a_module_has():
    """What `everything_about` sees of hooks comes from torch itself, so a new kind of hook would be
    noticed.
    """
    module = Model()
    empty = {key for key, value in vars(module).items() if isinstance(value, dict) and not value}
    _register_all_hooks(module)
    filled = {key for key in empty if vars(module)[key]}
    assert len([key for key in filled if key.endswith("hooks")]) == 8
    assert {
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    } <= filled


def test_undo_callbacks_run_in_reverse_before_the_snapshot_is_restored():
    calls: list[str] = []

    @contract()
    def fail(module):
        module.note = "set"
        on_undo(lambda: calls.append(f"first, note {module.note}"))
        on_undo(lambda: calls.append("second"))
        raise RuntimeError

    block = Block()
    with pytest.raises(RuntimeError):
        fail(block)
    assert calls == ["second", "first, note set"]
    assert not hasattr(block, "note")


def test_an_undo_callback_that_raises_adds_a_note_and_the_others_run():
    calls: list[str] = []

    @contract()
    def fail(module):
        module.note = "set"
        on_undo(lambda: calls.append("first"))
        on_undo(lambda: 1 / 0)
        raise KeyError("the cause")

    block = Block()
    with pytest.raises(KeyError, match="the cause") as caught:
        fail(block)
    assert caught.value.__notes__ == [
        "while fail was taken back: ZeroDivisionError: division by zero"
    ]
    assert calls == ["first"]
    assert not hasattr(block, "note")


def test_on_undo_outside_a_verb_is_refused():
    text = message(AnnotationError, lambda: on_undo(print))
    assert_text(
        text,
        """on_undo() was called while no verb is running; call it inside a contract() function""",
    )


def test_a_verb_that_runs_in_another_thread_is_not_running_here():
    inside, checked = threading.Event(), threading.Event()

    @contract()
    def wait(module):
        inside.set()
        assert checked.wait(60)

    thread = threading.Thread(target=wait, args=(Block(),))
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(AnnotationError):
            on_undo(print)
    finally:
        checked.set()
        thread.join()


def test_nested_annotations_have_the_call_site_of_the_outer_call():
    model = Model()
    place = f"{Path(__file__).name}:{this_line() + 1}"
    mark_tree(model)
    assert all(registry(module)["mark_tree"].call_site == place for module in model.modules())
    assert registry(model.layers[1].norm)["mark_tree"].fqn == "layers.1.norm"


def test_a_nested_verb_that_raises_undoes_the_outer_verb_and_finished_siblings():
    model = Model()
    before = everything_about(model)
    with pytest.raises(ArithmeticError, match="norm"):
        mark_tree(model, fail_at="norm")
    assert everything_about(model) == before
    mark_tree(model)
    assert all("mark_tree" in registry(module) for module in model.modules())


def test_a_verb_may_continue_after_a_nested_verb_that_raised():
    @contract()
    def lenient(module):
        mark(module[0])
        with pytest.raises(ArithmeticError):
            mark_tree(module[1], fail_at="up")

    model = nn.Sequential(nn.Linear(2, 2), Block())
    lenient(model)
    assert [list(registry(module)) for module in model] == [["mark"], []]
    assert not model[1].up._forward_hooks


def test_remove_of_an_annotation_removes_the_nested_ones():
    model = Model()
    before = everything_about(model)
    mark_tree(model)
    remove(model, mark_tree)
    assert everything_about(model) == before


def test_remove_keeps_a_submodule_that_was_annotated_again_separately():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mark_tree(model)
    remove(model[0], mark_tree)
    remove(model[1], "mark_tree")
    mark_tree(model[1])
    remove(model, mark_tree)
    assert [list(registry(module)) for module in (model, *model)] == [[], [], ["mark_tree"]]
    assert len(model[1]._forward_hooks) == 1


def test_the_names_of_a_tree_with_cycles_or_modules_shared_on_many_levels_are_compared_once_per_module():  # noqa: E501
    layer: nn.Module = nn.Linear(1, 1)
    for _ in range(40):  # 2 ** 40 paths lead to the innermost module
        layer = nn.Sequential(layer, layer)
    mark(layer)
    loop = nn.Sequential(nn.Linear(1, 1))
    loop.append(loop)
    mark(loop)
    assert mark.state(loop).modules == [loop]


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_pauses_while_a_verb_runs(collects: bool, fails: bool):
    seen = []

    @contract()
    def outer(module):
        mark(module[0])
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("after a verb inside of it")

    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ValueError, match="after a verb") if fails else nullcontext():
            outer(nn.Sequential(nn.Linear(2, 2)))
        assert seen == [False]
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()


def test_verbs_of_two_threads_leave_the_garbage_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
):
    inside, disables = threading.Event(), threading.Event()

    @contract()
    def wait(module):
        inside.set()
        assert disables.wait(60)

    disable, first = gc.disable, threading.Thread(target=wait, args=(Block(),))

    def disable_as_the_first_ends() -> None:
        disables.set()
        first.join(0.1)  # it cannot end, as long as the second one begins
        disable()

    was = gc.isenabled()
    gc.enable()
    try:
        first.start()
        assert inside.wait(60)
        monkeypatch.setattr(gc, "disable", disable_as_the_first_ends)
        mark(Block())
        first.join()
        assert gc.isenabled()
    finally:
        monkeypatch.undo()
        (gc.enable if was else gc.disable)()
