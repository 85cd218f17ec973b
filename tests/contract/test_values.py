"""Tensors are found in any value and changed in any container."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from composable.contract.values import map_tensors, tensors_in

# --- outputs -------------------------------------------------------------------------------------

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


class Strict(tuple[Any, ...]):
    """A tuple whose constructor takes something else, with an attribute."""

    note: Any

    def __new__(cls, one: Any, other: Any, *, note: Any) -> Strict:
        self = super().__new__(cls, (one, other))
        self.note = note
        return self


class StrictList(list[Any]):
    def __init__(self, one: Any, *, note: Any) -> None:
        super().__init__([one])
        self.note = note


class StrictDict(dict[str, Any]):
    def __init__(self, one: Any, *, note: Any) -> None:
        super().__init__(one=one)
        self.note = note

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("read-only")


class StrictOrderedDict(OrderedDict[str, Any]):
    def __init__(self, one: Any) -> None:
        super().__init__(one=one)


class StrictDefaultDict(defaultdict[str, Any]):
    def __init__(self, one: Any) -> None:
        super().__init__(list, one=one)


@dataclass
class Checked:
    one: Any
    times: int = 0

    def __post_init__(self) -> None:
        self.times += 1


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)

MAXIMA: Final = torch.ones(2, 2).max(dim=0)

OUTPUTS: Final[dict[str, tuple[Any, list[Tensor]]]] = {
    "a tensor": (A, [A]),
    "a tuple": ((A, B), [A, B]),
    "a nested list": ([A, [B, (C,)]], [A, B, C]),
    "a dict": ({"x": A, "y": {"z": B}}, [A, B]),
    "an ordered dict": (OrderedDict(x=A, y=B), [A, B]),
    "a named tuple": (Pair(A, B), [A, B]),
    "a tuple with attributes": (Strict(A, B, note=[C]), [A, B, C]),
    "a list with attributes": (StrictList(A, note=C), [A, C]),
    "a dict with attributes": (StrictDict(A, note=C), [A, C]),
    "a default dict": (defaultdict(list, x=A, y=[B]), [A, B]),
    "a deque": (deque([A, [B]], maxlen=3), [A, B]),
    "a set": ({A}, [A]),
    "a user's list": (UserList([A, B]), [A, B]),
    "a struct sequence": (MAXIMA, list(MAXIMA)),
    "a model output": (CausalLMOutput(logits=A, hidden_states=(B, C)), [A, B, C]),
    "the same tensor twice": ((A, [A], B), [A, B]),
    "a user's mapping": (UserDict({"x": A, "y": [B]}), [A, B]),
    "a dataclass": (Record(A, [B]), [A, B]),
    "a frozen dataclass with slots": (Slotted((A, B)), [A, B]),
    "a plain object": (Plain(A, Plain(B)), [A, B]),
    "an object with slots": (Slots(A, B), [A, B]),
    "an object with slots and attributes": (SlotsAndMore(A, B), [B, A]),
    "an object with private slots": (PrivateSlots(A), [A]),
    "values made on access": ([Lazy(A), Lazy(B), Lazy(C)], [A, B, C]),
    "numbers and text": ((1, "x", None, b"y", 2.0, torch.float32, torch.Size([3]), A), [A]),
    "nothing": (None, []),
    "a module": (nn.Linear(1, 1), []),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_tensors_are_found_in_order_in(kind: str) -> None:
    value, expected = OUTPUTS[kind]
    found = list(tensors_in(value))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_attributes_that_are_no_fields_of_a_dataclass_are_found() -> None:
    record = Record(A)
    record.late = B  # type: ignore[attr-defined]
    assert [id(t) for t in tensors_in(record)] == [id(A), id(B)]


def test_a_value_that_contains_itself_is_searched_once() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    plain = Plain(B)
    plain.values.append(plain)
    assert [id(t) for t in tensors_in([loop, plain])] == [id(A), id(B)]


def test_objects_that_cannot_be_searched_are_reported() -> None:
    opaque: list[Any] = []
    iterator = iter([A])
    assert list(tensors_in((B, iterator), opaque)) == [B]
    assert opaque == [iterator]


def test_the_search_reads_no_property() -> None:
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
    "a tuple with a constructor of its own": (
        Strict(A, 1, note="n"),
        lambda v: [v.note == "n" and v[0].item()],
    ),
    "a tuple with a tensor as an attribute": (Strict(1, 2, note=A), lambda v: v.note.tolist()),
    "a list with a constructor of its own": (
        StrictList(A, note="n"),
        lambda v: [v.note == "n" and v[0].item()],
    ),
    "a dict with a constructor of its own": (
        StrictDict(A, note="n"),
        lambda v: [v.note == "n" and v["one"].item()],
    ),
    "an ordered dict with a constructor of its own": (
        StrictOrderedDict(A),
        lambda v: v["one"].tolist(),
    ),
    "a default dict": (defaultdict(list, x=A), lambda v: [v["new"] == [] and v["x"].item()]),
    "a default dict with a constructor of its own": (
        StrictDefaultDict(A),
        lambda v: [v["new"] == [] and v["one"].item()],
    ),
    "a counter": (Counter(x=A), lambda v: v["x"].tolist()),
    "a deque": (deque([A, 1], maxlen=2), lambda v: [v.maxlen == 2 and v[0].item()]),
    "a set": ({A}, lambda v: next(iter(v)).tolist()),
    "a frozen set": (frozenset([A]), lambda v: next(iter(v)).tolist()),
    "a user's mapping": (UserDict(x=A), lambda v: v["x"].tolist()),
    "a user's list": (UserList([A]), lambda v: v[0].tolist()),
    "a struct sequence": (torch.ones(1, 1).max(dim=0), lambda v: v.values.tolist()),
    "a model output": (
        CausalLMOutput(logits=A),
        lambda v: [v.logits is v["logits"] is v[0] and v.logits.item()],
    ),
    "a checked dataclass": (Checked(A), lambda v: [v.times == 1 and v.one.item()]),
    "a dataclass": (Record(A, 3), lambda v: v.one.tolist()),
    "a frozen dataclass": (Slotted(A), lambda v: v.one.tolist()),
    "a dataclass with fields that it fills itself": (Extended(A), lambda v: v.one.tolist()),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_tensors_are_changed_and_containers_keep_their_type(kind: str) -> None:
    value, read = MAPPED[kind]
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    assert read(changed) == [2.0]
    assert read(value) == [1.0], "the original is unchanged"


@pytest.mark.parametrize("kind", [kind for kind in MAPPED if kind != "a tensor"])
def test_a_container_without_a_changed_tensor_is_returned_as_it_is(kind: str) -> None:
    """A caller may expect changes in a list that it passed."""
    value, _ = MAPPED[kind]
    assert map_tensors(value, lambda tensor: tensor) is value
    assert map_tensors([value, B], lambda tensor: tensor * 2 if tensor is B else tensor)[0] is value


def test_a_tensor_and_a_container_that_occur_twice_are_changed_once() -> None:
    shared = [A]
    calls: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor + 1

    one, other, tensor = map_tensors((shared, shared, A), change)
    assert one is other
    assert tensor is one[0]
    assert len(calls) == 1


def test_a_container_that_contains_itself_is_changed_once() -> None:
    loop: list[Any] = [A]
    loop.append(loop)
    changed = map_tensors(loop, lambda tensor: tensor + 1)
    assert changed[0].tolist() == [2.0]
    assert changed[1] is loop


def test_keys_keep_their_order_in_a_rebuilt_dict() -> None:
    ordered = OrderedDict(x=A, y=B, z=C)
    ordered.move_to_end("x")
    assert list(map_tensors(ordered, lambda tensor: tensor + 1)) == ["y", "z", "x"]


def test_every_tensor_that_is_found_in_a_container_is_changed() -> None:
    """Objects that are no containers are searched, but not rebuilt."""
    for kind, (value, expected) in OUTPUTS.items():
        changed = map_tensors(value, lambda tensor: tensor.clone())
        if changed is not value:
            found = list(tensors_in(changed))
            assert len(found) == len(expected), kind
            assert not {id(tensor) for tensor in found} & {id(tensor) for tensor in expected}, kind
        else:
            assert (
                not expected
                or isinstance(value, (Plain, Slots, PrivateSlots))
                or isinstance(value[0], Lazy)
            ), kind


def test_a_plain_object_is_returned_as_it_is() -> None:
    plain = Plain(A)
    assert map_tensors(plain, lambda tensor: tensor + 1) is plain
