"""In which dtypes a replicated unit computes: casts stand for its parameters and buffers while it does; knows no gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from composable.config import MixedPrecisionPolicy
from composable.device.buffer_swap import BufferHolder, SwapWithBuffers
from composable.device.cast_parameters import CastHolder, CastParameters
from composable.device.flat_parameters import dtype_named
from composable.errors import PhaseError
from composable.runtime.inputs import EdgeCasts
from composable.runtime.unit_precision import UnitPrecision


class CastUnit:
    """What modules of one replicated unit see in place of its parameters and buffers.

    Attributes:
        precision: in which dtypes it computes.
    """

    __slots__ = ("_buffer_casts", "_casts", "_made_of", "_shown", "precision")

    def __init__(
        self,
        policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
        holders: Sequence[CastHolder] = (),
        buffers: Sequence[BufferHolder] = (),
    ) -> None:
        self._made_of = policy, tuple(holders), tuple(buffers)
        self.precision = UnitPrecision(policy, buffers)
        self._casts = CastParameters(holders)
        self._buffer_casts = SwapWithBuffers((), ())
        self._shown = False

    @property
    def edges(self) -> EdgeCasts | None:
        """What is cast where the unit's modules are called."""
        return self.precision.edges

    def summed_in(self, dtype: torch.dtype, *, exact: bool) -> torch.dtype:
        """In which dtype the gradient of a parameter of `dtype` is summed over the ranks: one for all modes."""
        return dtype_named(self.precision.in_training(dtype, exact=exact).reduce)

    def follow_mode(self, *, trains: bool) -> None:
        """The outermost annotated module that is called is in that mode."""
        self.precision.trains = trains
        if self.precision.outdated:
            self.precision.follow_mode()

    def use_casts(self) -> None:
        """Modules compute with casts from here on. Done twice is done once."""
        if self._shown:
            return
        self._shown = True  # first: whoever hides finds what has been shown
        dtype = self.precision.in_force.param_dtype
        if dtype is not None:
            self._casts.use_casts(dtype)
        if self.precision.holders:
            self._buffer_casts = SwapWithBuffers((), self.precision.holders)
            self._buffer_casts.use_unsharded()

    def use_originals(self) -> None:
        """Modules hold what they hold at rest. Done twice is done once."""
        if self._shown:
            self._casts.use_originals()
            self._buffer_casts.use_sharded()
            self._shown = False

    def refuse_written(self, unit: str) -> None:
        """After a call: raise if somebody wrote to a cast. Embeddings with a largest norm do so whenever they are used."""
        for module, name in self._casts.written() if self._shown else ():
            if getattr(module, "max_norm", None) is None:
                raise PhaseError(
                    f"parameter '{name}' of a {type(module).__name__} in unit '{unit}' was written to in place while its "
                    "modules computed with a cast of it; such a write is lost. Compute a new tensor, or write to the parameter "
                    "outside of forward"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> CastUnit:
        twin = memo[id(self)] = CastUnit(*copy.deepcopy(self._made_of, memo))
        return twin


class _Shown(Protocol):
    casts: CastUnit | None


class _Shows(Protocol):
    @property
    def shown(self) -> _Shown: ...


def use_casts(units: Sequence[_Shows], *, trains: bool) -> None:
    """Modules of `units` are about to be called: they compute as their policies say.

    Args:
        trains: the mode of the outermost annotated module that is called.
    """
    for unit in units:
        casts = unit.shown.casts
        if casts is not None:
            casts.follow_mode(trains=trains)
            casts.use_casts()
