"""Run initialisers for parameters and buffers on the meta device, and keep this rank's shards.

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

from composable.comm.launch import Launch
from composable.contract.tree import Place
from composable.contract.values import tensors_in
from composable.engine.step.unit import Unit
from composable.errors import ForeignParameterError, PhaseError, RanksDisagreeError, few
from composable.memory.digests import digests_as_ints
from composable.memory.elastic import ElasticBuffer
from composable.state.folder import FolderPlan
from composable.state.whole import (
    NamedParam,
    comms_of_model,
    follow_whole,
    managed_in,
    names_that_differ,
    whole_parameter,
    write_whole,
)
from composable.tensors.dtensors import whole_of
from composable.torch_private import local_tensor, storage_key

Init = Callable[[nn.Module], object]
Touch = Callable[[Tensor, bool], None]

# By module, the names of what was on the meta device and has no values yet: also after an error.
_UNSET: Final[WeakKeyDictionary[nn.Module, dict[str, None]]] = WeakKeyDictionary()
# What reads a tensor, or hands out its memory to be written to, without an operator.
_READS: Final = (Tensor.tolist, Tensor.data_ptr)
_HANDS_OUT: Final = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_OF_LORA: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Initialisation:
    """What is without values, and the initialisers that fill what no folder has.

    Attributes:
        fresh: what was on the meta device.
    """

    def __init__(
        self, verb: str, model: nn.Module, init: Init | None, plan: FolderPlan | None
    ) -> None:
        """Look for it; nothing is written."""
        self._model, self._init = model, init
        self.fresh = list(_without_values(model))
        left = [each for each in self.fresh if plan is None or not plan.covers(tensor_at(each))]
        self._adapters = _NewAdapters(verb, model, left, filled=init is not None)
        self._left = self._adapters.left
        self._draws = plan is None or any(plan.lacks(tensor_at(each)) for each in self._left)

    def compare_random_states(self, units: Sequence[Unit]) -> None:
        """Raise on all ranks if their random states differ, and initialisers of weights run."""
        if not self._draws:
            return
        state = digests_as_ints([torch.get_rng_state()])
        for comm in dict.fromkeys(
            [*(unit.mesh_info.all for unit in units), *comms_of_model(units)]
        ):
            lowest, highest = comm.min_max(state, Launch("comparison of random states"))
            if lowest != highest:
                raise RanksDisagreeError(
                    "materialize: the random states of the ranks differ, and so would the weights."
                    " Call torch.manual_seed(seed) with one seed on all ranks right before it"
                )

    def begin(self) -> None:
        """Let what is fresh count as without values until `end`, though it gets memory."""
        for place in self.fresh:
            _UNSET.setdefault(place.module, {})[place.name] = None

    def run(self, units: Sequence[Unit]) -> None:
        """Run initialisers of modules with something that is left, and of those around them.

        All that is fresh has memory and no values. What is not left is written to later, whatever
        initialisers do.
        """
        if not self._left:
            return
        model, init, adapters = self._model, self._init, self._adapters
        owners = {id(place.module) for place in self._left}
        order: list[nn.Module] = []
        model.apply(order.append)
        modules = [
            module
            for module in dict.fromkeys(order)
            if any(id(below) in owners for below in module.modules())
        ]
        state = _Materialization(model, self.fresh, self._left)
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

    def end(self) -> None:
        """Fill copies of what has values now, and note that nothing is fresh any more."""
        self._adapters.copy()
        for place in self.fresh:
            _UNSET.pop(place.module, None)


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
        self._given = {id(tensor_at(each)) for each in fresh} - {id(tensor_at(e)) for e in left}
        # by id, which tied places share: what nothing was written to yet, and its storage
        self._unset: dict[int, tuple[Place, Tensor, int]] = {}
        for place in fresh:
            if (tensor := tensor_at(place)) is not None:
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
            and tensor_at(place) is tensor
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
                self.initialisers[id(layer)] = partial(_fill, layer, drawn[id(layer)])
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
            copy, original = tensor_at(to), tensor_at(source)
            assert copy is not None
            assert original is not None
            local_tensor(copy).copy_(local_tensor(original))


def _fill(layer: Any, adapters: Mapping[str, bool | str]) -> None:
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
    one, other = tensor_at(found), tensor_at(place)
    return found if one is not None and _rests_as(one) == _rests_as(other) else None


def _rests_as(tensor: Tensor | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, tensor.device_mesh
    return () if tensor is None else (tensor.shape,)


def tensor_at(place: Place) -> Tensor | None:
    """Return the parameter or buffer that is registered at a place."""
    return place.module._parameters.get(place.name, place.module._buffers.get(place.name))
