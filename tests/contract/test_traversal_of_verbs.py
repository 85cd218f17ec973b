"""The order of units of the real verbs: the same by hand, by policy, and on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, replicate, traversal
from composable.contract import traversal as contract_traversal
from tests.contract.trees import Leaf, names_of, tree
from tests.helpers.world import spmd

EXPECTED: Final = ["", "submod1", "submod2", "submod2.subsubmod"]


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
def test_units_are_in_left_to_right_depth_first_order(how: str) -> None:
    root = tree()
    ANNOTATE[how](root)
    assert names_of(root, traversal.get_fully_sharded_modules(root)) == EXPECTED
    assert names_of(root, [state.modules[0] for state in traversal.get_states(root)]) == EXPECTED
    assert [_fqns(state) for state in traversal.get_states(root)] == [["weight"]] * 4
    assert len(traversal.get_handles(root)) == 4


def test_units_are_made_from_the_innermost_outwards() -> None:
    """So that the parameters of inner units are known when an outer one is made."""
    made: list[str] = []
    root = tree()
    names = {id(module): name for name, module in root.named_modules()}

    def choose(parameter: nn.Parameter) -> None:
        made.append(next(names[id(m)] for m in root.modules() if m._parameters.get("weight") is parameter))

    fully_shard(root, policy={Leaf}, shard_placement_fn=choose)
    assert made == ["submod2.subsubmod", "submod2", "submod1", ""]


def _forward_order(root: Leaf) -> list[str]:
    """The units in the order in which forward gathers them, seen from their parameters."""
    order: list[str] = []
    names = {id(module): name for name, module in root.named_modules()}
    handles = [module.register_forward_pre_hook(lambda module, _: order.append(names[id(module)])) for module in root.modules()]
    root(torch.ones(4)).sum().backward()
    for handle in handles:
        handle.remove()
    return order


@spmd(ranks=2)
def test_every_rank_has_the_same_units_in_the_same_order() -> None:
    for annotate in ANNOTATE.values():
        root = tree()
        annotate(root)
        assert names_of(root, traversal.get_fully_sharded_modules(root)) == EXPECTED
        assert _forward_order(root) == EXPECTED
        assert [_fqns(state) for state in traversal.get_states(root)] == [["weight"]] * 4


def _mixed() -> Leaf:
    """replicated: a subtree with a fully sharded module in it."""
    root = Leaf(a=Leaf(), replicated=Leaf(inside=Leaf(), other=Leaf()), b=Leaf())
    fully_shard(root.get_submodule("replicated.inside"))
    replicate(root.get_submodule("replicated"))
    return root


def test_fully_shard_leaves_replicated_subtrees_alone() -> None:
    root = _mixed()
    fully_shard(root.get_submodule("a"))
    fully_shard(root)
    assert names_of(root, traversal.get_fully_sharded_modules(root)) == ["", "a"]
    assert [_fqns(state) for state in traversal.get_states(root)] == [["weight", "b.weight"], ["weight"]]


def test_a_policy_leaves_replicated_subtrees_alone() -> None:
    root = _mixed()
    fully_shard(root, policy={Leaf})
    assert names_of(root, traversal.get_fully_sharded_modules(root)) == ["", "a", "b"]


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
    assert [_fqns(state) for state in traversal.get_states(root)] == [["1.weight", "1.bias"], []]
    assert len(traversal.get_handles(root)) == 2


def test_the_tree_is_not_traversed_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree()
    _by_policy(root)
    root(torch.ones(4)).sum().backward()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the tree was traversed in a training step")

    for name in ("named_modules", "modules", "children", "named_parameters"):
        monkeypatch.setattr(nn.Module, name, refuse)
    monkeypatch.setattr(contract_traversal, "walk", refuse)
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
    states = traversal.get_states(root)
    assert [state.root for state in states] == [None] * 4
    root(torch.ones(4))
    assert len({id(state.root) for state in states}) == 1
