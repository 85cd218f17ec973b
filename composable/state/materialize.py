"""`materialize` and `load`: memory and values for a model, by initialisers or from a folder.

A model on the meta device was built and annotated there. Of a folder of safetensors each rank
reads its own part (`folder.py`), and initialisers fill only what the folder does not have. Nothing
is sent but whether every rank can read what it needs, before anything is written.

Initialisers are written for whole plain parameters and draw random numbers in one order. So each
module's initialiser runs once, with whole parameters, on every rank alike, module by module in the
order of `Module.apply`; then each rank keeps its shard. While initialisers run, modules hold whole
parameters that have no memory yet. The first operator that reads or writes one gives it memory, and
gathers its values if it has some. The memory is freed when the initialiser is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from composable.api.scopes import units_in
from composable.comm.launch import Launch
from composable.comm.ledger import checksum
from composable.compilation import untraced, unwrapped
from composable.contract.tree import Place
from composable.contract.values import tensors_in
from composable.engine.edits.written import written
from composable.engine.params.dtensors import whole_of
from composable.engine.params.param_hooks import move_hooks
from composable.engine.step.root import planned_roots
from composable.engine.step.unit import Unit, unit_of
from composable.errors import (
    ForeignParameterError,
    PhaseError,
    RanksDisagreeError,
    UnknownArgumentError,
    few,
)
from composable.memory.elastic import ElasticBuffer
from composable.state.adapters import NewAdapters
from composable.state.folder import Files, Loaded, Plan, Rename, cast
from composable.state.whole import (
    Managed,
    all_or_none,
    comms_of_model,
    follow_whole,
    managed_in,
    require_at_rest,
    whole_parameter,
    write_whole,
)
from composable.torch_private import local_tensor

Init = Callable[[nn.Module], object]


Touch = Callable[[Tensor, bool], None]
# What reads a tensor, or hands out its memory to be written to, without an operator.
_READS: Final = (Tensor.tolist, Tensor.data_ptr)
_HANDS_OUT: Final = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
# By module, the names of what was on the meta device and has no values yet: also after an error.
_UNSET: Final[WeakKeyDictionary[nn.Module, dict[str, None]]] = WeakKeyDictionary()


class _Operators(TorchDispatchMode):
    """Tells of every tensor that an operator reads or writes, before it runs.

    It does so through `.data` and views, too.
    """

    def __init__(self, touch: Touch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._touch = touch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        values = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
        for argument in arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(values.get(argument.name)):
                self._touch(tensor, writes)
        return func(*args, **kwargs)


class _RawMemory(TorchFunctionMode):
    """Tells of tensors that are read or written to without an operator."""

    def __init__(self, touch: Touch) -> None:
        super().__init__()
        self._touch = touch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS or func in _HANDS_OUT:
            self._touch(args[0], func in _HANDS_OUT)
        return func(*args, **(kwargs or {}))


def _free(whole: _Whole) -> None:
    if whole.view.untyped_storage().resizable():  # with torch 2.11 not what NumPy was given
        whole.buffer.free()


def _storage(tensor: Tensor) -> int:
    tensor = local_tensor(tensor)
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def materialize(
    model: nn.Module,
    init: Init | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Give memory to parameters and buffers on the meta device, and run initialisers.

    The result is one process's weights, sharded.

    After `torch.manual_seed(seed)` on all ranks the weights are those of one process that runs,
    after the same seed, `model.to_empty(device=...)` and `model.apply(init)`, bit by bit, whatever
    the mesh and the policy. Above the shards no more than the parameters of the largest unit are
    whole at a time. All ranks call this together, after the annotation.

    With a folder this is `load`, and initialisers run only for modules with something on the meta
    device that the folder does not have, and for modules around them: buffers that are in no state
    dict, and with `strict=False` parameters, as of a new head. Where these are random, set the
    seed on all ranks before.

    Args:
        model: an annotated module, or one that contains some. Modules without anything on the meta
            device, at any depth, are not initialised.
        init: called with each module, children first, as by `model.apply`. None: `_init_weights` of
            transformers' models, and else the module's own `reset_parameters`. An initialiser that
            reads or writes the parameters of units below its module, as one for a whole model does,
            has these whole at once, too.
        folder: of safetensors, from which values come; see `load`.
        dtype: the model is cast to it first; see `load`.
        strict: as for `load`; only with a folder.
        rename: as for `load`; only with a folder.

    Returns:
        Names of the model that the folder has nothing for, which were initialised, and names in the
        folder that were left out; empty if `strict`, and without a folder.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        PhaseError: inside of a forward or backward; or an initialiser wrote to a parameter or
            buffer of none of its calls, so that it would hold what was in memory before; they are
            named.
        ForeignParameterError: an initialiser tied parameters, or untied some.
        RanksDisagreeError: the random states of the ranks differ; or initialisers gave the ranks
            different values, because they draw from NumPy, `random` or a generator with another
            seed on each rank.
        UnknownArgumentError: `strict` or `rename` without a folder.
        FileNotFoundError, StateError, ImportError: as of `load`.

    After an error call it again, with the seed set again: everything that was on the meta device is
    initialised anew.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model(config)
        >>> fully_shard(model, policy={Block})
        >>> torch.manual_seed(0)
        >>> materialize(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    if folder is None and not (strict and rename is None):
        raise UnknownArgumentError(
            "materialize: strict= and rename= say how a folder is read, and there is no folder="
        )
    return _fill("materialize", model, init, folder, dtype, strict, rename)


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Read weights from a folder of Hugging Face safetensors into an annotated model.

    Each rank reads its own part; nobody has the whole model. It is the inverse of `export`, and
    reads what `save_pretrained` writes. All ranks call this together, outside of forward and
    backward, and before optimizers are made if `dtype` is given or the model is on the meta device.

    What is on the meta device gets memory. Buffers that are in no state dict, and with
    `strict=False` what the folder does not have, are initialised there, as by `materialize`.

    Args:
        model: an annotated module, or one that contains some.
        folder: with `model.safetensors`, or an index and its files, or any files of safetensors;
            or such a file. Every rank must see it.
        dtype: parameters and buffers of floating-point numbers are cast to it first, as
            `from_pretrained` does: not buffers that are in no state dict, and not what a model of
            transformers keeps in float32. None: values are cast to the dtypes that the model has.
        strict: refuse a folder whose names are not those of the model. Of tied tensors one name is
            enough.
        rename: what a tensor of the folder is called in the model. None: for a model of
            transformers what `from_pretrained` does, experts that it stacks included; else the
            names as they are.

    Returns:
        Names that were missing and unexpected; empty if `strict`.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        PhaseError: inside of a forward or backward; or no initialiser wrote to a buffer that is in
            no state dict, and was on the meta device.
        FileNotFoundError: no file of safetensors in `folder`, or one that its index names.
        StateError: names or shapes differ, values cannot be cast (integers are no weights), the
            folder is of quantised weights, a name is in two files, two names become one, or a file
            is cut off. On all ranks, and the model is as it was.
        RanksDisagreeError: the folder of another rank does not fit, or has other tensors.
        ImportError: the package `safetensors` is not installed.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> load(model, "models/llama")
        Loaded(missing_keys=[], unexpected_keys=[])
    """
    return _fill("load", model, None, folder, dtype, strict, rename)


