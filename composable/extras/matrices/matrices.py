"""Which rank owns which matrix, and how matrices are gathered on their owners and scattered again.

Everything here depends only on shapes and placements, which are the same on all ranks. Owners are
chosen once: the most expensive matrix goes to the rank with the least work, then the next most
expensive one. If one rank already has a whole matrix, for example a slice of a stack of experts,
the matrix stays there.

The optimizer state of a matrix is on its owner, and is scattered for checkpoints. Scattered state
looks like the state of an optimizer over DTensors. A tensor with the parameter's shape has the
parameter's placements. A tensor with another shape, such as a factor of `[m, m]`, is sharded along
dimension 0 over the ranks that shard the parameter. Numbers are equal on all ranks. The state of a
stack of matrices is the stack of the states of its slices.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from types import CodeType, FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from composable.comm.backends import comm_of, group_of_all
from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from composable.comm.mesh_info import communication_device
from composable.errors import OptimizerError
from composable.seams import LocalStep, unit_of
from composable.tensors import wrap
from composable.torch_private import local_tensor, tree_flatten, tree_unflatten

Part = tuple[slice, ...]  # of a tensor: from where to where in each dimension
# In how many batches the matrices of a rank are stepped at most: all but one of them travel while
# another one is computed.
BATCHES: Final = 8

# --- which part of a tensor each rank has --------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The ranks that have parts or copies of a tensor.

    Attributes:
        grid: the number of ranks along each dimension of their mesh.
        coordinates: of each rank of the comm, in the grid.
    """

    comm: Comm
    grid: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Which part of a tensor each rank has.

    Attributes:
        shape: of the whole tensor.
        cut: by dimension of the grid, the dimension of the tensor that is cut; None: copies.
    """

    ranks: Ranks
    shape: tuple[int, ...]
    cut: tuple[int | None, ...]

    def part(self, rank: int) -> Part:
        """The part of a rank of the comm, as `torch.chunk` cuts."""
        spans = [(0, size) for size in self.shape]
        coordinate = self.ranks.coordinates[rank]
        for dim, size, at in zip(self.cut, self.ranks.grid, coordinate, strict=True):
            if dim is not None:
                start, length = spans[dim]
                chunk = -(-length // size)
                first = min(at * chunk, length)
                spans[dim] = start + first, min(chunk, length - first)
        return tuple(slice(start, start + length) for start, length in spans)


class MatrixLayouts:
    """Makes layouts, with one `Ranks` for each mesh."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[Any, ...], Ranks] = {}

    def of(self, parameter: Tensor, value: Tensor | None = None) -> MatrixLayout:
        """How a parameter at rest lies, or a DTensor of its state on the same mesh.

        Raises:
            OptimizerError: in a way that is not known here.
        """
        owner = unit_of(parameter)
        value = parameter if value is None else value
        mesh: DeviceMesh | None = None if owner is None else owner.mesh_info.mesh
        placements: Sequence[Placement] = ()
        apart = False
        if isinstance(value, DTensor):
            mesh, placements = value.device_mesh, value.placements
            # `local_steps`: replicas take gradients of their own, until they are averaged
            apart = owner is not None and owner.mesh_info.all.size < owner.spec.mesh_info.all.size
        if mesh is not None and mesh.get_coordinate() is None:
            mesh = None
        cut = [_cut_by(placement, parameter) for placement in placements]
        sizes = () if mesh is None else mesh.shape
        cut += [None] * (len(sizes) - len(cut))
        dims = [
            dim for dim, size in enumerate(sizes) if size > 1 and not (apart and cut[dim] is None)
        ]
        key = mesh, tuple(dims)
        if key not in self._ranks:
            self._ranks[key] = _ranks_of(mesh, dims, local_tensor(parameter).device)
        return MatrixLayout(self._ranks[key], tuple(value.shape), tuple(cut[dim] for dim in dims))


def _cut_by(placement: Placement, parameter: Tensor) -> int | None:
    if type(placement) is Shard:
        return placement.dim
    if placement.is_replicate():
        return None
    raise OptimizerError(
        f"step_on_matrices: a parameter of shape {tuple(parameter.shape)} has the placement"
        f" {placement}, by which nobody can tell which part of it each rank has. Leave it to"
        " another optimizer"
    )


