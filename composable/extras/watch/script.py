"""Find classes of the training script.

The script was the module `__main__` in training, and is only a file in a replay.
"""

from __future__ import annotations
import __future__

import ast
import dis
import os
import pickle
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from composable.errors import ReplayError, first_line

_MAIN: Final = "__main__"
_READS: Final = ("LOAD_NAME", "LOAD_GLOBAL")
_WRITES: Final = ("STORE_NAME", "STORE_GLOBAL")


def main_of_process() -> dict[str, str]:
    """Where the script of this process is, and its package if it has one; nothing for a session."""
    main = sys.modules[_MAIN]
    path = getattr(main, "__file__", None)
    package = getattr(main, "__package__", None) or ""
    return {} if path is None else {"path": os.path.abspath(path), "package": package}


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
