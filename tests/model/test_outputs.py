"""Tensors are found in whatever a forward returns, and backward says when it goes through one."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable.model.hooks import before_gradient
from composable.model.values import map_tensors, tensors_in

# --- outputs ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Record:
    one: Any
    other: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    one: Any


@dataclass
class Extended:
    one: Any
    hidden: Any = field(init=False, default=None)


class Plain:
    def __init__(self, *values: Any) -> None:
        self.values = list(values)


class Slots:
    __slots__ = ("one", "other")

    def __init__(self, one: Any, other: Any = None) -> None:
        self.one, self.other = one, other


class SlotsAndMore(Slots):
    """Slots inherited from one class, attributes of its own."""

    def __init__(self, one: Any, more: Any) -> None:
        super().__init__(one)
        self.more = more


class PrivateSlots:
    __slots__ = ("__one",)

    def __init__(self, one: Any) -> None:
        self.__one = one


class Lazy(Mapping[str, Any]):
    """Makes its values when they are asked for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, key: str) -> Any:
        return [self.value]

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)

OUTPUTS: Final[dict[str, tuple[Any, list[Tensor]]]] = {
    "a tensor": (A, [A]),
    "a tuple": ((A, B), [A, B]),
    "a nested list": ([A, [B, (C,)]], [A, B, C]),
    "a dict": ({"x": A, "y": {"z": B}}, [A, B]),
    "an ordered dict": (OrderedDict(x=A, y=B), [A, B]),
    "a named tuple": (Pair(A, B), [A, B]),
    "a user's mapping": (UserDict({"x": A, "y": [B]}), [A, B]),
    "a dataclass": (Record(A, [B]), [A, B]),
    "a frozen dataclass with slots": (Slotted((A, B)), [A, B]),
    "a plain object": (Plain(A, Plain(B)), [A, B]),
    "an object with slots": (Slots(A, B), [A, B]),
    "an object with slots and attributes": (SlotsAndMore(A, B), [B, A]),
    "an object with private slots": (PrivateSlots(A), [A]),
    "values made on access": ([Lazy(A), Lazy(B), Lazy(C)], [A, A, B, B, C, C]),
    "numbers and text": ((1, "x", None, b"y", 2.0, torch.float32, torch.Size([3]), A), [A]),
    "nothing": (None, []),
    "a module": (nn.Linear(1, 1), []),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_tensors_are_found_in_order_in(kind: str) -> None:
    value, expected = OUTPUTS[kind]
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_attributes_that_a_dataclass_got_later_are_found_too() -> None:
    record = Record(A)
    record.late = B  # type: ignore[attr-defined]
    assert [id(t) for t in tensors_in(record)] == [id(A), id(B)]


def test_a_value_that_holds_itself_is_searched_once() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    plain = Plain(B)
    plain.values.append(plain)
    assert [id(t) for t in tensors_in([loop, plain])] == [id(A), id(B)]


def test_what_cannot_be_looked_into_is_reported() -> None:
    opaque: list[Any] = []
    iterator = iter([A])
    assert list(tensors_in((B, iterator), opaque)) == [B]
    assert opaque == [iterator]


def test_looking_for_tensors_reads_no_property() -> None:
    class Careful:
        def __init__(self) -> None:
            self.one = A

        @property
        def costly(self) -> Tensor:
            raise AssertionError("was computed")

    assert list(tensors_in(Careful())) == [A]


MAPPED: Final[dict[str, tuple[Any, Callable[[Any], list[float]]]]] = {
    "a tensor": (A, lambda v: v.tolist()),
    "a tuple": ((A, "x"), lambda v: v[0].tolist()),
    "a named tuple": (Pair(A, 1), lambda v: v.one.tolist()),
    "a list": ([A], lambda v: v[0].tolist()),
    "a dict": ({"x": (A,)}, lambda v: v["x"][0].tolist()),
    "an ordered dict": (OrderedDict(x=A), lambda v: v["x"].tolist()),
    "a dataclass": (Record(A, 3), lambda v: v.one.tolist()),
    "a frozen dataclass": (Slotted(A), lambda v: v.one.tolist()),
    "a dataclass with fields that it fills itself": (Extended(A), lambda v: v.one.tolist()),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_tensors_are_changed_and_everything_around_them_is_of_the_same_kind(kind: str) -> None:
    value, read = MAPPED[kind]
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    assert read(changed) == [2.0]
    assert read(value) == [1.0], "the caller's own is as it was"


@pytest.mark.parametrize("kind", [kind for kind in MAPPED if kind != "a tensor"])
def test_what_holds_no_tensor_that_changes_is_the_callers_own(kind: str) -> None:
    """A forward may be waiting for what is put into a list that it was given."""
    value, _ = MAPPED[kind]
    assert map_tensors(value, lambda tensor: tensor) is value
    assert map_tensors([value, B], lambda tensor: tensor * 2 if tensor is B else tensor)[0] is value


def test_what_holds_no_container_is_passed_on_as_it_is() -> None:
    plain = Plain(A)
    assert map_tensors(plain, lambda tensor: tensor + 1) is plain


# --- backward ---------------------------------------------------------------------------------------------------------


def test_backward_is_announced_before_it_goes_through_an_output() -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    inner = weight * 2
    inner.register_hook(lambda _: log.append("inside"))
    output = inner * 3
    before_gradient(output, lambda *_: log.append("announced"))
    (output + 1).sum().backward()
    assert log == ["announced", "inside"]


def test_backward_through_an_output_that_is_a_leaf_is_announced() -> None:
    log: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    before_gradient(leaf, lambda *_: log.append("announced"))
    (leaf * 2).sum().backward()
    assert log == ["announced"]


def test_what_waits_at_a_leaf_goes_with_its_backward() -> None:
    """A module may return a parameter in every step."""
    log: list[str] = []
    leaf = nn.Parameter(torch.ones(2))
    for step in range(3):
        before_gradient(leaf, lambda *_, step=step: log.append(f"announced in step {step}"))
        (leaf * 2).sum().backward()
        assert not leaf._backward_hooks
    assert log == [f"announced in step {step}" for step in range(3)]


VIEWS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "a row": lambda base: base[0],
    "a reshaped whole": lambda base: base.view(-1),
    "a transposed whole": lambda base: base.t(),
    "a view of a view": lambda base: base[1:][:, 0],
}


@pytest.mark.parametrize("written", [False, True], ids=["read", "written to"])
@pytest.mark.parametrize("view", VIEWS)
def test_backward_through_an_output_that_is_a_view_is_announced(view: str, written: bool) -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(3, 2))
    base = weight * 2
    output = VIEWS[view](base)
    before_gradient(output, lambda *_: log.append("announced"))
    if written:
        output.add_(1)
    output.square().sum().backward()
    assert log
    assert set(log) == {"announced"}
    assert weight.grad is not None


def test_an_announcement_survives_recomputation() -> None:
    log: list[str] = []
    weight = nn.Parameter(torch.ones(2))

    def block(x: Tensor) -> Tensor:
        output = x * weight
        before_gradient(output, lambda *_: log.append("announced"))
        return output.square()

    checkpoint(block, torch.ones(2), use_reentrant=False).sum().backward()
    assert "announced" in log
    assert weight.grad is not None