def _ranks_of(mesh: DeviceMesh | None, dims: Sequence[int], device: torch.device) -> Ranks:
    if mesh is None or not dims:
        return Ranks(comm_of(None, device), (), ((),))
    here: Any = mesh.get_coordinate()
    grid = tuple(mesh.size(dim) for dim in dims)
    # the ranks that differ from this one along `dims` only, in the order of their coordinates
    index = tuple(slice(None) if dim in dims else here[dim] for dim in range(mesh.ndim))
    ranks = mesh.mesh[index].flatten().tolist()
    at = dict(zip(ranks, product(*map(range, grid)), strict=True))
    device = communication_device(mesh, device)
    group = group_of_all([mesh.get_group(dim) for dim in dims], ranks, device)
    in_order = dist.get_process_group_ranks(group)
    return Ranks(comm_of(group, device), grid, tuple(at[rank] for rank in in_order))


# --- matrices and their owners -------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Matrix:
    """A tensor that is stepped whole: a parameter, or a slice of one that is a stack of matrices.

    Attributes:
        index: of the slice along dimension 0; None for a whole parameter.
        owner: the rank of the comm that steps it; -1 until that is decided.
        batch: with which others it is stepped.
        stays: its owner has all of it, and steps it where it is.
        is_scattered: other ranks have parts of it, which they get from the owner.
    """

    parameter: Tensor
    layout: MatrixLayout
    index: int | None = None
    owner: int = -1
    batch: int = 0
    stays: bool = False
    is_scattered: bool = False

    @property
    def comm(self) -> Comm:
        return self.layout.ranks.comm

    @property
    def is_mine(self) -> bool:
        return self.owner == self.comm.rank

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape if self.index is None else self.layout.shape[1:]

    @property
    def cost(self) -> int:
        """Of products of it with itself, as Newton-Schulz iterations and preconditioners make."""
        numel = math.prod(self.shape)
        rows = self.shape[0] if self.shape else 1
        return numel * min(rows, numel // max(rows, 1))

    def part(self, rank: int) -> Part:
        """Which part of it a rank has; an empty one of a slice that it has nothing of."""
        part = self.layout.part(rank)
        if self.index is None:
            return part
        stack, *rest = part
        has = stack.start <= self.index < stack.stop
        return tuple(rest) if has else tuple(slice(0, 0) for _ in rest)

    def is_whole_on(self, rank: int) -> bool:
        # and not by the number of elements, which is 0 of each part of an empty one
        return tuple(each.stop - each.start for each in self.part(rank)) == self.shape

    def give_to(self, owner: int) -> None:
        self.owner = owner
        self.stays = self.is_whole_on(owner)
        others = (rank for rank in range(self.comm.size) if rank != owner)
        self.is_scattered = any(_numel(self.part(rank)) for rank in others)

    def sends(self, rank: int) -> bool:
        """Whether it is this rank that sends its part to the owner, and not a replica of it."""
        coordinates = self.layout.ranks.coordinates
        return all(
            dim is not None or mine == owners
            for dim, mine, owners in zip(
                self.layout.cut, coordinates[rank], coordinates[self.owner], strict=True
            )
        )

    def of(self, local: Tensor) -> Tensor:
        """What this rank has of it, a view of its part of the parameter, or of what lies so."""
        if self.index is None:
            return local
        stack = self.layout.part(self.comm.rank)[0]
        has = stack.start <= self.index < stack.stop
        return local[self.index - stack.start] if has else local.new_empty([0] * (local.ndim - 1))


def _numel(part: Part) -> int:
    return math.prod(each.stop - each.start for each in part)


def assign(matrices: Iterable[Matrix]) -> None:
    """Give an owner to each matrix that has none, and batches to all."""
    by_ranks: dict[Ranks, list[Matrix]] = {}
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        by_ranks.setdefault(matrix.layout.ranks, []).append(matrix)
    for ranks, found in by_ranks.items():
        every = range(ranks.comm.size)
        owned: list[list[Matrix]] = [[m for m in found if m.owner == rank] for rank in every]
        loads = [sum(matrix.cost for matrix in each) for each in owned]
        for matrix in found:
            if matrix.owner < 0:
                having = [rank for rank in every if matrix.is_whole_on(rank)] or every
                matrix.give_to(min(having, key=loads.__getitem__))
                loads[matrix.owner] += matrix.cost
                owned[matrix.owner].append(matrix)
        # The last batches are the ones that all ranks have, since a step ends with one of them.
        travels = any(matrix.is_scattered for matrix in found)
        batches = min(BATCHES, max(map(len, owned))) if travels else 1
        for each in owned:
            for position, matrix in enumerate(reversed(each)):
                matrix.batch = BATCHES - 1 - position * batches // len(each)


# --- messages -----------------------------------------------------------------------------------


class Exchange:
    """Parts of matrices that go to their owners, or come from them, among the ranks of a comm.

    All of them add the same matrices in the same order, launch and land.
    """

    def __init__(self, comm: Comm, launch: Launch) -> None:
        self._comm, self._launch = comm, launch
        # By dtype, for each rank: what it is sent, and where what it sends lands.
        self._sent, self._landing = self._no_lists(), self._no_lists()
        self._flights: list[tuple[Work, Tensor, Tensor, list[Tensor]]] = []

    def _no_lists(self) -> defaultdict[torch.dtype, list[list[Tensor]]]:
        size = self._comm.size
        return defaultdict(lambda: [[] for _ in range(size)])

    def to_owner(self, matrix: Matrix, local: Tensor, whole: Tensor | None) -> None:
        """Bring a matrix together.

        Args:
            local: this rank's part of the parameter, or what lies so.
            whole: where the matrix comes to lie; None if this rank is not the owner.
        """
        sent, landing = self._sent[local.dtype], self._landing[local.dtype]
        mine, own = matrix.of(local), self._comm.rank
        if whole is None:
            if matrix.sends(own):
                sent[matrix.owner].append(mine)
            return
        for rank in filter(matrix.sends, range(self._comm.size)):
            if rank == own:
                whole[matrix.part(rank)].copy_(mine)
            else:
                landing[rank].append(whole[matrix.part(rank)])

    def from_owner(self, matrix: Matrix, whole: Tensor | None, local: Tensor) -> None:
        """Give each rank its part of a matrix, into `local`; arguments are as above."""
        sent, landing = self._sent[local.dtype], self._landing[local.dtype]
        mine, own = matrix.of(local), self._comm.rank
        if whole is None:
            landing[matrix.owner].append(mine)
            return
        for rank in range(self._comm.size):
            if rank != own:
                sent[rank].append(whole[matrix.part(rank)])
            elif whole.data_ptr() != mine.data_ptr():
                mine.copy_(whole[matrix.part(rank)])

    def launch(self) -> None:
        comm = self._comm
        for dtype, sent in self._sent.items() if comm.size > 1 else ():
            landing = self._landing[dtype]
            sizes, out_sizes = (
                [sum(part.numel() for part in parts) for parts in each] for each in (sent, landing)
            )
            empty = torch.empty(0, dtype=dtype, device=comm.device)
            flat = [part.reshape(-1) for part in chain.from_iterable(sent)]
            source = torch.cat(flat).to(comm.device) if flat else empty
            out = empty.new_empty(sum(out_sizes))
            work = comm.all_to_all(out, out_sizes, source, sizes, self._launch)
            targets = list(chain.from_iterable(landing))
            self._flights.append((work, source, out, targets))
        self._sent, self._landing = self._no_lists(), self._no_lists()

    def land(self) -> None:
        """Wait, and write what came where it belongs."""
        flights, self._flights = self._flights, []
        for work, _, out, targets in flights:
            work.wait()
            parts = out.split([target.numel() for target in targets]) if targets else ()
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part.view(target.shape))


