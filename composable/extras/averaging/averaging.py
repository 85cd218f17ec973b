"""Averages of parameters over ranks that train apart.

`average_parameters` averages now, `PeriodicAverager` every few steps, and `HierarchicalAverager` in
groups of growing size. With `local_steps` an outer optimizer steps by the average.

Note [Outer steps] (DiLoCo)
Replicas train apart for some steps, a round, then an outer optimizer steps. A round has `every`
steps of the inner optimizer. The gradient of the outer optimizer is the mean change of the replicas
during the round. At the end of a round

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
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from composable import OptimizerInBackward
from composable.checked import Fraction, NonNegativeInt, PositiveInt, checked
from composable.comm.backends import comm_of, ranks_of, subgroup_of
from composable.comm.base import DONE, Comm, Work, cut_flat
from composable.comm.launch import Launch
from composable.comm.mesh_info import MeshInfo
from composable.compilation import untraced, unwrapped
from composable.contract.tree import managed_buffers
from composable.contract.values import TorchOptimizer
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    MeshError,
    OptimizerError,
    PhaseError,
    did_you_mean,
    few,
)
from composable.extras.averaging.ema import refuse_other_names
from composable.seams import (
    Param,
    StandIn,
    Unit,
    checked_on_all_ranks,
    hooks_of,
    label_of,
    managed_in,
    refuse_extended,
    refuse_moment,
    require_at_rest,
    units_in,
    write_whole,
    written,
)
from composable.tensors import describe_mesh, gradient_like, is_packed
from composable.torch_private import local_tensor, locals_of, parameter_around, steps_its_base

Over = str | DeviceMesh | dist.ProcessGroup

REPLICAS: Final = "replicate"
_CALLER: Final = "local_steps"
_NESTEROV: Final = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

# --- over which ranks ----------------------------------------------------------------------------


def comm_over(caller: str, unit: Unit, over: Over) -> Comm:
    """The ranks of `over`, all of which hold the same part of the unit's parameters.

    Raises:
        MeshError: they hold different parts, or there is no such dimension.
    """
    if not unit.on_one_mesh:
        raise MeshError(
            f"{caller}: parameters of unit '{unit.name}' are on meshes of their own"
            " (shard_placement_fn), whose replicas are other ranks. Annotate the modules that have"
            " them as units on their mesh"
        )
    info = unit.replicas_info
    group = _group_over(caller, unit, info, over)
    if unit.is_sharded and info.mesh is not None and group is not None:
        ranks = dist.get_process_group_ranks(group)
        members = torch.isin(info.mesh.mesh, torch.tensor(ranks)).nonzero()
        if len(members[:, info.shard_dim].unique()) > 1:
            raise MeshError(
                f"{caller}: unit '{unit.name}' is sharded over ranks"
                f" {few([str(rank) for rank in ranks])} (over={over!r}), which hold different parts"
                " of its parameters. Average over the dimension of the mesh that replicates, or"
                " over a group of ranks that hold the same part"
            )
    return comm_of(group, info.device)


def _group_over(caller: str, unit: Unit, info: MeshInfo, over: Over) -> dist.ProcessGroup | None:
    if isinstance(over, dist.ProcessGroup):
        return over
    if isinstance(over, DeviceMesh) and over.ndim == 1:
        return over.get_group()
    if not isinstance(over, str):
        dims = f" of {over.ndim} dimensions" if hasattr(over, "ndim") else ""
        raise MeshError(
            f"{caller}: over must be the name of a dimension, a mesh of one dimension or a process"
            f" group, got {type(over).__name__}{dims}"
        )
    mesh = info.mesh
    if mesh is None:
        return None  # one process
    names = mesh.mesh_dim_names or ()
    if over in names:
        return mesh.get_group(over)
    if over == REPLICAS and mesh.ndim == 2:
        return mesh.get_group(1 - info.shard_dim)
    if over == REPLICAS and not unit.is_sharded:
        return mesh.get_group()
    raise MeshError(
        f"{caller}: the mesh of unit '{unit.name}', {describe_mesh(mesh)}, has no dimension"
        f" '{over}'{did_you_mean(over, names)}. Its dimensions are"
        f" {', '.join(map(repr, names)) or 'without names'}; for ranks outside of it, pass their"
        " process group or mesh"
    )


# --- one average --------------------------------------------------------------------------------


def _launch(tensors: list[Tensor], comm: Comm, launch: Launch) -> Callable[[], None]:
    """Launch one all-reduce of tensors of one dtype. Returns what waits for it, and writes means.

    A single flat tensor, such as the shards of a unit, is reduced where it is.
    """
    alone = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0] if alone else torch.cat([each.reshape(-1) for each in tensors])
    flat = flat.to(comm.device)
    work = comm.all_reduce([flat], launch, 1.0 / comm.size)

    def land() -> None:
        work.wait()
        if flat is tensors[0]:
            increment_version(flat)  # what was gathered from it is out of date
        else:
            torch._foreach_copy_(tensors, cut_flat(flat, [each.shape for each in tensors]))

    return land


def _memory_of(unit: Unit) -> Iterator[Tensor]:
    """Yield the floating-point memory of a unit's parameters.

    It is the shard buffer of a group that has shards, and otherwise every parameter.
    """
    refuse_extended("averages of parameters", unit)
    for group in unit.groups:
        if group.precision.original.is_floating_point or group.precision.original.is_complex:
            for param in group.params:
                if is_packed(param.at_rest):
                    raise AnnotationError(
                        f"averages of parameters: '{param.fqn}' of unit '{unit.name}' has packed"
                        f" bytes in {group.precision.original}, of which there is no average."
                        " Quantise with quant_storage=torch.uint8"
                    )
            if group.shard is not None:
                yield group.shard.detach()
            else:
                at_rest = [param.at_rest for param in group.params]
                yield from (local.detach() for local in locals_of(at_rest))


def _buffers_of(units: list[Unit]) -> Iterator[tuple[Unit, Tensor]]:
    """Floating-point buffers of the state dict, each with the innermost unit around it."""
    found: dict[int, tuple[Unit, Tensor]] = {}
    for unit in units:
        for buffer in managed_buffers(unit.modules):
            if buffer.tensor.is_floating_point() and any(
                place.name not in place.module._non_persistent_buffers_set
                for place in buffer.places
            ):
                found[id(buffer.tensor)] = unit, buffer.tensor
    yield from found.values()


@untraced
@torch.no_grad()
def _average(caller: str, model: nn.Module, comm_for: Callable[[Unit], Comm]) -> None:
    units = units_in(model, caller=caller)
    comms = {unit: comm_for(unit) for unit in units}  # raises before the first message
    require_at_rest(caller, units)
    messages: dict[tuple[Unit, torch.dtype], list[Tensor]] = {}
    memory = [(unit, tensor) for unit in units for tensor in _memory_of(unit)]
    for unit, tensor in (*memory, *_buffers_of(units)):
        if tensor.numel() and comms[unit].size > 1:
            messages.setdefault((unit, tensor.dtype), []).append(tensor.detach())
    launched = [
        _launch(each, comms[unit], Launch(f"average of unit '{unit.name}'"))
        for (unit, _), each in messages.items()
    ]
    for land in launched:
        land()
    written(units)


@checked
def average_parameters(module: nn.Module, *, over: Over = REPLICAS) -> None:
    """Replace the parameters of the units in `module` by their means over ranks that trained apart.

    This averages every parameter, with or without a gradient. Shards are averaged in place with the
    same shards of other ranks, in one message per unit and dtype. Means are computed in the
    parameters' dtype. Floating-point buffers of the state dict are averaged, too. Other buffers do
    not change. All ranks call this together, outside of forward and backward.

    Args:
        module: an annotated module, or one that contains some.
        over: the ranks to average over: the name of a dimension of the units' meshes, a mesh of one
            dimension, or a process group. "replicate" stands for the dimension that replicates,
            whatever its name. For a `replicate`d unit, it stands for the ranks of the unit.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        MeshError: a unit is sharded over these ranks, or its mesh has no dimension of this name.
        PhaseError: inside of a forward or backward.

    Example:
        >>> islands = init_device_mesh("cuda", (4, 8), mesh_dim_names=("island", "shard"))
        >>> fully_shard(model, mesh=islands["shard"])  # each island trains by itself
        >>> average_parameters(model, over=islands["island"])

    Source: `torch.distributed.algorithms.model_averaging.utils.average_parameters`.
    """
    _average(
        "average_parameters",
        unwrapped(module),
        lambda unit: comm_over("average_parameters", unit, over),
    )


# --- averages every so many steps ---------------------------------------------------------------


class _Averager:
    """Counts steps as torch's averagers do, so that `PostLocalSGDOptimizer` takes either.

    Attributes:
        step: how often `average_parameters` was called.
    """

    def __init__(self, module: nn.Module, warmup_steps: int) -> None:
        self._model = unwrapped(module)
        self._warmup = int(warmup_steps)
        self.step = 0

    def _comm_now(self) -> Callable[[Unit], Comm] | None:
        """Over which ranks to average in this step; None: it averages nothing."""
        raise NotImplementedError

    def average_parameters(self, params: Any = None) -> None:
        """Count a step, and average if it is due. Call it after each step of the optimizer.

        Args:
            params: ignored, since the model was given; torch's `PostLocalSGDOptimizer` passes its
                groups.
        """
        comm_for = self._comm_now() if self.step >= self._warmup else None
        if comm_for is not None:
            _average(type(self).__name__, self._model, comm_for)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self.step}

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after that many steps.

        Args:
            state_dict: what `state_dict` returned.
        """
        self.step = int(state_dict["step"])


