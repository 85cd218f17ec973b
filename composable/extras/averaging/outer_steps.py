"""`local_steps` (DiLoCo): replicas train apart for some steps, then an outer optimizer steps.

A round has `every` steps of the inner optimizer. The gradient of the outer optimizer is the mean
change of the replicas during the round. At the end of a round

    difference = backup - parameter              on each replica
    difference = mean over the replicas          one message per unit
    backup     = outer step of (backup, gradient = difference)
    parameter  = backup

Backups and the state of the outer optimizer are sharded like the parameters, and equal on all
replicas. With `delay`, the difference is computed and sent some steps before the end of the round,
so the message overlaps with these steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from composable import OptimizerInBackward
from composable.checked import Fraction, NonNegativeInt, PositiveInt, checked
from composable.comm import Comm, MeshInfo, ranks_of
from composable.comm.base import DONE, Work, cut_flat
from composable.comm.launch import Launch
from composable.compilation import untraced, unwrapped
from composable.contract.values import TorchOptimizer
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    MeshError,
    OptimizerError,
    PhaseError,
    few,
)
from composable.extras.averaging.averaging import REPLICAS, Over, average_parameters, comm_over
from composable.seams import (
    Param,
    StandIn,
    Unit,
    checked_on_all_ranks,
    hooks_of,
    label_of,
    managed_in,
    refuse_moment,
    units_in,
    write_whole,
    written,
)
from composable.tensors.dtensors import gradient_like
from composable.torch_private import local_tensor, parameter_around

_CALLER: Final = "local_steps"


_NESTEROV: Final = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


class _Message:
    """The trained parameters of one unit and dtype.

    Attributes:
        params: by their names in the model.
        backup: their values at the beginning of the round, flat. `backups` are views of it, placed
            like the parameters.
        flight: the differences, flat, and the work that averages them.
    """

    def __init__(
        self, unit: Unit, params: Mapping[str, Param], comm: Comm, *, offload: bool
    ) -> None:
        self.flight: tuple[Tensor, Work] | None = None
        self.params = params
        self._comm = comm
        self._launch = Launch(f"outer step of unit '{unit.name}'")
        locals_ = self._locals()
        self._shapes = [local.shape for local in locals_]
        backup = torch.cat([local.reshape(-1) for local in locals_])
        self.backup = backup.cpu() if offload else backup
        views = self.cut(self.backup)
        self.backups = [
            _placed_like(param.at_rest, view)
            for param, view in zip(params.values(), views, strict=True)
        ]

    def _locals(self) -> list[Tensor]:
        return [_local(param.at_rest) for param in self.params.values()]

    def cut(self, flat: Tensor) -> list[Tensor]:
        return cut_flat(flat, self._shapes)

    def launch(self) -> None:
        difference = self.backup.to(self._comm.device, copy=True)
        torch._foreach_sub_(
            self.cut(difference), [local.to(difference.device) for local in self._locals()]
        )
        self.flight = (
            difference,
            self._comm.all_reduce([difference], self._launch, 1.0 / self._comm.size),
        )

    def land(self) -> Tensor:
        """Wait for the mean difference. It stays in flight, for nobody to wait for."""
        assert self.flight is not None
        difference, work = self.flight
        work.wait()
        self.flight = difference, DONE
        return difference.to(self.backup.device)

    def __del__(self) -> None:
        if self.flight is not None and self._comm.traits.on_stream:
            # its memory is given back to another stream than the one that reduces
            self.flight[1].wait()

    def differences(self) -> list[Tensor]:
        """The mean differences, placed like the parameters; zeros if none are in flight."""
        flat = torch.zeros_like(self.backup) if self.flight is None else self.land()
        return list(map(gradient_like, self.cut(flat), self.backups))

    def show_gradients(self) -> None:
        for backup, difference in zip(self.backups, self.differences(), strict=True):
            backup.grad = difference

    def write(self, keep: float) -> None:
        """Let the parameters be the backups, up to the part `keep` of themselves."""
        self.flight = None
        locals_ = self._locals()
        new = self.cut(self.backup.to(locals_[0].device))
        if keep:
            torch._foreach_lerp_(locals_, new, 1.0 - keep)
        else:
            torch._foreach_copy_(locals_, new)


def _placed_like(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    made = gradient_like(local, parameter)
    if not isinstance(made, DTensor):
        return nn.Parameter(made)
    return parameter_around(made, requires_grad=True)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """What `local_steps` was asked for, see there."""

    every: int
    over: Over
    delay: int
    keep: float


class LocalSteps:
    """Replicas that train apart until `remove()`.

    `local_steps` returns this object. As a context manager, it calls `remove()` at the end. If an
    exception leaves the context, it does not call `remove()`: the replicas differ, and train apart
    until `remove()`.

    Args:
        model, optimizers, rounds: as given to `local_steps`.
        outer: the outer optimizer of the backups.
        messages: one per unit and dtype.
        infos: what units reduce their gradients over from now on.

    Attributes:
        outer: the outer optimizer. Schedules may change its learning rate.
        steps: of the inner optimizers so far.

    Example:
        >>> rounds = local_steps(model, optimizer, every=50)
        >>> rounds.outer.param_groups[0]["lr"] = 0.5
        >>> rounds.remove()
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        rounds: _Rounds,
        outer: Optimizer,
        messages: Sequence[_Message],
        infos: Mapping[Unit, MeshInfo],
    ) -> None:
        self._model, self._units, self._rounds = module, list(infos), rounds
        self._messages = list(messages)
        self._backups = {
            fqn: backup
            for each in messages
            for fqn, backup in zip(each.params, each.backups, strict=True)
        }
        self.outer = outer
        self.steps = 0
        for unit, info in infos.items():
            if info is not unit.mesh_info:
                unit.set_mesh_info(info)
        self._undo: list[Callable[[], object]] = []
        # Optimizers in backward step together, and not each of them in every backward: they count
        # as one, named None.
        self._inner = dict.fromkeys(
            None if isinstance(each, OptimizerInBackward) else each for each in optimizers
        )
        self._stepped: dict[Optimizer | None, None] = {}  # since all of them have
        for each in optimizers:
            if isinstance(each, OptimizerInBackward):
                self._undo.append(each.call_after_steps(self._after_step))
            else:
                self._undo.append(each.register_step_post_hook(self._after_step).remove)
        # The gradients that a round has ended with, and their versions: no other optimizer is to
        # step by them.
        self._behind: MutableMapping[Tensor, int] = {}
        self._undo.append(
            register_optimizer_step_pre_hook(partial(_before_any_step, ref(self))).remove
        )

    @untraced
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer | None = None, *_: Any) -> None:
        if optimizer is not None and isinstance(optimizer, StandIn):
            return  # a step that calls the step of its base class
        self._stepped[optimizer] = None
        if len(self._stepped) < len(self._inner):
            return
        self._stepped.clear()
        self.steps += 1
        every = self._rounds.every
        if (self.steps + self._rounds.delay) % every == 0:
            self._refuse_unfrozen()
            for message in self._messages:
                message.launch()
        if self.steps % every == 0:
            for message in self._messages:
                message.show_gradients()
            self.outer.step()
            self.outer.zero_grad()
            for message in self._messages:
                message.write(self._rounds.keep)
            written([unit for unit in self._units if unit.modules])
            self._behind = WeakTensorKeyDictionary()
            for param in (p for message in self._messages for p in message.params.values()):
                gradient = param.at_rest.grad
                if gradient is not None:
                    self._behind[gradient] = _version(gradient)

    def refuse_behind(self, optimizer: Optimizer) -> None:
        """Refuse to step by gradients of a round that has ended, unless `optimizer` was passed."""
        if optimizer in self._inner:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and self._behind.get(gradient) == _version(gradient):
                    raise OptimizerError(
                        f"{_CALLER}: {type(optimizer).__name__} steps {label_of(parameter)} after"
                        " the round has ended with the step of another optimizer, so this step"
                        " would be each replica's own. Pass all optimizers of the model:"
                        f" {_CALLER}(model, [first, second], ...)"
                    )

    def _refuse_unfrozen(self) -> None:
        new = [
            each.fqn
            for each in managed_in(_CALLER, self._model)
            if each.param.at_rest.requires_grad and each.fqn not in self._backups
        ]
        if new:
            raise PhaseError(
                f"{_CALLER}: {few(list(map(repr, new)))} was unfrozen or added since, and would"
                " stay different on each replica. Call remove() on what local_steps returned, and"
                " local_steps again"
            )

    @torch.no_grad()
    def remove(self) -> None:
        """Average parameters and buffers over the replicas, and train synchronously from now on.

        All ranks call this together. A round that has begun ends with a plain mean, without the
        outer optimizer. You may call it again.

        Raises:
            PhaseError: not between two steps.
        """
        if not self._undo:
            return
        # a unit has no modules after its annotation was removed
        units = [unit for unit in self._units if unit.modules]
        for unit in units:
            refuse_moment(f"remove {_CALLER}", unit)
        for message in self._messages:
            if message.flight is not None:
                message.land()
        for undo in self._undo:
            undo()
        self._undo = []
        for unit in units:
            if unit.mesh_info is not unit.spec.mesh_info:
                unit.set_mesh_info(unit.spec.mesh_info)
        if units:
            average_parameters(self._model, over=self._rounds.over)

    def __enter__(self) -> LocalSteps:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.remove()

    # --- state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return backups and the outer optimizer's state by FQN, sharded like the parameters.

        All ranks call this together. All replicas return the same. Inside a round, the model's
        parameters and the inner optimizer's state differ between replicas. To resume exactly, save
        one checkpoint per replica.
        """
        state: dict[str, Any] = {
            "steps": self.steps,
            "rounds": self.steps // self._rounds.every,
            "backups": {fqn: backup.detach() for fqn, backup in self._backups.items()},
            "outer": self._outer_state(),
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.outer.param_groups
            ],
        }
        if self._rounds.delay:
            state["sent"] = {
                fqn: difference
                for message in self._messages
                for fqn, difference in zip(message.params, message.differences(), strict=True)
            }
        return state

    def _outer_state(self) -> dict[str, dict[str, Any]]:
        """The outer optimizer's state, by FQN.

        Before its first step it has none, and a checkpoint is read into tensors that are there.
        Then it is that of a copy, which steps copies of the backups by zeros.
        """
        if self.outer.state:
            return {fqn: dict(self.outer.state[backup]) for fqn, backup in self._backups.items()}
        kind, copies = type(self.outer), dict[int, Any]()
        copied = kind.__new__(kind)
        groups = deepcopy(self.outer.param_groups, copies)
        vars(copied).update(vars(self.outer), state=defaultdict(dict), param_groups=groups)
        for backup in self._backups.values():
            copies[id(backup)].grad = torch.zeros_like(backup)
        kind.step(copied)  # a schedule may have put another `step` on the object
        return {fqn: dict(copied.state[copies[id(each)]]) for fqn, each in self._backups.items()}

    @checked
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the point where `state_dict` was called, with the same `every` and `delay`.

        Load the model and the inner optimizer, too.

        Args:
            state_dict: what `state_dict` returned, sharded in any way over the same ranks.

        Raises:
            KeyError: names are missing, or unknown.
        """
        saved = state_dict["backups"]
        differ = sorted(saved.keys() ^ self._backups.keys())
        if differ:
            raise KeyError(
                f"{_CALLER}: {few([*map(repr, differ)])} is in only one of the state dict and"
                " the model"
            )
        self.steps = int(state_dict["steps"])
        outer_state: dict[Tensor, Any] = {}
        for fqn, backup in self._backups.items():
            _local(backup).copy_(_local(_like(saved[fqn], backup)))
            if state_dict["rounds"]:
                outer_state[backup] = {
                    key: _like(value, backup) for key, value in state_dict["outer"][fqn].items()
                }
        self.outer.state.clear()
        self.outer.state.update(outer_state)
        for group, values in zip(self.outer.param_groups, state_dict["groups"], strict=True):
            group.update(values)
        in_flight = self.steps % self._rounds.every >= self._rounds.every - self._rounds.delay
        for message in self._messages:
            if message.flight is not None:
                message.land()
            message.flight = None
            if in_flight:
                sent = [
                    _local(_like(state_dict["sent"][fqn], backup)).reshape(-1)
                    for fqn, backup in zip(message.params, message.backups, strict=True)
                ]
                message.flight = torch.cat(sent), DONE


