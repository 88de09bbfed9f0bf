"""A faster BLAS for MLX on Linux CPUs, loaded before MLX is. No MLX here.

The mlx-cpu wheel links the reference BLAS (4 GFLOP/s in float32; OpenBLAS does 30 times as much).
Symbols of libraries that were loaded globally come before those of the libraries that libmlx names
itself, so it is enough that one with the plain names (`cblas_sgemm`) is there first. Never
required: whatever fails is said once.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from services.rank_worker.device import elf_symbols
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
    except (OSError, elf_symbols.NotThisKind) as error:
        _log.warning("blas_not_loaded", cause=str(error))
        return "reference BLAS"
    if library is None or _loaded() is None:
        _log.warning("blas_not_loaded", cause="no OpenBLAS found: install scipy-openblas32")
        return "reference BLAS"
    return _describe(library)


def environment(folder: Path) -> dict[str, str]:
    """Return variables that give a program of another installation what `preload` loads here.

    Args:
        folder: where a library may be written that lies in a package under other names.

    Returns:
        Nothing where `preload` would load nothing, or they are set already.
    """
    if sys.platform != "linux" or not _is_installed("mlx-cpu"):
        return {}
    others = os.environ.get("LD_PRELOAD", "")
    if others and _loaded() is not None:
        return {}
    try:
        library = SYSTEM_LIBRARY if _from_system(ctypes.RTLD_LOCAL) is not None else ""
        image = None if library else _plain_image()
    except (OSError, elf_symbols.NotThisKind) as error:
        _log.warning("blas_not_loaded", cause=str(error))
        return {}
    if image is not None:
        # A file of its own: whoever has mapped an older one must not see it change.
        with tempfile.NamedTemporaryFile(suffix=".so", dir=folder, delete=False) as stream:
            stream.write(image)
        library = stream.name
    if not library:
        return {}
    return {
        "LD_PRELOAD": f"{library} {others}".strip(),
        THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, "1"),
    }


def _loaded() -> ctypes.CDLL | None:
    """Return the process's global symbols when a BLAS is among them."""
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, SYMBOL) else None


def _from_system(mode: int = ctypes.RTLD_GLOBAL) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(SYSTEM_LIBRARY, mode=mode)
    except OSError:
        return None
    return library if hasattr(library, SYMBOL) else None


def _from_package() -> ctypes.CDLL | None:
    """Load the package's library under plain names, from memory: nothing is left on the disk."""
    if sys.platform != "linux":
        return None
    image = _plain_image()
    if image is None:
        return None
    # The descriptor stays open: its path is the library's name for as long as the process lives.
    descriptor = os.memfd_create("openblas")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(image)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def _plain_image() -> bytes | None:
    """Return the package's library with plain names; None: there is no such package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    files = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
    if not files:
        return None
    return elf_symbols.without_prefix(files[0].read_bytes(), PREFIX)


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
