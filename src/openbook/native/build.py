"""Compiles `runner.c` with the machine's own C compiler, once, and keeps the library.

Nothing is downloaded. Without a compiler everything still works, through PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from openbook.models import home

SOURCE = Path(__file__).with_name("runner.c")
HEADERS = ("op.h", "vector.h", "blocks.h", "step.h", "rows.h", "attend.h", "learn.h")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread")


class NativeUnavailableError(RuntimeError):
    """Why the native runner cannot be used here."""


@cache
def library() -> ctypes.CDLL:
    """The compiled runner. Raises `NativeUnavailableError` with the reason if there is none."""
    if os.environ.get("OPENBOOK_NATIVE", "1") == "0":
        raise NativeUnavailableError("OPENBOOK_NATIVE=0 is set")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise NativeUnavailableError("no C compiler was found (cc, gcc or clang)")
    path = home() / "native" / f"runner-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path.name} cannot be loaded: {error}") from error


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the flags, the compiler and the processor: a library made for one
    machine must never run on another that shares the folder."""
    processor = platform.machine() + platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        processor += next((ln for ln in cpuinfo.read_text().splitlines() if ln.startswith("flags")), "")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = (SOURCE, *(SOURCE.with_name(name) for name in HEADERS))
    parts = (*(file.read_text() for file in sources), " ".join(FLAGS), version, processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """With OpenMP where the compiler has it; Apple's has not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        for openmp in (("-fopenmp",), ()):
            command = [compiler, *FLAGS, *openmp, "-o", str(made), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(made, path)
                return
    reason = done.stderr.strip().splitlines()
    raise NativeUnavailableError(f"{compiler} could not compile it: {reason[0] if reason else 'no message'}")
