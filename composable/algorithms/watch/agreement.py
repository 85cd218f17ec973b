"""What must be equal on ranks, compared by digests.

| topic              | equal on                                                | compared         |
|--------------------|---------------------------------------------------------|------------------|
| parameter          | the replicas of a shard, or of a replicated parameter   | before the step  |
| buffer             | all ranks, unless a forward writes to it                | before the step  |
| gathered parameter | all ranks of the shards: the rows that came from a rank | as a unit is     |
|                    | are those that it has                                   | entered          |
| gradient           | replicas, when it has landed                            | before the step  |
| hyper-parameter    | all ranks                                               | before the step  |

Each rank makes one number of all digests of a topic. If these differ, the ranks send each other the
digests, and the first that differs is named. Units with a communication hook are left out: hooks
may let replicas train apart.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable.algorithms.watch.findings import Finding
from composable.api.sync_module_states import digests
from composable.comm import Comm
from composable.engine.params.layout import Route
from composable.engine.step.unit import Unit, units_below
from composable.errors import few
from composable.features.hook_stages import hooks_of
from composable.memory.offload import wait_for_traffic
from composable.memory.torch_private import local_tensor

_LABEL: Final = "comparison of digests by watch"
TOPICS: Final = ("parameter", "buffer", "gathered parameter", "gradient", "hyper-parameter")
_GATHERED: Final = TOPICS[2]
# Not compared between ranks: this rank's rows as they have arrived here. If they are not those that
# it has, it has sent others.
_SENT: Final = "sent"
_BEGUN: Final = "buffer, as the step began"  # not compared either: did a forward write to it
_NONE: Final = -1  # in place of the digest of a gradient that is not there


class Key(NamedTuple):
    """What is compared: a tensor of a unit, of a gathered one the rows of one rank."""

    topic: str
    unit: str
    name: str
    owner: int = -1


class _Noted(NamedTuple):
    comm: Comm
    keys: list[Key]
    numbers: Tensor


class Agreement:
    """The comparisons of one watch.

    Attributes:
        agreed: by topic, the last step in which all ranks had the same.
        last: digests of what was gathered in forward, by unit, parameter and owner.
        draws: the state of the generator that dropout draws from; 0 if that is not compared.
    """

    def __init__(self) -> None:
        self.agreed: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._noted: list[_Noted] = []
        self._options: dict[Key, str] = {}
        self._own: set[Key] = set()  # buffers in which ranks may differ
        self._begun = False  # a forward of this step
        self._before: dict[Key, int] = {}  # digests of buffers in the last comparison
        self._compared = False
        self.draws = 0
        self._gathered: set[tuple[str, str]] = set()

    # --- what is compared ------------------------------------------------------------------------

    def _note(self, comm: Comm, named: Sequence[tuple[Key, Tensor]]) -> None:
        tensors = [tensor for _, tensor in named]
        with torch.no_grad():
            for indices, numbers in digests(tensors):
                self._noted.append(_Noted(comm, [named[index][0] for index in indices], numbers))

    def note_gathered(self, unit: Unit, name: str, when: str) -> None:
        """A unit was gathered, `when` forward or backward needed it."""
        if (name, when) in self._gathered or not unit.is_unsharded:
            return
        self._gathered.add((name, when))
        for group in unit.groups:
            comm = group.comm
            if group.extended or not group.takes_message or comm.size == 1:
                continue
            named: list[tuple[Key, Tensor]] = []
            for param, slot in zip(group.params, group.slots, strict=True):
                if slot.route is Route.WHOLE:
                    continue
                whole, mine = local_tensor(param.compute), local_tensor(param.at_rest)
                for owner in range(comm.size):
                    start, length = slot.extent(owner)
                    part = whole.detach().narrow(slot.cut_dim, start, length)
                    if owner == comm.rank:
                        named.append((Key(_SENT, name, f"{param.fqn} ({when})", owner), part))
                        part = mine.detach().to(part.device, part.dtype).reshape(part.shape)
                    key = Key(_GATHERED, name, f"{param.fqn} ({when})", owner)
                    named.append((key, part))
            self._note(comm, named)

    def begin(self, places: Iterable[tuple[Unit, str]]) -> None:
        """A forward begins."""
        if not self._begun:
            self._begun = True
            for unit, name in places:
                buffers = _buffers_of(unit, name)
                begun = [(key._replace(topic=_BEGUN), buffer) for key, buffer in buffers]
                self._note(unit.mesh_info.all, begun)

    def note_rest(self, places: Iterable[tuple[Unit, str]]) -> None:
        """Parameters, buffers and gradients, at the end of a step."""
        wait_for_traffic()
        for unit, name in places:
            if self._begun:
                buffers = [each for each in _buffers_of(unit, name) if each[0] not in self._own]
                self._note(unit.mesh_info.all, buffers)
            if hooks_of(unit.gradients):
                continue
            for group in unit.groups:
                replicas = group.mesh_info.replicate
                if replicas is None or replicas.size == 1:
                    continue
                at_rest = [
                    (Key(TOPICS[0], name, param.fqn), local_tensor(param.at_rest).detach())
                    for param in group.params
                ]
                gradients = [
                    (Key(TOPICS[3], name, param.fqn), _gradient(param.at_rest))
                    for param in group.params
                    if not unit.gradients.has_unreduced  # of this rank, or of its replica
                ]
                self._note(replicas, [*at_rest, *gradients])

    def note_draws(self, device: torch.device) -> None:
        """Forward begins, and a module drops places; once."""
        if not self._compared:
            on_host = device.type == "cpu"
            state = (
                torch.get_rng_state()
                if on_host
                else torch.get_device_module(device).get_rng_state(device)
            )
            self.draws = 1 + zlib.crc32(bytes(state.tolist()))

    def note_options(self, number: int, optimizer: Optimizer) -> None:
        """The hyper-parameters of an optimizer that is about to step; schedulers show in them.

        Values, and not the optimizer: when one that is not used any more is freed differs.
        """
        kind = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    key = Key(TOPICS[4], f"{kind} {number}", f"{name} of group {index}")
                    self._options[key] = _plain(value)

    # --- the comparison --------------------------------------------------------------------------

    def compare(self, step: int, comms: Sequence[Comm]) -> list[Finding]:
        """The first difference among the ranks of each of `comms`, and hints."""
        tables = self._read(comms)
        self.last = {
            f"{key.unit} {key.name.partition(' (')[0]} {key.owner}": number
            for table in tables.values()
            for key, number in table[_GATHERED].items()
            if key.owner >= 0 and key.name.endswith("(in forward)")
        }
        self._leave_out_written(tables)
        found: list[Finding] = []
        for comm, table in tables.items():
            hashes = [zlib.crc32(repr(sorted(table[topic].items())).encode()) for topic in TOPICS]
            lowest, highest = comm.min_max([*hashes, self.draws], _LABEL)
            ranks = _ranks_of(comm)
            for topic, low, high in zip(TOPICS, lowest, highest, strict=False):
                finding = None
                if low != high:
                    said = comm.all_gather_objects((table[topic], table[_SENT]), _LABEL)
                    finding = self._difference(step, topic, said, ranks)
                if finding is None:
                    self.agreed[topic] = step
                else:
                    found.append(finding)
            self._before.update(table["buffer"])
            if self.draws and comm is comms[0] and comm.size > 1 and lowest[-1] == highest[-1]:
                found.append(_same_masks(step, ranks))
        self._compared = True
        self.drop()
        return sorted(found, key=lambda each: (*TOPICS, "").index(each.phase))

    def drop(self) -> None:
        """Forget what this step has noted."""
        self._noted, self._options, self._gathered = [], {}, set()
        self._begun, self.draws = False, 0

    def _leave_out_written(self, tables: Mapping[Comm, dict[str, dict[Key, Any]]]) -> None:
        """Leave out buffers that have changed since the step began.

        Version counters do not tell of a batch norm, nor of a buffer that was replaced.
        """
        for table in tables.values():
            buffers, begun = table["buffer"], table[_BEGUN]
            for key in [*buffers]:
                if begun.get(key._replace(topic=_BEGUN)) != buffers[key]:
                    self._own.add(key)
                    del buffers[key]

    def _read(self, comms: Sequence[Comm]) -> dict[Comm, dict[str, dict[Key, Any]]]:
        # on all ranks the same comms in one order, also where a rank has skipped units
        tables: dict[Comm, dict[str, dict[Key, Any]]] = {
            comm: {topic: {} for topic in (*TOPICS, _SENT, _BEGUN)} for comm in comms
        }
        for comm, keys, values in self._noted:
            for key, value in zip(keys, values.tolist(), strict=True):
                tables[comm][key.topic].setdefault(key, value)
        tables[comms[0]]["hyper-parameter"] |= self._options
        return tables

    def _difference(
        self,
        step: int,
        topic: str,
        told: Sequence[tuple[dict[Key, Any], dict[Key, Any]]],
        ranks: Sequence[int],
    ) -> Finding | None:
        said, sent = zip(*told, strict=True)
        keys = dict.fromkeys(key for table in said for key in table)
        # a rank that has skipped a unit has nothing of it
        differs = [key for key in keys if len({table[key] for table in said if key in table}) > 1]
        if topic == "buffer":
            # Ranks that write to a buffer in forwards have left it out. What differs in its first
            # comparison is so because a user made it so.
            self._own.update(key for key in keys if any(key not in table for table in said))
            self._own.update(key for key in differs if key not in self._before)
            differs = [key for key in differs if key not in self._own]
        if not differs:
            return None
        key = differs[0]
        there = [index for index, table in enumerate(said) if key in table]
        values = {ranks[index]: said[index][key] for index in there}
        owner = ranks[key.owner] if key.owner >= 0 else None
        wrong, known = _who(values, owner, self._before.get(key))
        if owner is not None and owner in values:
            arrived = sent[key.owner].get(key._replace(topic=_SENT), values[owner])
            wrong = [owner] if arrived != values[owner] else wrong
        last = f"; the ranks agreed in step {self.agreed[topic]}" if topic in self.agreed else ""
        lines = [("since", f"step {step}{last}")]
        if topic == "hyper-parameter":
            lines.append(("values", few([f"rank {n}: {value}" for n, value in values.items()])))
        if owner is not None:
            lines.append(("rows of", f"rank {owner}"))
        if not known:
            lines.append(("rank", "one of these; which one cannot be told"))
        if len(differs) > 1:
            lines.append(("also", few([f"{each.unit} {each.name}" for each in differs[1:]])))
        return Finding(
            "ranks differ", step, tuple(wrong), key.unit, topic, key.name, _WHAT[topic],
            tuple(lines),
        )  # fmt: skip


_WHAT: Final = {
    "parameter": "a parameter is not that of the other replicas",
    "buffer": "a buffer is not that of the other ranks",
    "gathered parameter": "gathered rows are not those of the rank that has them",
    "gradient": "a reduced gradient is not that of the other replicas",
    "hyper-parameter": "the optimizer has other hyper-parameters than those of the other ranks",
}


def _who(values: Mapping[int, Any], owner: int | None, before: Any) -> tuple[list[int], bool]:
    """The ranks that are wrong, and whether that is known."""
    if owner is not None and owner in values:
        wrong = [rank for rank, value in values.items() if value != values[owner]]
        return wrong, True
    counts = Counter(values.values())
    right = before if before in counts else None
    (common, most), *rest = counts.most_common()
    if right is None and (not rest or rest[0][1] < most):
        right = common
    if right is None:
        return list(values), False
    return [rank for rank, value in values.items() if value != right], True


def _ranks_of(comm: Comm) -> list[int]:
    return [0] if comm.group is None else dist.get_process_group_ranks(comm.group)


def _same_masks(step: int, ranks: Sequence[int]) -> Finding:
    return Finding(
        "hint", step, tuple(ranks), "", "", "",
        "dropout draws from generators that are in the same state on all ranks, so that all drop"
        " the same places. Seed each rank differently after the model is made:"
        " torch.manual_seed(seed + rank)",
    )  # fmt: skip


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.full((1,), _NONE, device=local_tensor(parameter).device)
    return local_tensor(gradient.to_dense() if gradient.is_sparse else gradient).detach()


def _buffers_of(unit: Unit, name: str) -> list[tuple[Key, Tensor]]:
    """The buffers in modules of a unit, and not in those of units inside."""
    inside = [each for each in units_below(unit.modules) if each is not unit]
    seen = {id(module) for each in inside for module in each.modules}
    found: dict[int, tuple[Key, Tensor]] = {}
    for outer in unit.modules:
        pending: list[tuple[str, nn.Module]] = [("", outer)]
        while pending:
            prefix, module = pending.pop()
            seen.add(id(module))  # a child may have its parent as a child
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.numel():
                    found.setdefault(id(buffer), (Key("buffer", name, prefix + key), buffer))
            pending += [
                (f"{prefix}{key}.", child)
                for key, child in module._modules.items()
                if child is not None and id(child) not in seen
            ]
    return list(found.values())


def comms_of(units: Iterable[Unit]) -> list[Comm]:
    """All that units are compared over, that of the first one first."""
    found: dict[Comm, None] = {}
    for unit in units:
        found[unit.mesh_info.all] = None
        for group in unit.groups:
            found[group.comm] = None
            if group.mesh_info.replicate is not None:
                found[group.mesh_info.replicate] = None
    return list(found)


def _plain(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    return repr(value)
