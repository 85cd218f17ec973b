"""Before an annotation changes anything, all ranks agree: on the arguments, on the parameters and buffers, and on their values.

Everything is validated first. Then the ranks compare a few numbers, in one collective: whether a rank failed, the mode, how
many parameters and buffers there are, and digests of names, shapes and dtypes, of what the arguments come to, of all values, and
of which tensors are on the meta device. The cost does not depend on the number of ranks or parameters. Only if the numbers
differ do the ranks send each other all of it, to name the first difference.

Which collectives a rank runs depends only on numbers that all ranks have, never on its own devices or values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable.comm import Comm
from composable.config import SYNC_MODES
from composable.contract.traversal import Managed
from composable.engine.param import copy_attributes
from composable.errors import AnnotationError, RanksDisagreeError, first_line

_CHUNK: Final = 1 << 18  # words that are digested at once
_NUMBERS: Final = 8  # that are compared; see `synchronise`
_LABEL: Final = "check of an annotation across ranks"  # without the verb: labels pair messages, and verbs may differ
_AS_FLAGS: Final = {"True": "broadcast", "False": "off"}  # what FSDP1 and DDP mean by them


def refuse_unknown_mode(mode: str) -> None:
    if mode not in SYNC_MODES:
        meant = _AS_FLAGS.get(repr(mode))
        cure = "" if meant is None else f"; what FSDP1 and DDP mean by that is {meant!r}"
        raise AnnotationError(f"sync_module_states must be one of {', '.join(SYNC_MODES)}, got {mode!r}{cure}")


# --- the check --------------------------------------------------------------------------------------------------------


@contextmanager
def failures_told(verb: str, comm: Comm) -> Iterator[None]:
    """Around the validation on this rank, before `synchronise`: an exception here is raised on all ranks.

    The failing rank takes part in the collectives of `synchronise` as one that has failed.
    """
    try:
        yield
    except Exception as error:
        if comm.size > 1:
            comm.min_max([1] + [0] * (_NUMBERS - 1), _LABEL)
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", _LABEL)
        raise


def _kind(entry: Managed[Tensor]) -> str:
    return "parameter" if isinstance(entry.tensor, nn.Parameter) else "buffer"


def _describe(entry: Managed[Tensor]) -> str:
    """All that must be the same on all ranks but the values."""
    dtype = str(entry.tensor.dtype).removeprefix("torch.")
    frozen = ", frozen" if _kind(entry) == "parameter" and not entry.tensor.requires_grad else ""
    tied = f", tied to {', '.join(repr(place.fqn) for place in entry.places[1:])}" if len(entry.places) > 1 else ""
    return f"'{entry.fqn}' {tuple(entry.tensor.shape)} {dtype}{frozen}{tied}"


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank says of its call, if the ranks differ."""

    verb: str
    mode: str
    parameters: list[str]
    buffers: list[str]
    treatment: list[str]
    values: list[int]
    on_meta: list[bool]


def synchronise(
    verb: str,
    comm: Comm,
    mode: str,
    parameters: Sequence[Managed[nn.Parameter]],
    buffers: Sequence[Managed[Tensor]],
    treatment: Sequence[str],
) -> None:
    """Check that the ranks agree, and in mode "broadcast" give all of them rank 0's values.

    Values arrive in the tensors that users hold. A tensor on the meta device is replaced by a new one at all its places.

    Args:
        comm: of all ranks that call the verb, on the device where they train.
        mode: "check", "broadcast" or "off".
        treatment: for each parameter, what the arguments come to.

    Raises:
        RanksDisagreeError: another rank failed; or names, shapes, dtypes, treatment, devices or, in "check", values differ.
    """
    if comm.size == 1:
        return
    entries: list[Managed[Any]] = [*parameters, *buffers]
    described, count = list(map(_describe, entries)), len(parameters)
    values = fingerprints([entry.tensor for entry in entries]) if mode == "check" else []
    on_meta = [entry.tensor.is_meta for entry in entries]
    built = [count, len(buffers), _digest(described), _digest(treatment)]
    numbers = [0, SYNC_MODES.index(mode), *([0] * len(built) if mode == "off" else built), _digest(values), _digest(on_meta)]
    lowest, highest = comm.min_max(numbers, _LABEL)
    alike = _NUMBERS - (mode == "broadcast")  # which gives values to what is on the meta device
    if lowest[:alike] != highest[:alike]:
        report = _Report(verb, mode, described[:count], described[count:], list(treatment), values, on_meta)
        raise RanksDisagreeError(_difference(verb, entries, comm.all_gather_objects(report, _LABEL)))
    if mode == "broadcast":
        _broadcast(verb, entries, comm, some_on_meta=lowest[-1] != highest[-1])


