"""One managed parameter: where it is registered, what users see at rest, and what modules compute
with.

Autograd always accumulates on the compute form; gradients land on the at-rest form. Both are one
object where nothing is sharded or cast, and gradients are reduced in their own dtype:

| case                            | at rest                  | compute                             |
|---------------------------------|--------------------------|-------------------------------------|
| `fully_shard`                   | `DTensor` over the       | `nn.Parameter` over the full buffer |
|                                 | shard buffer             |                                     |
| `replicate` in a tree of shards | `DTensor(Replicate)`     | the user's own parameter            |
|                                 | over the user's memory   |                                     |
| `replicate` alone, or one rank  | the user's own parameter | the same object                     |
| the last two with a cast        | as above                 | `nn.Parameter` over the full buffer |
| ... with another reduce dtype   | as above                 | `nn.Parameter` over the same memory |

`ParamForm` says what a parameter is: a plain tensor, or one that its user has distributed over
ranks (`features/param_forms.py`). The annotation picks the form, and nothing else asks for it. A
unit shards, gathers and reduces one *local* tensor of each parameter. For a plain parameter this
is the whole parameter; for a distributed one it is this rank's part. The form converts between the
local tensor and what users and modules see. How a parameter is stored at rest is decided by its
group (`param_group.py`), and how it is sent by its gather.

This file also has the hooks of the engine and of users that run when autograd has accumulated a
gradient, and when gradients land.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any, ClassVar, Final, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm.base import Comm
from composable.comm.mesh_info import MeshInfo
from composable.contract.tree import Place
from composable.engine.params.layout import Route, Slot
from composable.tensors import (
    as_class_of,
    cut_along,
    gradient_like,
    is_unreduced,
    whole_of,
    wrap,
    wrap_like,
)
from composable.torch_private import (
    SHARDS,
    can_take_data,
    cut_by,
    gradient_hooks,
    hooks_after_accumulation,
    local_of,
    local_tensor,
    parameter_around,
    set_local,
    storage_key,
)


class ParamForm:
    """A plain parameter. Other forms override what differs."""

    __slots__ = ()

    # whether the modules of one rank compute with all of it, in a plain tensor
    is_whole: ClassVar[bool] = True
    # the class of what modules compute with
    kind: type[nn.Parameter] = nn.Parameter

    @property
    def kept(self) -> Sequence[Placement]:
        """Its placements over the user's dimensions of the mesh that it rests on, which are before
        those of the unit.
        """
        return ()

    @property
    def ndim(self) -> int:
        """The number of the user's dimensions of the mesh that it rests on."""
        return len(self.kept)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is distributed as its user made it, not as it rests where it is cut."""
        return not isinstance(tensor, DTensor)

    def local_like(self, registered: Tensor) -> Tensor:
        """A tensor with the shape and strides of the local one, which is not sharded."""
        return registered

    # --- at rest ---------------------------------------------------------------------------------

    def mesh_at_rest(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """The mesh that it rests on in a unit over `mesh`: all ranks that have a part or a copy."""
        return mesh

    def size_of(
        self, shape: torch.Size, strides: tuple[int, ...]
    ) -> tuple[torch.Size, tuple[int, ...]]:
        """Shape and strides of the whole, of which those of the local tensor are given."""
        return shape, strides

    def comms(self, device: torch.device) -> list[Comm]:
        """The comms along the user's dimensions."""
        return []

    def refusal(self, name: str, replacement: nn.Parameter) -> str:
        """Why the parameter with this name cannot be replaced by `replacement`; empty if it can."""
        return ""

    def shard_like(self, value: Tensor, parameter: DTensor, device: torch.device) -> DTensor:
        """`value` with the placements of `parameter`: of a plain tensor, the local one, this rank's
        shard on `device`.

        A DTensor with other placements is redistributed, so all ranks must call this.
        """
        placements = parameter.placements
        if isinstance(value, DTensor):
            same = value.placements == placements
            return value if same else value.redistribute(placements=placements)
        mesh, local = parameter.device_mesh, value.detach()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        # the user's dimensions are first, along which `value` is cut already
        first = mesh.ndim if self.owns(parameter) else self.ndim
        for axis, placement in enumerate(placements):
            if isinstance(placement, SHARDS) and axis >= first:
                cut = partial(cut_along, ranks=mesh.size(axis), rank=coordinate[axis])
                local = cut_by(placement, cut, local)
        if not local.is_meta:
            local = local.to(device)
        return wrap_like(local, parameter)

    # --- compute ---------------------------------------------------------------------------------

    def compute_parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        """What modules compute with, around the local tensor, whose memory may come later."""
        return nn.Parameter.__new__(self.kind, local, requires_grad)

    def finish_copy(self, made: nn.Parameter, memo: dict[Any, Any]) -> None:
        """A copy at rest was made (`copy.deepcopy`), with the attributes of the original."""

    def shown(self, local: Tensor) -> Tensor:
        """The local tensor, or its gradient, as modules see it that compute."""
        return local

    # --- whole -----------------------------------------------------------------------------------

    def unsharded(self, tensor: Tensor) -> Tensor:
        """Gather a copy of the local tensor of what rests; all ranks of the unit's mesh call it."""
        return whole_of(tensor)

    def laid_out(self, value: Tensor, at_rest: nn.Parameter) -> Tensor:
        """A copy of a local tensor with the strides of the parameter; what was gathered is
        contiguous.
        """
        if type(value) is not Tensor:  # its class lays it out
            return value
        laid_out = torch.empty_strided(
            value.shape, at_rest.stride(), dtype=value.dtype, device=value.device
        )
        return laid_out.copy_(value)

    def refill(self, original: nn.Parameter, value: Tensor, at_rest: nn.Parameter) -> bool:
        """Write a local tensor into the parameter that was there before the annotation, unless it
        does not fit.
        """
        # torch gives no memory to what was made on meta, and none of some devices to what was made
        # on a host
        if (
            (original.shape, original.dtype, original.is_meta)
            != (value.shape, value.dtype, value.is_meta)
        ) or not can_take_data(original, value):
            return False
        if original.device == value.device:
            original.data.copy_(value)
        else:
            original.data = self.laid_out(value, at_rest)
        return True

    # --- gradients -------------------------------------------------------------------------------

    def local_gradient(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The local tensor of what autograd left, with the parameter's placements.

        Args:
            dtype: of a reduction over the user's dimensions, if that takes one.
        """
        return gradient

    def settled(self, gradient: Tensor) -> Tensor:
        """A gradient of this rank as autograd may add it to a reduced one, of which it does not
        know that it is a mean: with the parameter's placements, this rank's term inside.
        """
        return gradient

    def unreduced(self, local: Tensor, at_rest: Tensor) -> Tensor:
        """This rank's gradient, not yet reduced: the mean over all ranks is the gradient."""
        if not isinstance(at_rest, DTensor):
            return local
        mesh, size = at_rest.device_mesh, self.size_of(local.shape, local.stride())
        placements = [*self.kept, *[Partial("avg")] * (mesh.ndim - len(self.kept))]
        # torch refuses a gradient on another device than its parameter; where parameters rest on
        # the host, this one is on its way there.
        return wrap(local, mesh, placements, *size, at_rest.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamForm:
        return self  # it may hold process groups, and nothing of it changes


PLAIN: Final = ParamForm()


T = TypeVar("T")

# --- the engine's hooks on what autograd accumulates on -----------------------------------------

# The table of a parameter's post-accumulate hooks, and a key and a hook in it.
Arrival = tuple[OrderedDict[int, Any], int, Callable[[Tensor], None]]


def ignore_arrivals(arrivals: Iterable[Arrival]) -> None:
    """Let autograd not call these hooks: an empty table costs a tenth of a call of Python."""
    for table, key, _ in arrivals:
        if type(table) is OrderedDict:  # nearly always; plain operations take half the time
            table.pop(key, None)
            continue
        try:  # noqa: SIM105, `suppress` takes calls of Python
            OrderedDict.__delitem__(table, key)  # past the methods of `DeferredHooks`
        except KeyError:
            pass  # it is ignored already


def listen_to_arrivals(arrivals: Iterable[Arrival]) -> None:
    """The inverse of `ignore_arrivals`. May be called twice."""
    for table, key, hook in arrivals:
        if type(table) is OrderedDict:
            table[key] = hook
        else:  # past the methods of `DeferredHooks`
            OrderedDict.__setitem__(table, key, hook)


def hook_gradients(
    parameters: Iterable[nn.Parameter], hook: Callable[[Tensor], Tensor]
) -> list[Callable[[], object]]:
    """Let `hook` change gradients before autograd accumulates them; returns what undoes it."""
    undo: list[Callable[[], object]] = []
    for parameter in parameters:
        trains = parameter.requires_grad
        if parameter.is_floating_point() or parameter.is_complex():
            # a frozen one takes no hook, and may be unfrozen later
            parameter.requires_grad_(True)
            # Set anew: `model.to()` gives a DTensor another tensor of C++, which knows no hooks.
            parameter._backward_hooks = gradient_hooks(parameter)
            undo.append(parameter.register_hook(hook).remove)
            parameter.requires_grad_(trains)
    return undo


def hook_accumulation(
    parameter: nn.Parameter, arrived: Callable[[Tensor], None]
) -> tuple[Arrival, Callable[[], None]]:
    """Call `arrived` when autograd has accumulated on a parameter that users do not see; also
    returns the inverse.
    """
    parameter.requires_grad_(True)  # a frozen one takes no hook; `follow` freezes it again
    handle = parameter.register_post_accumulate_grad_hook(arrived)
    table = hooks_after_accumulation(parameter)
    assert table is not None
    return (table, handle.id, arrived), handle.remove


# --- hooks of users on at-rest parameters -------------------------------------------------------


def _of_users(table: T) -> T | OrderedDict[int, Any]:
    """The hooks of users in such a table."""
    return table.of_users if isinstance(table, DeferredHooks) else table


def share_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """`target` has the hooks of `source`, too. What removes a hook knows its table, so both have
    the same tables.
    """
    if tensor_hooks := gradient_hooks(source):
        target._backward_hooks = tensor_hooks
    if after := _of_users(hooks_after_accumulation(source)):
        target._post_accumulate_grad_hooks = after


def move_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """The same, and `source` has none any more."""
    share_hooks(source, target)
    source._backward_hooks = None
    source._post_accumulate_grad_hooks = OrderedDict()  # None would leave the hooks in C++


def run_gradient_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the parameter's tensor hooks make of a gradient that lands, as autograd would ask
    them.
    """
    with torch.no_grad():
        for hook in list((gradient_hooks(parameter) or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


def post_accumulate_hooks(parameter: nn.Parameter) -> OrderedDict[int, Any]:
    """The table of such hooks that users have put on an at-rest parameter: the one to which they
    will add more.
    """
    hooks = hooks_after_accumulation(parameter)
    if hooks is None:
        hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    return _of_users(hooks)


def run_post_accumulate_hooks(parameter: nn.Parameter) -> None:
    """Call the post-accumulate hooks of an at-rest parameter, when its reduced gradient is
    there.
    """
    with torch.no_grad():
        for hook in list(post_accumulate_hooks(parameter).values()):
            hook(parameter)


_OF_ENGINE: Final = -1  # the key of the engine's hook; those of users count from 0


class DeferredHooks(OrderedDict[int, Any]):
    """The post-accumulate hooks of a replicated parameter on which autograd itself accumulates.

    Autograd calls every hook in the table as soon as the local gradient is there. Users mean the
    reduced one. torch's C++ code reads the dict itself, and users add and remove hooks by the
    methods: so the dict holds the engine's hook only, and the methods keep the users' in
    `of_users`, from where they are called when the reduction has landed.
    """

    def __init__(self, users: OrderedDict[int, Any] | None) -> None:
        super().__init__()
        self.of_users: OrderedDict[int, Any] = OrderedDict() if users is None else users
        # The handle that removes a hook refers weakly to the dict that it was added to: this one,
        # which must outlive its use.
        self.of_users.deferred = self  # type: ignore[attr-defined]

    @property
    def of_engine(self) -> Any:
        """The hook that autograd calls; None after `undo`."""
        return super().get(_OF_ENGINE)

    @of_engine.setter
    def of_engine(self, hook: Any) -> None:
        super().__setitem__(_OF_ENGINE, hook)

    @override
    def __setitem__(self, key: int, hook: Any) -> None:
        self.of_users[key] = hook

    @override
    def __delitem__(self, key: int) -> None:
        del self.of_users[key]

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.of_users


def defer_hooks(
    parameter: nn.Parameter, arrived: Callable[[Tensor], None]
) -> tuple[Arrival, Callable[[], None]]:
    """Call `arrived` when autograd has accumulated, and the hooks of users when they are run; also
    returns the inverse.
    """
    users = _of_users(hooks_after_accumulation(parameter))
    deferred = getattr(users, "deferred", None)
    if deferred is None:  # not `or`: an empty table is false, and handles of users refer to it
        deferred = DeferredHooks(users)
    deferred.of_engine = arrived
    parameter._post_accumulate_grad_hooks = deferred

    def undo() -> None:
        ignore_arrivals([(deferred, _OF_ENGINE, arrived)])
        if hooks_after_accumulation(parameter) is deferred:
            parameter._post_accumulate_grad_hooks = deferred.of_users  # type: ignore[union-attr]

    return (deferred, _OF_ENGINE, arrived), undo


gradient_of: Final = attrgetter("grad")  # in C: it is asked of every parameter in every step
trainability: Final = attrgetter("requires_grad")

# Of each tensor that a rank sends of a parameter in a form of its own: its shape and dtype.
Sends = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What an annotation asks of one parameter.

    Attributes:
        fqn: below the annotated module.
        places: every place where it is registered (several for tied weights).
        shard_dim: the dimension to shard; None for a parameter that is not sharded.
        exact: it keeps its dtype, whatever the mixed precision policy says.
        keeps: it computes in its dtype (`param_dtype_override_fn`).
        form: what it is.
        mesh_info: of a parameter on a mesh of its own (`shard_placement_fn`); None for that of its
            unit.
    """

    fqn: str
    places: tuple[Place, ...]
    shard_dim: int | None = None
    exact: bool = False
    keeps: bool = False
    form: ParamForm = PLAIN
    mesh_info: MeshInfo | None = None


# --- labels: what a parameter is to its unit, for optimizers, clipping, scalers and messages ----

_LABEL: Final = "_composable_label"
# The attribute by which a parameter keeps what steps it in backward (`optim/in_backward.py`); no
# copy has it.
STEPPED_BY: Final = "_composable_stepped_by"


@dataclass(slots=True, eq=False)
class ParamLabel:
    """What a parameter is to its unit.

    Attributes:
        unit, fqn: the names of both.
        form: "at_rest", "compute", "original" (replaced by the annotation, or when it was adopted),
            "replaced" (by the user, afterwards) or "removed" (replaced by `remove`).
        owner: of an at-rest or original parameter, the unit.
        places: modules, weakly, and names at which the unit's parameter is registered.
        holds_unreduced: its gradient, a plain tensor, was accumulated under `no_sync`.
        mesh_info: as of `ParamInfo`.
        mesh: that it rests on, if it is not the unit's.
    """

    unit: str = ""
    fqn: str = ""
    form: str = ""
    owner: ref[Any] | None = None
    places: tuple[tuple[ref[nn.Module], str], ...] = ()
    holds_unreduced: bool = False
    mesh_info: MeshInfo | None = None
    mesh: DeviceMesh | None = None

    @override
    def __str__(self) -> str:
        return f"parameter '{self.fqn}' of unit '{self.unit}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy, and what a file holds, belongs to no unit


def label_of(parameter: Tensor) -> ParamLabel | None:
    """What `parameter` is to the unit that manages it; None if no unit does."""
    return getattr(parameter, _LABEL, None)


def labels_of(parameters: Sequence[Tensor]) -> list[ParamLabel | None]:
    """`label_of` each; a loop in C."""
    return list(map(getattr, parameters, repeat(_LABEL), repeat(None)))


def set_label(
    parameter: nn.Parameter, param: ManagedParam, unit_name: str, form: str, owner: object = None
) -> None:
    label, info = label_of(parameter), param.info
    if label is None:
        label = ParamLabel()
        setattr(parameter, _LABEL, label)
    label.unit, label.fqn, label.form = unit_name, info.fqn, form
    label.mesh_info = info.mesh_info
    label.mesh = info.form.mesh_at_rest(None)
    label.places = param.places
    if owner is not None:
        label.owner = ref(owner)


def drop_label(parameter: nn.Parameter) -> None:
    vars(parameter).pop(_LABEL, None)


def copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target` the Python attributes that users have set on `source`."""
    # What the constructor of a tensor subclass sets is on each of its tensors.
    own = vars(source.detach()) if type(source) not in (nn.Parameter, DTensor) else {}
    vars(target).update(
        {
            name: value
            for name, value in vars(source).items()
            if name not in (_LABEL, "_is_param") and name not in own
        }
    )


def owner_of(parameter: Tensor) -> Any:
    """The unit that manages `parameter`; `unit_of` knows it as one."""
    label = label_of(parameter)
    return (
        None if label is None or label.owner is None or label.form == "original" else label.owner()
    )


def unit_mesh_of(parameter: Tensor) -> tuple[DeviceMesh | None, object]:
    """The mesh over which the parameter's gradient is reduced, and the number of the outermost
    annotation around.

    The mesh is None for one rank; both are None for a parameter that no unit manages.
    """
    owner, label = owner_of(parameter), label_of(parameter)
    if owner is None or label is None:
        return None, None
    return (label.mesh_info or owner.mesh_info).mesh, next(reversed(owner.relations.around), owner)


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The mesh of all ranks that have a part or a copy of a parameter: the one over which its
    gradient is reduced, and the user's dimensions.
    """
    label = label_of(parameter)
    return (label and label.mesh) or unit_mesh_of(parameter)[0]


def model_group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The group of all ranks that train the model of which `parameter` is a part (an expert on a
    mesh of its own).

    None if the parameter's own mesh has all of them.
    """
    owner, label = owner_of(parameter), label_of(parameter)
    if owner is None or label is None:
        return None
    own = label.mesh_info
    info: MeshInfo = owner.mesh_info
    group: ref[dist.ProcessGroup] | None = owner.relations.model_group
    if group is None and own is not None and own.all.size < info.all.size:
        return info.all.group
    return None if group is None else group()


def set_holds_unreduced(parameter: Tensor, *, holds: bool) -> None:
    if (label := label_of(parameter)) is not None:
        label.holds_unreduced = holds


def holds_unreduced(parameter: Tensor) -> bool:
    """Whether the gradient of an at-rest parameter was accumulated under `no_sync` and is not the
    mean over all ranks yet: a `DTensor` says so by `Partial`, a plain tensor by a mark.
    """
    label = label_of(parameter)
    marked = label is not None and label.holds_unreduced and parameter.grad is not None
    return marked or is_unreduced(parameter.grad)


# --- the managed parameter ----------------------------------------------------------------------


def _no_parameter() -> None:
    """`ManagedParam.original` of a copy."""


class ManagedParam:
    """One parameter of a unit.

    Attributes:
        info: what the annotation asked for; `places` may grow by tied places of other units.
        tables: where it is looked up and registered, at each place.
        places: module, weakly, and name of each.
        own: the user's parameter, for units that leave its memory where it is; None where the unit
            has shards.
        original: weakly, the parameter that was registered before the annotation, or that the user
            assigned later.
        at_rest, compute: see the table at the top of this file.
        grad_dtype: what the user has set `grad_dtype` of the parameter to; None if it is its dtype.
        sends: of a parameter that is gathered in a form of its own, what the largest rank sends,
            as all ranks have exchanged (`features/groups.py`).
    """

    def __init__(self, info: ParamInfo) -> None:
        """Manage what is registered now."""
        self.set_info(info)
        registered = self.current
        self.original: Callable[[], nn.Parameter | None] = ref(registered)
        self.own: nn.Parameter | None = None
        self.at_rest: nn.Parameter = registered
        self.compute: nn.Parameter = registered
        self.grad_dtype = chosen_grad_dtype(registered)
        self.sends: Sends | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ManagedParam:
        return ManagedParam.__new__(ManagedParam)  # the copy of its unit starts it

    def set_labels(self, unit_name: str, owner: object) -> None:
        """Label its forms, as those of a parameter of the unit with this name."""
        original = self.original()
        if original is not None and original is not self.own:
            set_label(original, self, unit_name, "original", owner)
        if self.compute is not self.at_rest:
            set_label(self.compute, self, unit_name, "compute")
        set_label(self.at_rest, self, unit_name, "at_rest", owner)

    def start_as(self, original: ManagedParam, info: ParamInfo) -> None:
        """As the copy of `original`."""
        ManagedParam.__init__(self, info)
        self.original = _no_parameter
        self.grad_dtype = original.grad_dtype  # copy.deepcopy drops it
        self.sends = original.sends

    def set_info(self, info: ParamInfo) -> None:
        self.info = info
        self.tables = tuple([(_table_of(place.module), place.name) for place in info.places])
        self.places = tuple([(ref(place.module), place.name) for place in info.places])

    def agree(self, sends: Sends | None) -> None:
        """See `sends`; None: ranks are to tell each other again."""
        self.sends = sends

    def keep(self, own: nn.Parameter) -> None:
        """The user's parameter stays where it is."""
        self.own = own
        if isinstance(own, DTensor) or self.original() is own:
            # torch cannot exchange a parameter that is referred to weakly, as `Module.to` does with
            # `DTensor`s, and with all under `set_swap_module_params_on_conversion`
            self.original = _no_parameter

    def rest_as(self, at_rest: nn.Parameter) -> None:
        if self.registered is not at_rest:
            self.register(at_rest)
        self.at_rest = at_rest

    def compute_with(self, compute: nn.Parameter) -> None:
        self.compute = compute

    def follow_grad_dtype(self) -> None:
        self.grad_dtype = chosen_grad_dtype(self.at_rest)

    def follow(self, replacement: nn.Parameter) -> None:
        """The user registered another parameter at one of the places."""
        self.grad_dtype = chosen_grad_dtype(replacement) or self.grad_dtype
        if not isinstance(replacement, DTensor):
            self.original = ref(replacement)  # an optimizer that was made before now may hold it
        self.register(replacement)

    def restore(self, plain: nn.Parameter, gradient: Tensor | None) -> None:
        """Register `plain`, which takes over what users gave to the at-rest parameter."""
        at_rest = self.at_rest
        if plain is at_rest:
            return
        plain.requires_grad_(at_rest.requires_grad)
        keep_gradients_in(self.grad_dtype or plain.dtype, plain)
        plain.grad = gradient
        copy_attributes(at_rest, plain)
        move_hooks(at_rest, plain)
        if self.registered is at_rest:
            self.register(plain)

    @torch.no_grad()
    def restore_whole(self, value: Tensor, gradient: Tensor | None) -> None:
        """The same with a whole value and gradient, which were gathered."""
        form, at_rest, plain = self.info.form, self.at_rest, self.original()
        if plain is None or not form.refill(plain, value, at_rest):
            if isinstance(at_rest, DTensor):
                value = as_class_of(local_of(at_rest), value)
            plain = form.compute_parameter(
                form.laid_out(value, at_rest), requires_grad=at_rest.requires_grad
            )
        if gradient is not None:
            gradient = form.laid_out(gradient, at_rest).to(self.grad_dtype or plain.dtype)
            gradient = form.shown(gradient)
        self.restore(plain, gradient)

    def end(self, unit_name: str) -> None:
        """Its unit, with this name, is removed."""
        set_label(self.at_rest, self, unit_name, "removed")
        registered = self.registered
        if registered is not None:
            drop_label(registered)
            keep_gradients_in(self.grad_dtype or registered.dtype, registered)

    @property
    def fqn(self) -> str:
        return self.info.fqn

    @property
    def registered_at(self) -> tuple[Place, ...]:
        return self.info.places

    @property
    def own_mesh_info(self) -> MeshInfo | None:
        return self.info.mesh_info

    @property
    def is_whole(self) -> bool:
        """See `ParamForm.is_whole`."""
        return self.info.form.is_whole

    @property
    def registered(self) -> nn.Parameter | None:
        for table, name in self.tables:
            if (found := table.get(name)) is not None:
                return found
        return None

    @property
    def current(self) -> nn.Parameter:
        """What is registered, of a parameter that no user has deleted."""
        found = self.registered
        assert found is not None
        return found

    @property
    def users_local(self) -> Tensor | None:
        """The local tensor of what is registered, as its user made it; None of what rests."""
        registered = self.current
        label = label_of(registered)
        if isinstance(registered, DTensor) and label is not None and label.form == "at_rest":
            return None  # where nothing cuts it, it has the placements that it was given with
        return local_tensor(registered) if self.info.form.owns(registered) else None

    def move(self, move: Callable[[Tensor], Tensor], shard: Tensor | None = None) -> None:
        """Let the at-rest parameter and its gradient be on another device, and modules compute with
        nothing else.

        Args:
            move: makes a copy there.
            shard: the copy of its shard; None for a parameter that has memory of its own.
        """
        own, at_rest, gradient = self.own, self.at_rest, self.at_rest.grad
        # copies come first: where one raises for want of memory, nothing has changed
        moved = None if gradient is None else move(local_tensor(gradient))
        data = None if own is None else move(own.data)
        self.compute, at_rest.grad = at_rest, None
        if own is not None and data is not None:
            own.data = data
            shard = own.detach()
        if isinstance(at_rest, DTensor):
            assert shard is not None
            at_home(at_rest, shard)
        if moved is not None:
            is_dtensor = isinstance(gradient, DTensor)
            at_rest.grad = gradient_like(moved, at_rest) if is_dtensor else moved

    def register(self, parameter: nn.Parameter) -> None:
        """Register `parameter` at all places. A place that was deleted, or set to None, stays
        so.
        """
        for table, name in self.tables:
            if table.get(name) is not None:
                table[name] = parameter


class _ByAttribute:
    """The parameters of an RNN. It keeps a list of its own of them, which only `setattr`
    updates.
    """

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> nn.Parameter | None:
        return self._module._parameters.get(name)

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        setattr(self._module, name, parameter)


def _table_of(module: nn.Module) -> dict[str, nn.Parameter | None] | _ByAttribute:
    """Where parameters of a module are looked up and registered."""
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return _ByAttribute(module)
    return module._parameters


class ParameterSwap:
    """Which form of a unit's parameters its modules hold. A tensor that the user registered stays
    where it is.
    """

    __slots__ = ("_in", "_of_modules", "_out", "_params")

    def __init__(self, params: Sequence[ManagedParam]) -> None:
        self._params = [param for param in params if param.at_rest is not param.compute]
        self._in = [(*at, p.at_rest, p.compute) for p in self._params for at in p.tables]
        self._out = [(*at, p.compute, p.at_rest) for p in self._params for at in p.tables]
        self._of_modules: dict[int, list[_Swapped]] = {}  # `_out`, once one of them was asked for

    def swap_in(self) -> None:
        """Register the compute parameters."""
        _exchange(self._in)

    def swap_out(self) -> None:
        """Register the at-rest parameters again, also where a forward has put another parameter
        around the memory of a compute one (PEFT does so on hosts: `weight = weight.to("cpu")`).
        """
        for table, name, compute, at_rest in self._out:
            found = table.get(name)
            if found is compute or (found is not at_rest and _is_around(found, compute)):
                table[name] = at_rest

    def take_back(self) -> None:
        """While modules hold compute parameters: register them again, as `swap_out` does."""
        for table, name, compute, at_rest in self._out:
            found = table.get(name)
            if found is not compute and found is not at_rest and _is_around(found, compute):
                table[name] = compute

    def swap_in_at(self, module: nn.Module) -> None:
        """Register the compute parameters at one module."""
        here = self._at(module)
        _exchange([(table, name, at_rest, compute) for table, name, compute, at_rest in here])

    def swap_out_at(self, module: nn.Module) -> None:
        """Register the at-rest parameters at one module."""
        _exchange(self._at(module))

    def _at(self, module: nn.Module) -> list[_Swapped]:
        if not self._of_modules:
            places = (place for param in self._params for place in param.info.places)
            for place, swapped in zip(places, self._out, strict=True):
                self._of_modules.setdefault(id(place.module), []).append(swapped)
        return self._of_modules.get(id(module), [])


_Swapped = tuple[Any, str, nn.Parameter, nn.Parameter]  # where, what is there, what comes


def _exchange(places: Sequence[_Swapped]) -> None:
    # A plain loop over flat tuples: it runs for every parameter four times per step.
    for table, name, before, after in places:
        if table.get(name) is before:
            table[name] = after


def _is_around(found: Tensor | None, compute: nn.Parameter) -> bool:
    """Whether a registered parameter is another one around the memory of a compute parameter, and
    gets no gradient, which would be lost.
    """
    return (
        isinstance(found, nn.Parameter)
        and not found.requires_grad
        and not isinstance(found, DTensor)
        and not isinstance(compute, DTensor)
        and found.layout is torch.strided
        and storage_key(found) == storage_key(compute)
    )


# --- memory order: shards of dense parameters that are not contiguous (channels_last) -----------


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; empty for a
    contiguous one.
    """
    if tensor.is_contiguous():
        return ()
    # As torch lays out a tensor like this one: what is not dense becomes so.
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    strides = torch.empty_like(bare).stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.ndim)) else order


def as_parameter(tensor: Tensor, slot: Slot) -> Tensor:
    """A tensor whose dimensions are in memory order, with the parameter's order of dimensions."""
    if not slot.order:
        return tensor
    return tensor.permute(sorted(range(tensor.ndim), key=slot.order.__getitem__))


def shape_and_strides(slot: Slot) -> tuple[torch.Size, tuple[int, ...]]:
    """Those of the whole parameter."""
    return _shape_and_strides(slot.shape, slot.order)


@lru_cache
def _shape_and_strides(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> tuple[torch.Size, tuple[int, ...]]:
    whole = torch.empty(shape, device="meta")
    if order:
        whole = whole.permute(sorted(range(len(shape)), key=order.__getitem__))
    return whole.shape, whole.stride()


def cut(whole: Tensor, slot: Slot, rank: int) -> Tensor:
    """The shard of a whole tensor that `rank` has: a view."""
    if slot.route is Route.WHOLE:
        return whole
    return whole.narrow(slot.cut_dim, *slot.extent(rank))


def replacement_of(source: nn.Parameter, made: DTensor) -> nn.Parameter:
    """Make `made` a parameter in place of `source`: it trains if that does, and has the attributes
    that users have set there.
    """
    parameter = parameter_around(made, requires_grad=source.requires_grad)
    copy_attributes(source, parameter)
    return parameter


def at_home(registered: nn.Parameter, local: Tensor) -> nn.Parameter:
    """The at-rest parameter keeps its identity when its data moves into `local`, on any device."""
    assert isinstance(registered, DTensor)
    if registered.device == local.device:
        set_local(registered, local)
        return registered
    # It was moved away, and DTensors remember their device: let it take over a new one's insides.
    gradient = registered.grad
    # before anything changes, since a copy may raise for want of memory
    moved = local_of(gradient).to(local.device) if isinstance(gradient, DTensor) else None
    registered.grad = None
    made = replacement_of(registered, wrap_like(local, registered))
    made.grad_dtype = registered.grad_dtype
    torch.utils.swap_tensors(registered, made)
    if moved is not None:
        registered.grad = gradient_like(moved, registered)
    return registered


def chosen_grad_dtype(parameter: nn.Parameter) -> torch.dtype | None:
    """What `parameter.grad_dtype` was set to. None if it is the parameter's dtype, and where any
    dtype is allowed: ranks send messages of one dtype.
    """
    found = parameter.grad_dtype
    return None if found == parameter.dtype else found


def keep_gradients_in(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    """Let the parameter's gradient have `dtype`; torch accepts the parameter's own only, unless
    `grad_dtype` is set.
    """
    if getattr(parameter, "grad_dtype", dtype) != dtype:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)
