"""Whether somebody wrote to a unit's shards, and what follows for graphs that were made before; knows no phase."""

from __future__ import annotations

import logging

from composable.device.private import as_tensors
from composable.errors import PhaseError, few
from composable.runtime.dtype_group import version_of
from composable.runtime.gradients import UnitGradients
from composable.runtime.parameters import UnitParameters, Versions

logger = logging.getLogger("composable")


class ShardVersions:
    """The version counters of one unit's shards, as they were last looked up; see Note [Stale parameters].

    Attributes:
        seen: the same object until somebody writes to a shard.
    """

    __slots__ = ("_gradients", "_unit_parameters", "seen")

    def __init__(self, parameters: UnitParameters, gradients: UnitGradients) -> None:
        self._unit_parameters = parameters
        self._gradients = gradients
        self.seen: Versions = []

    def look_up(self) -> tuple[Versions, int]:
        """Notice what was written to shards: graphs that were made before cannot go back through what it was written to.

        Returns:
            The edition of the shards: what is gathered of another one is out of date.
        """
        with as_tensors():
            now = list(map(version_of, self._unit_parameters.counted))
        if now != self.seen:
            self._unit_parameters.outdate(self.seen, now)
            self.seen = now
        return self.seen, self._gradients.rounds

    def tell_of_writes(self, before: Versions, unit: str) -> None:
        """Backward is about to go through a forward of `unit` whose parameters were written to since."""
        if not self._unit_parameters.groups:
            raise PhaseError(
                f"fully_shard was removed from unit '{unit}' between a forward and its backward: the parameters that this "
                "backward goes to are no longer the module's. Run the backward first, or the forward again"
            )
        names = self._unit_parameters.written_since(before)
        logger.warning(
            "unit '%s': %s changed between a forward and its backward, by an optimizer's step, by load_state_dict or in place. "
            "If that backward needs the former values, autograd refuses it ('modified by an inplace operation'), as it does "
            "without fully_shard; run the backward first",
            unit,
            few([f"'{name}'" for name in names]),
        )
