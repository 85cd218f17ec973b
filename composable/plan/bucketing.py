"""Which gradients travel together, and in which order; knows them as numbers and sizes in bytes and nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

FIRST_BUCKET_BYTES: Final = 1 << 20  # the first one is small, so that communication starts early
ALONE_BYTES: Final = 1 << 20  # a gradient from this size on waits for no other one
ALONE_BYTES_ON_ACCELERATORS: Final = 25 << 20  # it takes tens of MiB to use the bandwidth of their links


def buckets_in_order(sizes: Sequence[int], kinds: Sequence[Hashable], *, cap: int, alone_bytes: int) -> list[list[int]]:
    """Which items share a bucket, and in which order buckets are complete.

    Args:
        sizes, kinds, cap: as `fill_buckets` takes them.
        alone_bytes: an item from this size on waits for no other one.
    """
    alone = [(kind, n if size >= alone_bytes else -1) for n, (size, kind) in enumerate(zip(sizes, kinds, strict=True))]
    buckets = fill_buckets(sizes, alone, cap=cap, first_cap=min(cap, FIRST_BUCKET_BYTES))
    # A bucket is complete when its last item is, so that is where it stands in the order.
    return sorted(buckets, key=lambda members: members[-1])


def fill_buckets(sizes: Sequence[int], kinds: Sequence[Hashable], *, cap: int, first_cap: int | None = None) -> list[list[int]]:
    """Group items, in order, into buckets of one kind and at most `cap` bytes; an item larger than that is a bucket alone.

    Args:
        sizes: bytes of each item, in the order in which the items become ready.
        kinds: items of different kinds (dtype, device) never share a bucket.
        cap: bytes a bucket may hold.
        first_cap: bytes the first bucket may hold; a small one lets communication start early.

    Example:
        >>> fill_buckets([4, 4, 9, 1], ["f"] * 4, cap=8)
        [[0, 1], [2], [3]]
    """
    if cap < 1:
        raise ValueError(f"cap must be at least 1 byte, got {cap}")
    buckets: list[list[int]] = []
    open_bucket: dict[Hashable, tuple[list[int], int]] = {}
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        members, used = open_bucket.get(kind, ([], 0))
        limit = first_cap if first_cap is not None and (not buckets or members is buckets[0]) else cap
        if members and used + size > limit:
            members, used = [], 0
        if not members:
            buckets.append(members)
        members.append(index)
        open_bucket[kind] = (members, used + size)
    return buckets
