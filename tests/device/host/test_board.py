"""What a process waits for, as others see it: the last thing said, or nothing."""

from __future__ import annotations

from composable.device.collectives.host.board import BYTES, Board


def test_a_board_shows_what_was_written_last_until_that_is_cleared() -> None:
    memory = memoryview(bytearray(BYTES))
    ours, theirs = Board(memory), Board(memory)
    assert theirs.read() == (0, "")
    ours.write(1 << 100 | 5, "all-gather of unit 'a'")
    assert theirs.read() == (1 << 100 | 5, "all-gather of unit 'a'")
    ours.write(7, "b")
    ours.clear(1 << 100 | 5)  # another thread's, which has been replaced
    assert theirs.read() == (7, "b")
    ours.clear(7)
    assert theirs.read() == (0, "")


def test_a_text_that_is_too_long_is_cut() -> None:
    board = Board(memoryview(bytearray(BYTES)))
    board.write(1, "ü" * BYTES)
    tag, text = board.read()
    assert tag == 1
    assert text.startswith("üüü")


def test_what_is_being_written_is_not_read() -> None:
    memory = memoryview(bytearray(BYTES))
    board = Board(memory)
    board.write(3, "c")
    memory[0] |= 1  # its writer has begun to say something else
    assert board.read() == (0, "")
    board.write(4, "d")  # and, after an interrupt, says the next thing
    assert board.read() == (4, "d")
