"""KeyboardInterrupt on one rank while all agree on the order of gradients: no bucket is ever summed with another one."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from composable.device.collectives import Communicator, PointToPointCommunicator, communicator_like, communicators_wrapped_by
from composable.errors import ComposableError
from composable.runtime import bucket_order
from composable.runtime.bucket_hooks import BucketHooks
from composable.runtime.reducer import Reducer
from tests.helpers.compare import averaged_gradients
from tests.helpers.means import Parts, assert_means, batch_of, twins
from tests.helpers.quiet import errors_only
from tests.helpers.world import Pool

pytestmark = [pytest.mark.host, pytest.mark.beyond_sim("groups of accelerators do not tell of a rank that was interrupted")]

_CAP: Final = 160 / (1 << 20)  # bytes: one layer of the model in a bucket
_ORDER: Final = [2, 0, 1]  # not the one that holds in the first step


class _Interrupting:
    """Interrupts this rank the first time that one of its functions is called with `label`, before or after the call."""

    def __init__(self, inner: Communicator, label: str, *, after: bool) -> None:
        self._inner = inner
        self._label = label
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def min_max(self, values: Any, *, label: str, **kwargs: Any) -> Any:
        hit = bool(self._label) and label.startswith(self._label)
        if hit:
            self._label = ""
            if not self._after:
                raise KeyboardInterrupt
        found = self._inner.min_max(values, label=label, **kwargs)
        if hit:
            raise KeyboardInterrupt
        return found


def _in_refill(monkeypatch: pytest.MonkeyPatch, owner: type, when: str) -> None:
    whole = getattr(owner, when)

    def interrupted(self: Any, *args: Any) -> None:
        monkeypatch.undo()
        if when == "detach":
            whole(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, when, interrupted)


_PLACES: Final[dict[str, tuple[str, bool]]] = {
    "before the second exchange": ("exchange of the order", False),
    "after the second exchange": ("exchange of the order", True),
}
_METHODS: Final[dict[str, tuple[type, str]]] = {
    "before the buckets are filled anew": (Reducer, "_refill"),
    "without hooks": (BucketHooks, "detach"),
}


def _sockets(communicator: Communicator) -> Communicator:
    if not hasattr(communicator, "group"):
        return communicator
    return PointToPointCommunicator(communicator_like(communicator.group, torch.device("cpu")), torch.device("cpu"))


@errors_only()
def _steps_after(place: str, steps: int, *, by_sockets: bool = False, looks: bool = True) -> list[str]:
    """What came of each step; rank 1 is interrupted in the first."""
    mine = dist.get_rank() == 1
    with communicators_wrapped_by(_sockets if by_sockets else lambda communicator: communicator):
        label, after = _PLACES.get(place, ("", False)) if mine else ("", False)
        with communicators_wrapped_by(lambda communicator: _Interrupting(communicator, label, after=after)):
            plain, ours = twins(Parts, bucket_cap_mb=_CAP)
    said = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if mine and place in _METHODS:
            _in_refill(monkeypatch, *_METHODS[place])
        for step in range(steps):
            hidden = pytest.MonkeyPatch()
            if not looks and step == 1:
                hidden.setattr(bucket_order, "known_to_others", lambda *_: None)
            for model in (plain, ours):
                model.zero_grad()
            plain(batch_of(step), _ORDER).sum().backward()
            expected = averaged_gradients(plain)
            try:
                ours(batch_of(step), _ORDER).sum().backward()
                assert_means(expected, ours)
                said.append("right")
            except KeyboardInterrupt:
                said.append("interrupted")
            except ComposableError as error:
                said.append(f"{type(error).__name__}: {error}")
            hidden.undo()
            dist.barrier()  # where the interrupt has been caught
    return said


@pytest.mark.parametrize("place", [*_PLACES, *_METHODS])
def test_a_rank_that_was_interrupted_finds_what_the_others_have_agreed_on(pool: Pool, place: str) -> None:
    other, interrupted = pool.run(2, _steps_after, place, 4)
    assert interrupted == ["interrupted", "right", "right", "right"]
    assert other[1:] == ["right", "right", "right"]


def test_a_rank_that_looks_too_early_meets_nobody_in_that_step(pool: Pool) -> None:
    other, interrupted = pool.run(2, _steps_after, "after the second exchange", 4, looks=False)
    assert other[0] == "right"
    assert interrupted[0] == "interrupted"
    for said in (other, interrupted):
        assert said[1].startswith("CommunicationError: rank ")
        assert said[2:] == ["right", "right"]


def test_where_messages_match_by_their_order_numbers_in_the_last_one_tell(pool: Pool) -> None:
    other, interrupted = pool.run(2, _steps_after, "after the second exchange", 4, looks=False, by_sockets=True)
    told = "RanksDisagreeError: replicate(unit '(root)'): an interrupt reached some ranks while all agreed on the order in which gradients are sent, and this backward mixed up those of different parameters. Clear them and go on: the order is looked up where the others left it. If this comes again, call remove(module, replicate) and annotate again"
    assert other == ["right", told, "right", "right"]
    assert interrupted == ["interrupted", told, "right", "right"]