class PeriodicAverager(_Averager):
    """Average parameters every `period` steps, after `warmup_steps` steps without averages.

    After the warm-up, gradients stay local; see the guide on averaging. Steps are counted from 0,
    as in torch's averager. The first average is in step number `warmup_steps`. All ranks make the
    averager together.

    Args:
        module: the annotated model.
        period: steps from one average to the next.
        warmup_steps: steps before the first average, in which gradients are reduced as usual.
        over: as for `average_parameters`.

    Raises:
        ArgumentError: period is below 1, or warmup_steps below 0.
        MeshError: as `average_parameters`.

    Example:
        >>> averager = PeriodicAverager(model, period=4, warmup_steps=100)
        >>> for batch in batches:
        ...     loss_of(model, batch).backward()
        ...     optimizer.step()
        ...     averager.average_parameters()

    Source: torch's `PeriodicModelAverager`; post-local SGD, https://arxiv.org/abs/1808.07217.
    """

    @checked_on_all_ranks
    def __init__(
        self,
        module: nn.Module,
        *,
        period: PositiveInt,
        warmup_steps: NonNegativeInt = 0,
        over: Over = REPLICAS,
    ) -> None:
        super().__init__(module, warmup_steps)
        self._period = int(period)
        self._over = over
        for unit in units_in(self._model, caller="PeriodicAverager"):
            self._comm_for(unit)

    def _comm_for(self, unit: Unit) -> Comm:
        return comm_over("PeriodicAverager", unit, self._over)

    def _comm_now(self) -> Callable[[Unit], Comm] | None:
        return None if (self.step - self._warmup) % self._period else self._comm_for


