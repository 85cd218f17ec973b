"""Which rank owns which matrix, and how matrices are gathered on their owners and scattered again.

Everything here depends only on shapes and placements, which are the same on all ranks. Owners are
chosen once: the most expensive matrix goes to the rank with the least work, then the next most
expensive one. If one rank already has a whole matrix, for example a slice of a stack of experts,
the matrix stays there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from composable.comm import Comm, Work, comm_of, group_of_all
from composable.comm.launch import Launch
from composable.comm.mesh_info import communication_device
from composable.errors import OptimizerError
from composable.seams import unit_of
from composable.torch_private import local_tensor

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
