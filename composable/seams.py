"""The names of the engine and the front that extras may use. They may use no others.

An extra adds a capability that the core does not know. Besides this file, it imports the ground
(`comm`, `memory`, `contract`, ...) and the public names of `composable`. An extra may read the
attributes and call the methods that the protocols list; mypy checks its code against them.
`observe_launches` of `composable.comm` notifies an extra of launches and waits, with the `Launch`.

| name                         | does, or is                                                       |
|------------------------------|-------------------------------------------------------------------|
| `Observer`                   | is notified of events of steps                                    |
| `observe`                    | notifies an observer from now on; returns what ends it            |
| `called`                     | tells that a function that all ranks call begins                  |
| `values_exchanged`           | tells that all ranks exchange the values of parameters            |
| `lose_step`                  | tells that all ranks have lost a step of some units               |
| `follow_steps`               | opens a scope that follows steps for ranks without data, and      |
|                              | answers for the engine                                            |
| `open_scope`                 | is the scope that is open                                         |
| `driver_of`                  | makes what takes part in steps of units that others compute       |
| `StepEvent`                  | what one unit does, to be driven elsewhere                        |
| `unscale_gradients`          | unscales gradients as a scaler does that other ranks step         |
| `Unit`                       | what a call of a verb left on its modules                         |
| `Group`                      | parameters of a unit that are gathered together                   |
| `Param`                      | one of them                                                       |
| `Root`, `Call`               | the outermost module of a forward; one call of a unit             |
| `ReducePlan`                 | how gradients lie in the message that reduces them                |
| `units_in`                   | the units in modules; for a caller that needs some, at least one  |
| `unit_of`, `label_of`        | what manages a parameter, and what it is there                    |
| `managed_in`                 | the parameters of all units of a model, with their names there    |
| `checked_on_all_ranks`       | compares arguments with annotations, and with other ranks         |
| `comms_of_model`             | the comms over all ranks that have a part of a model              |
| `at_rest`                    | a context in which modules hold parameters at rest                |
| `require_at_rest`            | lets them hold these from here on; raises in a step               |
| `refuse_moment`              | raises if a unit is not between two steps                         |
| `written`                    | tells units that all ranks have written to parameters at rest     |
| `write_whole`                | writes this rank's part of a whole tensor                         |
| `warn_of_other_groups`       | warns once that other ranks may have other values under a         |
|                              | parameter's name, as experts have                                 |
| `hooks_of`                   | the communication hooks of a unit                                 |
| `refuse_extended`            | raises if parameters are gathered in a form of their own          |
| `stepped_in_backward`        | names the first of some parameters that is stepped in backward    |
| `is_part_of_backward`        | is an optimizer what steps in backward                            |
| `Stepping`                   | hands the code of an optimizer other tensors than users see       |
| `StandIn`                    | what the code has in place of the optimizer                       |
| `LocalStep`                  | a step of element-wise code on shards                             |
| `offloading_from_host`       | a simulated machine offloads tensors of the host, too             |
| `give_memory`                | gives what is on the meta device memory, without values           |

These are collective, so all ranks must call them alike: functions that are `checked_on_all_ranks`,
`written` (if a scope keeps a unit), `unscale_gradients`, `Group.unshard`, and all methods of what
`driver_of` returns, except `reset`, which waits for what was launched. `called`,
`values_exchanged`, `lose_step`, and `units_in` with a caller, notify observers, so all ranks must
call these, too. The others send nothing.

If an observer raises an error, the error ends the forward, backward or call that it was notified
of, and later observers are not notified. Like any error in a step, it must be raised on all ranks.
`raises`, `loses` and `interrupted` are called while a step is given up, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn

from composable.api import comm_hooks, explicit_calls
from composable.comm.base import Comm
from composable.comm.mesh_info import MeshInfo
from composable.config import MixedPrecisionPolicy
from composable.contract.tree import Place
from composable.engine.edits.loading import warn_of_other_groups as warn_of_other_groups
from composable.engine.params import param as params
from composable.engine.params.param import label_of as label_of
from composable.engine.step import driver, observer, unit
from composable.engine.step.driver import StepEvent as StepEvent
from composable.engine.step.observer import OBSERVERS
from composable.engine.step.observer import Observer as Observer
from composable.engine.step.observer import called as called
from composable.engine.step.observer import follow_steps as follow_steps
from composable.engine.step.observer import open_scope as open_scope
from composable.engine.step.observer import values_exchanged as values_exchanged
from composable.features import groups, hook_stages
from composable.features.activations import offloading_from_host as offloading_from_host
from composable.memory.elastic import ElasticBuffer
from composable.optim.in_backward import is_part_of_backward as is_part_of_backward
from composable.optim.in_backward import stepped_in_backward as stepped_in_backward
from composable.optim.scaler import unscale_gradients as unscale_gradients
from composable.optim.shard_steps import LocalStep as LocalStep
from composable.optim.shard_steps import StandIn as StandIn
from composable.optim.shard_steps import Stepping as Stepping
from composable.state import whole
from composable.state.materialize import give_memory as give_memory
from composable.state.whole import checked_on_all_ranks as checked_on_all_ranks
from composable.state.whole import write_whole as write_whole

if TYPE_CHECKING:
    from composable.engine.gradients import reduction
    from composable.engine.gradients.grad_bucket import SyncMode
    from composable.engine.params import param_group
    from composable.engine.step import root

# --- what an extra may know of the engine's objects ----------------------------------------------


class Param(Protocol):
    """A parameter of a unit.

    Attributes:
        fqn: below the unit's module.
        at_rest, compute: what users hold, and what modules compute with.
        registered_at: modules and names there.
        is_whole: no ranks share it but those of its unit (no tensor parallelism).
        own_mesh_info: if it is on a mesh of its own; None for that of its unit.
    """

    @property
    def fqn(self) -> str: ...
    @property
    def at_rest(self) -> nn.Parameter: ...
    @property
    def compute(self) -> nn.Parameter: ...
    @property
    def registered_at(self) -> tuple[Place, ...]: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def own_mesh_info(self) -> MeshInfo | None: ...


class _Slot(Protocol):
    """How one parameter of a group is cut over its ranks, along `cut_dim` if it is."""

    @property
    def is_cut(self) -> bool: ...
    @property
    def cut_dim(self) -> int: ...
    def extent(self, rank: int) -> tuple[int, int]: ...


class _Precision(Protocol):
    """Dtypes of parameters at rest, and of what modules compute with."""

    @property
    def original(self) -> torch.dtype: ...
    @property
    def compute(self) -> torch.dtype: ...


class _Gather(Protocol):
    """What gathered parameters are in."""

    @property
    def buffers(self) -> Sequence[ElasticBuffer]: ...


class Group(Protocol):
    """Parameters of a unit that are gathered together.

    Attributes:
        slots: of the parameters, in their order.
        comm: of the ranks that have shards.
        shard: the memory of this rank's shards; None if there is no one buffer of them.
        gather: None if modules compute with the memory at rest.
        takes_message: to gather it takes a message.
        extended: parameters are gathered in a form of their own (fp8, 4-bit).
    """

    @property
    def params(self) -> Sequence[Param]: ...
    @property
    def slots(self) -> Sequence[_Slot]: ...
    @property
    def precision(self) -> _Precision: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def shard(self) -> Tensor | None: ...
    @property
    def gather(self) -> _Gather | None: ...
    @property
    def takes_message(self) -> bool: ...
    @property
    def extended(self) -> bool: ...
    def unshard(self) -> bool:
        """Launch the all-gather, unless the parameters are there. All ranks do."""

    def wait_for_unshard(self) -> None:
        """Wait for it."""


class _Spec(Protocol):
    """What an annotation asks for."""

    @property
    def mesh_info(self) -> MeshInfo: ...
    @property
    def mp_policy(self) -> MixedPrecisionPolicy: ...
    @property
    def divisor(self) -> float | None: ...
    @property
    def on_host(self) -> bool: ...


class _Gradients(Protocol):
    """What is known of the gradients of a unit.

    Attributes:
        has_unreduced: some were accumulated under `no_sync`, and wait.
        sparse: those of embeddings that are reduced as they are; empty if there are none.
    """

    @property
    def has_unreduced(self) -> bool: ...
    @property
    def sparse(self) -> Sequence[object]: ...


class Unit(Protocol):
    """What one call of a verb has left on its modules.

    Attributes:
        name: below the root, for messages; not unique in a model with several roots.
        modules: as annotated; none after `remove`.
        mesh_info: the ranks over which parameters are sharded, and gradients summed now.
        replicas_info: the same of the replicas, see `Unit.replicas_info` in the engine.
        spec: what the annotation asks for.
        forward_number: of the innermost call that runs; None for a recomputation.
        trains: any of its parameters requires gradients.
    """

    @property
    def name(self) -> str: ...
    @property
    def modules(self) -> tuple[nn.Module, ...]: ...
    @property
    def params(self) -> Sequence[Param]: ...
    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def gradients(self) -> _Gradients: ...
    @property
    def mesh_info(self) -> MeshInfo: ...
    @property
    def replicas_info(self) -> MeshInfo: ...
    @property
    def spec(self) -> _Spec: ...
    @property
    def trains(self) -> bool: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def is_unsharded(self) -> bool: ...
    @property
    def on_one_mesh(self) -> bool: ...
    @property
    def forward_number(self) -> int | None: ...
    @property
    def is_in_backward(self) -> bool: ...
    def buffers_shown(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Casts of buffers that modules hold now, each with the buffer itself."""

    def set_mesh_info(self, mesh_info: MeshInfo) -> None:
        """Reduce gradients over other ranks. Between two steps, on all ranks."""

    def hide(self) -> None:
        """End what `unshard()` began."""

    def free(self) -> None:
        """Reshard, unless something keeps it."""


