"""Models on a device, with their ties; knows no test."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def placed(module: Module, *where: Any) -> Module:
    """`module.to(*where)`, after which it is tied as before, also where that registers new
    parameters, one for each name.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.to(*where)
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_parameter(attribute, module.get_parameter(first))
    return module
