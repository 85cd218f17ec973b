"""Backward comes to a unit at the nodes that its call made, wherever they are in what it
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable.engine.step.visit import Watched, before_gradient, before_node, watch
from composable.torch_private import next_node


@dataclass
class Boxed:
    """An object with a tensor."""

    tensor: Tensor


class Wrapper(Tensor):
    """A subclass without a graph of its own, around a tensor that has one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def _watch(
    call: Callable[[Tensor], Any], given: Tensor, aliases: Tensor | None = None, **options: Any
) -> tuple[Watched, list[str]]:
    """What watching the output of `call` finds, and a list to which entries of backward are
    written.
    """
    entries: list[str] = []
    since = next_node()
    output = call(given)

    def is_alias(tensor: Tensor) -> bool:
        return (
            aliases is not None
            and tensor.untyped_storage().data_ptr() == aliases.untyped_storage().data_ptr()
        )

    return watch(output, since, lambda *_: entries.append("entered"), is_alias, **options), entries


def _given() -> tuple[Tensor, Tensor]:
    x = torch.ones(3, requires_grad=True)
    return x, 2.0 * x


FORMS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "a tensor": lambda y: y,
    "a view": lambda y: y.view(1, 3),
    "a tuple": lambda y: (1, (y,)),
    "a dict": lambda y: {"logits": y},
    "an object": Boxed,
    "a wrapper": Wrapper,
}


def _inside(output: Any) -> Tensor:
    """The tensor in any of the forms."""
    while not isinstance(output, Tensor) or isinstance(output, Wrapper):
        if isinstance(output, tuple):
            output = output[-1]
        elif isinstance(output, dict):
            output = output["logits"]
        else:
            output = output.tensor if isinstance(output, Boxed) else output.inner
    return output


@pytest.mark.parametrize("form", FORMS)
def test_backward_enters_before_it_goes_through_what_the_call_made(form: str) -> None:
    x, given = _given()
    seen: list[str] = []
    weight = nn.Parameter(torch.ones(3))
    weight.register_hook(lambda gradient: seen.extend(entries))
    watched, entries = _watch(lambda y: FORMS[form](y * weight), given)
    assert watched.found
    assert not watched.aliases
    assert watched.opaque == ()
    _inside(watched.output).sum().backward()
    assert entries
    assert seen == entries, "before any gradient of the call's parameters"
    assert x.grad is not None


def test_a_view_that_is_written_to_later_still_leads_to_the_call() -> None:
    _, given = _given()
    watched, entries = _watch(lambda y: (3.0 * y)[:2], given)
    watched.output.mul_(2.0)
    watched.output.sum().backward()
    assert entries == ["entered"]


def test_what_is_handed_on_belongs_to_the_call_that_made_it() -> None:
    _, memory = _given()
    watched, entries = _watch(lambda y: (y.square(), y), memory)
    square, handed = watched.output
    assert handed is memory
    handed.sum().backward(retain_graph=True)
    assert entries == []
    square.sum().backward()
    assert entries == ["entered"]


@pytest.mark.parametrize("form", ["a tensor", "a tuple", "a dict"])
def test_a_call_that_made_nothing_gets_a_node_of_its_own(form: str) -> None:
    """Another rank may have computed something, and all ranks enter the same units in backward."""
    _, given = _given()
    watched, entries = _watch(FORMS[form], given)
    assert watched.found
    assert _inside(watched.output) is not given
    _inside(watched.output).sum().backward()
    assert entries == ["entered"]
    again, _ = _watch(FORMS[form], given, counted=False)
    assert _inside(again.output) is given, "a recomputation returns what it was given"
    assert not again.found


def test_outputs_that_need_no_gradient_are_left_alone() -> None:
    watched, _ = _watch(lambda y: (y.detach(), 1), torch.ones(3, requires_grad=True))
    assert not watched.found
    assert watched.output[0].grad_fn is None


@pytest.mark.parametrize("how", ["itself", "a view"])
def test_an_output_that_aliases_a_parameter_is_reported(how: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    _, given = _given()
    watched, entries = _watch(
        lambda y: (y + weight, weight if how == "itself" else weight[1:]), given, aliases=weight
    )
    assert watched.found
    assert watched.aliases
    watched.output[1].sum().backward()
    assert entries == ["entered"], "the loss may come through it alone"


def test_types_that_cannot_be_looked_into_are_reported_if_there_is_no_tensor_beside_them() -> None:
    _, given = _given()
    watched, _ = _watch(lambda y: [iter([y]), iter([y])], given)
    assert watched.opaque == ("list_iterator",)
    assert not watched.found
    assert _watch(lambda y: [iter([y]), y.square()], given)[0].opaque == ()


# --- callbacks before gradients -------------------------------------------------------------------


def test_the_callback_runs_before_backward_goes_through_an_output() -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    inner = weight * 2
    inner.register_hook(lambda _: log.append("inside"))
    output = inner * 3
    before_gradient(output, lambda *_: log.append("called"))
    (output + 1).sum().backward()
    assert log == ["called", "inside"]


def test_the_callback_runs_for_an_output_that_is_a_leaf() -> None:
    log: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    before_gradient(leaf, lambda *_: log.append("called"))
    (leaf * 2).sum().backward()
    assert log == ["called"]


def test_a_callback_at_a_leaf_is_removed_after_its_backward() -> None:
    """A module may return a parameter in every step."""
    log: list[str] = []
    leaf = nn.Parameter(torch.ones(2))
    for step in range(3):
        before_gradient(leaf, lambda *_, step=step: log.append(f"called in step {step}"))
        (leaf * 2).sum().backward()
        assert not leaf._backward_hooks
    assert log == [f"called in step {step}" for step in range(3)]


VIEWS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "a row": lambda base: base[0],
    "a reshaped whole": lambda base: base.view(-1),
    "a transposed whole": lambda base: base.t(),
    "a view of a view": lambda base: base[1:][:, 0],
}


@pytest.mark.parametrize("written", [False, True], ids=["read", "written to"])
@pytest.mark.parametrize("view", VIEWS)
def test_the_callback_runs_for_an_output_that_is_a_view(view: str, written: bool) -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(3, 2))
    base = weight * 2
    output = VIEWS[view](base)
    before_gradient(output, lambda *_: log.append("called"))
    if written:
        output.add_(1)
    output.square().sum().backward()
    assert log
    assert set(log) == {"called"}
    assert weight.grad is not None


def test_the_callback_runs_under_checkpoint() -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(2))

    def block(x: Tensor) -> Tensor:
        output = x * weight
        before_gradient(output, lambda *_: log.append("called"))
        return output.square()

    checkpoint(block, torch.ones(2), use_reentrant=False).sum().backward()
    assert "called" in log
    assert weight.grad is not None


def test_the_last_callback_at_a_node_is_called_first() -> None:
    log: list[str] = []
    output = nn.Parameter(torch.ones(2)) * 2
    before_node(output.grad_fn, lambda *_: log.append("first"))
    before_gradient(output, lambda *_: log.append("last"))
    output.sum().backward()
    assert log == ["last", "first"]


def test_nodes_of_an_earlier_time_are_left_out() -> None:
    log: list[str] = []
    output = nn.Parameter(torch.ones(2)) * 2
    since = next_node()
    assert not before_gradient(output, lambda *_: log.append("called"), since)
    assert before_gradient(output[0], lambda *_: log.append("called"), since)
    output[0].backward()
    assert not log
