"""The tensors in what modules are called with and return, wherever they are; knows neither modules nor hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

_LEAVES: Final = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def tensors_in(value: Any, opaque: list[Any] | None = None) -> Iterable[Tensor]:
    """Every tensor in `value`, in order: nested containers, mappings, dataclasses and plain objects.

    Args:
        value: what a forward returned.
        opaque: gets the objects that could not be looked into.
    """
    return (value,) if isinstance(value, Tensor) else _search(value, opaque, {})


def _search(value: Any, opaque: list[Any] | None, seen: dict[int, Any]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen[id(value)] = value  # kept alive, so that no other object can get its id
    for item in _inside(value, opaque):
        yield from _search(item, opaque, seen)


def _inside(value: Any, opaque: list[Any] | None) -> list[Any]:
    """What `value` holds directly."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (nn.Module, type)):
        return []
    slots = [name for cls in type(value).__mro__ for name in _slot_names(cls)]
    attributes = getattr(value, "__dict__", None)
    if attributes is None and not slots and not callable(value) and opaque is not None:
        opaque.append(value)
    return [*(attributes or {}).values(), *(getattr(value, name, None) for name in slots)]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in lists, tuples, dicts and dataclasses changed.

    What holds none that changes is returned as it is: whoever handed it over may be waiting for what is put into it.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(map(is_, items, value)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) in (dict, OrderedDict):
        values = [map_tensors(item, change) for item in value.values()]
        return value if all(map(is_, values, value.values())) else type(value)(zip(value, values, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = {name: map_tensors(item, change) for name, item in held.items()}
        return value if all(map(is_, changed.values(), held.values())) else replace(value, **changed)
    return value


def _slot_names(cls: type) -> list[str]:
    """The attributes behind a class's own `__slots__`, as `getattr` knows them."""
    names = cls.__dict__.get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    private = f"_{cls.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


def with_a_node(tensor: Tensor) -> Tensor:
    """The same tensor, made by a node of autograd's that is new."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.layout is torch.strided else tensor
