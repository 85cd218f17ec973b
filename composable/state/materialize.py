"""`materialize`: give memory and values to a model that was built on the meta device and annotated there.

Initialisers are written for whole plain parameters and draw random numbers in one order. So each module's initialiser runs with
whole parameters, on every rank alike, module by module in the order of `Module.apply`; then each rank keeps its shard. The
parameters of one unit are whole at a time, and those of units below are stand-ins on the meta device: if an initialiser writes to
these, as one of a whole model does, it runs once more from the same random state with them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable.api.scopes import units_in
from composable.comm.ledger import checksum
from composable.compilation import untraced, unwrapped
from composable.engine.param import unit_of, whole_of
from composable.engine.root import Root
from composable.engine.unit import Unit
from composable.errors import PhaseError, RanksDisagreeError, few
from composable.state.whole import Managed, managed_in, require_at_rest, write_whole

Init = Callable[[nn.Module], object]


class _Writes(TorchDispatchMode):
    """Which storages were written to; also through `.data` and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                found = values.get(argument.name)
                for tensor in found if isinstance(found, (list, tuple)) else (found,):
                    if isinstance(tensor, Tensor):
                        self.storages[_storage(tensor)] = None
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def materialize(model: nn.Module, init: Init | None = None) -> None:
    """Give memory to parameters and buffers that are on the meta device, and run initialisers: one process's weights, sharded.

    After `torch.manual_seed(seed)` on all ranks the weights are those of one process that runs, after the same seed,
    `model.to_empty(device=...)` and `model.apply(init)`, bit by bit, whatever the mesh and the policy. Above the shards no more
    than the parameters of the largest unit are whole at a time. All ranks call this together, after the annotation.

    Args:
        model: an annotated module, or one that contains some. Modules without anything on the meta device, at any depth, are
            not initialised.
        init: called with each module, children first, as by `model.apply`. None: `_init_weights` of transformers' models, and
            else the module's own `reset_parameters`. An initialiser that writes to the parameters of units below its module, as
            one for a whole model does, has these whole at once, too.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        PhaseError: inside of a forward or backward; or an initialiser wrote to a parameter or buffer of none of its calls, so
            that it would hold what was in memory before; they are named.
        RanksDisagreeError: the random states of the ranks differ.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model(config)
        >>> fully_shard(model, policy={Block})
        >>> torch.manual_seed(0)
        >>> materialize(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    model = unwrapped(model)
    units = units_in("materialize", model)
    require_at_rest("materialize", units)
    _compare_random_states(units)
    fresh = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    modules = [module for module in _children_first(model) if any(t.is_meta for t in (*module.parameters(), *module.buffers()))]
    device = units[0].mesh_info.device
    _give_memory(model, device)
    refresh(model)
    state = _Materialization(model, fresh)
    around = _transformers_around(model) if init is None else {}
    try:
        for module in modules:
            initialise = _own_initialiser(module, around.get(id(module))) if init is None else partial(init, module)
            if initialise is not None:
                state.run(module, initialise)
    finally:
        state.finish()
    missing = state.missing()
    if missing:
        raise PhaseError(
            f"materialize: no initialiser wrote to {few(list(map(repr, missing)))}, so that it holds what was in memory "
            "before. Pass init= with a function that fills it, also buffers that __init__ computes (rotary embeddings), or build "
            "that module on a real device"
        )


@untraced
def refresh(model: nn.Module) -> None:
    """Adopt now what was done to annotated modules since the last forward, or refuse it by name; the next forward does it, too.

    Moved, cast, replaced, frozen and unfrozen parameters are adopted. All ranks call this together, outside of forward and
    backward. No communication.

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
    for unit in units:
        if unit.root is None:
            Root.plan(unit, unit.modules[0])
    for root in dict.fromkeys(unit.root for unit in units):
        assert root is not None
        root.prepare()


