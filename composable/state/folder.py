"""Read a folder of safetensors: its files, and the tensors in them.

The files are mapped into memory, and only the requested part of a tensor is read. If the index says
that a file has no requested tensor, the file is not opened. Nothing here knows a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from composable.errors import StateError, few

Box = Sequence[slice]

FILE: Final = "model.safetensors"
INDEX: Final = FILE + ".index.json"
# What numbers a tensor is of.
INTEGERS: Final = "integers"
FLOATS: Final = "floating-point numbers"
COMPLEX: Final = "complex numbers"


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
