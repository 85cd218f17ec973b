"""No file uses a word that the glossary has retired."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from docs.generate import ROOT

GLOSSARY: Final = ROOT / "docs" / "glossary.md"
SUFFIXES: Final = (".cpp", ".h", ".md", ".py", ".txt")
SKIPPED: Final = {
    "docs/decisions": "says what was decided, in the words of its day",
    "docs/glossary.md": "has the words",
    "docs/reference.md": "is made from docstrings, which are looked through",
    "tests/test_words.py": "has samples",
}
LEGAL: Final = {
    ("composable/state/offload_to_host.py", "wake"): "what other libraries call it",
    ("docs/guides/moving.md", "wake"): "an old name beside the new one",
    ("tests/helpers/world.py", "wake"): "threads of gloo do",
}


def _retired() -> list[str]:
    table = GLOSSARY.read_text().split("## Retired words")[1]
    firsts = re.findall(r"^\| (`[^|]+?) \|", table, re.M)
    return [word for first in firsts for word in re.findall(r"`([^`]+)`", first)]


def _uses(text: str, words: list[str]) -> Iterator[tuple[int, str]]:
    """Where the text has whole words in any case, also between underscores, and which."""
    lower = text.lower()
    # a look behind would come before the words, and take ten times as long
    for match in re.finditer(rf"(?:{'|'.join(words).lower()})(?![a-z0-9])", lower):
        if not lower[match.start() - 1 : match.start()].isalnum():
            yield match.start(), match[0]


def _files() -> Iterator[Path]:
    folders = (ROOT / name for name in ("composable", "docs", "examples", "tests"))
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml")
    found = chain.from_iterable(sorted(folder.rglob("*")) for folder in folders)
    for path in (*pages, *(each for each in found if each.suffix in SUFFIXES)):
        if not any(path.is_relative_to(ROOT / name) for name in SKIPPED):
            yield path


def test_retired_words_are_in_no_file() -> None:
    words, legal, found = _retired(), set[tuple[str, str]](), []
    for path in _files():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        for start, word in _uses(text, words):
            if (name, word) in LEGAL:
                legal.add((name, word))
            else:
                line = text.count("\n", 0, start) + 1
                found.append(f"{name}:{line}: {word}; docs/glossary.md has what to say instead")
    assert not found, "\n".join(found)
    assert legal == set(LEGAL)  # none is left over


def test_a_retired_word_is_found_as_a_word_and_in_an_identifier() -> None:
    words = _retired()
    assert {"told", "SpreadForm", "use_plain"} <= set(words)
    found = _uses("Told: make_twins(use_plain), spreads, retold", words)
    assert [word for _, word in found] == ["told", "twins", "use_plain"]


def test_no_two_classes_of_the_package_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "composable").rglob("*.py")):
        if path.name != "seams.py":  # has protocols of classes of the engine
            for name in re.findall(r"^class (\w+)", path.read_text(), re.M):
                files.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
