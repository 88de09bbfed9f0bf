"""Two hosts from one inventory on a network with keys."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from tests.hosts.cluster import Cluster, exchange_keys, run_command, write_inventory
from tests.hosts.network import HostProcess, Network

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Create the network, and delete it after the tests."""
    created = Network(["host-a", "host-b"])
    try:
        yield created
    finally:
        created.close()


@pytest.fixture(scope="module")
def two_hosts(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start both hosts; each test leaves them ready."""
    folder = tmp_path_factory.mktemp("two-hosts")
    file = write_inventory(network, folder)
    exchange_keys(file)
    cluster = Cluster(network, file)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.close()


def test_gateway_answers_chat_with_ranks_on_two_hosts(two_hosts: Cluster) -> None:
    """The gateway answers a chat, and `lockstep status` lists a rank on each host."""
    question = {"role": "user", "content": "What is Lockstep?"}
    body = {"model": "lockstep-demo", "messages": [question], "max_tokens": 40}
    with two_hosts.send_request("/v1/chat/completions", body) as response:
        assert b'"content"' in response.read()

    status = HostProcess(
        two_hosts.network, "host-b", ["status", "--inventory", str(two_hosts.file)]
    )
    assert status.wait_and_close() == 0, status.text
    assert "2 x ring" in status.text
    assert "host-a" in status.text
    assert "host-b" in status.text


def test_stream_text_is_unchanged_after_supervisor_of_host_is_killed(two_hosts: Cluster) -> None:
    """After a host's supervisor is killed and restarted the stream has the same text."""
    expected = "".join(two_hosts.stream())
    stream = two_hosts.stream()
    text = next(stream)

    lost = two_hosts.hosts["host-b"]
    lost.close()
    two_hosts.start("host-b").wait_for_line("Lockstep is ready; host-b runs rank 1 of 2")
    text += "".join(stream)

    assert text == expected
    assert two_hosts.hosts["host-a"].wait_for_line("ready again")


def test_lockstep_up_without_keys_fails_and_names_key_command(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    """`lockstep up` without keys starts no process and names the command that creates keys."""
    text = two_hosts.file.read_text(encoding="utf-8")
    keys, run = two_hosts.file.parent / "host-b" / "keys", two_hosts.file.parent / "host-b" / "run"
    file = tmp_path / "cluster.toml"
    file.write_text(
        text.replace(str(keys), str(tmp_path / "none")).replace(str(run), str(tmp_path / "run"))
    )

    up = HostProcess(two_hosts.network, "host-b", ["up", "--inventory", str(file)])

    assert up.wait_and_close() == limits.EXIT_CONFIG
    assert "this host has no keys: make them with `lockstep keys new`" in up.text
    assert "started" not in up.text


def test_lockstep_status_with_key_not_allowed_fails_naming_key(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    """A status query with a key that is not allowed fails and names the key as the cause."""
    text = two_hosts.file.read_text(encoding="utf-8")
    keys = two_hosts.file.parent / "host-b" / "keys"
    other_keys = tmp_path / "keys"
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(str(keys), str(other_keys)))
    inventory = ("--inventory", str(file), "--host", "host-b")
    assert run_command("keys", "new", *inventory)[0] == 0
    own_lines = [
        line for line in (other_keys / "allowed").read_text().splitlines() if "this-host" in line
    ]
    shutil.copy(keys / "allowed", other_keys / "allowed")
    peer_lines = [line for line in (keys / "allowed").read_text().splitlines() if "host-a" in line]
    (other_keys / "allowed").write_text("\n".join([*own_lines, *peer_lines, ""]))

    status = HostProcess(two_hosts.network, "host-b", ["status", *inventory])

    assert status.wait_and_close() == limits.EXIT_UNAVAILABLE
    assert "this host's key is not allowed there" in status.text


def test_world_restart_on_both_hosts_changes_the_number_of_ranks(two_hosts: Cluster) -> None:
    """The scheduler's host comes first, and names the command for the other one; both
    supervisors stay."""
    before = two_hosts.file.read_text(encoding="utf-8")
    words = ["restart", "world", "--inventory", str(two_hosts.file)]

    for ranks, count in (("[1, 2, 3]", 4), ("[1]", 2)):
        two_hosts.file.write_text(before.replace("ranks = [1]", f"ranks = {ranks}"))
        too_early = HostProcess(two_hosts.network, "host-b", words)
        assert too_early.wait_and_close() == limits.EXIT_UNAVAILABLE
        assert f"lockstep restart world --inventory {two_hosts.file}" in too_early.text

        first = HostProcess(two_hosts.network, "host-a", words)
        first.wait_for_line(f"Run on host-b: lockstep {' '.join(words)} --host host-b")
        second = HostProcess(two_hosts.network, "host-b", [*words, "--host", "host-b"])

        assert second.wait_and_close() == 0, second.text
        assert first.wait_and_close() == 0, first.text
        assert f"The world is ready: {count} ranks, split by tensor (ring)." in first.text
        assert f"{count} ranks instead of" in first.text
        assert "".join(two_hosts.stream())
    assert all(host.process.poll() is None for host in two_hosts.hosts.values())


def test_hosts_stopped_by_ctrl_c_exit_with_zero_and_restart(two_hosts: Cluster) -> None:
    """After Ctrl-C on both hosts they end with 0 and can be started again."""
    assert two_hosts.stop("host-b") == limits.EXIT_OK, two_hosts.hosts["host-b"].text
    assert two_hosts.stop("host-a") == limits.EXIT_OK, two_hosts.hosts["host-a"].text

    two_hosts.start_all()
