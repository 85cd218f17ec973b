"""Uneven inputs: a rank without data follows the ranks that have some, through torch's `Join`.

`Join` has one collective: before each iteration, all ranks sum one number, to which a rank with
data adds 1 and a rank without data adds 0. But a model has many collectives. So after such a sum
one rank with data, the source, sends what it does: which units it enters and leaves
(`_Broadcaster`), and which functions and optimizers it calls. The source is the first rank that has
data. Ranks without data do the same without computing (`engine/step/driver.py`). They are notified
each time, and do not rely on a record of an earlier step, so a rank may have no data at all, and
steps may differ. While all ranks have data, only the sums are sent.

Other joinables of the same `Join` have their own collectives, and call `Join.notify_join_context`
before them. Such a call is handled like a forward: the source sends which joinable made it, and the
other ranks call the hook of this joinable.

| a rank       | when                                                                   | adds |
|--------------|------------------------------------------------------------------------|------|
| has data     | a forward, or the turn of another joinable, begins                     | 1    |
| has data     | anything else begins, and some ranks have no data: a backward, a step  | 1    |
| has none     | it has done what was sent; in `Join.__exit__`                          | 0    |

So a rank that leaves the scope meets the other ranks in their next sum. A sum of 0 ends the scope
on all ranks.

`skipped` stands beside it: a rank with data takes part in the collectives of one unit, and does not
compute it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from composable import clip_grad_norm_
from composable.checked import checked
from composable.comm.backends import is_distributed, notification_sum, ranks_of
from composable.comm.launch import Launch
from composable.compilation import untraced, unwrapped
from composable.contract.values import parameters_of
from composable.errors import MeshError, NonFiniteError, OptimizerError, PhaseError
from composable.seams import (
    Call,
    Observer,
    Param,
    Root,
    StepEvent,
    Unit,
    checked_on_all_ranks,
    driver_of,
    follow_steps,
    observe,
    open_scope,
    stepped_in_backward,
    units_in,
    unscale_gradients,
    written,
)
from composable.tensors import is_unreduced
from composable.torch_private import (
    in_backward,
    join_hooks,
    locals_of,
    on_zero_grad,
    steps_its_base,
    wrap_join,
)

_BYTES: Final = 1024  # of a message; longer ones are followed by another
T = TypeVar("T")


class _LostStepError(Exception):
    """The ranks with data gave up a step."""


class ModelJoinable(Joinable):
    """What `joinable` returns: models, with what is stepped and carried along with them."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], carried: Sequence[Any]
    ) -> None:
        super().__init__()
        _wrap_joins()
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.carried = list(carried)
        self.units = [unit for model in models for unit in units_in(model, caller="joinable")]
        self.comm = self.units[0].mesh_info.all
        _refuse_several_meshes(self.units)

    def join_hook(self, **_: Any) -> JoinHook:
        """Nothing: `_Scope` is the hook of all of these of one `Join`."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        """Where `Join` makes its sums."""
        return self.comm.device

    @property
    def join_process_group(self) -> Any:
        """Over which ranks."""
        mesh = self.units[0].mesh_info.mesh
        return self.comm.group or (dist.group.WORLD if mesh is None else mesh.get_group(0))


def _refuse_several_meshes(units: Sequence[Unit]) -> None:
    first, device = ranks_of(units[0].mesh_info.all), units[0].mesh_info.device
    for unit in units:
        ranks = ranks_of(unit.mesh_info.all)
        if ranks != first or not unit.on_one_mesh or unit.mesh_info.device != device:
            raise MeshError(
                f"joinable: unit '{unit.name}' is on ranks"
                f" {ranks}{' and others' * (not unit.on_one_mesh)} of {unit.mesh_info.device}, and"
                f" unit '{units[0].name}' on ranks {first} of {device}. A rank without data can"
                " stand in for units on the same ranks and device only; annotate the models on one"
                " mesh, or open a scope for each"
            )


class _Scope(JoinHook):
    """One `Join`: on a rank with data it says what is done, on a rank without data it does that.

    Args:
        members: the models' joinables.
        others: the other joinables of the same `Join`, and their hooks.
        throws: all ranks raise when one has run out.

    Attributes:
        source: the rank that says it; buffers follow it.
        broadcasts: this rank has data, and others have none.
        follows: this rank has no data any more.
        running: the ranks that had data in the last forward.
    """

    def __init__(
        self,
        members: Sequence[ModelJoinable],
        others: Mapping[Joinable, JoinHook],
        *,
        throws: bool,
    ) -> None:
        self.source = 0
        self.broadcasts = self.follows = False
        self._first, self._others, self._throws = members[0], others, throws
        self._comm = members[0].comm
        self.running = self._comm.size
        self._optimizers = [each for member in members for each in member.optimizers]
        self._carried = [each for member in members for each in member.carried]
        self._units = list(dict.fromkeys(unit for member in members for unit in member.units))
        self._driver = driver_of(self._units)
        self._indices = {unit: index for index, unit in enumerate(self._units)}
        self._phase = ""  # what the source does now: "forward", "backward" or nothing
        self._said: list[tuple[int, int, int, bool]] = []  # and was not sent yet
        self._zeroed: set[int] = set()  # ids of parameters
        # Only `Join` holds the scope: one that raised is dropped without a word.
        self._undo = ExitStack()
        self._undo.callback(
            follow_steps(
                self,
                source=lambda: open_scope().source,
                by_arrival=lambda: not (open_scope().broadcasts or open_scope().follows),
            )
        )
        self._undo.callback(
            register_optimizer_step_pre_hook(lambda *args: open_scope().step(*args)).remove
        )
        self._undo.callback(observe(_Broadcaster()))
        for member in members:
            owners: list[nn.Module | Optimizer] = [*member.models, *member.optimizers]
            for owner in owners:
                self._undo.callback(_observe_zero_grad(owner))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self._undo.close()

    def divide_by_running(self) -> None:
        """Make the mean over the ranks that have data, where the library divides by all of them."""

        def scaled(gradient: Tensor) -> Tensor:
            scope: _Scope = open_scope()
            if scope.running == scope._comm.size:
                return gradient
            return gradient * (scope._comm.size / scope.running)

        for undo in self._driver.scale_gradients(scaled):
            self._undo.callback(undo)

    # --- sums and messages -----------------------------------------------------------------------

    def _sum(self, mine: float) -> float:
        """Take part in one of the sums that `Join` knows of."""
        return notification_sum(mine, self._first.join_process_group, self._comm.device)

    def _meet(self) -> bool:
        """Find the source: the first rank that has data. Returns whether some have none."""
        rows = self._comm.all_gather_ints(
            [int(not self.follows)], Launch("exchange of which ranks have data")
        )
        self.source = rows.index([1])
        return [0] in rows

    def _exchange(self, value: Any = None) -> Any:
        """Receive the source's value, which is no number, on all ranks."""
        sent = pickle.dumps(value)
        received = self._broadcast(sent if len(sent) <= _BYTES else pickle.dumps(len(sent)), _BYTES)
        return self._broadcast(sent, received) if isinstance(received, int) else received

    def _broadcast(self, sent: bytes, size: int) -> Any:
        padded = bytearray(sent[:size].ljust(size, b"\0"))  # nothing behind a pickle is read
        message = torch.frombuffer(padded, dtype=torch.uint8).to(self._comm.device)
        self._comm.broadcast([message], Launch("message to ranks without data"), self.source)
        return pickle.loads(bytes(message.tolist()))

    # --- a rank with data ------------------------------------------------------------------------

    def _notify(self, *what: Any) -> None:
        """Count the ranks that have data, and say to the others what begins."""
        if self._phase:  # it was given up
            self.tell(StepEvent.LOST, self._units[0], now=True)
            self._phase = ""
        self.running = int(self._sum(1.0))
        self.broadcasts = self.running < self._comm.size
        if self.broadcasts:
            self._meet()
            self._exchange(what)

    def _call(self, *what: Any) -> None:
        """Between forwards and backwards: say that something is called."""
        if self.broadcasts:
            self._notify(*what)

    def tell(self, event: StepEvent, unit: Unit, detail: int = 0, *, now: bool = False) -> None:
        if not (self.broadcasts and self._phase):
            return
        if unit not in self._indices:  # of this rank alone
            return
        self._said.append((event.value, self._indices[unit], detail, torch.is_grad_enabled()))
        if now:
            said, self._said = self._said, []
            self._exchange(said)
        ends = event is StepEvent.END and not detail
        if ends or (event is StepEvent.POST_FORWARD and now and self._phase == "forward"):
            self._phase = ""

    def begin(self, root: Root) -> None:
        """A forward of `root` is about to begin."""
        if self.follows:
            return
        if in_backward():  # reentrant checkpoints run it again: a part of the backward
            if self.broadcasts and self._phase != "backward":
                self._call_backward()
            return
        if self._throws:
            Join.notify_join_context(self._first)
            return
        unknown = [unit for unit in root.units if unit not in self._indices]
        if len(unknown) == len(root.units) and all(
            unit.mesh_info.all.size == 1 for unit in unknown
        ):
            return
        self._said.clear()
        if unknown:
            problem = _foreign(root, unknown)
            self._notify("raise", problem)
            raise problem
        self._notify("forward", self._trains())
        if self.broadcasts:
            self._phase = "forward"

    def turn(self, other: Joinable) -> bool:
        """Take note that another joinable is about to communicate.

        Returns whether it is one of this scope's `Join`. If so, the scope itself notifies the
        others.
        """
        if self._throws or other not in self._others:
            return False
        if not self.follows:
            self._notify("turn", list(self._others).index(other))
        return True

    def open(self, root: Root) -> None:
        """A backward has begun in `root`."""
        if self.follows or root.units[0] not in self._indices:
            return
        if self._phase != "backward":
            self._refuse_unstepped(root)
            if self.broadcasts:
                self._call_backward()
            else:
                self._zeroed.clear()
        self.tell(StepEvent.OPEN, root.units[0])

    def _call_backward(self) -> None:
        self._call("backward", self._trains(), self._driver.modes, *self._cleared())
        self._phase = "backward"

    def call(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        """A function is about to communicate over gradients."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        known = [numbers[id(parameter)] for parameter in parameters if id(parameter) in numbers]
        if self.follows or not known:
            return
        if what == "unscale":
            scaler, inverse_scale, allow_fp16 = args
            if scaler not in self._carried:
                raise OptimizerError(
                    f"join: {type(scaler).__name__} scales gradients of a model in the scope, and"
                    " is not known to it. Pass it, so that ranks without data go on with its"
                    " scale: join(model, optimizer, scaler), or joinable(model, optimizer, scaler)"
                )
            args = (float(inverse_scale), allow_fp16) if self.broadcasts else ()
        self._call(what, known, *args)

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`optimizer` is about to step."""
        if self.follows or optimizer not in self._optimizers or steps_its_base(optimizer):
            return
        if [each for each in (*args[1:], kwargs.get("closure")) if each is not None]:
            raise OptimizerError(
                f"join: {type(optimizer).__name__}.step was called with a closure, which ranks"
                " without data do not have. Run forward and backward before the step"
            )
        self._call("step", self._optimizers.index(optimizer), _options_of(optimizer))

    def _refuse_unstepped(self, root: Root) -> None:
        """Every rank steps its own shards: a rank without data needs to know the optimizer."""
        for unit, param in self._not_stepped(unit for unit in root.units if unit.is_sharded):
            if param.at_rest.requires_grad and stepped_in_backward([param.at_rest]) is None:
                problem = OptimizerError(
                    f"join: parameter '{param.fqn}' of unit '{unit.name}' is trained by no"
                    " optimizer that the scope knows. A rank without data goes on to hold its"
                    " shard, and has to step it: join(model, optimizer), or joinable(model,"
                    " optimizer)"
                )
                self._call("raise", problem)
                raise problem

    # --- what all ranks know ---------------------------------------------------------------------

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [param.at_rest for unit in self._units for param in unit.params]

    def _not_stepped(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Param]]:
        """The parameters that no optimizer of the scope steps."""
        stepped = {id(p) for each in self._optimizers for p in parameters_of(each)}
        for unit in units:
            yield from ((unit, each) for each in unit.params if id(each.at_rest) not in stepped)

    def _trains(self) -> bytes:
        """Which parameters are not frozen."""
        return bytes(parameter.requires_grad for parameter in self._parameters)

    def _freeze(self, trains: bytes) -> None:
        for parameter, flag in zip(self._parameters, trains, strict=True):
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))

    def note_zeroed(self, parameters: Iterable[Tensor]) -> None:
        """`zero_grad(set_to_none=False)` was called."""
        self._zeroed.update(map(id, parameters))

    def _cleared(self) -> tuple[list[int], list[int]]:
        """Find the parameters whose gradients are None, and those whose gradients are zeroed.

        The latter were set to zero since the last backward.
        """
        parameters = self._parameters
        zeroed, self._zeroed = self._zeroed, set()
        none = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        return none, [
            number for number, parameter in enumerate(parameters) if id(parameter) in zeroed
        ]

    def _clear(self, none: list[int], zeroed: list[int]) -> None:
        """Drop the gradients that the source does not have.

        Of a unit that accumulates under `no_sync`, a single parameter may have one here only: the
        source did not use it.
        """
        parameters, numbers, first = self._parameters, set(none), 0
        for unit in self._units:
            mine = range(first, first + len(unit.params))
            first = mine.stop
            for number, param in zip(mine, unit.params, strict=True):
                if number in numbers and (
                    numbers.issuperset(mine) or not is_unreduced(param.at_rest.grad)
                ):
                    param.at_rest.grad = None
        with torch.no_grad():
            for gradient in locals_of(
                [g for number in zeroed if (g := parameters[number].grad) is not None]
            ):
                gradient.zero_()

    # --- a rank without data ---------------------------------------------------------------------

    def main_hook(self) -> None:
        self.follows, self.broadcasts = True, False
        grad = torch.is_grad_enabled()
        try:
            while True:
                self._meet()
                try:
                    self._perform(*self._exchange())
                except _LostStepError:
                    self._driver.reset()
                if not self._sum(0.0):
                    return
        finally:
            torch.set_grad_enabled(grad)

    def _perform(self, what: str, *args: Any) -> None:
        match what:
            case "raise":
                raise args[0]
            case "forward":
                self._freeze(*args)
                self._follow(in_backward=False)
            case "backward":
                trains, modes, none, zeroed = args
                self._freeze(trains)
                self._clear(none, zeroed)
                self._driver.backward(modes, partial(self._follow, in_backward=True))
            case "turn":
                list(self._others.values())[args[0]].main_hook()
            case "step":
                optimizer, options = self._optimizers[args[0]], args[1]
                _set_options(optimizer, options)
                with torch.enable_grad():
                    optimizer.step()
            case "reduce":
                self._driver.reduce(self._numbered(args[0]))
            case "clip":
                numbers, *how, error_if_nonfinite = args
                with suppress(NonFiniteError):
                    clip_grad_norm_(
                        self._numbered(numbers), *how, error_if_nonfinite=error_if_nonfinite
                    )
            case "unscale":
                numbers, scale, allow_fp16 = args
                inverse = torch.tensor(scale, dtype=torch.float32, device=self._comm.device)
                unscale_gradients(self._numbered(numbers), inverse, allow_fp16)

    def _numbered(self, numbers: Sequence[int]) -> list[Tensor]:
        parameters = self._parameters
        return [parameters[number] for number in numbers]

    def _follow(self, *, in_backward: bool) -> None:
        """Do what the source tells, until its forward or backward has ended."""
        depth = 0  # of the forwards that this rank follows
        while True:
            for number, unit, detail, grad in self._exchange():
                event = StepEvent(number)
                torch.set_grad_enabled(grad)
                if event is StepEvent.LOST:
                    raise _LostStepError
                if event is StepEvent.END and not detail:
                    return
                self._driver.visit(unit, event, detail)
                depth += (event is StepEvent.PRE_FORWARD) - (event is StepEvent.POST_FORWARD)
            if not depth and not in_backward:
                return

    # --- the end ---------------------------------------------------------------------------------

    def post_hook(self, is_last_joiner: bool) -> None:
        if is_last_joiner and self.running < self._comm.size:
            self._sum(0.0)  # ranks that left the scope earlier wait in `Join`, and not in this hook
        if self._meet():
            self._take_over()
        self.close()

    @torch.no_grad()
    def _take_over(self) -> None:
        """Let ranks without data take over what is not trained by gradients."""
        state = (
            self._trains(),
            self._cleared(),
            [_options_of(each) for each in self._optimizers],
            [each.state_dict() for each in self._carried],
        )
        trains, cleared, options, states = self._exchange(state)
        self._driver.take_buffers(self.source)
        replicated = [unit for unit in self._units if not unit.is_sharded]
        unknown = [
            param.at_rest
            for _, param in self._not_stepped(replicated)
            if stepped_in_backward([param.at_rest]) is None
        ]
        self._comm.broadcast(
            locals_of(unknown), Launch("broadcast of parameters after join"), self.source
        )
        written(replicated)
        if self.follows:
            self._freeze(trains)
            self._clear(*cleared)
            for optimizer, option in zip(self._optimizers, options, strict=True):
                _set_options(optimizer, option)
            for each, its_state in zip(self._carried, states, strict=True):
                each.load_state_dict(its_state)


