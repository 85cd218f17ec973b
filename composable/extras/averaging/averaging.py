"""Averages of parameters over ranks that train apart.

`average_parameters` averages now, `PeriodicAverager` every few steps, and `HierarchicalAverager` in
groups of growing size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from composable.checked import NonNegativeInt, PositiveInt, checked
from composable.comm import Comm, MeshInfo, comm_of, subgroup_of
from composable.comm.base import cut_flat
from composable.comm.launch import Launch
from composable.compilation import untraced, unwrapped
from composable.contract.tree import managed_buffers
from composable.errors import AnnotationError, MeshError, closest, few
from composable.seams import (
    Unit,
    checked_on_all_ranks,
    refuse_extended,
    require_at_rest,
    units_in,
    written,
)
from composable.tensors.dtensors import describe_mesh
from composable.tensors.protocol import is_packed
from composable.torch_private import locals_of

Over = str | DeviceMesh | dist.ProcessGroup

REPLICAS: Final = "replicate"

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
    near = "".join(f"; did you mean '{name}'?" for name in closest(over, names))
    raise MeshError(
        f"{caller}: the mesh of unit '{unit.name}', {describe_mesh(mesh)}, has no dimension"
        f" '{over}'{near}. Its dimensions are {', '.join(map(repr, names)) or 'without names'}; for"
        " ranks outside of it, pass their process group or mesh"
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
