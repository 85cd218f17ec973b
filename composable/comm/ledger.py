"""A record of the last launches of this rank, by name. Errors show it. Under COMPOSABLE_DEBUG=1
ranks compare it: those of one host at each launch, and all ranks at the end of each backward.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch.distributed as dist

from composable.comm.launch import Launch
from composable.comm.shared_launches import ENTRIES, Launches, SharedLaunches, host, shared_launches
from composable.errors import RanksDisagreeError, few, first_line
from composable.torch_private import bytes_in, on_collectives, store_of

DEBUG_VARIABLE: Final = "COMPOSABLE_DEBUG"  # "1" in the environment of all ranks
REPORT_SECONDS: Final = 5.0  # in which a rank that raises waits for the reports of the others
KEPT: Final = 32
# a backward of a large model, so that the first difference is among them
KEPT_IN_DEBUG: Final = 4096
_SHOWN: Final = 8
_AROUND: Final = 4  # launches before and after the first difference that an error shows
_RULE: Final = "All ranks must run the same modules in the same order, forward and backward."
_FURTHER_BACK: Final = "The difference lies further back than they remember."

logger = logging.getLogger("composable")


@cache
def debug_enabled() -> bool:
    """Whether ranks compare their launches. The environment is read once."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


@cache
def checksum(text: str) -> int:
    return crc32(text.encode())