class _Broadcaster(Observer):
    """Tells the scope that is open which visits of units a rank with data makes.

    A rank without data is driven by what it receives (`engine/step/driver.py`).
    """

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        if call.root is root and not root.running:
            open_scope().begin(root)
        open_scope().tell(
            StepEvent.PRE_FORWARD, call.unit, call.unit.modules.index(call.module), now=True
        )

    @override
    def post_forward(self, root: Root, call: Call, keep: bool) -> None:
        if call.waits:
            open_scope().tell(StepEvent.OUTPUT, call.unit)
        outermost = call.root is root and len(root.running) == 1
        open_scope().tell(StepEvent.POST_FORWARD, call.unit, keep, now=outermost)

    @override
    def opens_backward(self, root: Root) -> None:
        open_scope().open(root)

    @override
    def pre_backward(self, root: Root, call: Call) -> None:
        unit = call.unit
        if call.waits or not unit.is_in_backward or not unit.is_unsharded:
            open_scope().tell(StepEvent.PRE_BACKWARD, unit, call.waits, now=True)

    @override
    def gradient_came(self, unit: Unit) -> None:
        open_scope().tell(StepEvent.GRADIENT, unit)

    @override
    def ends_backward(self, root: Root) -> None:
        # If several roots end with one outer backward, ranks without data follow the first
        # root's END.
        open_scope().tell(StepEvent.END, root.units[0], root.ends_inside, now=True)

    @override
    def lands_backward(self, root: Root) -> None:
        open_scope().tell(StepEvent.LANDED, root.units[0], now=True)
        # ranks without data follow only the LANDED that comes before the last END

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        open_scope().call(what, parameters, *args)