# --- the state of matrices -----------------------------------------------------------------------

_LAUNCH: Final = Launch("exchange of the state of matrices")
State = dict[str, Any]  # of a parameter
# By parameter, the matrices that it is.
Matrices = Mapping[Tensor, Sequence[Matrix]]


def by_comm(matrices: Matrices) -> dict[Comm, list[Tensor]]:
    """The parameters whose matrices the same ranks have."""
    found: dict[Comm, list[Tensor]] = {}
    for parameter, its_matrices in matrices.items():
        found.setdefault(its_matrices[0].comm, []).append(parameter)
    return found


def groups_of(optimizer: Optimizer) -> dict[Tensor, int]:
    """By parameter, the number of its group."""
    groups = enumerate(optimizer.param_groups)
    return {parameter: number for number, group in groups for parameter in group["params"]}


def state_of(optimizer: Optimizer, matrix: Matrix) -> State:
    """What an optimizer keeps of a matrix that this rank owns."""
    found: dict[Any, Any] = optimizer.state.get(matrix.parameter, {})
    return found if matrix.index is None else found.get(matrix.index, {})


def set_state(optimizer: Optimizer, matrix: Matrix, state: State) -> None:
    if matrix.index is None:
        optimizer.state[matrix.parameter] = state
    else:
        optimizer.state[matrix.parameter][matrix.index] = state


