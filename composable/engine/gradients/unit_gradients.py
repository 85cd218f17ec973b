"""The gradients of one unit: how they are taken from autograd, and what reduces them.

The order in which units are reduced is in `post_backward.py`, and for replicated models in
`Buckets`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn
from weakref import ref

from torch import Tensor

from composable.comm.mesh_info import MeshInfo
from composable.compilation import traceable, untraced
from composable.engine.gradients.grad_bucket import Accumulation, GradBucket
from composable.engine.gradients.sparse import SparseGradients, only_looked_up
from composable.engine.params.param import (
    Arrival,
    ManagedParam,
    defer_hooks,
    holds_unreduced,
    hook_accumulation,
    hook_gradients,
    ignore_arrivals,
    listen_to_arrivals,
    run_post_accumulate_hooks,
)
from composable.engine.params.param_group import ParamGroup
from composable.errors import DifferentiationError


class UnitKind(enum.Enum):
    """How the parameters of a unit lie over the ranks, and when their gradients are reduced.

    Those of BESIDE rest as `DTensor(Replicate)`, as optimizers and clipping expect next to shards,
    if the unit has the ranks of the shards around it (`choose_rest`). Otherwise, and if they are
    distributed by users or have sparse gradients, they rest as users made them.
    """

    SHARDED = "each rank has a shard: gathered, and reduce-scattered where backward leaves the unit"
    BESIDE = "replicated in a tree with shards: all-reduced before the next unit with shards"
    ARRIVAL = "replicated: all-reduced in buckets of the root, as autograd accumulates gradients"
    LOCAL = "one rank: autograd does everything, but for casts"


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """How the gradients of one unit are reduced.

    Attributes:
        kind: decides when.
        mesh_info: the ranks, of parameters that are not on a mesh of their own.
        divisor: what sums are divided by; None for the number of ranks.
        bucket_bytes, keeps_buckets: see `UnitSpec`.
        is_read_apart: other units read parameters of this one.
    """

    kind: UnitKind
    mesh_info: MeshInfo
    divisor: float | None = None
    bucket_bytes: int = 0
    keeps_buckets: bool = False
    is_read_apart: bool = False


class Stages:
    """Reduces a unit's dense gradients by collectives. `features/hook_stages.py` puts hooks of the
    user's in their place.
    """

    def attach(self, unit: UnitGradients, buckets: Sequence[GradBucket]) -> None:
        """Reduce `buckets` from now on, and no others: all buckets of the unit. For the kind
        ARRIVAL a second call names those in `Buckets`. New ones have collectives.
        """


class UnitGradients:
    """See the top of this file. It lives as long as its unit.

    Attributes:
        on_gradient: called when autograd has accumulated a gradient.
        on_gradient_at_rest: the same, on an at-rest parameter that modules do not compute with.
        name: of the unit, in messages.
        params, groups: of the unit.
        buckets: for all that is reduced where backward leaves the unit, or the next one with
            shards. Gradients of the kind ARRIVAL are in buckets of all units (`Buckets`).
        sparse: gradients of parameters that only sparse lookups read.
        arrivals: the hooks by which autograd tells of gradients; taken out of its tables while the
            unit will be reduced anyway.
        accumulation: `no_sync`.
        stages: reduces them.
        hooks_due: with one rank only: parameters with a gradient whose post-accumulate hooks are
            still to be called.
    """

    spec: GradientSpec

    on_gradient: Callable[[ManagedParam], None]
    on_gradient_at_rest: Callable[[ManagedParam], None]

    def __init__(self) -> None:
        self.name = ""
        self.accumulation = Accumulation()
        self.stages = Stages()
        self.hooks_due: dict[ManagedParam, None] = {}
        self._arrive_in: Sequence[GradBucket] = ()  # see `arrive_in`
        self._undo: list[Callable[[], object]] = []
        self.clear()

    def tell(
        self,
        on_gradient: Callable[[ManagedParam], None],
        on_gradient_at_rest: Callable[[ManagedParam], None],
    ) -> None:
        """Call these from now on."""
        self.on_gradient, self.on_gradient_at_rest = on_gradient, on_gradient_at_rest

    def unhook(self) -> None:
        """Take all hooks off: their tensors are about to be replaced. `build` follows."""
        for undo in self._undo:
            undo()
        self._undo = []
        self.groups: Sequence[ParamGroup] = ()  # their memory may go

    def clear(self) -> None:
        """Take all hooks off, and forget what they were for."""
        self.unhook()
        self.params: Sequence[ManagedParam] = ()
        self.buckets: list[GradBucket] = []
        self.sparse: list[SparseGradients] = []
        self.arrivals: dict[ManagedParam, Arrival] = {}
        self._staged: list[GradBucket] = []  # of these, the ones that a hybrid mesh reduces

    def build(
        self, spec: GradientSpec, params: Sequence[ManagedParam], groups: Sequence[ParamGroup]
    ) -> None:
        """(Re)build buckets around the tensors that are registered now.

        What waits in the former buckets waits on: in the new ones, or, of the kind ARRIVAL, in the
        former ones until `Buckets` has made others and calls `arrive_in`.
        """
        former, sparse = [*self.buckets, *self._arrive_in], self.sparse
        self.clear()
        self.spec, self.params, self.groups = spec, params, groups
        for group in groups:
            self._build_group(group)
        for param in params:
            self._listen_for(param)
        for each in self.sparse:
            each.rename(self.name)
            each.resume(sparse)
        self._exchange(former, self.buckets)
        self._arrive_in = former if spec.kind is UnitKind.ARRIVAL else ()

    def arrive_in(self, buckets: Sequence[GradBucket]) -> None:
        """Of the kind ARRIVAL: these buckets of `Buckets` reduce its gradients from now on."""
        former, self._arrive_in = self._arrive_in, buckets
        self._exchange(former, buckets)

    def _exchange(self, former: Sequence[GradBucket], buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            bucket.rename(self.name)
            bucket.accumulated.resume([each.accumulated for each in former])
        self.stages.attach(self, buckets)

    def _build_group(self, group: ParamGroup) -> None:
        kind = self.spec.kind
        mesh_info = self.mesh_info_of(group.params[0])
        factor = self.factor_of(mesh_info)
        in_place = all(param.compute is param.at_rest for param in group.params)
        sparse = kind is not UnitKind.SHARDED and only_looked_up(group.params[0].info)
        in_parts = [param for param in group.params if in_place and not param.is_whole]
        for param in in_parts:
            settle = traceable(param.info.form.settled)
            self._undo += hook_gradients([param.compute], settle)
        if factor != 1.0 and (in_place or sparse):
            # autograd itself adds to what users see
            multiply = traceable(lambda gradient: gradient * factor)
            self._undo += hook_gradients([param.compute for param in group.params], multiply)
        if in_place and mesh_info.all.size == 1:
            return  # autograd does everything
        if sparse:
            self.sparse.append(SparseGradients(group.params, group.precision, self.mesh_info.all))
        elif kind is not UnitKind.ARRIVAL:  # others are in buckets of all units
            bucket = GradBucket(group, group.members, mesh_info, factor=factor)
            self.buckets.append(bucket)
            if mesh_info.shard.size > 1 and mesh_info.replicate is not None:
                self._staged.append(bucket)

    @property
    def mesh_info(self) -> MeshInfo:
        return self.spec.mesh_info

    def mesh_info_of(self, param: ManagedParam) -> MeshInfo:
        """The ranks over which gradients of `param` are reduced: the unit's, or its own."""
        return param.info.mesh_info or self.mesh_info

    def factor_of(self, mesh_info: MeshInfo) -> float:
        """What turns the mean over the ranks, which reductions make, into what `grad_reduce` asks
        for.
        """
        divisor = self.spec.divisor
        return 1.0 if divisor is None else mesh_info.all.size / divisor

    def rename(self, name: str) -> None:
        """Take the unit's FQN below the root."""
        self.name = name
        for bucket in (*self.buckets, *self._arrive_in):
            bucket.rename(name)
        for sparse in self.sparse:
            sparse.rename(name)

    def follow(self) -> None:
        """Parameters were frozen or unfrozen."""
        for bucket in (*self.buckets, *self._arrive_in):
            bucket.follow()

    # --- when gradients arrive -------------------------------------------------------------------

    def _listen_for(self, param: ManagedParam) -> None:
        """Let autograd call `arrived` when it has accumulated a gradient on what modules compute
        with, and `arrived_at_rest` on an at-rest parameter that is another tensor.

        | modules compute with  | hooks of users on the at-rest parameter                        |
        |-----------------------|----------------------------------------------------------------|
        | the at-rest parameter | are taken from autograd, which would call them with this       |
        |                       | rank's gradient (`defer_hooks`)                                |
        | another one           | likewise; autograd accumulates there if the parameter is read  |
        |                       | outside of its module, as by a penalty                         |

        What is in `arrivals` can be ignored. Sparse gradients cannot, nor the hooks of users that
        `arrived` makes due where one rank trains alone.
        """
        parameter = param.compute
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # bytes of quantised weights: torch hooks no integers
        in_place = parameter is param.at_rest
        is_alone = self.mesh_info_of(param).all.size == 1
        is_sparse = any(param in each.params for each in self.sparse)
        hook = defer_hooks if in_place else hook_accumulation
        arrival, undo = hook(parameter, _when_accumulated(UnitGradients.arrived, self, param))
        self._undo.append(undo)
        if not in_place:
            read_apart = _when_accumulated(UnitGradients.arrived_at_rest, self, param)
            self._undo.append(defer_hooks(param.at_rest, read_apart)[1])
        if not (is_sparse or (in_place and is_alone)):
            self.arrivals[param] = arrival

    def arrived(self, param: ManagedParam, form: Tensor) -> None:
        """Autograd has accumulated a gradient on what modules compute with."""
        if not form.requires_grad:
            # torch calls hooks of parameters that were frozen after their forward, and accumulates
            # nothing
            return
        if param.compute is param.at_rest and self.mesh_info_of(param).all.size == 1:
            self.hooks_due[param] = None
        for sparse in self.sparse:
            sparse.arrived(param)
        self.on_gradient(param)

    def arrived_at_rest(self, param: ManagedParam, form: Tensor) -> None:
        """Autograd has accumulated on an at-rest parameter that modules do not compute with."""
        if param.at_rest is form:
            self.on_gradient_at_rest(param)
            run_post_accumulate_hooks(param.at_rest)

    def ignore(self) -> None:
        """The unit will be reduced, whichever gradients come: autograd need not tell of them."""
        ignore_arrivals(self.arrivals.values())

    def listen(self) -> None:
        """The inverse of `ignore`. May be called twice."""
        listen_to_arrivals(self.arrivals.values())

    def run_hooks(self) -> None:
        """Post-accumulate hooks of parameters that one rank trains alone: autograd has finished
        their gradients.
        """
        due, self.hooks_due = self.hooks_due, {}
        for param in due:
            run_post_accumulate_hooks(param.at_rest)

    # --- what is here ----------------------------------------------------------------------------

    @property
    def are_there(self) -> bool:
        """Whether autograd has brought any that were not taken yet; in place, also if they have
        landed earlier.
        """
        return any(bucket.has_gradients for bucket in self.buckets)

    @property
    def backwards(self) -> int:
        """How many backwards have left gradients here under `no_sync`."""
        return max((bucket.accumulated.backwards for bucket in self.buckets), default=0)

    @property
    def holds(self) -> bool:
        """Whether anything waits for the end of `no_sync`."""
        return bool(self.hooks_due or self.backwards or any(each.holds for each in self.sparse))

    @property
    def has_unreduced(self) -> bool:
        """Whether users see gradients that were accumulated under `no_sync` and wait to be
        reduced.
        """
        return any(holds_unreduced(param.at_rest) for param in self.params)

    # --- reductions ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """On a hybrid mesh: launch the second stage of reductions; returns whether there is one."""
        advanced = False
        for bucket in self._staged:
            advanced = bucket.advance() or advanced
        return advanced

    def land(self) -> None:
        """Wait for what was launched; the sums go to the at-rest parameters."""
        for bucket in self.buckets:
            bucket.land()

    def refuse_graph(self) -> NoReturn:
        """A backward with `create_graph=True` has brought gradients here."""
        raise DifferentiationError(
            f"backward(create_graph=True) brought gradients to parameters of unit '{self.name}'."
            " They are reduced outside of autograd's graph, so nothing could be differentiated"
            " through them. Ask for gradients of inputs only, torch.autograd.grad(loss, inputs,"
            " create_graph=True), or leave create_graph=True out"
        )

    def drop_step(self) -> None:
        """The step is lost; buckets and sparse gradients are dropped by themselves."""
        self.hooks_due = {}
        self.listen()

    def reduce_by(self, stages: Stages) -> None:
        """Let `stages` make the reductions. Between two steps."""
        self.stages = stages
        stages.attach(self, self.buckets)


def _when_accumulated(
    tell: Callable[[UnitGradients, ManagedParam, Tensor], None],
    unit: UnitGradients,
    param: ManagedParam,
) -> Callable[[Tensor], None]:
    """What autograd calls when it has accumulated on a form of `param`, and what calls `tell`.
    Weak: torch holds it where the garbage collector does not look, and the unit holds the
    parameter.
    """
    return partial(_accumulated, tell, ref(unit), ref(param))


@untraced
def _accumulated(
    tell: Callable[[UnitGradients, ManagedParam, Tensor], None],
    to_unit: Callable[[], UnitGradients | None],
    to_param: Callable[[], ManagedParam | None],
    form: Tensor,
) -> None:
    unit, param = to_unit(), to_param()
    if unit is not None and param is not None:
        tell(unit, param, form)
