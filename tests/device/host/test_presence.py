"""What a rank tells of the step that it is in, and whether it is told whole."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from composable.device.collectives import communicator_of
from composable.errors import CommunicationError
from tests.helpers.world import spmd

pytestmark = pytest.mark.host


@spmd(ranks=2)
def test_a_rank_that_is_interrupted_while_it_tells_that_it_leaves_a_step_tells_it_when_it_is_asked_again() -> None:
    communicator = communicator_of(dist.new_group(timeout=timedelta(seconds=20)), torch.device("cpu"))
    presence, arena = communicator.presence, communicator.host_group.presence._arena  # type: ignore[attr-defined]
    communicator.sums.steps.open()
    if dist.get_rank() == 0:
        with mock.patch.object(type(arena), "write_note", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            presence.leave(communicator.sums, "it was interrupted")
        presence.leave(communicator.sums, "it was interrupted")
    else:
        with pytest.raises(CommunicationError, match="rank 0 has left this step: it was interrupted"):
            communicator.all_reduce(torch.ones(1), label="sum").wait()
