"""Methods that an annotation sets on a module, beside those of its class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn

from composable.errors import NotAnnotatedError


class Method:
    """The function `function(module, ...)` as the method `name` of one module.

    It holds the module weakly, so that the two form no cycle. A copy belongs to the copy of the
    module, and a pickle names the method.
    """

    __slots__ = ("_function", "_module", "_name")

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module = ref(module)
        self._name = name
        self._function = function

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise NotAnnotatedError(f"{self._name}: the module of this method is gone")
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the module."""
        return self._function(self._owner, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<method {self._name} of a {type(self._owner).__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return Method(copy.deepcopy(self._owner, memo), self._name, self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def bind_method(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Set a method on a module, unless the module or its class has an attribute of that name."""
    own = vars(module)
    taken = (own, own["_parameters"], own["_buffers"], own["_modules"])
    # Not `hasattr(module, name)`: some modules look names up in a child.
    if not hasattr(type(module), name) and not any(name in table for table in taken):
        own[name] = Method(module, name, function)


def set_method(module: nn.Module, name: str, function: Callable[..., Any]) -> bool:
    """Set a method on a module, in place of that of its class. Whether none was set before."""
    if name in vars(module):
        return False
    vars(module)[name] = Method(module, name, function)
    return True


def unbind_method(module: nn.Module, name: str) -> None:
    """Take back what `bind_method` or `set_method` has set. For `on_undo`, by `partial`."""
    if isinstance(vars(module).get(name), Method):
        del vars(module)[name]