class Ledger:
    """The launches of this rank in one process group.

    Attributes:
        count: how many there were.
        texts: of the last ones.
        digest: of the texts of all of them, in order, where launches are compared. It is equal on
            two ranks that launched the same.
        shared: what the ranks of this host launched in the group, where that is compared.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if debug_enabled():  # it may have been set after the import
            compare_launches()
        self.count = 0
        self.digest = 0
        self.texts: deque[str] = deque(maxlen=KEPT_IN_DEBUG if debug_enabled() else KEPT)
        self._group = ref(group)  # weak: comms keep the ledger, and must not keep the group
        self._rank = dist.get_rank(group)
        self._names = dist.get_process_group_ranks(group)  # texts call ranks by their global number
        # reports of earlier errors, which say nothing about the next one
        self._read: dict[int, bytes] = {}
        self._reported: tuple[int, str] | None = None  # the count at the last report, and its text
        self.shared: SharedLaunches | None = None
        self._has_looked = False  # for memory to share, at the first launch that is compared
        self._has_warned = False
        self._publish("process", [host(), os.getpid()])
        self._publish("end", "")  # an earlier process of this rank may have left one

    def note(self, launch: Launch, collective: str = "", tensors: Sequence[object] = ()) -> None:
        """Called before each launch.

        Args:
            collective: its kind, empty for a communication hook.
            tensors: outputs and inputs, of which all ranks have the same sizes.

        Raises:
            RanksDisagreeError: launches are compared, and a rank of this host launched another
                collective.
        """
        self.count += 1
        self.texts.append(launch.text)
        if _compared:
            self.digest = crc32(f"{launch.text}\n".encode(), self.digest)
            said = [collective] if collective else []
            said += [f"{max(map(bytes_in, tensors))} bytes"] if tensors else []
            self.compare_on_host(f"{launch} ({', '.join(said)})" if said else launch.text)

    # --- comparison ------------------------------------------------------------------------------

    def compare_on_host(self, text: str) -> None:
        """Note a launch for the other ranks of this host, and compare it with what they launched.
        It may be one of torch's own.
        """
        if not self._has_looked and (group := self._group()) is not None:
            self._has_looked, self.shared = True, shared_launches(group)
        if self.shared is None:
            return
        if found := self.shared.write(text):
            raise RanksDisagreeError(_launched_apart(self._names, found))
        if self.shared.ahead and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d and rank %s are more than %d launches apart in the group of ranks %s; they"
                " are compared again when they are nearer",
                self._names[self._rank],
                few([str(self._names[rank]) for rank in self.shared.ahead]),
                ENTRIES,
                few([str(name) for name in self._names]),
            )

    def refuse(self, found: Sequence[Launches]) -> NoReturn:
        """Raise `RanksDisagreeError`: name the first difference between the ranks."""
        difference = _first_difference(
            dict(zip(self._names, found, strict=True)), until=max(count for count, _ in found)
        )
        raise RanksDisagreeError(
            f"the ranks launched different collectives. {difference or _FURTHER_BACK} {_RULE}"
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
        last = ", ".join(list(self.texts)[-_SHOWN:]) or "none"
        lines = [f"Last launches of rank {me} ({self.count} in all): {last}"]
        group = self._group()
        store = None if group is None else store_of(group)
        if store is None:
            return lines[0]
        found: dict[int, Launches] = {me: (self.count, tuple(self.texts))}
        ends: dict[int, str] = {}
        # In a thread, because a store whose server hangs answers no question, and has no timeout
        # for that.
        thread = Thread(target=self._exchange, args=(store, found, ends), daemon=True)
        thread.start()
        thread.join(REPORT_SECONDS + 1.0)
        # a thread that hangs may go on to write
        found = {name: found[name] for name in self._names if name in found}
        ends = {name: ends[name] for name in self._names if name in ends and name not in found}
        lines += _by_text(
            {
                name: f" launched last: {texts[-1]} (its launch {n})"
                for name, (n, texts) in found.items()
                if name != me
            }
        )
        lines += _by_text(ends)
        silent = f": no report within {REPORT_SECONDS:g} s: ended, or did not fail so far"
        lines += _by_text({name: silent for name in self._names if name not in {**found, **ends}})
        difference = _first_difference(found, until=min(count for count, _ in found.values()))
        return "\n".join([*lines, difference] if difference else lines)

    def _exchange(self, store: Any, found: dict[int, Launches], ends: dict[int, str]) -> None:
        """Publish this rank's launches, and put those of the others into `found` as they come, and
        into `ends` which have ended.
        """
        deadline = time.monotonic() + REPORT_SECONDS
        keys = [f"composable/ledger/{rank}" for rank in range(len(self._names))]
        missing = {rank for rank in range(len(self._names)) if rank != self._rank}
        # the store may have ended with its rank: then there is nothing to add to the error itself
        with suppress(Exception):
            store.set(keys[self._rank], json.dumps([self.count, list(self.texts)[-KEPT:]]))
            while missing and time.monotonic() < deadline:
                for rank in sorted(missing):
                    if store.check([keys[rank]]) and (
                        text := store.get(keys[rank])
                    ) != self._read.get(rank):
                        self._read[rank] = text
                        count, texts = json.loads(text)
                        found[self._names[rank]] = (count, texts)
                        missing.remove(rank)
                    elif end := _end_of(store, rank):
                        ends[self._names[rank]] = f" has ended: {end}"
                        missing.remove(rank)
                time.sleep(0.05)

    def _publish(self, what: str, value: object) -> None:
        group = self._group()
        store = None if group is None else store_of(group)
        if store is not None:
            with suppress(Exception):  # the store may have ended; reports say less then
                store.set(f"composable/{what}/{self._rank}", json.dumps(value))


def _end_of(store: Any, rank: int) -> str:
    """How the process of another rank has ended; empty if it runs, or nothing is known."""
    said, process = f"composable/end/{rank}", f"composable/process/{rank}"
    if store.check([said]) and (how := json.loads(store.get(said))):
        return str(how)
    if store.check([process]):
        there, number = json.loads(store.get(process))
        if there == host() and _is_gone(number):
            return "its process is gone, killed or ended by os._exit"
    return ""


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except OSError:
        return False
    with suppress(OSError):  # one that has ended stays until its parent has waited for it
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


def _first_difference(by_rank: Mapping[int, Launches], until: int) -> str | None:
    """A sentence on the first launch below `until` that is not the same on all ranks; None if all
    remember the same.
    """
    number = _where_they_part(by_rank, until)
    if number is None:
        return None
    found = {rank: f": {_launch(each, number) or 'nothing'}" for rank, each in by_rank.items()}
    return f"The first difference is in launch {number + 1}: {'; '.join(_by_text(found))}."


def _where_they_part(by_rank: Mapping[int, Launches], until: int) -> int | None:
    """The first launch, counted from 0, that is not the same on all ranks."""
    start = max(count - len(texts) for count, texts in by_rank.values())
    for number in range(start, until):
        if len({_launch(launches, number) for launches in by_rank.values()}) > 1:
            return number
    return None


def _launch(launches: Launches, number: int) -> str | None:
    count, texts = launches
    return texts[number - count + len(texts)] if number < count else None


def _launched_apart(names: Sequence[int], found: Mapping[int, Launches]) -> str:
    """The error of ranks of one host, of a group with these global `names`."""
    by_name = {names[rank]: launches for rank, launches in found.items()}
    until = min(count for count, _ in by_name.values())
    number = _where_they_part(by_name, until)
    group = few([str(name) for name in names])
    lines = [
        f"the ranks launched different collectives in the group of ranks {group}."
        f" {_first_difference(by_name, until) or _FURTHER_BACK} {_RULE}"
    ]
    for name, (count, texts) in by_name.items():
        first = count - len(texts)
        start = max(first, (count if number is None else number) - _AROUND)
        shown = [texts[each - first] for each in range(start, min(count, start + 2 * _AROUND))]
        lines.append(f"Rank {name} launched from {start + 1} on: {', then '.join(shown)}")
    return "\n".join(lines)


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


# --- of all groups -------------------------------------------------------------------------------


@atexit.register
def _tell_ends() -> None:
    """Tell the other ranks, who may wait for this one, that it ends, and by which error."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # that was printed
    said = f"by {type(error).__name__}: {first_line(error)}" if error else "without an error"
    for ledger in list(_LEDGERS.values()):
        ledger._publish("end", said)


_compared = False  # whether launches are compared now


def compare_launches() -> None:
    """Compare the launches of ranks of one host from here on, in all groups of this process. All
    ranks call it before their first launch.
    """
    global _compared
    _compared = True
    _follow_torch()


@cache
def _follow_torch() -> None:
    on_collectives(_note_of_torch)


def _note_of_torch(group: dist.ProcessGroup, kind: str, size: int | None) -> None:
    if (
        _compared and store_of(group) is not None
    ):  # None while torch makes it, and after it was destroyed
        amount = "" if size is None else f", {size} bytes"
        ledger_of(group).compare_on_host(f"torch's {kind}{amount}")


if os.environ.get(DEBUG_VARIABLE) == "1":  # from the first launch, also of torch's own
    compare_launches()
