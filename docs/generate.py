"""Keep the generated parts of the pages true: diagrams, the reference, and what programs print.

    python -m docs.generate          # rewrite the pages
    python -m docs.generate --check  # change nothing; name the pages that are out of date
    python -m docs.generate --measure docs/decisions/0003-elastic-buffers.md  # repeat a measurement

Between `<!-- states:begin -->` and `<!-- states:end -->` stand diagrams of the state tables at the
top of `root.py`, `param_group.py` and `reduction.py`; between the same marks with `reference`, what
`docs.reference` makes of the docstrings; with `options` and `refused`, what `docs.refused` makes of
the options that the tests multiply. Between `<!-- file PATH:begin -->` and `<!-- file:end -->`
stands a file as it is. A code block that opens with "```python run" is a program:
the programs of a page run one after the other and share their variables, and a block
"```text output" right below one holds what it prints. Words after `run`: `ranks=2` runs it on two
ranks, each with variables of its own; `raises` says that it ends with an error, whose name and
message are printed. Programs that open with "```python measure" take times, which differ from run
to run; their output is replaced on demand only (`--measure`).
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from composable.engine.gradients import reduction
from composable.engine.params import param_group
from composable.engine.step import root
from docs.reference import reference
from docs.refused import multiplied, refused

ROOT: Final = Path(__file__).resolve().parent.parent
_PROGRAM: Final = re.compile(
    r"^```python (run|measure)([^\n]*)\n(.*?)^```\n(?:\n```text output\n(.*?)^```\n)?", re.M | re.S
)
_MADE: Final = re.compile(
    r"(<!-- (states|reference|options|refused):begin -->\n).*?(<!-- \2:end -->)", re.S
)

_SHOWN: Final = re.compile(r"(<!-- file (\S+):begin -->\n).*?(<!-- file:end -->)", re.S)


@dataclass(frozen=True)
class Program:
    """A code block that runs, and where the page says what it prints."""

    source: str
    ranks: int
    raises: bool
    output: tuple[int, int] | None  # start and end in the page's text; None: the page does not say


Outputs = list[str]
OnRanks = Callable[[int, Sequence[Program]], Sequence[Outputs]]


def pages() -> list[Path]:
    """Every page, in a fixed order."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs_in(text: str, kind: str = "run") -> list[Program]:
    """The programs of one kind, in the order of the page."""
    found = []
    for match in _PROGRAM.finditer(text):
        if match[1] != kind:
            continue
        words = match[2].split()
        unknown = [
            word for word in words if word != "raises" and not re.fullmatch(r"ranks=\d", word)
        ]
        if unknown:
            raise ValueError(f"'python {kind}' does not know {unknown[0]!r}")
        ranks = next((int(word[-1]) for word in words if word.startswith("ranks=")), 0)
        output = match.span(4) if match[4] is not None else None
        found.append(Program(match[3], ranks, "raises" in words, output))
    return found


def execute(programs: Sequence[Program]) -> Outputs:
    """Run `programs` in this process with common variables; returns what each printed."""
    variables: dict[str, Any] = {"__name__": "example"}
    outputs = []
    for program in programs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            code = compile(program.source, "example.py", "exec")
            if program.raises:
                _show_error(code, variables)
            else:
                exec(code, variables)
        outputs.append("".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines()))
    return outputs


def _show_error(code: Any, variables: dict[str, Any]) -> None:
    try:
        exec(code, variables)
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    else:
        raise AssertionError("a program marked 'raises' ended without an error")


def merged(by_rank: Sequence[Outputs]) -> Outputs:
    """One output per program: what all ranks printed alike, what the only one that did printed, or
    each rank's lines.
    """
    together = []
    for printed in zip(*by_rank, strict=True):
        spoken = [text for text in printed if text]
        if len(spoken) <= 1 or all(text == printed[0] for text in printed):
            together.append(spoken[0] if spoken else "")
        else:
            together.append(
                "".join(
                    f"[rank {rank}] {line}\n"
                    for rank, text in enumerate(printed)
                    for line in text.splitlines()
                )
            )
    return together