def _checked_read(name: str) -> Any:
    """The method of dictionaries of that name, which looks at who calls it first."""
    read = getattr(defaultdict, name)

    def method(self: PartOfState, *args: Any) -> Any:
        self.check(sys._getframe(1))
        return read(self, *args)

    return method


class PartOfState(defaultdict[Any, Any]):
    """State of which this rank has a part: code of the optimizer reads it in steps only.

    Everybody else may look.
    """

    _codes: frozenset[CodeType] = frozenset()

    def __init__(self, optimizer: Any, state: Any = (), has_parts: Any = None) -> None:
        if not isinstance(optimizer, Optimizer):  # a copy that Python makes, by its factory
            super().__init__(optimizer, state)
            return
        super().__init__(dict, state)
        self._name, self._has_parts = type(optimizer).__name__, has_parts
        kind: Any = type(optimizer)
        self._codes = _codes_of(kind)

    def check(self, reader: FrameType) -> None:
        if reader.f_code in self._codes and self._has_parts():
            raise OptimizerError(
                f"step_on_matrices: {self._name}.{reader.f_code.co_name} reads the optimizer's"
                " state outside of step, and each rank has that of the matrices that it owns: what"
                " it writes would be other parameters on each rank. Step such an optimizer without"
                " step_on_matrices"
            )

    __getitem__, get, setdefault, items, values = map(
        _checked_read, ("__getitem__", "get", "setdefault", "items", "values")
    )


