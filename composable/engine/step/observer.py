"""Observers of steps, and decisions that others may take for the engine: `join`, `together`,
reductions that a compiler makes, optimizers in backward, pipelines, notes on errors.

An `Observer` is notified of what the engine is about to do. A decision has a default answer, which
another component may replace while a scope is open. Observers and decisions apply to the whole
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec
from weakref import ref

from torch import Tensor

if TYPE_CHECKING:
    from composable.engine.step.root import Root
    from composable.engine.step.unit import Unit, UnitCall

P = ParamSpec("P")


class Observer:
    """Is notified of what it overrides. Nothing is called for the rest: most events come for each
    unit.

    `pre_forward`, `pre_backward` and names in the present tense are called before the engine acts
    on the event; `post_forward`, `raises`, `gradient_came`, `gradients_landed`, `loses` and
    `interrupted` when it has happened. A call that is refused as it is entered has `pre_forward`
    alone.
    """

    def begins_forward(self, root: Root) -> None:
        """The outermost forward of a root begins, with gradients."""

    def pre_forward(self, root: Root, call: UnitCall) -> None:
        """A call of a unit gathers it, and computes or recomputes."""

    def post_forward(self, root: Root, call: UnitCall, keep: bool) -> None:
        """It has computed; `keep`: parameters outlive the forward."""

    def raises(self, root: Root, call: UnitCall, error: BaseException) -> None:
        """It has raised, or one inside of it. Not for an error in the unit's own `post_forward`
        (`OutputError`): units around it are notified.
        """

    def opens_backward(self, root: Root) -> None:
        """A backward begins in a root."""

    def pre_backward(self, root: Root, call: UnitCall) -> None:
        """Backward has come to an output that `call` made: it enters the unit, or gathers it
        again.
        """

    def gradient_came(self, unit: Unit) -> None:
        """Of a parameter whose unit backward had not entered."""

    def ends_backward(self, root: Root) -> None:
        """A backward is at its end: its root launches what is left."""

    def lands_backward(self, root: Root) -> None:
        """The root has launched every reduction, and waits for them next."""

    def gradients_landed(self) -> None:
        """Of a backward, or of `reduce_gradients`, on all parameters."""

    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        """A function communicates over gradients outside of forward and backward: "reduce",
        "clip", "unscale".
        """

    def calls(self, what: str) -> None:
        """A function that all ranks call begins, for a model or what follows one."""

    def exchanges_values(self, back: bool) -> None:
        """All ranks are about to exchange the values of parameters at rest for others; or have put
        the former ones `back`.
        """

    def loses(self, units: Sequence[Unit]) -> None:
        """A step of these units was lost, and all ranks know it (`together`)."""

    def interrupted(self) -> None:
        """A KeyboardInterrupt has ended the forwards of this thread, and called no hook."""


class Observers(dict[str, list[Callable[..., None]]]):
    """The observers' methods, by event: what `Observer` has are the events."""

    def __init__(self) -> None:
        super().__init__({event: [] for event in vars(Observer) if not event.startswith("_")})

    def add(self, observer: Observer) -> Callable[[], None]:
        """Notify `observer` from now on; returns what ends it."""
        added = [
            (observers, getattr(observer, event))
            for event, observers in self.items()
            if getattr(type(observer), event) is not getattr(Observer, event)
        ]
        for observers, call in added:
            observers.append(call)

        def remove() -> None:
            for observers, call in added:
                observers.remove(call)

        return remove


OBSERVERS: Final = Observers()


def notify(
    event: Callable[Concatenate[Observer, P], None], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call what observers have in place of this method of `Observer`. For events of each unit, the
    engine looks into `OBSERVERS` itself, which saves a call.
    """
    for call in OBSERVERS[event.__name__]:
        call(*args, **kwargs)


def called(what: str) -> None:
    """A function that all ranks call begins: before it does anything."""
    notify(Observer.calls, what)


def values_exchanged(*, back: bool) -> None:
    """See `Observer.exchanges_values`."""
    notify(Observer.exchanges_values, back)


@dataclass
class Decisions:
    """What somebody else may answer in place of the engine.

    Attributes:
        source: the rank that buffers of replicated units follow.
        by_arrival: whether buckets may be launched while gradients arrive, where no other root
            takes part in the backward.
        traced: asked when a forward begins whose backward a compiler will record: lets it reduce
            the gradients, or returns why it cannot.
        counts_backwards: whether something counts the backwards that step one of these parameters
            in backward (`local_steps`).
        scope: the scope that is open and follows steps for ranks without data (`join`), or None; by
            a weak reference, since one that raised is dropped without a word.
    """

    source: Callable[[], int] = int
    by_arrival: Callable[[], bool] = lambda: True
    traced: Callable[[Root], str] = lambda _: "nothing was set up for it"
    counts_backwards: Callable[[Iterable[Tensor]], bool] = lambda _: False
    scope: Callable[[], Any] = lambda: None

    def answer(self, **answers: Any) -> Callable[[], None]:
        """Give other answers from now on; returns what takes them back."""
        before = {name: getattr(self, name) for name in answers}
        vars(self).update(answers)
        return lambda: vars(self).update(before)


DECISIONS: Final = Decisions()


def open_scope() -> Any:
    """The scope that is open and follows steps, or None."""
    return DECISIONS.scope()


def follow_steps(scope: object, **answers: Any) -> Callable[[], None]:
    """`scope` is open from now on, with other answers of `DECISIONS`; returns what ends it."""
    return DECISIONS.answer(scope=ref(scope), **answers)
