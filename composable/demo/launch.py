"""Start the ranks with torch's own launcher; knows nothing of what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def is_rank() -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m composable` with `arguments` on `ranks` local processes; returns the exit status."""
    environment = dict(os.environ)
    # Ranks that share one machine share its cores: without this each would start a thread per core.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen([*command, "-m", "composable", *arguments], env=environment)
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the interrupt reached the ranks as well; wait until they are gone
    if status:
        print("composable demo: failed; the reason stands above the report of the launcher", file=sys.stderr)
    return status
