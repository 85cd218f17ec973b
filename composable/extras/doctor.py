"""The `doctor` command: print what a bug report should say about the machine and its packages.

It starts nothing and imports nothing but torch: packages are looked up, not loaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from composable.errors import did_you_mean, first_line

PACKAGES: Final = (
    "numpy", "safetensors", "transformers", "accelerate", "peft", "trl", "lightning",
    "lightning-fabric", "torchao", "bitsandbytes", "torchtitan", "triton", "rich", "matplotlib",
)  # fmt: skip
BACKENDS: Final = ("gloo", "nccl", "xccl", "ucc", "mpi")
SETTINGS: Final = (  # of docs/settings.md
    "COMPOSABLE_DEBUG",
    "COMPOSABLE_SEPARATE_REDUCTIONS",
    "COMPOSABLE_SYMMETRIC_MEMORY",
    "COMPOSABLE_WATCH",
)
# of torch, and of libraries below it
ENVIRONMENT: Final = (
    "CUDA_", "NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_DISABLE_", "PYTORCH_",
    "OMP_NUM_THREADS",
)  # fmt: skip
# what init_process_group() reads
PROCESS_GROUP: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LauncherEnv(NamedTuple):
    """The environment variables of one launcher; each pair is a number, and how many there are."""

    name: str
    sign: str  # a variable that tells it from the launchers below it
    rank: tuple[str, str]
    local_rank: tuple[str, str]
    host: tuple[str, str]


# torchrun comes first: srun and PyTorchJobs start it, too.
LAUNCHERS: Final = (
    LauncherEnv(
        "torchrun", "TORCHELASTIC_RUN_ID", ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ),
    LauncherEnv(
        "srun", "SLURM_PROCID", ("SLURM_PROCID", "SLURM_NTASKS"),
        ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"), ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ),
    LauncherEnv(
        "PyTorchJob", "PET_NNODES", ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "PET_NPROC_PER_NODE"), ("PET_NODE_RANK", "PET_NNODES"),
    ),
    LauncherEnv(
        "spawn, or variables set by hand", "RANK", ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ),
)  # fmt: skip


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: there are none."""


def run(_: argparse.Namespace) -> int:
    """Print the report; return the exit status."""
    print(report())
    return 0


def report(environment: Mapping[str, str] = os.environ) -> str:
    """Describe versions, backends, devices, launcher and settings, on one screen."""
    package = Path(__file__).parent.parent
    rows = {
        "composable": f"{_version('torch-composable') or 'not installed'}, from {package}",
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "torch": _torch(),
        "packages": _packages(),
        "backends": ", ".join(name for name in BACKENDS if dist.is_backend_available(name)),
        "devices": _devices(),
        "launcher": _launcher(environment),
        "settings": _settings(environment),
    }
    if other := _version("composable"):
        rows["conflict"] = (
            f"the project 'composable' {other} is installed, too, in the same folder. Uninstall"
            " both, and install torch-composable again"
        )
    return "\n".join(
        textwrap.fill(
            f"{name:12}{text}", 100, subsequent_indent=" " * 12,
            break_long_words=False, break_on_hyphens=False,
        )
        for name, text in rows.items()
    )  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> str:
    built = {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "XPU": torch.version.xpu}
    found = [f"{name} {number}" for name, number in built.items() if number]
    if dist.is_nccl_available():
        found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return ", ".join([torch.__version__, *(found or ["built for CPUs alone"])])


def _packages() -> str:
    found = {name: _version(name) for name in PACKAGES}
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    missing = ", ".join(name for name, number in found.items() if not number)
    return f"{there or 'none'}; not installed: {missing or 'none'}"


def _devices() -> str:
    host = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads of torch per process"
    kind = torch.accelerator.current_accelerator()
    try:
        count = torch.accelerator.device_count()
        if kind is None or not count:
            return f"{host}; no accelerator"
        module = torch.get_device_module(kind)
        names = [module.get_device_name(index) for index in range(count)]
    except Exception as error:  # of a driver: what it says belongs into the report
        return f"{host}; {kind}: {type(error).__name__}: {first_line(error)}"
    each = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{host}; {kind.type}: {each}"


def _launcher(environment: Mapping[str, str]) -> str:
    host = socket.gethostname()
    launcher = next((each for each in LAUNCHERS if each.sign in environment), None)
    if launcher is None:
        return f"none (host {host})"

    def place(what: str, names: tuple[str, str]) -> str:
        number, count = (environment.get(name, "?") for name in names)
        return f"{what} {number} of {count}"

    places = (
        place("rank", launcher.rank),
        place("local rank", launcher.local_rank),
        place("host", launcher.host),
    )
    said = f"{launcher.name}: {', '.join(places)} ({host})"
    if address := environment.get("MASTER_ADDR"):
        said += f"; meets at {address}:{environment.get('MASTER_PORT', '?')}"
    if missing := [name for name in PROCESS_GROUP if name not in environment]:
        said += f"; init_process_group() lacks {', '.join(missing)}"
    return said


def _settings(environment: Mapping[str, str]) -> str:
    found = []
    for name in sorted(environment):
        if name.startswith(("COMPOSABLE_", *ENVIRONMENT)):
            unknown = (
                name.startswith("COMPOSABLE_")
                and not name.startswith("COMPOSABLE_TEST_")
                and name not in SETTINGS
            )
            guess = f" (not a setting{did_you_mean(name, SETTINGS)})" if unknown else ""
            found.append(f"{name}={environment[name]}{guess}")
    return ", ".join(found) or "none"
