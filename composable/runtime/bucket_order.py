"""What ranks tell each other once about the gradients of a replicated unit: their order and strides; knows no buckets.

Note [The order of buckets]
The first backward runs with the parameters in reverse. At its end (to be exact: at the end of the first one in which some
rank had a gradient for every parameter) the ranks tell each other in which order gradients became ready, and all fill their
buckets anew by the same one. That happens once: what is agreed outlives the reducer, and graphs that change do not matter.

Note [An agreement that not all ranks know of]
An interrupt may come to a rank in the middle of it, or before it has filled its buckets anew, while the others go on. Then it
must not meet them with buckets that hold other gradients. So a digest of what was agreed on is in the tags of all messages of
the next steps, and among the numbers at the end of the last bucket, which all ranks compare. And what was agreed on is left
where the rank that was interrupted finds it when its next backward begins. If that was too early, it looks again in the next:
nobody goes back behind an agreement, so all come to know of it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from composable.device.collectives import Communicator, TagSequence
from composable.device.gradient_buckets import Strides
from composable.runtime.gradient_hooks import weakly


@dataclass(frozen=True, slots=True)
class BucketOrder:
    """What all ranks have told each other about a unit's gradients.

    Attributes:
        order: parameters by number, as their gradients become ready.
        strides: of gradients that are not contiguous, and that all ranks lay out alike.
        digest: a number for it all; 0 if nothing was agreed on.
    """

    order: tuple[int, ...] = ()
    strides: Mapping[int, Strides] = field(default_factory=dict)
    digest: int = 0


def _agreement(order: Sequence[int], strides: Mapping[int, Strides]) -> BucketOrder:
    text = _text_of(order, strides)
    return BucketOrder(tuple(order), strides, 1 + zlib.crc32(text.encode()) % (TagSequence.DIGESTS - 1))


def _text_of(order: Sequence[int], strides: Mapping[int, Strides]) -> str:
    return json.dumps([list(order), sorted((i, list(found)) for i, found in strides.items())])


def known_to_others(before: BucketOrder, communicator: Communicator, step: int, count: int, place: int) -> BucketOrder | None:
    """What the other ranks agreed on while this one was interrupted; None if nobody did, or has said so yet.

    Args:
        step: in which that was. What was agreed on before is not meant.
        count: of the parameters.
        place: of the unit among those that use the communicator.
    """
    said = communicator.store.published(place)
    if not said:
        return None
    since, numbers, order, strides = json.loads(said)
    found = _agreement(order, {i: tuple(each) for i, each in strides})
    return found if since >= step and numbers == count and found.order != before.order else None


def agree_on_bucket_order(
    before: BucketOrder,
    arrivals: Sequence[int],
    default: Sequence[int],
    strides: Mapping[int, Strides | None],
    communicator: Communicator,
    name: str,
    count: int,
    place: int,
) -> BucketOrder:
    """Find out in which order gradients become ready.

    Args:
        before: what was agreed so far.
        arrivals: parameters by number, as their gradients came here.
        default: all of them, in the order that holds if no rank saw every gradient once.
        strides: of the gradients, by number; None means contiguous.
        name: of the unit.
        count: of its parameters, frozen ones as well.
        place: of the unit among those that use the communicator.
    """
    unit, complete = f"of unit '{name}'", sorted(arrivals) == sorted(default)
    prints = [zlib.crc32(repr(found).encode()) for found in strides.values()]
    # The first rank that saw every gradient decides about the order.
    lowest, highest = communicator.min_max(
        [communicator.rank if complete else communicator.size, *prints],
        label=f"search for a rank that saw every gradient {unit}",
    )
    first, alike = lowest[0], [low == high for low, high in zip(lowest[1:], highest[1:], strict=True)]
    # (None did if gradients came twice on all of them; then the order stays what it was.)
    mine = {communicator.rank: arrivals, communicator.size: default}.get(first, [-1] * len(default))
    _, order = communicator.min_max(mine, label=f"exchange of the order of gradients {unit}")
    agreed = {i: found for i, same in zip(strides, alike, strict=True) if same and (found := strides[i])}
    # A parameter that is frozen now keeps what was agreed about it before.
    others = [i for i in before.order if i not in order]
    result = _agreement((*order, *others), {**before.strides, **agreed})
    text = _text_of(result.order, result.strides)
    communicator.store.publish(f"[{communicator.sums.steps.number}, {count}, {text[1:]}", place)
    return result


class OrderAgreement:
    """What one reducer knows of the order, and how far it is with it.

    Args:
        parameters: numbers of those that have a place in a bucket.
        known: what was agreed on so far.
        unit: its name.
        count: of its parameters, frozen ones as well.
        place: of the unit among those that use the communicator.

    Attributes:
        order: what is agreed on.
        recording: whether that says nothing of some parameters, so that it is noted how their gradients come.
        sure: that all ranks know of the same.
        adopting: what has been agreed on and not been put into effect; after an interrupt that is done again.
    """

    __slots__ = (
        "__weakref__", "_arrivals", "_communicator", "_count", "_members", "_missed", "_place", "_unit", "adopting", "order",
        "recording", "sure"
    )  # fmt: skip

    def __init__(
        self, parameters: Sequence[int], known: BucketOrder, communicator: Communicator, unit: str, count: int, place: int
    ) -> None:
        self._members = tuple(parameters)
        self._communicator = communicator
        self._unit = unit
        self._count = count
        self._place = place
        self.order = known
        self.recording = not all(i in known.order for i in parameters)
        self.sure = False
        self.adopting: BucketOrder | None = None
        self._arrivals: list[int] = []
        self._missed: int | None = None  # the step in which the others may have agreed without this rank

    def of_parameters(self) -> list[int]:
        """In which order their gradients are expected."""
        mine = dict.fromkeys(self._members)
        known = dict.fromkeys(i for i in self.order.order if i in mine)
        return [*known, *(i for i in reversed(self._members) if i not in known)]

    def noting(self, i: int, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """`hook`, noted when it is called for the parameter with that number."""
        return partial(weakly(self._note), i, hook) if self.recording else hook

    def _note(self, i: int, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
        self._arrivals.append(i)
        hook(parameter)

    def agree(self, strides: Mapping[int, Strides | None]) -> None:
        """Find out in which order gradients become ready. Every rank comes to it."""
        self.adopting = agree_on_bucket_order(
            self.order, self._arrivals, self.of_parameters(), strides, self._communicator, self._unit, self._count, self._place
        )

    def look_up(self) -> None:
        """Before a backward is opened. See Note [An agreement that not all ranks know of]."""
        if self._missed is not None and self.adopting is None:
            self.adopting = known_to_others(self.order, self._communicator, self._missed, self._count, self._place)

    def adopt(self) -> None:
        """Buckets are about to be filled by what was agreed on."""
        assert self.adopting is not None
        self.order = self.adopting
        self.recording = self.sure = False

    def adopted(self) -> None:
        """They are."""
        self.adopting = self._missed = None

    def lose_backward(self) -> None:
        """A backward raised, in which the others may agree."""
        if self.recording and self._missed is None:
            self._missed = self._communicator.sums.steps.number

    def close(self) -> None:
        """A backward has ended: gradients come anew."""
        self._arrivals = []
