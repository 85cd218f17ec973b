"""A record of the last launches of this rank, by name. Errors show it. Under COMPOSABLE_DEBUG=1
ranks compare it: those of one host at each launch, and all ranks at the end of each backward.
"""

from __future__ import annotations

import atexit
import json
import logging
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, finalize, ref
from zlib import crc32

import torch.distributed as dist

from composable.comm.launch import Launch
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

# Of one rank: how many collectives it launched, and the texts of the last ones.
Launches = tuple[int, Sequence[str]]

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
            start_comparing()
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
        others = [name for name in self._names if name != me]
        said = {
            name: f" launched last: {texts[-1]} (its launch {n})"
            for name, (n, texts) in found.items()
            if name != me
        }
        said |= {name: ends[name] for name in others if name in ends and name not in said}
        silent = f": no report within {REPORT_SECONDS:g} s: ended, or did not fail so far"
        said |= {name: silent for name in others if name not in said}
        lines += _by_text(said)
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


# --- launches of one host, in memory that its ranks share -----------------------------------------

ENTRIES: Final = 1024  # of a ring: more than the launches of most steps
_NUMBER: Final = struct.Struct("=q")
_TEXT: Final = 174
_ENTRY: Final = struct.Struct(f"=qQH{_TEXT}s")  # number, digest, length of the text, text
_HEADER: Final = 64
_KEY_BYTES: Final = 16


