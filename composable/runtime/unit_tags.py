"""The tags of one unit's messages, a sequence for each kind of them; knows no message, and no phase."""

from __future__ import annotations

from composable.device.collectives import Communicator, Steps, TagSequence
from composable.runtime.gradients import UnitGradients
from composable.runtime.mesh_info import MeshInfo


class UnitTags:
    """Opened before the first collective of the unit: every rank comes to it, which is not so of looking at a copied module.

    Attributes:
        gather: of all-gathers; None before they are opened.
        gather_post_forward: of all-gathers from post-forward shards, where there are any.
    """

    __slots__ = ("_checks", "_gradients", "_mesh_info", "_opened", "_removal", "gather", "gather_post_forward")

    def __init__(self, mesh_info: MeshInfo, gradients: UnitGradients) -> None:
        self._mesh_info = mesh_info
        self._gradients = gradients  # which have their own two
        self._opened: list[tuple[Communicator, TagSequence]] = []  # all of them, by what they are used over
        self._checks: TagSequence | None = None
        self._removal: TagSequence | None = None
        self.gather: TagSequence | None = None
        self.gather_post_forward: TagSequence | None = None

    def open(self) -> None:
        """Done twice is done once."""
        if self.gather is None:
            mesh_info, self._opened = self._mesh_info, []
            self._gradients.tags = self._open(mesh_info.shard)
            self._checks = self._removal = self._open(mesh_info.all)
            if mesh_info.shard is not mesh_info.all:
                # Communicators number their sequences apart: over one that did not open it, a tag may be another unit's.
                self._removal = self._open(mesh_info.shard)
            if mesh_info.replicate is not None:
                self._gradients.replica_tags = self._open(mesh_info.replicate)
            if mesh_info.post_forward is not None:
                self.gather_post_forward = self._open(mesh_info.post_forward)
            gather = self._open(mesh_info.shard)
            self.count_by(gather.steps)
            self.gather = gather  # last: what an interrupt ends is done again

    def _open(self, communicator: Communicator) -> TagSequence:
        """For messages of one kind: a rank that is one collective ahead must not take a gather for a reduction."""
        tags = communicator.tags.open()
        self._opened.append((communicator, tags))
        return tags

    def count_by(self, steps: Steps) -> None:
        """Messages belong to `steps` from now on."""
        for _, tags in self._opened:
            tags.steps = steps

    @property
    def steps(self) -> Steps:
        self.open()
        assert self.gather is not None
        return self.gather.steps

    @property
    def checks(self) -> TagSequence:
        """Of what ranks compare in a step."""
        self.open()
        assert self._checks is not None
        return self._checks

    @property
    def removal(self) -> TagSequence:
        """Of what is gathered in order to remove the unit, over the ranks that its parameters are cut over."""
        self.open()
        assert self._removal is not None
        return self._removal

    def say_farewell(self, why: str) -> None:
        """Tell the other ranks that this one has left the step."""
        for communicator, tags in self._opened:
            communicator.presence.leave(tags, why)
