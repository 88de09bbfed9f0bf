"""Loads a faster BLAS for MLX on Linux CPUs before MLX is imported. No MLX.

The mlx-cpu wheel links the reference BLAS (4 GFLOP/s in float32; OpenBLAS is 30 times as fast).
Symbols of globally loaded libraries take precedence over those that libmlx links, so it is enough
to load a library with the plain names (`cblas_sgemm`) first. It is optional: failures are logged.
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
"""The OpenBLAS of Debian, Ubuntu and Fedora, which has the plain names."""

PACKAGE = "scipy_openblas32"
PREFIX = b"scipy_"

SYMBOL = "cblas_sgemm"

THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
"""Set to 1 by default: with two threads on two cores steps stall for 8 ms."""


def preload() -> str:
    """Load an OpenBLAS for MLX if there is one; to be called before MLX is imported.

    Returns:
        A description of the BLAS in use; "" when MLX uses another one (macOS, GPUs).
    """
    if sys.platform != "linux" or not _is_installed("mlx-cpu"):
        return ""
    if "mlx.core" in sys.modules:
        _log.warning("blas_not_loaded", cause="MLX was already imported")
        return "reference BLAS"
    os.environ.setdefault(THREADS_VARIABLE, "1")
    try:
        library = _loaded() or _load_system() or _load_package()
    except (OSError, elf_symbols.UnsupportedLibraryError) as error:
        _log.warning("blas_not_loaded", cause=str(error))
        return "reference BLAS"
    if library is None or _loaded() is None:
        _log.warning("blas_not_loaded", cause="no OpenBLAS found: install scipy-openblas32")
        return "reference BLAS"
    return _describe(library)


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables with which another program loads the BLAS of `preload`.

    Args:
        folder: a folder to which a renamed copy of a library may be written.

    Returns:
        {} when `preload` would load nothing, or the variables are set already.
    """
    if sys.platform != "linux" or not _is_installed("mlx-cpu"):
        return {}
    preloaded = os.environ.get("LD_PRELOAD", "")
    if preloaded and _loaded() is not None:
        return {}
    try:
        library = SYSTEM_LIBRARY if _load_system(ctypes.RTLD_LOCAL) is not None else ""
        image = None if library else _renamed_image()
    except (OSError, elf_symbols.UnsupportedLibraryError) as error:
        _log.warning("blas_not_loaded", cause=str(error))
        return {}
    if image is not None:
        # Always a new file, because other processes may have mapped an older one.
        with tempfile.NamedTemporaryFile(suffix=".so", dir=folder, delete=False) as stream:
            stream.write(image)
        library = stream.name
    if not library:
        return {}
    return {
        "LD_PRELOAD": f"{library} {preloaded}".strip(),
        THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, "1"),
    }


def _loaded() -> ctypes.CDLL | None:
    """Return the process's global symbols; None when they include no BLAS."""
    symbols = ctypes.CDLL(None)
    return symbols if hasattr(symbols, SYMBOL) else None


def _load_system(mode: int = ctypes.RTLD_GLOBAL) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(SYSTEM_LIBRARY, mode=mode)
    except OSError:
        return None
    return library if hasattr(library, SYMBOL) else None


def _load_package() -> ctypes.CDLL | None:
    """Load the package's library with plain names from memory, without a file on disk."""
    if sys.platform != "linux":
        return None
    image = _renamed_image()
    if image is None:
        return None
    # The descriptor stays open, because its path is the library's name while the process runs.
    descriptor = os.memfd_create("openblas")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(image)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def _renamed_image() -> bytes | None:
    """Return the package's library with plain names; None without the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    files = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
    if not files:
        return None
    return elf_symbols.remove_prefix(files[0].read_bytes(), PREFIX)


def _describe(library: ctypes.CDLL) -> str:
    words = []
    for function in ("openblas_get_config", "openblas_get_corename"):
        if not hasattr(library, function):
            return "a BLAS that was already loaded"
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
