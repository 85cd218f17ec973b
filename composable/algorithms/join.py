"""Uneven inputs: a rank without data follows the ranks that have some, through torch's `Join`.

`Join` knows of one collective: before each iteration a rank that has data adds 1 to a sum of one
number, and a rank without data adds 0. The model has many, so between two such sums the rank with
data that comes first, the source, says what it does: which units it enters and leaves
(`narration.py`), and which functions and optimizers it calls. The others do the same
without computing. They are told each time, and not by a record of an earlier step: so a rank may
have no data at all, and steps may differ. While all ranks have data, nothing but the sums is sent.

Other joinables of the same `Join` have collectives of their own. They announce them by
`Join.notify_join_context`, which is taken as a forward is: the source says which joinable it is,
and the others call its hook.

Between two forwards all ranks run sums of one number, so that a rank that leaves the scope finds
its first sum wherever the others are:

| sum | means |
|---|---|
| 0 | no rank has data any more |
| at most the number of ranks | so many have data, and begin a forward or another joinable's turn |
| `_CALL` | the source calls something, and says what |

An iteration is closed by one sum and the next begins with another, both of ones. Ranks in
`Join.__exit__` take part in the first or the second, and then shadow the forward like those that
left the scope earlier.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from composable.algorithms.narration import (
    _OPEN,
    Event,
    Narrator,
    open_scope,
    shadow,
)
from composable.api.scopes import units_in
from composable.comm import Comm, is_distributed, notification_sum
from composable.engine.gradients.unreduced import SyncMode
from composable.engine.params.dtensors import is_unreduced
from composable.engine.params.param_hooks import hook_gradients
from composable.engine.step import root as roots
from composable.engine.step.buffers import broadcast_buffers
from composable.engine.step.observer import DECISIONS, HEARERS
from composable.engine.step.root import Root
from composable.engine.step.unit import Unit, unit_of
from composable.errors import MeshError, NonFiniteError, OptimizerError, PhaseError
from composable.memory.torch_private import in_backward, join_hooks, locals_of
from composable.optim.clip import clip_grad_norm_
from composable.optim.in_backward import stepped_in_backward
from composable.optim.scaler import unscale_gradients

_CALL: Final = float(1 << 20)  # larger than any number of ranks; float32 holds it exactly
_EVENTS: Final = 64  # in one message
_MODES: Final = list(SyncMode)


class _LostStepError(Exception):
    """The ranks with data gave up a step."""


class ModelJoinable(Joinable):
    """What `joinable` returns: models, with what is stepped and carried along with them."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], carried: Sequence[Any]
    ) -> None:
        super().__init__()
        _hear_of_joins()
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.carried = list(carried)
        self.units = [unit for model in models for unit in units_in("joinable", model)]
        self.comm = self.units[0].mesh_info.all
        first = _ranks_of(self.comm)
        for unit in self.units:
            if (
                _ranks_of(unit.mesh_info.all) != first
                or not unit.on_one_mesh
                or unit.mesh_info.device != self.units[0].mesh_info.device
            ):
                raise MeshError(
                    f"joinable: unit '{unit.name}' is on ranks"
                    f" {_ranks_of(unit.mesh_info.all)}{' and others' * (not unit.on_one_mesh)}"
                    f" of {unit.mesh_info.device}, and unit '{self.units[0].name}' on ranks {first}"
                    f" of {self.units[0].mesh_info.device}. A rank without data can stand in for"
                    " units on the same ranks and device only; annotate the models on one mesh"
                )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Open a scope, or add this to the one that another joinable has opened.

        The other one is of the same `Join`.
        """
        scope: _Scope | None = open_scope()
        if scope is not None:
            return scope.also(self)
        return _Scope(self, initial=kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where `Join` makes its sums."""
        return self.comm.device

    @property
    def join_process_group(self) -> Any:
        """Over which ranks."""
        mesh = self.units[0].mesh_info.mesh
        return self.comm.group or (dist.group.WORLD if mesh is None else mesh.get_group(0))


def _ranks_of(comm: Comm) -> list[int]:
    if comm.group is None:
        return [dist.get_rank() if is_distributed() else 0]
    return dist.get_process_group_ranks(comm.group)


