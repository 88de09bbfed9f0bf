"""`lockstep up` on one of several hosts: its own roles only, and its own words for them."""

import io
from pathlib import Path

from services.supervisor.children import process_group
from services.supervisor.console.announcer import Announcer
from services.supervisor.console.console import Console
from shared.configuration import host_share
from shared.configuration.host_share import HostShare
from tests.unit.commands.deployment import inventories
from tests.unit.supervisor.status.status_reports import rank_status, status_report


def _share(host: str) -> HostShare:
    found = inventories.parsed()
    return host_share.share_of_host(found, found.host(host))


def test_only_the_hosts_own_roles_are_children(tmp_path: Path) -> None:
    """A host of ranks has no scheduler and no gateway to start."""
    console = Console(io.StringIO())
    first = process_group.create_group(_share("studio-1"), tmp_path, console)
    second = process_group.create_group(_share("studio-2"), tmp_path, console)

    assert [one.role.name for one in first.all] == ["scheduler", "store", "rank 0", "gateway"]
    assert [one.role.name for one in second.all] == ["store", "rank 1"]
    assert (second.scheduler, second.gateway) == (None, None)


def test_a_host_without_a_gateway_promises_no_address() -> None:
    """It says what it has of a ready Lockstep, and gives no command that nobody would answer."""
    said = io.StringIO()
    announcer = Announcer(_share("studio-2"), Console(said))

    announcer.announce_start()
    announcer.announce(
        status_report(ranks=[rank_status(0), rank_status(1)]), 1, is_gateway_ready=lambda: True
    )
    announcer.announce(
        status_report(ranks=[rank_status(0), rank_status(1)], epoch=2),
        1,
        is_gateway_ready=lambda: True,
    )

    text = said.getvalue()
    assert "Starting Lockstep on studio-2: lockstep-demo, rank 1 of 2 (ring)" in text
    assert "Lockstep is ready; studio-2 runs rank 1 of 2." in text
    assert "ready again (epoch 2)" in text
    assert "curl" not in text


def test_a_host_says_whom_it_waits_for() -> None:
    """A scheduler elsewhere that does not answer is named once, and no more when it does."""
    said = io.StringIO()
    announcer = Announcer(_share("studio-2"), Console(said))

    announcer.announce_no_status("", 1.0)
    assert said.getvalue() == ""
    announcer.announce_no_status("", 4.0)
    announcer.announce_no_status("", 5.0)
    assert said.getvalue() == "Waiting for the scheduler at tcp://192.168.7.1:7610\n"
    announcer.announce(status_report(), 1, is_gateway_ready=lambda: True)
    announcer.announce_no_status("", 4.0)
    assert said.getvalue().count("Waiting for the scheduler") == 2


def test_a_refused_key_is_said_once() -> None:
    """Why, and where to look; again only after an answer."""
    said = io.StringIO()
    announcer = Announcer(_share("studio-1"), Console(said))

    for _ in range(3):
        announcer.announce_no_status("this host's key is not allowed there", 9.0)
    line = (
        "lockstep  | the handshake with tcp://192.168.7.1:7610 failed: this host's key is not "
        "allowed there; see `lockstep keys show` here and on the scheduler's host\n"
    )
    assert said.getvalue() == line
    announcer.announce(status_report(), 1, is_gateway_ready=lambda: False)
    announcer.announce_no_status("this host's key is not allowed there", 0.0)
    assert said.getvalue() == 2 * line
