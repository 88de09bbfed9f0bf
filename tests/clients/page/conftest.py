"""The browser, and why its tests cannot be run here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.page.browser import Browser, started_browser
from tests.clients.page.installation import missing_requirement

_MISSING = missing_requirement()
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print that the page was not tested, and why."""
    if _MISSING:
        terminalreporter.write_line(f"NOT RUN: tests of the page in a browser ({_MISSING})")


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser process for the tests of a file: its start takes seconds."""
    with started_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The shared browser without pages, keys and downloads; its console must stay silent."""
    shared_browser.reset(tmp_path)
    yield shared_browser
    shared_browser.close_page()
