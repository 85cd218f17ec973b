"""Plan what a rank reads from a folder: which tensor of the model gets which rows of which tensor.

If a parameter has the placement `Shard`, only this rank's rows and columns are read, even if the
folder stores experts one by one. For other placements, and if a parameter is combined from several
tensors in another way, a rank reads whole tensors, one at a time. If something is missing,
unexpected or does not fit, an error is raised here, on all ranks alike. Nothing is written here
(`writing.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.comm import Comm
from composable.engine.step.unit import Unit
from composable.errors import RanksDisagreeError, StateError, few, first_line
from composable.features.forms import is_packed
from composable.state.folder import COMPLEX, FLOATS, INTEGERS, Files
from composable.state.hub_names import Converted, by_transformers, ignored, is_of_transformers
from composable.state.whole import (
    NamedParam,
    all_or_none,
    comms_of_model,
    managed_in,
    names_that_differ,
    tensors_at_rest,
)
from composable.tensors.dtensors import slices_at
from composable.torch_private import local_of

Rename = Callable[[str], str]

# Names that formats of quantised weights give to parts of a weight, and the weight's own name.
_QUANTISED: Final = (
    (re.compile(r"\.(qweight|SCB)$"), ".weight"),  # GPTQ and AWQ; 8 bits of bitsandbytes
    (re.compile(r"_(scale|scale_inv|packed|blocks)$"), ""),  # fp8, compressed-tensors, MXFP4
    (re.compile(r"\.(absmax|quant_map|quant_state\..+)$"), ""),  # 4 bits of bitsandbytes
    (re.compile(r"\.(_weight_|weight:)_?(qdata|scale|zero_point)$"), ".weight"),  # torchao
)


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
    verb: str,
    model: nn.Module,
    units: Sequence[Unit],
    folder: str | os.PathLike[str],
    rename: Rename | None,
    *,
    strict: bool,
) -> FolderPlan:
    """Plan how `model` is filled from a folder, or raise on all ranks."""
    plans: list[FolderPlan] = []

    def look() -> None:
        plans.append(FolderPlan(model, Files(Path(folder)), rename))
        plans[0].check(strict=strict)

    all_or_none("load", comms_of_model(units), look)
    plans[0].agree()
    return plans[0]


class Copied(NamedTuple):
    """A tensor of the model that is one of the folder."""

    target: str
    source: str


class Packed(NamedTuple):
    """Of a packed parameter, what its state dict has beside it, which is no memory of the model.

    Attributes:
        names: in the folder, by those in the model.
    """

    target: str
    names: dict[str, str]


Step = Copied | Packed | Converted


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
        self._packed = {fqn: Packed(fqn, {}) for fqn, each in state.items() if is_packed(each)}
        if self._packed:
            for target in [*self._direct]:
                end = target.find(".")
                while end >= 0 and target[:end] not in self._packed:
                    end = target.find(".", end + 1)
                if end >= 0:
                    self._packed[target[:end]].names[target] = self._direct.pop(target)
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

    def steps(self) -> list[tuple[list[Path], Step]]:
        """List what is read, with the files that it is in, one file after another."""
        steps: list[tuple[Iterable[str], Step]] = [
            *(([source], Copied(target, source)) for target, source in self._direct.items()),
            *((each.names, each) for each in self._converted),
            *((each.names.values(), each) for each in self._packed.values()),
        ]
        return sorted(
            ((self.files.files_of(sources), step) for sources, step in steps), key=itemgetter(0)
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
