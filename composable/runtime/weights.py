"""How much each rank's gradients weigh: the totals that ranks agree on, and the factors that follow; knows no scope.

Note [Weights]
Rank r's loss is a mean over what it weighs w_r, so the gradient of the mean over everything is the sum of w_r * g_r over all
ranks and micro-batches, divided by the sum W of all w_r. Sums over n ranks become means anyway, so each rank multiplies its
terms (Note [Terms]) by n * w_r / W, which is about one. After the first micro-batch what is there already is multiplied by the
old W over the new one: between two micro-batches gradients are the weighted mean of those so far.
docs/decisions/0024-weights.md tells why it is not done otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable.device.collectives import reduce_numbers
from composable.device.host_numbers import numbers_for
from composable.device.private import local_of
from composable.device.term_factors import Factor
from composable.errors import AnnotationError, PhaseError, RanksDisagreeError
from composable.runtime.accumulation import Accumulation
from composable.runtime.mesh_info import MeshInfo
from composable.runtime.replicated_unit import ReplicatedUnit
from composable.runtime.sharded_unit import ShardedUnit
from composable.runtime.weighted_window import Number, Window

_PLACES: Final = 16  # micro-batches that are told apart where nobody reads: sums of their squares are exact in float32
_LABEL: Final = "sum of the weights for weighted_gradients, a scope that all ranks enter together,"


class WeighedUnits:
    """The units of one model, to whose gradients weights are given."""

    def __init__(self, sharded: Sequence[ShardedUnit], replicated: Sequence[ReplicatedUnit]) -> None:
        self._units = sharded
        self._replicas = replicated
        self._sharded = [unit.handle for unit in sharded]
        self._reducers = [unit.averaging.reducer for unit in replicated]
        self._averagings = [unit.averaging for unit in replicated]
        named = [(handle.name, handle.mesh_info) for handle in self._sharded]
        named += [(each.name, each.mesh_info) for each in self._averagings if each.mesh_info is not None]
        self.mesh_info = _widest(named)
        self.parameters = [p.sharded for handle in self._sharded for p in handle.parameters.params]
        self.parameters += [parameter for each in self._averagings for parameter in each.owned_at_rest]

    @property
    def accumulations(self) -> list[Accumulation]:
        held = [handle.gradients.accumulation for handle in self._sharded]
        return [*held, *(reducer.local.accumulation for reducer in self._reducers)]

    def window(self) -> Window:
        """The one that goes on, or a new one.

        Raises:
            PhaseError: a scope is open already; or units are in different windows, or hold gradients that belong to none.
        """
        found = [each.weights for each in self.accumulations if each.weights is not None and not each.weights.lost]
        if any(window.active for window in found):
            raise PhaseError(
                "weighted_gradients: a scope of these units is open already, and a gradient has one weight. Leave one of the "
                "scopes out, or enter them one after the other"
            )
        going_on = list(dict.fromkeys(window for window in found if window.goes_on))
        if len(going_on) > 1 or (going_on and len(found) < len(self.accumulations)):
            raise PhaseError(
                "weighted_gradients: with more=True a scope said that more micro-batches follow, for some of these units and "
                "not for all, so they have no common total. Pass the same model to all scopes of a step"
            )
        if not going_on and any(each.passes for each in self.accumulations):
            raise PhaseError(
                "weighted_gradients: units hold gradients of earlier backwards under no_sync that belong to no weights of this "
                "step. Pass more=True to every scope of a step but the last one; or average them first: run a backward outside "
                "of no_sync, or call reduce_gradients(model)"
            )
        return going_on[0] if going_on else Window()

    def agree(self, window: Window, weight: Number, refused: str, *, last: bool) -> Number:
        """Add up everybody's weight, and let what is there already weigh less; the total.

        Args:
            refused: why this rank's weight is none; nothing if it is one.
        """
        window.refused = False
        mesh_info = self.mesh_info
        reads = mesh_info.all.capabilities.reads_freely
        dtype = torch.float64 if reads else torch.float32  # which not every accelerator has
        present = any(parameter.grad is not None for parameter in self.parameters)
        place = float(window.scopes if reads else window.scopes % _PLACES)
        said = [float(bool(refused)), float(present), place, place * place]
        if isinstance(weight, Tensor):
            weight = weight.detach().reshape(1).to(mesh_info.device, dtype)
            sums = torch.cat([weight, numbers_for(said, mesh_info.device, dtype)])
        else:
            sums = numbers_for([weight, *said], mesh_info.device, dtype)
        group = None if mesh_info.group is None else mesh_info.group()
        if group is not None and mesh_info.all.size > 1:
            sums = reduce_numbers(sums, group, largest=False, label=_LABEL)
        numbers = sums.tolist() if reads else []
        window.refused = reads and numbers[1] > 0
        if refused:
            raise AnnotationError(refused)
        if reads:
            weights, others, found, *places = numbers
            _refuse_others(others)
            _refuse_other_places(*places, ranks=mesh_info.all.size, here=window.scopes)
            return self._add(window, weights, found, last=last)
        return self._add_unread(window, *sums.unbind())

    def _add(self, window: Window, weights: float, present: float, *, last: bool) -> float:
        before = float(window.total) if present else 0.0  # who has cleared gradients has begun again
        window.total = total = before + weights
        if last and total == 0.0:
            raise PhaseError(
                "weighted_gradients: the weights of all ranks are zero, so there is no mean to take. Leave the step out, on "
                "all ranks; gradients are as they were before"
            )
        if before and weights:
            self._multiply(before / total)
        return total

    def _add_unread(
        self, window: Window, weights: Tensor, refused: Tensor, present: Tensor, places: Tensor, squares: Tensor
    ) -> Tensor:
        """The same, of numbers on an accelerator. Where ranks do not agree, all gradients become NaN: nobody can be told."""
        agreed = (refused == 0) & (places * places == self.mesh_info.all.size * squares)
        weights = torch.where(agreed, weights, torch.full_like(weights, math.nan))
        going_on, before = isinstance(window.total, Tensor), torch.where(present > 0, window.total, torch.zeros_like(weights))
        window.total = total = before + weights
        if going_on:
            self._multiply(torch.where(before > 0, before / total, torch.ones_like(total)))
        return total

    @torch.no_grad()
    def _multiply(self, factor: Number) -> None:
        """What is there."""
        dense: dict[torch.device, list[Tensor]] = {}
        for parameter in self.parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = local_of(gradient)
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                parameter.grad = gradient * factor
            else:
                dense.setdefault(gradient.device, []).append(gradient)
        for device, gradients in dense.items():
            torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, Tensor) else factor)

    def enter(self, window: Window, weight: Number | None, total: Number) -> None:
        """Backwards from here on bring gradients that weigh `weight`; None: as much as their loss does."""
        window.members = frozenset(map(id, self.parameters))
        window.active = True
        window.scopes += 1
        for accumulation in self.accumulations:
            accumulation.weights = window
        if weight is None:
            return
        factors = {ranks: factor_of(weight, total, ranks) for ranks in {each.all.size: None for each in self._mesh_infos()}}
        for handle in self._sharded:
            factor = factors[handle.mesh_info.all.size]
            handle.gradients.accumulation.weight = factor
            for each in handle.gradients.groups:
                each.terms.weigh(factor)
            handle.parameters.term_hooks.weigh(factor)
        for averaging, reducer in zip(self._averagings, self._reducers, strict=True):
            factor = factors[averaging.communicator.size]
            reducer.local.accumulation.weight = factor
            reducer.term_hooks.weigh(factor)

    def give_up(self, why: str) -> None:
        """An exception leaves the scope: who waits for this rank is told now, since the next scope waits before any forward."""
        for root in dict.fromkeys(unit.root for unit in self._units):
            if root is not None and root.backward.iteration is not None and not root.running:
                root.abort(why, why)
        for unit in self._replicas:
            averaging = unit.averaging
            if averaging.forwards[0].left and averaging.order.backward is None:
                unit.forward_steps.lose()

    def _mesh_infos(self) -> Iterator[MeshInfo]:
        yield from (handle.mesh_info for handle in self._sharded)
        yield from (each.mesh_info for each in self._averagings if each.mesh_info is not None)

    def leave(self, window: Window, *, goes_on: bool) -> None:
        """They weigh as much as without a scope."""
        for accumulation in self.accumulations:
            accumulation.weight = None
            accumulation.weights = window if goes_on else None
        for handle in self._sharded:
            for each in handle.gradients.groups:
                each.terms.weigh(None)
            handle.parameters.term_hooks.weigh(None)
        for reducer in dict.fromkeys([*self._reducers, *(each.reducer for each in self._averagings)]):
            reducer.term_hooks.weigh(None)
        window.close(goes_on=goes_on)


def factor_of(weight: Number, total: Number, ranks: int) -> Factor:
    """What this rank multiplies its gradients by, where the sum over `ranks` becomes a mean."""
    if isinstance(weight, Tensor):
        weight = weight.detach().reshape(())
        if isinstance(total, Tensor):
            weight = weight.to(total.device, total.dtype)
        return Factor(torch.where(torch.as_tensor(total <= 0), torch.zeros_like(weight), weight * ranks / total))
    if weight == 0.0:
        return Factor(0.0)
    return Factor(weight * ranks / total, may_be_zero=False)


def _widest(named: Sequence[tuple[str, MeshInfo]]) -> MeshInfo:
    """Of the meshes the one that has all ranks of the others.

    Raises:
        AnnotationError: there is none; two units are named.
    """
    name, widest = max(named, key=lambda each: each[1].all.size)
    ranks = _ranks_of(widest)
    for other, mesh_info in named:
        if mesh_info.group is not widest.group and not set(_ranks_of(mesh_info)) <= set(ranks):
            raise AnnotationError(
                f"weighted_gradients: unit '{other}' trains over ranks {_ranks_of(mesh_info)}, unit '{name}' over {ranks}, and "
                "no unit over all of them, so nobody can add up their weights. Enter a scope for each of these units"
            )
    return widest


def _ranks_of(mesh_info: MeshInfo) -> list[int]:
    group = None if mesh_info.group is None else mesh_info.group()
    return [] if group is None else list(dist.get_process_group_ranks(group))


def _refuse_other_places(places: float, squares: float, *, ranks: int, here: int) -> None:
    if places * places != ranks * squares:
        raise RanksDisagreeError(
            f"weighted_gradients: the ranks are in different micro-batches of a step, this one in number {here + 1}, because a "
            "rank left one out, or lost a step to an error. Clear the gradients, on all ranks, and go on with the next step"
        )


def _refuse_others(others: float) -> None:
    if others:
        ranks = "another rank" if others == 1 else f"{others:g} other ranks"
        raise RanksDisagreeError(
            f"weighted_gradients: {ranks} passed a weight that was refused, and raised an error of that. Gradients are as they "
            "were before, on all ranks"
        )