def _fill(
    verb: str,
    model: nn.Module,
    init: Init | None,
    folder: str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
    strict: bool,
    rename: Rename | None,
) -> Loaded:
    model = unwrapped(model)
    _check_arguments(verb, model, init, dtype, rename)
    units = units_in(verb, model)
    require_at_rest(verb, units)
    reads = verb == "load" or folder is not None
    plan = _plan(verb, model, units, folder, strict, rename) if reads else None
    fresh = list(_without_values(model))
    left = [place for place in fresh if plan is None or not plan.covers(_tensor_at(place))]
    adapters = NewAdapters(verb, model, left, filled=init is not None)
    left = adapters.left
    if plan is None or any(plan.lacks(_tensor_at(place)) for place in left):
        _compare_random_states(units)
    if dtype is not None:
        cast(model, dtype)
    for place in fresh:
        _UNSET.setdefault(place.module, {})[place.name] = None
    give_memory(model, units[0].mesh_info.device)
    if plan is None or fresh or dtype is not None:
        refresh(model)
    if left:
        _initialise(model, units, init, fresh, left, adapters)
    if plan is not None:
        all_or_none(verb, comms_of_model(units), plan.write)
    adapters.copy()
    for place in fresh:
        _UNSET.pop(place.module, None)
    written(units)
    return Loaded([], []) if plan is None else plan.left_out


