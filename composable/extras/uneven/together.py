"""`together`: a step that one rank loses is lost on all ranks, and the job goes on.

All ranks launch the same collectives in every step. So a rank whose step raises an error knows
which launches the other ranks still wait for: those of the last complete step that it has not made
yet in this step. It resets the step, and makes these launches. It gathers its own shards, so the
other ranks compute with correct values, and sends zeros instead of gradients. At the end of the
scope all ranks vote, and a rank that lost its step sends the reason.

| a rank       | in the scope                             | at its end                         |
|--------------|------------------------------------------|------------------------------------|
| has raised   | `reset`, then the launches that are left | votes "lost", and says why         |
|              | of the step before                       |                                    |
| has said     | nothing; its gradients get zeros         | votes "lost", and says why         |
| `lose(why)`  |                                          |                                    |
| has neither  | nothing; its gradients get zeros         | votes; if the step is lost, puts   |
|              |                                          | buffers back                       |

`comm/base.py` notifies this file of all launches. Nothing in the engine knows of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from composable import reset
from composable.checked import PositiveInt, checked
from composable.comm.base import Columns, Comm, compare_launches, observe_launches
from composable.comm.launch import Launch, LaunchKind
from composable.comm.supplied import SuppliedComm
from composable.compilation import unwrapped
from composable.contract.values import parameters_of
from composable.errors import (
    CommunicationError,
    PhaseError,
    RanksDisagreeError,
    StepLostError,
    UnsupportedError,
    first_line,
)
from composable.seams import (
    Call,
    Observer,
    Root,
    Unit,
    hooks_of,
    label_of,
    lose_step,
    observe,
    open_scope,
    stepped_in_backward,
    units_in,
)
from composable.torch_private import as_tensors, in_backward, version_of

_COMPARISONS: Final = (
    LaunchKind.COMPARE_LAUNCHES, LaunchKind.COMPARE_FORWARDS, LaunchKind.COMPARE_BACKWARDS,
)  # fmt: skip
_SUMS: Final = ("reduce_scatter", "all_reduce")  # to which a rank can add zeros
_VOTE: Final = Launch("vote on the step")
_KEEP, _SAID, _RAISED = range(3)  # what a rank votes; the largest vote counts
# What may begin in the scope: a rank that gives the step up is as far with it as one that does not.
_IN_STEPS: Final = (
    "together", "no_sync", "reduce_gradients", "unshard", "reshard", "keep_unsharded", "reset",
)  # fmt: skip


class _Launched(NamedTuple):
    """One launch of a step.

    Attributes:
        collective: what was launched for it.
        option: the scale of sums, or the rank that sends a broadcast.
        sizes: of the tensors of sums: numbers of elements and dtypes.
        held: what it had at hand: the message of a broadcast, the numbers that were sent.
        group: for a gather, indices of the unit and of its group; None if they are not known.
    """

    comm: Comm
    launch: Launch
    collective: str
    option: Any
    sizes: tuple[tuple[tuple[int, torch.dtype], ...], ...] = ()
    held: Any = None
    group: tuple[int, int] | None = None

    @property
    def made(self) -> tuple[object, ...]:
        """By which it is compared with a launch of another step."""
        launch = self.launch
        return launch.text, launch.kind, self.collective, self.option, self.sizes, self.group

    @property
    def can_repeat(self) -> bool:
        """Whether a rank that has lost the step can make this launch."""
        if self.launch.kind is LaunchKind.GATHER:
            return self.group is not None
        return self.collective in (*_SUMS, "broadcast") or self.launch.kind in _COMPARISONS


@dataclass(eq=False)
class _Record:
    """What is known of the steps of one model.

    Attributes:
        launches: of the last whole step.
        lost: steps that were lost since.
    """

    launches: Sequence[_Launched] = ()
    lost: int = 0


_RECORDS: Final[WeakKeyDictionary[Unit, _Record]] = WeakKeyDictionary()  # by the first unit
_OPEN: Final[list[together]] = []


class _Where(Observer):
    """Follows what the step does, to say where it raised."""

    def __init__(self, scope: together) -> None:
        self.now = ""  # where this rank is, in words
        self.raised: BaseException | None = None  # in a forward, and where
        self.place = ""
        self._backward = ""
        self._scope = scope

    def end(self, error: BaseException | None) -> str:
        """Where the step is that ends, or has raised `error`; keeps no exception."""
        raised, self.raised = self.raised, None
        return (self.place if error is raised else self.now) or "outside of all units"

    @override
    def pre_forward(self, root: Root, call: Call) -> None:
        self._scope.refuse_other_model(root)
        forward = "forward" if call.root is root else "recomputation"
        self.now = f"in the {forward} of unit '{call.unit.name}'"

    @override
    def post_forward(self, root: Root, call: Call, keep: bool) -> None:
        outer = root.running[:-1] if call.root is root else []
        self.now = f"in the forward of unit '{outer[-1].name}'" if outer else self._backward

    @override
    def raises(self, root: Root, call: Call, error: BaseException) -> None:
        if error is not self.raised:  # from the innermost unit outwards
            self.raised, self.place = error, self.now
        outer = [unit for unit in root.running if unit is not call.unit]
        self.now = f"in the forward of unit '{outer[-1].name}'" if outer else self._backward

    @override
    def pre_backward(self, root: Root, call: Call) -> None:
        # or behind it, in what is around it: nobody tells when autograd has left a unit
        self.now = self._backward = f"in backward, near unit '{call.unit.name}'"

    @override
    def ends_backward(self, root: Root) -> None:
        self.now = self._backward = "at the end of backward"

    @override
    def gradients_landed(self) -> None:
        self.now = self._backward = ""

    @override
    def communicates(self, what: str, parameters: Sequence[Tensor], *args: Any) -> None:
        if what == "unscale":
            self._scope.refuse("GradScaler.unscale_() or step()")

    @override
    def calls(self, what: str) -> None:
        if what not in _IN_STEPS:
            self._scope.refuse(what)

    @override
    def exchanges_values(self, back: bool) -> None:
        if back:
            self._scope.note_versions()  # the values are those from before
        else:
            self._scope.look_for_writes()


class together:
    """Lose a step on all ranks if it raises on one, and go on with the next one.

    Put a step into the scope, up to the last reduction: all micro-batches with their forwards and
    backwards. Put the scaler, the optimizer's step and the scheduler after the scope. A call that
    writes to parameters inside the scope raises an error, on all ranks.

    If a rank raises, it gives up its step and launches the collectives that the other ranks wait
    for, with its own shards, and zeros for gradients. The scope does not raise the exception. At
    the end of the scope the ranks vote with one message of three integers, for which the host
    waits.

    A rank that finds a step bad without an exception calls `lose`. It continues to compute, like
    the others, and all ranks lose the step at the end. This works in every step, including the
    first ones.

    After a lost step, gradients are not usable: call `zero_grad()` on all ranks. The scope restores
    the model's buffers on all ranks, but not the random number generators.

    Some exceptions are raised as without the scope: an error on all ranks, so that a mistake does
    not skip every step; an exception that is not an `Exception`, such as `KeyboardInterrupt`; a
    collective that failed; and an exception in a step in which the rank cannot follow the others. A
    note on the exception says so, and the other ranks wait until their timeout. A rank can follow
    the others only in a step that launches the same collectives as the step before. It cannot do so
    in the first two steps (ranks agree on orders in the first), nor in a step with another number
    of forwards, with another branch of the model, or with parameters that were frozen since.

    Args:
        module: an annotated model.
        give_up_after: raise an error when this many steps in a row are lost.

    Attributes:
        lost: whether the step is lost. It is the same on all ranks, and is set when the scope ends.
        why: which rank lost the step, and its error with the place, or its text. It is the same on
            all ranks.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: the scope is inside another `together`, inside `join`, or inside a step; another
            annotated model is called in the scope; an optimizer steps in the scope, or another call
            writes in it.
        UnsupportedError: the model has collectives that the library does not launch, or features
            that one rank cannot give up: tensor-parallel parameters, units over different ranks
            (experts), communication hooks, synchronised batch norms, sparse gradients, optimizers
            in backward, replicas that train apart, `reshard_after_forward` with a number.
        StepLostError: `give_up_after` steps in a row were lost, on all ranks.

    Example:
        >>> for batch in loader:
        ...     with composable.together(model) as step:
        ...         loss_of(model, batch).backward()
        ...     if step.lost:  # on all ranks alike
        ...         print(step.why)
        ...     else:
        ...         optimizer.step()
        ...     optimizer.zero_grad()
    """

    @checked
    def __init__(self, module: nn.Module, *, give_up_after: PositiveInt = 3) -> None:
        self.lost, self.why = False, ""
        self._refused: PhaseError | None = None  # what all ranks raise that come there
        self._model, self._give_up_after = unwrapped(module), int(give_up_after)
        self._units = units_in(module, caller="together")
        self._comm = self._units[0].mesh_info.all
        self._refuse()

    def lose(self, why: str) -> None:
        """Lose this step on all ranks. One rank, or several, may call it.

        The call raises nothing and sends nothing. Continue to the end of the scope, with all
        forwards and backwards, because the other ranks do. At the end, all ranks have `lost` and
        `why`.

        Args:
            why: the text for `why`: what this rank has seen.

        Raises:
            PhaseError: the scope is not open. Only the ranks that call `lose` raise it.

        Example:
            >>> with composable.together(model) as step:
            ...     loss = loss_of(model, batch)
            ...     loss.backward()
            ...     if loss.item() > 10 * usual:
            ...         step.lose(f"the loss is {loss.item():.1f}")
        """
        if self not in _OPEN:
            raise PhaseError(
                f"together: lose({why!r}) was called outside of the scope. Ranks decide on a step"
                " where the scope ends: call it before"
            )
        self._said.append(str(why))  # what cannot be pickled would keep the others waiting

    def _refuse(self) -> None:
        for unit in self._units:
            if unit.gradients.has_unreduced or in_backward():
                raise PhaseError(
                    f"together: unit '{unit.name}' is in a backward, or has accumulated gradients"
                    " under no_sync. Open the scope before the first forward of a step: it holds"
                    " all micro-batches"
                )
            if why := _obstacle(unit, self._comm):
                raise UnsupportedError(
                    f"together: unit '{unit.name}' has {why}: the other ranks would wait for what"
                    " a rank that gave up its step cannot do. Leave the scope out; a step that one"
                    " rank alone loses ends the job then"
                )
        for name, module in self._model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"together: '{name}' is a SyncBatchNorm, whose collectives are torch's: the"
                    " other ranks would wait for what a rank that gave up its step cannot do. Use"
                    " a norm without collectives, or leave the scope out"
                )

    def refuse_other_model(self, root: Root) -> None:
        """Raise if a forward is not of the scope's model."""
        if not {*self._units}.issuperset(root.units):
            raise PhaseError(
                f"together: a forward of unit '{root.units[0].name}' of another annotated model was"
                " called in the scope, which knows one model. Pass a module that contains both, or"
                " call the other model before the scope"
            )

    def refuse(self, what: str) -> NoReturn:
        """Raise, as the other ranks do that come here: none has stepped, or written, yet.

        Args:
            what: was called.
        """
        self._refused = PhaseError(
            f"together: {what} was called in the scope. A rank that loses the step does not come"
            " there, and would be left with other values than the ranks that do. Call it behind the"
            " scope, where all ranks know step.lost"
        )
        raise self._refused

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        mine = {id(parameter) for parameter in self._model.parameters()}
        parameters = parameters_of(optimizer)
        if any(map(label_of, parameters)) or not mine.isdisjoint(map(id, parameters)):
            self.refuse(f"{type(optimizer).__name__}.step()")

    def __enter__(self) -> Self:
        if _OPEN or open_scope() is not None:
            raise PhaseError(
                f"together: the scope was opened inside of {'another one' if _OPEN else 'join'}."
                " One scope holds one whole step; ranks without data are followed by join, and"
                " cannot stand in for one that raises as well"
            )
        self._refuse()  # what has changed since it was made
        self.lost, self.why = False, ""
        self._refused = None
        self._said: list[str] = []
        self._record = _RECORDS.setdefault(self._units[0], _Record())
        self._launched: list[_Launched] = []
        self._where = _Where(self)
        # `keep_unsharded` may show casts of buffers in their place
        own = {id(cast): buffer for unit in self._units for cast, buffer in unit.buffers_shown()}
        buffers = [
            (module, name, own.get(id(buffer), buffer))
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._buffers = [(*each, each[-1].detach().clone()) for each in buffers]
        self._wrote = 0
        self.note_versions()
        self._undo = ExitStack()
        _OPEN.append(self)
        self._undo.callback(_OPEN.clear)
        self._undo.callback(observe(self._where))
        self._undo.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._undo.callback(observe_launches(launched=self._on_launch))
        self._undo.callback(self._launched.clear)
        return self

    def _on_launch(
        self, comm: Comm, launch: Launch, collective: str, tensors: Columns, option: Any
    ) -> None:
        launched = _Launched(comm, launch, collective, option)
        if collective in _SUMS:
            sizes = tuple(tuple((t.numel(), t.dtype) for t in each) for each in tensors)
            launched = launched._replace(sizes=sizes)
        elif collective == "broadcast":
            ((held,),) = tensors
            launched = launched._replace(held=held)
        elif launch.kind is LaunchKind.COMPARE_BACKWARDS:
            _, (sent,) = tensors
            launched = launched._replace(held=sent.tolist())
        self._launched.append(launched)

    def _launches(self) -> list[_Launched]:
        """List what this step has launched.

        Gathers are identified by the indices of their groups, which are built anew when users move
        parameters.
        """
        groups: dict[object, tuple[int, int]] = {
            group: (index, number)
            for index, unit in enumerate(self._units)
            for number, group in enumerate(unit.groups)
        }
        return [
            # a group that was built anew since is not known
            each._replace(group=groups.get(each.launch.sender))
            if each.launch.kind is LaunchKind.GATHER
            else each
            for each in self._launched
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        launched = self._launches()
        self._undo.close()
        # what is held from here on is held by the frame alone, also if something is raised
        buffers, self._buffers = self._buffers, []
        refused, self._refused = self._refused, None
        place = self._where.end(error)
        if error is not None:
            reset(self._model)
            if not isinstance(error, Exception) or isinstance(
                error, (CommunicationError, RanksDisagreeError)
            ):
                return False
            if (why := self._cannot_follow(launched)) and error is refused:
                return False  # all ranks raise it
            if why:
                error.add_note(
                    f"together: this step was not given up together with the other ranks, since"
                    f" {why}. Ranks that did not raise wait for this one until their timeout"
                )
                return False
            text = "".join(traceback.format_exception(error))
            error.add_note(f"together: this error was raised so:\n{text}")
            del trace
            _drop_frames(error)
            self._end_unshard()
        try:
            for each in self._record.launches[len(launched) :] if error is not None else ():
                self._again(each)
            vote = _RAISED if error is not None else _SAID if self._said else _KEEP
            mine = [vote, self.look_for_writes(), self._give_up_after]
            self._at_rest.clear()
            (least, fewest, low), (decision, most, high) = self._comm.min_max(mine, _VOTE)
        except CommunicationError as failure:
            if error is not None:
                failure.add_note(
                    f"together: this rank had raised {type(error).__name__}:"
                    f" {first_line(error)}. It followed the step before, and the other ranks may"
                    " have been in one of another kind"
                )
            raise
        if low != high:  # one rank would raise StepLostError, and the others go on
            raise RanksDisagreeError(
                f"together: the ranks differ in give_up_after: from {low} to {high}. Pass the same"
                " arguments on every rank"
            ) from error
        if decision and fewest != most:  # in a good step all ranks have written, or may go on so
            self._refuse_written(most - 1, error)
        if decision != _RAISED:  # the step was whole on all ranks
            self._record.launches = launched
        if decision == _KEEP:
            self._record.lost = 0
            return False
        self._end_unshard()
        _put_back(buffers)
        return self._lose(error, place, everywhere=least == _RAISED)

    def _end_unshard(self) -> None:
        """Free what `unshard()` has gathered.

        Some ranks have used it in the lost step, and some have not come to gather it.
        """
        for unit in self._units:
            unit.hide()
            unit.free()

    def look_for_writes(self) -> int:
        """The number, from 1, of the first parameter that was written to in the scope; else 0."""
        if not self._wrote:
            with as_tensors():
                now = map(version_of, self._at_rest)
                pairs = enumerate(zip(self._versions, now, strict=True), start=1)
                changed = (number for number, (before, after) in pairs if before != after)
                self._wrote = next(changed, 0)
        return self._wrote

    def note_versions(self) -> None:
        """Writes count from now on."""
        self._at_rest = [param.at_rest for unit in self._units for param in unit.params]
        with as_tensors():
            self._versions = [*map(version_of, self._at_rest)]

    def _refuse_written(self, number: int, error: BaseException | None) -> NoReturn:
        names = [(param.fqn, unit.name) for unit in self._units for param in unit.params]
        fqn, unit = names[number]
        raise PhaseError(
            f"together: parameter '{fqn}' of unit '{unit}' was written to in the scope by some"
            " ranks, and the step was lost before others came to that: they have other values now."
            " Load a checkpoint, and write to parameters behind the scope, where all ranks know"
            " step.lost"
        ) from error

    def _cannot_follow(self, launched: Sequence[_Launched]) -> str:
        """Why it is not known what the other ranks go on to launch; empty if it is."""
        before = self._record.launches
        if not before:
            return "no step before it was whole"
        once = next((each.launch.text for each in before if not each.can_repeat), "")
        if once:  # as ranks agree, or are compared, in the first step
            return f"the step before it made the {once}, which others do not make"
        if [each.made for each in launched] != [each.made for each in before[: len(launched)]]:
            return "it launched something else than the step before"
        return ""

    @torch.no_grad()
    def _again(self, each: _Launched) -> None:
        """Make a launch that the other ranks wait for, and wait for it."""
        comm, launch = each.comm, each.launch
        zeros = [
            [torch.zeros(numel, dtype=dtype, device=comm.device) for numel, dtype in column]
            for column in each.sizes
        ]
        if each.group is not None:
            unit = self._units[each.group[0]]
            group = unit.groups[each.group[1]]
            group.unshard()
            group.wait_for_unshard()
            unit.free()
        elif each.collective == "reduce_scatter":
            comm.reduce_scatter(list(zip(*zeros, strict=True)), launch, each.option).wait()
        elif each.collective == "all_reduce":
            comm.all_reduce(zeros[0], launch, each.option).wait()
        elif each.collective == "broadcast":
            comm.broadcast([each.held], launch, each.option)
        elif launch.kind is LaunchKind.COMPARE_BACKWARDS:  # it says what it said in the step before
            comm.all_gather_ints(each.held, launch)
        elif launch.kind is LaunchKind.COMPARE_FORWARDS:  # one that counts none agrees with all
            comm.all_gather_ints([0, 0], launch)
        else:
            assert launch.kind is LaunchKind.COMPARE_LAUNCHES
            compare_launches(comm)

    def _lose(self, error: BaseException | None, where: str, *, everywhere: bool) -> bool:
        """Some rank has lost the step. Returns whether the exception of this rank is not raised."""
        self.lost = True
        mine = [*self._said]
        if error is not None:
            mine.append(f"{type(error).__name__} {where}: {first_line(error)}")
        said = self._comm.all_gather_objects(mine, Launch("exchange of why the step is lost"))
        self.why = "; ".join(
            f"rank {rank}: {text}" for rank, texts in enumerate(said) for text in texts
        )
        lose_step(self._units)
        if everywhere:
            return False
        self._record.lost += 1
        if self._record.lost >= self._give_up_after:
            raise StepLostError(
                f"together: {self._record.lost} steps in a row were lost. The last one: {self.why}."
                " Look at what that rank does, or allow more by give_up_after="
            ) from error
        return True


@torch.no_grad()
def _put_back(buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, before in buffers:
        if buffer.shape == before.shape:
            buffer.copy_(before)
        module._buffers[name] = buffer if buffer.shape == before.shape else before


def _drop_frames(error: BaseException) -> None:
    """Free activations: frames hold them, by closures of torch's also when cleared."""
    errors: list[BaseException | None] = [error]
    for each in errors:
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            errors += [each.__cause__, each.__context__]


def _obstacle(unit: Unit, comm: Comm) -> str:
    """Why a step with this unit cannot be given up by one rank; empty if it can."""
    params, info = unit.params, unit.mesh_info
    obstacles = {
        "tensor-parallel parameters": not all(param.is_whole for param in params),
        "parameters over other ranks than the rest of the model": (
            info.all is not comm or not unit.on_one_mesh
        ),
        "replicas that train apart, by local_steps": info is not unit.spec.mesh_info,
        "a communication hook": hooks_of(unit),
        "sparse gradients": unit.gradients.sparse,
        "reshard_after_forward with a number of ranks": info.post_forward,
        "messages in memory that somebody supplies": isinstance(info.shard, SuppliedComm),
        "an optimizer in backward": stepped_in_backward([param.at_rest for param in params]),
    }
    return next((text for text, is_there in obstacles.items() if is_there), "")
