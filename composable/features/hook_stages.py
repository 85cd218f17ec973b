"""Communication hooks: a user's function in place of one stage of the gradient reduction, with its
divisions.

| mesh          | stage          | the hook gets          | and returns the mean over |
|---------------|----------------|------------------------|---------------------------|
| `replicate`   | all_reduce     | whole gradients        | all ranks                 |
| `fully_shard` | reduce_scatter | whole gradients (1)    | all ranks                 |
| hybrid        | reduce_scatter | whole gradients (1)    | the shard dimension       |
| hybrid        | all_reduce     | this rank's shards (2) | the replicate dimension   |

(1) This rank keeps its shards of what the hook returns.
(2) They are means over the shard dimension.

So hooks that were written for an all-reduce also work for shards, but send the bytes of an
all-reduce. They see gradients in the shapes of their parameters, which PowerSGD needs. The flags of
unused parameters are sent in a small all-reduce of their own, after the hook.

On an accelerator, the engine waits for the hook where it would wait for the collective. On a host
it waits at once. Otherwise, if a hook launches a second collective when its first is complete, it
would do so on a thread of the backend, in another order on each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from composable.comm.base import DONE, Comm, Work, cut_flat
from composable.comm.launch import Launch
from composable.comm.ledger import ledger_of
from composable.engine.gradients.grad_bucket import GradBucket
from composable.engine.gradients.reduction import Stage
from composable.engine.gradients.unit_gradients import Stages, UnitGradients, UnitKind
from composable.engine.params.param import cut
from composable.engine.step.unit import Unit
from composable.errors import CommHookError, CommunicationError, first_line

REDUCE_SCATTER: Final = "reduce_scatter"
ALL_REDUCE: Final = "all_reduce"


@dataclass(eq=False)
class HookBucket:
    """Gradients that are reduced together, as a hook sees them: the methods of
    `torch.distributed.GradBucket`, and more.

    Attributes:
        fqns: names of the parameters, below the module that the hook was registered for.
        scale: what the sum over the ranks is multiplied by where there is no hook.
        group: the ranks that reduce these gradients.
    """

    fqns: tuple[str, ...]
    scale: float
    group: dist.ProcessGroup
    _buffer: Tensor
    _shapes: Sequence[torch.Size]
    _parameters: Sequence[Tensor]
    _index: int = 0
    _is_last: bool = False

    def index(self) -> int:
        """A number that belongs to these parameters in this order, and to no others, when buckets
        are filled anew.
        """
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket of this hook follows in this backward. A backward that leaves out
        a unit has no last one.
        """
        return self._is_last

    def buffer(self) -> Tensor:
        """The gradients, one behind the other, flat. The hook may write to it."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer()` and `gradients()` be of another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, each with the shape of its gradient."""
        return cut_flat(self._buffer, self._shapes)

    def parameters(self) -> list[Tensor]:
        """The at-rest parameters."""
        return list(self._parameters)


