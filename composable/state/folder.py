"""`load`: weights from a folder of safetensors, of which each rank reads its own rows.

The files are mapped into memory, and what is asked of a tensor is all that is read. A parameter
that rests as rows (`Shard` on each of its dimensions at most once) is read by rows; of any other,
and of one that is put together of several tensors of the folder, a rank reads all, one at a time.
Nothing is sent but whether every rank can read what it needs, before anything is written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable.api.scopes import units_in
from composable.compilation import unwrapped
from composable.engine.edits.loading import says_nothing_of_groups
from composable.errors import PhaseError, StateError, few
from composable.memory.torch_private import local_of
from composable.state.hub_names import Converted, by_transformers
from composable.state.materialize import refresh
from composable.state.whole import all_or_none, comms_of_model, require_at_rest

Rename = Callable[[str], str]

INDEX: Final = "model.safetensors.index.json"


class Loaded(NamedTuple):
    """What `load` left out, as torch's `load_state_dict` returns it.

    Attributes:
        missing_keys: names of the model that the folder has nothing for; they are as they were.
        unexpected_keys: names in the folder that the model has nothing for.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Read weights from a folder of Hugging Face safetensors into an annotated model.

    Each rank reads the rows that it holds; nobody has the whole model. It is the inverse of
    `export`, and reads what `save_pretrained` writes. All ranks call this together, outside of
    forward and backward, and before optimizers are made if `dtype` is given.

    Args:
        model: an annotated module, or one that contains some, with memory: on the meta device
            call `materialize(model)` first.
        folder: with `model.safetensors`, or an index and its files, or any files of safetensors;
            or such a file. Every rank must see it.
        dtype: the model is cast to it first, as by `model.to(dtype)`. None: values are cast to the
            dtypes that the model has.
        strict: refuse a folder whose names are not those of the model. Of tied tensors one name is
            enough.
        rename: what a tensor of the folder is called in the model. None: for a model of
            transformers what `from_pretrained` does, experts that it stacks included; else the
            names as they are.

    Returns:
        Names that were missing and unexpected; empty if `strict`.

    Raises:
        NotAnnotatedError: no annotated module in `model`.
        PhaseError: inside of a forward or backward.
        FileNotFoundError: no file of safetensors in `folder`, or one that its index names.
        StateError: names or shapes differ, values cannot be cast (integers are no weights: a
            quantised file), a name is in two files, two names become one, or a file is cut off. On
            all ranks, and the model is as it was.
        ImportError: the package `safetensors` is not installed.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> load(model, "models/llama")
        Loaded(missing_keys=[], unexpected_keys=[])
    """
    model = unwrapped(model)
    units = units_in("load", model)
    require_at_rest("load", units)
    comms = comms_of_model(units)
    with ExitStack() as stack:
        plans: list[_Plan] = []

        def look() -> None:
            plan = _Plan(model, _Files(Path(folder), stack), rename)
            plan.check(strict=strict)
            plans.append(plan)

        all_or_none("load", comms, look)
        (plan,) = plans
        if dtype is not None:
            model.to(dtype)
            refresh(model)
        all_or_none("load", comms, partial(plan.write, shows=comms[0].rank == 0))
        return plan.left_out


class _Files:
    """The tensors in a folder's files, by name. A file is open as long as `stack` is."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        try:
            from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ImportError(
                "load needs the package safetensors: pip install 'torch-composable[export]'"
            ) from error
        self._at: dict[str, Any] = {}
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise StateError(f"load: {path} cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in self._at:
                    raise StateError(
                        f"load: '{name}' is in {path} and in another file of the folder. Keep one"
                        f" of them, or an index ({INDEX}) that says which"
                    )
                self._at[name] = file

    @property
    def names(self) -> list[str]:
        return [*self._at]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._at[name].get_slice(name).get_shape())

    def is_floating_point(self, name: str) -> bool:
        return str(self._at[name].get_slice(name).get_dtype()).startswith(("F", "BF", "C"))

    def read(self, name: str, box: Sequence[slice] = ()) -> Tensor:
        """Read a tensor, or the part of it in a box."""
        if not box:
            whole: Tensor = self._at[name].get_tensor(name)
            return whole
        part: Tensor = self._at[name].get_slice(name)[tuple(box)]
        return part


def _paths(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / INDEX
    if index.exists():
        try:
            files = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise StateError(f"load: {index} is no index of safetensors: {error!r}") from error
        found = [folder / file for file in files]
    else:
        found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"load: there is no file of safetensors in {folder}")
    for path in found:
        if not path.exists():
            raise FileNotFoundError(f"load: {index} names {path.name}, which is not there")
    return found


