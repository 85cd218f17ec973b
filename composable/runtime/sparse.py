"""Sparse gradients, averaged and still sparse: all ranks' rows are brought together at the end of backward; knows no bucket.

Note [Sparse gradients]
How many rows a rank has is known when backward has brought them, and differs from rank to rank. So the ranks first tell each
other how many, and who has a gradient at all; that is a wait, which belongs to the end of a backward, see Note [Launch points].
Then everybody's rows are put one after the other by a sum in which each rank fills its own part and leaves zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import or_

import torch
from torch import Tensor, nn

from composable.device.collectives import Communicator


def is_sparse_lookup(module: nn.Module) -> bool:
    """Whether the weight of `module` gets sparse gradients: torch's own modules that say so, as with DDP."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


class SparseGradients:
    """The sparse gradients of some parameters in one backward."""

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], communicator: Communicator, unit: str) -> None:
        self._weights = tuple(parameters)
        self._names = tuple(names)
        self._communicator = communicator
        self._unit = unit
        self._arrived = bytearray(len(parameters))

    def __len__(self) -> int:
        return len(self._weights)

    def hook(self, slot: int, before: Callable[[], None]) -> Callable[[Tensor], None]:
        """What autograd calls when the gradient in `slot` is there."""
        arrived = self._arrived

        def note(_: Tensor) -> None:
            before()
            arrived[slot] = True

        return note

    def clear(self) -> None:
        self._arrived[:] = bytes(len(self._arrived))

    @property
    def arrived(self) -> list[int]:
        """Slots of which a gradient has arrived in this backward."""
        return [slot for slot, arrived in enumerate(self._arrived) if arrived]

    def average(self, held: Sequence[bool]) -> None:
        """Every rank calls this at the end of a backward. What no rank had a gradient for stays as it was.

        Args:
            held: for each slot, whether gradients of earlier backwards are there that were not averaged.
        """
        mine = [_rows_of(parameter) for parameter in self._weights]
        here = list(map(or_, map(bool, self._arrived), held))
        said = [number for arrived, rows in zip(here, mine, strict=True) for number in (int(arrived), rows._nnz())]
        everybody = self._communicator.all_gather_ints(
            said, label=f"count of the rows of sparse gradients of unit '{self._unit}'"
        )
        for slot, (parameter, rows) in enumerate(zip(self._weights, mine, strict=True)):
            if any(numbers[2 * slot] for numbers in everybody):
                counts = [numbers[2 * slot + 1] for numbers in everybody]
                _put(parameter, self._sum(rows, counts, self._names[slot]))

    def _sum(self, rows: Tensor, counts: Sequence[int], name: str) -> Tensor:
        total, start = sum(counts), sum(counts[: self._communicator.rank])
        own = slice(start, start + rows._nnz())
        # Communicators sum what gradients are made of; numbers of rows are exact in this type.
        indices = torch.zeros(rows.sparse_dim(), total, dtype=torch.float64, device=rows.device)
        values = torch.zeros(total, *rows.values().shape[1:], dtype=rows.dtype, device=rows.device)
        indices[:, own] = rows.indices()
        torch.div(rows.values(), self._communicator.size, out=values[own])
        if total:
            label = f"gradient of unit '{self._unit}' ('{name}', sparse)"
            for message in (indices, values):
                self._communicator.all_reduce(message.view(-1), label=label).wait()
        return torch.sparse_coo_tensor(indices.long(), values, rows.shape, check_invariants=False).coalesce()


def _rows_of(parameter: nn.Parameter) -> Tensor:
    """The rows of this rank's gradient, each once; none where there is no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return _no_rows(parameter)
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _no_rows(parameter: nn.Parameter) -> Tensor:
    indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def _put(parameter: nn.Parameter, mean: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse:  # another use of the weight made it dense
        gradient.copy_(mean.to_dense())
    else:
        parameter.grad = mean


def only_looked_up(registered: Sequence[nn.Parameter], lookups: Sequence[bool]) -> frozenset[int]:
    """Indices of parameters that nothing but sparse lookups reads, as far as modules tell.

    Args:
        lookups: for each place of `registered`, whether its module reads it by sparse lookups.
    """
    if not any(lookups) or len(registered) != len(lookups):
        return frozenset()
    dense = {id(p): None for p, lookup in zip(registered, lookups, strict=True) if not lookup}
    return frozenset(i for i, parameter in enumerate(registered) if id(parameter) not in dense)