class CommHook:
    """One registration of a hook.

    Args:
        state: the hook's first argument. If it is None, or its `process_group` is, the hook gets
            the ranks that reduce.
    """

    def __init__(self, hook: Callable[[Any, Any], Any], state: Any) -> None:
        self.name = str(getattr(hook, "__name__", None) or type(hook).__name__)
        self._stages: dict[UnitGradients, list[HookStage]] = {}
        self._hook = hook
        self._state = state
        self._called: set[HookStage] = set()  # in this backward
        self._indices: dict[tuple[str, ...], int] = {}

    def __deepcopy__(self, memo: dict[Any, Any]) -> CommHook:
        state = self._state
        if not isinstance(state, dist.ProcessGroup):
            try:
                state = copy.deepcopy(state, memo)
            except TypeError as error:
                raise CommHookError(
                    f"copy.deepcopy: the state of the communication hook '{self.name}' cannot be"
                    f" copied: {error}. Remove the hook first, or give {type(state).__name__} a"
                    " __deepcopy__"
                ) from error
            # torch's states are copied with the default group in its place
            if hasattr(state, "process_group"):
                state.process_group = self._state.process_group
        duplicate = CommHook(self._hook, state)
        duplicate._indices = dict(self._indices)  # by which the state tells buckets apart
        return duplicate

    def replace(self, unit: UnitGradients, stages: list[HookStage]) -> None:
        """It makes these stages of the unit's reductions now, and no others."""
        self._stages[unit] = stages

    def call(self, stage: HookStage, bucket: HookBucket, launch: Launch) -> Any:
        # On all ranks buckets hold the same parameters and come in the same order, so they get the
        # same numbers.
        bucket._index = self._indices.setdefault(bucket.fqns, len(self._indices))
        if stage in self._called:
            self._called = set()  # another backward
        self._called.add(stage)
        bucket._is_last = all(
            each in self._called
            for stages in self._stages.values()
            for each in stages
            if each.takes_part
        )
        if bucket._is_last:
            self._called = set()
        ledger_of(bucket.group).note(Launch(f"{launch} by hook '{self.name}'"))
        state = self._state
        fills = state is not None and getattr(state, "process_group", state) is None
        if fills:
            state.process_group = bucket.group
        try:
            return self._hook(bucket.group if state is None else state, bucket)
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise  # the hook's own
            self._raise_failed(bucket, launch, error)
        finally:
            if fills:
                # it would keep the group alive after `destroy_process_group`
                state.process_group = None

    def result(self, returned: Any, bucket: HookBucket, like: Tensor, launch: Launch) -> Tensor:
        """Wait for what the hook returned: as many elements as in `like`, flat."""
        value = returned
        # what `then` returns is no `torch.futures.Future`, but has its methods
        if hasattr(returned, "wait"):
            try:
                value = returned.wait()
            except RuntimeError as error:
                self._raise_failed(bucket, launch, error)
            if isinstance(value, (list, tuple)) and len(value) == 1:
                (value,) = value  # the future of a collective has a list
        found = type(value).__name__
        if isinstance(value, Tensor):
            alike = value.dtype == like.dtype or (
                value.is_floating_point() and like.is_floating_point()
            )
            if alike and value.numel() == like.numel() and value.device == like.device:
                return value.reshape(-1)
            found = f"{value.numel()} elements of {value.dtype} on {value.device}"
        raise CommHookError(
            f"the communication hook '{self.name}' returned {found} for bucket {bucket.index()}"
            f" ('{bucket.fqns[0]}' to '{bucket.fqns[-1]}'). It must return the reduced gradients,"
            f" {like.numel()} elements of {like.dtype} on {like.device}, as a tensor or a"
            " torch.futures.Future of one"
        )

    def _raise_failed(self, bucket: HookBucket, launch: Launch, error: Exception) -> NoReturn:
        raise CommunicationError(
            f"rank {dist.get_rank()}: the communication hook '{self.name}' failed in the {launch}:"
            f" {first_line(error)}\n"
            "Look for the first error among all ranks.\n"
            f"{ledger_of(bucket.group).report()}"
        ) from error


