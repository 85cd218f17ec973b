"""`python -m composable replay FOLDER`: the unit of an incident runs again, in one process.

The calls of all ranks are repeated, one after the other, with whole parameters that are put
together from the shards of all ranks.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import dis
import io
import math
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable.contract.values import tensors_in
from composable.errors import ReplayError, first_line
from composable.extras.watch.findings import is_finite, range_of
from composable.extras.watch.incident import FORMAT, are_apart, by_index
from composable.memory.digests import digests

COLUMNS: Final = ("shard", "gather", "inputs", "forward", "backward", "reduction")
_SOUND: Final = "sound"
_UNKNOWN: Final = "-"
_MAIN: Final = "__main__"
_READS: Final = ("LOAD_NAME", "LOAD_GLOBAL")
_WRITES: Final = ("STORE_NAME", "STORE_GLOBAL")
File = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="what `watch(model, folder=...)` has written")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        print(replay(options.folder))
    except ReplayError as error:
        print(f"python -m composable replay: {error}", file=sys.stderr)
        return 2
    return 0


def replay(folder: Path) -> str:
    """Run the unit of an incident again, and say where it first goes wrong.

    Args:
        folder: of one incident, with a file of each rank.

    Returns:
        What was found, a table with a row per rank, and the first thing that is not sound.

    Raises:
        ReplayError: the folder is not whole, or of another version, or its model cannot be
            imported.
    """
    files = _read(folder)
    table = _run(files)
    width = max(len(text) for row in table.values() for text in (*row.values(), *COLUMNS)) + 2
    head = "rank  " + "".join(f"{column:<{width}}" for column in COLUMNS)
    lines = [files[0]["finding"], "", head.rstrip()]
    for rank, row in table.items():
        cells = "".join(f"{row.get(column, _UNKNOWN):<{width}}" for column in COLUMNS)
        lines.append(f"{rank:<6}{cells}".rstrip())
    return "\n".join([*lines, "", f"first: {_verdict(table, files[0])}"])


def _verdict(table: dict[int, dict[str, str]], file: File) -> str:
    if file["why"]:
        return f"not looked for, since {file['why']}"
    for column in COLUMNS:
        for rank, row in table.items():
            if row.get(column, _UNKNOWN) not in (_SOUND, _UNKNOWN):
                return f"{column} of rank {rank}: {row[column]}"
    if not any("forward" in row for row in table.values()):
        return "not found: no call of the unit was kept that could be run again"
    several = f", in the one call of {file['calls']} that ran again" if file["calls"] > 1 else ""
    return f"nothing is wrong here: what was found does not come again{several}"


def _read(folder: Path) -> list[File]:
    paths = sorted(folder.glob("rank-*.pt")) if folder.is_dir() else []
    if not paths:
        raise ReplayError(
            f"{folder} has no file of a rank (rank-0.pt). Pass the folder of one incident, below"
            " the one that was given to watch(model, folder=...)"
        )
    files: list[File] = []
    for path in paths:
        try:
            files.append(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # zip files that were cut off raise several kinds
            raise ReplayError(
                f"{path} cannot be read: {first_line(error)}. Copy it again from its rank"
            ) from error
        if files[-1].get("format") != FORMAT:
            raise ReplayError(
                f"{path} was written by another version of composable"
                f" (format {files[-1].get('format')}, this one reads {FORMAT}). Use that version:"
                f" {files[-1].get('versions')}"
            )
    if any(each["ranks"] != files[0]["ranks"] for each in files):
        raise ReplayError(
            f"{folder} has files of several runs, on other numbers of ranks. Delete the older"
            " ones, and give each run a folder of its own"
        )
    there = [each["rank"] for each in files]
    missing = sorted(set(files[0]["ranks"]) - set(there))
    if missing:
        raise ReplayError(
            f"{folder} is not whole: rank {', '.join(map(str, missing))} has no file there. Copy"
            " the files of all ranks into it"
        )
    return sorted(files, key=lambda each: each["rank"])


def _run(files: Sequence[File]) -> dict[int, dict[str, str]]:
    table: dict[int, dict[str, str]] = {each["rank"]: {} for each in files}
    if "parameters" not in files[0]:
        return table
    made: dict[int, list[Tensor | None]] = {}
    for file in files:
        row = table[file["rank"]]
        bad = [each["fqn"] for each in file["parameters"] if not is_finite(each["shard"])]
        row["shard"] = _not_finite(bad[0]) if bad else _SOUND
        row["gather"] = _gather(file, _peers(file, files))
        if "module" not in file:
            continue
        made[file["rank"]] = _compute(file, _peers(file, files), row)
    once = all(each["calls"] == 1 and each["averaged"] for each in files)
    if len(made) == len(files) and once:
        for file in files:
            table[file["rank"]]["reduction"] = _reduction(file, made)
    return table


def _peers(file: File, files: Sequence[File]) -> list[File]:
    """The ranks whose shards make its parameters, in their order."""
    same = [each for each in files if each["replica"] == file["replica"]]
    return sorted(same, key=lambda each: each["shard"])


def _whole(number: int, peers: Sequence[File]) -> Tensor:
    rows = [peer["parameters"][number] for peer in peers]
    first = rows[0]
    shards = [each["shard"] for each in rows]
    cut = first["cut"] is not None and not first["whole"]
    whole: Tensor = torch.cat(shards, first["cut"]) if cut else shards[0]
    return whole.to(first["dtype"])


def _gather(file: File, peers: Sequence[File]) -> str:
    """Whether what was gathered is what the ranks have."""
    if not file["gathered"]:
        return _UNKNOWN
    for peer in peers:
        for each in peer["parameters"]:
            key = f"{each['name']} (in forward) {peer['shard']}"
            sent = by_index(digests([each["shard"].to(each["dtype"])]))
            if sent and sent[0] != file["gathered"].get(key, sent[0]):
                return f"other rows of {each['fqn']} than rank {peer['rank']} has"
    return _SOUND


def _compute(file: File, peers: Sequence[File], row: dict[str, str]) -> list[Tensor | None]:
    """Run forward and backward as this rank has; returns the gradients of the parameters."""
    script = Script(file["main"])
    module = _unpickled(file["module"], "the model", script)
    args, kwargs = _unpickled(file["inputs"], "its inputs", script)
    parameters = [
        nn.Parameter(_whole(number, peers), requires_grad=each["trains"])
        for number, each in enumerate(file["parameters"])
    ]
    named = {each["name"]: p for each, p in zip(file["parameters"], parameters, strict=True)}
    for fqn, name, key in file["places"]:
        setattr(module.get_submodule(fqn), name, named[key])
    row["inputs"] = _first_bad("input", tensors_in((args, kwargs)))
    dtype = file["autocast"]
    try:
        with torch.random.fork_rng([]), torch.autocast("cpu", dtype, dtype is not None):
            if file["device"] == "cpu":
                torch.set_rng_state(file["generator"])
            output = module(*args, **kwargs)
    except Exception as error:  # code of the model, in a process without a group
        row["forward"] = f"raised {type(error).__name__}: {first_line(error)}"
        return [None] * len(parameters)
    outputs = tensors_in(output)
    row["forward"] = _first_bad("output", outputs)
    if row["forward"] == _SOUND and _comparable(file):
        for index, number in by_index(digests([each.detach() for each in outputs])).items():
            if file["outputs"].get(index, number) != number:
                row["forward"] = f"output {index} has other bits"
    ends = [(outputs[index], g) for index, g in file["gradients"].items() if index < len(outputs)]
    ends = [(tensor, gradient) for tensor, gradient in ends if tensor.requires_grad]
    if not ends:
        return [None] * len(parameters)
    apart = are_apart([each for each, _ in ends])
    torch.autograd.backward([each for each, _ in ends], [gradient for _, gradient in ends])
    gradients = [each.grad for each in parameters]
    row["backward"] = _first_bad("gradient of output", [gradient for _, gradient in ends])
    made = [*zip([each["fqn"] for each in file["parameters"]], gradients, strict=True)]
    made += [("an input", tensor.grad) for tensor in tensors_in((args, kwargs))]
    bad = [name for name, each in made if each is not None and not is_finite(each)]
    if row["backward"] == _SOUND and bad:
        row["backward"] = _not_finite(f"gradient of {bad[0]}")
    return gradients if apart else [None] * len(parameters)


def _reduction(file: File, made: dict[int, list[Tensor | None]]) -> str:
    """Whether the gradients that landed are the means of those that the ranks have made again.

    Up to one factor, since gradients may have been clipped.
    """
    pairs = []
    for number, each in enumerate(file["parameters"]):
        terms = [gradients[number] for gradients in made.values()]
        if each["gradient"] is None or any(term is None for term in terms):
            continue
        mean = torch.stack([term.double() for term in terms if term is not None]).mean(0)
        if each["cut"] is not None and not each["whole"]:
            chunks = mean.chunk(file["shards"], each["cut"])
            mean = chunks[file["shard"]] if file["shard"] < len(chunks) else mean[:0]
        if mean.numel():
            pairs.append((each["fqn"], mean, each["gradient"].double()))
    if not pairs:
        return _UNKNOWN
    for fqn, mean, landed in pairs:
        if is_finite(mean) and not is_finite(landed):
            return _not_finite(f"the sum of {fqn}")
    pairs = [each for each in pairs if is_finite(each[1])]
    squares = sum(mean.square().sum().item() for _, mean, _ in pairs)
    factor = sum((mean * landed).sum().item() for _, mean, landed in pairs) / (squares or 1.0)
    for fqn, mean, landed in pairs:
        wrong = (landed - factor * mean).abs().max().item()
        if wrong > abs(factor) * (1e-2 * mean.abs().max().item() + 1e-6):
            return f"{fqn} is not the mean over the ranks"
    return _SOUND


def _unpickled(value: Any, what: str, script: Script) -> Any:
    if isinstance(value, str):
        raise ReplayError(f"{what} was not written: {value}")
    try:
        return torch.load(
            io.BytesIO(value), "cpu", weights_only=False, pickle_module=script.pickle_module
        )
    except (ImportError, AttributeError) as error:
        raise ReplayError(
            f"{what} cannot be imported: {first_line(error)}. Run the command where its code can be"
            " imported, with PYTHONPATH set as for the training"
        ) from error


def _comparable(file: File) -> bool:
    """Bits are those of one device and one version of torch, and of a call that can be repeated."""
    same = file["device"] == "cpu" and file["versions"]["torch"] == str(torch.__version__)
    return bool(same and file["exact"])


def _first_bad(kind: str, tensors: Sequence[Tensor]) -> str:
    for index, tensor in enumerate(tensors):
        low, high = range_of(tensor)
        if math.isnan(low) or high == math.inf:
            return _not_finite(f"{kind} {index}")
    return _SOUND


def _not_finite(what: str) -> str:
    return f"{what} is not finite"


# --- classes of the training script --------------------------------------------------------------

# The script was the module `__main__` in training, and is only a file in a replay.


class Script:
    """Defines classes and functions of a script without running it.

    Only statements that define a wanted name are executed, and those that define what they read,
    except for loops: a script may train in any of the others.

    Args:
        main: what `main_of_process` returned there.
    """

    def __init__(self, main: dict[str, str]) -> None:
        self._path = main.get("path", "")
        self._module = ModuleType(_MAIN)
        vars(self._module).update(__file__=self._path, __package__=main.get("package", ""))
        self._statements: list[CodeType] = []
        self._done: set[int] = set()

    @property
    def pickle_module(self) -> Any:
        """For `torch.load`: it finds what was `__main__` in the script."""
        script = self

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return script.find(name) if module == _MAIN else super().find_class(module, name)

        module = ModuleType("pickle")  # torch.load reads its name, too
        vars(module).update(Unpickler=Unpickler)
        return module

    def find(self, name: str) -> Any:
        """Define a class or function, by its qualified name.

        Raises:
            ReplayError: the script is not there, or does not define it.
        """
        self._read()
        first, *inner = name.split(".")
        try:
            self._define(first)
            return reduce(getattr, inner, vars(self._module)[first])
        except (Exception, SystemExit) as error:  # code of the script
            raise ReplayError(
                f"{name} cannot be made from the script {self._path}: {type(error).__name__}:"
                f" {first_line(error)}. Move it into a module that the script imports"
            ) from error

    def _read(self) -> None:
        if self._statements:
            return
        if not os.path.isfile(self._path):
            where = f"the script {self._path}, which is not here" if self._path else "a session"
            raise ReplayError(
                f"the model has classes of {where}. Move them into a module that it imports, or"
                " copy the script to the same path"
            )
        sys.path.insert(0, os.path.dirname(self._path))  # as `python script.py`
        source = Path(self._path).read_text()
        body = ast.parse(source, self._path).body
        later = any(
            isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in body
        )
        flags = __future__.annotations.compiler_flag if later else 0
        self._statements = [
            compile(ast.Module([each], []), self._path, "exec", flags, dont_inherit=True)
            for each in body
            if not _trains(each)
        ]

    def _define(self, name: str) -> None:
        wanted, found = [name], set[int]()
        while wanted:
            read = wanted.pop()
            for number, code in enumerate(self._statements):
                if number not in found | self._done and read in _names(code, _WRITES, inside=False):
                    found.add(number)
                    wanted += _names(code, _READS, inside=True)
        self._done |= found
        for number in sorted(found):
            exec(self._statements[number], vars(self._module))


def _trains(statement: ast.stmt) -> bool:
    """Whether a statement of the module may be the training.

    That is a loop, a block that has one, and what runs in the started script only.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    started = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    return started or any(isinstance(each, ast.For | ast.While) for each in ast.walk(statement))


def _names(code: CodeType, operations: tuple[str, ...], *, inside: bool) -> Iterator[str]:
    """Names of the module that code reads or writes; `inside` of its functions and classes, too."""
    for each in dis.get_instructions(code):
        if each.opname in operations:
            yield each.argval
    for inner in code.co_consts if inside else ():
        if isinstance(inner, CodeType):
            yield from _names(inner, operations, inside=True)
