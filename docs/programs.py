"""Check the programs of the pages as a user's type checker would: `make types` runs it.

What torch's own types say of a program is left out: there a submodule is `Tensor | Module`, and a
parameter is no `DTensor`. Programs that are to raise are left out, too, and names that a page has
from a program above.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Final

from mypy import api

import composable
from composable import forecast, fsdp2
from docs.generate import ROOT, pages, programs_in

# Those of `make types` for the examples, so that what mypy found of torch is used again.
FLAGS: Final = (
    "--config-file=", "--check-untyped-defs", "--ignore-missing-imports",
    "--explicit-package-bases", "--no-error-summary",
)  # fmt: skip
NAMES: Final = ("Verb", *composable.__all__, *fsdp2.__all__, *forecast.__all__)
# `"watch"`, or `"lose" of "Together"`
OURS: Final = re.compile(rf'error: .*"(?:{"|".join(map(re.escape, NAMES))})"')


def wrong_calls(programs: dict[str, str]) -> list[str]:
    """What mypy says of calls of the package, by a page's name and the line in its programs."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in programs.items():
            (Path(folder) / f"{name}.py").write_text(text)
        said, failure, _ = api.run([*FLAGS, folder])
        if failure:
            raise RuntimeError(failure)
        return [
            line.removeprefix(f"{folder}/")
            for line in said.splitlines()
            if OURS.search(line) and "[name-defined]" not in line
        ]


def main() -> int:
    programs = {}
    for page in pages():
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        shown = [each.source for each in programs_in(page.read_text()) if not each.raises]
        # Programs of a page share their variables. One that imports torch begins a file: it may
        # import other functions of the same names.
        for number, source in enumerate(shown):
            if not number or source.startswith("import torch\n"):
                file = f"{name}_{number}"
                programs[file] = ""
            programs[file] += f"{source}\n"
    wrong = wrong_calls(programs)
    sys.stdout.write("\n".join(wrong) or f"no wrong calls in {len(programs)} programs of pages")
    sys.stdout.write("\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