class HookStage:
    """A hook in place of one stage of one bucket's reduction.

    Args:
        comm: among the ranks that the stage reduces over.
        whole: the hook gets whole gradients, of which this rank keeps its shard; otherwise it gets
            shards.
    """

    def __init__(
        self, hook: CommHook, prefix: str, bucket: GradBucket, comm: Comm, *, whole: bool
    ) -> None:
        self._hook = hook
        self._bucket = bucket
        self._comm = comm
        self._whole = whole
        self._fqns = [f"{prefix}{param.fqn}" for param in bucket.params]

    @property
    def takes_part(self) -> bool:
        """Whether the hook is called for this bucket: PowerSGD and others cannot take shards
        without rows.
        """
        reducer = self._bucket.reducer
        rank = reducer.mesh_info.shard.rank
        slots = zip(reducer.slots, self._bucket.trainable, strict=True)
        return any(trains and (self._whole or slot.local_numel(rank)) for slot, trains in slots)

    @torch.no_grad()
    def launch(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        into: Sequence[Tensor],
        flags: Tensor,
        launch: Launch,
    ) -> Work:
        """Call the hook. The result is in `into` when the returned work is complete.

        Args:
            indices: of the parameters in the bucket, one for each of `gradients` and `into`.
            into: this rank's shards. They may be `gradients` themselves.
            flags: their sum over the ranks is computed in place.
        """
        land = self._call(indices, gradients, into, launch) if gradients else DONE.wait
        if not self._comm.traits.on_stream:
            land()
            land = DONE.wait
        return _HookWork(land, self._comm.all_reduce([flags], Launch(f"flags of the {launch}")))

    def _call(
        self,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        into: Sequence[Tensor],
        launch: Launch,
    ) -> Callable[[], None]:
        """Call the hook. Returns what waits for its result and copies it to `into`."""
        group = self._comm.group
        assert group is not None, "one rank calls no hook"
        buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shapes = [gradient.shape for gradient in gradients]
        fqns = tuple(self._fqns[index] for index in indices)
        parameters = [self._bucket.at_rest[index] for index in indices]
        handed = HookBucket(fqns, 1.0 / self._comm.size, group, buffer, shapes, parameters)
        returned = self._hook.call(self, handed, launch)

        @torch.no_grad()
        def copy_out() -> None:
            reduced = cut_flat(self._hook.result(returned, handed, buffer, launch), shapes)
            if self._whole:
                reducer = self._bucket.reducer
                rank, slots = reducer.mesh_info.shard.rank, reducer.slots
                reduced = [
                    cut(each, slots[index], rank)
                    for each, index in zip(reduced, indices, strict=True)
                ]
            torch._foreach_copy_(list(into), reduced)

        return copy_out


@dataclass
class _HookWork:
    land: Callable[[], None]
    flags: Work

    def wait(self) -> None:
        try:
            self.land()
        finally:
            self.flags.wait()


@dataclass(frozen=True)
class HookedStages(Stages):
    """Some stages are made by hooks. One rank calls no hook.

    Attributes:
        hooks: by the stage that they replace.
        prefixes: by stage, what precedes the FQNs of parameters for the hook.
    """

    hooks: Mapping[str, CommHook]
    prefixes: Mapping[str, str]

    @override
    def attach(self, unit: UnitGradients, buckets: Sequence[GradBucket]) -> None:
        shard, replicate = unit.mesh_info.shard, unit.mesh_info.replicate
        first: list[Stage] = []
        second: list[Stage] = []
        for name, hook in self.hooks.items():
            comm = shard if name == REDUCE_SCATTER else replicate
            whole = name == REDUCE_SCATTER or shard.size == 1
            stages = [
                HookStage(hook, self.prefixes[name], bucket, comm, whole=whole)
                for bucket in buckets
                if comm is not None and comm.size > 1
            ]
            hook.replace(unit, stages)
            (first if whole else second).extend(stage.launch for stage in stages)
        for bucket, one, two in zip_longest(buckets, first, second):
            bucket.reducer.make_stages(one, two)


def hooks_of(unit: UnitGradients) -> Mapping[str, CommHook]:
    """The hooks of a unit, by the stage that they replace."""
    return unit.stages.hooks if isinstance(unit.stages, HookedStages) else {}


def set_hook(unit: Unit, stage: str, hook: CommHook | None, prefix: str = "") -> None:
    """Let `hook` make a stage of the unit's reductions; None: a collective makes it again. Between
    two steps.

    Args:
        prefix: of the FQNs of parameters, for the hook.
    """
    stages = unit.gradients.stages
    prefixes = stages.prefixes if isinstance(stages, HookedStages) else {}
    hooks = {name: each for name, each in hooks_of(unit.gradients).items() if name != stage}
    if hook is not None:
        hooks[stage] = hook
    unit.reduce_by(HookedStages(hooks, {**prefixes, stage: prefix}))


def names_of_hooks(unit: UnitGradients) -> str:
    """The hooks of `unit` in words, with their stages where there are two."""
    hooks = sorted(hooks_of(unit).items(), reverse=True)  # in the order of the stages
    mesh = unit.mesh_info.mesh
    two = unit.spec.kind is UnitKind.SHARDED and mesh is not None and mesh.ndim == 2
    return ", ".join(f"{hook.name} ({stage})" if two else hook.name for stage, hook in hooks)
