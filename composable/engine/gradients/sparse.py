"""Sparse gradients of replicated lookups (`nn.Embedding(sparse=True)`): averaged at the end of a
backward, and still sparse.

How many rows a rank has differs from rank to rank. So the ranks first exchange these numbers, and
which gradients they have at all. That blocks, which is why it comes after everything else has
landed. Then the rows of all ranks are gathered and added up.

Parameters that only sparse lookups read have a `ParamGroup` of their own and rest as plain
parameters, next to shards as well, because a `DTensor` has no sparse gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from composable.comm.base import Comm
from composable.comm.launch import Launch, LaunchKind
from composable.engine.params.param import (
    ManagedParam,
    ParamInfo,
    run_gradient_hooks,
    run_post_accumulate_hooks,
    set_holds_unreduced,
)
from composable.engine.params.precision import Precision


def is_sparse_lookup(module: nn.Module) -> bool:
    """Whether the weight of `module` gets sparse gradients: torch's own modules that say so, as
    with DDP.
    """
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def only_looked_up(info: ParamInfo) -> bool:
    """Whether nothing but sparse lookups reads a parameter, as far as modules tell."""
    return all(is_sparse_lookup(place.module) for place in info.places)


class SparseGradients:
    """The sparse gradients of one `ParamGroup`.

    Attributes:
        params: that only sparse lookups read.
        holds: a backward under `no_sync` has ended; its gradients wait, on the at-rest parameters,
            to be reduced.
    """

    def __init__(self, params: Sequence[ManagedParam], precision: Precision, comm: Comm) -> None:
        self.params = tuple(params)
        self.holds = False
        self._precision = precision
        self._comm = comm
        # those with a gradient of this rank's that was not reduced
        self._here: set[ManagedParam] = set()

    def resume(self, former: Iterable[SparseGradients]) -> None:
        """Go on with what waits in former ones: users have moved or replaced parameters."""
        for each in former:
            self._here |= each._here.intersection(self.params)
            self.holds |= each.holds and not set(each.params).isdisjoint(self.params)

    def rename(self, unit_name: str) -> None:
        self._exchange = Launch(f"exchange of the numbers of sparse rows of unit '{unit_name}'")
        self._gathers = {
            param: Launch(
                f"all-gather of the sparse gradient of unit '{unit_name}' ('{param.fqn}')",
                LaunchKind.GATHER_SPARSE,
                param,
                unit_name,
            )
            for param in self.params
        }

    def arrived(self, param: ManagedParam) -> None:
        """Autograd has accumulated a gradient, maybe of one of these."""
        if param in self.params:
            self._here.add(param)

    @property
    def came(self) -> bool:
        """Whether this backward has brought any; not known behind others under `no_sync`."""
        return bool(self._here) and not self.holds

    @torch.no_grad()
    def end_backward(self, *, reduces: bool) -> None:
        """All ranks call this at the end of every backward."""
        if not self.holds and not any(param.at_rest.requires_grad for param in self.params):
            return  # all are frozen, on all ranks
        for param in self.params:
            gradient, at_rest = param.compute.grad, param.at_rest
            if param.compute is at_rest or gradient is None:
                continue  # autograd has added it where it belongs
            param.compute.grad = None
            gradient = run_gradient_hooks(at_rest, gradient.to(self._precision.gradient))
            if at_rest.grad is not None:  # a dense tensor is not added to a sparse one
                gradient = (
                    gradient + at_rest.grad if at_rest.grad.is_sparse else at_rest.grad + gradient
                )
            at_rest.grad = gradient
        if reduces:
            self.reduce()
        else:
            self._set_holds(holds=True)

    def hold_by_hand(self) -> None:
        """Gradients are assigned by hand, so that nothing tells of them: hold what is here."""
        self._here.update(param for param in self.params if param.compute.grad is not None)
        self.end_backward(reduces=False)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average what is here on any rank. What no rank has a gradient for stays as it was."""
        self._set_holds(holds=False)
        here, self._here = self._here, set()
        mine = [_rows_of(param.at_rest, self._precision.gradient) for param in self.params]
        numbers = [
            n
            for param, (rows, _) in zip(self.params, mine, strict=True)
            for n in (int(param in here), len(rows))
        ]
        every = self._comm.all_gather_ints(numbers, self._exchange)
        for index, (param, (rows, values)) in enumerate(zip(self.params, mine, strict=True)):
            if not any(row[2 * index] for row in every):
                continue
            mean = self._mean(param, rows, values, [row[2 * index + 1] for row in every])
            gradient = param.at_rest.grad
            if gradient is not None and not gradient.is_sparse:
                # another use of the weight made it dense
                gradient.copy_(mean.to_dense())
            else:
                param.at_rest.grad = mean
            run_post_accumulate_hooks(param.at_rest)

    def _mean(
        self, param: ManagedParam, rows: Tensor, values: Tensor, counts: Sequence[int]
    ) -> Tensor:
        most, ranks, width = max(counts), self._comm.size, param.at_rest.shape[1:]
        padding = most - len(rows)  # ranks send the same number of rows
        sent = [torch.cat([rows, rows.new_zeros(padding)])]
        reduce = self._precision.reduce
        sent.append(torch.cat([values, values.new_zeros(padding, *width)]).to(reduce).view(-1))
        pairs = [(each.new_empty(ranks * each.numel()), each) for each in sent]
        launch = self._gathers[param]
        for work in [self._comm.all_gather([pair], launch) for pair in pairs] if most else ():
            work.wait()
        kept = torch.cat(
            [torch.arange(count) + rank * most for rank, count in enumerate(counts)]
        ).to(rows.device)
        every_row = pairs[0][0][kept]
        # Divided before the sum, which float16 could not hold; both in the wider of the two dtypes,
        # so that the mean of values in a low one is rounded once.
        wide = torch.promote_types(reduce, values.dtype)
        every_value = pairs[1][0].view(-1, *width)[kept].to(wide).div_(ranks)
        mean = torch.sparse_coo_tensor(
            every_row[None], every_value, param.at_rest.shape, check_invariants=False
        ).coalesce()
        return mean.to(values.dtype)

    def _set_holds(self, *, holds: bool) -> None:
        self.holds = holds
        for param in self.params:
            set_holds_unreduced(param.at_rest, holds=holds)

    def drop(self) -> None:
        """The step is lost, and with it this rank's gradients."""
        for param in self.params:
            if param.compute is not param.at_rest:
                param.compute.grad = None
            if param in self._here:
                param.at_rest.grad = None
        self._here = set()
        self._set_holds(holds=False)


def _rows_of(parameter: nn.Parameter, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of this rank's gradient, each once, and their values; none where there is no
    gradient.
    """
    gradient = parameter.grad
    if gradient is None:
        numbers = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        return numbers, torch.zeros(0, *parameter.shape[1:], dtype=dtype, device=parameter.device)
    gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
    return gradient.indices()[0], gradient.values()
