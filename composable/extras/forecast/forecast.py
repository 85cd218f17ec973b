"""Simulates a few training steps of one rank, and reports their memory, messages and time."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composable.checked import PositiveInt, Takes, checked
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm
from composable.contract.contract import registry
from composable.errors import ForecastError
from composable.extras.forecast.devices import Device, amount, device_of, milliseconds
from composable.extras.forecast.machine import (
    COMPUTE,
    KINDS,
    Functions,
    Machine,
    MemoryKind,
    NoValues,
    Span,
    VirtualComm,
    VirtualLocalComm,
    form_group,
    note_unknown,
    tensors_in,
)
from composable.memory.elastic import resizing_buffers
from composable.seams import Stepping, give_memory, offloading_from_host, units_in
from composable.torch_private import (
    FSDP2Module,
    constructed_by,
    excepthook_kept,
    foreach_on,
    forget_meshes,
    local_tensor,
)

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


Loss = Callable[[nn.Module, Any], Tensor]
MakeModel = Annotated[
    Callable[[], nn.Module],
    Takes("a function that makes the model (such as lambda: Model(config))"),
]
MakeOptimizer = Annotated[
    Callable[..., Optimizer],
    Takes("what makes an optimizer of parameters (such as torch.optim.AdamW)"),
]


def are_sizes(mesh: Mapping[str, Any]) -> bool:
    """Whether these are sizes of dimensions."""
    return bool(mesh) and all(isinstance(size, int) and size >= 1 for size in mesh.values())


Sizes = Annotated[
    Mapping[str, int],
    Takes(
        'names of dimensions with their sizes (such as {"replicate": 4, "shard": 16})', are_sizes
    ),
]

NOT_SEEN: Final = (
    "whose messages and streams are not seen here. Annotate by composable's fully_shard or"
    " replicate, or by composable.fsdp2"
)
PACE: Final = 5.0  # seconds between two words of progress


@checked
def forecast(
    make_model: MakeModel,
    annotate: Callable[..., object],
    make_batch: Callable[[], Any],
    *,
    ranks: PositiveInt,
    mesh: Sizes | None = None,
    device: str | Device = "h100",
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    steps: PositiveInt = 2,
    progress: Callable[[str], object] | None = None,
) -> Forecast:
    """Predict memory, messages and time of one rank's step, without the devices.

    The program runs unchanged, as rank 0 of `ranks`, on a simulated device. The forecast computes
    nothing and allocates no memory for tensors. It shows on a laptop where a device would run out
    of memory, and what it waits for.

    Args:
        make_model: makes the model. Its parameters are on the meta device, whichever device the
            function names.
        annotate: annotates the model as your program does: `fully_shard`, `replicate`,
            `checkpoint`. It gets the model, and also the mesh if it takes two arguments.
        make_batch: one rank's input of one step. A dict is passed to the model by name, a tuple by
            position.
        ranks: the number of ranks of the world.
        mesh: names and sizes of the dimensions of the mesh, e.g. `{"replicate": 4, "shard": 16}`.
            None: one dimension over all ranks.
        device: a name in `DEVICES`, or a `Device`.
        optimizer: makes the optimizer of the parameters. None forecasts only forward and backward.
            The optimizer's state has the dtype of the parameters, unless the optimizer sets
            another.
        loss: returns a scalar from the model and a batch. None: `.loss` of the model's output, or
            otherwise the sum of its first tensor.
        steps: the number of steps to run. The first records orders, and the last one counts.
        progress: called every few seconds with what runs.

    Raises:
        ForecastError: the program reads a value of a tensor (the message names the module); it
            annotates with torch's FSDP or DDP; or a process group already exists.
        ValueError: an argument is not valid.

    Example:
        >>> print(
        ...     forecast(
        ...         lambda: Llama(config),
        ...         lambda model: fully_shard(model, policy={Block}),
        ...         lambda: torch.zeros(1, 4096, dtype=torch.int64),
        ...         ranks=64,
        ...     )
        ... )

    The idea is that of `torch.distributed._tools` (memory and run-time estimation over fake
    tensors), with the library's own streams and messages.
    """
    sizes = _sizes_of(mesh, ranks)
    machine = Machine(device_of(device), progress and paced(progress, steps))

    def run(model: nn.Module, batch: Any) -> Tensor:
        value = (loss or _loss)(model, batch)
        machine.at(phase="backward")
        value.backward()
        return value

    with running(machine, make_model, annotate, sizes) as model:
        return train(machine, model, sizes, make_batch(), optimizer, run, steps)


@contextmanager
def running(
    machine: Machine,
    make_model: Callable[[], nn.Module],
    annotate: Callable[..., object],
    sizes: Mapping[str, int],
    rank: int = 0,
) -> Iterator[nn.Module]:
    """Inside, there is the annotated model of a rank, and operations run on the machine.

    Args:
        sizes: of the dimensions of the mesh, by name.
    """
    with _world(machine, prod(sizes.values()), rank), ExitStack() as stack:
        stack.enter_context(_simulated(machine))
        if machine.device.accelerator:
            stack.enter_context(offloading_from_host(machine))
        model = _annotated(make_model, annotate, sizes)
        if machine.device.accelerator:
            _refuse_offloaded_shards(model)
        values = NoValues(machine, model)
        stack.enter_context(values)
        stack.enter_context(Functions(values))
        give_memory(model, torch.device("cpu"))
        note_unknown(*map(local_tensor, (*model.parameters(), *model.buffers())))
        stack.enter_context(_places(machine, model))
        yield model


@contextmanager
def simulated_model(
    make_model: Callable[[], nn.Module],
    annotate: Callable[..., object],
    *,
    ranks: int,
    mesh: Mapping[str, int] | None = None,
) -> Iterator[nn.Module]:
    """Inside, there is the model as rank 0 of `ranks` hosts has annotated it, on the meta device.

    Args:
        make_model, annotate, ranks, mesh: as of `forecast`.
    """
    machine, sizes = Machine(device_of("cpu")), _sizes_of(mesh, ranks)
    with _world(machine, ranks), _simulated(machine):
        yield _annotated(make_model, annotate, sizes)


def _annotated(
    make_model: Callable[[], nn.Module], annotate: Callable[..., object], sizes: Mapping[str, int]
) -> nn.Module:
    model = _made(make_model)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    annotated = annotate(model, mesh) if takes_mesh(annotate) else annotate(model)
    if isinstance(annotated, nn.Module):
        model = annotated
    _refuse_torchs_shards(model)
    return model


def takes_mesh(annotate: Callable[..., object]) -> bool:
    """Whether it must have a second argument; verbs have one that may be left out."""
    parameters = list(inspect.signature(annotate).parameters.values())
    return len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty


def _sizes_of(mesh: Mapping[str, int] | None, ranks: int) -> dict[str, int]:
    """The dimensions of the mesh."""
    sizes = {"ranks": ranks} if mesh is None else dict(mesh)
    if (product := prod(sizes.values())) != ranks:
        raise ValueError(f"forecast: mesh={sizes} has {product} ranks, not ranks={ranks}")
    return sizes


def paced(progress: Callable[[str], object], steps: int) -> Callable[[Machine], None]:
    """What the machine calls at every operation: tells `progress` now and then where it is."""
    last = perf_counter()

    def report(machine: Machine) -> None:
        nonlocal last
        if (now := perf_counter()) - last >= PACE:
            last = now
            progress(f"step {machine.step} of {steps}, {machine.place}")

    return report


@contextmanager
def _world(machine: Machine, ranks: int, rank: int = 0) -> Iterator[None]:
    if dist.is_initialized():
        raise ForecastError(
            "forecast: this process has a process group already. A forecast makes a pretended one:"
            " call it before init_process_group(), or in a process of its own (python -m composable"
            " forecast)"
        )
    with excepthook_kept():
        form_group(machine, ranks, rank)
        try:
            yield
        finally:
            gc.collect()  # what holds the group
            forget_meshes()
            dist.destroy_process_group()


@contextmanager
def _simulated(machine: Machine) -> Iterator[None]:
    """The library as it is on the device: messages laid out for it, over the machine's clocks."""
    alone = cache(VirtualLocalComm)
    on_group = cache(partial(VirtualComm, machine=machine))

    def virtual(comm: Comm) -> Comm:
        return alone(comm.device) if comm.group is None else on_group(comm.group)

    with (
        comms_wrapped_by(virtual),
        resizing_buffers(machine.release_idle),
        foreach_on("cpu" if machine.device.accelerator else "cuda"),
        constructed_by(_refuse_torchs, DistributedDataParallel),
        constructed_by(_refuse_torchs, FullyShardedDataParallel),
    ):
        yield


