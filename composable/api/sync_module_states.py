"""Before an annotation changes anything, all ranks agree: on the arguments, on the parameters and buffers, and on their values.

Everything is validated first. Then the ranks compare a few numbers, in one collective: whether a rank failed, the mode, how
many parameters and buffers there are, and digests of names, shapes and dtypes, of what the arguments come to, of which tensors
are on the meta device, and of all values. The cost does not depend on the number of ranks or parameters. Only if the numbers
differ do the ranks compare tensor by tensor, to name the first difference.

Which collectives a rank runs depends only on numbers that all ranks have, never on its own devices or values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.api.arguments import ManagedBuffer
from composable.comm import Comm
from composable.config import SYNC_MODES
from composable.contract.traversal import ManagedParameter, NamedPlace
from composable.engine.param import copy_attributes
from composable.errors import AnnotationError, RanksDisagreeError, first_line

_CHUNK: Final = 1 << 18  # words that are digested at once
_MESSAGE: Final = 64 << 20  # bytes that are received at once
_NUMBERS: Final = 8  # that are compared; see `synchronise`
_AS_FLAGS: Final = {"True": "broadcast", "False": "off"}  # what FSDP1 and DDP mean by them


def refuse_unknown_mode(mode: str) -> None:
    if mode not in SYNC_MODES:
        meant = _AS_FLAGS.get(repr(mode))
        cure = "" if meant is None else f"; what FSDP1 and DDP mean by that is {meant!r}"
        raise AnnotationError(f"sync_module_states must be one of {', '.join(SYNC_MODES)}, got {mode!r}{cure}")


# --- failures ---------------------------------------------------------------------------------------------------------


def _label(verb: str) -> str:
    return f"check of {verb}() across ranks"


@contextmanager
def failures_told(verb: str, comm: Comm) -> Iterator[None]:
    """Around the validation on this rank, before `synchronise`: an exception here is raised on all ranks.

    The failing rank takes part in the collectives of `synchronise` as one that has failed.
    """
    try:
        yield
    except Exception as error:
        if comm.size > 1:
            comm.min_max([1] + [0] * (_NUMBERS - 1), _label(verb))
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", _label(verb))
        raise


def _refuse_failure(verb: str, comm: Comm) -> NoReturn:
    texts = comm.all_gather_objects("", _label(verb))
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    raise RanksDisagreeError(f"{verb}: rank {rank} failed, so no rank annotates the module: {text}")


# --- the check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str  # "parameter" or "buffer"
    fqn: str
    tensor: Tensor
    places: tuple[NamedPlace, ...]

    @property
    def is_meta(self) -> bool:
        return self.tensor.device.type == "meta"

    def describe(self) -> str:
        """All that must be the same on all ranks but the values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        frozen = ", frozen" if self.kind == "parameter" and not self.tensor.requires_grad else ""
        tied = f", tied to {', '.join(repr(place.fqn) for place in self.places[1:])}" if len(self.places) > 1 else ""
        return f"'{self.fqn}' {tuple(self.tensor.shape)} {dtype}{frozen}{tied}"


def synchronise(
    verb: str,
    comm: Comm,
    mode: str,
    parameters: Sequence[ManagedParameter],
    buffers: Sequence[ManagedBuffer],
    treatment: Sequence[str] = (),
) -> None:
    """Check that the ranks agree, and in mode "broadcast" give all of them rank 0's values.

    Values arrive in the tensors that users hold; tensors that have them already are not written to. A tensor on the meta device
    is replaced by a new one at all its places.

    Args:
        comm: of all ranks that call the verb, on the device where they train.
        mode: "check", "broadcast" or "off".
        treatment: for each parameter, what the arguments come to.

    Raises:
        RanksDisagreeError: another rank failed; or names, shapes, dtypes, treatment, devices or, in "check", values differ.
    """
    if comm.size == 1:
        return
    entries = [_Entry("parameter", each.fqn, each.parameter, each.places) for each in parameters]
    entries += [_Entry("buffer", each.fqn, each.buffer, each.places) for each in buffers]
    trusted, label = mode == "off", _label(verb)
    values = fingerprints([entry.tensor for entry in entries]) if mode == "check" else []
    built = [len(parameters), len(buffers), _digest(map(_Entry.describe, entries)), _digest(treatment)]
    numbers = [0, SYNC_MODES.index(mode), *([0] * len(built) if trusted else built)]
    numbers += [_digest(entry.is_meta for entry in entries), _digest(values)]
    lowest, highest = comm.min_max(numbers, label)
    if highest[0]:
        _refuse_failure(verb, comm)
    if lowest[1] != highest[1]:
        _refuse_modes(verb, mode, comm)
    if lowest[2:5] != highest[2:5]:
        _refuse_shapes(verb, entries[: len(parameters)], entries[len(parameters) :], comm)
    if lowest[5] != highest[5]:
        _refuse_treatment(verb, parameters, treatment, comm)
    some_on_meta = lowest[6] != highest[6]
    if some_on_meta and mode != "broadcast":
        _refuse_meta(verb, entries, comm)
    if lowest[7] != highest[7]:
        _refuse_values(verb, entries, values, comm)
    if mode == "broadcast":
        _broadcast(verb, entries, comm, some_on_meta=some_on_meta)


