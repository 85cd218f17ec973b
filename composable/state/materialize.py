"""`materialize` and `load` give a model memory and values; `refresh` adopts changes by users.

The model was built and annotated on the meta device. Each rank reads its own part of a folder of
safetensors, and initialisers fill only what the folder does not have. First a plan assigns the
tensors of the folder to the model (`folder.py`), then initialisers run, and the plan writes what
the folder has. The ranks compare only their arguments and random states, and whether all of them
can read what they need, before anything is written.

Initialisers are written for whole plain parameters and draw random numbers in one order. So each
module's initialiser runs once, with whole parameters, on every rank alike, module by module in the
order of `Module.apply`; then each rank keeps its shard. While initialisers run, modules hold whole
parameters that have no memory yet. The first operator that reads or writes one gives it memory, and
gathers its values if it has some. The memory is freed when the initialiser is done.

PEFT initialises adapters when it makes them, and their values are not the defaults of their
modules. On the meta device these values are lost: zeros for LoRA's second matrix, copies of the
original for `modules_to_save`, embeddings of a text for a prompt, and values that are computed from
base weights for others. `_NewAdapters` computes the values again if it can, and raises an error
that names the other adapters. Checked on PEFT 0.21.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from composable.api.explicit_calls import units_in
from composable.checked import RealDtype, checked
from composable.comm.launch import Launch
from composable.compilation import untraced, unwrapped
from composable.contract.tree import Place
from composable.contract.values import tensors_in
from composable.engine.params.param import move_hooks
from composable.engine.step.root import planned_roots
from composable.engine.step.unit import Unit, unit_of, written
from composable.errors import (
    ForeignParameterError,
    PhaseError,
    RanksDisagreeError,
    UnknownArgumentError,
    few,
)
from composable.memory.digests import digests_as_ints
from composable.memory.elastic import ElasticBuffer
from composable.state.folder import Loaded, Rename, plan_folder
from composable.state.hub_names import is_of_transformers, kept_dtypes
from composable.state.whole import (
    NamedParam,
    all_or_none,
    checked_on_all_ranks,
    comms_of_model,
    follow_whole,
    managed_in,
    names_that_differ,
    require_at_rest,
    tensors_at_rest,
    whole_parameter,
    write_whole,
)
from composable.tensors import is_packed, whole_of
from composable.torch_private import apply_to_tensors, local_tensor, storage_key

Init = Callable[[nn.Module], object]
Touch = Callable[[Tensor, bool], None]

# By module, the names of what was on the meta device and has no values yet: also after an error.
_UNSET: Final[WeakKeyDictionary[nn.Module, dict[str, None]]] = WeakKeyDictionary()
# What reads a tensor, or hands out its memory to be written to, without an operator.
_READS: Final = (Tensor.tolist, Tensor.data_ptr)
_HANDS_OUT: Final = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_OF_LORA: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")

# --- the verbs -----------------------------------------------------------------------------------


@checked_on_all_ranks
def materialize(
    module: nn.Module,
    init: Init | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: RealDtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Give memory to parameters and buffers on the meta device, and run initialisers.

    The result is one process's weights, sharded.

    Call `torch.manual_seed(seed)` on all ranks before. The weights then have the same bits as in
    one process that sets the same seed and runs `model.to_empty(device=...)` and
    `model.apply(init)`, for every mesh and policy. In addition to the shards, at most the
    parameters of the largest unit are whole at a time. All ranks call this together, after they
    annotate.

    With a folder, this is `load`. Initialisers then run only for modules that have a tensor on the
    meta device that the folder lacks, and for modules around them. Such tensors are buffers that
    are in no state dict, and with `strict=False` parameters, such as those of a new head. If these
    are random, set the seed on all ranks before.

    Args:
        module: an annotated module, or one that contains some. Modules without anything on the meta
            device, at any depth, are not initialised.
        init: called with each module, children first, as by `model.apply`. None: `_init_weights`
            for models of transformers, and otherwise the module's own `reset_parameters`. If an
            initialiser reads or writes the parameters of units below its module, as one for a whole
            model does, these parameters are whole at the same time, too.
        folder: of safetensors, from which values come; see `load`.
        dtype: cast the model to it first; see `load`.
        strict: as for `load`; only with a folder.
        rename: as for `load`; only with a folder.

    Returns:
        Names of the model that the folder lacks (they were initialised), and names of the folder
        that were not used. Both are empty if `strict`, and without a folder.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward; or no initialiser wrote to a parameter or
            buffer, which would then hold uninitialised memory; the error names them.
        ForeignParameterError: an initialiser tied parameters, or untied some.
        RanksDisagreeError: the random states of the ranks differ; or initialisers gave the ranks
            different values, because they draw from NumPy, `random` or a generator with another
            seed on each rank.
        UnknownArgumentError: `strict` or `rename` without a folder.
        FileNotFoundError, StateError, ImportError: as of `load`.

    After an error, set the seed again and call this again. It initialises everything that was on
    the meta device anew.

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
    return _fill("materialize", module, init, folder, dtype, strict, rename)


@checked_on_all_ranks
def load(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: RealDtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Read weights from a folder of Hugging Face safetensors into an annotated model.

    Each rank reads its own part, and no rank holds the whole model. `load` is the inverse of
    `export`, and reads what `save_pretrained` writes. All ranks call it together, outside of
    forward and backward. If you pass `dtype`, or the model is on the meta device, call it before
    you create optimizers.

    `load` allocates memory for tensors on the meta device. Of these, it initialises, as
    `materialize` does, buffers that are in no state dict, and with `strict=False` also parameters
    that the folder lacks.

    Args:
        module: an annotated module, or one that contains some.
        folder: a folder with `model.safetensors`, with an index and its files, or with any
            safetensors files; or one such file. Every rank must see it.
        dtype: cast floating-point parameters and buffers of the model to it first, as
            `from_pretrained` does. It does not cast buffers that are in no state dict, or tensors
            that a model of transformers keeps in float32. None: cast the values of the folder to
            the dtypes of the model.
        strict: raise an error if the names in the folder are not those of the model. For tied
            tensors, one name is enough.
        rename: maps the name of a tensor in the folder to its name in the model. None: for a model
            of transformers, rename and stack experts as `from_pretrained` does; otherwise keep the
            names.

    Returns:
        The missing and the unexpected names; both are empty if `strict`.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward; or no initialiser wrote to a buffer that is in
            no state dict and was on the meta device.
        FileNotFoundError: no file of safetensors in `folder`, or one that its index names.
        StateError: names or shapes differ, values cannot be cast (integers are not weights), the
            folder has quantised weights, a name is in two files, two names become one, or a file is
            truncated. All ranks raise, and the model does not change.
        RanksDisagreeError: the folder of another rank does not fit, or has other tensors.
        ImportError: the package `safetensors` is not installed.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> load(model, "models/llama")
        Loaded(missing_keys=[], unexpected_keys=[])
    """
    return _fill("load", module, None, folder, dtype, strict, rename)


