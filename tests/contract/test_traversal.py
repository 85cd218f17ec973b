"""Annotated modules of a tree in order, their parameters, and changes of the tree.

The verbs here only make records. `test_traversal_of_verbs.py` tests the order with the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from composable import traversal as public
from composable.contract import traversal
from composable.contract.contract import contract
from composable.contract.traversal import (
    TreeWatch,
    get_all_sharded_states,
    get_fully_sharded_modules,
    get_handles,
    get_replicated_states,
    get_root_states,
    get_states,
    managed_parameters,
    names_below,
    registered_parameters,
    walk,
)
from tests.contract.trees import Leaf, names_of, tree


class Unit:
    """What traversal reads of the engine's units."""

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()

    @property
    def handle(self) -> str:
        return f"param groups of {id(self)}"


@contract(state_cls=Unit)
def fully_shard(module: Any) -> None:
    modules = tuple(module) if isinstance(module, list) else (module,)
    unit = fully_shard.state(modules[0])
    assert unit is not None
    unit.modules = modules


@contract(state_cls=Unit)
def replicate(module: Any) -> None:
    pass


def _fully_shard_all(root: nn.Module) -> None:
    for module in root.modules():
        fully_shard(module)


def _mixed() -> Leaf:
    """replicated: a subtree with a fully sharded module in it."""
    root = Leaf(a=Leaf(), replicated=Leaf(inside=Leaf(), other=Leaf()), b=Leaf())
    fully_shard(root.get_submodule("replicated.inside"))
    replicate(root.get_submodule("replicated"))
    return root


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outermost_first", [True, False])
def test_units_are_in_the_order_of_modules_whatever_the_order_of_the_calls(outermost_first: bool) -> None:
    root = tree()
    modules = list(root.modules())
    for module in modules if outermost_first else modules[::-1]:
        fully_shard(module)
    assert get_fully_sharded_modules(root) == modules
    assert names_of(root, modules) == ["", "submod1", "submod2", "submod2.subsubmod"]
    assert [state.modules[0] for state in get_states(root)] == modules
    assert get_handles(root) == [state.handle for state in get_states(root)]


def test_a_part_of_a_model_has_the_units_of_that_part() -> None:
    root = tree()
    _fully_shard_all(root)
    assert get_handles(root.get_submodule("submod2")) == get_handles(root)[2:]


def test_modules_annotated_together_are_one_unit_at_its_first_module() -> None:
    root = Leaf(a=Leaf(), b=Leaf(), c=Leaf())
    together = [root.get_submodule("a"), root.get_submodule("c")]
    fully_shard(together)
    fully_shard(root.get_submodule("b"))
    assert names_of(root, get_fully_sharded_modules(root)) == ["a", "b"]
    assert [list(state.modules) for state in get_states(root)] == [together, [root.get_submodule("b")]]
    assert len(get_handles(root)) == len(get_root_states(root)) == 2


def test_a_module_used_in_two_places_comes_once_at_its_first() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared))
    _fully_shard_all(root)
    assert names_of(root, get_fully_sharded_modules(root)) == ["", "a", "a.one", "b"]


def test_a_model_without_annotations_has_no_units() -> None:
    root = tree()
    assert get_fully_sharded_modules(root) == []
    assert get_states(root) == get_handles(root) == get_root_states(root) == []
    assert get_replicated_states(root) == get_all_sharded_states(root) == []


def test_the_public_module_has_the_same_functions() -> None:
    assert all(getattr(public, name) is getattr(traversal, name) for name in public.__all__)


# --- annotations inside each other ------------------------------------------------------------------------------------


def test_units_in_replicated_subtrees_are_left_out() -> None:
    root = _mixed()
    fully_shard(root.get_submodule("a"))
    fully_shard(root)
    assert names_of(root, get_fully_sharded_modules(root)) == ["", "a"]
    assert len(get_all_sharded_states(root)) == 3
    assert get_replicated_states(root) == [replicate.state(root.get_submodule("replicated"))]


def test_a_replicated_root_is_entered() -> None:
    root = _mixed()
    subtree = root.get_submodule("replicated")
    assert names_of(root, get_fully_sharded_modules(subtree)) == ["replicated.inside"]
    assert get_root_states(root) == []
    assert names_of(root, [state.modules[0] for state in get_root_states(subtree)]) == ["replicated.inside"]


def test_the_root_of_an_annotated_tree_is_its_top() -> None:
    root = tree()
    _fully_shard_all(root)
    assert get_root_states(root) == [fully_shard.state(root)]