@cache
def _codes_of(kind: Any) -> frozenset[CodeType]:
    """The code of methods that somebody may call between steps, and of functions in them."""
    codes: list[CodeType] = []
    for base in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        for name, value in vars(base).items():
            function = inspect.unwrap(getattr(value, "fget", value))
            internal = name.startswith("__") or name in ("state_dict", "load_state_dict")
            if inspect.isfunction(function) and not internal:
                codes.append(function.__code__)
    for code in codes:  # grows
        codes.extend(each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(codes)


# --- state to all ranks --------------------------------------------------------------------------


@torch.no_grad()
def scatter_state(optimizer: Optimizer, matrices: Matrices) -> dict[Tensor, State]:
    """The state of parameters as an optimizer over DTensors keeps it. All ranks call it."""
    scattered: dict[Tensor, State] = {}
    for comm, parameters in by_comm(matrices).items():
        mine = {
            (number, matrix.index): _outlined(state)
            for number, parameter in enumerate(parameters)
            for matrix in matrices[parameter]
            if matrix.is_mine and (state := state_of(optimizer, matrix))
        }
        gathered: dict[Any, Any] = {}
        for each in comm.all_gather_objects(mine, _LAUNCH):
            gathered |= each
        for number, parameter in enumerate(parameters):
            outlines = [gathered.get((number, matrix.index)) for matrix in matrices[parameter]]
            if any(outlines):
                scattered[parameter] = _scatter_one(optimizer, matrices[parameter], outlines)
    return scattered


def _outlined(state: State) -> Any:
    """State without the values of tensors, but for those without dimensions."""
    return tree_map_only(
        Tensor,
        lambda each: torch.empty_like(each, device="meta") if each.dim() else each.cpu(),
        state,
    )


def _scatter_one(
    optimizer: Optimizer, matrices: Sequence[Matrix], outlines: Sequence[Any]
) -> State:
    parameter, comm = matrices[0].parameter, matrices[0].comm
    flat = [tree_flatten(outline) for outline in outlines]
    tree = flat[0][1]
    if any(each != tree for _, each in flat):
        raise OptimizerError(
            f"step_on_matrices: {type(optimizer).__name__} keeps other state of some slices of a"
            f" stack of shape {tuple(parameter.shape)} than of others, which cannot be saved as one"
        )
    wholes = [
        tree_flatten(state_of(optimizer, matrix))[0] if matrix.is_mine else None
        for matrix in matrices
    ]
    exchange = Exchange(comm, _LAUNCH)
    values: list[Any] = []
    kind: Any = type(optimizer)
    names = [name for name, value in outlines[0].items() for _ in tree_flatten(value)[0]]
    for number, column in enumerate(zip(*[leaves for leaves, _ in flat], strict=True)):
        first = column[0]
        if not (isinstance(first, Tensor) and first.dim()):
            # by what it is, and not by values, since a checkpoint's shapes do not change
            counts = matrices[0].index is None or names[number] == "step" or LocalStep.knows(kind)
            values.append(_joined(column) if counts else _stacked(column))
            continue
        shape = tuple(first.shape)
        layout = _layout_of_state(
            matrices[0].layout, shape if matrices[0].index is None else (len(column), *shape)
        )
        part = layout.part(comm.rank)
        local = torch.empty(
            [each.stop - each.start for each in part],
            dtype=first.dtype,
            device=local_tensor(parameter).device,
        )
        for matrix, leaves in zip(matrices, wholes, strict=True):
            placed = Matrix(parameter, layout, matrix.index, matrix.owner)
            exchange.from_owner(placed, None if leaves is None else leaves[number], local)
        values.append(_around(local, parameter, layout.shape))
    exchange.launch()
    exchange.land()
    state: State = tree_unflatten(values, tree)
    return state


def _layout_of_state(layout: MatrixLayout, shape: tuple[int, ...]) -> MatrixLayout:
    if shape == layout.shape:
        return layout
    cut = tuple(None if dim is None else 0 for dim in layout.cut)
    return MatrixLayout(layout.ranks, shape, cut)


def _around(local: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    placements: Sequence[Placement] = parameter.placements
    if shape != tuple(parameter.shape):
        placements = [Shard(0) if each.is_shard() else Replicate() for each in placements]
    whole = torch.empty(shape, device="meta")
    return wrap(local, parameter.device_mesh, placements, whole.shape, whole.stride())


def _stacked(column: Sequence[Any]) -> Any:
    """What an optimizer keeps of each slice, such as norms."""
    return torch.stack([*column]) if isinstance(column[0], Tensor) else _joined(column)


def _joined(column: Sequence[Any]) -> Any:
    """One value for all slices of a stack, which count their steps alike."""
    first = column[0]
    if isinstance(first, Tensor):
        same = all(torch.equal(first, each) for each in column)
        return first.clone() if same else _stacked(column)
    if any(each != first for each in column):
        raise OptimizerError(
            f"step_on_matrices: slices of a stack have different values {first!r} and others in"
            " their state, which cannot be saved as one. Keep them as tensors"
        )
    return first


# --- state to the owners -------------------------------------------------------------------------


@torch.no_grad()
def collect(
    matrices: Sequence[Matrix], state: dict[Any, Any], layouts: MatrixLayouts
) -> dict[Any, Any]:
    """What this rank keeps of the state of a parameter: what it owns.

    All ranks call it where state is scattered; of plain tensors each rank takes its own.
    """
    parameter, mine = matrices[0].parameter, [each for each in matrices if each.is_mine]
    is_stack = matrices[0].index is not None
    if is_stack and state and all(isinstance(key, int) for key in state):
        return {each.index: cloned(state[each.index]) for each in mine if each.index in state}
    leaves, tree = tree_flatten(state)
    exchange = Exchange(matrices[0].comm, _LAUNCH)
    owned: list[list[Any]] = [[] for _ in mine]
    for leaf in leaves:
        value = leaf
        cut = is_stack and isinstance(leaf, Tensor) and leaf.shape[:1] == parameter.shape[:1]
        if isinstance(leaf, DTensor) and not (
            cut is is_stack and _is_alike(leaf, matrices[0], layouts)
        ):
            value = leaf.full_tensor()
        if isinstance(value, DTensor):
            layout, local = layouts.of(parameter, value), local_tensor(value)
            taken = iter(owned)
            for matrix in matrices:
                placed = Matrix(parameter, layout, matrix.index, matrix.owner)
                whole = local.new_empty(placed.shape) if matrix.is_mine else None
                exchange.to_owner(placed, local, whole)
                if whole is not None:
                    next(taken).append(whole)
        elif isinstance(value, Tensor):
            for matrix, found in zip(mine, owned, strict=True):
                found.append((value[matrix.index] if cut else value).clone())
        else:
            for found in owned:
                found.append(value)
    exchange.launch()
    exchange.land()
    states = [tree_unflatten(found, tree) for found in owned]
    if is_stack:
        return {matrix.index: each for matrix, each in zip(mine, states, strict=True)}
    return states[0] if states else {}


def without_tuples(value: Any) -> Any:
    """State with lists for tuples: torch's checkpoints take a tuple for one object, the same on all
    ranks.
    """
    if isinstance(value, dict):
        return {key: without_tuples(each) for key, each in value.items()}
    return [*map(without_tuples, value)] if isinstance(value, (list, tuple)) else value


def with_tuples(value: Any, like: Any) -> Any:
    """The inverse, of state that an optimizer has had in `like`."""
    if isinstance(value, dict) and isinstance(like, dict):
        return {key: with_tuples(each, like.get(key)) for key, each in value.items()}
    if not (
        isinstance(value, list) and isinstance(like, (list, tuple)) and len(value) == len(like)
    ):
        return value
    found = [with_tuples(each, former) for each, former in zip(value, like, strict=True)]
    if hasattr(like, "_make"):  # a named one
        return like._make(found)
    return tuple(found) if isinstance(like, tuple) else found


def cloned(state: State) -> Any:
    return tree_map_only(Tensor, torch.clone, state)


def as_loaded(
    optimizer: Optimizer,
    saved_groups: Sequence[State],
    matrices: Matrices,
    loaded: dict[Tensor, Any],
) -> None:
    """Let torch's code, and the optimizer's `__setstate__`, make of state what they make of it in
    one process, such as other dtypes. They get matrices, as a step does.

    Args:
        loaded: what this rank owns of parameters; changed in place.
    """
    owned = [
        (matrix, with_tuples(state, state_of(optimizer, matrix)))
        for parameter, found in loaded.items()
        for matrix in matrices[parameter]
        if matrix.is_mine
        and (state := found if matrix.index is None else found.get(matrix.index, {}))
    ]
    group_of = groups_of(optimizer)
    groups: list[State] = [{**group, "params": []} for group in optimizer.param_groups]
    saved: list[State] = [{**group, "params": []} for group in saved_groups]
    parameters: list[nn.Parameter] = []
    for number, (matrix, _) in enumerate(owned):
        local = local_tensor(matrix.parameter).detach()
        takes_no_memory = nn.Parameter(local.new_empty(()).expand(matrix.shape))
        parameters.append(takes_no_memory)
        groups[group_of[matrix.parameter]]["params"].append(takes_no_memory)
        saved[group_of[matrix.parameter]]["params"].append(number)
    alone: Any = object.__new__(type(optimizer))
    alone.__dict__ = {**vars(optimizer), "param_groups": groups, "state": defaultdict(dict)}
    alone.__dict__ |= {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    states = {number: state for number, (_, state) in enumerate(owned)}
    Optimizer.load_state_dict(alone, {"state": states, "param_groups": saved})
    for (matrix, _), parameter in zip(owned, parameters, strict=True):
        if matrix.index is None:
            loaded[matrix.parameter] = alone.state[parameter]
        else:
            loaded[matrix.parameter][matrix.index] = alone.state[parameter]


def _is_alike(value: DTensor, matrix: Matrix, layouts: MatrixLayouts) -> bool:
    """Whether it lies on the ranks of the parameter, which know its owner by its number."""
    parameter = matrix.parameter
    if not isinstance(parameter, DTensor) or value.device_mesh != parameter.device_mesh:
        return False
    return layouts.of(parameter, value).ranks is matrix.layout.ranks
