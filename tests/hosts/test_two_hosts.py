"""Two hosts from one inventory, over a network of their own with keys: they serve as one."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from tests.hosts import cluster
from tests.hosts.cluster import Cluster
from tests.hosts.network import Network, Running


@pytest.fixture(scope="module")
def wires() -> Iterator[Network]:
    """The network, gone when the tests are over."""
    made = Network(["host-a", "host-b"])
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def running(wires: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Both hosts, ready; every test leaves them so."""
    folder = tmp_path_factory.mktemp("two-hosts")
    file = cluster.inventory(wires, folder)
    cluster.exchange_keys(file)
    hosts = Cluster(wires, file)
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.close()


def test_a_request_is_answered_by_both_hosts(running: Cluster) -> None:
    """A chat through the one gateway gets its answer; both hosts have a rank in the world."""
    question = {"role": "user", "content": "What is Lockstep?"}
    body = {"model": "lockstep-demo", "messages": [question], "max_tokens": 40}
    with running.ask("/v1/chat/completions", body) as response:
        assert b'"content"' in response.read()

    asked = Running(running.network, "host-b", ["status", "--inventory", str(running.file)])
    assert asked.end() == 0, asked.text
    assert "2 x ring" in asked.text
    assert "host-a" in asked.text
    assert "host-b" in asked.text


def test_a_host_that_dies_is_a_pause(running: Cluster) -> None:
    """Its supervisor is killed in mid-stream and comes back: the stream's text is the same."""
    undisturbed = "".join(running.stream())
    stream = running.stream()
    text = next(stream)

    lost = running.hosts["host-b"]
    lost.close()
    running.start("host-b").wait_for_line("Lockstep is ready; host-b runs rank 1 of 2")
    text += "".join(stream)

    assert text == undisturbed
    assert running.hosts["host-a"].wait_for_line("ready again")


def test_a_host_without_keys_is_refused(running: Cluster, tmp_path: Path) -> None:
    """It says which keys are missing and how to make them, and starts nothing."""
    text = running.file.read_text(encoding="utf-8")
    keys, run = running.file.parent / "host-b" / "keys", running.file.parent / "host-b" / "run"
    file = tmp_path / "cluster.toml"
    file.write_text(
        text.replace(str(keys), str(tmp_path / "none")).replace(str(run), str(tmp_path / "run"))
    )

    refused = Running(running.network, "host-b", ["up", "--inventory", str(file)])

    assert refused.end() == limits.EXIT_CONFIG
    assert "this host has no keys: make them with `lockstep keys new`" in refused.text
    assert "started" not in refused.text


def test_a_host_whose_key_nobody_allows_is_refused(running: Cluster, tmp_path: Path) -> None:
    """Asking the scheduler with another key fails, and the sentence says that keys are why."""
    text = running.file.read_text(encoding="utf-8")
    keys = running.file.parent / "host-b" / "keys"
    stranger = tmp_path / "keys"
    file = tmp_path / "cluster.toml"
    file.write_text(text.replace(str(keys), str(stranger)))
    where = ("--inventory", str(file), "--host", "host-b")
    assert cluster.command("keys", "new", *where)[0] == 0
    own = [line for line in (stranger / "allowed").read_text().splitlines() if "this-host" in line]
    shutil.copy(keys / "allowed", stranger / "allowed")
    kept = [line for line in (keys / "allowed").read_text().splitlines() if "host-a" in line]
    (stranger / "allowed").write_text("\n".join([*own, *kept, ""]))

    asked = Running(running.network, "host-b", ["status", *where])

    assert asked.end() == limits.EXIT_UNAVAILABLE
    assert "this host's key is not allowed there" in asked.text


def test_hosts_end_cleanly_and_come_back(running: Cluster) -> None:
    """Ctrl-C on the rank's host, then on the gateway's; started again they are ready again."""
    assert running.stop("host-b") == limits.EXIT_OK, running.hosts["host-b"].text
    assert running.stop("host-a") == limits.EXIT_OK, running.hosts["host-a"].text

    running.begin()
