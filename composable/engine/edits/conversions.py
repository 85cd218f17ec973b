"""`Module.to`, `half`, `cpu`, `to_empty`: parameters keep what users have set on them.

torch exchanges the insides of a `DTensor` with those of the one that it becomes, and the Python
attributes go with them: groups of an optimizer that are made by attribute (`no_weight_decay`) would
be others, without a word. It asks each module to convert its own parameters, by a method that is
looked up on the object; so each module that has parameters at rest gets one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from composable.contract.methods import set_method, unbind_method
from composable.tensors.dtensors import gradient_like, is_unreduced
from composable.torch_private import CONVERT, local_of


def keep_attributes(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Let parameters of these modules keep their attributes; returns what undoes it."""
    return [
        partial(unbind_method, module, CONVERT)
        for module in modules
        if set_method(module, CONVERT, _convert)
    ]


def _convert(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    def convert(tensor: Tensor) -> Tensor:
        if is_unreduced(tensor):  # torch would reduce it, on the ranks that have one
            return gradient_like(fn(local_of(tensor)), tensor)  # type: ignore[arg-type]
        return fn(tensor)

    said = [(each, dict(vars(each))) for each in module._parameters.values() if each is not None]
    try:
        converted: nn.Module = getattr(type(module), CONVERT)(module, convert, *args, **kwargs)
    finally:
        for parameter, attributes in said:
            own = vars(parameter)
            own.update({name: each for name, each in attributes.items() if name not in own})
    return converted
