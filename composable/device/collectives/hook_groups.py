"""Process groups that hooks of users communicate over, apart from all messages of ours; moves no tensor."""

from __future__ import annotations

import traceback
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable.device.collectives.base import alive
from composable.device.collectives.process_groups import end_group, group_like, reference_to


class HookGroup:
    """A group of the same ranks as `parent`, for all hooks that communicate over these. It is not kept, as no group is.

    Hooks call torch.distributed, which tells collectives apart by their order alone. Where one fails on one rank the others
    wait in a collective that this rank never comes to, and a later one would meet it. So who fails ends the group (`give_up`):
    others find their connections closed, and do the same. It is made anew when all have said so to each other (`renew`).

    Attributes:
        lost: this rank has ended it.
    """

    __slots__ = ("__weakref__", "_device", "_made", "_parent", "lost")

    def __init__(self, parent: dist.ProcessGroup, device: torch.device) -> None:
        self._parent = reference_to(parent)
        self._device = device
        self.lost = False
        self.renew()

    @property
    def group(self) -> dist.ProcessGroup:
        return alive(self._made)

    def renew(self) -> None:
        """Make it anew. All ranks call it together."""
        if not self.lost and hasattr(self, "_made"):
            self._end()
        self._made = reference_to(group_like(alive(self._parent), self._device, "communication hooks"))
        self.lost = False

    def give_up(self, error: BaseException | None) -> None:
        """End it on this rank.

        Args:
            error: why. Local variables of what it ended are cleared: with one of them the group would live on, and
                whoever waits for this rank would not be told.
        """
        if self.lost:
            return
        self.lost = True
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        self._end()

    def _end(self) -> None:
        group = self._made()
        if group is not None:
            end_group(group)


_MADE: Final[WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, HookGroup]]] = WeakKeyDictionary()


def hook_group_of(parent: dist.ProcessGroup, device: torch.device) -> HookGroup:
    """The one for hooks over the ranks of `parent`. All of them call it together."""
    made = _MADE.setdefault(parent, {})
    if device not in made:
        made[device] = HookGroup(parent, device)
    return made[device]
