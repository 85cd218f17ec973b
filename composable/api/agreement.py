"""Before an annotation changes anything, all ranks agree: on the arguments, on the parameters and
buffers, and on their values.

Everything is validated first. Then the ranks compare a few numbers, in one collective: whether a
rank failed, the mode, how many parameters and buffers there are, and digests of names, shapes and
dtypes, of the checked arguments, of all values, and of which tensors are on the meta device. The
cost does not depend on the number of ranks or parameters. If the numbers differ, the ranks send
each other the full lists, and an error names the first difference.

Which collectives a rank runs depends only on numbers that all ranks have, never on its own devices
or values.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable.api.arguments import Ignored, ids_of_ignored
from composable.api.mesh import comms_along
from composable.comm.base import Comm
from composable.comm.launch import Launch
from composable.config import SYNC_MODES
from composable.contract.tree import Managed, managed_parameters
from composable.engine.params.param import copy_attributes
from composable.errors import AnnotationError, RanksDisagreeError, first_line
from composable.features.param_forms import mesh_and_placements
from composable.memory.digests import digests_as_ints
from composable.tensors import plain_parts

# without the verb: texts pair messages, and verbs may differ
_LAUNCH: Final = Launch("check of an annotation across ranks")
_AS_FLAGS: Final = {"True": "broadcast", "False": "off"}  # what FSDP1 and DDP mean by them


def _refuse_unknown_mode(mode: str) -> None:
    if mode not in SYNC_MODES:
        meant = _AS_FLAGS.get(repr(mode))
        cure = "" if meant is None else f"; what FSDP1 and DDP mean by that is {meant!r}"
        raise AnnotationError(
            f"sync_module_states must be one of {', '.join(SYNC_MODES)}, got {mode!r}{cure}"
        )


# --- failures ----------------------------------------------------------------------------------


@contextmanager
def failures_shared(verb: str, comm: Comm, mode: str) -> Iterator[None]:
    """Around the validation on this rank, before `synchronise`, which begins with its mode: an
    exception here is raised on all ranks.

    The failing rank takes part in the collectives of `synchronise` as one that has failed.
    """
    try:
        _refuse_unknown_mode(mode)
        yield
    except Exception as error:
        if comm.size > 1:
            comm.min_max([1, *([0] * len(_CURES))], _LAUNCH)
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", _LAUNCH)
        raise


def comms_of_parameters(
    modules: Sequence[nn.Module], ignored_params: Ignored, device: torch.device
) -> list[Comm]:
    """The communicators of the meshes over which parameters are tensor parallel: what fails on a
    rank of a unit fails on their ranks, too.
    """
    ignored: Mapping[int, None] = {}
    with suppress(Exception):  # of which the validation tells
        ignored = ids_of_ignored(modules, ignored_params)
    found = [
        mesh_and_placements(each.tensor) for each in managed_parameters(modules, ignored=ignored)
    ]
    meshes = dict.fromkeys(each[0] for each in found if each is not None)
    return [comm for mesh in meshes for comm in comms_along(mesh, device)]


@contextmanager
def failures_shared_with(verb: str, comms: Sequence[Comm], whom: str) -> Iterator[None]:
    """Around what all ranks of `comms` do: a failure here is raised on all of them."""
    launch = Launch(f"agreement of {verb}() with each other {whom}")
    try:
        yield
    except Exception as error:
        for comm in comms:
            comm.all_gather_objects(f"{type(error).__name__}: {first_line(error)}", launch)
        raise
    failed = ""
    for comm in comms:
        said = comm.all_gather_objects(failed, launch)
        failed = failed or next(filter(None, said), "")
    if failed:
        raise RanksDisagreeError(
            f"{verb}: another {whom} failed, so no rank annotates the module: {failed}"
        )


# --- the check -----------------------------------------------------------------------------------


def _name(entry: Managed[Tensor]) -> str:
    return f"{'parameter' if isinstance(entry.tensor, nn.Parameter) else 'buffer'} '{entry.fqn}'"


def _describe(entry: Managed[Tensor]) -> str:
    """All that must be the same on all ranks but the values."""
    dtype = str(entry.tensor.dtype).removeprefix("torch.")
    is_frozen = isinstance(entry.tensor, nn.Parameter) and not entry.tensor.requires_grad
    frozen = ", frozen" if is_frozen else ""
    others = [repr(place.fqn) for place in entry.places[1:]]
    tied = f", tied to {', '.join(others)}" if others else ""
    found = mesh_and_placements(entry.tensor)
    placed = "" if found is None else f", {found[1]} over a {tuple(found[0].shape)} mesh"
    return f"'{entry.fqn}' {tuple(entry.tensor.shape)} {dtype}{frozen}{tied}{placed}"


# What ranks may differ in, in the order in which it is compared, and what to do about it.
_CURES: Final = {
    "verbs": "Every rank must call the same verbs",
    "modes of sync_module_states": "Pass the same arguments on every rank",
    "parameters": "Every rank must build the same module in the same order",
    "buffers": "Every rank must build the same module in the same order",
    "arguments": "Pass the same arguments on every rank",
    "devices": (
        "If rank 0 has the values of all, pass sync_module_states='broadcast', which gives them to"
        " the others; or build the module alike on every rank"
    ),
    "values": "Pass sync_module_states='broadcast', or seed equally",
}


def synchronise(
    verb: str,
    comm: Comm,
    mode: str,
    parameters: Sequence[Managed[nn.Parameter]],
    buffers: Sequence[Managed[Tensor]],
    treatment: Sequence[str],
    apart: Collection[int] = (),
) -> None:
    """Check that the ranks agree, and in mode "broadcast" give all of them rank 0's values.

    Values arrive in the tensors that users hold. A tensor on the meta device is replaced by a new
    one at all its places.

    Args:
        comm: of all ranks that call the verb, on the device where they train.
        mode: "check", "broadcast" or "off".
        treatment: for each parameter, what the arguments come to.
        apart: the ids of parameters on meshes of their own, whose values are left alone.

    Raises:
        RanksDisagreeError: another rank failed; or names, shapes, dtypes, treatment, devices or, in
            "check", values differ.
    """
    if comm.size == 1:
        return
    entries: list[Managed[Any]] = [*parameters, *buffers]
    together = [entry for entry in entries if id(entry.tensor) not in apart]
    values = digests_as_ints([entry.tensor for entry in together]) if mode == "check" else []
    on_meta = [entry.tensor.is_meta for entry in entries]
    treated = [f"for '{each.fqn}' {text}" for each, text in zip(parameters, treatment, strict=True)]
    mine = {
        "verbs": [verb],
        "modes of sync_module_states": [mode],
        "parameters": list(map(_describe, entries[: len(parameters)])),
        "buffers": list(map(_describe, entries[len(parameters) :])),
        "arguments": treated,
        "devices": [
            f"{_name(entry)} {'on meta' if entry.tensor.is_meta else 'with values'}"
            for entry in entries
        ],
        "values": [
            f"{_name(entry)} with fingerprint {value:x}"
            for entry, value in zip(together, values, strict=False)
        ],
    }
    compared: dict[str, Sequence[Any]] = {**mine, "devices": on_meta}
    if mode == "off":  # meshes decide what is called next
        meshes = [
            text for each, text in zip(parameters, treated, strict=True) if id(each.tensor) in apart
        ]
        compared |= {"verbs": [], "parameters": [], "buffers": [], "arguments": meshes}
    lowest, highest = comm.min_max([0, *map(_digest, compared.values())], _LAUNCH)
    topics = zip(("", *compared), lowest, highest, strict=True)
    differ = {topic for topic, low, high in topics if low != high}
    if differ - ({"devices"} if mode == "broadcast" else set()):
        raise RanksDisagreeError(_difference(verb, comm.all_gather_objects(mine, _LAUNCH)))
    if mode == "broadcast":  # gives values to what is on the meta device
        _broadcast(verb, together, comm, some_on_meta="devices" in differ)


def _digest(values: Sequence[Any]) -> int:
    return zlib.crc32(repr([*values]).encode())


def _difference(verb: str, said: Sequence[Any]) -> str:
    """The first thing in which a rank differs from rank 0. A rank that failed has said why, others
    what they have by topic.
    """
    for rank, report in enumerate(said):
        if isinstance(report, str):
            return f"{verb}: rank {rank} failed, so no rank annotates the module: {report}"
    for topic, cure in _CURES.items():
        for row in zip_longest(*(report[topic] for report in said), fillvalue="nothing there"):
            other = next((rank for rank, text in enumerate(row) if text != row[0]), None)
            if other is not None:
                return (
                    f"{said[0]['verbs'][0]}: the ranks differ in {topic}: rank 0 has {row[0]}, rank"
                    f" {other} has {row[other]}. {cure}."
                )
    raise AssertionError("digests differ, so there is a difference")


# --- broadcast ----------------------------------------------------------------------------------


_HOMES: Final = ("meta", "cpu")  # others are the device of the comm


@torch.no_grad()
def _broadcast(
    verb: str, entries: Sequence[Managed[Any]], comm: Comm, *, some_on_meta: bool
) -> None:
    own = [_HOMES.index(t) if (t := each.tensor.device.type) in _HOMES else 2 for each in entries]
    rows = comm.all_gather_ints(own, _LAUNCH) if some_on_meta else [own]
    sent = []
    for entry, home, column in zip(entries, rows[0], zip(*rows, strict=True), strict=True):
        if not home and any(column):
            raise RanksDisagreeError(
                f"{verb}: {_name(entry)} is on the meta device on rank 0, whose"
                " values sync_module_states='broadcast' gives to all ranks, and has values on"
                f" rank {next(rank for rank, other in enumerate(column) if other)}. Build the"
                " module with values on rank 0"
            )
        tensor = entry.tensor
        if home and tensor.is_meta:
            tensor = _materialise(entry, torch.device("cpu") if home == 1 else comm.device)
        sent += plain_parts(tensor) if home else []
    with torch.inference_mode():  # which may write to tensors that were made in it, too
        comm.broadcast(sent, Launch(f"broadcast of rank 0's values by {verb}()"))


def _materialise(entry: Managed[Any], device: torch.device) -> Tensor:
    """A tensor with memory in place of one on the meta device, registered at all its places."""
    with torch.inference_mode(False):
        made = torch.empty_like(entry.tensor, dtype=entry.tensor.dtype, device=device)
        if isinstance(entry.tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=entry.tensor.requires_grad)
            copy_attributes(entry.tensor, made)
    for place in entry.places:
        # not into the tables of the module: recurrent ones keep a list of their parameters, too
        setattr(place.module, place.name, made)
    return made
