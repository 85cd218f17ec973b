"""Whole state dicts, one tensor at a time, and folders that other libraries read."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.api.explicit_calls import units_in
from composable.checked import RealDtype
from composable.comm.backends import ranks_of
from composable.comm.launch import Launch
from composable.comm.ledger import checksum
from composable.compilation import unwrapped
from composable.engine.edits.loading import says_nothing_of_groups
from composable.engine.params.param import mesh_of
from composable.engine.step.unit import Unit, show_again
from composable.errors import AnnotationError, RanksDisagreeError
from composable.memory.digests import digests_as_ints
from composable.state.whole import (
    all_or_none,
    checked_on_all_ranks,
    comms_of_model,
    managed_in,
    require_at_rest,
)
from composable.tensors import is_packed, whole_of
from composable.torch_private import local_tensor

K = TypeVar("K")
SMALLEST_FILE: Final = 1 << 30  # bytes; smaller models go into one file


@dataclass(slots=True)
class Streamed:
    """What `stream_full(since=)` has yielded, so that it can leave out what is unchanged.

    Args:
        checksums: by FQN, the checksum of this rank's part of each tensor when it was yielded.

    Example:
        >>> seen = Streamed()
        >>> for fqn, tensor in stream_full(model, since=seen):
        ...     engine.load_weight(fqn, tensor)
    """

    checksums: dict[str, int] = field(default_factory=dict)


@checked_on_all_ranks
def stream_full(
    module: nn.Module, *, dtype: RealDtype | None = None, since: Streamed | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield `(fqn, whole tensor)` for each tensor in the state dict, gathering one at a time.

    Use this for weight sync and export. All ranks iterate together, to the end. A tensor is on the
    device of its shards. The iterator drops it when you ask for the next one, so it needs the
    memory of the largest tensor. If every rank holds a tensor whole, the iterator yields the
    model's own: do not write to it.

    Args:
        module: an annotated module, or one that contains some.
        dtype: cast floating-point tensors to it.
        since: a `Streamed()` that the caller keeps. The iterator leaves out tensors that have not
            changed on any rank since they were last yielded with it. It keeps checksums of the
            shards, so it sees every kind of write, and all ranks yield the same tensors.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward.
        RanksDisagreeError: groups of ranks hold different values of a parameter under one name
            (experts that are plain tensors on meshes of their own).

    Example:
        >>> seen = Streamed()
        >>> for fqn, tensor in stream_full(model, dtype=torch.bfloat16, since=seen):
        ...     engine.load_weight(fqn, tensor)
    """
    units, state, _ = _state_of("stream_full", module)
    tensors = _tensors_in(state, {})
    dtypes = _dtypes_of(state, dtype)
    if since is None:
        return _stream(tensors, dtypes)
    sums = _checksums(tensors)
    moved = [int(since.checksums.get(fqn) != sums[fqn]) for fqn in tensors]
    for comm in comms_of_model(units):
        _, moved = comm.min_max(moved, Launch("exchange of which tensors changed"))
    return _stream(dict(compress(tensors.items(), moved)), dtypes, sums, since)


def _checksums(tensors: Mapping[K, Tensor]) -> dict[K, int]:
    """Checksums of what this rank has of tensors; the host waits for each device once."""
    return dict(zip(tensors, digests_as_ints([*tensors.values()]), strict=True))


@torch.no_grad()
def _state_of(
    caller: str, model: nn.Module
) -> tuple[Sequence[Unit], dict[str, Any], dict[str, str]]:
    """Return the units of the model, its state dict, and the further names of tied tensors.

    Each of these names comes with the first one.
    """
    model = unwrapped(model)
    units = units_in(caller, model)
    require_at_rest(caller, units)
    try:
        _refuse_other_values(caller, model)
        with says_nothing_of_groups():
            state = model.state_dict(keep_vars=True)
    finally:
        show_again(units)
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for fqn, value in state.items():
        if isinstance(value, Tensor):
            known = first.setdefault(id(value), fqn)
            if known != fqn:
                tied[fqn] = known
    return units, state, tied


def _tensors_in(state: Mapping[str, Any], without: Mapping[str, str]) -> dict[str, Tensor]:
    return {
        fqn: value.detach()
        for fqn, value in state.items()
        if isinstance(value, Tensor) and fqn not in without
    }


