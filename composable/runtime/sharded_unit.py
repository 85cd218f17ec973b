"""What `fully_shard` leaves in the registry: how a unit is made, named, copied and removed. Decides no order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced
from composable.device.parameter_swap import Place, ShardedParam
from composable.model.hooks import Guard
from composable.model.removed_hooks import refuse_removed_hooks
from composable.model.transaction import is_rolling_back
from composable.runtime.accumulation import refuse_removal
from composable.runtime.exact_modules import ExactModule
from composable.runtime.group_builder import home_of
from composable.runtime.handle import HANDLES, Handle, UnitSpec
from composable.runtime.inner_units import InnerUnit, sharded_units_changed
from composable.runtime.joint_removal import after_interrupt, remove_together
from composable.runtime.loading import StateDictHook
from composable.runtime.model_averagers import take_replicated_parameters
from composable.runtime.model_parts import forget_parts
from composable.runtime.optimizer_hooks import Form, drop_note, note
from composable.runtime.originals import Originals
from composable.runtime.parametrizations import refuse_late_parametrizations
from composable.runtime.recurrent import WeightsInPlace
from composable.runtime.root import Root
from composable.runtime.sharded_bracket import ShardedBracket
from composable.runtime.torchs_clipping import look_after_torchs_clipping
from composable.runtime.torchs_scaler import look_after_torchs_scaler


class Removable(Protocol):
    """Something of a unit's on modules."""

    def remove(self) -> None:
        """May be called twice."""


def _holding(units: Sequence[ShardedUnit]) -> list[ShardedUnit]:
    return [unit for unit in units if unit._handle is not None and unit._handle.parameters.groups]


