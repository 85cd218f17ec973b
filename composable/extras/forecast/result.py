"""The result of a forecast, as a table, as a dict, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from composable.extras.forecast.devices import Device, amount, milliseconds
from composable.extras.forecast.machine import KINDS, MemoryKind, Span

NOT_KNOWN: Final = (
    "not in it: the driver's and the communicators' own memory. Not counted above: kernels'"
    " workspaces, and holes between the allocator's blocks; at most that much was measured"
)


@dataclass(frozen=True)
class Subject:
    """What a forecast is of.

    Attributes:
        model: the name of its class.
        parameters: how many there are of each dtype, most first; tied ones count once.
        trained: how many of them are.
        optimizer: the name of its class; None: there is none.
        state: numbers in the optimizer's state, by dtype, without counters of steps.
        batch: names, which may be empty, and shapes of one rank's tensors.

    Example:
        >>> found = forecast(make_model, annotate, make_batch, ranks=8)
        >>> print(found.subject.model, found.subject.parameters)
    """

    model: str
    parameters: Mapping[str, int]
    trained: int
    optimizer: str | None
    state: Mapping[str, int]
    batch: tuple[tuple[str, tuple[int, ...]], ...]

    def __str__(self) -> str:
        count = sum(self.parameters.values())
        parts = [f"{self.model}, {_number(count)} parameters{_in(self.parameters)}"]
        if self.trained < count:
            parts[0] += f" ({_number(self.trained)} trained)"
        state = f" with state{_in(self.state)}" if self.state else ""
        parts.append("no optimizer" if self.optimizer is None else f"{self.optimizer}{state}")
        names: dict[tuple[int, ...], list[str]] = {}
        for name, shape in self.batch:
            names.setdefault(shape, []).append(name)
        shapes = [
            f"{', '.join(filter(None, each))} {' x '.join(map(str, shape))}".strip()
            for shape, each in names.items()
        ]
        return f"{', '.join(parts)}; a rank's batch: {'; '.join(shapes) or 'no tensors'}"


@dataclass(frozen=True)
class Collective:
    """Messages of one kind in one step, in sum.

    Attributes:
        kind: "all-gather", "reduce-scatter" or "all-reduce"; "send" or "receive", between two
            ranks.
        unit: whose, or in which the program launches them.
        dimension: of the mesh that they run over; empty for all ranks and for other groups.
        ranks: how many take part.
        count: messages.
        nbytes: in sum, of what is gathered, reduced or sent, as a whole.

    Example:
        >>> found = forecast(make_model, annotate, make_batch, ranks=8)
        >>> for messages in found.collectives:
        ...     print(messages.unit, messages.kind, messages.count, messages.nbytes)
    """

    kind: str
    unit: str
    dimension: str
    ranks: int
    count: int
    nbytes: int


@dataclass(frozen=True)
class Forecast:
    """One rank's step, as `forecast` found it.

    Attributes:
        subject: the model, the optimizer and the batch.
        device: on which it would run.
        mesh: names and sizes of the dimensions.
        peak: bytes at the peak of the step.
        at_peak: of them, by what they are for.
        where: the phase and the unit in which the peak is.
        on_host: bytes at most of the host's memory that `offload_activations` copies to.
        at_rest: bytes between steps, without gradients, by what they are for.
        seconds: of the step. Of them:
        computing: seconds in which the device computes;
        communicating: seconds in which messages move;
        exposed: seconds in which the device waits for messages.
        host: seconds that the host takes to launch everything.
        collectives: of one step, by unit and kind.
        memory: moments, in seconds from the beginning of the step, and bytes by kind.
        streams: what ran when, on which stream.

    Example:
        >>> found = forecast(make_model, annotate, make_batch, ranks=8)
        >>> print(found.peak / 2**30, "GiB", found.seconds, "s")
    """

    subject: Subject
    device: Device
    mesh: Mapping[str, int]
    peak: int
    at_peak: Mapping[str, int]
    where: str
    on_host: int
    at_rest: Mapping[str, int]
    seconds: float
    computing: float
    communicating: float
    exposed: float
    host: float
    collectives: tuple[Collective, ...]
    memory: tuple[tuple[float, tuple[int, ...]], ...] = field(repr=False)
    streams: tuple[Span, ...] = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the peak and the device's margin are below its memory."""
        return self.peak <= self.device.usable

    @property
    def place(self) -> str:
        """The device and the mesh, e.g. "H100, 8 replicate x 8 shard"."""
        sizes = " x ".join(f"{size} {name}" for name, size in self.mesh.items())
        return f"{self.device.name}, {sizes}"

    @property
    def messages(self) -> int:
        """How many there are in one step."""
        return sum(each.count for each in self.collectives)

    def __str__(self) -> str:
        def ms(seconds: float) -> str:
            return f"{milliseconds(seconds, self.seconds)} ms"

        capacity = amount(self.device.capacity)
        beyond = int(self.peak * self.device.margin)
        rows = [
            ("peak of memory", amount(self.peak), f"of {capacity}; {self.where}"),
            *((f"  {name}", amount(size), "") for name, size in self.at_peak.items() if size),
            ("  not counted", amount(beyond), "at most, beyond it"),
            *([("offloaded to the host", amount(self.on_host), "")] if self.on_host else []),
            ("at rest", amount(sum(self.at_rest.values())), "between steps, without gradients"),
            ("step", ms(self.seconds), ""),
            ("  computing", ms(self.computing), ""),
            ("  waiting for messages", ms(self.exposed), f"of {ms(self.communicating)}"),
            ("  launching, on the host", ms(self.host), ""),
        ]
        for each in self.collectives_by_kind():
            over = f", {each.dimension}" if len(self.mesh) > 1 and each.dimension else ""
            name = f"{each.kind} of {each.ranks} ranks{over}"
            rows.append((name, amount(each.nbytes), f"{each.count} messages"))
        verdict = "fits" if self.fits else "DOES NOT FIT"
        head = [str(self.subject), f"{self.place}: {verdict}"]
        return "\n".join([*head, *aligned(rows), f"({NOT_KNOWN})"])

    def collectives_by_kind(self) -> list[Collective]:
        """As `collectives`, added up over the units."""
        found: dict[tuple[str, str, int], Collective] = {}
        for each in self.collectives:
            key = each.kind, each.dimension, each.ranks
            known = found.get(key) or Collective(each.kind, "", each.dimension, each.ranks, 0, 0)
            found[key] = replace(
                known, count=known.count + each.count, nbytes=known.nbytes + each.nbytes
            )
        return [*found.values()]

    def to_dict(self) -> dict[str, Any]:
        """All but the samples of memory and streams, for `json`."""
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        return {
            **kept,
            "subject": asdict(self.subject),
            "device": self.device.name,
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "margin": self.device.margin,
            "collectives": [asdict(each) for each in self.collectives],
        }

    def plot(self, path: str | Path) -> None:
        """Draw memory over the step, by what it is for, and below it what each stream does.

        Raises:
            ModuleNotFoundError: matplotlib is not there (`pip install 'torch-composable[demo]'`).
        """
        # matplotlib is an extra
        import_module("composable.extras.forecast.picture").draw(Path(path), self)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; all columns but the first and the last hold numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]
        ).rstrip()
        for row in rows
    ]


def by_name(totals: Sequence[int]) -> dict[str, int]:
    return {KINDS[kind]: totals[kind] for kind in MemoryKind}


def _in(numbers: Mapping[str, int]) -> str:
    return f" in {' and '.join(numbers)}" if numbers else ""


def _number(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:,}"
