"""Annotated modules of a tree in order, the same by hand, by policy and on every rank; their
parameters; changes of the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, replicate
from composable.contract import tree as contract_tree
from composable.contract.tree import (
    REPLICATE,
    SHARD,
    TreeWatch,
    managed_parameters,
    names_below,
    registered_parameters,
    walk,
)
from composable.engine.step.unit import units_below
from composable.traversal import (
    get_fully_sharded_modules,
    get_handles,
    get_root_states,
    get_states,
)
from tests.helpers.world import spmd


class Leaf(nn.Module):
    """A module with one parameter and some children, which all run."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for child in self.children():
            x = child(x)
        return x


def tree() -> Leaf:
    """mod(submod1, submod2(subsubmod))"""
    return Leaf(submod1=Leaf(), submod2=Leaf(subsubmod=Leaf()))


def names_of(root: nn.Module, modules: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(module)] for module in modules]


EXPECTED: Final = ["", "submod1", "submod2", "submod2.subsubmod"]


def _mixed() -> Leaf:
    """replicated: a subtree with a fully sharded module in it."""
    root = Leaf(a=Leaf(), replicated=Leaf(inside=Leaf(), other=Leaf()), b=Leaf())
    fully_shard(root.get_submodule("replicated.inside"))
    replicate(root.get_submodule("replicated"))
    return root


# --- order --------------------------------------------------------------------------------------


def _by_hand(root: nn.Module) -> None:
    for module in reversed(list(root.modules())):
        fully_shard(module)


def _by_hand_in_another_order(root: Leaf) -> None:
    fully_shard(root.get_submodule("submod2.subsubmod"))
    fully_shard(root.get_submodule("submod1"))
    fully_shard(root.get_submodule("submod2"))
    fully_shard(root)


def _by_policy(root: nn.Module) -> None:
    fully_shard(root, policy={Leaf})


ANNOTATE: Final[dict[str, Callable[[Leaf], None]]] = {
    "by hand": _by_hand,
    "by hand in another order": _by_hand_in_another_order,
    "by policy": _by_policy,
}


def _fqns(state: Any) -> list[str]:
    return [param.fqn for param in state.spec.params]


@pytest.mark.parametrize("how", ANNOTATE)
def test_units_are_in_the_order_of_modules_whatever_the_order_of_the_calls(how: str) -> None:
    root = tree()
    ANNOTATE[how](root)
    assert get_fully_sharded_modules(root) == list(root.modules())
    assert names_of(root, [state.modules[0] for state in get_states(root)]) == EXPECTED
    assert [_fqns(state) for state in get_states(root)] == [["weight"]] * 4
    assert get_handles(root) == [state.groups for state in get_states(root)]


def test_units_are_made_from_the_innermost_outwards() -> None:
    """So that the parameters of inner units are known when an outer one is made."""
    made: list[str] = []
    root = tree()
    names = {id(module): name for name, module in root.named_modules()}

    def choose(parameter: nn.Parameter) -> None:
        made.append(
            next(names[id(m)] for m in root.modules() if m._parameters.get("weight") is parameter)
        )

    fully_shard(root, policy={Leaf}, shard_placement_fn=choose)
    assert made == ["submod2.subsubmod", "submod2", "submod1", ""]


def _forward_order(root: Leaf) -> list[str]:
    """The units in the order in which forward gathers them, seen from their parameters."""
    order: list[str] = []
    names = {id(module): name for name, module in root.named_modules()}
    handles = [
        module.register_forward_pre_hook(lambda module, _: order.append(names[id(module)]))
        for module in root.modules()
    ]
    root(torch.ones(4)).sum().backward()
    for handle in handles:
        handle.remove()
    return order


@spmd(ranks=2)
def test_every_rank_has_the_same_units_in_the_same_order() -> None:
    for annotate in ANNOTATE.values():
        root = tree()
        annotate(root)
        assert names_of(root, get_fully_sharded_modules(root)) == EXPECTED
        assert _forward_order(root) == EXPECTED
        assert [_fqns(state) for state in get_states(root)] == [["weight"]] * 4


def test_a_part_of_a_model_has_the_units_of_that_part() -> None:
    root = tree()
    _by_policy(root)
    assert get_handles(root.get_submodule("submod2")) == get_handles(root)[2:]


def test_modules_annotated_together_are_one_unit_at_its_first_module() -> None:
    root = Leaf(a=Leaf(), b=Leaf(), c=Leaf())
    together = [root.get_submodule("a"), root.get_submodule("c")]
    fully_shard(together)
    fully_shard(root.get_submodule("b"))
    assert names_of(root, get_fully_sharded_modules(root)) == ["a", "b"]
    assert [list(state.modules) for state in get_states(root)] == [
        together,
        [root.get_submodule("b")],
    ]
    assert len(get_handles(root)) == len(get_root_states(root)) == 2


def test_a_module_used_in_two_places_comes_once_at_its_first() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared))
    _by_policy(root)
    assert names_of(root, get_fully_sharded_modules(root)) == ["", "a", "a.one", "b"]


