"""Tests with network namespaces are skipped, with a reason, where those are not available."""

import pytest

from tests.hosts import network

_MISSING = network.missing_requirement()
collect_ignore = ["test_two_hosts.py"] if _MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which tests were not run, and why."""
    if _MISSING:
        terminalreporter.write_line(f"NOT RUN: test_two_hosts.py ({_MISSING})")
