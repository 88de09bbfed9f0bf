"""Which clients cannot be run here, and why."""

import pytest

from tests.clients.agents.catalog import AGENTS
from tests.clients.agents.installation import PYTHON, missing_requirement
from tests.clients.agents.isolation import namespaces

_NO_NAMESPACES = namespaces.missing_requirement()
collect_ignore = ["agents/isolation/test_namespaces.py"] if _NO_NAMESPACES else []
if not PYTHON.exists():
    # litellm comes with aider.
    collect_ignore.append("agents/test_context_error.py")
_MISSING = {agent.program: missing_requirement(agent) for agent in AGENTS}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which clients were not run, and why."""
    if _NO_NAMESPACES:
        terminalreporter.write_line(f"NOT RUN: test_namespaces.py ({_NO_NAMESPACES})")
    for program, reason in _MISSING.items():
        if reason:
            terminalreporter.write_line(f"NOT RUN: {program} ({reason})")