def test_a_model_without_annotations_has_no_units() -> None:
    root = tree()
    assert get_fully_sharded_modules(root) == []
    assert get_states(root) == get_handles(root) == get_root_states(root) == []
    assert units_below([root]) == []


# --- annotations inside each other --------------------------------------------------------------


def test_units_in_replicated_subtrees_are_left_out() -> None:
    root = _mixed()
    fully_shard(root.get_submodule("a"))
    fully_shard(root)
    assert names_of(root, get_fully_sharded_modules(root)) == ["", "a"]
    assert [_fqns(state) for state in get_states(root)] == [["weight", "b.weight"], ["weight"]]
    below = units_below([root])
    assert len([unit for unit in below if unit.spec.verb == SHARD]) == 3
    assert [unit for unit in below if unit.spec.verb == REPLICATE] == [
        replicate.state(root.get_submodule("replicated"))
    ]


def test_a_policy_leaves_replicated_subtrees_alone() -> None:
    root = _mixed()
    fully_shard(root, policy={Leaf})
    assert names_of(root, get_fully_sharded_modules(root)) == ["", "a", "b"]


def test_replicate_leaves_fully_sharded_subtrees_alone() -> None:
    root = tree()
    fully_shard(root.get_submodule("submod2"))
    replicate(root)
    unit = replicate.state(root)
    assert unit is not None
    assert _fqns(unit) == ["weight", "submod1.weight"]


def test_a_unit_without_parameters_has_a_handle() -> None:
    root = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    fully_shard(root[0])
    fully_shard(root)
    assert [_fqns(state) for state in get_states(root)] == [["1.weight", "1.bias"], []]
    assert len(get_handles(root)) == 2


def test_a_replicated_root_is_entered() -> None:
    root = _mixed()
    subtree = root.get_submodule("replicated")
    assert names_of(root, get_fully_sharded_modules(subtree)) == ["replicated.inside"]
    assert get_root_states(root) == []
    assert names_of(root, [state.modules[0] for state in get_root_states(subtree)]) == [
        "replicated.inside"
    ]


def test_the_root_of_an_annotated_tree_is_its_top() -> None:
    root = tree()
    _by_policy(root)
    assert get_root_states(root) == [fully_shard.state(root)]


def test_a_tree_without_an_annotation_at_the_top_has_the_roots_of_its_parts() -> None:
    top = nn.ModuleDict(
        {"one": tree(), "plain": nn.Sequential(nn.Linear(1, 1), tree()), "none": nn.Linear(1, 1)}
    )
    parts = [top["one"], top.get_submodule("plain.1")]
    for part in parts:
        _by_policy(part)
    assert [state.modules[0] for state in get_root_states(top)] == parts
    assert len(get_states(top)) == 8


# --- steps --------------------------------------------------------------------------------------


def test_the_tree_is_not_traversed_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree()
    _by_policy(root)
    root(torch.ones(4)).sum().backward()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the tree was traversed in a training step")

    for name in ("named_modules", "modules", "children", "named_parameters"):
        monkeypatch.setattr(nn.Module, name, refuse)
    monkeypatch.setattr(contract_tree, "walk", refuse)
    leaves = (root.weight, root.submod1.weight, root.submod2.weight)  # type: ignore[union-attr]
    monkeypatch.setattr(Leaf, "forward", lambda self, x: _without_children(self, x))
    root(torch.ones(4)).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def _without_children(module: Leaf, x: Tensor) -> Tensor:
    x = x * module.weight
    for child in module._modules.values():
        assert child is not None
        x = child(x)
    return x


def test_all_units_of_a_tree_have_one_root_after_the_first_forward() -> None:
    root = tree()
    _by_policy(root)
    states = get_states(root)
    assert [state.root for state in states] == [None] * 4
    root(torch.ones(4))
    assert len({id(state.root) for state in states}) == 1


# --- walking ------------------------------------------------------------------------------------


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


# --- parameters ---------------------------------------------------------------------------------


def test_a_parameter_belongs_to_the_innermost_annotation_around_it() -> None:
    root = tree()
    every = ["weight", "submod1.weight", "submod2.weight", "submod2.subsubmod.weight"]
    assert [managed.fqn for managed in managed_parameters([root])] == every
    fully_shard(root.get_submodule("submod2"))
    assert [managed.fqn for managed in managed_parameters([root])] == every[:2]
    assert [
        managed.fqn for managed in managed_parameters([root], ignored=[id(root.weight)])
    ] == every[1:2]
    assert [place.fqn for place, _ in registered_parameters(root)] == every
    replicate(root.get_submodule("submod1"))
    assert [place.fqn for place, _ in registered_parameters(root)] == ["weight", *every[2:]]


def test_a_tied_parameter_is_one_with_all_its_registrations() -> None:
    root = Leaf(a=Leaf(), b=Leaf())
    root.get_submodule("b").weight = root.get_submodule("a").weight  # type: ignore[assignment]
    own, tied = managed_parameters([root])
    assert own.fqn == "weight"
    assert tied.fqn == "a.weight"
    assert [place.fqn for place in tied.places] == ["a.weight", "b.weight"]
    assert [place.module for place in tied.places] == [root.a, root.b]


# --- changes ------------------------------------------------------------------------------------


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
