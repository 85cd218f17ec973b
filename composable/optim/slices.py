"""A long tensor as several short ones for the time of a step, so that what is gone over again is in the caches; no arithmetic.

Torch's loop goes over a parameter, its gradient and its state some dozen times before it comes to the next one. So it is handed
slices, each with a gradient and state of its own, which are views of the whole's; only numbers, `step` above all, are copies,
since the loop counts on them once per tensor. No bit depends on it: element-wise arithmetic in float32 and float64 rounds what
fills a vector and what is left over alike.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor

_GRAIN: Final = 64  # elements: slices start at whole cache lines, and no kernel computes more at once

States = MutableMapping[Tensor, dict[str, Any]]


class Slices:
    """A contiguous tensor, slice by slice.

    Args:
        longest: bytes of a slice at most, rounded up to its grain.

    Attributes:
        tensors: the slices, which are views.
    """

    def __init__(self, whole: Tensor, longest: int) -> None:
        self._whole = whole
        count = -(-whole.numel() * whole.element_size() // longest)
        self._numel = -(-whole.numel() // count // _GRAIN) * _GRAIN
        self.tensors = self._cut(whole)

    def _cut(self, whole: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = whole.view(-1).split(self._numel)
        return parts

    def take_gradient(self, gradient: Tensor) -> None:
        # Contiguous when the slices were made; somebody may have exchanged its `.data` since.
        for tensor, part in zip(self.tensors, self._cut(gradient.contiguous()), strict=True):
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
        made = [key for key in each[0] if key not in known]
        if any(key not in state for state in each for key in made):
            # An error ended the step before all slices had it. The next one makes it anew.
            each[0] = {key: value for key, value in each[0].items() if key in known}
        if not each[0]:
            return
        states[self._whole] = whole = {}
        for key, value in each[0].items():
            if isinstance(value, Tensor) and value.shape == self.tensors[0].shape:
                whole[key] = self._joined([state[key] for state in each], known.get(key))
            else:
                whole[key] = value

    def _joined(self, parts: list[Tensor], known: object) -> Tensor:
        """The known tensor if the parts are its own, which were only written to; otherwise a new one."""
        if isinstance(known, Tensor) and known.shape == self._whole.shape:
            places = self._cut(known)
            if all(part.data_ptr() == place.data_ptr() for part, place in zip(parts, places, strict=True)):
                return known
        return torch.cat(parts).view(self._whole.shape)
