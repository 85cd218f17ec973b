"""Builds the simulated accelerator from `native/`, once for each torch, Python and state of the
sources; knows no test.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import torch

NATIVE: Final = Path(__file__).parent / "native"
FLAGS: Final = ("-O1", "-g0", "-std=c++20", "-fPIC", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
LIBRARIES: Final = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


def compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def what_is_missing() -> str:
    """Why it cannot be built here; nothing if it can."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    if compiler() is None:
        return "the simulated accelerator needs a C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator needs the headers of Python"
    return ""


def key() -> str:
    """What a build is good for."""
    digest = hashlib.sha256()
    reported = (torch.__version__, sys.version, platform.machine(), str(compiler()), *FLAGS)
    digest.update("\n".join(reported).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(cache: Path) -> Path:
    """The extension module, made in `cache` if it is not there. Sessions that come at once wait for
    the first of them.
    """
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"_sim-{key()}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(made)
    return made


def _compile(target: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    flags = (
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in folders),
    )
    objects = target.with_suffix("")
    objects.mkdir(exist_ok=True)
    sources = sorted(NATIVE.glob("*.cpp"))
    cxx = compiler()
    assert cxx is not None
    running = [
        subprocess.Popen(
            (cxx, *flags, "-c", str(source), "-o", str(objects / f"{source.stem}.o")),
            stderr=subprocess.PIPE,
            text=True,
        )
        for source in sources
    ]
    errors = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(
            "the simulated accelerator does not compile:\n"
            + "\n".join(text for text in errors if text)[:8000]
        )
    lib = Path(torch.__file__).parent / "lib"
    unfinished = target.with_suffix(".tmp")
    linked = (
        *sorted(str(path) for path in objects.glob("*.o")),
        f"-L{lib}",
        f"-Wl,-rpath,{lib}",
        *LIBRARIES,
    )
    subprocess.run((cxx, "-shared", *linked, "-o", str(unfinished)), check=True)
    shutil.rmtree(objects)
    unfinished.rename(target)  # last: what is there is whole
