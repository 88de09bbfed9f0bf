"""`lockstep up` on one of several hosts: its child processes and its messages."""

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
    found = inventories.parse_inventory()
    return host_share.share_of_host(found, found.host(host))


def test_supervisor_starts_only_the_roles_of_its_own_host(tmp_path: Path) -> None:
    """A host that only has ranks starts no scheduler and no gateway."""
    console = Console(io.StringIO())
    first = process_group.create_group(_share("studio-1"), tmp_path, console)
    second = process_group.create_group(_share("studio-2"), tmp_path, console)

    assert [one.role.name for one in first.all] == ["scheduler", "store", "rank 0", "gateway"]
    assert [one.role.name for one in second.all] == ["store", "rank 1"]
    assert (second.scheduler, second.gateway) == (None, None)


def test_supervisor_prints_no_gateway_address_on_host_without_gateway() -> None:
    """The supervisor reports the host's ranks and prints no curl command that would fail."""
    output = io.StringIO()
    announcer = Announcer(_share("studio-2"), Console(output))

    announcer.announce_start()
    announcer.announce(
        status_report(ranks=[rank_status(0), rank_status(1)]), 1, is_gateway_ready=lambda: True
    )
    announcer.announce(
        status_report(ranks=[rank_status(0), rank_status(1)], epoch=2),
        1,
        is_gateway_ready=lambda: True,
    )

    text = output.getvalue()
    assert "Starting Lockstep on studio-2: lockstep-demo, rank 1 of 2 (ring)" in text
    assert "Lockstep is ready; studio-2 runs rank 1 of 2." in text
    assert "ready again (epoch 2)" in text
    assert "curl" not in text


def test_supervisor_reports_missing_remote_scheduler_once_until_it_answers() -> None:
    """The message on a missing scheduler appears once until the scheduler has answered."""
    output = io.StringIO()
    announcer = Announcer(_share("studio-2"), Console(output))

    announcer.announce_no_status("", 1.0)
    assert output.getvalue() == ""
    announcer.announce_no_status("", 4.0)
    announcer.announce_no_status("", 5.0)
    assert output.getvalue() == "Waiting for the scheduler at tcp://192.168.7.1:7610\n"
    announcer.announce(status_report(), 1, is_gateway_ready=lambda: True)
    announcer.announce_no_status("", 4.0)
    assert output.getvalue().count("Waiting for the scheduler") == 2


def test_supervisor_reports_refused_key_once_until_scheduler_answers() -> None:
    """The message on a refused key has cause and remedy and appears again only after an answer."""
    output = io.StringIO()
    announcer = Announcer(_share("studio-1"), Console(output))

    for _ in range(3):
        announcer.announce_no_status("this host's key is not allowed there", 9.0)
    line = (
        "lockstep  | the handshake with tcp://192.168.7.1:7610 failed: this host's key is not "
        "allowed there; see `lockstep keys show` here and on the scheduler's host\n"
    )
    assert output.getvalue() == line
    announcer.announce(status_report(), 1, is_gateway_ready=lambda: False)
    announcer.announce_no_status("this host's key is not allowed there", 0.0)
    assert output.getvalue() == 2 * line
