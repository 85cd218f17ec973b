"""The optimizer state of matrices that are stepped whole: on their owners, and scattered for
checkpoints.

The scattered state looks like the state of an optimizer over DTensors. A tensor with the
parameter's shape has the parameter's placements. A tensor with another shape, such as a factor of
`[m, m]`, is sharded along dimension 0 over the ranks that shard the parameter. Numbers are equal on
all ranks. The state of a stack of matrices is the stack of the states of its slices.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from composable.comm import Comm
from composable.comm.launch import Launch
from composable.errors import OptimizerError
from composable.extras.matrices.matrices import Exchange, Matrix, MatrixLayout, MatrixLayouts
from composable.seams import LocalStep
from composable.tensors.dtensors import wrap
from composable.torch_private import local_tensor, tree_flatten, tree_unflatten

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


# --- to all ranks --------------------------------------------------------------------------------


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


# --- to the owners -------------------------------------------------------------------------------


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
    one process, such as other dtypes. They are given matrices, as a step is.

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
