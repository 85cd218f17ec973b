"""Who is fully sharded, in which order, and who owns which parameter; the same by hand and by policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, replicate, traversal
from composable.model import traversal as rooms
from composable.model.traversal import managed_parameters, walk
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


def _tree() -> Leaf:
    """mod(submod1, submod2(subsubmod))"""
    return Leaf(submod1=Leaf(), submod2=Leaf(subsubmod=Leaf()))


def _names(root: nn.Module, modules: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(module)] for module in modules]


def _fqns(handle: Any) -> tuple[str, ...]:
    return tuple(param.info.fqn for param in handle.parameters.params)


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


@pytest.mark.parametrize("how", ANNOTATE)
def test_handles_are_in_left_to_right_depth_first_order(how: str) -> None:
    root = _tree()
    ANNOTATE[how](root)
    expected = ["", "submod1", "submod2", "submod2.subsubmod"]
    assert _names(root, list(root.modules())) == expected
    assert _names(root, traversal.get_fully_sharded_modules(root)) == expected
    assert _names(root, [state.modules[0] for state in traversal.get_states(root)]) == expected
    assert traversal.get_handles(root) == [state.handle for state in traversal.get_states(root)]
    assert [_fqns(handle) for handle in traversal.get_handles(root)] == [("weight",)] * 4


def test_a_part_of_a_model_has_the_handles_of_that_part() -> None:
    root = _tree()
    _by_policy(root)
    assert traversal.get_handles(root.get_submodule("submod2")) == traversal.get_handles(root)[2:]


def test_units_are_made_from_the_innermost_outwards() -> None:
    """So that an outer unit knows what the inner ones left over."""
    made: list[str] = []
    root = _tree()
    names = {id(module): name for name, module in root.named_modules()}

    def choose(parameter: nn.Parameter) -> None:
        made.append(next(names[id(m)] for m in root.modules() if m._parameters.get("weight") is parameter))

    fully_shard(root, policy={Leaf}, shard_placement_fn=choose)
    assert made == ["submod2.subsubmod", "submod2", "submod1", ""]


def _forward_order(root: Leaf) -> list[str]:
    for _ in range(2):
        root(torch.ones(4)).sum().backward()
    state = traversal.get_root_states(root)[0]
    return [state.root.handles[index].fqn for index in state.root.forward.order.recorded]


def test_unshards_come_in_the_same_order_by_hand_and_by_policy() -> None:
    orders = []
    for annotate in ANNOTATE.values():
        root = _tree()
        annotate(root)
        orders.append(_forward_order(root))
    assert orders == [["", "submod1", "submod2", "submod2.subsubmod"]] * 3


@spmd(ranks=2)
def test_every_rank_has_the_same_handles_in_the_same_order() -> None:
    for annotate in ANNOTATE.values():
        root = _tree()
        annotate(root)
        handles = traversal.get_handles(root)
        names = [("", "submod1", "submod2", "submod2.subsubmod").index(name) for name in _forward_order(root)]
        assert handles[0].mesh_info.all.all_gather_ints(names, label="test") == [names, names]


# --- annotations inside each other ------------------------------------------------------------------------------------


def _mixed() -> Leaf:
    """replicated: a subtree with a fully sharded module in it."""
    root = Leaf(a=Leaf(), replicated=Leaf(inside=Leaf(), other=Leaf()), b=Leaf())
    fully_shard(root.get_submodule("replicated.inside"))
    replicate(root.get_submodule("replicated"))
    return root


def test_replicated_subtrees_are_left_alone_with_all_that_is_in_them() -> None:
    root = _mixed()
    fully_shard(root.get_submodule("a"))
    fully_shard(root)
    assert _names(root, traversal.get_fully_sharded_modules(root)) == ["", "a"]
    assert [_fqns(handle) for handle in traversal.get_handles(root)] == [("weight", "b.weight"), ("weight",)]


def test_a_policy_leaves_replicated_subtrees_alone_too() -> None:
    root = _mixed()
    fully_shard(root, policy={Leaf})
    assert _names(root, traversal.get_fully_sharded_modules(root)) == ["", "a", "b"]


def test_a_replicated_module_that_is_asked_about_itself_is_entered() -> None:
    root = _mixed()
    subtree = root.get_submodule("replicated")
    assert _names(root, traversal.get_fully_sharded_modules(subtree)) == ["replicated.inside"]


def test_replicate_leaves_fully_sharded_subtrees_alone() -> None:
    root = _tree()
    fully_shard(root.get_submodule("submod2"))
    replicate(root)
    unit = replicate.state(root)
    assert unit is not None
    assert list(unit.parameters.names) == ["weight", "submod1.weight"]


# --- roots ------------------------------------------------------------------------------------------------------------


def test_the_root_of_an_annotated_tree_is_its_top() -> None:
    root = _tree()
    _by_policy(root)
    assert traversal.get_root_states(root) == [fully_shard.state(root)]


def test_a_tree_without_an_annotation_at_the_top_has_the_roots_of_its_parts() -> None:
    top = nn.ModuleDict({"one": _tree(), "plain": nn.Sequential(nn.Linear(1, 1), _tree()), "none": nn.Linear(1, 1)})
    for module in (top["one"], top["plain"][1]):  # type: ignore[index]
        _by_policy(module)
    assert [state.modules[0] for state in traversal.get_root_states(top)] == [top["one"], top["plain"][1]]  # type: ignore[index]
    assert len(traversal.get_states(top)) == 8


def test_roots_inside_replicated_subtrees_are_not_the_trees() -> None:
    root = _mixed()
    assert traversal.get_root_states(root) == []
    subtree = root.get_submodule("replicated")
    assert _names(root, [s.modules[0] for s in traversal.get_root_states(subtree)]) == ["replicated.inside"]


def test_a_model_without_annotations_has_none_of_all_this() -> None:
    root = _tree()
    assert traversal.get_fully_sharded_modules(root) == []
    assert traversal.get_states(root) == []
    assert traversal.get_handles(root) == []
    assert traversal.get_root_states(root) == []


def test_modules_annotated_together_are_one_unit_that_comes_once() -> None:
    root = Leaf(a=Leaf(), b=Leaf(), c=Leaf())
    together = [root.get_submodule("a"), root.get_submodule("c")]
    fully_shard(together)
    fully_shard(root.get_submodule("b"))
    assert _names(root, traversal.get_fully_sharded_modules(root)) == ["a", "b"], "the first of a unit stands for it"
    assert [list(state.modules) for state in traversal.get_states(root)] == [together, [root.get_submodule("b")]]
    assert len(traversal.get_handles(root)) == len(traversal.get_root_states(root)) == 2


def test_a_module_used_in_two_places_comes_once_at_its_first() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared))
    fully_shard(root, policy={Leaf})
    assert _names(root, traversal.get_fully_sharded_modules(root)) == ["", "a", "a.one", "b"]


def test_a_unit_without_parameters_has_a_handle_as_well() -> None:
    root = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    fully_shard(root[0])
    fully_shard(root)
    assert [_fqns(handle) for handle in traversal.get_handles(root)] == [("1.weight", "1.bias"), ()]


# --- cached on the root -----------------------------------------------------------------------------------------------


def test_the_tree_is_not_traversed_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    root = _tree()
    _by_policy(root)
    root(torch.ones(4)).sum().backward()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the tree was traversed in a training step")

    monkeypatch.setattr(nn.Module, "named_modules", refuse)
    monkeypatch.setattr(nn.Module, "modules", refuse)
    monkeypatch.setattr(nn.Module, "children", refuse)
    monkeypatch.setattr(nn.Module, "named_parameters", refuse)
    monkeypatch.setattr(rooms, "walk", refuse)
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


def test_what_only_a_root_has_lives_on_the_root() -> None:
    root = _tree()
    _by_policy(root)
    states = traversal.get_states(root)
    assert [state.root for state in states] == [None] * 4, "nobody is a root before the first forward"
    root(torch.ones(4))
    assert len({id(state.root) for state in states}) == 1
    assert states[0].root.handles == tuple(traversal.get_handles(root))


# --- parameters -------------------------------------------------------------------------------------------------------


def test_a_walk_names_every_module_once_in_the_order_of_modules() -> None:
    shared = Leaf()
    root = Leaf(a=Leaf(one=shared), b=Leaf(other=shared))
    root.register_module("nothing", None)
    assert [module for _, module in walk(root)] == list(root.modules())
    assert list(walk(root, "here"))[:2] == [("here", root), ("here.a", root.a)]


def test_parameters_belong_to_the_innermost_annotation_around_them() -> None:
    root = _tree()
    assert [m.fqn for m in managed_parameters([("", root)])] == [
        "weight",
        "submod1.weight",
        "submod2.weight",
        "submod2.subsubmod.weight",
    ]
    fully_shard(root.get_submodule("submod2"))
    assert [m.fqn for m in managed_parameters([("", root)])] == ["weight", "submod1.weight"]
    assert [m.fqn for m in managed_parameters([("", root)], ignored=[id(root.weight)])] == ["submod1.weight"]


def test_a_tied_parameter_is_one_with_all_its_places() -> None:
    root = Leaf(a=Leaf(), b=Leaf())
    root.get_submodule("b").weight = root.get_submodule("a").weight  # type: ignore[assignment]
    (own, tied) = managed_parameters([("", root)])
    assert own.fqn == "weight"
    assert tied.fqn == "a.weight"
    assert [place.fqn for place in tied.places] == ["a.weight", "b.weight"]
    assert [place.module for place in tied.places] == [root.a, root.b]