class HierarchicalAverager(_Averager):
    """Average parameters often in small groups, and less often in larger groups.

    Steps are counted from 0, as in torch's averager. A group is due when its period divides the
    number of the step, and `warmup_steps` are over. If several groups are due in one step, only the
    largest averages. All ranks make the averager together.

    Args:
        module: the annotated model.
        periods: maps the number of ranks in a group to the steps between its averages. A group has
            consecutive ranks of `over`, and the largest group has all of them. Each size divides
            the next size, and each period the next period.
        warmup_steps, over: as for `PeriodicAverager`.

    Raises:
        AnnotationError: a period is below 1, or does not divide the next one; warmup_steps is below
            0.
        MeshError: a size does not divide the next one, or the largest size is not that of `over`;
            or as `average_parameters`.

    Example:
        >>> # 8 ranks of a host every 4 steps, all 64 every 32
        >>> HierarchicalAverager(model, periods={8: 4, 64: 32})

    Source: torch's `HierarchicalModelAverager`, which takes sizes by period.
    """

    @checked_on_all_ranks
    def __init__(
        self,
        module: nn.Module,
        *,
        periods: Mapping[int, int],
        warmup_steps: int = 0,
        over: Over = REPLICAS,
    ) -> None:
        super().__init__(module, warmup_steps)
        levels = sorted(periods.items())
        for (size, period), (larger, longer) in zip([(1, 1), *levels], levels, strict=False):
            if longer < 1 or larger < 1:
                raise AnnotationError(
                    "HierarchicalAverager: sizes and periods must be at least 1, got"
                    f" {dict(periods)}"
                )
            if larger % size:
                raise MeshError(
                    f"HierarchicalAverager: groups of {size} ranks do not divide groups of {larger}"
                )
            if longer % period:
                raise AnnotationError(
                    f"HierarchicalAverager: groups of {larger} ranks average every {longer} steps,"
                    f" which the {period} steps of groups of {size} do not divide. Periods of"
                    " larger groups are multiples of those of smaller ones"
                )
        whole: dict[Unit, Comm] = {}
        for unit in units_in(self._model, caller="HierarchicalAverager"):
            whole[unit] = comm = comm_over("HierarchicalAverager", unit, over)
            if not levels or levels[-1][0] != comm.size:
                raise MeshError(
                    f"HierarchicalAverager: the largest group must have the {comm.size} ranks that"
                    f" unit '{unit.name}' is averaged over (over={over!r}), got sizes"
                    f" {[size for size, _ in levels]}"
                )
        # The largest first. All ranks make the groups here, together.
        self._levels = [
            (period, {unit: _part_of(comm, size) for unit, comm in whole.items()})
            for size, period in reversed(levels)
        ]

    def _comm_now(self) -> Callable[[Unit], Comm] | None:
        return next(
            (comms.__getitem__ for period, comms in self._levels if self.step % period == 0), None
        )


