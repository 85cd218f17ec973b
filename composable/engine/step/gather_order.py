"""The order in which forwards below one root gather units: how it is learned, followed and
compared.

| question | answer | changes |
|---|---|---|
| what does a forward gather ahead? | the units after its `Forward.cursor` in `GatherOrder.recorded` | `GatherOrder.follow` |
| which order is recorded? | first, the order of the first forward, in which the ranks were compared; later, that of the last forward whose backward has landed | `GatherOrder.learn`, `GatherOrder.end_backward` |
| when do ranks compare where they are? | where they enter a unit for the first time, and at the end of that forward | `Unit.compared` |
| how do ranks compute a frozen unit that this one skips? | `Agreed.modes`, for the pattern of units that train | forwards with gradients, see `GatherOrder.pre_forward` |

Forwards without gradients follow the order and do not change it, except for the first. If
everything is gathered already (`keep_unsharded`), each rank may run any units: nothing is compared
or learned.
"""  # noqa: E501

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from operator import attrgetter
from typing import Final

from torch import nn

from composable.comm.base import Comm
from composable.comm.launch import COMPARISON_OF_FORWARDS, Launch
from composable.engine.gradients.agreed import Agreed, InputGradMode
from composable.engine.gradients.unit_gradients import UnitKind
from composable.engine.step.unit import Unit, UnitCall
from composable.errors import RanksDisagreeError

# Entries at most of what remembers forwards and calls: forwards without a backward (rollouts with
# gradients on) must not fill the memory.
REMEMBERED: Final = 4096

CLOCK: Final = count()  # of forwards and ends of backwards
_KEPT_BY: Final = attrgetter("kept_by")  # in C
_UNKNOWN: Final = InputGradMode.UNKNOWN


@dataclass(slots=True)
class Forward:
    """One forward of the outermost module.

    Attributes:
        module: the outermost one.
        with_gradients: autograd records it.
        goes_on: a step was under way when it began.
        number: when it began, on the clock of `CLOCK`.
        gathered: units whose gather was launched since it began, and that it has not entered since.
        entered: the units whose gather it has launched, as it has entered them.
        cursor: in `GatherOrder.recorded`; what follows there is gathered ahead.
        compared: units at which it has compared the ranks, for the first time.
    """

    module: nn.Module
    with_gradients: bool
    goes_on: bool
    number: int = field(default_factory=partial(next, CLOCK))
    gathered: dict[Unit, None] = field(default_factory=dict)
    entered: list[Unit] = field(default_factory=list)
    cursor: int = 0
    compared: list[Unit] = field(default_factory=list)


