"""`step_on_matrices`: each rank steps some of the whole matrices, for all ranks.

The ranks send the gradients of a matrix to its owner (`matrices.py`). There the optimizer's own
code steps the matrix, through a stand-in (`shard_steps.py`), and the owner sends the new rows back.
The code runs once for each batch of matrices. While it computes one batch, the gradients of the
next batch and the new rows of the one before are sent.

An owner keeps a copy of its matrices, so only gradients have to be sent to it. After each step,
every rank computes digests of its shards. If a shard was written to since then, in any way, the
rank sends it to the owner, too.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from operator import is_
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from composable import step_on_shards
from composable.checked import checked
from composable.comm.backends import ranks_of
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.compilation import untraced
from composable.contract.values import parameters_of
from composable.errors import (
    OptimizerError,
    RanksDisagreeError,
    first_line,
    kind_of,
    unit_name,
    what_is_there,
)
from composable.extras.matrices.matrices import (
    BATCHES,
    Exchange,
    Matrix,
    MatrixLayouts,
    PartOfState,
    State,
    as_loaded,
    assign,
    by_comm,
    cloned,
    collect,
    groups_of,
    scatter_state,
    set_state,
    state_of,
    with_tuples,
    without_tuples,
)
from composable.memory.digests import digests_as_ints
from composable.seams import LocalStep, StandIn, Stepping, is_part_of_backward, label_of, unit_of
from composable.torch_private import called_by_checkpoints, local_tensor, placed_alike

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Which = Callable[[Tensor], bool] | Iterable[str | Tensor] | None

_CALLER: Final = "step_on_matrices"
_LAST: Final = BATCHES - 1
_Convolution: Final = nn.modules.conv._ConvNd
# In the state dict of one rank: by number of a parameter, the slices that it owns, or None.
_OWNED: Final = "step_on_matrices"
_NO_ID: Final = 1 << 20  # smaller numbers are no addresses
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# --- one step ------------------------------------------------------------------------------------


class _Given:
    """What a stand-in gets: groups, and the state that it has."""

    def __init__(self, groups: list[State]) -> None:
        self._groups = groups

    def _groups_for(self, stand_in: StandIn) -> tuple[list[State], Any]:
        return self._groups, stand_in.state


class _Closure:
    """The closure of a step, which brings gradients.

    It is called before the code asks for its groups.
    """

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self.is_open = True
        self.was_called = False
        self.loss: Any = None

    def replay(self) -> Any:
        """For another batch of the step in which it was called."""
        return self.loss

    def __call__(self) -> Any:
        if not self.is_open:
            raise OptimizerError(
                f"{_CALLER}: the optimizer calls its closure after it has read its parameter"
                " groups, when gradients are with the owners already. Call the closure yourself,"
                " and step() without it"
            )
        self.loss, self.was_called = self._closure(), True
        return self.loss


class _MatrixStep:
    """One step of matrices that have a gradient, and of other parameters on their shards.

    Args:
        matrices: in the same order on all ranks.
        copies: of the matrices that this rank owns; what is missing is made.
        stale: parameters that were written to since the last step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        matrices: Sequence[Matrix],
        copies: dict[Matrix, nn.Parameter],
        stale: set[Tensor],
    ) -> None:
        self._optimizer = optimizer
        self.parameters = list(dict.fromkeys(matrix.parameter for matrix in matrices))
        self._copies, self._stale = copies, stale
        self._batches: list[list[Matrix]] = [[] for _ in range(BATCHES)]
        for matrix in matrices:
            self._batches[matrix.batch].append(matrix)
        self._group_of = groups_of(optimizer)
        self._travelling: dict[tuple[str, int], dict[Comm, Exchange]] = {}
        self._gradients: dict[Matrix, Tensor] = {}

    def _exchange_over(self, comm: Comm, what: str, number: int) -> Exchange:
        made = self._travelling.setdefault((what, number), {})
        if comm not in made:
            made[comm] = Exchange(comm, Launch(f"{what} of matrices"))
        return made[comm]

    def _land(self, what: str, number: int) -> None:
        for exchange in self._travelling.pop((what, number), {}).values():
            exchange.land()

    def _launch(self, what: str, number: int) -> None:
        for exchange in self._travelling.get((what, number), {}).values():
            exchange.launch()

    def send(self, number: int) -> None:
        """Launch what brings gradients of a batch to the owners."""
        for matrix in self._batches[number]:
            parameter, gradient = matrix.parameter, local_tensor(matrix.parameter.grad)  # type: ignore[arg-type]
            local = local_tensor(parameter).detach()
            if matrix.is_mine:
                self._prepare(matrix, local, gradient)
            if matrix.stays:
                continue
            exchange = self._exchange_over(matrix.comm, "gradients", number)
            exchange.to_owner(matrix, gradient, self._gradients.get(matrix))
            if parameter in self._stale:
                copy = self._copies[matrix].detach() if matrix.is_mine else None
                exchange.to_owner(matrix, local, copy)
        self._launch("gradients", number)

    def _prepare(self, matrix: Matrix, local: Tensor, gradient: Tensor) -> None:
        if matrix.stays:
            copy = nn.Parameter(_aligned(matrix.of(local)))
            self._gradients[matrix] = _aligned(matrix.of(gradient))
        else:
            known = self._copies.get(matrix)
            copy = nn.Parameter(local.new_empty(matrix.shape)) if known is None else known
            self._gradients[matrix] = gradient.new_empty(matrix.shape)
        Stepping.copy_attributes(matrix.parameter, copy)  # users may set them anew
        if copy is not self._copies.get(matrix):
            copy.grad_dtype = None  # it may be that of reductions
            self._copies[matrix] = copy

    def open(self, number: int, groups: list[State], state: Any) -> None:
        """Put matrices of a batch that are here into the groups and state that the code gets."""
        self._land("gradients", number)
        for matrix in filter(lambda matrix: matrix.is_mine, self._batches[number]):
            copy = self._copies[matrix]
            copy.grad = self._gradients.pop(matrix)
            groups[self._group_of[matrix.parameter]]["params"].append(copy)
            if found := state_of(self._optimizer, matrix):
                state[copy] = found
        if number != _LAST:
            kept: dict[Any, Any] = self._optimizer.state
            of_all = {key: each for key, each in kept.items() if not isinstance(key, Tensor)}
            state |= _apart(of_all)

    def close(self, number: int, state: Any) -> None:
        """Take state back, and launch what brings new rows to all ranks."""
        for matrix in self._batches[number]:
            kept = self._optimizer.state[matrix.parameter]  # on each rank, if only an empty one
            copy = None
            if matrix.is_mine:
                copy = self._copies.pop(matrix) if matrix.stays else self._copies[matrix]
                copy.grad = None
                found = state.get(copy) or {}
                if found is not kept and (found or state_of(self._optimizer, matrix)):
                    set_state(self._optimizer, matrix, found)
            local = local_tensor(matrix.parameter).detach()
            whole = None if copy is None else copy.detach()
            if matrix.is_scattered:
                exchange = self._exchange_over(matrix.comm, "rows", number)
                exchange.from_owner(matrix, whole, local)
            elif whole is not None and whole.data_ptr() != matrix.of(local).data_ptr():
                matrix.of(local).copy_(whole)
        self._launch("rows", number)
        self._land("rows", number - 1)
        if number == _LAST:
            self._land("rows", _LAST)

    def give_up(self) -> None:
        """Wait for what was launched."""
        for what, number in list(self._travelling):
            self._land(what, number)
        for batch in self._batches:
            for matrix in batch:
                if matrix in self._copies:
                    self._copies[matrix].grad = None

    def has(self, number: int) -> bool:
        """Whether this rank has anything to compute in a batch."""
        return any(matrix.is_mine for matrix in self._batches[number])