def _refuse_torchs(module: nn.Module, *_: object, **__: object) -> NoReturn:
    """Instead of the constructors of torch's wrappers, and of what is built upon them."""
    raise ForecastError(f"forecast: annotate() calls torch's {type(module).__name__}, {NOT_SEEN}")


def _refuse_matrices(optimizer: Optimizer) -> None:
    stepping = Stepping.of(optimizer)
    if stepping is not None and stepping.keeps_whole_state:
        raise ForecastError(
            f"forecast: optimizer= calls step_on_matrices for {type(optimizer).__name__}. A step of"
            " whole matrices, each on another rank, and its exchanges among all are not forecast."
            " Leave step_on_matrices out for the forecast: ranks then have about as much state, in"
            " shards"
        )


def _refuse_torchs_shards(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDP2Module):
            raise ForecastError(
                f"forecast: module '{name or '(root)'}' was annotated by torch's fully_shard,"
                f" {NOT_SEEN}"
            )


def _refuse_offloaded_shards(model: nn.Module) -> None:
    for unit in units_in(model):
        if unit.spec.on_host:
            raise ForecastError(
                f"forecast: unit '{unit.name}' has an offload_policy; how long an optimizer takes"
                " on the host of an accelerator is not known. Leave the policy out: the device"
                " then needs its part of parameters, gradients and optimizer state more"
            )


