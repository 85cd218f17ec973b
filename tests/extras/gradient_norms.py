"""An extra that the library does not have, written from outside of it: of each step, the norm of
the gradients of every unit, and the launch that took longest.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from composable import seams
from composable.comm import observe_launches
from composable.comm.backends import is_distributed, reduce_numbers, world_group
from composable.comm.launch import Launch, LaunchKind


class GradientNorms(seams.Observer):
    """Before `optimizer` steps: writes, on rank 0, the norms over all ranks of the gradients that
    it steps by, of each unit of the model, and the slowest launch since its last step.

    All ranks make it, with the annotated model, and close it, between two steps. Gradients are
    measured as the optimizer has them: scaled ones unscaled, clipped ones clipped. Those of an
    optimizer in backward are gone before, and it is refused.

    Slow is a launch by the host's time inside of the call that launches it, which for an exchange
    that blocks includes its answer. What the host waits for the others is summed up in `waited`.

    Attributes:
        step: how many were written.
        norms: of the last one, by the name of the unit; the same on all ranks.
        slowest: its launch and seconds, of this rank; None if there was none.
        waited: seconds that this rank has waited for collectives.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, write: Callable[[str], None] = print
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._names = {
            unit: ", ".join(names[module] or "(root)" for module in unit.modules)
            for unit in seams.units_in(model, caller="GradientNorms")
        }
        managed = [each.param.at_rest for each in seams.managed_in("GradientNorms", model)]
        if stepped := seams.stepped_in_backward(managed):
            raise ValueError(f"GradientNorms: {stepped} is stepped in backward")
        self._write = write
        self._began = dict[int, float]()  # by thread: backward launches in one of its own
        self._took = list[tuple[float, Launch]]()
        self.step = 0
        self.norms = dict[str, float]()
        self.slowest: tuple[str, float] | None = None
        self.waited, self._waits = 0.0, 0.0
        # of this optimizer: hooks for all of them are not called on ranks without data (`join`)
        self._ends = [
            seams.observe(self),
            observe_launches(
                launching=self._start,
                launched=self._launched,
                waiting=self._start,
                waited=self._waited,
            ),
            optimizer.register_step_pre_hook(self._steps).remove,
        ]

    def close(self) -> None:
        """Observe nothing from now on."""
        for end in self._ends:
            end()
        self._ends = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def loses(self, units: Any) -> None:
        if not self._names.keys().isdisjoint(units):
            self._took.clear()
            self._waits = 0.0

    # --- launches --------------------------------------------------------------------------------

    def _start(self, *_: object) -> None:
        self._began[threading.get_ident()] = time.perf_counter()

    def _launched(self, _: object, launch: Launch, *__: object) -> None:
        began = self._began.pop(threading.get_ident(), None)
        if began is not None and self._is_ours(launch):
            self._took.append((time.perf_counter() - began, launch))

    def _waited(self, _: object, launch: Launch) -> None:
        began = self._began.pop(threading.get_ident(), None)
        if began is not None and self._is_ours(launch):
            self._waits += time.perf_counter() - began

    def _is_ours(self, launch: Launch) -> bool:
        """Nothing says of an exchange what model it is for: it counts."""
        sender: Any = launch.sender
        if sender is None:
            return True
        match launch.kind:
            case LaunchKind.GATHER:
                parameter = sender.params[0].at_rest
            case LaunchKind.GATHER_SPARSE:
                parameter = sender.at_rest
            case _:  # the reductions
                parameter = sender.at_rest[0]
        return self._unit_of(parameter) is not None

    # --- norms -----------------------------------------------------------------------------------

    def _unit_of(self, parameter: Tensor) -> seams.Unit | None:
        unit = seams.unit_of(parameter)
        return unit if unit in self._names else None

    def _steps(self, optimizer: Optimizer, *_: object) -> None:
        of_units = dict[seams.Unit, list[Tensor]]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if unit := self._unit_of(parameter):
                    of_units.setdefault(unit, []).append(parameter)
        took, self._took = self._took, []
        self.waited, self._waits = self._waits, 0.0
        slowest = max(took, key=lambda each: each[0], default=None)
        self.slowest = slowest and (slowest[1].text, slowest[0])
        self.norms = {self._names[unit]: norm for unit, norm in _norms(of_units)}
        self._took.clear()  # of the norms themselves
        self._waits = 0.0
        self.step += 1
        if not is_distributed() or world_group().rank() == 0:
            self._write(self._line())

    def _line(self) -> str:
        norms = ", ".join(f"{name} {norm:.3g}" for name, norm in self.norms.items())
        if self.slowest is None:
            return f"step {self.step}: norms {norms}; no launch"
        text, seconds = self.slowest
        launch = f"slowest to launch: {text}, {1000 * seconds:.3f} ms"
        return f"step {self.step}: norms {norms}; {launch}"


def _norms(of_units: dict[seams.Unit, list[Tensor]]) -> Iterator[tuple[seams.Unit, float]]:
    """Each over all ranks. One message for all units whose parameters are cut over the same ranks,
    and none for what every rank has whole.
    """
    squares = dict[tuple[dist.ProcessGroup, ...], Tensor]()
    for index, (unit, parameters) in enumerate(of_units.items()):
        for parameter in parameters:
            groups = _cut_over(parameter)  # not the gradient, which may be missing
            if groups not in squares:
                device = unit.mesh_info.device
                squares[groups] = torch.zeros(len(of_units), device=device)
            squares[groups][index] += _square_here(parameter)
    for groups, found in squares.items():
        for group in groups:
            found = reduce_numbers(found, group, largest=False, text="norms of gradients of units")
        squares[groups] = found
    total = [sum(each) for each in zip(*(found.tolist() for found in squares.values()))]  # noqa: B905
    return zip(of_units, map(math.sqrt, total), strict=True)


def _cut_over(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Groups, over each of which ranks have other rows of it."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(mesh.get_group(i) for i, each in enumerate(placements) if not each.is_replicate())


def _square_here(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(())
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm.square()