def _refuse_other_values(caller: str, model: nn.Module) -> None:
    """Raise if ranks hold different values of a parameter, each group of ranks its own.

    Such are experts that are plain tensors on a mesh of their own: whole tensors would be those of
    one group. All ranks of the largest mesh in the model call this; only where one of them has
    parameters on a smaller mesh are checksums exchanged.
    """
    managed = list(managed_in(caller, model))
    around = max((each.comm for each in managed), key=lambda comm: comm.size, default=None)
    if around is None or around.group is None:
        return
    ranks = set(ranks_of(around))
    # by name, and by the shape of the mesh and the place there
    apart: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    for each in managed:
        at_rest = each.param.at_rest
        mesh = mesh_of(at_rest)
        if mesh is None or mesh.size() >= len(ranks) or at_rest.is_meta:
            continue
        if ranks.issuperset(mesh.mesh.flatten().tolist()):
            apart[each.fqn, tuple(mesh.shape), tuple(mesh.get_coordinate() or ())] = at_rest
    if not apart:
        return
    seen: dict[Any, tuple[int, int]] = {}
    launch = Launch("comparison of parameters on meshes of their own")
    for rank, sums in enumerate(around.all_gather_objects(_checksums(apart), launch)):
        for key, total in sums.items():
            first, known = seen.setdefault(key, (rank, total))
            if total != known:
                raise RanksDisagreeError(
                    f"{caller}: parameter '{key[0]}' is on {math.prod(key[1])} of the"
                    f" {around.size} ranks of the model, and rank {first} and rank {rank} of these"
                    " hold different values under its name: those of one group would be taken for"
                    " everybody's. Declare what part each rank has with declare_part(), or make a"
                    " DTensor of it, before annotating; or save this module by itself on the ranks"
                    " that share it"
                )


@torch.no_grad()
def _stream(
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    sums: Mapping[str, int] | None = None,
    since: Streamed | None = None,
) -> Iterator[tuple[str, Tensor]]:
    for fqn, tensor in tensors.items():
        whole = whole_of(tensor) if isinstance(tensor, DTensor) else tensor
        yield fqn, whole if fqn not in dtypes else whole.to(dtypes[fqn])
        del whole
        if sums is not None and since is not None:
            since.checksums[fqn] = sums[fqn]  # the caller has used it