# --- all steps -----------------------------------------------------------------------------------


class MatrixStepping(Stepping):
    """An optimizer steps whole matrices on their owners. Made by `step_on_matrices`."""

    keeps_whole_state = True

    def __init__(
        self,
        optimizer: Optimizer,
        which: Callable[[Tensor], bool],
        original: MatrixStepping | None = None,
    ) -> None:
        self._which = which
        self._layouts: MatrixLayouts = MatrixLayouts() if original is None else original._layouts
        self._seen: list[Any] = []
        self._matrices: dict[Tensor, list[Matrix]] = {}
        self._by_comm: dict[Comm, list[Tensor]] = {}
        self._digests: dict[Comm, int] = {}
        self._copies: dict[Matrix, nn.Parameter] = {}
        self._prints: dict[Tensor, int] = {}
        self._step: _MatrixStep | None = None  # the one that runs
        self._others: LocalStep | None = None
        self._check_state = True
        self._attributes: dict[str, Any] = {}
        self._closure: _Closure | None = None
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._loaded: dict[Tensor, Any] = {}
        if original is None:
            self._follow(optimizer)
            self._compare(optimizer)
        else:
            self._take_over(optimizer, original)
        super().__init__(optimizer)
        self._handles += [
            optimizer.register_state_dict_post_hook(self._on_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        vars(optimizer)["__reduce_ex__"] = self._reduce
        self._watch_state(optimizer)

    # --- plans -----------------------------------------------------------------------------------

    def _follow(self, optimizer: Optimizer) -> None:
        """Decide who owns what of parameters that are new, or lie in another way."""
        parameters = parameters_of(optimizer)
        seen: list[Any] = [*parameters]
        for parameter in parameters:
            info = getattr(unit_of(parameter), "mesh_info", None)
            seen += getattr(parameter, "_spec", None), info
        if len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return
        former, self._matrices = self._matrices, {}
        for parameter in parameters:
            known = former.get(parameter)
            if known is None and not self._which(parameter):
                continue
            layout = self._layouts.of(parameter)
            if known is not None and known[0].layout == layout:
                self._matrices[parameter] = known
            elif _is_stack(parameter) and len(parameter):
                slices = range(parameter.shape[0])
                self._matrices[parameter] = [Matrix(parameter, layout, each) for each in slices]
            else:
                self._matrices[parameter] = [Matrix(parameter, layout)]
        moved = {
            parameter: matrices
            for parameter, matrices in former.items()
            if self._matrices.get(parameter, matrices) is not matrices
        }
        states = scatter_state(optimizer, moved) if moved and optimizer.state else {}
        assign(matrix for found in self._matrices.values() for matrix in found)
        for parameter, state in states.items():
            optimizer.state[parameter] = collect(self._matrices[parameter], state, self._layouts)
        alive = {matrix for found in self._matrices.values() for matrix in found}
        self._copies = {matrix: copy for matrix, copy in self._copies.items() if matrix in alive}
        for parameter in moved:
            self._prints.pop(parameter, None)
        self._by_comm = by_comm(self._matrices)
        self._digests = {
            comm: _digest(map(self._described, found)) for comm, found in self._by_comm.items()
        }
        self._seen = seen

    def _described(self, parameter: Tensor) -> str:
        found = self._matrices.get(parameter)
        stepped = "on its shards" if found is None else f"whole, {len(found)} matrices"
        placed = parameter.placements if isinstance(parameter, DTensor) else ""
        return f"{_name_of(parameter)}, {parameter.dtype} {placed} {stepped}"

    def _compare(self, optimizer: Optimizer) -> None:
        """Check that all ranks hold the same, also where a rank has no matrix of a mesh."""
        by_comm: dict[Comm, list[str]] = {}
        for parameter in parameters_of(optimizer):
            try:
                comm = self._layouts.of(parameter).ranks.comm
            except OptimizerError:  # it is stepped on its shards
                continue
            by_comm.setdefault(comm, []).append(self._described(parameter))
        for comm, texts in by_comm.items():
            lowest, highest = comm.min_max([_digest(texts)], Launch("comparison of matrices"))
            if lowest != highest:
                raise RanksDisagreeError(_difference(comm, texts))

    # --- a step ----------------------------------------------------------------------------------

    @override
    def _takes(self, optimizer: Optimizer) -> bool:
        self._attributes = {**optimizer.__dict__, **{hooks: {} for hooks in _HOOKS}}
        return True

    @override
    def _arguments_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        self._closure = next(map(_Closure, filter(callable, given)), None)
        if self._closure is not None:
            args = tuple(self._closure if callable(each) else each for each in args)
            kwargs = {k: self._closure if callable(each) else each for k, each in kwargs.items()}
        self._arguments = args, kwargs
        return args, kwargs

    @override
    @untraced
    def _groups_for(self, stand_in: StandIn) -> tuple[list[State], Any]:
        enabled, state = torch.is_grad_enabled(), stand_in.state
        if self._step is None:
            try:
                with torch.no_grad():
                    state = self._begin(stand_in, enabled)
            except BaseException:
                self._give_up(stand_in.optimizer)
                raise
        assert self._others is not None
        return self._others.groups, state

    def _begin(self, stand_in: StandIn, enabled: bool) -> Any:
        """Step all batches but the last one. Returns the state that the code gets for it."""
        optimizer = stand_in.optimizer
        parameters = parameters_of(optimizer)
        self._refuse_unreduced(optimizer, parameters)
        if self._closure is not None:
            self._closure.is_open = False
        self._follow(optimizer)
        stepped = [each for each in self._matrices if each.grad is not None]
        _refuse_placed_apart(stepped)
        matrices = [matrix for parameter in stepped for matrix in self._matrices[parameter]]
        stale = self._stale_of(optimizer, stepped)
        self._others = others = self._step_of_others(optimizer)
        self._step = step = _MatrixStep(optimizer, matrices, self._copies, stale)
        step.send(0)
        for number in range(_LAST):
            step.send(number + 1)
            groups = [_apart(group) | {"params": []} for group in optimizer.param_groups]
            state: Any = defaultdict(dict)
            step.open(number, groups, state)
            if step.has(number):
                with torch.set_grad_enabled(enabled):
                    state = self._run(optimizer, groups, state)
            step.close(number, state)
        step.open(_LAST, others.groups, others.state)
        return others.hand_to(stand_in, stand_in.state)

    def _step_of_others(self, optimizer: Optimizer) -> LocalStep:
        groups = [
            {**group, "params": [each for each in group["params"] if each not in self._matrices]}
            for group in optimizer.param_groups
        ]
        others = LocalStep.begin(optimizer, groups, check_state=self._check_state)
        if others is None:
            raise OptimizerError(
                f"{_CALLER}: parameters of {type(optimizer).__name__} that are no matrices cannot"
                " be stepped on their shards: they are no plain tensors, or a gradient or state"
                " lies otherwise than its parameter. Give them to another optimizer, or select them"
                " by which=. Whole state is loaded by set_optimizer_state_dict"
            )
        self._check_state = False
        return others

    def _run(self, optimizer: Optimizer, groups: list[State], state: Any) -> Any:
        """Run the optimizer's code for a batch, with what it had of its own before the step.

        Returns:
            The state that it has left.
        """
        stand_in = StandIn.of(optimizer, _Given(groups), state)
        stand_in.__dict__ = _apart(self._attributes)
        (_, *args), kwargs = self._arguments
        if (closure := self._closure) is not None and closure.was_called:
            args = [closure.replay if each is closure else each for each in args]
            kwargs = {k: closure.replay if v is closure else v for k, v in kwargs.items()}
        step: Any = type(optimizer).step
        getattr(step, "__wrapped__", step)(stand_in, *args, **kwargs)  # without its hooks
        return stand_in.state

    def _stale_of(self, optimizer: Optimizer, stepped: Sequence[Tensor]) -> set[Tensor]:
        """Parameters with a matrix elsewhere that were written to since the last step.

        All ranks agree on it, and on what is stepped.

        Raises:
            RanksDisagreeError: they step other matrices.
            OptimizerError: the last step has left parameters in attributes, on any of the ranks.
        """
        keeps = _kept_by(optimizer)
        now = self._digests_of(stepped)
        stale: set[Tensor] = set()
        for comm, parameters in self._by_comm.items():
            has = bytes(parameter in now for parameter in parameters)
            found = [parameter for parameter in parameters if parameter in now]
            moved = [int(self._prints.get(each) != now[each]) for each in found]
            row = [zlib.crc32(has, self._digests[comm]), sum(moved), int(keeps is not None)]
            lowest, highest = comm.min_max(row, Launch("comparison of matrices that are stepped"))
            if lowest[0] != highest[0]:
                raise RanksDisagreeError(_difference(comm, list(map(self._described, found))))
            if highest[2]:
                raise OptimizerError(_keeping(optimizer, keeps))
            if highest[1]:
                _, moved = comm.min_max(moved, Launch("exchange of which matrices were written to"))
                stale |= {each for each, flag in zip(found, moved, strict=True) if flag}
        return stale

    def _digests_of(self, stepped: Sequence[Tensor]) -> dict[Tensor, int]:
        """Of what is stepped; 0 of what its owners have anyway."""
        found = [each for each in stepped if not all(m.stays for m in self._matrices[each])]
        taken = digests_as_ints(found)
        return dict.fromkeys(stepped, 0) | dict(zip(found, taken, strict=True))

    @override
    @torch.no_grad()
    def _finish(self, optimizer: Optimizer) -> None:
        step, others, self._step, self._others = self._step, self._others, None, None
        self._closure, self._attributes, self._arguments = None, {}, ((), {})
        if step is None or others is None:
            return
        step.close(_LAST, others.left())
        self._prints |= self._digests_of(step.parameters)
        try:
            others.finish(optimizer)
        except OptimizerError as error:
            raise OptimizerError(
                f"{_CALLER}: a parameter that is no matrix was stepped on its shards, and"
                f" {first_line(error).partition(': ')[2].partition(';')[0]}. Select it by which=,"
                " and it is stepped whole"
            ) from None

    @override
    @torch.no_grad()
    def _give_up(self, optimizer: Optimizer) -> None:
        step, others, self._step, self._others = self._step, self._others, None, None
        if step is not None:
            step.give_up()
            self._prints = {}
        if others is not None:
            others.finish(optimizer)

    # --- state -----------------------------------------------------------------------------------

    def _watch_state(self, optimizer: Optimizer) -> None:
        optimizer.state = PartOfState(optimizer, optimizer.state, self._has_parts)

    def _has_parts(self) -> bool:
        """Whether there is state that this rank has not, or otherwise than its parameter."""
        return self._has_others() or any(
            isinstance(parameter, DTensor) or found[0].index is not None
            for parameter, found in self._matrices.items()
            if found
        )

    def _has_others(self) -> bool:
        return any(found and found[0].comm.size > 1 for found in self._matrices.values())

    def _on_state_dict(self, optimizer: Optimizer, state_dict: State) -> State | None:
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        number_of = dict(zip(parameters_of(optimizer), numbers, strict=True))
        if not called_by_checkpoints():
            if not self._has_others():
                return None
            # it stays a call of one rank, which says what it has
            owned = {
                number_of[parameter]: [m.index for m in found if m.is_mine]
                for parameter, found in self._matrices.items()
            }
            return {**state_dict, _OWNED: {f"rank {dist.get_rank()}": owned}}
        found = scatter_state(optimizer, self._matrices)
        state = state_dict["state"] | {number_of[each]: found[each] for each in found}
        if not any(state.values()):
            state = {}  # torch would miss that of vectors, which has no entries
        # in the order of parameters, and not in that of batches
        ordered = {number: state.pop(number) for number in number_of.values() if number in state}
        return {**state_dict, "state": without_tuples(ordered | state)}

    def _before_load(self, optimizer: Optimizer, state_dict: State) -> State:
        """Collect what this rank owns. Torch's code, and the optimizer's, sees the rest."""
        self._follow(optimizer)
        self._loaded = {}
        groups: list[list[Any]] = [group["params"] for group in state_dict["param_groups"]]
        held = [group["params"] for group in optimizer.param_groups]
        if list(map(len, groups)) != list(map(len, held)):
            return state_dict  # torch refuses it
        numbers = dict(zip(chain(*held), chain(*groups), strict=True))
        # by the name of a rank, so that files of all ranks may have them side by side
        owned = next(iter(state_dict.get(_OWNED, {}).values()), None)
        self._refuse_parts_of_others(optimizer, owned, numbers)
        state = dict(state_dict["state"])
        for parameter, matrices in self._matrices.items():
            if (found := state.pop(numbers[parameter], None)) is not None:
                self._loaded[parameter] = collect(matrices, found, self._layouts)
        for parameter, number in numbers.items():
            if number in state and (former := optimizer.state.get(parameter)):
                state[number] = with_tuples(state[number], former)
        as_loaded(optimizer, state_dict["param_groups"], self._matrices, self._loaded)
        self._check_state = True
        return {**state_dict, "state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        optimizer.state.update(self._loaded)
        self._loaded = {}
        self._watch_state(optimizer)

    def _refuse_parts_of_others(
        self, optimizer: Optimizer, owned: Any, numbers: dict[Tensor, Any]
    ) -> None:
        """Raise on all ranks if one is to load what another one has."""
        for comm, parameters in self._by_comm.items():
            lacks = owned is not None and any(
                matrix.is_mine and matrix.index not in owned.get(numbers[parameter], ())
                for parameter in parameters
                for matrix in self._matrices[parameter]
            )
            _, (is_part, any_lacks) = comm.min_max(
                [int(owned is not None), int(lacks)], Launch("comparison of who has which state")
            )
            if is_part and any_lacks:
                raise OptimizerError(
                    f"{_CALLER}: this state_dict() of {type(optimizer).__name__} is that of one"
                    " rank, with the state of the matrices that it owned, and a rank loads it that"
                    " owns others. Nothing was loaded. Save what get_optimizer_state_dict gives, on"
                    " all ranks, and load it by set_optimizer_state_dict"
                )

    # --- copies ----------------------------------------------------------------------------------

    @override
    def _state_to_copy(self, optimizer: Optimizer) -> Any:
        # torch's classes look into the state of each parameter when they are copied
        others = {k: v for k, v in optimizer.state.items() if k not in self._matrices}
        return defaultdict(dict, others)

    @override
    def _follow_to(self, copied: Optimizer, memo: dict[int, Any]) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter, other in zip(parameters_of(optimizer), parameters_of(copied), strict=True):
            if parameter in self._matrices and parameter in optimizer.state:
                copied.state[other] = copy.deepcopy(optimizer.state[parameter], memo)
        MatrixStepping(copied, self._which, self)

    def _take_over(self, optimizer: Optimizer, original: MatrixStepping) -> None:
        """Own, of a copy, what is owned of the original. Ranks need not agree on it again."""
        former = original._optimizer()
        assert former is not None
        for parameter, other in zip(parameters_of(former), parameters_of(optimizer), strict=True):
            if parameter in original._matrices:
                self._matrices[other] = [
                    replace(matrix, parameter=other) for matrix in original._matrices[parameter]
                ]

    def _reduce(self, protocol: int) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        if optimizer.state and self._matrices:
            raise OptimizerError(
                f"{_CALLER}: this {type(optimizer).__name__} keeps the state of whole matrices on"
                " the ranks that own them, so that no rank can pickle or copy.copy it. Save what"
                " get_optimizer_state_dict gives, on all ranks; copy.deepcopy copies it"
            )
        return type(optimizer).__reduce_ex__(optimizer, protocol)


def _aligned(tensor: Tensor) -> Tensor:
    """Itself, if it lies as new tensors do.

    Kernels add in another order where a tensor does not begin at a cache line, as some shards and
    gradients do not.
    """
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


def _apart(values: State) -> State:
    """With copies of what code counts in: numbers in tensors, lists and dictionaries.

    Each batch counts from what was there before the step; what the last one counts stays.
    """
    changeable = {key: value for key, value in values.items() if _has_numbers(value)}
    return values | cloned(changeable) if changeable else dict(values)


def _has_numbers(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        found = value.values() if isinstance(value, dict) else value
        return bool(value) and all(map(_is_number, found))
    return isinstance(value, Tensor) and _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept_by(optimizer: Optimizer) -> str | None:
    """An attribute in which it keeps parameters, tensors of their shapes, or an optimizer of them.

    Its code would take them for what it gets.
    """
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        for each in islice(_leaves(value), 100):  # the first ones of a long list tell
            found = isinstance(each, (Optimizer, nn.Parameter, DTensor))
            # parameters are looked at for few, since this runs in each step
            if isinstance(each, Tensor) and each.ndim >= 2 and not found:
                found = any(each.shape == other.shape for other in parameters_of(optimizer))
            elif isinstance(each, int) and each > _NO_ID:
                found = any(each == id(other) for other in parameters_of(optimizer))
            if found:
                return name
    return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _keeping(optimizer: Optimizer, name: str | None) -> str:
    kind = type(optimizer).__name__
    where = f"its attribute '{name}'" if name is not None else "an attribute, on another rank"
    return (
        f"{_CALLER}: this {kind} keeps parameters, tensors of their shapes, or an optimizer of them"
        f" in {where}. In a step its code is given other tensors, some of them at a time, which"
        " those are not. Keep what belongs to a parameter in state; if it wraps an optimizer, call"
        " step_on_matrices for that one, and leave it out for this one"
    )


def _digest(texts: Iterable[str]) -> int:
    return zlib.crc32("\n".join(texts).encode())


def _difference(comm: Comm, texts: Sequence[str]) -> str:
    """The first difference between what the ranks step."""
    every = comm.all_gather_objects(texts, Launch("exchange of matrices that differ"))
    for row in zip_longest(*every, fillvalue="nothing"):
        rank = next((rank for rank, text in enumerate(row) if text != row[0]), None)
        if rank is not None:
            names = ranks_of(comm)
            return (
                f"{_CALLER}: the ranks step other matrices: rank {names[0]} {row[0]}; rank"
                f" {names[rank]} {row[rank]}. Nothing was written. Give all ranks the same"
                " parameters, which= and gradients, in the same order"
            )
    raise AssertionError("digests differ, so there is a difference")


def _name_of(parameter: Tensor) -> str:
    label = label_of(parameter)
    shape = f"of shape {tuple(parameter.shape)}"
    return f"a parameter {shape}" if label is None else f"{label} {shape}"


def _refuse_placed_apart(stepped: Sequence[Tensor]) -> None:
    for parameter in stepped:
        gradient = parameter.grad
        assert gradient is not None
        if not placed_alike([gradient], [parameter]) or gradient.layout is not torch.strided:
            raise OptimizerError(
                f"{_CALLER}: the gradient of {_name_of(parameter)} lies otherwise than the"
                " parameter, or is sparse, so that its parts cannot come together. Redistribute it"
                " to the parameter's placements first"
            )


# --- which matrices ------------------------------------------------------------------------------


@checked
def step_on_matrices(optimizer: AnyOptimizer, which: Which = None) -> AnyOptimizer:
    """Let an optimizer step whole matrices, each on the one rank that owns it.

    Use this for optimizers that do not step element by element: `torch.optim.Muon`, Shampoo, SOAP,
    or your own. Their code for one device runs unchanged. It receives whole plain tensors, and
    gives the same bits as in one process.

    Ranks share the work: each owns about the same amount of it. A rank sends its part of the
    gradients to the owners, and receives its part of the new rows. With N ranks, each of these is
    an N-th part of the parameters. A step runs in batches: a rank computes one batch while others
    are sent. The owner holds the state and a copy of the parameter.

    The optimizer steps stacks of matrices (3 dimensions, such as experts) slice by slice. If one
    rank holds a whole slice, the slice stays there. Each kernel of a convolution is one matrix.
    Tensor-parallel matrices are gathered on the owner, and replicas share the work. Parameters that
    are not selected are stepped on their shards, so the optimizer must update them element by
    element. Optimizers that step vectors with Adam do this.

    The optimizer's `step` runs once for each batch of a step. Each time, it sees the groups and the
    optimizer's attributes as they were before the step. It must compute numbers that it writes to
    its groups from numbers of the groups, not from parameters, because each rank sees only some of
    them. If there is a closure, it must evaluate it before it reads its groups.

    One rank may call `optimizer.state_dict()`, which returns the state of the matrices that this
    rank owns. For checkpoints, all ranks call torch's `get_optimizer_state_dict` and
    `set_optimizer_state_dict`. They convert to and from the state of an optimizer over DTensors, so
    a checkpoint loads on any number of ranks and into plain models. `copy.deepcopy` copies the
    optimizer with its model. Each rank has only a part of the state, so pickling raises an error,
    and so do methods of the optimizer's class that read the state outside of `step`.

    All ranks call this, after annotating and before the first step.

    Args:
        optimizer: holds parameters of annotated modules, and any others.
        which: the parameters to step whole: a function of a parameter, or parameters, or their
            names. None selects those of 2 dimensions and more; for Adafactor, all.

    Returns:
        The optimizer.

    Raises:
        OptimizerError: the optimizer cannot step a part of its parameters, already has state, or
            keeps parameters in attributes; or `which` names a parameter that the optimizer does not
            have.
        RanksDisagreeError: the ranks hold or select different parameters. In a step: they have
            gradients of different parameters; nothing has been written.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> optimizer = step_on_matrices(torch.optim.Muon(matrices, lr=0.02))

    As the Muons of Moonlight (arXiv 2502.16982) and Dion (arXiv 2504.05295) share their work.
    """
    kind: Any = type(optimizer)
    if isinstance(optimizer, optim.LBFGS) or is_part_of_backward(optimizer):
        raise OptimizerError(
            f"{_CALLER}: {kind.__name__} steps all of its parameters as one, or one by one in"
            " backward, and cannot be given some of them whole. Use another optimizer"
        )
    if Stepping.is_differentiable(optimizer):
        raise OptimizerError(
            f"{_CALLER}: this {kind.__name__} is differentiable: its steps become part of a graph"
            " that whole matrices would be missing from. Leave differentiable=True out"
        )
    stepping = Stepping.of(optimizer)
    if isinstance(stepping, MatrixStepping):
        if which is not None:
            raise OptimizerError(
                f"{_CALLER}: which= was chosen for this {kind.__name__} already, and its state is"
                " with the owners. Make a new optimizer"
            )
        return optimizer
    if optimizer.state:
        raise OptimizerError(
            f"{_CALLER}: this {kind.__name__} has state already, of which each rank has a part: it"
            " has stepped, was loaded, or makes some when it is made, as Adagrad does. Call"
            " step_on_matrices when the optimizer is made, and load the state then; one that makes"
            " state at once cannot be given whole matrices"
        )
    if (kept := _kept_by(optimizer)) is not None:
        raise OptimizerError(_keeping(optimizer, kept))
    if stepping is not None:
        step_on_shards(optimizer, enabled=False)
    MatrixStepping(optimizer, _predicate(optimizer, which))
    return optimizer


def _is_stack(parameter: Tensor) -> bool:
    """Whether its slices are matrices, as those of experts are, and not parts of one kernel."""
    label = label_of(parameter)
    modules = () if label is None else [module() for module, _ in label.places]
    return parameter.ndim == 3 and not any(isinstance(each, _Convolution) for each in modules)


def _predicate(optimizer: Optimizer, which: Which) -> Callable[[Tensor], bool]:
    if which is None:
        # its updates of vectors take norms over all of a vector, too
        everything = isinstance(optimizer, optim.Adafactor)
        return lambda parameter: everything or parameter.ndim >= 2
    if callable(which):
        return which
    named = _names_in(optimizer)
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    chosen: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # a copy outlives them
    for each in which:
        if not isinstance(each, str | Tensor):
            raise OptimizerError(
                f"{_CALLER}: which must be names or parameters, got {kind_of(each)} in it"
            )
        found = named.get(each) if isinstance(each, str) else each
        if found is None or id(found) not in held:
            said = f"'{each}'" if isinstance(each, str) else _name_of(each)
            raise OptimizerError(
                f"{_CALLER}: which= has {said}, which {type(optimizer).__name__} does not hold;"
                f" {what_is_there(str(each), list(named))}"
            )
        chosen[id(found)] = found
    return lambda parameter: chosen.get(id(parameter)) is parameter


def _names_in(optimizer: Optimizer) -> dict[str, Tensor]:
    """By the names that the optimizer was given, and those in units."""
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (label := label_of(parameter)) is not None:
                unit = "" if label.unit == unit_name("") else f"{label.unit}."
                named[f"{unit}{label.fqn}"] = parameter
        named |= dict(zip(group.get("param_names", ()), group["params"], strict=False))
    return named