@untraced
@checked
def refresh(module: nn.Module) -> None:
    """Adopt what has changed in annotated modules since the last forward, or raise an error.

    The next forward does the same. `refresh` adopts moved, cast, replaced, frozen and unfrozen
    parameters. The next step compares the ranks and agrees on orders again. All ranks call this
    together, outside of forward and backward.

    Args:
        module: an annotated module, or one that contains some.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        ForeignParameterError, AnnotationError: what the next forward would raise.

    Example:
        >>> model.load_state_dict(state, assign=True)
        >>> refresh(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    units = units_in("refresh", module)
    require_at_rest("refresh", units)
    for root in planned_roots(units):
        root.agree_anew()
    for root in planned_roots(units):
        root.prepare()
    written(units)  # those that were moved or cast have other memory


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
    units = units_in(verb, model)
    require_at_rest(verb, units)
    plan = None
    if folder is not None:
        plan = plan_folder(model, units, folder, rename, strict=strict)
    fresh = list(_without_values(model))
    left = [each for each in fresh if plan is None or not plan.covers(_tensor_at(each))]
    adapters = _NewAdapters(verb, model, left, filled=init is not None)
    if plan is None or any(plan.lacks(_tensor_at(each)) for each in adapters.left):
        _compare_random_states(units)
    # All ranks have agreed: from here on the model is written to.
    if dtype is not None:
        _cast(model, dtype)
    for place in fresh:  # it counts as without values to the end, though it gets memory
        _UNSET.setdefault(place.module, {})[place.name] = None
    give_memory(model, units[0].mesh_info.device)
    if plan is None or fresh or dtype is not None:
        refresh(model)
    if adapters.left:
        _initialise(model, units, init, fresh, adapters)
    if plan is not None:
        all_or_none(verb, comms_of_model(units), plan.write)
    adapters.copy()
    for place in fresh:
        _UNSET.pop(place.module, None)
    written(units)
    return Loaded([], []) if plan is None else plan.left_out


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


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a folder has, as `from_pretrained(dtype=)` does.

    These are parameters and buffers of floating-point numbers. Buffers that are in no state dict,
    as rotary frequencies are, keep their dtype, and so does what a model of transformers declares
    to be computed in float32.
    """
    state = tensors_at_rest(model)
    kept = kept_dtypes(model, state, dtype) if is_of_transformers(model) else {}
    wanted: dict[int, tuple[Tensor, torch.dtype]] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not is_packed(tensor):
            for each in (tensor, tensor.grad):
                if each is not None:
                    wanted[id(each)] = each, kept.get(name, dtype)
    apply_to_tensors(
        model, lambda tensor: tensor.to(wanted[id(tensor)][1]) if id(tensor) in wanted else tensor
    )