def _made(make_model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make_model()
    found: object = model
    if not isinstance(found, nn.Module):
        raise ValueError(
            f"forecast: what makes the model returned no module: {type(found).__name__}"
        )
    made: dict[int, Tensor] = {}  # what is tied stays tied, unlike by `Module.to`
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta:
                    table[name] = made.setdefault(id(tensor), _on_meta(tensor))
    return model


def _on_meta(tensor: Tensor) -> Tensor:
    moved = tensor.to("meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved


@contextmanager
def _places(machine: Machine, model: nn.Module) -> Iterator[None]:
    """Keep `machine.place`: the unit that computes, by what is annotated."""
    names = {module: name or "(root)" for name, module in model.named_modules()}
    units = {module for module in names if registry(module)}
    around: list[tuple[str, str]] = []  # of each module whose forward runs, innermost last

    def pre_forward(module: nn.Module, _: Any) -> None:
        around.append((machine.module, machine.unit))
        machine.at(module=names.get(module, type(module).__name__))
        if module in units:
            machine.at(unit=machine.module)

    def post_forward(module: nn.Module, _: Any, output: Any) -> None:
        before, unit = around.pop()
        machine.at(module=before, unit=unit)
        tensor = next((t for t in tensors_in(output) if t.grad_fn is not None), None)
        if module in units and tensor is not None:
            tensor.register_hook(lambda _: machine.at(unit=names[module]))

    with (
        register_module_forward_pre_hook(pre_forward),
        register_module_forward_hook(post_forward),
    ):
        yield


def _label_resting(machine: Machine, model: nn.Module) -> None:
    for unit in units_in(model):
        for group in unit.groups:
            if group.shard is not None:
                machine.hold_for(group.shard.untyped_storage(), MemoryKind.PARAMETERS)
            for buffer in () if group.gather is None else group.gather.buffers:
                machine.hold_for(buffer.tensor.untyped_storage(), MemoryKind.UNSHARDED)
    for tensor in (*model.parameters(), *model.buffers()):
        storage = local_tensor(tensor).untyped_storage()
        if machine.kind_of(storage) is not None:  # else it is a part of the unit's shards
            machine.hold_for(storage, MemoryKind.PARAMETERS)


def train(
    machine: Machine,
    model: nn.Module,
    mesh: Mapping[str, int],
    batch: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    run: Callable[[nn.Module, Any], object],
    steps: int,
) -> Forecast:
    """Train for some steps, of which the last one counts.

    Args:
        run: forward and backward; what it returns lives until the optimizer has stepped.
    """
    stepping = None if optimizer is None else optimizer(model.parameters())
    if stepping is not None:
        _refuse_matrices(stepping)
    for step in range(1, steps + 1):
        machine.at(step=step)
        model.zero_grad()
        _label_resting(machine, model)  # the first forward moves them
        machine.at(phase="forward", module="", unit="(root)")
        start, at_rest = machine.begin_step(), machine.held
        kept = run(model, batch)
        machine.at(phase="optimizer")
        if stepping is not None:
            stepping.step()
            for state in stepping.state.values():
                for tensor in tensors_in(state):
                    machine.hold_for(local_tensor(tensor).untyped_storage(), MemoryKind.OPTIMIZER)
        end = machine.end_step()
        del kept
    spans = [replace(s, start=s.start - start, end=s.end - start) for s in machine.spans]

    def taken(*, computing: bool) -> float:
        return sum(s.end - s.start for s in spans if (s.stream == COMPUTE) is computing)

    return Forecast(
        subject=_subject_of(model, batch, stepping),
        device=machine.device,
        mesh=mesh,
        peak=machine.peak.total,
        at_peak=by_name(machine.peak.by_kind),
        where=machine.peak.where,
        on_host=machine.on_host[1],
        at_rest=by_name(at_rest),
        seconds=end - start,
        computing=taken(computing=True),
        communicating=taken(computing=False),
        exposed=machine.exposed,
        host=machine.host - start,
        collectives=tuple(
            Collective(*key, len(sizes), sum(sizes)) for key, sizes in machine.messages.items()
        ),
        memory=tuple((moment - start, sizes) for moment, sizes in machine.samples),
        streams=tuple(spans),
    )


def _subject_of(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> Subject:
    def by_dtype(tensors: Iterable[Tensor]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for tensor in tensors:
            counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        return dict(counts.most_common())

    states = () if optimizer is None else optimizer.state.values()
    leaves = batch.items() if isinstance(batch, Mapping) else (("", each) for each in (batch,))
    return Subject(
        model=type(model).__name__,
        parameters=by_dtype(model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        # without counters of steps
        state=by_dtype(t for state in states for t in tensors_in(state) if t.ndim),
        batch=tuple((name, tuple(t.shape)) for name, tree in leaves for t in tensors_in(tree)),
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        found = model(**batch)
    elif isinstance(batch, tuple):
        found = model(*batch)
    else:
        found = model(batch)
    said = getattr(found, "loss", None)
    return tensors_in(found)[0].sum() if said is None else said
