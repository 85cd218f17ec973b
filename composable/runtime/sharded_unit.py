"""What `fully_shard` leaves in the registry: a unit, and the bracket around its modules' forward. Decides no order."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.compilation import untraced
from composable.device.memory import HOST_MEMORY
from composable.device.parameter_swap import Owner, ShardedParam
from composable.device.private import in_backward, next_node
from composable.errors import ShardedParameterError
from composable.model.hooks import Guard
from composable.model.removed_hooks import refuse_removed_hooks
from composable.model.transaction import is_rolling_back
from composable.model.traversal import get_replicated_states, get_states, names_below
from composable.runtime.accumulation import refuse_removal
from composable.runtime.divergence import say_farewell
from composable.runtime.handle import Handle, Recipe
from composable.runtime.inputs import EdgeCasts, edge_casts, on_device
from composable.runtime.loading import StateDictHook
from composable.runtime.membership import Membership
from composable.runtime.mesh_info import refuse_other_replicas
from composable.runtime.misuse import method_on_stack
from composable.runtime.optimizers import Form, forget, note
from composable.runtime.originals import Originals
from composable.runtime.recast import refuse_recast
from composable.runtime.recurrent import WeightsInPlace
from composable.runtime.removal import after_interrupt, remove_together
from composable.runtime.root import Root


def _holding(units: Sequence[ShardedUnit]) -> list[ShardedUnit]:
    return [unit for unit in units if unit._handle is not None and unit._handle.parameters.groups]


class _Call:
    """One call of a unit's module: how it was entered, and the number of autograd's next node at that time."""

    __slots__ = ("how", "since")

    def __init__(self) -> None:
        self.how = "entering"
        self.since = next_node()


class ShardedUnit:
    """One fully sharded module, or several that were annotated as one. It is the state and the bracket in one object."""

    __slots__ = (
        "__weakref__", "_calls", "_edges", "_handle", "_left_to_run", "_loading", "enclosing", "former",
        "guards", "in_place", "left_alone", "modules", "originals", "recipe", "root", "spare_name"
    )  # fmt: skip

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.root: Root | None = None
        self.former: Root | None = None  # the one before, while there is none
        self.enclosing: weakref.ref[ShardedUnit] | None = None
        self.guards: list[Guard] = []
        self.in_place: list[WeightsInPlace] = []
        self.recipe: Recipe | None = None
        self.spare_name = ""
        self.left_alone: list[Owner] = []  # places in its tree that are no unit's, and should not be
        self._handle: Handle | None = None
        self._edges: EdgeCasts | None = None
        self.originals = Originals()
        self._loading: list[RemovableHandle] = []
        self._left_to_run: list[nn.Module] = []
        self._calls: list[_Call] = []  # that are running

    def initialize(self, modules: Sequence[nn.Module], recipe: Recipe) -> None:
        """Shard the parameters that `recipe` names."""
        self.modules = tuple(modules)
        self.recipe = recipe
        held = [info.owners[0].registered for info in recipe.params]
        self.originals = Originals([parameter for parameter in held if parameter is not None])
        del held
        handle = self.handle
        handle.tags.open()
        self.rename("")
        owners: dict[int, nn.Module] = {}
        for info in recipe.params:
            for owner in info.owners:
                owners.setdefault(id(owner.module), owner.module)
        mine = [id(module) for module in modules]
        if handle.mesh_info.mesh is not None:
            self.guards = [Guard(module, self._guard) for key, module in owners.items() if key not in mine]
            hook = StateDictHook(self)
            self._loading = [owner.register_load_state_dict_pre_hook(hook) for owner in owners.values()]
        if handle.parameters.groups:
            self.in_place = [WeightsInPlace(module) for module in owners.values() if isinstance(module, nn.RNNBase)]
        swapped = [*(owners.values() if handle.parameters.groups else ()), *recipe.holders]
        for each in dict.fromkeys(swapped):
            self._loading.append(each.register_state_dict_pre_hook(self._before_state_dict))
        handle.calls.guarded_by(self.guards)

    @property
    def handle(self) -> Handle:
        if self._handle is None:
            assert self.recipe is not None, "the unit is used before fully_shard has finished"
            self._handle = self.recipe.build(HOST_MEMORY)
            self._edges = edge_casts(self.recipe.mp_policy)
            self._handle.rename(self.spare_name)
            self._handle.calls.guarded_by(self.guards)
        return self._handle

    @property
    def home(self) -> torch.device:
        """Where the parameters are, or belong."""
        return self.handle.mesh_info.device

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
        undone: tuple[Guard | WeightsInPlace | RemovableHandle, ...] = (*self.guards, *self.in_place, *self._loading)
        for each in undone:
            each.remove()
        self.guards, self.in_place, self._loading = [], [], []
        if self.root is not None and not self.root.running:
            self.root.invalidate()
        handle = self._handle
        if handle is None:
            return
        if self.enclosing is not None and (outer := self.enclosing()) is not None:
            outer.left_alone += [owner for param in self.params for owner in param.info.owners] + self.left_alone
        handle.calls.guarded_by(())
        originals = self.originals.alive()
        if is_rolling_back():
            handle.calls.hide()  # a verb failed: the registry puts the original parameters back, and no rank may be waited for
        else:
            self.originals.come_back(handle)
        for param in self.params:
            note(param.sharded, Form.REMOVED, handle.name, param.info.fqn)
        for param, original in zip(self.params, originals, strict=True):
            for parameter in (param.registered, original):
                if isinstance(parameter, nn.Parameter):
                    forget(parameter)
        self._handle = self.recipe = None  # last: what an interrupt ends is done again

    # --- the bracket ------------------------------------------------------------------------------------------------

    @property
    @untraced
    def outermost(self) -> bool:
        root = self.root
        return root is not None and len(root.running) == 1

    @untraced
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = _Call()
        self._calls.append(call)
        handle = self.handle
        if in_backward():
            # A recomputation: it neither records order nor reshards, since backward needs the parameters next.
            call.how = "entering again"
            handle.unshard_in_step()
            handle.wait_for_unshard()
            handle.calls.begin()
            call.how = "recompute"
            return (args, kwargs) if self._edges is None else self._edges.inputs(args, kwargs)
        root = self._root_for_call(module)
        call.how = "opening"  # from here on the root knows
        root.forward.open(handle, module)
        call.how = "forward"
        if not self._left_to_run:
            self._left_to_run = list(self.modules)
        root.forward.enter(handle)
        handle.calls.begin()
        mesh = handle.mesh_info.mesh
        if mesh is not None and mesh.device_type != "cpu" and len(root.running) == 1:
            args, kwargs = on_device(args, kwargs, handle.parameters.device)
        return (args, kwargs) if self._edges is None else self._edges.inputs(args, kwargs)

    def leave(self, module: nn.Module, output: Any) -> Any:
        call = self._calls.pop()
        handle = self.handle
        handle.calls.end()
        root = self.root
        assert root is not None
        if self._edges is not None:
            output = self._edges.output(output)
        if call.how == "recompute":
            refuse_recast(handle.parameters)
            if torch.is_grad_enabled():
                handle.outputs.watch(output, call.since, count=False)
            return output
        if module in self._left_to_run:
            self._left_to_run.remove(module)
        try:
            refuse_recast(handle.parameters)
            complete = not self._left_to_run and handle.calls.depth == 0
            output = root.forward.leave(handle, output, call.since, complete=complete)
        except BaseException:
            self._left_to_run = []
            root.on_error(handle)
            raise
        return output

    def on_error(self, module: nn.Module) -> None:
        call = self._calls.pop()
        if call.how == "recompute":
            self.handle.calls.end()  # checkpointing stops a recomputation by raising as soon as it has what it needs
        elif call.how == "forward":
            self.handle.calls.end()
            self._left_to_run = []
            assert self.root is not None
            self.root.on_error(self.handle)

    # --- the root ---------------------------------------------------------------------------------------------------

    def _root_for_call(self, module: nn.Module) -> Root:
        root = self.root
        at_rest = root is None or not root.running
        if root is not None and at_rest and root.membership.changed():
            former, root = root, self._become_root(module)  # which may refuse what came
            former.invalidate()
        if root is None:
            root = self._become_root(module)
        forward = root.forward
        if (
            forward.call is not None
            and (forward.call is module or sys.exception() is not forward.handled)
            and forward.is_left(module)
        ):
            root.recover_from_interrupt()
            at_rest = True
        if at_rest:
            root.check_hooks()
            if self.enclosing is not None and (outer := self.enclosing()) is not None:
                outer.check_hooks()
        return root

    def _become_root(self, module: nn.Module) -> Root:
        """Plan this module and everything below it as one tree. A later forward of a module above plans anew."""
        units: list[ShardedUnit] = get_states(module)
        if self not in units:  # annotated in a list, and called through a member that does not hold the others
            units = [self]
        names = names_below(module)
        for unit in units:
            unit.handle.rename(names.get(id(unit.modules[0]), unit.handle.fqn))
        membership = Membership(module, [unit for unit in units if unit.handle.mesh_info.mesh is not None])
        membership.check()
        refuse_other_replicas((unit.name, unit.handle.mesh_info) for unit in units)
        for former in dict.fromkeys([unit.root or unit.former for unit in units]):
            if former is not None and former.backward.iteration is not None and former.backward.iteration.lost_backward:
                former.abort("its backward did not finish")
        around = dict.fromkeys([module, *(each for unit in units for each in unit.modules)])
        replicated = {id(state): state for each in around for state in get_replicated_states(each)}
        root = Root(module, units, membership, list(replicated.values()))
        for unit in reversed(units):  # this one last: until it has the root, a forward plans anew
            unit.root, unit.former = root, None
        return root

    @untraced
    def on_interrupt(self) -> None:
        root = self.root
        if root is not None:
            unnoted = root.forward.call is None and any(call.how == "entering" for call in self._calls)
            self.settle()
            root.steps.behind = True
            if unnoted:
                root.steps.open()  # the others have
                say_farewell(root.handles, "its forward was interrupted")
        while self._calls:  # of a forward that goes on: somebody inside it caught the interrupt
            self.on_error(self.modules[0])

    def settle(self) -> None:
        """Show what should be seen, if an interrupt has ended what was under way."""
        if self.root is not None:
            self.root.settle()

    @untraced
    def _before_state_dict(self, *_: Any) -> None:
        self.settle()

    def forget_calls(self) -> None:
        """No call of this unit's modules is under way any more."""
        self._calls = [call for call in self._calls[-1:] if call.how == "entering"]
        self._left_to_run = []

    def check_hooks(self) -> None:
        """Raise when somebody removed the hooks of one of this unit's modules."""
        refuse_removed_hooks(self.modules, self.name)

    # --- misuse -----------------------------------------------------------------------------------------------------

    def _guard(self, module: nn.Module) -> None:
        """A module with parameters of this unit computes while no module of the unit itself is called."""
        if self.handle.calls.depth:
            return  # it is recomputed by itself, within the unit's backward
        self.check_hooks()
        if in_backward() and self.root is not None:
            # Part of this unit is recomputed, and its outputs were not on the way here.
            self.handle.outputs.on_backward(False)
            return
        infos = [param.info for param in self.params]
        name = next((info.fqn for info in infos if any(owner.module is module for owner in info.owners)), "")
        method = method_on_stack(self.modules)
        here = type(self.modules[0]).__name__
        if method == "forward":
            advice = "call model(x), not model.forward(x), or register_forward_method(model, 'forward')"
        elif method:
            advice = f"{here}.{method} is not a forward: call register_forward_method(module, '{method}') first"
        else:
            advice = f"call the annotated module ({here}) itself, or annotate '{name.rpartition('.')[0]}' as a unit"
        raise ShardedParameterError(
            f"parameter '{name}' of unit '{self.name}' is sharded and was used outside a forward call; {advice}"
        )

    # --- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedUnit:
        twin = ShardedUnit()
        memo[id(self)] = twin
        # The copied modules are not whole yet: the twin makes its handle at its first use.
        for name in ("modules", "guards", "recipe", "spare_name", "left_alone"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {
            "modules": self.modules,
            "guards": self.guards,
            "recipe": self.recipe,
            "spare_name": self.fqn,
            "left_alone": self.left_alone,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, value in state.items():
            setattr(self, name, value)
