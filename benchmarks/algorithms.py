"""The ways to gather and to reduce-scatter one flat tensor that are worth comparing.

Must not know who asks, nor time.

Each algorithm is made once for its tensors, then called again and again: what can be prepared is
not part of its time. Calling it starts the movement and returns what waits for its end, so that
several may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], object]
Move = Callable[[], Finish]

# torch 2.13 renamed these two; both names mean the same collective.
_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _waiting(work: dist.Work | None) -> Finish:
    if work is None:  # torch answers so to a rank outside of the group; all of ours are inside
        raise RuntimeError("this rank is not in the process group")
    return work.wait


def gather_tensor(shard: Tensor, whole: Tensor) -> Move:
    """The backend's own all-gather."""

    def move() -> Finish:
        return _waiting(_gather_single(whole, shard, async_op=True))

    return move


def gather_pairs(shard: Tensor, whole: Tensor) -> Move:
    """Every pair of ranks exchanges shards, straight into place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = whole.view(size, -1)
    peers = [(rank + step) % size for step in range(1, size)]  # nobody is everybody's first

    def move() -> Finish:
        waits = [_waiting(dist.irecv(rows[peer], peer)) for peer in peers]
        waits += [_waiting(dist.isend(shard, peer)) for peer in peers]
        rows[rank].copy_(shard)
        return lambda: [wait() for wait in waits]

    return move


def reduce_tensor(source: Tensor, out: Tensor) -> Move:
    """The backend's own reduce-scatter."""

    def move() -> Finish:
        return _waiting(_reduce_single(out, source, async_op=True))

    return move


def reduce_pairs(source: Tensor, out: Tensor) -> Move:
    """Every pair exchanges what the other owns; each rank adds up its own rows, in the order of
    ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = source.view(size, -1)
    incoming = torch.empty((size, out.numel()), dtype=out.dtype, device=out.device)
    peers = [(rank + step) % size for step in range(1, size)]
    terms = [rows[rank] if peer == rank else incoming[peer] for peer in range(size)]

    def move() -> Finish:
        waits = [_waiting(dist.irecv(incoming[peer], peer)) for peer in peers]
        waits += [_waiting(dist.isend(rows[peer], peer)) for peer in peers]

        def finish() -> None:
            for wait in waits:
                wait()
            torch.add(terms[0], terms[1], out=out)
            for scaled_input in terms[2:]:
                out.add_(scaled_input)

        return finish

    return move


def reduce_exchange(source: Tensor, out: Tensor) -> Move:
    """One all-to-all, then the same local sum."""
    incoming = torch.empty_like(source)
    rows = incoming.view(dist.get_world_size(), -1)

    def move() -> Finish:
        wait = _waiting(dist.all_to_all_single(incoming, source, async_op=True))

        def finish() -> None:
            wait()
            torch.sum(rows, 0, out=out)

        return finish

    return move


def reduce_all(source: Tensor, out: Tensor) -> Move:
    """A full all-reduce in place, of which only one's own rows are wanted."""

    def move() -> Finish:
        return _waiting(dist.all_reduce(source, async_op=True))

    return move


GATHERS: Final[dict[str, Callable[[Tensor, Tensor], Move]]] = {
    "all-gather: tensor": gather_tensor,
    "all-gather: pairs": gather_pairs,
}
REDUCTIONS: Final[dict[str, Callable[[Tensor, Tensor], Move]]] = {
    "reduce-scatter: tensor": reduce_tensor,
    "reduce-scatter: pairs": reduce_pairs,
    "reduce-scatter: all-to-all": reduce_exchange,
    "all-reduce": reduce_all,
}


def gather_each(
    shards: list[Tensor], wholes: list[Tensor], gather: Callable[[Tensor, Tensor], Move]
) -> Move:
    """A message for every parameter, straight into place."""
    moves = [gather(shard, whole) for shard, whole in zip(shards, wholes, strict=True)]

    def move() -> Finish:
        finishes = [each() for each in moves]
        return lambda: [finish() for finish in finishes]

    return move


def gather_packed(
    shards: list[Tensor], wholes: list[Tensor], gather: Callable[[Tensor, Tensor], Move]
) -> Move:
    """One message for all parameters, whose shards lie side by side; then each is copied out to its
    place.
    """
    size = dist.get_world_size()
    sizes = [shard.numel() for shard in shards]
    # a shard buffer holds them that way at rest, so packing costs nothing per step
    packed = torch.cat(shards)
    landed = packed.new_empty(size * packed.numel())
    columns = torch.split(landed.view(size, -1), sizes, dim=1)
    places = [whole.view(size, -1) for whole in wholes]
    one = gather(packed, landed)

    def move() -> Finish:
        finish_message = one()

        def finish() -> None:
            finish_message()
            torch._foreach_copy_(places, columns)

        return finish

    return move