def _part_of(comm: Comm, size: int) -> Comm:
    """The `size` consecutive ranks of `comm` around this one."""
    if size == comm.size or comm.group is None:
        return comm
    return comm_of(subgroup_of(comm.group, size, comm.device) if size > 1 else None, comm.device)


# --- outer steps ---------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


class _Message:
    """The trained parameters of one unit and dtype.

    Attributes:
        params: by their names in the model.
        backup: their values at the beginning of the round, flat. `backups` are views of it, placed
            like the parameters, by their names.
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
        self.backups = {
            fqn: _placed_like(param.at_rest, view)
            for (fqn, param), view in zip(params.items(), views, strict=True)
        }

    def _locals(self) -> list[Tensor]:
        return [_local(param.at_rest) for param in self.params.values()]

    def cut(self, flat: Tensor) -> list[Tensor]:
        return cut_flat(flat, self._shapes)

    def launch(self) -> None:
        difference = self.backup.to(self._comm.device, copy=True)
        torch._foreach_sub_(
            self.cut(difference), [local.to(difference.device) for local in self._locals()]
        )
        work = self._comm.all_reduce([difference], self._launch, 1.0 / self._comm.size)
        self.flight = difference, work

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
        return list(map(gradient_like, self.cut(flat), self.backups.values()))

    def show_gradients(self) -> None:
        for backup, difference in zip(self.backups.values(), self.differences(), strict=True):
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
        self._backups = {fqn: backup for each in messages for fqn, backup in each.backups.items()}
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
        if optimizer is not None and (isinstance(optimizer, StandIn) or steps_its_base(optimizer)):
            return  # the optimizer's own step has not ended
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
        refuse_other_names(_CALLER, saved, self._backups, "model")
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
                    for fqn, backup in message.backups.items()
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
    backups = [backup for message in messages for backup in message.backups.values()]
    stepper = (outer or _NESTEROV)(backups)
    return LocalSteps(
        module, optimizers, _Rounds(every, over, delay, keep), stepper, messages, infos
    )
