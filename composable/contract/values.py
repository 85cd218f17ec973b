"""Tensors in the inputs and outputs of modules: find them in any value, and change them in any
container.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Annotated, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable.checked import Takes
from composable.torch_private import calls_hooks

# `step` of a wrapper around an optimizer, such as accelerate's, may call no hooks of the wrapper.
TorchOptimizer = Annotated[
    Optimizer,
    Takes("an Optimizer (of a wrapper, such as accelerate's, the one inside)", calls_hooks),
]

_NUMBERS: Final = (int, float, complex)
_LEAVES: Final = (str, bytes, *_NUMBERS, type(None), torch.dtype, torch.device, torch.Size)
_NOT_SEARCHED: Final = (*_LEAVES, nn.Module, type, ModuleType)
# The first one that fits is the base whose own methods build, read and fill a subclass without
# calling the subclass's code.
_CONTAINERS: Final = (tuple, list, deque, set, frozenset, OrderedDict, defaultdict, dict)
_PLAIN: Final = (tuple, list, dict, set, frozenset)  # these types themselves have no attributes


def tensors_in(value: Any, opaque: list[Any] | None = None) -> Sequence[Tensor]:
    """Every tensor in `value` once, in order: in containers, mappings, and attributes and slots of
    objects, but not of modules, classes and Python modules. `opaque` receives the objects that
    cannot be searched, such as iterators.
    """
    if isinstance(value, Tensor):
        return (value,)
    found: list[Tensor] = []
    _search(value, found, opaque, {})
    return found


def _search(
    value: Any, found: list[Tensor], opaque: list[Any] | None, seen: dict[int, Any]
) -> None:
    is_tensor = isinstance(value, Tensor)
    if id(value) in seen or (not is_tensor and isinstance(value, _NOT_SEARCHED)):
        return
    # kept alive: values that a mapping makes on access must not reuse an id
    seen[id(value)] = value
    if is_tensor:
        found.append(value)
        return
    attributes = {} if type(value) in _PLAIN else _attributes(value)
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = list(_base_of(value).values(value))
    elif isinstance(value, _CONTAINERS):
        items = list(value)
    elif isinstance(value, Mapping):
        items = list(value.values())
    elif (
        opaque is not None
        and not attributes
        and not hasattr(value, "__dict__")
        and not callable(value)
    ):
        opaque.append(value)
    for item in chain(items, attributes.values()):
        _search(item, found, opaque, seen)


def map_tensors(
    value: Any, change: Callable[[Tensor], Tensor], *, into_objects: bool = False
) -> Any:
    """`value` with every tensor replaced by `change(tensor)`, called once per tensor.

    Containers (subclasses of tuple, list, deque, set and dict, named tuples, `UserDict`, `UserList`
    and dataclasses, with their items and attributes) are rebuilt with the same type, without
    calling their constructors. Other objects are returned as they are, and so are containers in
    which no tensor changes: the caller may keep a reference to them.

    Args:
        into_objects: attributes of other objects in which tensors change are set, in place.
    """
    if isinstance(value, Tensor):
        return change(value)
    return _map(value, change, {}, into_objects)


def _map(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, tuple[Any, Any]], inside: bool
) -> Any:
    is_tensor = isinstance(value, Tensor)
    if not is_tensor and isinstance(value, _LEAVES):
        return value
    known = done.get(id(value))
    if known is not None:
        return known[1]
    if not is_tensor:
        done[id(value)] = value, value  # a container that contains itself keeps the original inside
    result = change(value) if is_tensor else _map_container(value, change, done, inside)
    done[id(value)] = value, result
    return result


def _map_container(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, tuple[Any, Any]], inside: bool
) -> Any:
    kind: Any = type(value)
    # these and dicts are what modules are called with: no attributes to look for
    if kind is tuple or kind is list:
        new = [_map(item, change, done, inside) for item in value]
        return value if all(map(is_, new, value)) else kind(new)
    if kind is dict:
        mapped = {key: _map(item, change, done, inside) for key, item in value.items()}
        return value if all(map(is_, mapped.values(), value.values())) else mapped
    base = _base_of(value)
    if isinstance(value, dict):
        old = list(base.values(value))
    elif base is not object:
        old = list(value)
    elif isinstance(value, (UserDict, UserList)) or (
        is_dataclass(value) and not isinstance(value, _NOT_SEARCHED)
    ):
        old = []
    else:
        if inside and not isinstance(value, _NOT_SEARCHED):
            for name, item in _attributes(value).items():
                if (changed := _map(item, change, done, inside)) is not item:
                    object.__setattr__(value, name, changed)
        return value
    new = [_map(item, change, done, inside) for item in old]
    before = _attributes(value)
    after = {name: _map(item, change, done, inside) for name, item in before.items()}
    if all(map(is_, new, old)) and all(map(is_, after.values(), before.values())):
        return value

    duplicate: Any
    if hasattr(kind, "n_sequence_fields"):
        # torch.return_types are struct sequences, which only their own constructor can build
        duplicate = kind(new)
    elif base in (tuple, frozenset):
        duplicate = base.__new__(kind, new)
    else:
        duplicate = base.__new__(kind)
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                duplicate.default_factory = value.default_factory
            for key, item in zip(base.keys(value), new, strict=True):
                base.__setitem__(duplicate, key, item)
        elif isinstance(value, deque):
            deque.__init__(duplicate, new, value.maxlen)
        elif base is not object:
            base.__init__(duplicate, new)
    for name, item in after.items():
        object.__setattr__(duplicate, name, item)  # the class may be a frozen dataclass
    return duplicate


def _base_of(value: Any) -> Any:
    return next((base for base in _CONTAINERS if isinstance(value, base)), object)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes in `value.__dict__` and in its slots."""
    state: Any = object.__getstate__(value)  # a dict, a pair of dicts, or None
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