def outputs_of(programs: Sequence[Program], on_ranks: OnRanks) -> Outputs:
    """What each of a page's programs prints. `on_ranks` runs some on a number of ranks."""
    outputs: dict[int, str] = {}
    for ranks in dict.fromkeys(program.ranks for program in programs):
        indices = [index for index, program in enumerate(programs) if program.ranks == ranks]
        chosen = [programs[index] for index in indices]
        printed = merged(on_ranks(ranks, chosen)) if ranks else execute(chosen)
        outputs.update(zip(indices, printed, strict=True))
    return [outputs[index] for index in range(len(programs))]


def regenerated(text: str, on_ranks: OnRanks, kind: str = "run") -> str:
    """The page as it should be, as far as programs of one kind are concerned."""
    programs = programs_in(text, kind)
    outputs = outputs_of(programs, on_ranks)
    for program, printed in reversed(list(zip(programs, outputs, strict=True))):
        if program.output is not None:
            start, end = program.output
            text = text[:start] + printed + text[end:]
    makers = {
        "states": diagrams,
        "reference": reference,
        "options": multiplied,
        "refused": refused,
    }
    text = _MADE.sub(lambda match: f"{match[1]}{makers[match[2]]()}{match[3]}", text)
    return _SHOWN.sub(lambda match: f"{match[1]}{shown(match[2])}{match[3]}", text)


def shown(path: str) -> str:
    """A file of the checkout as a code block."""
    return f"```python\n{(ROOT / path).read_text()}```\n"


def transitions(table_of: ModuleType) -> list[tuple[str, str, str]]:
    """The rows (state, next state, event) of the state table in a module's docstring. A cell `-`
    means that nothing changes.
    """
    lines = [line for line in (table_of.__doc__ or "").splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    events = [cell.strip("`") for cell in header]
    found = []
    for state, *cells in rows:
        for event, cell in zip(events[1:], cells, strict=True):
            names = re.findall(r"[A-Z][A-Z_]{3,}", cell)
            if names:
                rest = re.sub(rf",? ?(then )?{names[0]},?", "", cell).strip()
                found.append((state, names[0], f"{event}: {rest}" if rest else event))
    return found


def diagrams() -> str:
    """Steps, parameters and gradients change state on their own, so there are three diagrams."""
    parts = []
    titles = {
        "A `Root`": root,
        "Parameters of a `ParamGroup`": param_group,
        "Gradients in a `Reduction`": reduction,
    }
    for title, module in titles.items():
        lines = [f"    {state} --> {after}: {event}" for state, after, event in transitions(module)]
        parts.append(
            f"{title}:\n\n```mermaid\n" + "\n".join(["stateDiagram-v2", *lines]) + "\n```\n\n"
        )
    return "".join(parts)


# --- ranks of this script's own; tests bring theirs ---------------------------------------------


def _serve(rank: int, ranks: int, programs: Sequence[Program], meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=ranks
    )
    torch.save(execute(programs), f"{meeting}/{rank}")
    dist.destroy_process_group()


def spawned(ranks: int, programs: Sequence[Program]) -> list[Outputs]:
    with tempfile.TemporaryDirectory() as meeting:
        multiprocessing.spawn(_serve, args=(ranks, list(programs), meeting), nprocs=ranks)
        return [torch.load(f"{meeting}/{rank}", weights_only=True) for rank in range(ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Regenerate what stands on the pages of the documentation."
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; name the pages that are out of date"
    )
    parser.add_argument(
        "--measure", action="store_true", help="repeat the measurements of the pages instead"
    )
    parser.add_argument("pages", nargs="*", type=Path, help="only these pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stale = 0
    for page in [path.resolve() for path in options.pages] or pages():
        text = page.read_text()
        fresh = regenerated(text, spawned, "measure" if options.measure else "run")
        if fresh != text:
            stale += 1
            sys.stdout.write(
                f"{page.relative_to(ROOT)}"
                f" {'is out of date' if options.check else 'was rewritten'}\n"
            )
            if not options.check:
                page.write_text(fresh)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
