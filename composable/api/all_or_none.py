"""What fails on one rank while all annotate fails on all of them; knows neither parameters nor units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from composable.device.collectives import Communicator
from composable.errors import RanksDisagreeError, first_line

_ROOM_FOR_ERRORS: Final = 400  # bytes


@contextmanager
def failures_told(verb: str, communicator: Communicator) -> Iterator[None]:
    """Before `synchronise`: what fails on this rank alone fails on all, since it takes part there as one that cannot."""
    try:
        yield
    except Exception as error:
        if communicator.size > 1:
            communicator.min_max([1, 0, 0, 0, 0, 0], label=label_of(verb))
            _who_failed(_in_a_line(error), [communicator], label_of(verb))
        raise


@contextmanager
def all_or_none(verb: str, *communicators: Communicator) -> Iterator[None]:
    """After `synchronise`: what fails on one rank fails on all, so that the annotation is taken back everywhere.

    Args:
        communicators: over which the body opens tags; all ranks are in the first.
    """
    label = f"vote on {verb}() across ranks"
    try:
        yield
    except Exception as error:
        if communicators[0].size > 1:
            communicators[0].min_max([1], label=label)
            _who_failed(_in_a_line(error), communicators, label)
        raise
    if communicators[0].min_max([0], label=label)[1] != [0]:
        _refuse(verb, _who_failed("", communicators, label))


def _who_failed(failure: str, communicators: Sequence[Communicator], label: str) -> list[str]:
    """What every rank failed with, or nothing. Those who did have opened fewer tag sequences than the others."""
    texts = everybody_says(failure, communicators[0], label, _ROOM_FOR_ERRORS)
    for communicator in communicators:
        communicator.tags.open_up_to(communicator.min_max([communicator.tags.opened], label=label)[1][0])
    return texts


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def refuse_failure(verb: str, communicator: Communicator, label: str) -> None:
    _refuse(verb, _who_failed("", [communicator], label))


def _refuse(verb: str, texts: Sequence[str]) -> None:
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    raise RanksDisagreeError(f"{verb}: rank {rank} failed, so no rank annotates the module: {text}")


def label_of(verb: str) -> str:
    return f"check of {verb}() across ranks"


def everybody_says(text: str, communicator: Communicator, label: str, room: int = 160) -> list[str]:
    """Every rank's `text`, cut to `room` bytes, on every rank."""
    rows = communicator.all_gather_ints(list(text.encode()[:room].ljust(room)), label=label)
    return [bytes(row).decode(errors="replace").rstrip() for row in rows]
