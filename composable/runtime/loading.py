"""How a state dict comes into a unit's parameters: cut where it is loaded; knows neither phases nor order.

Note [Loading]
`load_state_dict` hands every module its entries, after a hook that may exchange them. There a plain full tensor becomes the
`DTensor` of this rank's shard, without a message, and one that is spread otherwise is brought into our placement. What cannot
be taken is reported as torch reports a wrong shape: by name, at the end of loading.
With `assign=True` torch registers a new parameter per entry. A tied parameter has several entries, and stays one: its first
entry is registered at all of its places, and the others must say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.parameter_forms import describe_mesh, shard_like
from composable.device.parameter_swap import ShardedParam
from composable.device.private import local_of


class _Unit(Protocol):
    @property
    def params(self) -> Sequence[ShardedParam]: ...

    @property
    def home(self) -> torch.device:
        """Where the parameters are."""


class StateDictHook:
    """Runs before each module that holds parameters of a unit takes its entries; copied with the unit."""

    def __init__(self, unit: _Unit) -> None:
        self._unit = unit
        self._errors: list[str] = []  # of a call of `load_state_dict`, which it stands for
        self._here: dict[int, list[tuple[int, str]]] = {}  # by the module's id: the parameters' indices, their names there
        # What was registered in this call, by the index: its key, its id. A parameter that is referred to weakly cannot
        # be cast or moved, and one that is referred to strongly lives until the next call.
        self._assigned: dict[int, tuple[str, int]] = {}

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        errors: list[str],
    ) -> None:
        """Exchange the entries of `module` for what its parameters can take."""
        if self._errors is not errors:
            self._begin(errors)
        assign = local_metadata.get("assign_to_params_buffers", False)
        for index, name in self._here.get(id(module), ()):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                state_dict[prefix + name] = self._take(index, prefix + name, value, assign=assign)

    def _begin(self, errors: list[str]) -> None:
        self._errors, self._assigned, self._here = errors, {}, {}
        for index, param in enumerate(self._unit.params):
            for place in param.info.places:
                self._here.setdefault(id(place.module), []).append((index, place.name))

    def _take(self, index: int, key: str, value: Tensor, *, assign: bool) -> Tensor:
        sharded = self._unit.params[index].sharded
        assert isinstance(sharded, DTensor)
        if value.shape == (1,) and not sharded.shape:
            value = value[0]  # as torch does, for files of the time before it had tensors without dimensions
        if value.shape != sharded.shape:
            return value  # torch names it
        if isinstance(value, DTensor) and value.device_mesh != sharded.device_mesh:
            self._errors.append(
                f'"{key}" is a DTensor over {describe_mesh(value.device_mesh)}, the parameter is sharded over '
                f"{describe_mesh(sharded.device_mesh)}; load its full_tensor() in place of it"
            )
            return sharded  # so nothing is changed
        with torch.no_grad():
            taken = shard_like(value, sharded, self._unit.home)
        return self._register(index, key, taken) if assign else taken

    def _register(self, index: int, key: str, taken: DTensor) -> Tensor:
        """Make a parameter of `taken`, at all of its places; if another entry of this state dict has done so, that one."""
        param = self._unit.params[index]
        first, earlier = self._assigned.get(index, ("", None))
        registered = param.registered
        if id(registered) != earlier:
            # A copy: the full tensor must not live on because of a view of it.
            parameter = nn.Parameter(taken.clone(), requires_grad=param.sharded.requires_grad)
            assert isinstance(parameter, DTensor)
            param.replace(parameter)
            self._assigned[index] = (key, id(parameter))
            return parameter
        assert isinstance(registered, DTensor)
        if not torch.equal(local_of(registered), local_of(taken)):
            self._errors.append(f'"{key}" and "{first}" are one parameter, and the state dict has different values for them')
        return registered
