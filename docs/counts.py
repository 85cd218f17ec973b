"""Counts of the package's code: `make counts` prints them.

    python -m docs.counts            # prints the table
    python -m docs.counts --write    # writes it into docs/architecture.md, too
    python -m docs.counts --foreign  # also names each attribute that is assigned from another file

Code is what is neither blank, comment nor docstring. A branch is an `if`, or a conditional
expression. An attribute of a class is what its methods assign on `self`, or what its body declares.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ENGINE: Final = ROOT / "composable/engine"

# What a feature is called in code and prose, and the file of `engine/` that is its own, if any: the
# others are in `features/`.
FEATURES: Final = {
    "tensor parallel": (r"tensor.parallel|\bModelSpec\b|\.model\b", ""),
    "bucket views": (r"keeps_buckets|bucket.views?\b", ""),
    "offload": (r"offload|\bhome\b", ""),
    "communication hooks": (r"comm(unication)?.hooks?\b|CommHook|hook_stages", ""),
    "compiled autograd": (r"compiled|eager_because|\.traced\b", "step/compiled.py"),
}  # fmt: skip
_NO_CODE: Final = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CHANGES: Final = (
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft",
    "remove", "setdefault", "update",
)  # fmt: skip
_OF_TORCH: Final = ("_buffers", "grad_dtype")  # which classes of the engine have, too


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    text: str
    tree: ast.Module


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
        and node.attr not in _OF_TORCH
        and source.path not in owners.get(node.attr, {source.path})
    )


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


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


def counts() -> Mapping[str, int]:
    engine, package = sources(ENGINE), sources(ROOT / "composable")
    rows = {
        "lines of code of the package": sum(map(lines_of_code, package)),
        "lines of code of `engine/`": sum(map(lines_of_code, engine)),
        "branches in `engine/`": sum(map(branches, engine)),
        "attributes of its classes": sum(len(attributes(source)) for source in engine),
        "attributes that another file changes": len(foreign_writes(engine)),
    }
    return rows | {
        f"lines outside of its own file that name {feature}": mentions(engine, feature)
        for feature in FEATURES
    }


def table() -> str:
    rows = "".join(f"| {name} | {number:,} |\n" for name, number in counts().items())
    return f"| what | how many |\n|---|---|\n{rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md, too")
    parser.add_argument("--foreign", action="store_true", help="name what another file changes")
    options = parser.parse_args()
    print(table(), end="")
    if options.foreign:
        for path, line, name in foreign_writes(sources(ENGINE)):
            print(f"{path}:{line} .{name}")
    if options.write:
        page = ROOT / "docs/architecture.md"
        marks = r"(<!-- counts:begin -->\n).*?(<!-- counts:end -->)"
        page.write_text(
            re.sub(marks, lambda match: match[1] + table() + match[2], page.read_text(), flags=re.S)
        )


if __name__ == "__main__":
    main()
