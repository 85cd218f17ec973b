"""Words through pipes: in order per tag, kept for whoever asks later, and an end that is seen."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from composable.device.words import Inbox, Outlet, Process

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not show open files")


def _pipe() -> tuple[Inbox, Outlet]:
    inbox = Inbox("rank 5")
    outlet = Outlet(os.getpid(), inbox.descriptor, "rank 6")
    inbox.seal()
    return inbox, outlet


def test_words_arrive_in_the_order_of_their_tag_whichever_is_asked_for_first() -> None:
    inbox, outlet = _pipe()
    outlet.say(1, 10, 11)
    outlet.say(1 << 61, -1, 1 << 62)
    outlet.say(1, 20, 21)
    assert inbox.wait(1 << 61, None) == (-1, 1 << 62)
    assert inbox.wait(1, None) == (10, 11)
    assert inbox.next(1) == (20, 21)
    assert inbox.next(1) is None
    assert inbox.next(2) is None


def test_more_words_than_one_look_takes() -> None:
    inbox, outlet = _pipe()
    for number in range(2000):
        outlet.say(number % 2, number)
    assert [inbox.wait(1, None)[0] for _ in range(1000)] == list(range(1, 2000, 2))
    assert [inbox.wait(0, None)[0] for _ in range(1000)] == list(range(0, 2000, 2))


def test_a_word_that_does_not_come_is_an_error_that_names_the_writer() -> None:
    inbox, outlet = _pipe()
    outlet.say(1)
    with pytest.raises(TimeoutError, match=r"^no word from rank 5 within 0:00:00\.010000$"):
        inbox.wait(2, timedelta(milliseconds=10))
    assert inbox.wait(1, None) == (0, 0)


def test_what_was_said_before_the_end_is_still_heard_and_then_the_end() -> None:
    inbox, outlet = _pipe()
    outlet.say(1, 2, 3)
    del outlet
    with pytest.raises(EOFError, match=r"^rank 5 has ended, or has destroyed its process group$"):
        inbox.wait(7, None)
    assert inbox.wait(1, None) == (2, 3)


def test_saying_something_to_nobody_is_an_error_that_names_the_reader() -> None:
    inbox, outlet = _pipe()
    del inbox
    with pytest.raises(BrokenPipeError, match=r"^rank 6 has ended, or has destroyed its process group$"):
        outlet.say(1)


def test_a_pipe_that_is_not_there_cannot_be_opened() -> None:
    with pytest.raises(OSError, match="No such file"):
        Outlet(os.getpid(), 1 << 20, "rank 6")


def test_threads_that_wait_for_different_tags_hear_their_own() -> None:
    inbox, outlet = _pipe()
    with ThreadPoolExecutor(4) as threads:
        heard = [threads.submit(inbox.wait, tag, timedelta(seconds=60)) for tag in range(4) for _ in range(50)]
        for number in range(200):
            outlet.say(3 - number % 4, number)
        values = [future.result()[0] for future in heard]
    assert sorted(values) == list(range(200))
    for tag in range(4):
        assert {value % 4 for value in values[50 * tag : 50 * (tag + 1)]} == {3 - tag}


def _write_and_wait(process: int, descriptor: int) -> None:
    Outlet(process, descriptor, "parent").say(1, os.getpid())
    outlet = Outlet(process, descriptor, "parent")
    outlet.say(2)
    signal.pause()


def test_the_end_of_a_killed_process_is_seen_at_once() -> None:
    inbox = Inbox("the child")
    child = multiprocessing.get_context("spawn").Process(target=_write_and_wait, args=(os.getpid(), inbox.descriptor))
    child.start()
    try:
        assert inbox.wait(1, timedelta(seconds=60)) == (child.pid, 0)
        inbox.wait(2, timedelta(seconds=60))
        inbox.seal()
    finally:
        child.kill()
    with pytest.raises(EOFError, match="the child has ended"):
        inbox.wait(3, timedelta(seconds=60))
    child.join()


def test_a_full_pipe_takes_no_word_and_takes_one_again_when_somebody_has_read() -> None:
    inbox, outlet = _pipe()
    said = 0
    while outlet.say(1, said):
        said += 1
    outlet.wait_for_room()
    assert not outlet.say(1, said)
    inbox.drain()
    outlet.wait_for_room()
    assert outlet.say(1, said)
    assert [inbox.wait(1, None)[0] for _ in range(said + 1)] == list(range(said + 1))


def test_the_end_of_a_writer_is_seen_while_somebody_else_holds_its_end_of_the_pipe() -> None:
    """A child that it has forked does."""
    inbox = Inbox("rank 5")
    outlet = Outlet(os.getpid(), inbox.descriptor, "rank 6")
    writer = subprocess.Popen(["sleep", "600"])
    try:
        inbox.seal(Process(writer.pid))
        outlet.say(1, 2, 3)
        assert inbox.wait(1, None) == (2, 3)
        with pytest.raises(TimeoutError):
            inbox.wait(1, timedelta(milliseconds=10))
    finally:
        writer.kill()
    with pytest.raises(EOFError, match=r"^rank 5 has ended"):
        inbox.wait(1, None)  # nobody has asked for the process's exit code yet
    writer.wait()
    with pytest.raises(EOFError, match=r"^rank 5 has ended"):
        inbox.wait(1, None)


def test_a_pipe_that_was_closed_here_says_so() -> None:
    inbox, outlet = _pipe()
    inbox.close()
    with pytest.raises(EOFError, match=r"^this rank has destroyed its process group$"):
        inbox.wait(1, None)
    outlet.close()
    with pytest.raises(EOFError, match=r"^this rank has destroyed its process group$"):
        outlet.say(1)
