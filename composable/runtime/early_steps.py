"""Parameters that are stepped while backward runs: which, when, and what became of a backward that raised; knows no optimizer.

Note [Steps in backward]
A unit's parameters are stepped when its gradients have been reduced and backward has left it. Backward runs the newest nodes
first, so it does not come back to a call that it has left, and nothing is gathered from shards that have been stepped. Where
it does come back (reentrant checkpointing, a parameter that is used beside its unit's calls), it would compute with other
values, or bring a second gradient after the step: that is refused. A bucket's parameters are stepped when its sum is there:
autograd has used them for the last time then, and says so itself if not, since a step counts as a write.
A backward that raises leaves some parameters stepped, on each rank perhaps others: replicas differ then, and shards of one
parameter are of two steps. So nothing is stepped after it before somebody has loaded, or said that it does not matter.
Inside of a window (`no_sync`, `weighted_gradients(more=True)`) nothing is stepped; what its last backward brings nothing to
is stepped when that ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from composable.device.host_home import wait_for_traffic
from composable.device.private import node_that_runs
from composable.device.user_hooks import WaitingHooks, call_hooks_after_accumulation
from composable.errors import PhaseError, few
from composable.runtime.backward_end import BackwardEnd, end_of_backward
from composable.runtime.gradient_hooks import call_when_accumulated, weakly

logger = logging.getLogger("composable")

_KEPT_BY: Final = "_composable_early_steps"


class Window(Protocol):
    """What says whether gradients are complete."""

    @property
    def complete(self) -> bool: ...


class EarlySteps:
    """Some parameters that are stepped in backward.

    Args:
        named: the parameters, as users see them, and what to call them.
        step: steps some of them.

    Attributes:
        lost: what a backward had stepped on this rank that raised then. Nothing is stepped before it is empty again.
    """

    def __init__(self, named: Sequence[tuple[nn.Parameter, str]], step: Callable[[Sequence[nn.Parameter]], None]) -> None:
        self._mine = {id(parameter): parameter for parameter, _ in named}  # alive, so the ids are theirs
        self._names = {id(parameter): name for parameter, name in named}
        self._step = step
        self._by_window: dict[int, list[nn.Parameter]] = {}
        self._windows: dict[int, Window] = {}  # by parameters that autograd tells of
        self._hooks: list[RemovableHandle] = []
        self._stepped: dict[int, str] = {}  # in this backward
        self._end: Callable[[], BackwardEnd | None] = lambda: None  # of the backward that has been joined
        self.lost: tuple[str, ...] = ()
        _ALIVE.add(self)

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """What to call it, if it is one of these."""
        return self._names.get(id(parameter))

    # --- where gradients come from ----------------------------------------------------------------------------------

    def belong_to(self, window: object, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters` get their gradients from a unit, whose windows are `window`."""
        self._by_window.setdefault(id(window), []).extend(parameters)

    def wait_for(self, parameter: nn.Parameter, window: Window | None) -> None:
        """`parameter` gets its gradient from autograd, and is complete where `window` says so."""
        if window is not None:
            self._windows[id(parameter)] = window
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # or there could be no hook; it may train later
        self._hooks.append(call_when_accumulated(parameter, weakly(self._arrived)))
        parameter.requires_grad_(trains)
        setattr(parameter, _KEPT_BY, self)  # the hook keeps nothing

    def leave(self) -> None:
        """Step nothing any more."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._mine.values():
            vars(parameter).pop(_KEPT_BY, None)
        self._mine, self._names, self._hooks = {}, {}, []
        self._by_window, self._windows = {}, {}

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, window: object, parameters: Sequence[nn.Parameter], hooks: WaitingHooks | None = None) -> None:
        """Step those of a unit's `parameters` that have a gradient, which they have no longer afterwards.

        Args:
            hooks: of users, which are to meet these gradients.
        """
        mine = [parameter for parameter in parameters if id(parameter) in self._names]
        for parameter in mine if hooks is not None and hooks.waiting else ():
            if hooks is not None and hooks.waiting.pop(id(parameter), None) is not None:
                call_hooks_after_accumulation(parameter)
        self._take(mine)

    def _take(self, mine: Sequence[nn.Parameter]) -> None:
        found = [parameter for parameter in mine if parameter.grad is not None]
        if not found:
            return
        if self.lost:
            raise PhaseError(
                f"apply_optimizer_in_backward: a backward raised before this one when it had stepped {few(list(self.lost))} on "
                "this rank, and on other ranks perhaps other parameters. Nothing has been stepped since. Load the last "
                "checkpoint into the model and into what apply_optimizer_in_backward returned, or call resume() on that, on "
                "all ranks, to go on with the parameters as they are"
            )
        self._stepped.update({id(parameter): self._names[id(parameter)] for parameter in found})
        wait_for_traffic()  # of shards and gradients on the host
        self._step(mine)
        for parameter in found:
            parameter.grad = None

    def end(self, window: object, parameters: Sequence[nn.Parameter]) -> None:
        """A backward is over in which gradients of the unit with this window, and `parameters`, were reduced."""
        if node_that_runs() is not None:
            raise PhaseError(
                "apply_optimizer_in_backward: a backward ended inside another one, which may come back to parameters that were "
                "stepped in it. Reentrant checkpointing does this; use checkpoint(module). " + self.say_stepped()
            )
        present = {id(parameter): None for parameter in parameters}
        gone = [self._names[id(each)] for each in self._by_window.get(id(window), ()) if id(each) not in present]
        if gone:
            raise PhaseError(
                f"apply_optimizer_in_backward: {few(gone)} was replaced on its module since, and what stands there is not "
                "stepped. Call remove() on what apply_optimizer_in_backward returned, and it again after the change"
            )
        for parameter in self._by_window.get(id(window), ()):
            self._stepped.pop(id(parameter), None)

    def lose(self) -> None:
        """A backward raised. Done twice is done once."""
        if self._stepped:
            logger.warning("a backward raised. %s", self.say_stepped())
            self.lost = tuple(self._stepped.values())
            self._stepped = {}

    def say_stepped(self) -> str:
        """What the backward that runs has stepped, in words."""
        if not self._stepped:
            return "No parameter had been stepped in it"
        return (
            f"Stepped in it already on this rank: {few(list(self._stepped.values()))}; the others keep their values of before. "
            "Load the last checkpoint, or call resume() on what apply_optimizer_in_backward returned, on all ranks"
        )

    # --- parameters that autograd tells of --------------------------------------------------------------------------

    def _arrived(self, parameter: Tensor) -> None:
        window = self._windows.get(id(parameter))
        if window is not None and not window.complete:
            return
        end = end_of_backward()
        if self._end() is not end:
            self._end = ref(end)
            end.join(self)
        assert isinstance(parameter, nn.Parameter)
        self._take([parameter])

    turn = 1 << 62  # after everybody who brings gradients

    def launch_rest(self) -> None:
        """See `composable.runtime.backward_end`."""

    def finish_backward(self) -> None:
        """Step what a window has left, and this backward brought nothing to."""
        for key, window in self._windows.items():
            if window.complete:
                self._take([self._mine[key]])
        self._stepped = {}

    def leave_failed_backward(self) -> None:
        self.lose()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Copies of parameters, and what is loaded from files, are stepped by nobody."""
        return _nobody, ()


