"""A folder of safetensors: what becomes which tensor of a model, and which part of it a rank reads.

The files are mapped into memory, and what is asked of a tensor is all that is read. A parameter
that rests as `Shard` is read by its rows and columns, also of experts that a folder has one by
one. Of any other, and of one that is put together of several tensors in another way, a rank reads
all, one at a time. If an index says that a file has nothing for the model, it is not opened.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable.comm import Comm, is_distributed
from composable.comm.launch import Launch
from composable.engine.edits.loading import says_nothing_of_groups
from composable.errors import RanksDisagreeError, StateError, few, first_line
from composable.features.packed import is_packed
from composable.state.hub_names import Converted, by_transformers, ignored, kept_dtypes
from composable.state.whole import Managed, managed_in
from composable.torch_private import apply_to_tensors, local_of

Rename = Callable[[str], str]
Box = Sequence[slice]

FILE: Final = "model.safetensors"
INDEX: Final = FILE + ".index.json"


class Loaded(NamedTuple):
    """What was left out when a folder was read, as torch's `load_state_dict` returns it.

    Attributes:
        missing_keys: names of the model that the folder has nothing for; they are as they were, or
            as they were initialised.
        unexpected_keys: names in the folder that the model has nothing for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Files:
    """The tensors in a folder's files, by name."""

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ImportError(
                "load needs the package safetensors: pip install 'torch-composable[export]'"
            ) from error
        self._errors, self._safe_open = SafetensorError, safe_open
        self._open: dict[Path, Any] = {}
        self._at: dict[str, Path] = {}
        index = folder / INDEX
        if folder.is_file():
            self._add(folder)
        elif (folder / FILE).exists():  # `from_pretrained` prefers it to an index, too
            self._add(folder / FILE)
        elif index.exists():
            self._at = _read_index(index)
        else:
            for path in _all_files(folder):
                self._add(path)

    def _add(self, path: Path) -> None:
        for name in self._opened(path).keys():  # noqa: SIM118 - it is no mapping
            if name in self._at:
                raise StateError(
                    f"load: '{name}' is in {path} and in another file of the folder. Keep one of"
                    f" them, or an index ({INDEX}) that says which"
                )
            self._at[name] = path

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._safe_open(path, framework="pt")
            except self._errors as error:
                raise StateError(f"load: {path} cannot be read: {error}") from error
        return self._open[path]

    def _slice(self, name: str) -> Any:
        try:
            return self._opened(self._at[name]).get_slice(name)
        except self._errors as error:
            raise StateError(f"load: {self._at[name]} has no '{name}': {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [*self._at]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def kind(self, name: str) -> str:
        """Say what numbers a tensor is of."""
        dtype: str = self._slice(name).get_dtype()
        if dtype.startswith(("F64", "F32", "F16", "BF16", "F8")):
            return _FLOATS
        if dtype.startswith("C"):
            return _COMPLEX
        return _INTEGERS if dtype.startswith(("I", "U", "BOOL")) else dtype

    def files_of(self, names: Iterable[str]) -> list[Path]:
        """List the files of tensors."""
        return [*dict.fromkeys(self._at[name] for name in names)]

    def close(self, path: Path) -> None:
        """Give back what is mapped of a file, once no tensor is left that was read from it."""
        self._open.pop(path, None)

    def read(self, name: str, box: Box = ()) -> Tensor:
        """Read a tensor, or the part of it in a box."""
        if not box:
            whole: Tensor = self._opened(self._at[name]).get_tensor(name)
            return whole
        part: Tensor = self._slice(name)[tuple(box)]
        return part


def _read_index(index: Path) -> dict[str, Path]:
    try:
        at = {
            name: index.parent / file
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StateError(f"load: {index} is no index of safetensors: {error!r}") from error
    for path in dict.fromkeys(at.values()):
        if not path.exists():
            raise FileNotFoundError(f"load: {index} names {path.name}, which is not there")
    return at


def _all_files(folder: Path) -> list[Path]:
    if not folder.exists():
        raise FileNotFoundError(
            f"load: there is no folder {folder}. What a model hub has is downloaded first, as by"
            " huggingface_hub.snapshot_download"
        )
    if not (found := sorted(folder.glob("*.safetensors"))):
        others = few([path.name for path in sorted(folder.iterdir())]) or "nothing"
        raise FileNotFoundError(
            f"load: there is no file of safetensors in {folder}, but {others}. Other formats are"
            " converted first, as by from_pretrained and save_pretrained"
        )
    return found


_INTEGERS: Final = "integers"
_FLOATS: Final = "floating-point numbers"
_COMPLEX: Final = "complex numbers"

# Names that formats of quantised weights give to parts of a weight, and the weight's own name.
_QUANTISED: Final = (
    (re.compile(r"\.(qweight|SCB)$"), ".weight"),  # GPTQ and AWQ; 8 bits of bitsandbytes
    (re.compile(r"_(scale|scale_inv|packed|blocks)$"), ""),  # fp8, compressed-tensors, MXFP4
    (re.compile(r"\.(absmax|quant_map|quant_state\..+)$"), ""),  # 4 bits of bitsandbytes
    (re.compile(r"\.(_weight_|weight:)_?(qdata|scale|zero_point)$"), ".weight"),  # torchao
)


class _Scales(NamedTuple):
    """Of a packed parameter, what its state dict has beside it, which is no memory of the model.

    Attributes:
        names: in the folder, by those in the model.
    """

    packed: str
    names: dict[str, str]


class Plan:
    """Which tensors of a folder become which of the model."""

    def __init__(self, model: nn.Module, files: Files, rename: Rename | None) -> None:
        self._model, self._files = model, files
        self._state = state = at_rest(model)
        self._converted: list[Converted] = []
        # by the name in the model, that in the folder
        self._direct = {name if rename is None else rename(name): name for name in files.names}
        if rename is None and _is_of_transformers(model):
            self._direct, self._converted = by_transformers(model, state, files.names)
        self._refuse_overwritten()
        found = {*self._direct, *(target for each in self._converted for target in each.targets)}
        # Names are those of the state dict, which modules around others (checkpoint wrappers) leave
        # out of it; what they name is known by identity.
        self._names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            self._names.setdefault(id(tensor), []).append(name)
        self._tied = [names for names in self._names.values() if len(names) > 1]
        self._covered = {
            name for names in self._names.values() if not found.isdisjoint(names) for name in names
        }
        self.left_out = Loaded(
            [name for name in state if name not in self._covered],
            [
                *(name for target, name in self._direct.items() if target not in state),
                *(n for each in self._converted for n in each.names if not each.fits(state)),
            ],
        )
        self._direct = {target: n for target, n in self._direct.items() if target in state}
        self._scales = [
            _Scales(
                packed,
                {
                    target: self._direct.pop(target)
                    for target in [*self._direct]
                    if target.startswith(f"{packed}.")
                },
            )
            for packed, tensor in state.items()
            if is_packed(tensor)
        ]
        self._converted = [each for each in self._converted if each.fits(state)]

    def _refuse_overwritten(self) -> None:
        taken = {*self._direct.values(), *(name for each in self._converted for name in each.names)}
        if left := [name for name in self._files.names if name not in taken]:
            raise StateError(
                f"load: {_said(left)} and another tensor of the folder would become one of the"
                " model. Let rename= tell them apart"
            )

    def covers(self, tensor: Tensor | None) -> bool:
        """Whether the folder has this tensor of the model, or one that it is tied to."""
        return not self._covered.isdisjoint(self._names.get(id(tensor), ()))

    def lacks(self, tensor: Tensor | None) -> bool:
        """Whether it would be in the folder, and is not: buffers that are not saved are neither."""
        return id(tensor) in self._names and not self.covers(tensor)

    def check(self, *, strict: bool) -> None:
        """Raise if something does not fit; nothing is read but the heads of files."""
        self._refuse_quantised()
        missing, unexpected = self.left_out
        if not self._covered:
            raise StateError(
                "load: nothing in the folder has a name of the model: the folder has"
                f" {_said(unexpected) or 'nothing'}, the model {_said(missing)}. Tell by rename="
                " what they are called in the model"
            )
        if _is_of_transformers(self._model):
            missing, unexpected = ignored(self._model, missing, unexpected)
            self.left_out = Loaded(missing, unexpected)
        wrong = []
        if strict and missing:
            wrong.append(f"the folder has no {_said(missing)}")
        if strict and unexpected:
            wrong.append(f"the model has no {_said(unexpected)}")
        files = self._files
        for target, name in self._direct.items():
            wrong += self._unlike(target, files.shape(name), files.kind(name))
        for each in self._converted:
            try:
                on_meta = each.convert(self._model, self._head)
            except Exception as error:  # a part of one, such as an expert, is missing or misshapen
                told = f"{_said(each.targets)} cannot be made of {_said(each.names)}"
                wrong.append(f"{told}: {first_line(error)}")
                continue
            for target in each.targets:
                value = on_meta[target]
                wrong += self._unlike(target, tuple(value.shape), _kind(value))
        if wrong:
            raise StateError(f"load: the folder does not fit the model: {'; '.join(wrong)}")
        self._refuse_untied()

    def _refuse_quantised(self) -> None:
        made = (name for each in self._converted for name in each.names)
        weights = {*self._state, *self._direct.values(), *made}
        parts = [
            name
            for name in self.left_out.unexpected_keys
            if any(
                pattern.sub(own, name) in weights
                for pattern, own in _QUANTISED
                if pattern.search(name)
            )
        ]
        if parts:
            raise StateError(
                f"load: the folder has quantised weights ({_said(parts)}), and the model's are not."
                " Load the folder that was quantised, or what from_pretrained(...).dequantize()"
                " saves"
            )

    def _refuse_untied(self) -> None:
        """Raise if the folder has other values for one name of a tensor than for another one."""
        for names in self._tied:
            sources = {name: self._direct[name] for name in names if name in self._direct}
            if len(sources) < 2:
                continue
            box = _box_of(self._state[names[0]]) or ()
            first, *others = (self._files.read(source, box) for source in sources.values())
            if not all(_alike(first, other.to(first.dtype)) for other in others):
                raise StateError(
                    f"load: {_said([*sources])} are one tensor in the model, and the folder has"
                    " other values for each of them. Untie them before the annotation"
                    " (tie_word_embeddings=False in a config of transformers)"
                )

    def agree(self) -> None:
        """Raise on all ranks if some have a tensor that others lack who have parts of it, too."""
        members: dict[Comm, list[Managed]] = {}
        for each in managed_in("load", self._model):
            comms = each.param.info.form.comms(each.unit.mesh_info.device)
            for comm in dict.fromkeys((each.comm, *comms)):
                members.setdefault(comm, []).append(each)
        for comm, params in members.items():
            here = [int(self.covers(each.param.at_rest)) for each in params]
            lowest, highest = comm.min_max(here, Launch("comparison of what folders have"))
            differ = [
                each.fqn
                for each, low, high in zip(params, lowest, highest, strict=True)
                if low != high
            ]
            if differ:
                raise RanksDisagreeError(
                    f"load: some ranks have {_said(differ)} in their folder, and others have not."
                    " Give all ranks the same folder"
                )

    def _head(self, name: str) -> Tensor:
        """Make a tensor of the folder without its values."""
        dtype = {_FLOATS: torch.float32, _COMPLEX: torch.complex64}.get(
            self._files.kind(name), torch.int64
        )
        return torch.empty(self._files.shape(name), dtype=dtype, device="meta")

    def _unlike(self, target: str, shape: tuple[int, ...], kind: str) -> list[str]:
        wanted = self._state[target]
        if shape != tuple(wanted.shape):
            return [f"'{target}' is {list(shape)} there and {list(wanted.shape)} in the model"]
        own = _kind(wanted)
        if kind != own and (kind, own) != (_FLOATS, _COMPLEX):
            return [f"'{target}' is of {kind} there and of {own} in the model"]
        return []

    @torch.no_grad()
    def write(self) -> None:
        """Read this rank's part of everything."""
        state = at_rest(self._model)  # it may have been cast, or given memory
        # the files one after another, each of which is closed when it is done
        items = sorted(
            (
                *(
                    (self._files.files_of([name]), (target, name))
                    for target, name in self._direct.items()
                ),
                *((self._files.files_of(each.names), each) for each in self._converted),
                *((self._files.files_of(each.names.values()), each) for each in self._scales),
            ),
            key=itemgetter(0),
        )
        last = {file: number for number, (files, _) in enumerate(items) for file in files}
        for number, (files, item) in enumerate(_in_view(items)):
            if isinstance(item, Converted):
                self._convert(item, state)
            elif isinstance(item, _Scales):
                self._hand_over(
                    item.packed, {of: self._files.read(name) for of, name in item.names.items()}
                )
            else:
                target, name = item
                self._put(target, state[target], partial(self._files.read, name))
            for file in files:
                if last[file] == number:
                    self._files.close(file)

    def _convert(self, each: Converted, state: Mapping[str, Tensor]) -> None:
        boxes = [_box_of(state[target]) for target in each.targets]
        rows = None
        if each.stacks and all(boxes):
            rows, *others = [box[0] for box in boxes if box]
            if any(other != rows for other in others):
                rows = None
        if rows is not None and rows.start == rows.stop:
            return  # none of these experts is on this rank
        values = each.convert(self._model, self._files.read, rows)
        for target in each.targets:
            value = values.pop(target)

            def part(box: Box, value: Tensor = value) -> Tensor:
                return value[tuple(box)] if rows is None else value[(slice(None), *box[1:])]

            self._put(target, state[target], part)

    def _put(self, target: str, tensor: Tensor, read: Callable[[Box], Tensor]) -> None:
        """Write what `read` gives for a box into one tensor, however it rests."""
        box = _box_of(tensor)
        if box is None:
            self._hand_over(target, {target: read(())})
        else:
            local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            if local.numel():
                local.copy_(read(box))

    def _hand_over(self, target: str, wholes: Mapping[str, Tensor]) -> None:
        """Load one parameter or buffer, or what is named below it."""
        path = target.rpartition(".")[0]
        values = {name.removeprefix(f"{path}."): whole for name, whole in wholes.items()}
        self._model.get_submodule(path).load_state_dict(values, strict=False)


def at_rest(model: nn.Module) -> dict[str, Tensor]:
    """List parameters and buffers by name.

    They are not detached: a write to a detached `DTensor` moves no version counter.
    """
    with says_nothing_of_groups():
        state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what a folder has, as `from_pretrained(dtype=)` does.

    These are parameters and buffers of floating-point numbers. Buffers that are in no state dict,
    as rotary frequencies are, keep their dtype, and so does what a model of transformers declares
    to be computed in float32.
    """
    state = at_rest(model)
    kept = kept_dtypes(model, state, dtype) if _is_of_transformers(model) else {}
    wanted: dict[int, tuple[Tensor, torch.dtype]] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not is_packed(tensor):
            for each in (tensor, tensor.grad):
                if each is not None:
                    wanted[id(each)] = each, kept.get(name, dtype)
    apply_to_tensors(
        model, lambda tensor: tensor.to(wanted[id(tensor)][1]) if id(tensor) in wanted else tensor
    )


def _box_of(tensor: Tensor) -> list[slice] | None:
    """Which part of the whole tensor a rank holds; none if that is no box."""
    if not isinstance(tensor, DTensor):
        return []
    if type(local_of(tensor)) is not Tensor:
        return None
    box = [slice(0, size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:  # in another order of ranks
            return None
        # as `torch.chunk` cuts what the dimensions of the mesh before this one have left
        start, stop = box[placement.dim].start, box[placement.dim].stop
        rows = -(-(stop - start) // tensor.device_mesh.size(axis))
        start = min(stop, start + coordinate[axis] * rows)
        box[placement.dim] = slice(start, min(stop, start + rows))
    return box


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return _COMPLEX
    return _FLOATS if tensor.is_floating_point() else _INTEGERS


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a dtype and shape are equal, a NaN to a NaN."""
    # `torch.equal` does not know numbers of 8 bits
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _said(names: Sequence[str]) -> str:
    return few([repr(name) for name in names])


def _in_view(items: Sequence[Any]) -> Iterable[Any]:
    """Yield the items, with a bar on the standard error if a person is there to see rank 0's."""
    first = not is_distributed() or torch.distributed.get_rank() == 0
    if not first or not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import track  # noqa: PLC0415
    except ImportError:
        return items
    return track(items, "load", console=Console(stderr=True), transient=True)
