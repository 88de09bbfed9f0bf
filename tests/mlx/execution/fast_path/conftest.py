"""Metal kernels on the CPU, for which a C++ compiler is needed."""

import mlx.core as mx
import pytest

from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER, KernelOnCpu

collect_ignore = [] if COMPILER else ["kernels", "peers", "latent/test_latent_kernels.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print that kernels were not tested, and why."""
    if not COMPILER:
        terminalreporter.write_line("NOT RUN: tests of kernels (no C++ compiler)")


@pytest.fixture
def kernels_on_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Have kernels run on the CPU. They run while a graph is built, so none is compiled."""
    monkeypatch.setattr(mx, "compile", lambda function, **_named: function)
    KernelOnCpu.folder = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(mx.fast, "metal_kernel", KernelOnCpu)
    monkeypatch.setattr(mx.fast, "cuda_kernel", KernelOnCpu)
