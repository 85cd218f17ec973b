"""A long tensor as several short ones for the time of a step, so that what is gone over again is in the caches; no arithmetic.

Torch's loop goes over a parameter, its gradient and its state some dozen times before it comes to the next one. So it is handed
slices, each with a gradient and state of its own, which are views of the whole's; only numbers, `step` above all, are copies,
since the loop counts on them once per tensor. Element-wise arithmetic is the same, and slices end where no vector is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor

_VECTOR: Final = 64  # elements; kernels compute at most so many at once

States = MutableMapping[Tensor, dict[str, Any]]


class Slices:
    """A contiguous tensor, slice by slice.

    Args:
        longest: bytes of a slice at most.

    Attributes:
        tensors: the slices, which are views.
    """

    def __init__(self, whole: Tensor, longest: int) -> None:
        self._whole = whole
        count = -(-whole.numel() * whole.element_size() // longest)
        self._numel = -(-whole.numel() // count // _VECTOR) * _VECTOR
        self.tensors = self._cut(whole)

    def _cut(self, whole: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = whole.view(-1).split(self._numel)
        return parts

    def take_gradient(self, gradient: Tensor) -> None:
        for tensor, part in zip(self.tensors, self._cut(gradient), strict=True):
            tensor.grad = part

    def spread(self, states: States) -> None:
        """The whole's state becomes that of the slices."""
        whole = states.pop(self._whole, None)
        if whole is None:
            return
        for tensor in self.tensors:
            states[tensor] = {}
        for key, value in whole.items():
            for tensor, part in zip(self.tensors, self._parts(value), strict=True):
                states[tensor][key] = part

    def _parts(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, Tensor):
            return (value,) * len(self.tensors)
        if value.shape == self._whole.shape:
            return self._cut(value)
        return (value, *[value.clone() for _ in self.tensors[1:]])  # the first one's numbers are the whole's own

    def collect(self, states: States, known: Mapping[str, Any]) -> None:
        """What the slices' state has become is the whole's: the `known` tensors, where these were only written to."""
        each = [states.pop(tensor, {}) for tensor in self.tensors]
        if not each[0]:
            return
        states[self._whole] = whole = {}
        for key, value in each[0].items():
            if not isinstance(value, Tensor) or value.shape != self.tensors[0].shape:
                whole[key] = value
            elif all(key in state for state in each):
                whole[key] = self._joined([state[key] for state in each], known.get(key))

    def _joined(self, parts: list[Tensor], known: object) -> Tensor:
        if isinstance(known, Tensor) and known.shape == self._whole.shape:
            places = self._cut(known)
            if all(part.data_ptr() == place.data_ptr() for part, place in zip(parts, places, strict=True)):
                return known
        return torch.cat(parts).view(self._whole.shape)
