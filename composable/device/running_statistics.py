"""Running statistics of norms, of which a module sees clones while it runs a second time; knows no reason to run twice.

Each batch counts once. What the second run counts is not written back instead: autograd has saved the statistics by then, and
would notice.
"""

from __future__ import annotations

from torch import Tensor, nn


class RunningStatistics:
    """Those of one module's norms, while clones are in their place."""

    __slots__ = ("_theirs",)

    def __init__(self) -> None:
        self._theirs: list[tuple[nn.Module, str, Tensor]] = []

    @property
    def cloned(self) -> int:
        """How many have clones in their place; `restore` takes it."""
        return len(self._theirs)

    def show_clones(self, module: nn.Module) -> None:
        """Norms in `module` that train count into clones from here on."""
        for norm in module.modules():
            # By what they have, as they are: others derive theirs from a base class that torch keeps to itself.
            if "running_mean" in norm._buffers and norm.training and getattr(norm, "track_running_stats", True):
                for name, buffer in norm._buffers.items():
                    if buffer is not None:
                        self._theirs.append((norm, name, buffer))
                        norm._buffers[name] = buffer.clone()

    def restore(self, kept: int) -> None:
        """All but the first `kept` are in their places again. Done twice is done once."""
        while len(self._theirs) > kept:  # forgotten when it is done: an interrupt may come in between
            norm, name, buffer = self._theirs[-1]
            norm._buffers[name] = buffer
            self._theirs.pop()
