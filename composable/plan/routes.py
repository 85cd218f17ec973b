"""How a parameter travels between shards and whole: by itself, with others, or not at all; knows shapes, not places.

Note [Three ways a parameter travels]
A `DIRECT` parameter is cut along dimension 0 and its rows go straight from the shard of one rank to their final place in
the unsharded buffer of the others: nothing is copied in or out. A message costs about 0.1 ms whatever its size, so
small parameters are `PACKED`: they share one message that lands in a staging area and is copied out; so are parameters cut
along another dimension, whose pieces are not contiguous in the whole. A `WHOLE` parameter is not cut at all (it has no
dimension to cut, or there is only one rank): its unsharded form *is* the memory that the sharded one lives in, unless modules
compute in another dtype than the one it rests in.
From which size on a message of its own pays depends on how bytes travel: every communicator has it as `direct_bytes` of its
capabilities: one of the numbers here, or that of `device/collectives/host/communicator.py`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

# Bytes in a shard from which its own message pays; benchmarks/collectives.py.
DIRECT_BYTES_OF_COLLECTIVES: Final = 1 << 20
DIRECT_BYTES_OF_SOCKETS: Final = 512 << 10
# Messages that an accelerator's backend is given at once: groups of many small ones take longer than one with all of them.
PARTS_ON_ACCELERATORS: Final = 32
# Bytes for one rank from which a reduction is launched in two parts: what one launch more takes is little beside them.
DIVIDED_BYTES_ON_ACCELERATORS: Final = 32 << 20


class Route(Enum):
    """How a parameter travels between its shards and its unsharded form."""

    DIRECT = "its rows travel straight to their final place"
    PACKED = "it shares a message with others and is copied out of it"
    WHOLE = "it is not cut: every rank holds all of it"


def choose_route(shape: tuple[int, ...], dim: int | None, *, num_shards: int, direct_numel: int, multiple: int = 1) -> Route:
    """The route of one parameter.

    Args:
        shape: as it is in memory, from the outermost dimension to the innermost.
        dim: the one of these that is cut; None if none is.
        direct_numel: elements in a shard from which a message of its own pays.
        multiple: of how many elements such a message must be for each rank.
    """
    if num_shards == 1 or dim is None or not shape:
        return Route.WHOLE
    chunk_numel = -(-shape[0] // num_shards) * math.prod(shape[1:]) if dim == 0 else 0
    pays = dim == 0 and chunk_numel >= max(direct_numel, 1) and chunk_numel % multiple == 0
    return Route.DIRECT if pays else Route.PACKED