class Root(Protocol):
    """The outermost annotated module of a forward, and its units.

    Attributes:
        running: units whose forwards run, innermost last.
        ends_inside: a backward around the one that ends goes on, of other roots.
    """

    @property
    def name(self) -> str: ...
    @property
    def modules(self) -> Sequence[nn.Module]: ...
    @property
    def units(self) -> Sequence[Unit]: ...
    @property
    def running(self) -> Sequence[Unit]: ...
    @property
    def ends_inside(self) -> bool: ...


class Call(Protocol):
    """One call of a unit's module.

    Attributes:
        root: of the forward; None for a recomputation.
        number: of the root's forward.
        waits: backward will come to it, and has not yet.
    """

    @property
    def unit(self) -> Unit: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def root(self) -> Root | None: ...
    @property
    def number(self) -> int | None: ...
    @property
    def waits(self) -> bool: ...


class ReducePlan(Protocol):
    """How gradients of a bucket lie in its message: what a `Launch` of a reduction is sent by."""

    @property
    def at_rest(self) -> Sequence[Tensor]: ...
    def gradients_in(self, sent: Sequence[Tensor]) -> Mapping[int, Tensor]:
        """The gradients in what a launch sends, by the index of the parameter."""


class _NamedParam(Protocol):
    """A parameter of a unit, by its name in the model."""

    @property
    def fqn(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def param(self) -> Param: ...


class _Driver(Protocol):
    """Takes part in steps of units that other ranks compute, see `engine/step/driver.py`."""

    @property
    def modes(self) -> Sequence[SyncMode]: ...
    def visit(self, index: int, event: StepEvent, detail: int) -> None: ...
    def backward(self, modes: Sequence[SyncMode], follow: Callable[[], None]) -> None: ...
    def reduce(self, parameters: Sequence[Tensor]) -> None: ...
    def reset(self) -> None: ...
    def scale_gradients(
        self, scaled: Callable[[Tensor], Tensor]
    ) -> Sequence[Callable[[], object]]: ...
    def take_buffers(self, source: int) -> None: ...
    def pass_through(self, module: nn.Module, x: Any) -> Any: ...


# --- functions, over these -----------------------------------------------------------------------

# The checks at the end of this file show that the engine's classes match the protocols.

# `observe(observer)`: it is notified of steps from now on; returns what ends it.
observe: Final[Callable[[Observer], Callable[[], None]]] = OBSERVERS.add
# The unit that manages a parameter, at rest or while modules compute; None if none does.
unit_of: Final[Callable[[Tensor], Unit | None]] = unit.unit_of
# The parameters of all units, with their names in the model, each once.
managed_in: Final[Callable[[str, nn.Module], Iterator[_NamedParam]]] = whole.managed_in


def _of_engine(units: Iterable[Unit]) -> list[unit.Unit]:
    """The same: only the engine makes objects that are a `Unit`."""
    found: list[Any] = [*units]
    return found


def driver_of(units: Sequence[Unit]) -> _Driver:
    """What takes part in steps of these units, in an order that all ranks know."""
    return driver.Driver(_of_engine(units))


def lose_step(units: Sequence[Unit]) -> None:
    """Tell that all ranks have lost a step of these units."""
    observer.notify(Observer.loses, _of_engine(units))


def comms_of_model(units: Sequence[Unit]) -> list[Comm]:
    """The comms over all ranks that have a part of the model."""
    return whole.comms_of_model(_of_engine(units))


def at_rest(units: Sequence[Unit]) -> AbstractContextManager[None]:
    """Modules hold parameters at rest in the context, outside of forwards and backwards."""
    return unit.at_rest(_of_engine(units))


def require_at_rest(caller: str, units: Sequence[Unit]) -> None:
    """The same from here on; raises in a forward or backward."""
    whole.require_at_rest(caller, _of_engine(units))


def refuse_moment(what: str, of: Unit) -> None:
    """Raise if a unit is not between two steps."""
    comm_hooks.refuse_moment(what, *_of_engine([of]))


def written(units: Iterable[Unit]) -> None:
    """Tell units that all ranks have written to their parameters at rest without operators, so that
    no version has counted the write. Gathers units that a scope keeps: all ranks call it, with the
    same units.
    """
    unit.written(_of_engine(units))


def refuse_extended(what: str, of: Unit) -> None:
    """Raise if parameters are gathered in a form of their own, and have no shard buffer."""
    groups.refuse_extended(what, *_of_engine([of]))


def units_in(*modules: nn.Module, caller: str = "") -> list[Unit]:
    """The units of modules and below, in `.modules()` order.

    Args:
        caller: the name of a function that all ranks call with one module. Then observers are
            notified that it is called, and it raises if there are no units, or if one rests on the
            host.
    """
    return [*(explicit_calls.units_in(caller, *modules) if caller else unit.units_below(modules))]


def hooks_of(of: Unit) -> Mapping[str, hook_stages.CommHook]:
    """The communication hooks of a unit, by the collective that they replace."""
    (own,) = _of_engine([of])
    return hook_stages.hooks_of(own.gradients)


if TYPE_CHECKING:

    def _is_param(param: params.ManagedParam) -> Param:
        return param

    def _is_group(group: param_group.ParamGroup) -> Group:
        return group

    def _is_unit(each: unit.Unit) -> Unit:
        return each

    def _is_root(each: root.Root) -> Root:
        return each

    def _is_call(call: unit.UnitCall) -> Call:
        return call

    def _is_plan(plan: reduction.ReducePlan) -> ReducePlan:
        return plan

    def _is_managed(each: whole.NamedParam) -> _NamedParam:
        return each
