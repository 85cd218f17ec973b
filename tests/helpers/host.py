"""Whether ranks of one host exchange bytes through shared memory in these tests, or through sockets; knows no test."""

from __future__ import annotations

import os
from importlib.util import find_spec

FOLDER = "composable.device.collectives.host"


def is_left_out() -> bool:
    """Whether the folder is not there, as `make test-sockets` has it."""
    return find_spec(FOLDER) is None


def is_used() -> bool:
    return not is_left_out() and hasattr(os, "memfd_create") and os.environ.get("COMPOSABLE_SHARED_MEMORY", "1") != "0"
