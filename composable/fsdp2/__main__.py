"""`python -m composable.fsdp2 script.py args`: run a script written for FSDP2 over composable."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from composable.api.annotate import observe_annotations
from composable.fsdp2.installation import install
from composable.fsdp2.outcome import Outcome

_USAGE = "python -m composable.fsdp2 [--cpu] script.py [args], or [--cpu] -m module [args]"


def main(arguments: list[str]) -> int:
    """Run a script or a module as `__main__`, after `install()`.

    When it has ended or raised, rank 0 says on stderr what was sharded, or why nothing was.

    Args:
        arguments: as Python itself takes them: the script and its arguments, or "-m" and a module.
            Before them "--cpu", which stands for `install(cpu=True)`.

    Returns:
        2 if there is no such script or module; nothing is run then.
    """
    cpu, arguments = arguments[:1] == ["--cpu"], arguments[arguments[:1] == ["--cpu"] :]
    by_name, rest = arguments[:1] == ["-m"], arguments[arguments[:1] == ["-m"] :]
    if not rest or rest[0].startswith("-"):
        return _refuse(f"no script to run; call it as {_USAGE}")
    if by_name and not _is_module(rest[0]):
        return _refuse(f"there is no module named '{rest[0]}'")
    if not by_name and not os.path.exists(rest[0]):
        return _refuse(f"there is no script '{rest[0]}'")
    install(cpu=cpu)
    sys.argv = rest
    outcome = Outcome()
    end = observe_annotations(outcome.note)
    try:
        if by_name:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
            runpy.run_path(rest[0], run_name="__main__")
    finally:
        end()
        if os.environ.get("RANK", "0") == "0":
            print(f"composable.fsdp2: {outcome}", file=sys.stderr)
    return 0


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _refuse(why: str) -> int:
    print(f"composable.fsdp2: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