def _digest(values: Sequence[Any]) -> int:
    return zlib.crc32(repr([*values]).encode())


def _first(rows: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """The first index at which a rank differs from rank 0, and that rank; None if all are alike."""
    columns = enumerate(zip_longest(*rows))
    return next(((index, rank) for index, each in columns for rank, value in enumerate(each) if value != each[0]), None)


def _difference(verb: str, entries: Sequence[Managed[Any]], said: Sequence[_Report | str]) -> str:
    """In which of the checks a rank differs from rank 0 first. A rank that failed has said why."""
    reports = []
    for rank, row in enumerate(said):
        if isinstance(row, str):
            return f"{verb}: rank {rank} failed, so no rank annotates the module: {row}"
        reports.append(row)
    mine = reports[0]
    if found := _first([[each.verb] for each in reports]):
        return f"rank 0 calls {mine.verb}, and rank {found[1]} {reports[found[1]].verb}. Every rank must call the same verbs."
    if found := _first([[each.mode] for each in reports]):
        return (
            f"{verb}: sync_module_states is {mine.mode!r} on rank 0 and {reports[found[1]].mode!r} on rank {found[1]}. "
            "Pass the same on every rank."
        )
    for kind in ("parameters", "buffers"):
        rows: list[list[str]] = [getattr(each, kind) for each in reports]
        if found := _first(rows):
            index, rank = found
            texts = [row[index] if index < len(row) else "none there" for row in (rows[0], rows[rank])]
            return (
                f"{verb}: rank {rank} annotates {len(rows[rank])} {kind}, rank 0 {len(rows[0])}; they differ from "
                f"{kind.removesuffix('s')} {index} on: rank 0 has {texts[0]}; rank {rank} has {texts[1]}. Every rank must build "
                "the same module in the same order."
            )
    if found := _first([each.treatment for each in reports]):
        index, rank = found
        return (
            f"{verb}: the arguments come to different things for parameter '{entries[index].fqn}': {mine.treatment[index]} on "
            f"rank 0; {reports[rank].treatment[index]} on rank {rank}. Pass the same arguments on every rank."
        )
    if found := _first([each.on_meta for each in reports]):
        index, rank = found
        on_meta, elsewhere = (0, rank) if mine.on_meta[index] else (rank, 0)
        return (
            f"{verb}: {_kind(entries[index])} '{entries[index].fqn}' is on the meta device on rank {on_meta}, and has values on "
            f"rank {elsewhere}. If rank 0 has the values of all, pass sync_module_states='broadcast', which gives them to the "
            "others; or build the module alike on every rank"
        )
    found = _first([each.values for each in reports])
    assert found is not None
    index, rank = found
    return (
        f"{verb}: {_kind(entries[index])} '{entries[index].fqn}' differs across ranks (fingerprint rank0={mine.values[index]:x}, "
        f"rank{rank}={reports[rank].values[index]:x}); pass sync_module_states='broadcast' or seed equally"
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
def _broadcast(verb: str, entries: Sequence[Managed[Any]], comm: Comm, *, some_on_meta: bool) -> None:
    tensors = [entry.tensor for entry in entries]
    on_meta = [tensor.is_meta for tensor in tensors]
    if some_on_meta:
        homes = ("meta", "cpu")  # others are the device of `comm`
        own = [homes.index(t.device.type) if t.device.type in homes else len(homes) for t in tensors]
        rows = comm.all_gather_ints(own, _LABEL)
        for entry, home, column in zip(entries, rows[0], zip(*rows, strict=True), strict=True):
            if not home and any(column):
                raise RanksDisagreeError(
                    f"{verb}: {_kind(entry)} '{entry.fqn}' is on the meta device on rank 0, whose values "
                    "sync_module_states='broadcast' gives to all ranks, and has values on rank "
                    f"{next(rank for rank, other in enumerate(column) if other)}. Build the module with values on rank 0"
                )
        for index, home in enumerate(rows[0]):
            if home and on_meta[index]:
                tensors[index] = _materialise(entries[index], torch.device("cpu") if home == 1 else comm.device)
            on_meta[index] = not home
    sent = [part for tensor, left_out in zip(tensors, on_meta, strict=True) if not left_out for part in _plain_parts(tensor)]
    with torch.inference_mode():  # which may write to tensors that were made in it, too
        comm.broadcast(sent, f"broadcast of rank 0's values by {verb}()")


def _materialise(entry: Managed[Any], device: torch.device) -> Tensor:
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
        setattr(place.module, place.name, parameter)  # recurrent modules keep a list of their parameters, too
    return parameter