class _Plan:
    """Which tensors of a folder become which of the model."""

    def __init__(self, model: nn.Module, files: _Files, rename: Rename | None) -> None:
        self._model, self._files = model, files
        self._state = state = _at_rest(model)
        self._converted: list[Converted] = []
        # by the name in the model, that in the folder
        self._direct = {name if rename is None else rename(name): name for name in files.names}
        if rename is None and _is_of_transformers(model):
            self._direct, self._converted = by_transformers(model, state, files.names)
        self._refuse_overwritten()
        found = {*self._direct, *(target for each in self._converted for target in each.targets)}
        tied = {name: names for names in _tied(model) for name in names}
        self.left_out = Loaded(
            [name for name in state if found.isdisjoint(tied.get(name, (name,)))],
            [
                *(name for target, name in self._direct.items() if target not in state),
                *(n for each in self._converted for n in each.names if not each.fits(state)),
            ],
        )
        self._direct = {target: n for target, n in self._direct.items() if target in state}
        self._converted = [each for each in self._converted if each.fits(state)]

    def _refuse_overwritten(self) -> None:
        taken = {*self._direct.values(), *(name for each in self._converted for name in each.names)}
        if left := [name for name in self._files.names if name not in taken]:
            raise StateError(
                f"load: {_said(left)} and another tensor of the folder would become one of the"
                " model. Let rename= tell them apart"
            )

    def check(self, *, strict: bool) -> None:
        """Raise if something does not fit; nothing is read but the heads of files."""
        wrong = []
        if strict and self.left_out.missing_keys:
            wrong.append(f"the folder has no {_said(self.left_out.missing_keys)}")
        if strict and self.left_out.unexpected_keys:
            wrong.append(f"the model has no {_said(self.left_out.unexpected_keys)}")
        files = self._files
        for target, name in self._direct.items():
            wrong += self._unlike(target, files.shape(name), files.is_floating_point(name))
        for each in self._converted:
            on_meta = each.convert(self._model, self._head)
            for target in each.targets:
                value = on_meta[target]
                wrong += self._unlike(target, tuple(value.shape), value.is_floating_point())
        if wrong:
            raise StateError(f"load: the folder does not fit the model: {'; '.join(wrong)}")
        if absent := [name for name, tensor in self._state.items() if tensor.is_meta]:
            raise PhaseError(
                f"load: {_said(absent)} is on the meta device. Give the model memory first, with"
                " materialize(model)"
            )

    def _head(self, name: str) -> Tensor:
        """Make a tensor of the folder without its values."""
        shape = self._files.shape(name)
        dtype = torch.float32 if self._files.is_floating_point(name) else torch.int64
        return torch.empty(shape, dtype=dtype, device="meta")

    def _unlike(self, target: str, shape: tuple[int, ...], is_floating_point: bool) -> list[str]:
        wanted = self._state[target]
        if shape != tuple(wanted.shape):
            return [f"'{target}' is {list(shape)} there and {list(wanted.shape)} in the model"]
        if is_floating_point != (wanted.is_floating_point() or wanted.is_complex()):
            kinds = ["integers", "floating-point numbers"]
            there, here = kinds[is_floating_point], kinds[not is_floating_point]
            return [f"'{target}' is of {there} there and of {here} in the model"]
        return []

    @torch.no_grad()
    def write(self, *, shows: bool) -> None:
        """Read this rank's part of everything.

        Args:
            shows: a bar of how far it is, if it is a terminal's.
        """
        state = _at_rest(self._model)  # it may have been cast
        for target, name in _in_view([*self._direct.items()], "load", shows=shows):
            tensor = state[target]
            box = _box_of(tensor)
            if box is None:
                self._hand_over(target, self._files.read(name))
            else:
                local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
                if local.numel():
                    local.copy_(self._files.read(name, box))
        for each in _in_view(self._converted, "load what is converted", shows=shows):
            values = each.convert(self._model, self._files.read)
            for target in each.targets:
                self._hand_over(target, values.pop(target))

    def _hand_over(self, target: str, whole: Tensor) -> None:
        """Load one tensor, however it rests."""
        path, _, name = target.rpartition(".")
        self._model.get_submodule(path).load_state_dict({name: whole}, strict=False)


def _at_rest(model: nn.Module) -> dict[str, Tensor]:
    """List parameters and buffers by name.

    They are not detached: a write to a detached `DTensor` moves no version counter.
    """
    with says_nothing_of_groups():
        state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


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
        # twice along one dimension, or in another order of ranks
        if type(placement) is not Shard or box[placement.dim] != slice(
            0, tensor.shape[placement.dim]
        ):
            return None
        size, ranks = tensor.shape[placement.dim], tensor.device_mesh.size(axis)
        rows = -(-size // ranks)  # as `torch.chunk`
        start = min(size, coordinate[axis] * rows)
        box[placement.dim] = slice(start, min(size, start + rows))
    return box


def _tied(model: nn.Module) -> list[list[str]]:
    """List the names of each parameter and buffer that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _said(names: Sequence[str]) -> str:
    return few([repr(name) for name in names])


def _in_view(items: Sequence[Any], title: str, *, shows: bool) -> Iterable[Any]:
    """Yield the items, with a bar on the standard error if a person is there to see it."""
    if not shows or not items or not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.progress import track  # noqa: PLC0415
    except ImportError:
        return items
    return track(items, title, console=Console(stderr=True), transient=True)
