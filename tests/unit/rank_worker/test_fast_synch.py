"""What is remembered of Metal's fast synchronization: for one build, on one host, after a proof."""

import os
from pathlib import Path

import pytest

from services.rank_worker import fast_synch
from services.rank_worker.device import Device
from shared.errors import CanaryFailed, WorldLost
from shared.messages import CanaryFinding

METAL = Device(kind="metal", name="Apple M5 Max", memory_bytes=1)
FOUND = [CanaryFinding(name="sum of 1 int32", digest=bytes(16), bytes=4, microseconds=1.0)]
ON = {fast_synch.VARIABLE: "1"}


def test_a_world_that_serves_with_it_is_the_proof(tmp_path: Path) -> None:
    """Unproven until a world has passed and computed; then proven for the very same build only."""
    path = tmp_path / "lockstep" / fast_synch.FILE_NAME
    build = fast_synch.build_of(METAL, "darwin")
    assert fast_synch.state(path, build) == "unproven"

    note = fast_synch.proof(METAL, FOUND, path=path, system="darwin", environment=ON)
    assert note is not None
    assert fast_synch.state(path, build) == "unproven"
    note()
    note()

    assert fast_synch.state(path, build) == "proven"
    assert fast_synch.state(path, build.replace("M5", "M4")) == "unproven"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().count(METAL.name) == 1


@pytest.mark.parametrize(
    ("kind", "system", "environment", "found"),
    [
        ("metal", "linux", ON, FOUND),
        ("cpu", "darwin", ON, FOUND),
        ("metal", "darwin", {}, FOUND),
        ("metal", "darwin", {fast_synch.VARIABLE: "0"}, FOUND),
        ("metal", "darwin", ON, []),
    ],
)
def test_nothing_is_proven_otherwise(
    tmp_path: Path,
    kind: str,
    system: str,
    environment: dict[str, str],
    found: list[CanaryFinding],
) -> None:
    """Another system, no Metal, the variable not set, or no canary: there is nothing to note."""
    device = Device(kind=kind, name="x", memory_bytes=1)  # type: ignore[arg-type]
    path = tmp_path / "file"
    assert (
        fast_synch.proof(device, found, path=path, system=system, environment=environment) is None
    )
    assert fast_synch.state(path, "") == "unproven"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"proven": 1}', '{"proven": [1]}', "{}"])
def test_a_damaged_file_proves_nothing(tmp_path: Path, text: str) -> None:
    """Nor does one that others could have written; the next proof replaces it."""
    path = tmp_path / "file"
    path.write_text(text)
    assert fast_synch.state(path, "a") == "unproven"
    fast_synch.note_proven(path, "a")
    assert fast_synch.state(path, "a") == "proven"
    path.chmod(0o666)
    assert fast_synch.state(path, "a") == "unproven"


def test_a_canary_that_fails_with_it_takes_the_proof_away(tmp_path: Path) -> None:
    """Only with the variable set, only of this build, and only by the canary."""
    path = tmp_path / "file"
    build = fast_synch.build_of(METAL, "darwin")
    for one in (build, "another"):
        fast_synch.note_proven(path, one)

    def fail(error: Exception, environment: dict[str, str]) -> None:
        with (
            pytest.raises(type(error)),
            fast_synch.trusted(METAL, path=path, system="darwin", environment=environment),
        ):
            raise error

    fail(CanaryFailed("wrong"), {})
    fail(WorldLost("gone"), ON)
    assert fast_synch.state(path, build) == "proven"
    fail(CanaryFailed("wrong"), ON)
    assert fast_synch.state(path, build) == "unproven"
    assert fast_synch.state(path, "another") == "proven"


def test_old_builds_are_forgotten(tmp_path: Path) -> None:
    """The file does not grow without end."""
    path = tmp_path / "file"
    for number in range(fast_synch.BUILDS_MAX + 3):
        fast_synch.note_proven(path, f"build {number}")
    assert fast_synch.state(path, "build 2") == "unproven"
    assert fast_synch.state(path, "build 3") == "proven"


def test_a_folder_that_cannot_be_written_costs_no_rank(tmp_path: Path) -> None:
    """The proof is lost, and said in the log; the rank goes on."""
    (tmp_path / "in-the-way").write_text("")
    path = tmp_path / "in-the-way" / "file"
    note = fast_synch.proof(METAL, FOUND, path=path, system="darwin", environment=ON)
    assert note is not None
    note()
    assert fast_synch.state(path, fast_synch.build_of(METAL, "darwin")) == "unproven"


def test_the_file_lies_beside_the_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this user's cache folder for Lockstep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fast_synch.file(os.environ).name == fast_synch.FILE_NAME
    assert fast_synch.file(os.environ).parent.name == "lockstep"