def _foreign(root: Root, unknown: Sequence[Unit]) -> Exception:
    """What is wrong with a root that has units that the scope does not know."""
    if len(unknown) < len(root.units):
        return PhaseError(
            f"unit '{unknown[0].name}' was annotated inside of a join scope, and ranks without"
            " data do not know it. Annotate the whole model before the scope"
        )
    return PhaseError(
        f"unit '{root.name}' of another model ran inside of a join scope, and ranks without"
        " data do not take part in it. Pass the model to the scope: join(model, other,"
        " optimizer)"
    )


class _AtTheEnd(JoinHook):
    """The hook of another joinable, without what the scope calls."""

    def __init__(self, hook: JoinHook) -> None:
        self.post_hook = hook.post_hook  # type: ignore[method-assign]


@cache
def _wrap_joins() -> None:
    """Let a scope know of the other joinables of its `Join`, and of what they say to it."""
    wrap_join(_opens_scope, _tells_scope)


def _opens_scope(make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def made(
        join: Join,
        joinables: list[Joinable],
        enabled: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        members = [each for each in joinables if isinstance(each, ModelJoinable)]
        if members and open_scope() is not None:
            raise PhaseError(
                "joinable: a join scope is open already. Scopes do not nest: pass all models to"
                " one, join(model, other, optimizer)"
            )
        if members:
            _refuse_several_meshes([unit for member in members for unit in member.units])
        make(join, joinables, enabled, throw_on_early_termination, **kwargs)
        if not members or not enabled:
            return
        hooks = join_hooks(join)
        pairs = zip(joinables, hooks, strict=True)
        others = {each: hook for each, hook in pairs if not isinstance(each, ModelJoinable)}
        scope = _Scope(members, others, throws=throw_on_early_termination)
        if not kwargs.get("divide_by_initial_world_size", True):
            scope.divide_by_running()
        # The scope calls those of other joinables when the source says so. In the end they are
        # called after its own.
        hooks[:] = [scope, *map(_AtTheEnd, others.values())]

    return made


def _tells_scope(notify: Callable[[Joinable], Any]) -> Callable[[Joinable], Any]:
    @wraps(notify)
    def notified(joinable: Joinable) -> Any:
        scope: _Scope | None = open_scope()
        if scope is not None and scope.turn(joinable):
            return None
        return notify(joinable)

    return notified


def _observe_zero_grad(owner: nn.Module | Optimizer) -> Callable[[], None]:
    """Tell the scope of `zero_grad(set_to_none=False)`; returns what ends it.

    After other calls the gradients are None, which can be seen afterwards.
    """

    def note(set_to_none: bool) -> None:
        if not set_to_none:
            open_scope().note_zeroed(
                owner.parameters() if isinstance(owner, nn.Module) else parameters_of(owner)
            )

    return on_zero_grad(owner, note)


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The learning rate and the like."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _set_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)


@checked
def joinable(module: nn.Module, *others: Any) -> Joinable:
    """Make a model known to torch's `Join`, so that ranks may have different numbers of batches.

    A rank that has left the scope follows the other ranks. It takes part in gathers, reduces zeros
    for gradients, and follows `optimizer.step()`, `zero_grad`, `no_sync`, `reduce_gradients`,
    `clip_grad_norm_` and `GradScaler`. At the end, all ranks have the same parameters and optimizer
    states. Buffers of replicated models follow a rank that has data. `join(model, optimizer)` is
    the short form.

    The list of `Join` may contain other joinables before or after this one, and you may call them
    before or after it. Examples are a `ZeroRedundancyOptimizer` over a replicated model, a
    `DistributedDataParallel`, or your own joinable that calls `Join.notify_join_context` before its
    collectives. `Join` takes the keyword argument `divide_by_initial_world_size`; see `join`.

    Args:
        module: annotated, all of it on the same ranks.
        others: more models that run in the scope; their optimizers, which sharded models need for
            training; and objects with `state_dict` and `load_state_dict`, such as a `GradScaler` or
            a scheduler. At the end, all ranks take over the state of these objects from a rank that
            had data to the end. A rank without data steps with the options (learning rates) of the
            others.

    Raises:
        NotAnnotatedError: no annotated module in a model.
        MeshError: units are on different ranks or devices.
        OptimizerError: one of `others` is none of these.

    Example:
        >>> with Join([joinable(model, optimizer)]):
        ...     for batch in batches:
        ...         optimizer.zero_grad()
        ...         loss_of(model, batch).backward()
        ...         optimizer.step()
    """
    models, optimizers, carried = [module], [], []
    for other in others:
        if isinstance(other, nn.Module):
            models.append(other)
        elif isinstance(other, Optimizer):
            optimizers.append(other)
        elif callable(getattr(other, "state_dict", None)) and callable(
            getattr(other, "load_state_dict", None)
        ):
            carried.append(other)
        else:
            raise OptimizerError(
                f"joinable: a {type(other).__name__} is neither a model nor an optimizer, and has"
                " no state_dict() and load_state_dict() to carry to ranks without data. Pass other"
                " joinables to Join([joinable(model), other])"
            )
    return ModelJoinable(models, optimizers, carried)


@checked_on_all_ranks
@contextmanager
def join(
    module: nn.Module,
    *others: Any,
    divide_by_initial_world_size: bool = True,
    enabled: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Let ranks run out of data at different times: `Join([joinable(model, *others)], ...)`.

    Inside the scope, every rank trains or evaluates on as many batches as it has. All ranks enter
    and leave the scope. Before each forward of a model, the ranks exchange one number. Once a rank
    has no more batches, the ranks send one more message per unit.

    A rank leaves the scope right after its last batch. Inside the scope, do not call collectives
    that the library does not see, such as `dist.all_reduce` of a loss, `SyncBatchNorm` or torch's
    own `clip_grad_norm_`. Ranks without data call hooks of the optimizer, too. Put code that
    changes gradients between backward and step, or that must run on every rank after a step, into
    such hooks (`register_step_pre_hook`).

    Args:
        module: annotated, all of it on the same ranks.
        others: as for `joinable`: more models, the optimizers, a `GradScaler`, schedulers.
        divide_by_initial_world_size: divide gradients by the number of all ranks. False divides by
            the number of ranks that had data in the last forward.
        enabled: pass False if no rank can run out of data. Then the ranks exchange nothing in
            steps.
        throw_on_early_termination: raise on all ranks when one rank has run out of data.

    Raises:
        NotAnnotatedError, MeshError, OptimizerError: as for `joinable`.
        PhaseError: inside the scope, a model ran that was not passed, or that was annotated there.
        OptimizerError: no optimizer that was passed trains a sharded parameter.

    Example:
        >>> with join(model, optimizer):
        ...     for batch in batches:  # of this rank
        ...         optimizer.zero_grad()
        ...         loss_of(model, batch).backward()
        ...         optimizer.step()

    After PyTorch's `Join` (pytorch #61555).
    """
    if not is_distributed():  # one process alone
        yield
        return
    scope = Join(
        [joinable(module, *others)],
        enabled=enabled,
        throw_on_early_termination=throw_on_early_termination,
        divide_by_initial_world_size=divide_by_initial_world_size,
    )
    try:
        with scope:
            yield
    finally:
        left: _Scope | None = open_scope()
        if left is not None:
            left.close()  # also after an exception


# --- units that a rank skips ----------------------------------------------------------------------


@untraced
@checked
def skipped(module: nn.Module, x: T) -> T:
    """Return `x`, and take part in the collectives of `module` without computing it.

    A rank takes part in the collectives because other ranks compute the module. Each rank may
    decide by itself: `y = layer(x) if keep else skipped(layer, x)`. Use this for stochastic depth,
    mixture of depths, or experts without tokens. A rank that skips the module contributes zeros to
    the gradients of its parameters. It still gathers the parameters and reduces the gradients, so
    it saves the computation, but no communication.

    The function assumes that each annotated module below `module` runs once, in the order of
    `.modules()`.

    Args:
        module: an annotated module. For any other module, the function only returns `x`.
        x: the module's input: a tensor, or a container of tensors. If the module is frozen and the
            inputs of other ranks require no gradient, `x` should require none either. If it does,
            the library goes by the inputs in the first forward, and by those of this rank.

    Returns:
        `x`, as another tensor of the graph.

    Example:
        >>> def forward(self, x):
        ...     for layer in self.layers:
        ...         keep = not self.training or random.random() > 0.1  # on each rank
        ...         x = layer(x) if keep else skipped(layer, x)
        ...     return x
    """
    module = unwrapped(module)
    if not (units := units_in(module)):
        return x
    y: T = driver_of(units).pass_through(module, x)
    return y
