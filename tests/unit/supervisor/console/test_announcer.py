"""Lines that `lockstep up` prints about its world."""

import io
from typing import Any

import pytest

from services.supervisor.console.announcer import Announcer
from services.supervisor.console.console import Console
from shared.configuration.host_share import single_host_share
from shared.configuration.loading import API_KEYS_VARIABLE, load_config
from tests.unit.supervisor.status.status_reports import rank_status, status_report


class _Announcements:
    """An announcer together with its output."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._announcer = Announcer(single_host_share(load_config()), Console(self._stream))

    def show(self, start: int = 1, *, is_reachable: bool = True, **changes: Any) -> str:
        """Return the lines that a status report leads to."""
        self._stream.seek(0)
        self._stream.truncate()
        self._announcer.announce(
            status_report(**changes), start, is_gateway_ready=lambda: is_reachable
        )
        return self._stream.getvalue()


def test_lockstep_up_prints_ready_line_with_curl_command_only_once() -> None:
    """The first ready line comes with the command; a later epoch gets one line."""
    announcements = _Announcements()

    assert announcements.show(is_reachable=False) == ""
    first = announcements.show()
    assert "Lockstep is ready" in first
    assert "curl -N" in first
    assert announcements.show() == ""
    assert announcements.show(epoch=2) == "lockstep  | ready again (epoch 2)\n"


def test_printed_curl_command_sends_api_key_when_gateway_has_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With keys the command has the header, so that it does not end with a 401."""
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    assert "Authorization: Bearer" not in _Announcements().show()
    monkeypatch.setenv(API_KEYS_VARIABLE, "alice=a-key-from-the-environment")
    assert "Authorization: Bearer" in _Announcements().show()


def test_lockstep_up_announces_epoch_1_again_after_scheduler_restart() -> None:
    """Epoch 1 after a restart of the scheduler is a new epoch."""
    announcements = _Announcements()
    announcements.show()

    assert announcements.show(start=2) == "lockstep  | ready again (epoch 1)\n"


def test_lockstep_up_announces_start_and_end_of_drain() -> None:
    """While the world drains, no rank is announced as loading."""
    announcements = _Announcements()
    announcements.show()

    begins = announcements.show(draining=True, ready=False, reason="The server drains.")
    assert "lockstep drain --off" in begins
    assert "Loading" not in begins
    assert announcements.show(draining=True, ready=False) == ""
    assert announcements.show() == "lockstep  | accepting new requests again\n"


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [("configuration", "stopping everything"), ("epochs", "`lockstep restart scheduler`")],
)
def test_lockstep_up_announces_scheduler_failure_once_with_remedy(
    failure: str, remedy: str
) -> None:
    """The reason and the remedy are printed once per scheduler."""
    announcements = _Announcements()
    facts: dict[str, Any] = {"ready": False, "reason": "It broke.", "failure": failure}
    facts["ranks"] = [rank_status(0, "missing")]

    text = announcements.show(**facts)

    assert text.startswith("lockstep  | It broke.\n")
    assert remedy in text
    assert announcements.show(**facts) == ""
    assert announcements.show(start=2, **facts) == text