def _version(gradient: Tensor) -> int:
    return _local(gradient)._version


def _before_any_step(steps: ref[LocalSteps], optimizer: Optimizer, *_: Any) -> None:
    found = steps()
    if found is not None and not isinstance(optimizer, StandIn):
        found.refuse_behind(optimizer)


def _like(value: Any, backup: nn.Parameter) -> Any:
    """A copy of a value, which is sharded as `backup` if it has its shape."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == backup.shape and isinstance(backup, DTensor):
        copied = torch.empty_like(backup, dtype=value.dtype)
        write_whole(value, copied)
        return copied
    return value.detach().clone()


def _info_inside(unit: Unit, comm: Comm, over: Over) -> MeshInfo:
    """The mesh info of a unit whose gradients are not reduced over the replicas in `comm`."""
    around, own = unit.replicas_info, unit.spec.mesh_info
    if comm.size == 1 or own.mesh is None:
        return own
    ranks = ranks_of(comm)
    if around.replicate is not None and ranks_of(around.replicate) == ranks:
        within = around.shard
        reduces = around is not own and within.size > 1  # a replicated unit next to hybrid shards
        return replace(own, all=within, replicate=within if reduces else None)
    if len(set(own.mesh.mesh.flatten().tolist()).intersection(ranks)) == 1:
        # they are other islands, and the unit's gradients have not been reduced over them
        return own
    raise MeshError(
        f"{_CALLER}: over={over!r} has ranks {few(list(map(str, ranks)))}, which are only some of"
        f" the replicas that unit '{unit.name}' is reduced over. Pass the whole dimension that"
        " replicates, or ranks outside of the unit's mesh"
    )


@checked_on_all_ranks
@torch.no_grad()
def local_steps(
    module: nn.Module,
    optimizer: TorchOptimizer | Sequence[TorchOptimizer],
    *,
    every: PositiveInt,
    over: Over = REPLICAS,
    outer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    delay: NonNegativeInt = 0,
    keep: Fraction = 0.0,
    offload: bool = False,
) -> LocalSteps:
    """Let replicas train apart, and step an outer optimizer after every `every` steps (DiLoCo).

    The outer optimizer steps by the mean of the changes that the replicas made. From this call on,
    gradients are reduced only inside a replica: over the shard dimension of a hybrid mesh, and not
    at all for a `replicate`d model. Replicas send nothing to each other until `optimizer` has
    stepped `every` times. Then they send one message per unit, of the size of its shards. All ranks
    call this together, between two steps, when all replicas have the same parameters.

    Between two outer steps, each replica is a separate job: clipping, checks and exports cover one
    replica. All replicas must make the same number of steps. A `GradScaler` skips steps of one
    replica, so train in bfloat16. Each replica keeps its own buffers until `remove()`. Parameters
    that are frozen at this call are not sent.

    Args:
        module: a model that is replicated, or sharded over one dimension of a mesh of two.
        optimizer: the inner optimizer, or a list of all optimizers of the model. Hooks count the
            steps: one step when each optimizer has stepped. The optimizers of
            `apply_optimizer_in_backward` count together, at the end of a backward that reduces.
        every: the number of inner steps in a round.
        over: the ranks of the replicas, as for `average_parameters`. This is the whole dimension
            that replicates, or ranks outside of the model's mesh. In the second case, the model
            trains by itself on each of them.
        outer: a function that makes the outer optimizer from the backups of all trained parameters.
            The default is SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
        delay: send the message this many steps before the end of a round, so that these steps hide
            it.
        keep: the share of a replica's own parameters that stays at the end of a round, from 0 to 1.
            With a `delay`, 0 discards the steps after the message. Streaming DiLoCo keeps 0.5.
        offload: keep backups and the outer optimizer's state on the host.

    Returns:
        An object with a state dict. `remove()`, or the end of its context, averages the replicas
        and makes training synchronous.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        AnnotationError: every is below 1; delay is not from 0 to every - 1; keep is not from 0 to
            1; nothing is trained; a communication hook makes the reduction over the replicas.
        AlreadyAnnotatedError: the replicas already train apart.
        MeshError: a unit has no replicas, is sharded over these ranks, or is replicated over more
            of them.
        PhaseError: not between two steps.
        OptimizerError: there is no optimizer. Later: an optimizer that was not passed steps with
            gradients of a round that has ended.

    Example:
        >>> mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
        >>> fully_shard(model, mesh=mesh)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> local_steps(
        ...     model,
        ...     optimizer,
        ...     every=50,
        ...     outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
        ... )

    Source: DiLoCo, https://arxiv.org/abs/2311.08105; sent early: https://arxiv.org/abs/2501.18512.
    """
    module, every, delay = unwrapped(module), int(every), int(delay)
    if delay >= every:
        raise AnnotationError(
            f"{_CALLER}: delay must be from 0 to every - 1 = {every - 1}, got {delay}"
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    if not optimizers:
        raise OptimizerError(
            f"{_CALLER}: the list of optimizers is empty, so no step would be counted. Pass those"
            " that step the model"
        )
    infos: dict[Unit, MeshInfo] = {}
    comms: dict[Unit, Comm] = {}
    for unit in units_in(module, caller=_CALLER):
        comms[unit] = comm_over(_CALLER, unit, over)
        infos[unit] = _info_inside(unit, comms[unit], over)
        if unit.mesh_info is not unit.spec.mesh_info:
            raise AlreadyAnnotatedError(
                f"{_CALLER}: the replicas of unit '{unit.name}' train apart already. Call remove()"
                " on what the former call returned"
            )
        hook = hooks_of(unit).get("all_reduce")
        if hook is not None and infos[unit] is not unit.mesh_info:
            raise AnnotationError(
                f"{_CALLER}: unit '{unit.name}' has the communication hook '{hook.name}' for the"
                " reduction over the replicas, which are not reduced over any more. Remove the"
                " hook first"
            )
        refuse_moment(_CALLER, unit)
    trained: dict[tuple[Unit, torch.dtype, torch.device], dict[str, Param]] = {}
    for each in managed_in(_CALLER, module):
        if each.param.at_rest.requires_grad:
            local = _local(each.param.at_rest)
            trained.setdefault((each.unit, local.dtype, local.device), {})[each.fqn] = each.param
    if not trained:
        raise AnnotationError(
            f"{_CALLER}: no parameter of a unit in this {type(module).__name__} requires a gradient"
        )
    messages = [
        _Message(unit, params, comms[unit], offload=offload)
        for (unit, *_), params in trained.items()
    ]
    stepper = (outer or _NESTEROV)([backup for message in messages for backup in message.backups])
    return LocalSteps(
        module, optimizers, _Rounds(every, over, delay, keep), stepper, messages, infos
    )