class _Scope(JoinHook):
    """One `Join`: on a rank with data it says what is done, on a rank without data it does that.

    Attributes:
        source: the rank that says it; buffers follow it.
        narrates: this rank has data, and others have none.
        running: the ranks that had data in the last forward.
    """

    def __init__(self, first: ModelJoinable, *, initial: bool) -> None:
        self.source = 0
        self.narrates = False
        self.running = first.comm.size
        self._members: list[ModelJoinable] = []
        self._others: list[Joinable] = []  # of the same `Join`
        self._their_hooks: list[JoinHook] = []
        self._first = first
        self._comm = first.comm
        self._group, self._device = first.join_process_group, first.join_device
        self._initial = initial
        self._units: list[Unit] = []
        self._indices: dict[Unit, int] = {}
        self._used = False
        self._shadows = False  # this rank has no data any more
        self._open = False  # a forward has begun, and no sum was sent since
        self._phase = ""  # what the source does now: "forward", "backward" or nothing
        self._said: list[int] = []
        self._zeroed: set[int] = set()  # ids of parameters
        self._depth = 0  # of the forwards that this rank follows
        self._undo: list[Callable[[], object]] = []
        self.also(first)
        scope = ref(self)
        step = partial(_to_scope, scope, "step")
        self._undo.append(register_optimizer_step_pre_hook(step).remove)
        _OPEN.append(scope)
        self._undo.append(_OPEN.clear)
        self._undo.append(HEARERS.add(Narrator()))
        self._undo.append(
            DECISIONS.answer(
                source=lambda: open_scope().source, by_arrival=lambda: not open_scope().narrates
            )
        )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        undo, self._undo = self._undo, []
        for each in reversed(undo):
            each()

    def also(self, member: ModelJoinable) -> JoinHook:
        """Another of the joinables of the same `Join`."""
        if self._used:
            raise PhaseError(
                "joinable: a join scope is open already. Scopes do not nest: pass all models to"
                " one, join(model, other, optimizer)"
            )
        if _ranks_of(member.comm) != _ranks_of(self._comm) or member.join_device != self._device:
            raise MeshError(
                f"joinable: models of one Join are on ranks {_ranks_of(member.comm)} of"
                f" {member.join_device} and on ranks {_ranks_of(self._comm)} of {self._device}."
                " Annotate them on one mesh, or open a scope for each"
            )
        self._members.append(member)
        owners: list[nn.Module | Optimizer] = [*member.models, *member.optimizers]
        for owner in owners:
            self._hear_of_zeros(owner)
        for unit in member.units:
            if unit not in self._indices:
                self._indices[unit] = len(self._units)
                self._units.append(unit)
                if not self._initial:
                    self._undo += _scale_gradients(unit, ref(self))
        return self if member is self._first else JoinHook()

    def take(self, joinables: Sequence[Joinable], hooks: list[JoinHook]) -> None:
        """Call the hooks of other joinables from this one's.

        They are called when the source says so, and in the end after this one's.
        """
        for joinable, hook in zip(joinables, [*hooks], strict=True):
            if not isinstance(joinable, ModelJoinable):
                self._others.append(joinable)
                self._their_hooks.append(hook)
        hooks[:] = [
            *(hook for hook in hooks if hook not in self._their_hooks),
            *map(_AtTheEnd, self._their_hooks),
        ]

    # --- sums and messages -----------------------------------------------------------------------

    def _sum(self, mine: float) -> float:
        """Take part in one of the sums that `Join` knows of."""
        return notification_sum(mine, self._group, self._device)

    def _send(self) -> None:
        """Say what was told since the last message.

        Of the ranks with data, all take part, and the source is heard.
        """
        message = torch.zeros(1 + 3 * _EVENTS, dtype=torch.int64)
        message[0] = len(self._said)
        message[1 : 1 + len(self._said)] = torch.tensor(self._said, dtype=torch.int64)
        self._said = []
        self._comm.broadcast(
            [message.to(self._device)], "message to ranks without data", self.source
        )

    def _receive(self) -> Iterator[tuple[Event, int, int]]:
        message = torch.zeros(1 + 3 * _EVENTS, dtype=torch.int64, device=self._device)
        self._comm.broadcast([message], "message to ranks without data", self.source)
        count, *numbers = message.tolist()
        for start in range(0, count, 3):
            event, unit, detail = numbers[start : start + 3]
            torch.set_grad_enabled(bool(event % 2))
            yield Event(event // 2), unit, detail

    def _object(self, value: Any = None) -> Any:
        """Exchange an object: the source's, on all ranks."""
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        length = torch.tensor([sent.numel()], device=self._device)
        label = "call to ranks without data"
        self._comm.broadcast([length], label, self.source)
        if self._comm.rank != self.source:
            sent = sent.new_empty(int(length.item()))
        self._comm.broadcast([sent], label, self.source)
        return pickle.loads(bytes(sent.tolist()))

    def _meet(self) -> None:
        """Find the source: the first rank that has data."""
        rows = self._comm.all_gather_ints(
            [int(not self._shadows)], "exchange of which ranks have data"
        )
        self.source = next(rank for rank, (has_data,) in enumerate(rows) if has_data)

    # --- a rank with data ------------------------------------------------------------------------

    @property
    def _listens(self) -> bool:
        return self._first._join_config.enable and not self._shadows

    def begin(self, root: Root) -> None:
        self._used = True
        if not self._listens:
            return
        if in_backward():  # reentrant checkpoints run it again: a part of the backward
            if self.narrates and self._phase != "backward":
                self._call_backward()
            return
        if self._first._join_config.throw_on_early_termination:
            work = Join.notify_join_context(self._first)
            if work is not None:
                work.wait()
            return
        problem = self._foreign(root)
        self._announce(problem or "forward", self._trains())
        if self.narrates:
            self._phase = "forward"
        if problem is not None:
            raise problem

    def _announce(self, *what: Any) -> None:
        """Count the ranks that have data, and say to the others what begins.

        What begins is a forward, or the turn of another joinable.
        """
        if self._phase:
            self._tell(Event.LOST, 0, 0, now=True)
        self._said, self._phase = [], ""
        if self._open:
            self._sum(1.0)
        self._open = True
        self.running = int(self._sum(1.0))
        self.narrates = self.running < self._comm.size
        if self.narrates:
            self._meet()
            self._object(what)

    def turn(self, other: Joinable) -> bool:
        """Take note that another joinable is about to communicate.

        Returns whether it is one of this scope's `Join`. If so, the scope announces it itself.
        """
        config = self._first._join_config
        if not config.enable or config.throw_on_early_termination or other not in self._others:
            return False
        if not self._shadows:
            self._announce("turn", self._others.index(other))
        return True

    def _trains(self) -> bytes:
        """Which parameters are not frozen."""
        return bytes(parameter.requires_grad for parameter in self._parameters)

    def _freeze(self, trains: bytes) -> None:
        for parameter, flag in zip(self._parameters, trains, strict=True):
            if parameter.requires_grad != bool(flag):
                parameter.requires_grad_(bool(flag))

    def _foreign(self, root: Root) -> Exception | None:
        """Find what is wrong with a root: it has units that this scope does not know."""
        unknown = [unit for unit in root.units if unit not in self._indices]
        if not unknown:
            return None
        if len(unknown) < len(root.units):
            return PhaseError(
                f"unit '{unknown[0].name}' was annotated inside of a join scope, and ranks without"
                " data do not know it. Annotate the whole model before the scope"
            )
        if all(unit.mesh_info.all.size == 1 for unit in unknown):
            return None
        return PhaseError(
            f"unit '{root.name}' of another model ran inside of a join scope, and ranks without"
            " data do not take part in it. Pass the model to the scope: join(model, other,"
            " optimizer)"
        )

    def open(self, root: Root) -> None:
        if not self._listens or root.units[0] not in self._indices:
            return
        missing = self._never_stepped(root)
        if not self.narrates:
            self._zeroed.clear()
            if missing is not None:
                raise missing
            return
        if self._phase != "backward":
            if missing is not None:
                self._call("raise", missing)
                raise missing
            self._call_backward()
        self.tell(Event.OPEN, root.units[0])

    def _call_backward(self) -> None:
        modes = [_MODES.index(unit.gradients.accumulation.now) for unit in self._units]
        self._call("backward", self._trains(), modes, *self._cleared())
        self._phase = "backward"

    def _never_stepped(self, root: Root) -> Exception | None:
        """Every rank steps its own shards: a rank without data needs to know the optimizer."""
        stepped = {id(p) for each in self._optimizers for p in _parameters_of(each)}
        for unit in root.units:
            for param in unit.params if unit.is_sharded else ():
                at_rest = param.at_rest
                if (
                    at_rest.requires_grad
                    and id(at_rest) not in stepped
                    and stepped_in_backward([at_rest]) is None
                ):
                    return OptimizerError(
                        f"join: parameter '{param.fqn}' of unit '{unit.name}' is trained by no"
                        " optimizer that the scope knows. A rank without data goes on to hold its"
                        " shard, and has to step it: join(model, optimizer), or joinable(model,"
                        " optimizer)"
                    )
        return None

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [each for member in self._members for each in member.optimizers]

    @property
    def _carried(self) -> list[Any]:
        return [each for member in self._members for each in member.carried]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [param.at_rest for unit in self._units for param in unit.params]

    def tell(self, event: Event, unit: Unit, detail: int = 0, *, now: bool = False) -> None:
        if self._listens and self.narrates and self._phase:
            self._tell(event, self._indices.get(unit, 0), detail, now=now)
            ends = event is Event.END and not detail
            if ends or (event is Event.LEAVE and now and self._phase == "forward"):
                self._phase = ""

    def _tell(self, event: Event, unit: int, detail: int, *, now: bool) -> None:
        self._said += [2 * event + torch.is_grad_enabled(), unit, detail]
        if now or len(self._said) == 3 * _EVENTS:
            self._send()

    def _call(self, *what: Any) -> None:
        """Between forwards and backwards: say that something is called."""
        self._sum(_CALL if self._comm.rank == self.source else 0.0)
        self._object(what)

    def call(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if not self._listens:
            return
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        known = [numbers[id(parameter)] for parameter in parameters if id(parameter) in numbers]
        if not known:
            return
        if what == "unscale":
            scaler, inverse_scale, allow_fp16 = args
            if scaler not in self._carried:
                raise OptimizerError(
                    f"join: {type(scaler).__name__} scales gradients of a model in the scope, and"
                    " is not known to it. Pass it, so that ranks without data go on with its"
                    " scale: join(model, optimizer, scaler), or joinable(model, optimizer, scaler)"
                )
            args = (float(inverse_scale), allow_fp16) if self.narrates else ()
        if self.narrates:
            self._call(what, known, *args)

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`optimizer` is about to step."""
        if not self._listens:
            return
        if optimizer in self._optimizers:
            if len(args) > 1 or kwargs.get("closure") is not None:
                raise OptimizerError(
                    f"join: {type(optimizer).__name__}.step was called with a closure, which ranks"
                    " without data do not have. Run forward and backward before the step"
                )
            if self.narrates:
                self._call("step", self._optimizers.index(optimizer), _options_of(optimizer))

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

    def _hear_of_zeros(self, owner: nn.Module | Optimizer) -> None:
        """Note calls of `zero_grad(set_to_none=False)`.

        After other calls the gradients are None, which can be seen afterwards.
        """
        scope, before = ref(self), owner.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            before(set_to_none)
            if not set_to_none and (found := scope()) is not None:
                found._zeroed.update(map(id, _parameters_of(owner)))

        of_instance = "zero_grad" in vars(owner)
        owner.zero_grad = zero_grad  # type: ignore[method-assign]
        self._undo.append(
            partial(setattr, owner, "zero_grad", before)
            if of_instance
            else partial(delattr, owner, "zero_grad")
        )

    # --- a rank without data ---------------------------------------------------------------------

    def main_hook(self) -> None:
        self._used = True
        if not self._shadows:
            self._shadows = True
            if self._open:
                self._sum(0.0)  # the first sum was that which closes this rank's last iteration
        self._open = True
        grad = torch.is_grad_enabled()
        try:
            while self._follow_iteration():
                self._sum(0.0)
        finally:
            torch.set_grad_enabled(grad)

    def _follow_iteration(self) -> bool:
        """Shadow one forward, or call the hook of another joinable, and do what follows.

        Returns whether there is more to come.
        """
        self._meet()
        what, detail = self._object()
        if what == "turn":
            self._their_hooks[detail].main_hook()
        elif what == "forward":
            self._freeze(detail)
            try:
                self._follow(in_backward=False)
            except _LostStepError:
                self._reset()
        else:
            raise what
        while (said := self._sum(0.0)) >= _CALL:
            self._perform(*self._object())
        return said > 0

    def _follow(self, *, in_backward: bool) -> None:
        """Do what the source tells, until its forward or backward has ended."""
        while True:
            for event, unit, detail in self._receive():
                if event is Event.LOST:
                    raise _LostStepError
                if event is Event.END and not detail:
                    return
                shadow(self._units[unit], event, detail)
                self._depth += (event is Event.ENTER) - (event is Event.LEAVE)
            if not self._depth and not in_backward:
                return

    def _reset(self) -> None:
        self._depth = 0
        roots.reset([model for member in self._members for model in member.models])

    def _perform(self, what: str, *args: Any) -> None:
        if what == "raise":
            raise args[0]
        if what == "backward":
            self._follow_backward(*args)
        elif what == "step":
            optimizer, options = self._optimizers[args[0]], args[1]
            _set_options(optimizer, options)
            with torch.enable_grad():
                optimizer.step()
        else:
            parameters = [self._parameters[number] for number in args[0]]
            if what == "reduce":
                roots.reduce_held(list(dict.fromkeys(filter(None, map(unit_of, parameters)))))()
            elif what == "clip":
                try:
                    clip_grad_norm_(parameters, *args[1:-1], error_if_nonfinite=args[-1])
                except NonFiniteError:
                    return
            else:
                scale, allow_fp16 = args[1:]
                inverse = torch.tensor(scale, dtype=torch.float32, device=self._device)
                unscale_gradients(parameters, inverse, allow_fp16)

    def _follow_backward(
        self, trains: bytes, modes: list[int], none: list[int], zeroed: list[int]
    ) -> None:
        self._freeze(trains)
        self._clear(none, zeroed)
        scope = object()
        for unit, mode in zip(self._units, modes, strict=True):
            unit.gradients.accumulation.open_scope(scope, _MODES[mode])
        try:
            # In autograd's engine, which calls the end of backward.
            with torch.enable_grad():
                anchor = torch.zeros((), device=self._device, requires_grad=True)
                outcome = _Shadow.apply(anchor, partial(self._follow, in_backward=True))  # type: ignore[no-untyped-call]
                outcome.backward()
        except _LostStepError:
            self._reset()
        finally:
            for unit in self._units:
                unit.gradients.accumulation.close_scope(scope)

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

    # --- all ranks -------------------------------------------------------------------------------

    def post_hook(self, is_last_joiner: bool) -> None:
        self._used = True
        if is_last_joiner and self._open and self.running < self._comm.size:
            self._sum(0.0)  # ranks that left the scope earlier wait in `Join`, and not in this hook
        last = self._comm.all_gather_ints(
            [int(is_last_joiner)], "exchange of which ranks had data to the end"
        )
        if not all(row[0] for row in last):
            self._take_over([row[0] for row in last].index(1), is_last_joiner)
        self.close()

    @torch.no_grad()
    def _take_over(self, source: int, is_last_joiner: bool) -> None:
        """Let ranks without data take over what is not trained by gradients.

        They take it from a rank that had data to the end.
        """
        self.source = source
        optimizers, carried = self._optimizers, self._carried
        state = (
            [_options_of(each) for each in optimizers],
            [each.state_dict() for each in carried],
            self._cleared(),
            self._trains(),
        )
        options, states, cleared, trains = self._object(state)
        broadcast_buffers(self._units, source, saved=False)
        stepped = {id(p) for each in optimizers for p in _parameters_of(each)}
        replicated = [
            param.at_rest for unit in self._units if not unit.is_sharded for param in unit.params
        ]
        unknown = [
            p for p in replicated if id(p) not in stepped and stepped_in_backward([p]) is None
        ]
        self._comm.broadcast(locals_of(unknown), "broadcast of parameters after join", source)
        if not is_last_joiner:
            self._freeze(trains)
            for optimizer, option in zip(optimizers, options, strict=True):
                _set_options(optimizer, option)
            for each, its_state in zip(carried, states, strict=True):
                each.load_state_dict(its_state)
            self._clear(*cleared)


class _AtTheEnd(JoinHook):
    """The hook of another joinable, without what the scope calls."""

    def __init__(self, hook: JoinHook) -> None:
        self.post_hook = hook.post_hook  # type: ignore[method-assign]


@cache
def _hear_of_joins() -> None:
    """Let a scope know of the other joinables of its `Join`, and of what they say to it."""
    make, notify = Join.__init__, Join.notify_join_context

    @wraps(make)
    def made(join: Join, joinables: list[Joinable], *args: Any, **kwargs: Any) -> None:
        make(join, joinables, *args, **kwargs)
        # By now `joinable`s have opened the scope.
        scope: _Scope | None = open_scope()
        if scope is not None and any(isinstance(each, ModelJoinable) for each in joinables):
            scope.take(joinables, join_hooks(join))

    @wraps(notify)
    def notified(joinable: Joinable) -> Any:
        scope: _Scope | None = open_scope()
        if scope is not None and scope.turn(joinable):
            return None
        return notify(joinable)

    Join.__init__ = made  # type: ignore[method-assign, assignment]
    Join.notify_join_context = staticmethod(notified)  # type: ignore[method-assign]


class _Shadow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, follow: Callable[[], None]) -> Tensor:
        ctx.follow = follow
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        ctx.follow()
        return None, None


def _to_scope(scope: ref[_Scope], method: str, *args: Any) -> None:
    found = scope()
    if found is not None:
        getattr(found, method)(*args)


def _parameters_of(owner: nn.Module | Optimizer) -> Sequence[Tensor]:
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The learning rate and the like."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _set_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)


def _scale_gradients(unit: Unit, scope: ref[_Scope]) -> list[Callable[[], object]]:
    """The mean over the ranks that have data, where the library divides by all of them."""

    def scaled(gradient: Tensor) -> Tensor:
        found = scope()
        if found is None or found.running == found._comm.size:
            return gradient
        return gradient * (found._comm.size / found.running)

    return hook_gradients([param.compute for param in unit.params], scaled)


def joinable(model: nn.Module, *others: Any) -> Joinable:
    """Make a model known to torch's `Join`, so that ranks may have different numbers of batches.

    A rank that has left the scope takes part in what the others do: it gathers and reduces with
    zeros for gradients, and follows them in `optimizer.step()`, `zero_grad`, `no_sync`,
    `reduce_gradients`, `clip_grad_norm_` and `GradScaler`. So all ranks have the same parameters
    and the same states of optimizers in the end. Buffers of replicated models follow a rank that
    has data. `join(model, optimizer)` is the short form.

    Other joinables may stand before or behind it in the list, and be called before or after it: a
    `ZeroRedundancyOptimizer` over a replicated model, a `DistributedDataParallel`, one of your own
    that calls `Join.notify_join_context` before its collectives. Keyword arguments of `Join`:
    `divide_by_initial_world_size`, see `join`.

    Args:
        model: annotated, all of it on the same ranks.
        others: more models that run in the scope; the optimizers, which are needed for sharded
            models that are trained; and objects with `state_dict` and `load_state_dict`, such as a
            `GradScaler` or a scheduler, whose state is taken over from a rank that had data to the
            end. A rank without data steps with the options (learning rates) of the others.

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
    models, optimizers, carried = [model], [], []
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


@contextmanager
def join(
    model: nn.Module,
    *others: Any,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Let ranks run out of data at different times: `Join([joinable(model, *others)], ...)`.

    Inside the scope every rank trains, or evaluates, on as many batches as it has. All ranks enter
    and leave it. Before each forward of a model the ranks exchange one number, twice; once a rank
    has run out, one more message per unit is sent.

    A rank leaves the scope right after its last batch. Collectives that the library does not see,
    such as `dist.all_reduce` of a loss, `SyncBatchNorm` and torch's own `clip_grad_norm_`, must not
    be called inside. What changes gradients between backward and step, and what has to happen on
    every rank after a step, belongs in hooks of the optimizer (`register_step_pre_hook`), which
    ranks without data call, too.

    Args:
        model: annotated, all of it on the same ranks.
        others: as for `joinable`: more models, the optimizers, a `GradScaler`, schedulers.
        divide_by_initial_world_size: gradients are divided by the number of all ranks; False: by
            the number of those that had data in the last forward.
        enable: False if no rank can run out: nothing is exchanged.
        throw_on_early_termination: raise on all ranks when one has run out.

    Raises:
        NotAnnotatedError, MeshError, OptimizerError: as for `joinable`.
        PhaseError: a model ran inside that was not passed, or was annotated inside.
        OptimizerError: a sharded parameter is trained by no optimizer that was passed.

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
        [joinable(model, *others)],
        enable=enable,
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
