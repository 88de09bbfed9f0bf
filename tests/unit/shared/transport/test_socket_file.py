"""A listener whose ipc socket file is deleted, as cleaners of temporary folders do."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import AbortRequest, ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, Listener, Lost, Received
from tests.unit.shared.transport.link_polling import Event, poll_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The socket's file, in a folder of its own."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder / "l.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[Listener[ToScheduler]]:
    """The listening end."""
    link: Listener[ToScheduler] = Listener(f"ipc://{path}", ToScheduler)
    yield link
    link.close(0.0)


def _dial(path: Path) -> "Dialer[ToGateway]":
    return Dialer(f"ipc://{path}", "gateway", ToGateway)


@pytest.mark.parametrize("deleted", ["file", "folder"])
def test_listener_whose_socket_file_was_deleted_takes_new_peers_and_keeps_old_ones(
    listener: Listener[ToScheduler], path: Path, deleted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is there again within a second; the session of an earlier peer goes on."""
    heard: list[Event] = []
    old = _dial(path)
    poll_until(lambda: old.is_connected, (listener, heard), (old, []))
    path.unlink()
    if deleted == "folder":
        shutil.rmtree(path.parent)
    with caplog.at_level(logging.WARNING, "lockstep.link"):
        poll_until(path.exists, (listener, heard), (old, []), deadline_s=5.0)
    assert "socket_bound_again" in caplog.messages
    new = _dial(path)
    poll_until(lambda: new.is_connected, (listener, heard), (old, []), (new, []))
    old.send(AbortRequest(request_id="r1"))
    poll_until(
        lambda: any(isinstance(event, Received) for event in heard), (listener, heard), (old, [])
    )
    assert not any(isinstance(event, Lost) for event in heard)
    assert sum(isinstance(event, Connected) for event in heard) == 2
    for link in (old, new):
        link.close(0.0)
