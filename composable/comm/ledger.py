"""What each rank launched last, by name: for the texts of errors, and for the comparison of ranks
under COMPOSABLE_DEBUG=1.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch.distributed as dist

from composable.errors import RanksDisagreeError, few
from composable.memory.torch_private import store_of

if TYPE_CHECKING:
    from composable.comm.base import Comm

DEBUG_VARIABLE: Final = "COMPOSABLE_DEBUG"  # "1" in the environment of all ranks
REPORT_SECONDS: Final = 5.0  # in which a rank that raises waits for the reports of the others
KEPT: Final = 32
# a backward of a large model, so that the first difference is among them
KEPT_IN_DEBUG: Final = 4096
_SHOWN: Final = 8
_DIGEST_BITS: Final = (1 << 62) - 1  # a digest travels as an int64

# Of one rank: how many collectives it launched, and the labels of the last ones.
Launches = tuple[int, Sequence[str]]


@cache
def debug_enabled() -> bool:
    """Whether ranks compare their launches at the end of each backward. The environment is read
    once.
    """
    return os.environ.get(DEBUG_VARIABLE) == "1"


@cache
def checksum(label: str) -> int:
    return crc32(label.encode())


class Ledger:
    """The launches of this rank in one process group.

    Attributes:
        count: how many there were.
        labels: of the last ones.
        digest: of the labels of all of them, in order, in debug mode. It is equal on two ranks that
            launched the same.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.count = 0
        self.digest = 0
        self.labels: deque[str] = deque(maxlen=KEPT_IN_DEBUG if debug_enabled() else KEPT)
        self._group = ref(group)  # weak: comms keep the ledger, and must not keep the group
        self._rank = dist.get_rank(group)
        self._names = dist.get_process_group_ranks(group)  # texts call ranks by their global number
        # reports of earlier errors, which say nothing about the next one
        self._read: dict[int, bytes] = {}
        self._reported: tuple[int, str] | None = None  # the count at the last report, and its text

    def note(self, label: str) -> None:
        self.count += 1
        self.labels.append(label)
        if debug_enabled():
            self.digest = (self.digest * 1_000_003 ^ checksum(label)) & _DIGEST_BITS

    # --- comparison ------------------------------------------------------------------------------

    def compare(self, comm: Comm) -> None:
        """Check that all ranks of `comm` launched the same collectives. All of them call it at the
        same point.

        Each rank passes the ledger of a group of its own: the rows of a hybrid mesh are compared
        through all of its ranks.

        Raises:
            RanksDisagreeError: they did not; names the first difference.
        """
        mine = (self.count, list(self.labels))  # before the exchange below adds to them
        rows = comm.all_gather_ints([self.count, self.digest], "comparison of launches")
        if all(row == rows[0] for row in rows):
            return
        found: list[Launches] = comm.all_gather_objects(mine, "exchange of launches that differ")
        names = self._names if comm.group is None else dist.get_process_group_ranks(comm.group)
        difference = _first_difference(
            dict(zip(names, found, strict=True)), until=max(count for count, _ in found)
        )
        raise RanksDisagreeError(
            "the ranks launched different collectives."
            f" {difference or 'The difference lies further back than they remember.'} All ranks"
            " must run the same modules in the same order, forward and backward."
        )

    # --- reports of failures ---------------------------------------------------------------------

    def report(self) -> str:
        """The last launches of this rank and, as far as the other ranks failed, too, and can be
        reached, theirs.

        Called for an error: publishes this rank's launches in the group's store and waits
        `REPORT_SECONDS` at most. Errors of more collectives that were in flight at the same time
        have the same report.
        """
        if self._reported is None or self._reported[0] != self.count:
            self._reported = self.count, self._report()
        return self._reported[1]

    def _report(self) -> str:
        me = self._names[self._rank]
        last = ", ".join(list(self.labels)[-_SHOWN:]) or "none"
        lines = [f"Last launches of rank {me} ({self.count} in all): {last}"]
        group = self._group()
        store = None if group is None else store_of(group)
        if store is None:
            return lines[0]
        found: dict[int, Launches] = {me: (self.count, tuple(self.labels))}
        # In a thread, because a store whose server hangs answers no question, and has no timeout
        # for that.
        thread = Thread(target=self._exchange, args=(store, found), daemon=True)
        thread.start()
        thread.join(REPORT_SECONDS + 1.0)
        # a thread that hangs may go on to write
        found = {name: found[name] for name in self._names if name in found}
        lines += _by_text(
            {
                name: f" launched last: {labels[-1]} (its launch {n})"
                for name, (n, labels) in found.items()
                if name != me
            }
        )
        silent = f": no report within {REPORT_SECONDS:g} s: ended, or did not fail so far"
        lines += _by_text({name: silent for name in self._names if name not in found})
        difference = _first_difference(found, until=min(count for count, _ in found.values()))
        return "\n".join([*lines, difference] if difference else lines)

    def _exchange(self, store: Any, found: dict[int, Launches]) -> None:
        """Publish this rank's launches, and put those of the others into `found` as they come."""
        deadline = time.monotonic() + REPORT_SECONDS
        keys = [f"composable/ledger/{rank}" for rank in range(len(self._names))]
        missing = {rank for rank in range(len(self._names)) if rank != self._rank}
        # the store may have ended with its rank: then there is nothing to add to the error itself
        with suppress(Exception):
            store.set(keys[self._rank], json.dumps([self.count, list(self.labels)[-KEPT:]]))
            while missing and time.monotonic() < deadline:
                for rank in sorted(missing):
                    if store.check([keys[rank]]) and (
                        text := store.get(keys[rank])
                    ) != self._read.get(rank):
                        self._read[rank] = text
                        count, labels = json.loads(text)
                        found[self._names[rank]] = (count, labels)
                        missing.remove(rank)
                time.sleep(0.05)


def _first_difference(by_rank: Mapping[int, Launches], until: int) -> str | None:
    """A sentence on the first launch below `until` that is not the same on all ranks; None if all
    remember the same.
    """
    start = max(count - len(labels) for count, labels in by_rank.values())
    for number in range(start, until):
        found = {}
        for rank, (count, labels) in by_rank.items():
            found[rank] = ": " + (
                labels[number - count + len(labels)] if number < count else "nothing"
            )
        if any(text != next(iter(found.values())) for text in found.values()):
            return f"The first difference is in launch {number + 1}: {'; '.join(_by_text(found))}."
    return None


def _by_text(texts: Mapping[int, str]) -> list[str]:
    """Each text once, after the ranks that it is said of: `rank 0, 2 launched last: ...`."""
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return [f"rank {few(names)}{text}" for text, names in ranks.items()]


_LEDGERS: Final[WeakKeyDictionary[dist.ProcessGroup, Ledger]] = WeakKeyDictionary()


def ledger_of(group: dist.ProcessGroup) -> Ledger:
    """The ledger of a group, which all of its comms on this rank share."""
    ledger = _LEDGERS.get(group)
    if ledger is None:
        ledger = _LEDGERS[group] = Ledger(group)
    return ledger
