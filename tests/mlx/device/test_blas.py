"""BLAS that MLX binds to, as reported by the dynamic linker."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from services.rank_worker.device import blas
from tests.support.waiting import PROCESS_DEADLINE_S

MULTIPLY_CODE = """
from services.rank_worker.device import blas
report = blas.preload() if {preload} else ""
import mlx.core as mx
a = mx.arange(64 * 64, dtype=mx.float32).reshape(64, 64) / 4096
mx.eval(a @ a)
eye = mx.linalg.inv(a + 3 * mx.eye(64), stream=mx.cpu) @ (a + 3 * mx.eye(64))
assert mx.allclose(eye, mx.eye(64), atol=1e-4).item()
print(report)
"""


def _preload_and_binding(
    folder: Path, *, preload: bool, variables: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Return the output of `preload`, and the file that cblas_sgemm of libmlx is bound to."""
    environment = {
        **os.environ,
        "LD_DEBUG": "bindings",
        "LD_DEBUG_OUTPUT": str(folder / "linker"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", MULTIPLY_CODE.format(preload=preload)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_DEADLINE_S,
        check=True,
    )
    text = next(folder.glob("linker.*")).read_text(errors="replace")
    found = re.findall(r"libmlx\.so \[0\] to (\S+) \[0\]: normal symbol `cblas_sgemm'", text)
    assert len(set(found)) == 1
    return done.stdout.strip(), found[0]


def test_mlx_on_linux_cpu_calls_preloaded_openblas(tmp_path: Path) -> None:
    """On a Linux CPU libmlx calls the preloaded OpenBLAS, also for inverses (LAPACK)."""
    if sys.platform != "linux":
        assert blas.preload() == ""
        return
    report, library = _preload_and_binding(tmp_path, preload=True)

    assert report.startswith("OpenBLAS ")
    assert library.startswith("/proc/self/fd/") or "openblas" in library


def test_environment_variables_make_program_without_preload_call_use_openblas(
    tmp_path: Path,
) -> None:
    """The environment variables make a program that does not call the preload bind to OpenBLAS."""
    if sys.platform != "linux":
        assert blas.environment(tmp_path) == {}
        return
    variables = blas.environment(tmp_path)
    _, library = _preload_and_binding(tmp_path, preload=False, variables=variables)

    assert library == variables["LD_PRELOAD"] or "openblas" in library
    assert variables[blas.THREADS_VARIABLE]


def test_mlx_uses_blas_of_its_wheel_without_preload(tmp_path: Path) -> None:
    """Without the preload libmlx binds to the library of its wheel."""
    if sys.platform != "linux":
        return
    _, library = _preload_and_binding(tmp_path, preload=False)

    assert "libblas" in library


def test_blas_preload_after_mlx_import_reports_reference_blas() -> None:
    """After the import of MLX the preload has no effect and reports the reference BLAS."""
    if sys.platform != "linux":
        return
    code = "import mlx.core; from services.rank_worker.device import blas; print(blas.preload())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PROCESS_DEADLINE_S,
        check=True,
    )

    assert done.stdout.strip() == "reference BLAS"
