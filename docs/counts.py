"""Counts of the package's code: `make counts` prints them.

    python -m docs.counts            # prints the table
    python -m docs.counts --write    # writes it into docs/architecture.md, too
    python -m docs.counts --foreign  # also names what is changed where its owner is not

Code is what is neither blank, comment nor docstring. A branch is an `if`, or a conditional
expression. An attribute of a class is what its methods assign on `self`, or what its body declares.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "composable"
ENGINE: Final = PACKAGE / "engine"

# What a feature is called in code and prose, and the file of `engine/` that is its own, if any: the
# others are in `features/`.
FEATURES: Final = {
    "tensor parallel": (r"tensor.parallel|\bModelSpec\b|\.model\b", ""),
    "bucket views": (r"keeps_buckets|bucket.views?\b", ""),
    "offload": (r"offload|\bhome\b", ""),
    "communication hooks": (r"comm(unication)?.hooks?\b|CommHook|hook_stages", ""),
    "compiled autograd": (r"compiled|eager_because|\.traced\b", "step/compiled.py"),
}  # fmt: skip
# What was elsewhere in the package when the targets were set.
MOVED_IN: Final = ("features/activations.py", "features/traced.py")
# What extras may import besides `seams`: the layers below the engine, and the public names.
GROUND: Final = (
    "comm", "memory", "contract", "policies", "tensors", "config", "torch_private", "errors",
    "compilation", "checked", "deprecation",
)  # fmt: skip
_NO_CODE: Final = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CHANGES: Final = (
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft",
    "remove", "setdefault", "update",
)  # fmt: skip
# Attributes of torch's and Python's objects, which a class of ours has, too: by name, or by the
# last two names of a chain.
_NOT_OURS: Final = {
    "_buffers": "the table of a module, for which torch has no method that takes plain tensors",
    "_parameters": "the same",
    "grad_dtype": "a property of tensors; there is no method that sets it",
    "__name__": "of functions that are made",
    "optimizer.state": "of torch's optimizers; loading and stepping are to change it",
    "outer.state": "the same; `outer` is the optimizer of `local_steps`",
    "copied.state": "the same; `copied` is a copy of an optimizer",
    "fully_shard.state": "of a function: torch's pipelines call `fully_shard.state(module)`",
}
# Set on modules and classes that are not of the file.
_MAY_BE_SET: Final = {
    "sys.argv": "a script that is run finds its own arguments there, as `python script` has it",
}


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    text: str
    tree: ast.Module


class Row(NamedTuple):
    """One count, and what it is to be, if anything."""

    name: str
    number: int
    target: str = ""


@cache
def sources(folder: Path) -> list[Source]:
    """The Python files of a folder, by their paths below it."""
    texts = [(path, path.read_text()) for path in sorted(folder.rglob("*.py"))]
    return [Source(str(path.relative_to(folder)), text, ast.parse(text)) for path, text in texts]


def lines_of_code(source: Source) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def branches(source: Source) -> int:
    return sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(source.tree))


def attributes(source: Source) -> list[str]:
    """Of each class of the file, in order; a name of two classes is there twice."""
    found: list[str] = []
    for cls in ast.walk(source.tree):
        if isinstance(cls, ast.ClassDef):
            names = {
                node.attr
                for node in ast.walk(cls)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and _is_own(node)
            }
            names |= {
                node.target.id
                for node in cls.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
            found += sorted(names)
    return found


# --- one writer ----------------------------------------------------------------------------------


def foreign_writes(files: list[Source]) -> list[tuple[str, int, str]]:
    """File, line and name of attributes that are changed where their class is not: assigned,
    deleted, or changed by an item or by a method of containers.
    """
    owners: dict[str, set[str]] = {}
    for source in files:
        for name in attributes(source):
            owners.setdefault(name, set()).add(source.path)
    return sorted(
        (source.path, node.lineno, node.attr)
        for source in files
        for node in _changed(source.tree)
        if not _is_own(node)
        and not {node.attr, f"{_last_name(node.value)}.{node.attr}"} & _NOT_OURS.keys()
        and source.path not in owners.get(node.attr, {source.path})
    )


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _changed(tree: ast.Module) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        found: ast.expr | None = None
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found = node
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _CHANGES
        ):
            found = node.func.value
        if isinstance(found, ast.Attribute):
            yield found


# --- modules and classes of others ---------------------------------------------------------------


def exchanged(files: list[Source]) -> list[tuple[str, int, str]]:
    """File, line and text of what sets an attribute of a module or class of another file: by
    assignment, `setattr`, `vars(...)[...]` or a patch.
    """
    found = []
    for source in files:
        imported = _imported(source.tree)
        if not any(_exchanges(node, imported) for node in ast.walk(source.tree)):
            continue
        for node in _in_scopes(source.tree, imported):
            text = ast.unparse(node)
            if text not in _MAY_BE_SET:
                found.append((source.path, node.lineno, text))
    return sorted(found)


def _imported(tree: ast.AST) -> set[str]:
    """The names of what is imported, and of variables of loops over some of it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
            read = {each.id for each in ast.walk(node.iter) if isinstance(each, ast.Name)}
            if read & names and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def _in_scopes(scope: ast.AST, imported: set[str]) -> Iterator[ast.expr]:
    for node in ast.iter_child_nodes(scope):
        names = imported
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = imported - _bound_in(node)
        if isinstance(node, ast.expr) and _exchanges(node, names):
            yield node
        yield from _in_scopes(node, names)


