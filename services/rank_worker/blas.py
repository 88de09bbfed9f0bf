"""A faster BLAS for MLX on Linux CPUs, loaded before MLX is. No MLX here.

The mlx-cpu wheel links the reference BLAS (4 GFLOP/s in float32; OpenBLAS does 30 times as much).
Symbols of libraries that were loaded globally come before those of the libraries that libmlx names
itself, so it is enough that one with the plain names (`cblas_sgemm`) is there first. Never
required: whatever fails is said once.

For a baseline: `python -c "…; blas.run_module('mlx_lm.server')"`.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from services.rank_worker import elf
from shared.log import Log

_log = Log("rank_worker.blas")

SYSTEM_LIBRARY = "libopenblas.so.0"
"""What Debian, Ubuntu and Fedora name it; it has the plain names."""

PACKAGE = "scipy_openblas32"
PREFIX = b"scipy_"

SYMBOL = "cblas_sgemm"

THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
"""1 unless the operator says otherwise: with two threads on two cores steps stall for 8 ms."""


def preload() -> str:
    """Load an OpenBLAS for MLX if there is one; call before MLX is imported.

    Returns:
        The BLAS in use, for people to read; "" where MLX has its own (macOS, GPUs).
    """
    if sys.platform != "linux" or not _is_installed("mlx-cpu"):
        return ""
    if "mlx.core" in sys.modules:
        _log.warning("blas_not_loaded", cause="MLX was imported before")
        return "reference BLAS"
    os.environ.setdefault(THREADS_VARIABLE, "1")
    try:
        library = _loaded() or _from_system() or _from_package()
    except (OSError, elf.NotThisKind) as error:
        _log.warning("blas_not_loaded", cause=str(error))
        return "reference BLAS"
    if library is None or _loaded() is None:
        _log.warning("blas_not_loaded", cause="no OpenBLAS found: install scipy-openblas32")
        return "reference BLAS"
    return _describe(library)


def run_module(name: str) -> None:
    """Load the BLAS, then run a module as `python -m` would, with the rest of the command line."""
    preload()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _loaded() -> ctypes.CDLL | None:
    """Return the process's global symbols when a BLAS is among them."""
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, SYMBOL) else None


def _from_system() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(SYSTEM_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return library if hasattr(library, SYMBOL) else None


def _from_package() -> ctypes.CDLL | None:
    """Load the package's library under plain names, from memory: nothing is left on the disk."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    files = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
    if not files:
        return None
    image = elf.without_prefix(files[0].read_bytes(), PREFIX)
    # The descriptor stays open: its path is the library's name for as long as the process lives.
    descriptor = os.memfd_create("openblas")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(image)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def _describe(library: ctypes.CDLL) -> str:
    words = []
    for function in ("openblas_get_config", "openblas_get_corename"):
        if not hasattr(library, function):
            return "the BLAS that was loaded before"
        call = getattr(library, function)
        call.restype = ctypes.c_char_p
        words.append((call() or b"").decode(errors="replace"))
    return f"{' '.join(words[0].split()[:2])}, {words[1]}"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