def _digest(values: Any) -> int:
    return zlib.crc32(repr([*values]).encode())


def _refuse_modes(verb: str, mode: str, comm: Comm) -> NoReturn:
    said = comm.all_gather_objects((verb, mode), _label(verb))
    other = next(rank for rank, each in enumerate(said) if each != said[0])
    if said[other][0] != said[0][0]:
        raise RanksDisagreeError(
            f"rank 0 calls {said[0][0]}, and rank {other} {said[other][0]}. Every rank must call the same verbs."
        )
    raise RanksDisagreeError(
        f"{verb}: sync_module_states is {said[0][1]!r} on rank 0 and {said[other][1]!r} on rank {other}. "
        "Pass the same on every rank."
    )


def _refuse_shapes(verb: str, parameters: Sequence[_Entry], buffers: Sequence[_Entry], comm: Comm) -> NoReturn:
    rows = comm.all_gather_objects([[entry.describe() for entry in each] for each in (parameters, buffers)], _label(verb))
    which = next(which for which in (0, 1) if any(row[which] != rows[0][which] for row in rows))
    kinds = ("parameters", "buffers")
    mine = rows[0][which]
    other, theirs = next((rank, row[which]) for rank, row in enumerate(rows) if row[which] != mine)
    first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    texts = [each[first] if first < len(each) else "none there" for each in (mine, theirs)]
    raise RanksDisagreeError(
        f"{verb}: rank {other} annotates {len(theirs)} {kinds[which]}, rank 0 {len(mine)}; they differ from "
        f"{kinds[which].removesuffix('s')} {first} on: rank 0 has {texts[0]}; rank {other} has {texts[1]}. Every rank must "
        "build the same module in the same order."
    )


def _refuse_treatment(verb: str, parameters: Sequence[ManagedParameter], treatment: Sequence[str], comm: Comm) -> NoReturn:
    rows = comm.all_gather_objects(list(treatment), _label(verb))
    first, other = next((i, r) for i in range(len(treatment)) for r, row in enumerate(rows) if row[i] != rows[0][i])
    raise RanksDisagreeError(
        f"{verb}: the arguments come to different things for parameter '{parameters[first].fqn}': {rows[0][first]} on rank 0; "
        f"{rows[other][first]} on rank {other}. Pass the same arguments on every rank."
    )


def _refuse_meta(verb: str, entries: Sequence[_Entry], comm: Comm) -> NoReturn:
    rows = comm.all_gather_objects([f"{e.kind} '{e.fqn}'" for e in entries if e.is_meta], _label(verb))
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    longer, without = (other, 0) if set(rows[other]) - set(rows[0]) else (0, other)
    name = next(name for name in rows[longer] if name not in rows[without])
    raise RanksDisagreeError(
        f"{verb}: {name} is on the meta device on rank {longer}, and has values on rank {without}. If rank 0 has the values of "
        "all, pass sync_module_states='broadcast', which gives them to the others; or build the module alike on every rank"
    )


def _refuse_values(verb: str, entries: Sequence[_Entry], values: Sequence[int], comm: Comm) -> NoReturn:
    rows = comm.all_gather_ints(values, _label(verb))
    first, other = next((i, r) for i in range(len(entries)) for r, row in enumerate(rows) if row[i] != rows[0][i])
    raise RanksDisagreeError(
        f"{verb}: {entries[first].kind} '{entries[first].fqn}' differs across ranks (fingerprint rank0={rows[0][first]:x}, "
        f"rank{other}={rows[other][first]:x}); pass sync_module_states='broadcast' or seed equally"
    )


