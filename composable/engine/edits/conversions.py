"""`Module.to`, `half`, `cpu`, `to_empty`: parameters keep the attributes that users have set on
them.

To convert a `DTensor`, torch swaps its contents with those of a new `DTensor`, and the Python
attributes of the old one are lost. If an optimizer's groups are made by attribute
(`no_weight_decay`), they would silently change. torch calls a method of each module to convert the
module's own parameters, and looks this method up on the object. So each module that has at-rest
parameters gets such a method.
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