def test_a_tree_without_an_annotation_at_the_top_has_the_roots_of_its_parts() -> None:
    top = nn.ModuleDict({"one": tree(), "plain": nn.Sequential(nn.Linear(1, 1), tree()), "none": nn.Linear(1, 1)})
    parts = [top["one"], top.get_submodule("plain.1")]
    for part in parts:
        _fully_shard_all(part)
    assert [state.modules[0] for state in get_root_states(top)] == parts
    assert len(get_states(top)) == 8


# --- walking ----------------------------------------------------------------------------------------------------------


def test_a_walk_names_every_module_once_as_named_modules_does() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared), c=shared)
    root.register_module("nothing", None)
    assert list(walk(root)) == list(root.named_modules())
    assert list(walk(root, "here"))[:2] == [("here", root), ("here.a", root.a)]


def test_a_module_reached_around_a_stop_is_visited() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared))
    replicate(root.get_submodule("a"))
    assert [fqn for fqn, _ in walk(root, stop=("replicate",))] == ["", "b", "b.other"]


def _shared_on_many_levels() -> nn.Module:
    layer: nn.Module = nn.Linear(1, 1)
    for _ in range(40):  # 2 ** 40 paths lead to the innermost module
        layer = nn.Sequential(layer, layer)
    return layer


def _cyclic() -> nn.Module:
    root = nn.Sequential(nn.Linear(1, 1), nn.Sequential())
    root[1].append(root)
    return root


@pytest.mark.parametrize("make", [_shared_on_many_levels, _cyclic])
def test_trees_with_shared_modules_and_cycles_are_walked_once_per_module(make: Any) -> None:
    root = make()
    fully_shard(leaf := next(module for module in root.modules() if isinstance(module, nn.Linear)))
    assert list(names_below(root).values()) == [name for name, _ in root.named_modules()]
    assert get_fully_sharded_modules(root) == [leaf]
    assert [state.modules for state in get_root_states(root)] == [(leaf,)]
    assert len(list(registered_parameters(root))) == 2
    assert not TreeWatch(root).changed()


def test_a_tree_deeper_than_the_stack_is_walked() -> None:
    root = leaf = nn.Sequential()
    for _ in range(3000):
        child = nn.Sequential()
        leaf.append(child)
        leaf = child
    assert len(names_below(root)) == 3001
    assert get_root_states(root) == []


# --- parameters -------------------------------------------------------------------------------------------------------


def test_a_parameter_belongs_to_the_innermost_annotation_around_it() -> None:
    root = tree()
    every = ["weight", "submod1.weight", "submod2.weight", "submod2.subsubmod.weight"]
    assert [managed.fqn for managed in managed_parameters([("", root)])] == every
    fully_shard(root.get_submodule("submod2"))
    assert [managed.fqn for managed in managed_parameters([("", root)])] == every[:2]
    assert [managed.fqn for managed in managed_parameters([("", root)], ignored=[id(root.weight)])] == every[1:2]
    assert [place.fqn for place, _ in registered_parameters(root)] == every
    replicate(root.get_submodule("submod1"))
    assert [place.fqn for place, _ in registered_parameters(root)] == ["weight", *every[2:]]


def test_a_tied_parameter_is_one_with_all_its_registrations() -> None:
    root = Leaf(a=Leaf(), b=Leaf())
    root.get_submodule("b").weight = root.get_submodule("a").weight  # type: ignore[assignment]
    own, tied = managed_parameters([("", root)])
    assert own.fqn == "weight"
    assert tied.fqn == "a.weight"
    assert [place.fqn for place in tied.places] == ["a.weight", "b.weight"]
    assert [place.module for place in tied.places] == [root.a, root.b]


# --- changes ----------------------------------------------------------------------------------------------------------


def test_a_tree_watch_notices_modules_and_parameters_that_come_and_go() -> None:
    root = _mixed()
    assert not TreeWatch(root).changed()

    watch = TreeWatch(root)
    added = Leaf()
    root.a.added = added
    assert watch.changed()
    del root.a.added
    assert not watch.changed()

    root.b = Leaf()
    assert watch.changed()

    watch = TreeWatch(root)
    root.b.extra = nn.Parameter(added.weight.detach())
    assert watch.changed()

    watch = TreeWatch(root)
    root.get_submodule("replicated").extra = Leaf()
    assert watch.changed()
