"""In which dtypes one unit computes now: as its policy says, or, in evaluation, as its parameters are; casts nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable.config import MixedPrecisionPolicy
from composable.device.buffer_swap import BufferHolder
from composable.device.flat_parameters import name_of
from composable.plan.precision import Precision, resolve
from composable.runtime.inputs import EdgeCasts, edge_casts


class UnitPrecision:
    """The policy of one unit, and what of it is in force.

    Args:
        policy: what was asked for.
        holders: modules whose buffers are cast.

    Attributes:
        in_force: the policy that parameters and buffers follow now.
        edges: what is cast where the unit's modules are called.
        holders: modules whose buffers are cast now.
        has_modes: whether the policy tells training from evaluation.
        trains: the mode of the outermost annotated module that is called. All units inside follow it: where one computes in
            another dtype than the next, a part that is in evaluation alone would stand between others that train.
    """

    __slots__ = ("_asked", "_holders", "_in_eval", "edges", "has_modes", "holders", "in_force", "trains")

    def __init__(self, policy: MixedPrecisionPolicy, holders: Sequence[BufferHolder]) -> None:
        self._asked = policy
        self._in_eval = policy.in_full_precision()
        self._holders = tuple(holders)
        self.has_modes = policy.full_precision_in_eval
        self.trains = True
        self.follow_mode()

    @property
    def _wanted(self) -> MixedPrecisionPolicy:
        return self._asked if self.trains or not self.has_modes else self._in_eval

    @property
    def outdated(self) -> bool:
        """Whether the module has changed its mode since."""
        return self._wanted is not self.in_force

    def follow_mode(self) -> None:
        """What the module's mode asks for is in force from here on."""
        self.in_force = policy = self._wanted
        self.edges: EdgeCasts | None = edge_casts(policy)
        self.holders = self._holders if policy is self._asked else ()

    def of(self, dtype: torch.dtype, *, exact: bool) -> Precision:
        """What the mode asks for means for a parameter.

        Args:
            dtype: that it has.
            exact: whether it keeps that, whatever the policy says.
        """
        return _resolved(self._wanted, dtype, exact=exact)

    def in_training(self, dtype: torch.dtype, *, exact: bool) -> Precision:
        """The same for training, whatever the mode is."""
        return _resolved(self._asked, dtype, exact=exact)


def _resolved(policy: MixedPrecisionPolicy, dtype: torch.dtype, *, exact: bool) -> Precision:
    if exact:
        return resolve(name_of(dtype))
    param, reduce = ((None if asked is None else name_of(asked)) for asked in (policy.param_dtype, policy.reduce_dtype))
    return resolve(name_of(dtype), param, reduce, keep_reduced=policy.keep_grads_in_reduce_dtype)