def _bound_in(function: ast.AST) -> set[str]:
    """Variables of a function that hide what is imported, but for those of loops over it."""
    looped = {
        each.target.id
        for each in ast.walk(function)
        if isinstance(each, ast.For) and isinstance(each.target, ast.Name)
    }
    names = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    return names | {
        each.id
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id not in looped
    }


def _exchanges(node: ast.AST, imported: set[str]) -> bool:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            target: ast.expr = node
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), ctx=ast.Store() | ast.Del()):
            target = node
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[target, *_]):
            pass
        case ast.Call(func=ast.Name(id="patch") | ast.Attribute(attr="patch") as target):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id="patch") as target)):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="patch") as target)):
            pass
        case _:
            return False
    return _root(target) in imported


def _root(node: ast.expr) -> str:
    while True:
        match node:
            case ast.Attribute() | ast.Subscript():
                node = node.value
            case ast.Call(func=ast.Name(id="vars"), args=[of]):
                node = of
            case _:
                return getattr(node, "id", "")


# --- seams ---------------------------------------------------------------------------------------


def taken(files: list[Source]) -> dict[str, list[str]]:
    """What extras import of the package between the ground and themselves, by module and name; and
    the files that do.

    Args:
        files: of the package.
    """
    found: dict[str, list[str]] = {}
    for source in files:
        if not source.path.startswith("extras/"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                _, _, inner = node.module.partition("composable.")
                if inner.partition(".")[0] in (*GROUND, "extras", ""):
                    continue
                for each in node.names:
                    users = found.setdefault(f"{inner}.{each.name}", [])
                    if source.path not in users:
                        users.append(source.path)
    return dict(sorted(found.items()))


def loaded() -> int:
    """How many modules of the package `import composable` loads."""
    program = "import sys, composable; print(sum(n.startswith('composable') for n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


# --- the table -----------------------------------------------------------------------------------


def mentions(files: list[Source], name: str) -> int:
    """Lines that name a feature outside of its own file."""
    pattern, own = FEATURES[name]
    found = re.compile(pattern, re.I)
    return sum(
        bool(found.search(line))
        for source in files
        if source.path != own
        for line in source.text.splitlines()
    )


def counts() -> list[Row]:
    package, engine = sources(PACKAGE), sources(ENGINE)
    extras = [each for each in package if each.path.startswith("extras/")]
    outside = ("extras/", "seams.py", "__main__.py", "forecast.py")
    core = [each for each in package if not each.path.startswith(outside)]
    steps = [
        each
        for each in package
        if each.path.startswith(("engine/", "features/")) and each.path not in MOVED_IN
    ]
    names = taken(package)
    by_seams = [name for name in names if name.startswith("seams.")]
    without = "`engine/` and `features/`, without activations and traced reductions"
    return [
        Row("lines of code of the package", sum(map(lines_of_code, package))),
        Row(f"lines of code of {without}", sum(map(lines_of_code, steps)), "6,400"),
        Row(f"branches in {without}", sum(map(branches, steps)), "680"),
        Row("lines of code of the core, ground to front", sum(map(lines_of_code, core)), "15,800"),
        Row("lines of code of `extras/`", sum(map(lines_of_code, extras)), "6,500"),
        Row("attributes of classes of `engine/`", sum(len(attributes(each)) for each in engine)),
        Row("attributes that another file changes, package", len(foreign_writes(package)), "0"),
        Row(
            "attributes of modules and classes of another file that are set",
            len(exchanged([each for each in package if each.path != "torch_private.py"])),
            "0",
        ),
        Row("names that extras take from `seams.py`", len(by_seams), "35"),
        Row("names that extras take past it", len(names) - len(by_seams), "0"),
        Row("modules that `import composable` loads", loaded(), "125"),
        *(
            Row(f"lines outside of its own file that name {feature}", mentions(engine, feature))
            for feature in FEATURES
        ),
    ]


def table() -> str:
    rows = "".join(f"| {name} | {number:,} | {target} |\n" for name, number, target in counts())
    return f"| what | today | target |\n|---|---|---|\n{rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md, too")
    parser.add_argument("--foreign", action="store_true", help="name what another file changes")
    options = parser.parse_args()
    text = table()
    print(text, end="")
    if options.foreign:
        package = sources(PACKAGE)
        for path, line, name in foreign_writes(package):
            print(f"{path}:{line} .{name}")
        for path, line, name in exchanged(package):
            print(f"{path}:{line} {name}")
        for name, users in taken(package).items():
            print(f"{name}: {', '.join(users)}")
    if options.write:
        page = ROOT / "docs/architecture.md"
        marks = r"(<!-- counts:begin -->\n).*?(<!-- counts:end -->)"
        page.write_text(
            re.sub(marks, lambda match: match[1] + text + match[2], page.read_text(), flags=re.S)
        )


if __name__ == "__main__":
    main()
