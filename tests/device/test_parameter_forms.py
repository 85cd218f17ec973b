"""What is cut as a parameter is, and put together again, is whole."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from composable.device.parameter_forms import cut
from composable.plan.routes import Route
from tests.plan.layouts import Planned, planned


@settings(max_examples=60, deadline=None)
@given(planned())
def test_cut_pieces_put_together_are_the_whole(plan: Planned) -> None:
    for slot in plan.layout.slots:
        whole = torch.arange(slot.numel).view(slot.shape)
        pieces = [cut(whole, slot, rank) for rank in range(plan.num_shards)]
        assert [tuple(piece.shape) for piece in pieces] == [slot.local_shape(rank) for rank in range(plan.num_shards)]
        if slot.route is Route.WHOLE:
            assert all(torch.equal(piece, whole) for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces, slot.dim), whole)