# --- initialisers --------------------------------------------------------------------------------


def _compare_random_states(units: Sequence[Unit]) -> None:
    """Raise on all ranks if their random states differ."""
    state = digests_as_ints([torch.get_rng_state()])
    for comm in dict.fromkeys([*(unit.mesh_info.all for unit in units), *comms_of_model(units)]):
        lowest, highest = comm.min_max(state, Launch("comparison of random states"))
        if lowest != highest:
            raise RanksDisagreeError(
                "materialize: the random states of the ranks differ, and so would the weights."
                " Call torch.manual_seed(seed) with one seed on all ranks right before it"
            )


def _initialise(
    model: nn.Module,
    units: Sequence[Unit],
    init: Init | None,
    fresh: Sequence[Place],
    adapters: _NewAdapters,
) -> None:
    """Run initialisers of modules with something that is left, and of those around them.

    All that is fresh has memory and no values. What is not left is written to later, whatever
    initialisers do.
    """
    owners = {id(place.module) for place in adapters.left}
    order: list[nn.Module] = []
    model.apply(order.append)
    modules = [
        module
        for module in dict.fromkeys(order)
        if any(id(below) in owners for below in module.modules())
    ]
    state = _Materialization(model, fresh, adapters.left)
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
    if missing := state.missing():
        raise PhaseError(
            f"materialize: no initialiser wrote to {few(list(map(repr, missing)))}, so that"
            " it holds what was in memory before. Pass materialize(init=) a function that"
            " fills it, also buffers that __init__ computes (rotary embeddings), or build that"
            " module on a real device"
        )


def _without_values(model: nn.Module) -> Iterator[Place]:
    """Yield the places of what is on the meta device, or was there in a call that failed."""
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (tensor.is_meta or name in _UNSET.get(module, ())):
                yield Place(module, name, f"{prefix}.{name}" if prefix else name)


class _Whole:
    """The whole parameter that modules hold in place of an at-rest one.

    Its memory comes and goes.
    """

    def __init__(self, managed: NamedParam) -> None:
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
        self._given = {id(_tensor_at(each)) for each in fresh} - {id(_tensor_at(e)) for e in left}
        # by id, which tied places share: what nothing was written to yet, and its storage
        self._unset: dict[int, tuple[Place, Tensor, int]] = {}
        for place in fresh:
            if (tensor := _tensor_at(place)) is not None:
                self._unset.setdefault(id(tensor), (place, tensor, _storage(tensor)))
        self._unset_in: dict[int, list[int]] = {}  # by storage, ids in `_unset`
        for key, (_, _, storage) in self._unset.items():
            self._unset_in.setdefault(storage, []).append(key)
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
        for storage in self._written:
            for key in self._unset_in.get(storage, ()):
                self._unset.pop(key, None)
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
        self._sums[id(each.at_rest)] = digests_as_ints([value])[0]
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
                self._sums[id(tensor)] = digests_as_ints([tensor])[0]
        for comm in dict.fromkeys(unit.mesh_info.all for unit in units):
            members = [
                each
                for each in self._managed
                if each.unit.mesh_info.all is comm and id(each.param.at_rest) not in self._given
            ]
            sums = [self._sums.get(id(each.param.at_rest), 0) for each in members]
            differ = names_that_differ(comm, members, sums, "initialised parameters")
            if differ:
                raise RanksDisagreeError(
                    f"materialize: initialisers gave {few([*map(repr, differ)])} different values"
                    " on the ranks. They draw from NumPy, Python's random or a generator of their"
                    " own: seed it alike on all ranks right before, and call materialize again"
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
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, methods), None)


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
    return storage_key(tensor) if tensor.layout is torch.strided else 0


# --- adapters of PEFT ----------------------------------------------------------------------------


