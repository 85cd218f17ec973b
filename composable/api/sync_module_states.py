"""Whether all ranks hold the same parameters, and how they come to; knows names and values, no units.

Note [Fingerprints]
Agreement is checked with the extremes of three numbers per annotation: how many parameters there are, a digest of all names,
shapes and dtypes, and a digest of all values. Their cost does not depend on the number of ranks or parameters. Only when they
differ do the ranks compare parameter by parameter, to name the first difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from composable.api.all_or_none import everybody_says, label_of, refuse_failure
from composable.config import SYNC_MODES
from composable.device.collectives import Communicator
from composable.errors import AnnotationError, RanksDisagreeError
from composable.model.traversal import ManagedParameter

_CHUNK: Final = 1 << 18  # words that are digested at once
_AS_FLAGS: Final = {"True": "broadcast", "False": "off"}  # what FSDP1 and DDP mean by them


def refuse_unknown_mode(mode: str) -> None:
    if mode not in SYNC_MODES:
        meant = _AS_FLAGS.get(repr(mode))
        cure = "" if meant is None else f"; what FSDP1 and DDP mean by that is {meant!r}"
        raise AnnotationError(f"sync_module_states must be one of {', '.join(SYNC_MODES)}, got {mode!r}{cure}")


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that equal values share and different ones hardly ever do; the position of values counts.

    Takes a few MiB, however large the tensors are, and reads memory once per device.
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
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words in (*data[:whole].view(torch.int32).split(_CHUNK), data[whole:]):
        # Each word counts as often as its position says; numbers are taken modulo 2 ** 64.
        total = total * _STEP + (words.to(torch.int64) * weights[: words.numel()]).sum()
    return total


_STEP: Final = 0x5851_F42D_4C95_7F2D


def _weights(device: torch.device, count: int) -> Tensor:
    """An odd number for each position: neither equal nor in any proportion, so that no exchange of rows cancels out.

    Made anew for each comparison, or two MiB of every device would be gone for good.
    """
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _STEP
    return (mixed ^ (mixed >> 29)) * _STEP | 1


def _shape_digest(parameters: Sequence[ManagedParameter]) -> list[int]:
    return [
        zlib.crc32(f"{p.fqn} {tuple(p.parameter.shape)} {p.parameter.dtype} {p.parameter.requires_grad}".encode())
        for p in parameters
    ]


def synchronise(
    verb: str, parameters: Sequence[ManagedParameter], communicator: Communicator, mode: str, treatment: Sequence[str] = ()
) -> None:
    """Check that the ranks agree, or make them.

    Args:
        mode: "check", "broadcast" (rank 0's values) or "off".
        treatment: for each parameter, what the arguments come to.

    Raises:
        RanksDisagreeError: names, shapes, dtypes, treatment or, in "check", values differ; names the first difference. Or
            another rank failed.
    """
    if communicator.size == 1:
        return
    trusted = mode == "off"
    shapes = [] if trusted else _shape_digest(parameters)
    values = fingerprints([p.parameter for p in parameters]) if mode == "check" else []
    digests = [_digest(shapes), 0 if trusted else _digest(treatment), _digest(values)]
    label = label_of(verb)
    summary = [0, SYNC_MODES.index(mode), 0 if trusted else len(parameters), *digests]
    lowest, highest = communicator.min_max(summary, label=label)
    if highest[0]:
        refuse_failure(verb, communicator, label)
    if lowest[1] != highest[1]:
        _refuse_modes(verb, mode, communicator, label)
    if lowest[:4] != highest[:4]:
        _refuse_shapes(verb, parameters, shapes, communicator, label)
    if lowest[:5] != highest[:5]:
        _refuse_treatment(verb, parameters, treatment, communicator, label)
    if trusted:
        return
    if mode == "broadcast":
        for managed in parameters:
            if managed.parameter.device.type != "meta":
                communicator.broadcast(managed.parameter.data, label=f"broadcast of parameter '{managed.fqn}'")
        return
    if lowest != highest:
        _refuse_values(verb, parameters, values, communicator, label)


def _digest(values: Sequence[object]) -> int:
    return zlib.crc32(repr([*values]).encode())


def _refuse_modes(verb: str, mode: str, communicator: Communicator, label: str) -> None:
    says = [text.split() for text in everybody_says(f"{verb} {mode}", communicator, label)]
    verbs, texts = [said[0] for said in says], [said[1] for said in says]
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    if verbs[other] != verbs[0]:
        raise RanksDisagreeError(
            f"rank 0 calls {verbs[0]}, and rank {other} {verbs[other]}. Every rank must call the same verbs."
        )
    raise RanksDisagreeError(
        f"{verb}: sync_module_states is {texts[0]!r} on rank 0 and {texts[other]!r} on rank {other}. "
        "Pass the same on every rank."
    )


def _refuse_treatment(
    verb: str, parameters: Sequence[ManagedParameter], treatment: Sequence[str], communicator: Communicator, label: str
) -> None:
    rows = communicator.all_gather_ints([zlib.crc32(text.encode()) for text in treatment], label=label)
    first, other = next((i, r) for i in range(len(treatment)) for r, row in enumerate(rows) if row[i] != rows[0][i])
    texts = everybody_says(treatment[first], communicator, label)
    raise RanksDisagreeError(
        f"{verb}: the arguments come to different things for parameter '{parameters[first].fqn}': {texts[0]} on rank 0; "
        f"{texts[other]} on rank {other}. Pass the same arguments on every rank."
    )


def _refuse_shapes(
    verb: str, parameters: Sequence[ManagedParameter], shapes: list[int], communicator: Communicator, label: str
) -> None:
    counts = [row[0] for row in communicator.all_gather_ints([len(parameters)], label=label)]
    longest = max(counts)
    rows = communicator.all_gather_ints(shapes + [0] * (longest - len(shapes)), label=label)
    other = next(r for r, row in enumerate(rows) if row != rows[0] or counts[r] != counts[0])
    first = next((i for i in range(longest) if rows[0][i] != rows[other][i]), min(counts))
    texts = everybody_says(_describe(parameters, first), communicator, label)
    seen = f"rank 0 has {texts[0]}; rank {other} has {texts[other]}"
    raise RanksDisagreeError(
        f"{verb}: rank {other} annotates {counts[other]} parameters, rank 0 {counts[0]}; they differ from parameter "
        f"{first} on: {seen}. Every rank must build the same module in the same order."
    )


def _describe(parameters: Sequence[ManagedParameter], index: int) -> str:
    if index >= len(parameters):
        return "none there"
    parameter = parameters[index].parameter
    dtype = str(parameter.dtype).removeprefix("torch.")
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"'{parameters[index].fqn}' {tuple(parameter.shape)} {dtype}{frozen}"


def _refuse_values(
    verb: str, parameters: Sequence[ManagedParameter], values: list[int], communicator: Communicator, label: str
) -> None:
    rows = communicator.all_gather_ints(values, label=label)
    for index, managed in enumerate(parameters):
        other = next((r for r, row in enumerate(rows) if row[index] != rows[0][index]), None)
        if other is not None:
            raise RanksDisagreeError(
                f"{verb}: parameter '{managed.fqn}' differs across ranks (fingerprint rank0={rows[0][index]:x}, "
                f"rank{other}={rows[other][index]:x}); pass sync_module_states='broadcast' or seed equally"
            )
