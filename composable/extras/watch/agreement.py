"""What must be equal on ranks, compared by digests.

| topic              | equal on                                                | compared         |
|--------------------|---------------------------------------------------------|------------------|
| parameter          | the replicas of a shard, or of a replicated parameter   | before the step  |
| buffer             | all ranks, unless the program writes to it              | before the step  |
| gathered parameter | all ranks of the shards: the rows that came from a rank | as a unit is     |
|                    | are those that it has                                   | entered          |
| gradient           | replicas, when it has landed                            | before the step  |
| hyper-parameter    | all ranks                                               | before the step  |

Each rank combines all digests of a topic into one number. If these numbers differ, the ranks send
each other the digests, and the first one that differs is named. Units with a communication hook are
left out, because their ranks may differ, and so are replicas that train apart under `local_steps`.
Of hyper-parameters, only plain values are compared, not functions or objects.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable.comm.backends import ranks_of
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.contract.tree import managed_buffers
from composable.errors import few
from composable.extras.watch.findings import Finding, hint
from composable.extras.watch.incident import by_index, generator_state, version_of
from composable.memory.digests import digests
from composable.memory.offload import wait_for_traffic
from composable.seams import Group, Param, Root, Unit, hooks_of
from composable.torch_private import local_tensor

_LAUNCH: Final = Launch("comparison of digests by watch")
_PARAMETER: Final = "parameter"
_BUFFER: Final = "buffer"
_GATHERED: Final = "gathered parameter"
_GRADIENT: Final = "gradient"
_OPTION: Final = "hyper-parameter"
# What is compared, and what a difference is called, in the order in which differences are reported.
_TOPICS: Final = {
    _PARAMETER: "a parameter is not that of the other replicas",
    _BUFFER: "a buffer is not that of the other ranks",
    _GATHERED: "gathered rows are not those of the rank that has them",
    _GRADIENT: "a reduced gradient is not that of the other replicas",
    _OPTION: "the optimizer has other hyper-parameters than those of the other ranks",
}
# Not compared between ranks: this rank's rows as they have arrived here. If they are not those that
# it has, it has sent others.
_SENT: Final = "sent"
_BEGUN: Final = "buffer, as the step began"  # not compared either: did a forward write to it
_FEW_NUMBERS: Final = 64  # of a hyper-parameter that are compared
_NONE: Final = -1  # in place of a gradient that is not there
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Named = list[tuple[str, Unit]]  # the units of a model, by their FQNs


class Key(NamedTuple):
    """What is compared: a tensor of a unit, of a gathered one the rows of one rank."""

    topic: str
    unit: str
    name: str
    owner: int = -1


_Table = dict[Key, Any]  # digests; of hyper-parameters the values


class Agreement:
    """The comparisons of one watch.

    Attributes:
        gathered: digests of what was gathered in the last step that was compared.
    """

    def __init__(self) -> None:
        self.gathered: _Table = {}
        self._agreed: dict[str, int] = {}  # by topic, the last step in which all ranks did
        self._own: set[Key] = set()  # buffers in which ranks may differ
        self._before: _Table = {}  # buffers, in the last comparison
        # the buffers of the last comparison, and their versions: has the program written to them
        self._versions: dict[Key, tuple[ref[Tensor], int]] = {}
        self._compared = False
        # of this step
        self._noted: list[tuple[Comm, list[Key], list[tuple[list[int], Tensor]]]] = []
        self._options: _Table = {}
        self._done: set[tuple[str, str]] = set()  # units that were gathered, and when
        self._begun = False  # a forward
        self._draws = 0  # the state of the generator that dropout draws from, or 0
        self._device = torch.device("cpu")  # of that generator

    # --- what is compared ------------------------------------------------------------------------

    def begin(self, named: Named, root: Root) -> None:
        """A forward begins; of a step the first one counts."""
        if self._begun:
            return
        self._begun = True
        for name, unit in named:
            self._note(unit.mesh_info.all, _buffers_of(_BEGUN, name, unit))
        below = (each for module in root.modules for each in module.modules())
        if any(isinstance(each, _DROPOUTS) and each.training and each.p > 0 for each in below):
            self._device = root.units[0].mesh_info.device
            self._draws = _checksum_of_generator(self._device)

    def note_gathered(self, unit: Unit, name: str, when: str) -> None:
        """A unit was gathered, `when` forward or backward needed it."""
        if (name, when) in self._done or not unit.is_unsharded:
            return
        self._done.add((name, when))
        for group in unit.groups:
            if group.takes_message and not group.extended and group.comm.size > 1:
                self._note(group.comm, _rows(group, name, when))

    def note_options(self, number: int, optimizer: Optimizer) -> None:
        """The hyper-parameters of an optimizer that is about to step; schedulers show in them.

        Values, and not the optimizer: when one that is not used any more is freed differs.
        """
        kind = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and (text := _text_of(value)) is not None:
                    key = Key(_OPTION, f"{kind} {number}", f"{name} of group {index}")
                    self._options[key] = text

    def _note_rest(self, named: Named) -> None:
        """Parameters, buffers and gradients, at the end of a step."""
        wait_for_traffic()
        for name, unit in named:
            if self._begun:
                buffers = _buffers_of(_BUFFER, name, unit)
                self._note(unit.mesh_info.all, [e for e in buffers if e[0] not in self._own])
            for group in unit.groups if not hooks_of(unit) else ():
                replicas = _replicas_of(unit, group)
                if replicas is None or replicas.size == 1:
                    continue
                rows = [
                    (Key(_PARAMETER, name, param.fqn), local_tensor(param.at_rest).detach())
                    for param in group.params
                ]
                if not unit.gradients.has_unreduced:  # of this rank, or of its replica
                    rows += [
                        (Key(_GRADIENT, name, param.fqn), _gradient(param))
                        for param in group.params
                    ]
                self._note(replicas, rows)

    @torch.no_grad()
    def _note(self, comm: Comm, rows: Iterable[tuple[Key, Tensor]]) -> None:
        pairs = [*rows]
        found = digests([tensor for _, tensor in pairs])
        self._noted.append((comm, [key for key, _ in pairs], list(found)))

    # --- the comparison --------------------------------------------------------------------------

    def compare(self, step: int, named: Named) -> list[Finding]:
        """The first difference among the ranks of each comm, and hints."""
        self._note_rest(named)
        # on all ranks the same comms in one order, also where a rank has skipped units
        comms = _comms_of([unit for _, unit in named])
        tables = self._read(comms)
        written = self._written_since(named)
        drew = self._draws != 0 and _checksum_of_generator(self._device) != self._draws
        self.gathered = {k: v for table in tables.values() for k, v in table[_GATHERED].items()}
        found: list[Finding] = []
        for comm, table in tables.items():
            hashes = [zlib.crc32(repr(sorted(table[topic].items())).encode()) for topic in _TOPICS]
            lowest, highest = comm.min_max([*hashes, self._draws if drew else 0], _LAUNCH)
            ranks = ranks_of(comm)
            for topic, low, high in zip(_TOPICS, lowest, highest, strict=False):
                finding = None
                if low != high:
                    mine = table[topic], table[_SENT], written
                    finding = self._difference(
                        step, topic, comm.all_gather_objects(mine, _LAUNCH), ranks
                    )
                if finding is None:
                    self._agreed[topic] = step
                else:
                    found.append(finding)
            same = drew and lowest[-1] == highest[-1] and comm.size > 1
            if same and comm is comms[0] and not self._compared:
                found.append(hint(step, ranks, _SAME_MASKS))
            self._before.update(table[_BUFFER])
        self._compared = True
        self.drop()
        return sorted(found, key=lambda each: (*_TOPICS, "").index(each.phase))

    def drop(self) -> None:
        """Forget what this step has noted."""
        self._noted, self._options, self._done = [], {}, set()
        self._begun, self._draws = False, 0

    def _read(self, comms: Sequence[Comm]) -> dict[Comm, dict[str, _Table]]:
        tables: dict[Comm, dict[str, _Table]] = {
            comm: {topic: {} for topic in (*_TOPICS, _SENT, _BEGUN)} for comm in comms
        }
        for comm, keys, numbers in self._noted:
            for index, number in by_index(numbers).items() if comm in tables else ():
                tables[comm][keys[index].topic][keys[index]] = number
        tables[comms[0]][_OPTION] = self._options
        # A forward wrote to buffers that have changed since. Version counters do not tell of a
        # batch norm, nor of a buffer that was replaced.
        for table in tables.values():
            buffers, begun = table[_BUFFER], table[_BEGUN]
            written = {k for k, v in buffers.items() if begun.get(k._replace(topic=_BEGUN)) != v}
            self._own |= written
            table[_BUFFER] = {k: v for k, v in buffers.items() if k not in written}
        return tables

    def _written_since(self, named: Named) -> list[Key]:
        """Buffers that the program has written to, or replaced, since the last comparison.

        With all others of their modules: a batch norm counts its writes in one of them only.
        """
        before, self._versions = self._versions, {}
        written = set()
        for key, tensor in (e for name, unit in named for e in _buffers_of(_BUFFER, name, unit)):
            known, version = before.get(key, (None, 0))
            self._versions[key] = ref(tensor), version_of(tensor)
            if known is not None and (known() is not tensor or version != version_of(tensor)):
                written.add(_module_of(key))
        return [key for key in self._versions if _module_of(key) in written]

    def _difference(
        self,
        step: int,
        topic: str,
        tables: Sequence[tuple[dict[Key, Any], dict[Key, Any], list[Key]]],
        ranks: Sequence[int],
    ) -> Finding | None:
        said, sent, written = zip(*tables, strict=True)
        keys = dict.fromkeys(key for table in said for key in table)
        # a rank that has skipped a unit has nothing of it
        differs = [key for key in keys if len({table[key] for table in said if key in table}) > 1]
        if topic == _BUFFER:
            # Ranks that write to a buffer in forwards have left it out. What differs in its first
            # comparison is so because a user made it so, and what a rank has written to between two
            # steps, in an evaluation or by hand, is its own.
            self._own.update(key for key in keys if any(key not in table for table in said))
            own = {key for some in written for key in some}
            self._own.update(key for key in differs if key in own or key not in self._before)
            differs = [key for key in differs if key not in self._own]
        if not differs:
            return None
        key = differs[0]
        there = [index for index, table in enumerate(said) if key in table]
        values = {ranks[index]: said[index][key] for index in there}
        owner = ranks[key.owner] if key.owner >= 0 else -1
        before = self._before.get(key)
        right = values[owner] if owner in values else _right([*values.values()], before)
        wrong = [rank for rank, value in values.items() if value != right]
        if owner in values and sent[key.owner].get(key._replace(topic=_SENT), right) != right:
            wrong = [owner]
        last = f"; the ranks agreed in step {self._agreed[topic]}" if topic in self._agreed else ""
        lines = [("since", f"step {step}{last}")]
        if topic == _OPTION:
            lines.append(("values", few([f"rank {n}: {value}" for n, value in values.items()])))
        if owner >= 0:
            lines.append(("rows of", f"rank {owner}"))
        if right is None:
            lines.append(("rank", "one of these; which one is not known"))
        if len(differs) > 1:
            lines.append(("also", few([f"{each.unit} {each.name}" for each in differs[1:]])))
        return Finding(
            "ranks differ", step, tuple(wrong), key.unit, topic, key.name, _TOPICS[topic],
            tuple(lines),
        )  # fmt: skip


def _right(values: Sequence[Any], before: Any) -> Any:
    """What was there before, or most ranks have; None if it is not known."""
    if before in values:
        return before
    (common, most), *rest = Counter(values).most_common()
    return common if not rest or rest[0][1] < most else None


def _checksum_of_generator(device: torch.device) -> int:
    return 1 + zlib.crc32(generator_state(device).numpy().tobytes())


def _text_of(value: Any) -> str | None:
    """A plain value in words that are equal on ranks where it is; None for all other values.

    Functions and objects are identified by their addresses, and may hold the optimizer itself.
    """
    if type(value) is Tensor and value.numel() <= _FEW_NUMBERS and not value.is_meta:
        return repr(value.tolist())
    if isinstance(value, (list, tuple)):
        parts = [_text_of(each) for each in value[:_FEW_NUMBERS]]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, float):
        return repr(float(value))  # subclasses, such as NumPy's, have words of their own
    if isinstance(value, torch.device):
        return value.type  # each rank has an index of its own
    plain = (type(None), bool, int, complex, str, torch.dtype, Enum)
    return repr(value) if isinstance(value, plain) else None


def _replicas_of(unit: Unit, group: Group) -> Comm | None:
    """The ranks over which gradients of `group` are means now: `local_steps` ends that."""
    return (group.params[0].own_mesh_info or unit.mesh_info).replicate


_SAME_MASKS: Final = (
    "dropout draws from generators that are in the same state on all ranks, so that all drop the"
    " same places. Seed each rank differently after the model is made:"
    " torch.manual_seed(seed + rank)"
)


def _rows(group: Group, unit: str, when: str) -> Iterator[tuple[Key, Tensor]]:
    """The rows of each rank in gathered parameters; in place of this rank's those at rest."""
    for param, slot in zip(group.params, group.slots, strict=True):
        if not slot.is_cut:
            continue
        name, whole = f"{param.fqn} ({when})", local_tensor(param.compute).detach()
        for owner in range(group.comm.size):
            start, length = slot.extent(owner)
            part = whole.narrow(slot.cut_dim, start, length)
            if owner == group.comm.rank:
                yield Key(_SENT, unit, name, owner), part
                mine = local_tensor(param.at_rest).detach()
                part = mine.to(part.device, part.dtype).reshape(part.shape)
            yield Key(_GATHERED, unit, name, owner), part


def _buffers_of(topic: str, name: str, unit: Unit) -> list[tuple[Key, Tensor]]:
    return [(Key(topic, name, each.fqn), each.tensor) for each in managed_buffers(unit.modules)]


def _module_of(buffer: Key) -> tuple[str, str]:
    return buffer.unit, buffer.name.rpartition(".")[0]


def _gradient(param: Param) -> Tensor:
    gradient = param.at_rest.grad
    if gradient is None:
        return torch.full((1,), _NONE, device=local_tensor(param.at_rest).device)
    return local_tensor(gradient.to_dense() if gradient.is_sparse else gradient).detach()


def _comms_of(units: Sequence[Unit]) -> list[Comm]:
    """All that units are compared over; first all ranks that the first one was annotated for."""
    found: dict[Comm, None] = {units[0].spec.mesh_info.all: None}
    for unit in units:
        found[unit.mesh_info.all] = None
        for group in unit.groups:
            found[group.comm] = None
            if (replicas := _replicas_of(unit, group)) is not None:
                found[replicas] = None
    return list(found)
