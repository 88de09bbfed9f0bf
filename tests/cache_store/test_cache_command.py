"""`lockstep cache`: the same answers from a store that runs and from a directory that rests."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from shared.block_record import HEADER_BYTES
from shared.messages import SpillFailed
from tests.cache_store.conftest import MakePeer
from tests.cache_store.running_store import DEADLINE_S, NAMESPACE, Peer, RunningStore, block_hash

RECORD_BYTES = HEADER_BYTES + 200
Cache = Callable[..., "subprocess.CompletedProcess[str]"]


def _facts(done: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _fill(make_peer: MakePeer) -> list[Peer]:
    peers = [make_peer(rank, 2) for rank in range(2)]
    for peer in peers:
        peer.commit(block_hash(1), block_hash(2))
    peers[0].commit(block_hash(3))
    return peers


@pytest.fixture(params=["running", "at rest"])
def filled(
    request: pytest.FixtureRequest, store: RunningStore, make_peer: MakePeer
) -> tuple[RunningStore, bool]:
    """A store with five records in two folders; whether its process runs."""
    _fill(make_peer)
    if request.param == "at rest":
        store.stop()
    return store, request.param == "running"


def test_stats(filled: tuple[RunningStore, bool]) -> None:
    """Used bytes, records and namespaces, for people and for machines."""
    store, is_running = filled

    facts = _facts(store.cache("stats", "--json"))
    text = store.cache("stats").stdout

    assert facts["running"] is is_running
    assert (facts["on"], facts["records"], facts["namespaces"]) == (True, 5, 1)
    assert facts["bytes_used"] == 5 * RECORD_BYTES
    assert facts["directory"] == str(store.directory)
    first = "The cache store is on" if is_running else "No cache store runs"
    assert text.startswith(f"{first}\n")
    assert "5 in 1 namespace\n" in text
    assert str(store.directory) in text


def test_list(filled: tuple[RunningStore, bool]) -> None:
    """A line per rank and namespace, aligned; a namespace by its first digits."""
    store, _ = filled

    facts = _facts(store.cache("list", "--json", "--namespace", NAMESPACE[:5]))
    lines = store.cache("list").stdout.splitlines()

    folders = [(f["rank"], f["world_size"], f["records"]) for f in facts["folders"]]
    assert folders == [(0, 2, 3), (1, 2, 2)]
    assert [line.split()[:2] for line in lines] == [
        ["namespace", "rank"], [NAMESPACE, "0"], [NAMESPACE, "1"],
    ]  # fmt: skip
    assert lines[0].index("records") == lines[1].index("3  ")


def test_check(filled: tuple[RunningStore, bool]) -> None:
    """Every record is read; each bad one is named with its place, and nothing is deleted."""
    store, _ = filled
    whole = store.cache("check")
    assert (whole.returncode, whole.stdout) == (
        0,
        "Checked 5 records (2.2 KiB): all are whole.\n",
    )
    files = sorted(store.directory.glob("*/rank-0-of-2/*"))
    data = bytearray(files[0].read_bytes())
    data[RECORD_BYTES + HEADER_BYTES + 7] ^= 1
    files[0].write_bytes(data)

    text = store.cache("check")
    facts = _facts(store.cache("check", "--json"), code=1)

    assert text.returncode == 1
    assert f"{files[0].name} at {RECORD_BYTES}: The record's payload does not match" in text.stdout
    assert "Checked 4 records (1.8 KiB): 1 bad record." in text.stdout
    assert facts["records"] == 4
    (bad,) = facts["bad"]
    assert (bad["offset"], bad["cause"]) == (RECORD_BYTES, "damaged")
    assert bad["file"] == str(files[0].relative_to(store.directory))
    assert files[0].read_bytes() == data


def test_clear(filled: tuple[RunningStore, bool]) -> None:
    """What is there is deleted and counted; then there is nothing to clear."""
    store, _ = filled

    none = store.cache("clear", "--namespace", "00")
    facts = _facts(store.cache("clear", "--json"))
    text = store.cache("clear")

    assert f"Nothing of namespace 00 is stored in {store.directory}." in none.stdout
    assert (facts["records"], facts["size_bytes"]) == (5, 5 * RECORD_BYTES)
    assert list(store.directory.glob("*/rank-*/*")) == []
    assert text.stdout == "There is nothing to clear.\n"
    assert "Nothing is stored" in store.cache("list").stdout


def test_a_cleared_store_goes_on(store: RunningStore, make_peer: MakePeer) -> None:
    """Ranks of a running store miss what was cleared, and write on."""
    peers = _fill(make_peer)
    assert store.cache("clear").returncode == 0

    assert peers[0].has(block_hash(1)) == [False]
    answer = peers[0].commit(block_hash(1))
    assert answer is not None
    assert answer.accepted
    assert peers[0].has(block_hash(1)) == [True]


def test_a_store_that_is_found_by_its_lock(store: RunningStore, make_peer: MakePeer) -> None:
    """With another run folder the address is not known; the directory's lock says it."""
    _fill(make_peer)
    elsewhere = {**store.environment, "LOCKSTEP_PATHS_RUN_DIR": f"{store.run_dir}-2"}
    store.environment = elsewhere

    assert _facts(store.cache("stats", "--json"))["running"] is True


