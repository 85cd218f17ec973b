"""Messages through pipes: in order per tag, kept for whoever asks later, and an end that is seen."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from composable.device.collectives.host.pipes import PipeReader, PipeWriter, Process

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not show open files")


def _pipe() -> tuple[PipeReader, PipeWriter]:
    reader = PipeReader("rank 5")
    writer = PipeWriter(os.getpid(), reader.descriptor, "rank 6")
    reader.connected()
    return reader, writer


def test_messages_arrive_in_the_order_of_their_tag_whichever_is_asked_for_first() -> None:
    reader, writer = _pipe()
    writer.send(1, 10, 11)
    writer.send(1 << 61, -1, 1 << 62)
    writer.send(1, 20, 21)
    assert reader.receive(1 << 61, None) == (-1, 1 << 62)
    assert reader.receive(1, None) == (10, 11)
    assert reader.poll(1) == (20, 21)
    assert reader.poll(1) is None
    assert reader.poll(2) is None


def test_more_messages_than_one_look_takes() -> None:
    reader, writer = _pipe()
    for number in range(2000):
        writer.send(number % 2, number)
    assert [reader.receive(1, None)[0] for _ in range(1000)] == list(range(1, 2000, 2))
    assert [reader.receive(0, None)[0] for _ in range(1000)] == list(range(0, 2000, 2))


def test_a_message_that_does_not_come_is_an_error_that_names_the_writer() -> None:
    reader, writer = _pipe()
    writer.send(1)
    with pytest.raises(TimeoutError, match=r"^no message from rank 5 within 0:00:00\.010000$"):
        reader.receive(2, timedelta(milliseconds=10))
    assert reader.receive(1, None) == (0, 0)


def test_what_was_sent_before_the_end_is_still_received_and_then_the_end() -> None:
    reader, writer = _pipe()
    writer.send(1, 2, 3)
    del writer
    with pytest.raises(EOFError, match=r"^rank 5 has ended, or has destroyed its process group$"):
        reader.receive(7, None)
    assert reader.receive(1, None) == (2, 3)


def test_sending_something_to_nobody_is_an_error_that_names_the_reader() -> None:
    reader, writer = _pipe()
    del reader
    with pytest.raises(BrokenPipeError, match=r"^rank 6 has ended, or has destroyed its process group$"):
        writer.send(1)


def test_a_pipe_that_is_not_there_cannot_be_opened() -> None:
    with pytest.raises(OSError, match="No such file"):
        PipeWriter(os.getpid(), 1 << 20, "rank 6")


def test_threads_that_wait_for_different_tags_receive_their_own() -> None:
    reader, writer = _pipe()
    with ThreadPoolExecutor(4) as threads:
        received = [threads.submit(reader.receive, tag, timedelta(seconds=60)) for tag in range(4) for _ in range(50)]
        for number in range(200):
            writer.send(3 - number % 4, number)
        values = [future.result()[0] for future in received]
    assert sorted(values) == list(range(200))
    for tag in range(4):
        assert {value % 4 for value in values[50 * tag : 50 * (tag + 1)]} == {3 - tag}


def _write_and_wait(process: int, descriptor: int) -> None:
    PipeWriter(process, descriptor, "parent").send(1, os.getpid())
    writer = PipeWriter(process, descriptor, "parent")
    writer.send(2)
    signal.pause()


def test_the_end_of_a_killed_process_is_seen_at_once() -> None:
    reader = PipeReader("the child")
    child = multiprocessing.get_context("spawn").Process(target=_write_and_wait, args=(os.getpid(), reader.descriptor))
    child.start()
    try:
        assert reader.receive(1, timedelta(seconds=60)) == (child.pid, 0)
        reader.receive(2, timedelta(seconds=60))
        reader.connected()
    finally:
        child.kill()
    with pytest.raises(EOFError, match="the child has ended"):
        reader.receive(3, timedelta(seconds=60))
    child.join()


def test_a_full_pipe_takes_no_message_and_takes_one_again_when_somebody_has_read() -> None:
    reader, writer = _pipe()
    sent = 0
    while writer.send(1, sent):
        sent += 1
    writer.wait_for_room()
    assert not writer.send(1, sent)
    reader.drain()
    writer.wait_for_room()
    assert writer.send(1, sent)
    assert [reader.receive(1, None)[0] for _ in range(sent + 1)] == list(range(sent + 1))


def test_the_end_of_a_writer_is_seen_while_somebody_else_holds_its_end_of_the_pipe() -> None:
    """A child that it has forked does."""
    reader = PipeReader("rank 5")
    writer = PipeWriter(os.getpid(), reader.descriptor, "rank 6")
    process = subprocess.Popen(["sleep", "600"])
    try:
        reader.connected(Process(process.pid))
        writer.send(1, 2, 3)
        assert reader.receive(1, None) == (2, 3)
        with pytest.raises(TimeoutError):
            reader.receive(1, timedelta(milliseconds=10))
    finally:
        process.kill()
    with pytest.raises(EOFError, match=r"^rank 5 has ended"):
        reader.receive(1, None)  # nobody has asked for the process's exit code yet
    process.wait()
    with pytest.raises(EOFError, match=r"^rank 5 has ended"):
        reader.receive(1, None)


def test_a_pipe_that_was_closed_here_says_so() -> None:
    reader, writer = _pipe()
    reader.close()
    with pytest.raises(EOFError, match=r"^this rank has destroyed its process group$"):
        reader.receive(1, None)
    writer.close()
    with pytest.raises(EOFError, match=r"^this rank has destroyed its process group$"):
        writer.send(1)


def test_a_process_that_could_not_be_looked_at_is_not_taken_for_another_one_later() -> None:
    """No descriptor was left when they met, say."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        with mock.patch.object(Path, "read_text", side_effect=OSError(errno.EMFILE, "too many open files")):
            process = Process(child.pid)
            assert not process.has_ended(), "nothing is known"
        assert not process.has_ended()
    finally:
        child.kill()
        child.wait()
    assert process.has_ended()
