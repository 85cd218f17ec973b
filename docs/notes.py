"""Cuts the notes of a release out of CHANGELOG.md, as Markdown.

python -m docs.notes 0.1.0
python -m docs.notes            # what is not released yet
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

CHANGELOG: Final = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def notes(changelog: str, version: str) -> str:
    """The part under the heading that begins with `version`.

    Raises:
        LookupError: there is none.
    """
    parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        if heading.split()[0] == version:
            return re.sub(r"^###", "##", text.strip(), flags=re.MULTILINE) + "\n"
    known = ", ".join(heading.split()[0] for heading in parts[::2])
    raise LookupError(f"CHANGELOG.md has no part {version}. It has {known}")


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else "Unreleased"
    try:
        sys.stdout.write(notes(CHANGELOG.read_text(), version))
    except LookupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