def test_looking_changes_nothing(store: RunningStore, make_peer: MakePeer) -> None:
    """A directory at rest keeps its files and their recency, whatever limit is set here."""
    _fill(make_peer)
    store.stop()
    before = {path: path.stat().st_mtime_ns for path in store.directory.glob("*/rank-*/*")}
    store.environment["LOCKSTEP_CACHE_SSD_BYTES_MAX"] = "1"

    for verb in ("stats", "list", "check"):
        assert store.cache(verb).returncode == 0

    after = {path: path.stat().st_mtime_ns for path in store.directory.glob("*/rank-*/*")}
    assert after == before
    assert len(before) == 3


@pytest.mark.parametrize("verb", ["stats", "list", "check", "clear"])
def test_nothing_there(home: Path, verb: str) -> None:
    """Where nothing was ever stored every verb says so, makes nothing, and is content."""
    store = RunningStore(home)

    text = store.command("cache", verb)
    facts = _facts(store.cache(verb, "--json"))

    assert (text.returncode, text.stdout) == (0, f"Nothing is stored in {store.directory}.\n")
    assert facts.get("records", 0) == 0
    assert not store.directory.exists()
    store.close()


def test_bad_arguments(store: RunningStore, make_peer: MakePeer) -> None:
    """A namespace with other digits, or the beginning of several, is one sentence."""
    _fill(make_peer)
    make_peer(namespace="ac" * 32).commit(block_hash(1))

    for namespace, says in (("xyz", "hexadecimal"), ("a", "2 namespaces begin with a")):
        done = store.cache("list", "--namespace", namespace)
        assert (done.returncode, done.stderr.count("\n")) == (limits.EXIT_USAGE, 1)
        assert says in done.stderr
    assert len(_facts(store.cache("list", "--json"))["folders"]) == 3
    one = store.cache("list", "--json", "--namespace", "ac")
    assert len(_facts(one)["folders"]) == 1


def test_a_store_that_is_off(store: RunningStore, peer: Peer) -> None:
    """`stats` says that it is off and why; the other verbs do not pretend to know."""
    peer.reports.clear()
    # First the reason why it stays off: a second later it would be on again.
    store.directory.rename(store.directory.with_name("away"))
    store.directory.write_text("in the way")
    peer.say(SpillFailed(detail="No space left on device"))
    peer.wait_for(on=False, deadline_s=DEADLINE_S)

    stats = store.cache("stats")
    listed = store.cache("list")

    assert stats.returncode == 0
    assert stats.stdout.startswith("The cache store is off (")
    assert listed.returncode == limits.EXIT_UNAVAILABLE
    assert "The cache store is off" in listed.stderr
    store.directory.unlink()


@pytest.mark.proof
def test_an_owner_that_does_not_answer(store: RunningStore, make_peer: MakePeer) -> None:
    """A store that hangs: after the deadline one sentence and exit code 69."""
    _fill(make_peer)
    assert store.process is not None
    store.process.send_signal(signal.SIGSTOP)

    done = store.cache("stats")

    store.process.send_signal(signal.SIGCONT)
    assert done.returncode == limits.EXIT_UNAVAILABLE
    assert "does not answer" in done.stderr
