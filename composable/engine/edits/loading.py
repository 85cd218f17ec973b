"""Load state dicts into at-rest parameters that are DTensors, and note when a state dict is made.

`load_state_dict` passes every module its entries, after a hook that may replace them. This hook
turns a plain full tensor into the `DTensor` of this rank's shard, without a message, and
redistributes a `DTensor` with other placements. If an entry does not fit, the error comes by name
at the end of loading, as torch reports a wrong shape.

With `assign=True` torch registers a new parameter per entry. A tied parameter has several entries
and stays one: its first entry is registered at all of its places, and the others must have the same
values.

`Module.to` and its like keep what users have set on such parameters (`keep_attributes`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.compilation import untraced
from composable.contract.contract import Method, drop_attribute, unbind_method
from composable.engine.params.param import (
    PLAIN,
    ManagedParam,
    label_of,
    mesh_of,
    model_group_of,
    replacement_of,
)
from composable.engine.step.observer import called
from composable.engine.step.prepare import is_called, modules_inside
from composable.engine.step.unit import Need, Unit, unit_of, written
from composable.errors import AnnotationError
from composable.tensors import (
    as_class_of,
    cloned,
    describe_mesh,
    gradient_like,
    is_unreduced,
    wrap_like,
)
from composable.torch_private import CONVERT, local_of

logger = logging.getLogger("composable")

_WARNED: Final[WeakSet[nn.Module]] = WeakSet()  # models that `warn_of_other_groups` has named
_SILENT: Final = ContextVar("_SILENT", default=False)


class StateDictHooks:
    """The hooks of modules that hold parameters of a unit, for state dicts that are made or loaded.

    A state dict in an `except` block after a failed step is one of at-rest parameters.
    """

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit or Unit()
        self._errors: list[str] = []  # of the call of `load_state_dict` that is under way
        self._to_load = 0  # modules that this call has yet to load before a scope shows them again
        # by module id: parameters, and their names there
        self._here: dict[int, list[tuple[ManagedParam, str]]] = {}
        # what was registered in this call, for which key
        self._assigned: dict[ManagedParam, tuple[str, nn.Parameter]] = {}

    def watch(self, modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
        """Prepare modules that hold parameters of the unit, and let RNN weights stay in place;
        returns what undoes it.
        """
        undo: list[Callable[[], object]] = []
        unit = self._unit
        for module in modules:
            undo.append(module.register_state_dict_pre_hook(self._before).remove)
            # torch sets an attribute on this one, which a bound method cannot have
            undo.append(module.register_state_dict_post_hook(partial(self._after)).remove)
            undo.append(module.register_load_state_dict_pre_hook(self._load).remove)
            undo.append(module.register_load_state_dict_post_hook(self._loaded).remove)
            casts = unit.spec.mp_policy.param_dtype is not None
            if isinstance(module, nn.RNNBase) and (unit.is_sharded or casts):
                # cuDNN's weights are moved next to each other by `flatten_parameters`, away from
                # the buffers that are filled.
                module.flatten_parameters = lambda: None  # type: ignore[method-assign]
                undo.append(partial(drop_attribute, module, "flatten_parameters"))
        return undo

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictHooks:
        return StateDictHooks(copy.deepcopy(self._unit, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        refuse_pickling(self._unit)
        return StateDictHooks, ()  # in a pickled part of a replicated module: nothing to do

    def _before(self, module: nn.Module, *_: object) -> None:
        show_at_rest(self._unit, module)

    @untraced
    def _after(self, module: nn.Module, _: object, prefix: str, *__: object) -> None:
        warn_of_other_groups(module, prefix)
        self._unit.end_show_at_rest(module)

    def _load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        """Exchange the entries of `module` for what its parameters can take."""
        _strict, _missing_keys, _unexpected_keys, errors = rest
        if self._errors is not errors:
            called("load_state_dict()")
            self._errors, self._assigned, self._here = errors, {}, {}
            for param in self._unit.params:
                for place in param.info.places:
                    self._here.setdefault(id(place.module), []).append((param, place.name))
            self._to_load = 0
            if Need.EXPLICIT in self._unit.kept_by and not self._unit.step.calls:
                top = [*modules_inside("load_state_dict"), module][0]
                # one that is registered twice is loaded twice
                found = [id(each) for _, each in top.named_modules(remove_duplicate=False)]
                self._to_load = sum(map(self._here.__contains__, found))
        show_at_rest(self._unit)
        assign = metadata.get("assign_to_params_buffers", False)
        for param, name in self._here.get(id(module), ()):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                state_dict[prefix + name] = self._take(param, prefix + name, value, assign=assign)

    def _loaded(self, *_: object) -> None:
        """What a scope shows is gathered again and shown, once all modules are loaded."""
        self._to_load -= 1
        if not self._to_load:
            written([self._unit])

    def _take(self, param: ManagedParam, key: str, value: Tensor, *, assign: bool) -> Tensor:
        at_rest = param.at_rest
        if not isinstance(at_rest, DTensor):
            return value  # a replicated parameter without shards around it
        if value.shape == (1,) and not at_rest.shape:
            # as torch does, for files from before there were tensors without dimensions
            value = value[0]
        if value.shape != at_rest.shape:
            return value  # torch names it
        if isinstance(value, DTensor) and value.device_mesh != at_rest.device_mesh:
            self._errors.append(
                f'"{key}" is a DTensor over {describe_mesh(value.device_mesh)}, the parameter is'
                f" sharded over {describe_mesh(at_rest.device_mesh)}; load its full_tensor() in"
                " place of it"
            )
            return at_rest  # so that nothing is changed
        if (
            isinstance(value, DTensor)
            and value.device_mesh.get_coordinate() != at_rest.device_mesh.get_coordinate()
        ):
            self._errors.append(
                f'"{key}" is the shard of another rank, whose state dict torch.save wrote. Write'
                " checkpoints from all ranks with torch.distributed.checkpoint, or save"
                " full_state_dict(model)"
            )
            return at_rest
        unit = self._unit
        device = torch.device("cpu") if unit.spec.on_host else unit.mesh_info.device
        with torch.no_grad():
            taken = PLAIN.shard_like(value, at_rest, device)
        if not assign:
            return taken
        if param not in self._assigned:
            # A copy: the full tensor must not live on because of a view of it.
            # Of the class of the shard, as `copy_` would leave it.
            local = as_class_of(local_of(at_rest), cloned(local_of(taken)))
            parameter = replacement_of(at_rest, wrap_like(local, taken))
            param.register(parameter)
            self._assigned[param] = key, parameter
            return parameter
        first, parameter = self._assigned[param]
        assert isinstance(parameter, DTensor)
        if not torch.equal(local_of(parameter), local_of(taken)):
            self._errors.append(
                f'"{key}" and "{first}" are one parameter, and the state dict has different values'
                " for them"
            )
        return parameter


@untraced
def show_at_rest(unit: Unit, module: nn.Module | None = None) -> None:
    """Before a state dict is made or loaded: modules hold at-rest parameters.

    Args:
        module: see `Unit.show_at_rest`.
    """
    calls = unit.step.calls
    unit.show_at_rest(module, runs=bool(calls) and is_called([call.module for call in calls]))
    for group in unit.groups:
        group.expect_load()


def refuse_pickling(unit: Unit) -> None:
    if unit.is_sharded or unit.rest_mesh is not None:
        raise AnnotationError(
            f"the annotated unit '{unit.name}' is distributed over process groups, and cannot be"
            " pickled. Save its state_dict() (torch.distributed.checkpoint writes it from all"
            " ranks), or full_state_dict(model); copy.deepcopy(model) copies the model on all"
            " ranks"
        )


@contextmanager
def says_nothing_of_groups() -> Iterator[None]:
    """State dicts that are made inside are looked at by the caller, in place of
    `warn_of_other_groups`.
    """
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


def warn_of_other_groups(module: nn.Module, prefix: str) -> None:
    """Once per model: tell that a state dict has parameters of which other ranks of the model may
    have other values under the same name. To compare them takes a message, which state dicts do
    without.

    Args:
        module: at rest, with parameters in the state dict.
        prefix: of its names there. A unit that is saved by itself, on the ranks that have it, has
            no longer ones than inside of it.
    """
    for parameter in module._parameters.values():
        if parameter is None or (group := model_group_of(parameter)) is None:
            continue  # as nearly all are
        ranks, label, unit = mesh_of(parameter), label_of(parameter), unit_of(parameter)
        if ranks is None or label is None or unit is None:
            continue
        number, model = dist.get_world_size(group), unit.relations.units_around()[-1].modules[0]
        alone = label.mesh_info is None and prefix.count(".") <= label.fqn.count(".")
        if _SILENT.get() or alone or model in _WARNED or ranks.size() >= number:
            continue
        _WARNED.add(model)
        logger.warning(
            "a state dict was made with %s, which is on %d of the %d ranks of the model. If other"
            " ranks have other values of it (experts), a checkpoint has those of one group of ranks"
            " only: declare the parts with declare_part(), or save the module by itself on the"
            " ranks that share it",
            label, ranks.size(), number,
        )  # fmt: skip


# --- conversions --------------------------------------------------------------------------------


def keep_attributes(modules: Iterable[nn.Module]) -> list[Callable[[], object]]:
    """Let parameters of these modules keep what users have set on them in `Module.to`, `half`,
    `cpu`, `to_empty`; returns what undoes it.

    torch exchanges the insides of a `DTensor` with those of the one that it becomes, and the Python
    attributes go with them: groups of an optimizer that are made by attribute (`no_weight_decay`)
    would be others, without a word. It asks each module to convert its own parameters, by a method
    that is looked up on the object; so each module that has parameters at rest gets one.
    """
    without = [module for module in modules if CONVERT not in vars(module)]
    for module in without:
        vars(module)[CONVERT] = Method(module, CONVERT, _convert)
    return [partial(unbind_method, module, CONVERT) for module in without]


def _convert(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    def convert(tensor: Tensor) -> Tensor:
        if is_unreduced(tensor):  # torch would reduce it, on the ranks that have one
            return gradient_like(fn(local_of(tensor)), tensor)  # type: ignore[arg-type]
        return fn(tensor)

    said = [(each, dict(vars(each))) for each in module._parameters.values() if each is not None]
    try:
        converted: nn.Module = getattr(type(module), CONVERT)(module, convert, *args, **kwargs)
    finally:
        for parameter, attributes in said:
            own = vars(parameter)
            own.update({name: each for name, each in attributes.items() if name not in own})
    return converted
