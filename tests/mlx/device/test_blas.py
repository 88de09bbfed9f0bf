"""MLX really calls the BLAS that was loaded before it; the dynamic linker is the witness."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.rank_worker.device import blas

MULTIPLY = """
from services.rank_worker.device import blas
said = blas.preload() if {preload} else ""
import mlx.core as mx
a = mx.arange(64 * 64, dtype=mx.float32).reshape(64, 64) / 4096
mx.eval(a @ a)
eye = mx.linalg.inv(a + 3 * mx.eye(64), stream=mx.cpu) @ (a + 3 * mx.eye(64))
assert mx.allclose(eye, mx.eye(64), atol=1e-4).item()
print(said)
"""


def _bound_to(
    folder: Path, *, preload: bool, variables: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Return what `preload` said, and the file that libmlx's cblas_sgemm was bound to."""
    environment = {
        **os.environ,
        "LD_DEBUG": "bindings",
        "LD_DEBUG_OUTPUT": str(folder / "linker"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", MULTIPLY.format(preload=preload)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    text = next(folder.glob("linker.*")).read_text(errors="replace")
    found = re.findall(r"libmlx\.so \[0\] to (\S+) \[0\]: normal symbol `cblas_sgemm'", text)
    assert len(set(found)) == 1
    return done.stdout.strip(), found[0]


def test_mlx_multiplies_with_the_library_that_was_loaded_first(tmp_path: Path) -> None:
    """On a Linux CPU `cblas_sgemm` of libmlx is OpenBLAS's, and inverses (LAPACK) are right too."""
    if sys.platform != "linux":
        assert blas.preload() == ""
        return
    said, library = _bound_to(tmp_path, preload=True)

    assert said.startswith("OpenBLAS ")
    assert library.startswith("/proc/self/fd/") or "openblas" in library


def test_a_program_of_another_installation_gets_the_same_library(tmp_path: Path) -> None:
    """Variables are enough: benchmarks' peers may have none of our packages."""
    if sys.platform != "linux":
        assert blas.environment(tmp_path) == {}
        return
    variables = blas.environment(tmp_path)
    _, library = _bound_to(tmp_path, preload=False, variables=variables)

    assert library == variables["LD_PRELOAD"] or "openblas" in library
    assert variables[blas.THREADS_VARIABLE]


def test_without_preload_mlx_has_its_own(tmp_path: Path) -> None:
    """The witness tells the difference: otherwise libmlx binds the library of its wheel."""
    if sys.platform != "linux":
        return
    _, library = _bound_to(tmp_path, preload=False)

    assert "libblas" in library


def test_too_late_is_said_and_harms_nothing() -> None:
    """After MLX was imported nothing is loaded any more."""
    if sys.platform != "linux":
        return
    code = "import mlx.core; from services.rank_worker.device import blas; print(blas.preload())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "reference BLAS"
