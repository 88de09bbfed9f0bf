"""`lockstep cache` on a running store and on the directory of a stopped one."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from shared.block_record import HEADER_BYTES
from shared.messages import SpillFailed
from tests.cache_store.conftest import MakePeer
from tests.cache_store.running_store import DEADLINE_S, Peer, RunningStore
from tests.unit.cache_store.harness import NAMESPACE, block_hash

RECORD_BYTES = HEADER_BYTES + 200


def _parse_json(done: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


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
    """Return a store with five records in two folders, and whether its process is running."""
    _fill(make_peer)
    if request.param == "at rest":
        store.stop()
    return store, request.param == "running"


def test_cache_stats_command_reports_bytes_records_and_namespaces(
    filled: tuple[RunningStore, bool],
) -> None:
    """`stats` reports bytes, records and namespaces as text and as JSON."""
    store, is_running = filled

    report = _parse_json(store.cache("stats", "--json"))
    text = store.cache("stats").stdout

    assert report["running"] is is_running
    assert (report["on"], report["records"], report["namespaces"]) == (True, 5, 1)
    assert report["bytes_used"] == 5 * RECORD_BYTES
    assert report["directory"] == str(store.directory)
    first = "The cache store is on" if is_running else "No cache store runs"
    assert text.startswith(f"{first}\n")
    assert "5 in 1 namespace\n" in text
    assert str(store.directory) in text


def test_cache_list_command_prints_one_line_per_rank_and_namespace(
    filled: tuple[RunningStore, bool],
) -> None:
    """`list` has one aligned line per rank and namespace; a namespace can be given by its first
    digits."""
    store, _ = filled

    report = _parse_json(store.cache("list", "--json", "--namespace", NAMESPACE[:5]))
    lines = store.cache("list").stdout.splitlines()

    folders = [(f["rank"], f["world_size"], f["records"]) for f in report["folders"]]
    assert folders == [(0, 2, 3), (1, 2, 2)]
    assert [line.split()[:2] for line in lines] == [
        ["namespace", "rank"], [NAMESPACE, "0"], [NAMESPACE, "1"],
    ]  # fmt: skip
    assert lines[0].index("records") == lines[1].index("3  ")


def test_cache_check_command_names_each_bad_record_and_deletes_nothing(
    filled: tuple[RunningStore, bool],
) -> None:
    """`check` reads every record, names the file and offset of each bad one, and deletes
    nothing."""
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
    report = _parse_json(store.cache("check", "--json"), code=1)

    assert text.returncode == 1
    assert f"{files[0].name} at {RECORD_BYTES}: The record's payload does not match" in text.stdout
    assert "Checked 4 records (1.8 KiB): 1 bad record." in text.stdout
    assert report["records"] == 4
    (bad,) = report["bad"]
    assert (bad["offset"], bad["cause"]) == (RECORD_BYTES, "damaged")
    assert bad["file"] == str(files[0].relative_to(store.directory))
    assert files[0].read_bytes() == data


def test_cache_clear_command_deletes_and_counts_all_records(
    filled: tuple[RunningStore, bool],
) -> None:
    """`clear` deletes and counts all records; a second `clear` finds nothing."""
    store, _ = filled

    none = store.cache("clear", "--namespace", "00")
    report = _parse_json(store.cache("clear", "--json"))
    text = store.cache("clear")

    assert f"Nothing of namespace 00 is stored in {store.directory}." in none.stdout
    assert (report["records"], report["size_bytes"]) == (5, 5 * RECORD_BYTES)
    assert list(store.directory.glob("*/rank-*/*")) == []
    assert text.stdout == "There is nothing to clear.\n"
    assert "Nothing is stored" in store.cache("list").stdout


def test_running_store_accepts_block_commits_after_cache_clear_command(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """After `clear` a rank of a running store misses the blocks and can commit them again."""
    peers = _fill(make_peer)
    assert store.cache("clear").returncode == 0

    assert peers[0].has(block_hash(1)) == [False]
    answer = peers[0].commit(block_hash(1))
    assert answer is not None
    assert answer.accepted
    assert peers[0].has(block_hash(1)) == [True]


def test_cache_command_reads_store_address_from_lock_file(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """With another run folder the command reads the store's address from the lock file."""
    _fill(make_peer)
    elsewhere = {**store.environment, "LOCKSTEP_PATHS_RUN_DIR": f"{store.run_dir}-2"}
    store.environment = elsewhere

    assert _parse_json(store.cache("stats", "--json"))["running"] is True


def test_cache_stats_list_and_check_leave_block_files_and_their_times_unchanged(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """`stats`, `list` and `check` delete no block file and change no modification time, even with a
    lower limit."""
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
def test_cache_commands_exit_with_0_when_no_block_is_stored(home: Path, verb: str) -> None:
    """Without any stored block each command says so, exits with 0 and creates nothing."""
    store = RunningStore(home)

    text = store.command("cache", verb)
    report = _parse_json(store.cache(verb, "--json"))

    assert (text.returncode, text.stdout) == (0, f"Nothing is stored in {store.directory}.\n")
    assert report.get("records", 0) == 0
    assert not store.directory.exists()
    store.close()


def test_cache_command_with_invalid_or_ambiguous_namespace_is_usage_error(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """A namespace with invalid digits or several matches is a usage error of one line."""
    _fill(make_peer)
    make_peer(namespace="ac" * 32).commit(block_hash(1))

    for namespace, message in (("xyz", "hexadecimal"), ("a", "2 namespaces begin with a")):
        done = store.cache("list", "--namespace", namespace)
        assert (done.returncode, done.stderr.count("\n")) == (limits.EXIT_USAGE, 1)
        assert message in done.stderr
    assert len(_parse_json(store.cache("list", "--json"))["folders"]) == 3
    one = store.cache("list", "--json", "--namespace", "ac")
    assert len(_parse_json(one)["folders"]) == 1


def test_cache_stats_succeeds_and_list_exits_with_69_while_store_is_off(
    store: RunningStore, peer: Peer
) -> None:
    """While the store is off, `stats` says so and exits with 0; `list` exits with 69."""
    peer.reports.clear()
    # The file keeps the store off; without it the store would be on again a second later.
    store.directory.rename(store.directory.with_name("away"))
    store.directory.write_text("in the way")
    peer.send(SpillFailed(detail="No space left on device"))
    peer.wait_for_notice(on=False, deadline_s=DEADLINE_S)

    stats = store.cache("stats")
    listed = store.cache("list")

    assert stats.returncode == 0
    assert stats.stdout.startswith("The cache store is off (")
    assert listed.returncode == limits.EXIT_UNAVAILABLE
    assert "The cache store is off" in listed.stderr
    store.directory.unlink()


@pytest.mark.proof
def test_cache_command_exits_with_69_when_store_does_not_answer(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """When the store does not answer, the command exits with 69 and one sentence."""
    _fill(make_peer)
    assert store.process is not None
    store.process.send_signal(signal.SIGSTOP)

    done = store.cache("stats")

    store.process.send_signal(signal.SIGCONT)
    assert done.returncode == limits.EXIT_UNAVAILABLE
    assert "does not answer" in done.stderr