def _dtypes_of(state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return what the tensors are cast to that are cast: those of floating-point numbers.

    Packed bytes and their scales are none, whatever their dtype is.
    """
    if dtype is None:
        return {}
    packed = tuple(f"{fqn}." for fqn, value in state.items() if is_packed(value))
    return {
        fqn: dtype
        for fqn, value in state.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not f"{fqn}.".startswith(packed)
    }


@checked_on_all_ranks
def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, dtype: RealDtype | None = None
) -> dict[str, Any]:
    """Gather the whole state dict on the host. All ranks call this together.

    Args:
        module: an annotated module, or one that contains some.
        rank0_only: return the state dict only on the first rank of the model's mesh. The other
            ranks get an empty dict, and hold one tensor at a time during the call.
        dtype: cast floating-point tensors to it.

    Returns:
        Plain CPU tensors under the names of the un-annotated model, and the other entries of the
        state dict. It loads into a plain model, and into a model with any annotation.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward.
        RanksDisagreeError: groups of ranks hold different values of a parameter under one name
            (experts that are plain tensors on meshes of their own).

    Example:
        >>> state = full_state_dict(model)
        >>> if rank == 0:
        ...     torch.save(state, "model.pt")
    """
    units, state, tied = _state_of("full_state_dict", module)
    keep = not rank0_only or not any(comm.rank for comm in comms_of_model(units))
    full = dict(state)  # in its order
    for fqn, whole in _stream(_tensors_in(state, tied), _dtypes_of(state, dtype)):
        full[fqn] = torch.empty_like(whole, device="cpu").copy_(whole) if keep else None
    for fqn, first in tied.items():
        full[fqn] = full[first]
    return full if keep else {}


# --- export -------------------------------------------------------------------------------------


@checked_on_all_ranks
def export(
    module: nn.Module, folder: str | os.PathLike[str], *, dtype: RealDtype | None = None
) -> None:
    """Write whole weights as Hugging Face safetensors.

    `export` writes one file, or several with an index. Several ranks write at once.

    The folder gets its name only when everything is written. If `export` is interrupted, it leaves
    `<folder>.partial`. All ranks call this together. A rank holds one of its files at a time, of 1
    to 5 GiB, on the host.

    Args:
        module: an annotated module, or one that contains some. If it has a `config` with
            `save_pretrained`, this is written as well.
        folder: a new or empty folder, on a file system that all ranks see.
        dtype: cast floating-point tensors to it.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward.
        AnnotationError: a whole tensor is not a plain tensor (4-bit weights), and `dtype` is not
            given.
        FileExistsError: `folder` is not empty.
        ImportError: the package `safetensors` is not installed.
        RanksDisagreeError: another rank could not write, or has other tensors, or other values
            (experts that are plain tensors on meshes of their own: export them apart).

    Example:
        >>> export(model, "out/llama-tuned", dtype=torch.bfloat16)
        >>> transformers.AutoModel.from_pretrained("out/llama-tuned")
    """
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            "export needs the package safetensors: pip install 'torch-composable[export]'"
        ) from error
    units, state, tied = _state_of("export", module)
    comm, *across = comms = comms_of_model(units)
    rank, ranks = comm.rank, comm.size
    writes = not any(each.rank for each in across)  # tensor-parallel ranks gather, and one writes
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    tensors = _tensors_in(state, tied)  # a file holds no tensor twice
    dtypes = _dtypes_of(state, dtype)
    _refuse_other_classes(tensors, dtypes)

    def make_folder() -> None:
        if target.exists() and any(target.iterdir()):
            raise FileExistsError(f"export: {target} is not empty; export to a new folder")
        if writes and rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    shapes = str([(name, tuple(tensor.shape)) for name, tensor in tensors.items()])
    all_or_none("export", comms, make_folder, checksum(shapes))
    sizes = {
        name: tensor.numel() * dtypes.get(name, tensor.dtype).itemsize
        for name, tensor in tensors.items()
    }
    files = plan_files(sizes, ranks)
    file_of = {name: index for index, names in enumerate(files) for name in names}
    for start in range(0, len(files), ranks):
        now = {
            name: tensor
            for name, tensor in tensors.items()
            if start <= file_of[name] < start + ranks
        }
        mine = {
            name: torch.empty_like(
                whole, device="cpu", memory_format=torch.contiguous_format
            ).copy_(whole)
            for name, whole in _stream(now, dtypes)
            if writes and file_of[name] == start + rank
        }

        def write(mine: dict[str, Tensor] = mine, index: int = start + rank) -> None:
            if writes and index < len(files):
                save_file(mine, partial / _file_name(index, len(files)), metadata={"format": "pt"})

        all_or_none("export", comms, write)

    def finish() -> None:
        if not writes or rank:
            return
        if len(files) > 1:
            where = {name: _file_name(file_of[name], len(files)) for name in tensors}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            text = json.dumps(index, indent=2) + "\n"
            (partial / "model.safetensors.index.json").write_text(text)
        config: Any = getattr(unwrapped(module), "config", None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(partial)
        partial.rename(target)

    all_or_none("export", comms, finish)


def _refuse_other_classes(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise if a whole tensor is no plain one.

    What a class gathers is seen by gathering the smallest tensor of it.
    """
    smallest: dict[type, str] = {}
    for name in sorted(tensors, key=lambda name: tensors[name].numel()):
        smallest.setdefault(type(local_tensor(tensors[name])), name)
    smallest.pop(Tensor, None)
    for name, whole in _stream({name: tensors[name] for name in smallest.values()}, dtypes):
        if type(whole) not in (Tensor, nn.Parameter):
            raise AnnotationError(
                f"export: '{name}' is an {type(whole).__name__}, and files of safetensors hold"
                " plain tensors only. Pass dtype=, such as torch.bfloat16, to write the values"
                " that it stands for, or save with torch.distributed.checkpoint"
            )


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"


def plan_files(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Distribute tensors over files of about equal size, so that many ranks write at once.

    A file has at least 1 GiB and at most about 5 GiB.
    """
    total = sum(sizes.values())
    count = max(1, min(ranks, total // SMALLEST_FILE), -(-total // (5 * SMALLEST_FILE)))
    files: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    # the largest first, each into the emptiest file
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        index = filled.index(min(filled))
        files[index].append(name)
        filled[index] += sizes[name]
    return [names for names in files if names] or [[]]
