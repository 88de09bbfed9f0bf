"""The driver on the CPU, for which a compiler is needed."""

from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER

collect_ignore = [] if COMPILER else ["test_driver.py"]