class _NewAdapters:
    """Adapters that are without values.

    Attributes:
        inside: by id, modules of adapters, which no method of the model around initialises.
        initialisers: by id of a layer of PEFT's, what fills its adapters.
        left: places that initialisers are to fill; the others become copies.
    """

    def __init__(self, verb: str, model: nn.Module, left: Sequence[Place], *, filled: bool) -> None:
        """Look for them, unless a function of the user's has them `filled`."""
        self.inside: set[int] = set()
        self.initialisers: dict[int, Callable[[], object]] = {}
        self._copies: list[tuple[Place, Place]] = []
        self.left = list(left)
        if left and not filled and "peft" in sys.modules:
            self._look(verb, model)

    def _look(self, verb: str, model: nn.Module) -> None:
        from peft.tuners.lora import LoraLayer  # noqa: PLC0415 - it is imported already
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415
        from peft.utils.other import ModulesToSaveWrapper  # noqa: PLC0415

        kinds = (BaseTunerLayer, ModulesToSaveWrapper)
        # by module, the layer that it is an adapter of, the name there, and that of the adapter
        owners: dict[int, tuple[Any, str, str | None]] = {}
        for layer in model.modules():
            if isinstance(layer, kinds):
                for name, child in layer.named_children():
                    if name not in ("base_layer", "original_module"):
                        owners[id(child)] = layer, name, None
                        for adapter, part in child.named_children():
                            owners.update({id(e): (layer, name, adapter) for e in part.modules()})
        self.inside = {*owners}
        configs, prompts = _configs(model), _made_prompts(model)
        drawn: dict[int, dict[str, Any]] = {}  # by id of a layer of LoRA, how, by adapter
        ordinary: list[Place] = []
        refused: list[Place] = []
        for place in self.left:
            if id(place.module) not in owners:
                # the second: a parameter of the layer itself
                other = id(place.module) in prompts or isinstance(place.module, kinds)
                (refused if other else ordinary).append(place)
                continue
            layer, name, found = owners[id(place.module)]
            adapter = place.name if found is None else found
            init = getattr(configs.get(id(layer), {}).get(adapter), "init_lora_weights", None)
            if isinstance(layer, ModulesToSaveWrapper):
                original = _original(layer, adapter, place)
                if original is None:
                    refused.append(place)
                else:
                    self._copies.append((place, original))
            elif (
                isinstance(layer, LoraLayer)
                and name in _OF_LORA
                and (init in (True, False) or str(init).lower() == "gaussian")
            ):
                ordinary.append(place)
                drawn.setdefault(id(layer), {})[adapter] = init
                self.initialisers[id(layer)] = partial(_reset, layer, drawn[id(layer)])
            else:
                refused.append(place)
        if refused:
            raise PhaseError(
                f"{verb}: {few([repr(place.fqn) for place in refused])} of a new adapter of PEFT is"
                " on the meta device, where PEFT could not initialise it, and no module has an"
                " initialiser that does. Make the adapter on a real device before the annotation,"
                " read it from a folder, or pass materialize(init=) a function that fills it"
            )
        self.left = ordinary

    @torch.no_grad()
    def copy(self) -> None:
        """Fill copies of original modules, once these have values. No message."""
        for to, source in self._copies:
            copy, original = _tensor_at(to), _tensor_at(source)
            assert copy is not None
            assert original is not None
            local_tensor(copy).copy_(local_tensor(original))


def _reset(layer: Any, adapters: Mapping[str, bool | str]) -> None:
    for adapter, init in adapters.items():
        layer.reset_lora_parameters(adapter, init)


def _configs(model: nn.Module) -> dict[int, Mapping[str, Any]]:
    """By id of a layer, the configurations of its adapters."""
    return {
        id(layer): found
        for holder in model.modules()
        if isinstance(found := vars(holder).get("peft_config"), Mapping)
        for layer in holder.modules()
    }


def _made_prompts(model: nn.Module) -> set[int]:
    """By id, modules of prompts that are more than drawn: embeddings of a text, or zeros."""
    return {
        id(part)
        for holder in model.modules()
        if isinstance(encoders := holder._modules.get("prompt_encoder"), nn.ModuleDict)
        and isinstance(configs := getattr(holder, "peft_config", None), Mapping)
        for adapter, encoder in encoders.items()
        if not _is_drawn(configs.get(adapter))
        for part in encoder.modules()
    }


def _is_drawn(config: Any) -> bool:
    return (
        getattr(config, "peft_type", None) in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
        and getattr(config, "prompt_tuning_init", "RANDOM") == "RANDOM"
        and getattr(config, "init_weights", None) != "zero"
    )


def _original(layer: Any, adapter: str, place: Place) -> Place | None:
    """Find what a place of a copied module is a copy of, if both rest alike."""
    copied = layer.modules_to_save[adapter]
    path = next(name for name, each in copied.named_modules() if each is place.module)
    originals = dict(layer.original_module.named_modules())
    found = Place(originals.get(path, layer), place.name, place.fqn)
    one, other = _tensor_at(found), _tensor_at(place)
    return found if one is not None and _rests_as(one) == _rests_as(other) else None


def _rests_as(tensor: Tensor | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, tensor.device_mesh
    return () if tensor is None else (tensor.shape,)


def _tensor_at(place: Place) -> Tensor | None:
    """Return the parameter or buffer that is registered at a place."""
    return place.module._parameters.get(place.name, place.module._buffers.get(place.name))
