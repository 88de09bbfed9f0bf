"""Tests that need network namespaces are left out where there are none, and it is said why."""

import pytest

from tests.hosts import network

_OBSTACLE = network.obstacle()
collect_ignore = ["test_two_hosts.py"] if _OBSTACLE else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run."""
    if _OBSTACLE:
        terminalreporter.write_line(f"NOT RUN: test_two_hosts.py ({_OBSTACLE})")