class SharedLaunches:
    """Memory in which the ranks of a process group that run on one host write down their launches,
    so that the second of two ranks sees at its launch what the first launched there. No rank waits
    for another, and nothing is sent.

    | part of the memory | holds |
    |---|---|
    | header | random bytes, by which a rank knows that it has opened the right memory |
    | a row per rank | its count of launches, and a ring of entries, which it alone writes |
    | an entry | its number, a digest of all launches up to it, and its text |

    If the digests of two ranks are equal at a launch, both have launched the same up to it. So a
    rank that is more than a ring behind can be compared again once it is closer.

    Attributes:
        count, digest: of this rank's launches.
        key: of the memory: the same on the ranks that share it, and no others.
        ahead: ranks that were further from this one than a ring is long at its last launch.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.count = self.digest = 0
        self.key = memory[:_KEY_BYTES].hex()
        self.ahead: list[int] = []
        self._memory, self._rank = memory, rank
        # up to which launch each of the others is known to have launched the same
        self._agreed = {peer: 0 for peer in range(size) if peer != rank}
        self._lock = Lock()  # threads of this rank

    def write(self, text: str) -> dict[int, Launches]:
        """Note a launch of this rank.

        Returns:
            If another rank is found to have launched something else up to now, what this rank and
            those launched that are as far, by rank of the group. Nothing otherwise.
        """
        with self._lock:
            text = _fitting(text)
            self.count += 1
            encoded = text.encode()
            self.digest = crc32(encoded + b"\n", self.digest)
            at = self._entry(self._rank, self.count)
            # First the entry, then its number, then the count: others read them the other way.
            _NUMBER.pack_into(self._memory, at, 0)
            _ENTRY.pack_into(self._memory, at, 0, self.digest, len(encoded), encoded)
            _NUMBER.pack_into(self._memory, at, self.count)
            _NUMBER.pack_into(self._memory, self._row(self._rank), self.count)
            self.ahead = []
            # No fence orders this rank's entry before its look at the others': of two ranks that
            # launch at one moment neither may see the other, and one does at its next launch.
            for peer in self._agreed:
                if self._differs(peer):
                    return self._found(until=min(self._count_of(peer), self.count))
            return {}

    def _differs(self, peer: int) -> bool:
        until = min(self._count_of(peer), self.count)
        if until == self._agreed[peer]:
            return False
        for last_look in (False, True):
            mine, theirs = self._read(self._rank, until), self._read(peer, until)
            if mine is None or theirs is None:
                self.ahead.append(peer)
                return False
            if mine[0] == theirs[0]:
                self._agreed[peer] = until
                return False
            if not last_look:
                time.sleep(0.01)  # a processor may show the writes of another in another order
        return True

    def _found(self, until: int) -> dict[int, Launches]:
        counts = {rank: self._count_of(rank) for rank in sorted([self._rank, *self._agreed])}
        return {
            rank: (count, self._texts(rank, count, ENTRIES))
            for rank, count in counts.items()
            if count >= until
        }

    def _texts(self, rank: int, count: int, number: int) -> list[str]:
        texts: list[str] = []
        for each in range(count, max(0, count - number), -1):
            entry = self._read(rank, each)
            if entry is None:  # it has been written over since
                break
            texts.append(entry[1])
        return texts[::-1]

    def _count_of(self, rank: int) -> int:
        count: int = _NUMBER.unpack_from(self._memory, self._row(rank))[0]
        return count

    def _row(self, rank: int) -> int:
        return _HEADER + rank * (_NUMBER.size + ENTRIES * _ENTRY.size)

    def _entry(self, rank: int, number: int) -> int:
        return self._row(rank) + _NUMBER.size + number % ENTRIES * _ENTRY.size

    def _read(self, rank: int, number: int) -> tuple[int, str] | None:
        """The digest and the text of a launch; None if its place holds another one."""
        at = self._entry(rank, number)
        found, digest, length, text = _ENTRY.unpack_from(self._memory, at)
        if found != number or _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None
        return digest, text[:length].decode(errors="replace")


def _fitting(text: str) -> str:
    """As much of a text as an entry holds, with a checksum of all of it."""
    if len(text.encode()) <= _TEXT:
        return text
    start = text.encode()[: _TEXT - 12].decode(errors="ignore")
    return f"{start}... {crc32(text.encode()):08x}"


def shared_launches(group: dist.ProcessGroup) -> SharedLaunches | None:
    """The memory that this rank shares with others of `group` on its host; None where there is
    none. Each rank calls it once for a group, at its first launch.
    """
    size = dist.get_world_size(group)
    store = store_of(group)
    config = str(dist.get_backend_config(group)) if type(group) is dist.ProcessGroup else "fake"
    if size == 1 or store is None or "fake" in config or not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError, RuntimeError):  # of the store, or a rank that has ended meanwhile
        rank = dist.get_rank(group)
        # A group that was destroyed and made again may find the keys of the one before.
        turn = store.add(f"composable/launches/{rank}", 1)
        return _opened(store, f"composable/launches/{host()}/{turn}", rank, size)
    return None


def _opened(store: object, key: str, rank: int, size: int) -> SharedLaunches | None:
    """The first rank makes the memory. It has no name that would have to be removed: it ends
    with the last process that holds it.
    """
    length = _HEADER + size * (_NUMBER.size + ENTRIES * _ENTRY.size)
    made = os.memfd_create("composable-launches")
    os.ftruncate(made, length)
    memory = mmap.mmap(made, length)
    memory[:_KEY_BYTES] = os.urandom(_KEY_BYTES)
    mine = f"/proc/{os.getpid()}/fd/{made} {memory[:_KEY_BYTES].hex()}"
    stored = store.compare_set(key, "", mine).decode()  # type: ignore[attr-defined]
    if stored == mine:
        launches = SharedLaunches(memory, rank, size)
        finalize(launches, os.close, made)  # until then others can open it
        return launches
    memory.close()
    os.close(made)
    path, _, random = stored.partition(" ")
    theirs = os.open(path, os.O_RDWR)
    try:
        # the first rank may have ended, and its number be another process's
        if os.fstat(theirs).st_size != length:
            return None
        memory = mmap.mmap(theirs, length)
    finally:
        os.close(theirs)
    return SharedLaunches(memory, rank, size) if memory[:_KEY_BYTES].hex() == random else None


@cache
def host() -> str:
    """Where numbers of processes mean the same, and processes can open each other's memory: one
    kernel, and one space of process ids.
    """
    with suppress(OSError):  # of systems without it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


# --- of all groups -------------------------------------------------------------------------------


@atexit.register
def _tell_ends() -> None:
    """Tell the other ranks, who may wait for this one, that it ends, and by which error."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # that was printed
    said = f"by {type(error).__name__}: {first_line(error)}" if error else "without an error"
    for ledger in list(_LEDGERS.values()):
        ledger._publish("end", said)


_compared = False  # whether launches are compared now


def start_comparing() -> None:
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
    start_comparing()