def _check_arguments(verb: str, model: object, init: object, dtype: object, rename: object) -> None:
    if not isinstance(model, nn.Module):
        raise UnknownArgumentError(
            f"{verb}: the first argument is the annotated module, not a {type(model).__name__}"
        )
    if init is not None and not callable(init):
        raise UnknownArgumentError(
            f"{verb}: init= is a function that is called with each module, not {init!r}. Pass a"
            " folder by its name: folder="
        )
    if rename is not None and not callable(rename):
        raise UnknownArgumentError(
            f"{verb}: rename= is a function that is given a name in the folder and returns the"
            f" model's, not a {type(rename).__name__}"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UnknownArgumentError(
            f"{verb}: dtype= is a torch.dtype of floating-point numbers, as torch.bfloat16, not"
            f" {dtype!r}; others are no weights"
        )


def _plan(
    verb: str,
    model: nn.Module,
    units: Sequence[Unit],
    folder: object,
    strict: bool,
    rename: Rename | None,
) -> Plan:
    plans: list[Plan] = []

    def look() -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            # a variable that is not set on one rank: the others are told
            raise UnknownArgumentError(
                f"{verb}: folder= is the path of a folder or file of safetensors, not"
                f" {repr(folder)[:40]}. Without a folder, materialize(model) runs initialisers"
            )
        plans.append(Plan(model, Files(Path(folder)), rename))
        plans[0].check(strict=strict)

    all_or_none("load", comms_of_model(units), look)
    plans[0].agree()
    return plans[0]


def _initialise(
    model: nn.Module,
    units: Sequence[Unit],
    init: Init | None,
    fresh: Sequence[Place],
    left: Sequence[Place],
    adapters: NewAdapters,
) -> None:
    """Run initialisers of modules with places that are `left`, and of those around them.

    All of `fresh` have memory and no values. Those that are not left are written to later, whatever
    initialisers do.
    """
    owners = {id(place.module) for place in left}
    order: list[nn.Module] = []
    model.apply(order.append)
    modules = [
        module
        for module in dict.fromkeys(order)
        if any(id(below) in owners for below in module.modules())
    ]
    state = _Materialization(model, fresh, left)
    around = _transformers_around(model) if init is None else {}
    for inside in adapters.inside:
        around.pop(inside, None)
    try:
        for module in modules:
            initialise = (
                adapters.initialisers.get(id(module))
                or _own_initialiser(module, around.get(id(module)))
                if init is None
                else partial(init, module)
            )
            if initialise is not None:
                state.run(module, initialise)
    finally:
        state.finish()
    state.compare(units)
    missing = state.missing()
    if missing:
        raise PhaseError(
            f"materialize: no initialiser wrote to {few(list(map(repr, missing)))}, so that it"
            " holds what was in memory before. Pass materialize(init=) a function that fills it,"
            " also buffers that __init__ computes (rotary embeddings), or build that module on a"
            " real device"
        )


@untraced
def refresh(model: nn.Module) -> None:
    """Adopt now what was done to annotated modules since the last forward, or refuse it by name.

    The next forward does it, too. Moved, cast, replaced, frozen and unfrozen parameters are
    adopted, and the next step compares ranks and agrees on orders again. All ranks call this
    together, outside of forward and backward.

    Args:
        model: an annotated module, or one that contains some.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        ForeignParameterError, AnnotationError: what the next forward would raise.

    Example:
        >>> model.load_state_dict(state, assign=True)
        >>> refresh(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    units = units_in("refresh", model)
    require_at_rest("refresh", units)
    for root in planned_roots(units):
        root.agree_anew()
    for root in planned_roots(units):
        root.prepare()
    written(units)  # those that were moved or cast have other memory


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`, but tied tensors stay tied, and what has memory keeps it."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    unit = unit_of(parameter)
                    offloaded = unit is not None and unit.is_sharded and unit.spec.grouping.on_host
                    empty = torch.empty_like(parameter, device="cpu" if offloaded else device)
                    made[id(parameter)] = new = whole_parameter(empty, parameter)
                    move_hooks(parameter, new)
                setattr(module, name, made[id(parameter)])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[id(buffer)]


def _without_values(model: nn.Module) -> Iterator[Place]:
    """Yield the places of what is on the meta device, or was there in a call that failed."""
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (tensor.is_meta or name in _UNSET.get(module, ())):
                yield Place(module, name, f"{prefix}.{name}" if prefix else name)


def _tensor_at(place: Place) -> Tensor | None:
    return place.module._parameters.get(place.name, place.module._buffers.get(place.name))


class _Whole:
    """The whole parameter that modules hold in place of an at-rest one.

    Its memory comes and goes.
    """

    def __init__(self, managed: Managed) -> None:
        at_rest = managed.param.at_rest
        self.managed, self.at_rest = managed, at_rest
        self.buffer = ElasticBuffer(at_rest.numel(), at_rest.dtype, managed.unit.mesh_info.device)
        self.view = self.buffer.part(0, at_rest.shape, at_rest.stride())
        self.parameter = whole_parameter(self.view, at_rest)

    def register(self) -> None:
        """Let modules hold it, over its own memory."""
        self.parameter.data = self.view
        self.managed.param.register(self.parameter)


class _Materialization:
    """Registers whole parameters of all units, and keeps the shards of what initialisers write."""

    def __init__(self, model: nn.Module, fresh: Sequence[Place], left: Sequence[Place]) -> None:
        # what is written to later, by id
        self._given = {id(_tensor_at(place)) for place in fresh} - {
            id(_tensor_at(place)) for place in left
        }
        # by id, which tied places share: what nothing was written to yet, and its storage
        self._unset: dict[int, tuple[Place, Tensor, int]] = {}
        for place in fresh:
            if (tensor := _tensor_at(place)) is not None:
                self._unset.setdefault(id(tensor), (place, tensor, _storage(tensor)))
        self._fresh = [tensor for _, tensor, _ in self._unset.values()]
        self._written: dict[int, None] = {}  # storages that the initialiser which runs now wrote to
        # by at-rest parameter, the checksum of what became its shards
        self._sums: dict[int, int] = {}
        self._managed = list(managed_in("materialize", model))
        wholes = [_Whole(each) for each in self._managed if isinstance(each.param.at_rest, DTensor)]
        self._shown: dict[_Whole, None] = {}  # those that have memory
        self._by_storage = {_storage(each.view): each for each in wholes}
        self._by_id = {id(each.parameter): each for each in wholes}
        self._at = {
            (id(place.module), place.name): each
            for each in wholes
            for place in each.managed.param.info.places
        }
        for each in wholes:
            each.register()

    def run(self, module: nn.Module, initialise: Callable[[], object]) -> None:
        self._written = {}
        with _RawMemory(self._touch), _Operators(self._touch):
            initialise()
        for each in self._shown:
            if _storage(each.view) in self._written:
                self._keep(each, each.parameter)
        for below in module.modules():
            for name, found in [*below._parameters.items()]:
                if found is not None:
                    self._look_at(Place(below, name), found)
        for key, (_, _, storage) in [*self._unset.items()]:
            if storage in self._written:
                del self._unset[key]
        for each in self._shown:
            _free(each)
        self._shown = {}

    def _look_at(self, place: Place, found: nn.Parameter) -> None:
        """Take over a parameter, or its data, that the initialiser assigned."""
        each, owner = self._at.get((id(place.module), place.name)), self._by_id.get(id(found))
        if each is owner and (each is None or _storage(found) == _storage(each.view)):
            return
        if (
            each is None
            or owner not in (None, each)
            or any(other.registered is not found for other in each.managed.param.info.places)
        ):
            first, tied = owner or each, "untied from" if owner is None else "tied to"
            assert first is not None
            raise ForeignParameterError(
                f"materialize: an initialiser registered another parameter at '{place.name}' of a"
                f" {type(place.module).__name__}, which is {tied} '{first.managed.fqn}' by that."
                " Tie parameters before the annotation; they stay tied"
            )
        self._keep(each, found)
        each.register()

    def _touch(self, tensor: Tensor, writes: bool) -> None:
        key = _storage(tensor)
        each = self._by_storage.get(key)
        if each is not None and each not in self._shown:
            self._shown[each] = None
            each.buffer.allocate()
            if id(each.at_rest) not in self._unset:
                each.view.copy_(whole_of(each.at_rest))
        if writes:
            self._written[key] = None

    def _keep(self, each: _Whole, value: nn.Parameter) -> None:
        write_whole(value, each.at_rest)
        self._sums[id(each.at_rest)] = _checksum(value)
        self._unset.pop(id(each.at_rest), None)

    def finish(self) -> None:
        for each in self._by_id.values():
            each.managed.param.register(each.at_rest)
            follow_whole(each.at_rest, each.parameter)
            _free(each)

    def compare(self, units: Sequence[Unit]) -> None:
        """Raise on all ranks if initialisers gave them different values."""
        for tensor in self._fresh:
            # of what nothing was written to, `missing` tells
            if not isinstance(tensor, DTensor) and id(tensor) not in self._unset:
                self._sums[id(tensor)] = _checksum(tensor)
        for comm in dict.fromkeys(
            unit.mesh_info.all for unit in units if unit.mesh_info.all.size > 1
        ):
            members = [
                each
                for each in self._managed
                if each.unit.mesh_info.all is comm and id(each.param.at_rest) not in self._given
            ]
            sums = [self._sums.get(id(each.param.at_rest), 0) for each in members]
            lowest, highest = comm.min_max(sums, Launch("comparison of initialised parameters"))
            differ = [
                f"'{each.fqn}'"
                for each, low, high in zip(members, lowest, highest, strict=True)
                if low != high
            ]
            if differ:
                raise RanksDisagreeError(
                    f"materialize: initialisers gave {few(differ)} different values on the ranks."
                    " They draw from NumPy, Python's random or a generator of their own: seed it"
                    " alike on all ranks right before, and call materialize again"
                )

    def missing(self) -> list[str]:
        """Names of what was on the meta device and was not written to."""
        return [
            place.fqn
            for place, tensor, key in self._unset.values()
            if id(tensor) not in self._given
            and _tensor_at(place) is tensor
            and _storage(tensor) == key
        ]


def _checksum(value: Tensor) -> int:
    return int(value.detach().flatten().view(torch.uint8).sum())


def _transformers_around(model: nn.Module) -> dict[int, nn.Module]:
    """By module, the innermost model of transformers around it, whose `_init_weights` fills it."""
    # asked of the class: PEFT's models look names up in the model that they are around
    whole = [
        each
        for each in model.modules()
        if hasattr(type(each), "_init_weights") and hasattr(each, "config")
    ]
    return {id(below): each for each in whole for below in each.modules()}


def _own_initialiser(module: nn.Module, around: nn.Module | None) -> Callable[[], object] | None:
    """Find what a module is initialised by.

    It is the method of the transformers model around the module, or the module's own.
    """
    if around is not None:
        fill: Callable[[nn.Module], object] = around._init_weights  # type: ignore[assignment]
        return partial(fill, module)
    for name in ("reset_parameters", "_reset_parameters"):
        method: Callable[[], object] | None = getattr(module, name, None)
        if callable(method):
            return method
    return None


# --- random states ------------------------------------------------------------------------------


def _compare_random_states(units: Sequence[Unit]) -> None:
    state = checksum(str(torch.get_rng_state().tolist()))
    across = comms_of_model(units)[1:]
    for comm in dict.fromkeys(
        comm for comm in (*(unit.mesh_info.all for unit in units), *across) if comm.size > 1
    ):
        lowest, highest = comm.min_max([state], Launch("comparison of random states"))
        if lowest != highest:
            raise RanksDisagreeError(
                "materialize: the random states of the ranks differ, and so would the weights. Call"
                " torch.manual_seed(seed) with one seed on all ranks right before it"
            )