class ShardedUnit:
    """One fully sharded module, or several that were annotated as one."""

    __slots__ = (
        "__weakref__",
        "_handle",
        "_loading",
        "bracket",
        "enclosing",
        "exact",
        "former",
        "guards",
        "in_place",
        "inner",
        "inside",
        "modules",
        "originals",
        "replicated_inside",
        "root",
        "spare_name",
        "spec"
    )  # fmt: skip

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.root: Root | None = None
        self.former: Root | None = None  # the one before, while there is none
        self.enclosing: weakref.ref[ShardedUnit] | None = None
        self.guards: list[Guard] = []
        self.in_place: list[WeightsInPlace] = []
        self.exact: list[ExactModule] = []
        self.spec: UnitSpec | None = None
        self.spare_name = ""
        self.inner = InnerUnit()  # what annotations around it know
        self.inside: list[InnerUnit] = []  # that it is around, or was when they were removed
        self.replicated_inside: list[Place] = []  # places in its tree that replicated units had when it was annotated
        self._handle: Handle | None = None
        self.originals = Originals()
        self._loading: list[RemovableHandle] = []
        self.bracket = ShardedBracket(self)

    def initialize(self, modules: Sequence[nn.Module], spec: UnitSpec) -> None:
        """Shard the parameters that `spec` names."""
        self.modules = tuple(modules)
        self.spec = spec
        held = [info.places[0].registered for info in spec.params]
        self.originals = Originals([parameter for parameter in held if parameter is not None])
        del held
        handle = self.handle
        handle.tags.open()
        self.inner.module, self.inner.told = modules[0], handle.mesh_info.all.size == 1
        self.inner.places = [place for info in spec.params for place in info.places]
        sharded_units_changed()
        self.rename("")
        holders: dict[int, nn.Module] = {}
        for info in spec.params:
            for place in info.places:
                holders.setdefault(id(place.module), place.module)
        mine = [id(module) for module in modules]
        if handle.mesh_info.mesh is not None:
            look_after_torchs_clipping()
            look_after_torchs_scaler()
            take_replicated_parameters()
            refuse_late_parametrizations()
            self.guards = [Guard(module, self.bracket.called_inside) for key, module in holders.items() if key not in mine]
            hook = StateDictHook(self)
            self._loading = [each.register_load_state_dict_pre_hook(hook) for each in holders.values()]
        if handle.parameters.groups:
            self.in_place = [WeightsInPlace(module) for module in holders.values() if isinstance(module, nn.RNNBase)]
        swapped = [*(holders.values() if handle.parameters.groups else ()), *(holder.module for holder in spec.holders)]
        for each in dict.fromkeys(swapped):
            self._loading.append(each.register_state_dict_pre_hook(self.recover))
        handle.calls.guarded_by(self.guards)
        self.exact = [ExactModule(module, self, "handle.parameters.precision") for module in spec.exact]

    @property
    def handle(self) -> Handle:
        if self._handle is None:
            assert self.spec is not None, "the unit is used before fully_shard has finished"
            self._handle = self.spec.build()
            self._handle.rename(self.spare_name)
            self._handle.calls.guarded_by(self.guards)
        return self._handle

    @property
    def home(self) -> torch.device:
        """Where the parameters are at rest, or belong."""
        device, spec = self.handle.mesh_info.device, self.spec
        return device if spec is None or home_of(spec.offload, device) is None else torch.device("cpu")

    @property
    def fqn(self) -> str:
        return self.handle.fqn

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def params(self) -> Sequence[ShardedParam]:
        return self.handle.parameters.params

    def rename(self, fqn: str) -> None:
        """Take a name for messages: the FQN below whatever was annotated last."""
        self.spare_name = fqn
        self.handle.rename(fqn)
        if self.handle.mesh_info.mesh is not None:
            for name, original in self.originals.named(self.params):
                note(original, Form.ORIGINAL, self.name, name)

    def enclosed_by(self, outer: ShardedUnit) -> None:
        self.enclosing = weakref.ref(outer)

    @staticmethod
    def around_removal(units: Sequence[ShardedUnit], undo: Callable[[], object]) -> None:
        """Call `undo`, which ends `units`, when all ranks have whole parameters; or raise, and nothing has changed."""
        units = _holding(units)
        refuse_removal("fully_shard", [(unit.name, unit.handle.gradients.accumulation) for unit in units])
        if units:
            remove_together(units, undo)
        else:
            undo()

    @staticmethod
    def removal_was_interrupted(units: Sequence[ShardedUnit], begun: bool) -> None:
        units = [unit for unit in _holding(units) if unit.handle.mesh_info.all.size > 1]
        if units:
            after_interrupt(units, begun=begun)

    def restore(self) -> None:
        """Undo: whole plain parameters are registered again, the very ones from before where somebody kept them."""
        undone: tuple[Removable, ...] = (*self.guards, *self.in_place, *self.exact, *self._loading)
        for each in undone:
            each.remove()
        self.guards, self.in_place, self.exact, self._loading = [], [], [], []
        sharded_units_changed()
        if self.root is not None and not self.root.running:
            self.root.invalidate()
        handle = self._handle
        if handle is None:
            return
        handle.calls.guarded_by(())
        handle.parameters.term_hooks.remove()
        originals = self.originals.alive()
        if is_rolling_back():
            # A verb failed: the registry puts the original parameters back, and no rank may be waited for.
            handle.calls.use_sharded()
        else:
            self.originals.come_back(handle)
        for param in self.params:
            note(param.sharded, Form.REMOVED, handle.name, param.info.fqn)
        for param, original in zip(self.params, originals, strict=True):
            for parameter in (param.registered, original):
                if isinstance(parameter, nn.Parameter):
                    drop_note(parameter)
        HANDLES.discard(handle)
        forget_parts(handle.mesh_info)
        self._handle = self.spec = None  # last: what an interrupt ends is done again

    @untraced
    def recover(self, *_: object) -> None:
        """Show what should be seen, if an interrupt has ended what was under way. A hook, too, before state dicts are made."""
        if self.root is not None:
            self.root.recover()

    def check_hooks(self) -> None:
        """Raise when somebody removed the hooks of one of this unit's modules, and not the annotation."""
        if self.spec is not None:  # units inside of it may outlive it
            refuse_removed_hooks(self.modules, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """What a copy has, too. The copied modules are not whole yet: it makes its handle at its first use."""
        fqn = self.spare_name if self._handle is None else self._handle.fqn
        hooks = None if self._handle is None else self._handle.gradients.comm_hooks
        if hooks is not None:
            hooks.each[0].refuse_copy("fully_shard", self.name)
        copied = {
            "modules": self.modules,
            "guards": self.guards,
            "spec": self.spec,
            "spare_name": fqn,
            "inner": self.inner,
            "inside": self.inside,
            "replicated_inside": self.replicated_inside,
        }
        return ShardedUnit, (), (None, copied)