class GatherOrder:
    """See the top of this file.

    Attributes:
        units: of the root.
        agreed: what all ranks have alike about these units.
        recorded: `Agreed.recorded`. The next forward gathers ahead by it; a backward does by
            `Iteration.finished`.
        training: which units train, as of the last forward.
    """

    def __init__(self, units: Sequence[Unit], agreed: Agreed) -> None:
        self.units, self.agreed = units, agreed
        self.recorded = [units[index] for index in agreed.recorded]
        self.training: tuple[bool, ...] = ()
        # Numbers of forwards that began in training mode since a backward has landed, lost ones
        # too: in debug mode ranks compare how many there are.
        self._trained: deque[int] = deque(maxlen=REMEMBERED)

    # --- a forward -------------------------------------------------------------------------------

    def note_training(self) -> None:
        """A forward begins: look which units train now."""
        self.training = tuple([unit.trains for unit in self.units])

    def begin_training(self, forward: Forward) -> None:
        """A forward with gradients begins."""
        self.agreed.note_pattern(self.training)
        if forward.module.training:
            self._trained.append(forward.number)

    def pre_forward(self, unit: Unit, forward: Forward, inputs: object) -> None:
        """A forward enters `unit`.

        1. The cursor goes behind the unit in the recorded order.
        2. Ranks that enter the unit for the first time compare where they are. They also tell ranks
           that skip it how they compute it, if it is frozen: these have no inputs to go by.
        3. A forward with gradients notes how it is computed: backward may enter it. An evaluation
           says nothing of what backward will enter.
        4. The unit is gathered, and what follows ahead. If this forward has launched its gather,
           it is the next one in this forward's own order.

        Args:
            inputs: of the module; None if this rank does not compute it.
        """
        if unit.gathers:
            try:  # noqa: SIM105, `suppress` takes calls of Python
                forward.cursor = self.recorded.index(unit, forward.cursor) + 1
            except ValueError:
                pass  # it did not run there
        mode = _UNKNOWN if unit.trains or inputs is None else unit.input_grad_mode_of(inputs)
        if not (unit.compared or self._is_kept):
            mode = self._compare_place(unit.mesh_info.all, self.units.index(unit), mode)
            if mode is not _UNKNOWN or unit.trains:  # otherwise no rank has computed it
                forward.compared.append(unit)
        if mode is not _UNKNOWN and forward.with_gradients:
            self.agreed.note_mode(self.training, unit.relations.number, mode)
        self.gather(unit, islice(self.recorded, forward.cursor, None), forward)
        if unit in forward.gathered:
            del forward.gathered[unit]
            forward.entered.append(unit)

    def gather(self, unit: Unit, following: Iterable[Unit], forward: Forward | None) -> None:
        """Have `unit` unshard. Before waiting, launch the gathers of units ahead, which travel
        while it computes: of those that probably follow, the next `prefetch` ones over its ranks.

        Units over fewer ranks (experts) do not count, since not every rank enters them. One of them
        is gathered ahead as well if it is the very next unit, and otherwise none. A replicated unit
        next to shards, which only casts, is not gathered ahead, and gathers none ahead unless it is
        the root: some ranks may skip it.

        Args:
            forward: that is under way, maybe around a backward.
        """
        ahead = [unit]
        comm, missing, is_first = unit.mesh_info.all, unit.spec.prefetch, True
        if unit.kind is UnitKind.BESIDE and unit is not self.units[0]:
            missing = 0
        for other in following:
            if not missing:
                break
            if other.kind is UnitKind.BESIDE:
                continue
            if other.mesh_info.all is comm:
                missing -= 1
            elif not is_first or other.mesh_info.all.size >= comm.size:
                continue
            is_first = False
            if not other.step.calls:  # otherwise it computes, and must stay as it is
                ahead.append(other)
        for each in ahead:
            for group in each.groups:
                if group.unshard() and forward is not None:
                    forward.gathered[each] = None
        for group in unit.groups:
            group.wait_for_unshard()

    def input_grad_mode(self, unit: Unit) -> InputGradMode:
        """How ranks computed a frozen unit last, while these units trained."""
        return self.agreed.modes.get(self.training, {}).get(unit.relations.number, _UNKNOWN)

    def enters_frozen(self, unit: Unit) -> bool:
        """Whether backward enters a frozen unit, on all ranks: its inputs require gradients."""
        return self.input_grad_mode(unit) is InputGradMode.REQUIRED

    def learn(self, forward: Forward) -> list[Unit]:
        """A forward ends. Returns its own order, if it says something of the next ones.

        All ranks have run the same units, if they were compared: the first forward's order is that
        of the next ones. Later a backward that lands says it.
        """
        for comm in dict.fromkeys(unit.mesh_info.all for unit in forward.compared):
            self._compare_place(comm, len(self.units))
        for unit in forward.compared:
            unit.pass_comparison()
        if self._is_kept:
            return []
        if forward.entered and not self.recorded:
            self.follow(forward.entered)
        return forward.entered

    def follow(self, order: Sequence[Unit]) -> None:
        """From now on gather ahead in this order."""
        self.recorded = list(order)
        self.agreed.follow(tuple(map(self.units.index, order)))

    @property
    def _is_kept(self) -> bool:
        """Whether everything is gathered already, so that each rank may run what it likes."""
        return any(map(_KEPT_BY, self.units))

    # --- comparisons of ranks --------------------------------------------------------------------

    def _compare_place(
        self, comm: Comm, place: int, mode: InputGradMode = _UNKNOWN
    ) -> InputGradMode:
        """In the first forward: all ranks enter the unit with this index, or end, which is one more
        than the last. Returns the highest mode of a rank.
        """
        name = [*(unit.name for unit in self.units), self.units[0].name][place]
        (lowest, _), (highest, most) = comm.min_max(
            [place, mode], Launch(f"check of the order of units at unit '{name}'")
        )
        if lowest != highest:
            said = comm.all_gather_ints([place], Launch("exchange of the order of units"))
            does = [*(f"runs '{each.name}'" for each in self.units), "ends"]
            where = [f"rank {rank} {does[index]}" for rank, (index,) in enumerate(said)]
            raise RanksDisagreeError(
                f"the ranks run different units in the first forward: {', '.join(where)}. Every"
                " rank must run the same annotated modules in the same order. If data decides what"
                " runs, annotate a module around it"
            )
        return InputGradMode(most)

    def compare_forwards(self, history: Iterable[UnitCall]) -> None:
        """`replicate` launches at most broadcasts of buffers in forward: no comparison of launches
        tells that a rank has left a backward out. Ranks may run other numbers of forwards, if a
        backward comes to all.

        Args:
            history: see `Step.history`.
        """
        waiting = [call.number for call in history if call.outermost and call.waits]
        mine = [len(self._trained), len({*waiting} & {*self._trained})]
        replicas = [unit.mesh_info.all for unit in self.units if unit.kind is UnitKind.ARRIVAL]
        for comm in dict.fromkeys(replicas):
            said = comm.all_gather_ints(mine, COMPARISON_OF_FORWARDS)
            # a rank in evaluation mode counts none
            if any(left for _, left in said) and len({ran for ran, _ in said if ran}) > 1:
                ran = ", ".join(f"rank {rank} {ran}" for rank, (ran, _) in enumerate(said))
                raise RanksDisagreeError(
                    f"unit '{self.units[0].name}': before this backward the ranks ran other numbers"
                    f" of forwards in training mode, not all of them with a backward: {ran}. Every"
                    " rank must run the same backwards; forwards that are not trained on belong"
                    " under torch.no_grad() or in evaluation mode"
                )

    def end_backward(self, order: Sequence[Unit]) -> None:
        """A backward has landed.

        Args:
            order: of gathers in its last forward; empty if that says nothing.
        """
        self._trained.clear()
        self.agreed.end_backward(next(CLOCK))
        if order and order != self.recorded:
            self.follow(order)