@torch.no_grad()
def _give_memory(model: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`, but tied tensors stay tied, and what has memory keeps it."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                new = made.get(id(parameter))
                if new is None:
                    unit = unit_of(parameter)
                    offloaded = unit is not None and unit.is_sharded and unit.spec.offload is not None
                    empty = torch.empty_like(parameter, device="cpu" if offloaded else device)
                    new = made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, new)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))


class _Materialization:
    """Registers whole parameters of the units that an initialiser writes to, and stand-ins on the meta device for all others."""

    def __init__(self, model: nn.Module, fresh: Sequence[str]) -> None:
        self._fresh = {name: _tensor_at(model, name) for name in fresh}  # what was on the meta device
        self._written: dict[int, None] = {}  # storages of those of them that every rank has whole
        self._kept: dict[str, None] = {}  # names of parameters whose shards have values
        self._model = model
        self._devices = [*dict.fromkeys(tensor.device for tensor in (*model.parameters(), *model.buffers()))]
        self._unit_at: dict[int, Unit] = {}  # by the storage of what is registered
        self._storage_of: dict[str, int] = {}  # the same, by name
        plain = [tensor for tensor in self._fresh.values() if tensor is not None and not isinstance(tensor, DTensor)]
        self._plain = dict.fromkeys(map(_storage, plain))
        self._managed: dict[Unit, list[Managed]] = {}
        self._unit_of: dict[int, Unit] = {}  # by module: the innermost unit around it
        self._shown: dict[Unit, list[nn.Parameter]] = {}  # the whole parameters that are registered
        for each in managed_in("materialize", model):
            self._unit_of.update((id(below), each.unit) for module in each.unit.modules for below in module.modules())
            if isinstance(each.param.at_rest, DTensor):
                self._managed.setdefault(each.unit, []).append(each)
        for unit in self._managed:
            self._hide(unit)

    def run(self, module: nn.Module, initialise: Callable[[], object]) -> None:
        unit = self._unit_of.get(id(module))
        needed = [unit] if unit is not None and unit in self._managed else []
        for other in [*self._shown]:
            if other not in needed:
                self._hide(other)
        before = _random_state(self._devices)
        while True:
            for each in needed:
                if each not in self._shown:
                    self._show(each)
            with _Writes() as writes:
                initialise()
            found = dict.fromkeys(self._unit_at[each] for each in writes.storages if each in self._unit_at)
            more = [each for each in found if each not in needed]
            if not more:
                break
            _set_random_state(before)
            for each in needed:
                self._hide(each)  # gathered from the shards again, without what was just written
            needed += more
        for each in needed:
            self._keep(each, writes.storages)
        self._written.update(dict.fromkeys(each for each in writes.storages if each in self._plain))

    def _show(self, unit: Unit) -> None:
        self._shown[unit] = []
        for each in self._managed[unit]:
            at_rest = each.param.at_rest
            unset = each.fqn in self._fresh and each.fqn not in self._kept  # nothing to gather yet
            value = (
                torch.empty(at_rest.shape, dtype=at_rest.dtype, device=unit.mesh_info.device) if unset else whole_of(at_rest)
            )
            whole = nn.Parameter(value, requires_grad=at_rest.requires_grad)
            self._shown[unit].append(whole)
            self._register(each, whole)

    def _keep(self, unit: Unit, written: Mapping[int, None]) -> None:
        for each, whole in zip(self._managed[unit], self._shown[unit], strict=True):
            registered = each.param.registered  # another one, if the initialiser assigned a new parameter
            assert registered is not None
            if registered is not whole or _storage(whole) in written:
                write_whole(registered, each.param.at_rest)
                self._kept[each.fqn] = None

    def _hide(self, unit: Unit) -> None:
        self._shown.pop(unit, None)
        for each in self._managed[unit]:
            at_rest = each.param.at_rest
            stand_in = torch.empty(at_rest.shape, dtype=at_rest.dtype, device="meta")
            self._register(each, nn.Parameter(stand_in, requires_grad=at_rest.requires_grad))

    def _register(self, managed: Managed, parameter: nn.Parameter) -> None:
        # A storage that was freed must not be found again: another tensor may get its number, on one rank only.
        self._unit_at.pop(self._storage_of.get(managed.fqn, 0), None)
        managed.param.register(parameter)
        self._storage_of[managed.fqn] = key = _storage(parameter)
        self._unit_at[key] = managed.unit

    def missing(self) -> list[str]:
        """Names of what was on the meta device and was not written to."""
        return [
            name
            for name, tensor in self._fresh.items()
            if tensor is not None and name not in self._kept and _tensor_at(self._model, name) is tensor
            and (isinstance(tensor, DTensor) or _storage(tensor) not in self._written)
        ]  # fmt: skip

    def finish(self) -> None:
        for members in self._managed.values():
            for each in members:
                each.param.register(each.param.at_rest)


def _tensor_at(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters.get(last, module._buffers.get(last))


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    """In the order of `Module.apply`, but each module once."""
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(model)


def _transformers_around(model: nn.Module) -> dict[int, nn.Module]:
    """By module, the innermost model of transformers around it, whose `_init_weights` fills it."""
    whole = [each for each in model.modules() if hasattr(each, "_init_weights") and hasattr(each, "config")]
    return {id(below): each for each in whole for below in each.modules()}


def _own_initialiser(module: nn.Module, around: nn.Module | None) -> Callable[[], object] | None:
    """Find what a module is initialised by: the method of the transformers model around it, or its own."""
    if around is not None:
        fill: Callable[[nn.Module], object] = around._init_weights  # type: ignore[assignment]
        return partial(fill, module)
    for name in ("reset_parameters", "_reset_parameters"):
        method: Callable[[], object] | None = getattr(module, name, None)
        if callable(method):
            return method
    return None


# --- random states ----------------------------------------------------------------------------------------------------


def _random_state(devices: Sequence[torch.device]) -> list[tuple[Any, Tensor]]:
    """Of the host, and of the devices that the model is on, with what sets each."""
    states: list[tuple[Any, Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            states.append((partial(module.set_rng_state, device=device), module.get_rng_state(device)))
    return states


def _set_random_state(states: list[tuple[Any, Tensor]]) -> None:
    for put, state in states:
        put(state)


def _compare_random_states(units: Sequence[Unit]) -> None:
    state = checksum(str(torch.get_rng_state().tolist()))
    for comm in dict.fromkeys(unit.mesh_info.all for unit in units if unit.mesh_info.all.size > 1):
        lowest, highest = comm.min_max([state], "comparison of random states")
        if lowest != highest:
            raise RanksDisagreeError(
                "materialize: the random states of the ranks differ, and so would the weights. Call torch.manual_seed(seed) with one "
                "seed on all ranks right before it"
            )