# --- fingerprints -----------------------------------------------------------------------------------------------------


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that are the same for equal values and hardly ever for different ones; the position of values counts.

    Takes a few MiB, however large the tensors are, and waits for each device once.
    """
    alike: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "meta" and tensor.numel():
            alike.setdefault(tensor.device, []).append(index)
    found = [0] * len(tensors)
    for device, indices in alike.items():
        weights = _weights(device, min(_CHUNK, max(tensors[index].nbytes for index in indices)))
        totals = torch.stack([_total(tensors[index], weights) for index in indices])
        for index, total in zip(indices, totals.tolist(), strict=True):
            found[index] = (total >> 16) & 0x7FFF_FFFF_FFFF
    return found


def _total(tensor: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=weights.device)
    for part in _plain_parts(tensor):
        data = part.contiguous().reshape(-1).view(torch.uint8)
        whole = data.numel() // 4 * 4
        for words in (*data[:whole].view(torch.int32).split(_CHUNK), data[whole:]):
            # Each word counts as often as its position says; numbers are taken modulo 2 ** 64.
            total = total * _STEP + (words.to(torch.int64) * weights[: words.numel()]).sum()
    return total


_STEP: Final = 0x5851_F42D_4C95_7F2D


def _weights(device: torch.device, count: int) -> Tensor:
    """An odd number for each position, in no simple proportion to the others, so that no exchange of rows cancels out."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STEP
    return (mixed ^ (mixed >> 29)) * _STEP | 1


def _plain_parts(tensor: Any) -> list[Tensor]:
    """The strided tensors that hold a tensor's values: several for a wrapper subclass, such as quantised weights."""
    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()
        return [part for name in inner for part in _plain_parts(getattr(tensor, name))]
    return [tensor.detach()] if tensor.layout is torch.strided else []


# --- broadcast --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _broadcast(verb: str, entries: Sequence[_Entry], comm: Comm, *, some_on_meta: bool) -> None:
    tensors = [entry.tensor for entry in entries]
    if some_on_meta:
        homes = ("meta", "cpu")  # others are the device of `comm`
        own = [homes.index(t.device.type) if t.device.type in homes else len(homes) for t in tensors]
        rows = comm.all_gather_ints(own, _label(verb))
        for index, entry in enumerate(entries):
            column = [row[index] for row in rows]
            if not column[0] and any(column):
                other = next(rank for rank, home in enumerate(column) if home)
                raise RanksDisagreeError(
                    f"{verb}: {entry.kind} '{entry.fqn}' is on the meta device on rank 0, whose values "
                    f"sync_module_states='broadcast' gives to all ranks, and has values on rank {other}. Build the module with "
                    "values on rank 0"
                )
        for index, entry in enumerate(entries):
            if rows[0][index] and entry.is_meta:
                device = torch.device("cpu") if rows[0][index] == 1 else comm.device
                tensors[index] = _materialise(entry, device)
        on_meta = [not home for home in rows[0]]
    else:
        on_meta = [entry.is_meta for entry in entries]
    sent = [tensor for tensor, left_out in zip(tensors, on_meta, strict=True) if not left_out]
    _receive([part for tensor in sent for part in _plain_parts(tensor)], comm, f"broadcast of rank 0's values by {verb}()")


def _materialise(entry: _Entry, device: torch.device) -> Tensor:
    """A tensor with memory in place of one on the meta device, registered at all its places."""
    with torch.inference_mode(False):
        tensor = torch.empty_like(entry.tensor, dtype=entry.tensor.dtype, device=device)
        if not isinstance(entry.tensor, nn.Parameter):
            for place in entry.places:
                place.module._buffers[place.name] = tensor
            return tensor
        parameter = nn.Parameter(tensor, requires_grad=entry.tensor.requires_grad)
    copy_attributes(entry.tensor, parameter)
    for place in entry.places:
        if type(place.module).__setattr__ is nn.Module.__setattr__:
            place.module._parameters[place.name] = parameter
        else:  # recurrent modules keep a list of their parameters, too
            setattr(place.module, place.name, parameter)
    return parameter


def _receive(tensors: Sequence[Tensor], comm: Comm, label: str) -> None:
    """Write rank 0's values into `tensors`, where they differ: version counters tell autograd of every write."""
    flat = [tensor.reshape(-1) for tensor in tensors]  # a copy of what is not contiguous
    pieces = [piece for each in flat if each.numel() for piece in each.split(max(1, _MESSAGE // each.element_size()))]
    start = 0
    while start < len(pieces):
        stop, nbytes = start + 1, pieces[start].nbytes
        while stop < len(pieces) and nbytes + pieces[stop].nbytes <= _MESSAGE:
            nbytes += pieces[stop].nbytes
            stop += 1
        targets, start = pieces[start:stop], stop
        if comm.rank == 0:
            comm.broadcast(targets, label)
            continue
        received = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in targets]
        comm.broadcast(received, label)
        for target, values in zip(targets, received, strict=True):
            _write(target, values)
    if comm.rank:
        for tensor, values in zip(tensors, flat, strict=True):
            if values.data_ptr() != tensor.data_ptr():
                _write(tensor, values.view(tensor.shape))


def _write(target: Tensor, values: Tensor) -> None:
    one, other = (each.reshape(-1).view(torch.uint8) for each in (target, values))  # bytes: NaN is equal to itself
    if not torch.equal(one, other):
        with torch.inference_mode(target.is_inference()):
            target.copy_(values)