def _nobody() -> None:
    return None


def refuse_again(early: Sequence[EarlySteps], unit: str) -> NoReturn:
    """Backward has come once more to a unit that it had left."""
    raise PhaseError(
        f"unit '{unit}': backward came to it again after its gradients had been reduced, and apply_optimizer_in_backward "
        "may have stepped its parameters. Reentrant checkpointing does this, and so does a parameter that is used outside "
        "of its unit's forward: use checkpoint(module), or an optimizer that steps after backward. "
        + " ".join(each.say_stepped() for each in early)
    )


_ALIVE: Final[WeakSet[EarlySteps]] = WeakSet()
_OPTIMIZERS: Final[WeakKeyDictionary[Optimizer, bool]] = WeakKeyDictionary()


def stepped_in_backward(parameters: Iterable[Tensor]) -> str | None:
    """The name of one of `parameters` that is stepped in backward."""
    if not _ALIVE:  # as in most programs
        return None
    alive = list(_ALIVE)
    names = (each.name_of(p) for p in parameters if isinstance(p, nn.Parameter) for each in alive)
    return next((name for name in names if name is not None), None)


def note_optimizer(optimizer: Optimizer, *, shown: bool) -> None:
    """`optimizer` is what steps in backward, or what is `shown` to users in its place."""
    _OPTIMIZERS[optimizer] = shown


def may_step(optimizer: Optimizer) -> bool:
    """Whether it is one of these."""
    return optimizer in _OPTIMIZERS


def is_asked_to_step(optimizer: Optimizer) -> bool:
    """Whether it steps because gradients are complete: nobody needs to check that."""
    return not _OPTIMIZERS.get(optimizer, True)
