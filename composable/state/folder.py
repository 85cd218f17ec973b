"""Read a folder of safetensors into an annotated model.

`Files` reads; it knows no model. The files are mapped into memory, and only the requested part of a
tensor is read. If the index says that a file has no requested tensor, the file is not opened.

`FolderPlan` decides which tensor of the model gets which rows of which tensor, and checks that
everything fits: if something is missing, unexpected or does not fit, an error is raised on all
ranks alike, before anything is written. `FolderPlan.write` writes; nothing is sent. If a parameter
has the placement `Shard`, only this rank's rows and columns are read, even if the folder stores
experts one by one. For other placements, and if a parameter is combined from several tensors in
another way, a rank reads whole tensors, one at a time.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm.backends import is_distributed
from composable.comm.base import Comm
from composable.engine.step.unit import Unit
from composable.errors import RanksDisagreeError, StateError, few, first_line
from composable.state.hub_names import Converted, by_transformers, ignored, is_of_transformers
from composable.state.whole import (
    NamedParam,
    all_or_none,
    comms_of_model,
    managed_in,
    names_that_differ,
    tensors_at_rest,
)
from composable.tensors import is_packed, slices_at
from composable.torch_private import local_of, local_tensor

Box = Sequence[slice]
Rename = Callable[[str], str]

FILE: Final = "model.safetensors"
INDEX: Final = FILE + ".index.json"
# What numbers a tensor is of.
INTEGERS: Final = "integers"
FLOATS: Final = "floating-point numbers"
COMPLEX: Final = "complex numbers"
# Names that formats of quantised weights give to parts of a weight, and the weight's own name.
_QUANTISED: Final = (
    (re.compile(r"\.(qweight|SCB)$"), ".weight"),  # GPTQ and AWQ; 8 bits of bitsandbytes
    (re.compile(r"_(scale|scale_inv|packed|blocks)$"), ""),  # fp8, compressed-tensors, MXFP4
    (re.compile(r"\.(absmax|quant_map|quant_state\..+)$"), ""),  # 4 bits of bitsandbytes
    (re.compile(r"\.(_weight_|weight:)_?(qdata|scale|zero_point)$"), ".weight"),  # torchao
)

# --- files ---------------------------------------------------------------------------------------


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
            return FLOATS
        if dtype.startswith("C"):
            return COMPLEX
        return INTEGERS if dtype.startswith(("I", "U", "BOOL")) else dtype

    def head(self, name: str) -> Tensor:
        """Make a tensor without values, of the shape and kind of one in the folder."""
        kinds = {FLOATS: torch.float32, COMPLEX: torch.complex64}
        dtype = kinds.get(self.kind(name), torch.int64)
        return torch.empty(self.shape(name), dtype=dtype, device="meta")

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


# --- the plan ------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What was left out when a folder was read, as torch's `load_state_dict` returns it.

    Attributes:
        missing_keys: names of the model that the folder has nothing for; they are as they were, or
            as they were initialised.
        unexpected_keys: names in the folder that the model has nothing for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def plan_folder(
    model: nn.Module,
    units: Sequence[Unit],
    folder: str | os.PathLike[str],
    rename: Rename | None,
    *,
    strict: bool,
) -> FolderPlan:
    """Plan how `model` is filled from a folder, or raise on all ranks."""

    def look() -> FolderPlan:
        plan = FolderPlan(model, Files(Path(folder)), rename)
        plan.check(strict=strict)
        return plan

    plan: FolderPlan = all_or_none("load", comms_of_model(units), look)
    plan.agree()
    return plan


class FolderPlan:
    """Which tensors of a folder become which of the model.

    Attributes:
        files: of the folder.
        left_out: what is missing and unexpected.
    """

    def __init__(self, model: nn.Module, files: Files, rename: Rename | None) -> None:
        self._model, self.files = model, files
        self._state = state = tensors_at_rest(model)
        self._converted: list[Converted] = []
        # by the name in the model, that in the folder
        self._direct = {name if rename is None else rename(name): name for name in files.names}
        if rename is None and is_of_transformers(model):
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
        # by packed parameter, what its state dict has beside it, which is no memory of the model:
        # by the name in the model, that in the folder
        self._packed: dict[str, dict[str, str]] = {
            fqn: {} for fqn, each in state.items() if is_packed(each)
        }
        if self._packed:
            for target in [*self._direct]:
                end = target.find(".")
                while end >= 0 and target[:end] not in self._packed:
                    end = target.find(".", end + 1)
                if end >= 0:
                    self._packed[target[:end]][target] = self._direct.pop(target)
        self._converted = [each for each in self._converted if each.fits(state)]

    def _refuse_overwritten(self) -> None:
        taken = {*self._direct.values(), *(name for each in self._converted for name in each.names)}
        if left := [name for name in self.files.names if name not in taken]:
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
        if is_of_transformers(self._model):
            missing, unexpected = ignored(self._model, missing, unexpected)
            self.left_out = Loaded(missing, unexpected)
        wrong = []
        if strict and missing:
            wrong.append(f"the folder has no {_said(missing)}")
        if strict and unexpected:
            wrong.append(f"the model has no {_said(unexpected)}")
        files = self.files
        for target, name in self._direct.items():
            wrong += self._unlike(target, files.shape(name), files.kind(name))
        for each in self._converted:
            try:
                on_meta = each.convert(self._model, self.files.head)
            except Exception as error:  # a part of one, such as an expert, is missing or misshapen
                what = f"{_said(each.targets)} cannot be made of {_said(each.names)}"
                wrong.append(f"{what}: {first_line(error)}")
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
            box = box_of(self._state[names[0]]) or ()
            first, *others = (self.files.read(source, box) for source in sources.values())
            if not all(_alike(first, other.to(first.dtype)) for other in others):
                raise StateError(
                    f"load: {_said([*sources])} are one tensor in the model, and the folder has"
                    " other values for each of them. Untie them before the annotation"
                    " (tie_word_embeddings=False in a config of transformers)"
                )

    def agree(self) -> None:
        """Raise on all ranks if some have a tensor that others lack who have parts of it, too."""
        members: dict[Comm, list[NamedParam]] = {}
        for each in managed_in("load", self._model):
            comms = each.param.info.form.comms(each.unit.mesh_info.device)
            for comm in dict.fromkeys((each.comm, *comms)):
                members.setdefault(comm, []).append(each)
        for comm, params in members.items():
            here = [int(self.covers(each.param.at_rest)) for each in params]
            if differ := names_that_differ(comm, params, here, "what folders have"):
                raise RanksDisagreeError(
                    f"load: some ranks have {_said(differ)} in their folder, and others have not."
                    " Give all ranks the same folder"
                )

    def _unlike(self, target: str, shape: tuple[int, ...], kind: str) -> list[str]:
        wanted = self._state[target]
        if shape != tuple(wanted.shape):
            return [f"'{target}' is {list(shape)} there and {list(wanted.shape)} in the model"]
        own = _kind(wanted)
        if kind != own and (kind, own) != (FLOATS, COMPLEX):
            return [f"'{target}' is of {kind} there and of {own} in the model"]
        return []

    # --- writing -----------------------------------------------------------------------------

    @torch.no_grad()
    def write(self) -> None:
        """Write this rank's part of everything, one file after another.

        Each of them is closed when it is done.
        """
        self._state = tensors_at_rest(self._model)  # it may have been cast, or given memory
        writes: list[tuple[Iterable[str], Callable[[], None]]] = [
            *(([name], partial(self._copy, to, name)) for to, name in self._direct.items()),
            *((each.names, partial(self._convert, each)) for each in self._converted),
            *((by.values(), partial(self._unpack, to, by)) for to, by in self._packed.items()),
        ]
        files = self.files
        by_file = sorted(((files.files_of(names), act) for names, act in writes), key=itemgetter(0))
        last = {file: number for number, (paths, _) in enumerate(by_file) for file in paths}
        for number, (paths, act) in enumerate(_in_view(by_file)):
            act()
            for file in paths:
                if last[file] == number:
                    files.close(file)

    def _copy(self, target: str, name: str) -> None:
        self._put(target, partial(self.files.read, name))

    def _unpack(self, target: str, names: Mapping[str, str]) -> None:
        self._hand_over(target, {to: self.files.read(name) for to, name in names.items()})

    def _convert(self, each: Converted) -> None:
        rows = rows_of(each, [self._state[target] for target in each.targets])
        if rows is not None and rows.start == rows.stop:
            return  # none of these experts is on this rank
        values = each.convert(self._model, self.files.read, rows)
        for target in each.targets:
            value = values.pop(target)

            def part(box: Box, value: Tensor = value) -> Tensor:
                return value[tuple(box)] if rows is None else value[(slice(None), *box[1:])]

            self._put(target, part)

    def _put(self, target: str, read: Callable[[Box], Tensor]) -> None:
        """Write what `read` gives for a box into one tensor, however it rests."""
        tensor = self._state[target]
        box = box_of(tensor)
        if box is None:
            self._hand_over(target, {target: read(())})
        elif (local := local_tensor(tensor)).numel():
            local.copy_(read(box))

    def _hand_over(self, target: str, wholes: Mapping[str, Tensor]) -> None:
        """Load one parameter or buffer, or what is named below it."""
        path = target.rpartition(".")[0]
        values = {name.removeprefix(f"{path}."): whole for name, whole in wholes.items()}
        self._model.get_submodule(path).load_state_dict(values, strict=False)


def box_of(tensor: Tensor) -> list[slice] | None:
    """Which part of the whole tensor a rank holds; none if that is no box."""
    if not isinstance(tensor, DTensor):
        return []
    if type(local_of(tensor)) is not Tensor:
        return None
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    slices = slices_at(place, tensor.device_mesh, tensor.placements, tensor.shape)
    return None if slices is None else [slice(*each) for each in slices]


def rows_of(each: Converted, tensors: Sequence[Tensor]) -> slice | None:
    """Which of the tensors that are stacked a rank needs for its part; none if that is no row."""
    boxes = [box_of(tensor) for tensor in tensors]
    if not each.stacks or not all(boxes):
        return None
    first, *others = [box[0] for box in boxes if box]
    return first if all(other == first for other in others) else None


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return COMPLEX
    return FLOATS if tensor.is_floating_point() else INTEGERS


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a dtype and shape are equal, a NaN to a NaN."""
    # `torch.equal` does not know numbers of 8 bits
    return bool(((one == other) | ((one != one) & (other != other))).all())


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
