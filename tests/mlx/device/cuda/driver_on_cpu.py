"""`driver_on_cpu.c`, compiled."""

import subprocess
from pathlib import Path

from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER

_SOURCE = Path(__file__).with_name("driver_on_cpu.c")


def compile_driver(folder: Path) -> Path:
    """Compile the driver into a folder; return its file.

    Processes that use it need `MEMORY_FOLDER`, a variable that names a folder for their memory.
    """
    library = folder / "driver.so"
    command = [str(COMPILER), "-x", "c", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
