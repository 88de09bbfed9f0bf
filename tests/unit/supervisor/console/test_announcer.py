"""What `lockstep up` says about its world, and how often."""

import io
from typing import Any

import pytest

from services.supervisor.console.announcer import Announcer
from services.supervisor.console.console import Console
from shared.configuration.host_share import single_host_share
from shared.configuration.loading import load_config
from tests.unit.supervisor.status.status_reports import rank_status, status_report


class _Said:
    """An announcer and what it has written."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._announcer = Announcer(single_host_share(load_config()), Console(self._stream))

    def show(self, start: int = 1, *, is_reachable: bool = True, **changes: Any) -> str:
        """Return the lines that a status leads to."""
        self._stream.seek(0)
        self._stream.truncate()
        self._announcer.announce(
            status_report(**changes), start, is_gateway_ready=lambda: is_reachable
        )
        return self._stream.getvalue()


def test_readiness_is_said_once() -> None:
    """The first time with the command to paste, for a later epoch in a line."""
    said = _Said()

    assert said.show(is_reachable=False) == ""
    first = said.show()
    assert "Lockstep is ready" in first
    assert "curl -N" in first
    assert said.show() == ""
    assert said.show(epoch=2) == "lockstep  | ready again (epoch 2)\n"


def test_another_scheduler_counts_anew() -> None:
    """After a restart of the scheduler epoch 1 is another epoch 1."""
    said = _Said()
    said.show()

    assert said.show(start=2) == "lockstep  | ready again (epoch 1)\n"


def test_a_world_that_drains_is_not_loading() -> None:
    """Draining is said when it begins and ends, and no rank is said to load."""
    said = _Said()
    said.show()

    begins = said.show(draining=True, ready=False, reason="The server drains.")
    assert "lockstep drain --off" in begins
    assert "Loading" not in begins
    assert said.show(draining=True, ready=False) == ""
    assert said.show() == "lockstep  | accepting new requests again\n"


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [("configuration", "stopping everything"), ("epochs", "`lockstep restart scheduler`")],
)
def test_a_failure_is_said_once_with_what_to_do(failure: str, remedy: str) -> None:
    """Why no further epoch is tried, and the remedy; again only from another scheduler."""
    said = _Said()
    facts: dict[str, Any] = {"ready": False, "reason": "It broke.", "failure": failure}
    facts["ranks"] = [rank_status(0, "missing")]

    text = said.show(**facts)

    assert text.startswith("lockstep  | It broke.\n")
    assert remedy in text
    assert said.show(**facts) == ""
    assert said.show(start=2, **facts) == text
