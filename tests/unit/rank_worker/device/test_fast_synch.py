"""Proof that Metal's fast synchronization works, stored per build on each host."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from services.rank_worker.device.description import Device
from services.rank_worker.device.fast_synch_proof import FastSynchProof
from shared.errors import CanaryFailed, ConfigError, WorldLost
from shared.messages import CanaryFinding, LeaveWorld
from shared.os import fast_synch

METAL = Device(kind="metal", name="Apple M5 Max", memory_bytes=1)
SUMS = [CanaryFinding(name="sum of 1 int32", digest=bytes(16), bytes=4, microseconds=1.0)]
FOUND = [
    *SUMS,
    CanaryFinding(name="prompt of 9 tokens", digest=bytes(16), bytes=0, microseconds=1.0),
]
ON = {fast_synch.VARIABLE: "1"}
LEAVE = LeaveWorld(epoch=1, detail="Rank 1 failed: out of memory.")
LEAVE_FOR_CANARY = LeaveWorld(epoch=1, detail="Rank 1 differs.", cause="canary")


def _proof(path: Path, device: Device = METAL) -> FastSynchProof:
    return FastSynchProof(device, path=path, system="darwin", environment=ON)


def _proven(path: Path) -> str:
    """Record proofs of this build and of another one; return this build."""
    build = fast_synch.platform_build(METAL.kind, METAL.name, "darwin")
    for one in (build, "another"):
        fast_synch.record_proof(path, one)
    return build


def test_passed_test_result_is_stored_after_world_with_fast_synchronization_serves(
    tmp_path: Path,
) -> None:
    """A world that passes the canary and serves proves fast synchronization, only for this device,
    system build and MLX version.
    """
    path = tmp_path / "lockstep" / fast_synch.FILE_NAME
    build = fast_synch.platform_build(METAL.kind, METAL.name, "darwin")
    assert fast_synch.proof_state(path, build) == "unproven"

    note = _proof(path).recorder(FOUND)
    assert note is not None
    assert fast_synch.proof_state(path, build) == "unproven"
    note()
    note()

    assert fast_synch.proof_state(path, build) == "proven"
    assert fast_synch.proof_state(path, build.replace("M5", "M4")) == "unproven"
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
        ("metal", "darwin", ON, SUMS),
        ("metal", "darwin", ON, FOUND[1:]),
    ],
)
def test_no_test_result_is_stored_for_other_devices_unset_variable_or_partial_canary(
    tmp_path: Path,
    kind: str,
    system: str,
    environment: dict[str, str],
    found: list[CanaryFinding],
) -> None:
    """Another system or device, an unset variable or an incomplete canary give no proof."""
    device = Device(kind=kind, name="x", memory_bytes=1)  # type: ignore[arg-type]
    path = tmp_path / "file"
    proof = FastSynchProof(device, path=path, system=system, environment=environment)
    assert proof.recorder(found) is None
    assert fast_synch.proof_state(path, "") == "unproven"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"proven": 1}', '{"proven": [1]}', "{}"])
def test_damaged_result_file_or_one_writable_by_others_counts_as_unproven(
    tmp_path: Path, text: str
) -> None:
    """A damaged file, or one that others can write, counts as `unproven`; the next success replaces
    it.
    """
    path = tmp_path / "file"
    path.write_text(text)
    assert fast_synch.proof_state(path, "a") == "unproven"
    fast_synch.record_proof(path, "a")
    assert fast_synch.proof_state(path, "a") == "proven"
    path.chmod(0o666)
    assert fast_synch.proof_state(path, "a") == "unproven"


@pytest.mark.parametrize("blocks", [1, 2], ids=["sums", "prompt"])
def test_failed_canary_deletes_stored_test_result_of_fast_synchronization(
    tmp_path: Path, blocks: int
) -> None:
    """A canary that fails with fast synchronization removes the proof of this build for good."""
    path = tmp_path / "file"
    build = _proven(path)
    proof = _proof(path)

    for _ in range(blocks - 1):
        with proof.withheld():
            pass
    with pytest.raises(CanaryFailed), proof.withheld():
        raise CanaryFailed("wrong")
    proof.world_left(LEAVE)

    assert fast_synch.proof_state(path, build) == "unproven"
    assert fast_synch.proof_state(path, "another") == "proven"


@pytest.mark.parametrize("error", [WorldLost("gone"), ConfigError("too large"), MemoryError()])
def test_failures_other_than_canary_keep_stored_test_result_of_fast_synchronization(
    tmp_path: Path, error: Exception
) -> None:
    """Failures other than of the canary keep the stored result."""
    path = tmp_path / "file"
    build = _proven(path)

    with pytest.raises(type(error)), _proof(path).withheld():
        raise error

    assert fast_synch.proof_state(path, build) == "proven"


def test_failed_canary_keeps_stored_test_result_when_fast_synchronization_was_off(
    tmp_path: Path,
) -> None:
    """Without the variable a failed canary keeps the stored result."""
    path = tmp_path / "file"
    build = _proven(path)
    proof = FastSynchProof(METAL, path=path, system="darwin", environment={})

    with proof.withheld():
        assert fast_synch.proof_state(path, build) == "proven"
    with pytest.raises(CanaryFailed), proof.withheld():
        raise CanaryFailed("wrong")
    proof.world_left(LEAVE_FOR_CANARY)

    assert fast_synch.proof_state(path, build) == "proven"


def test_order_to_leave_for_canary_deletes_stored_test_result_of_fast_synchronization(
    tmp_path: Path,
) -> None:
    """An order to leave because of the canary deletes the stored result; other orders keep it."""
    path = tmp_path / "file"
    build = _proven(path)
    proof = _proof(path)
    with proof.withheld():
        # The link's thread reports this while the canary runs.
        proof.world_left(LEAVE)
        assert fast_synch.proof_state(path, build) == "proven"
    with proof.withheld():
        pass
    proof.world_left(LEAVE)
    assert fast_synch.proof_state(path, build) == "proven"

    proof.world_left(LEAVE_FOR_CANARY)

    assert fast_synch.proof_state(path, build) == "unproven"


def test_process_killed_during_canary_leaves_no_stored_result_of_fast_synchronization(
    tmp_path: Path,
) -> None:
    """The stored result is deleted before the canary runs, so a killed process leaves none."""
    path = tmp_path / "file"
    build = _proven(path)
    program = f"""
        import os, signal
        from pathlib import Path
        from services.rank_worker.device.description import Device
        from services.rank_worker.device.fast_synch_proof import FastSynchProof

        here = Device(kind="metal", name={METAL.name!r}, memory_bytes=1)
        proof = FastSynchProof(here, path=Path({str(path)!r}), system="darwin", environment={ON!r})
        with proof.withheld():
            os.kill(os.getpid(), signal.SIGKILL)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, timeout=60)

    assert done.returncode == -9
    assert fast_synch.proof_state(path, build) == "unproven"
    assert fast_synch.proof_state(path, "another") == "proven"


def test_result_file_truncated_at_any_length_counts_as_unproven(tmp_path: Path) -> None:
    """A file truncated at any length counts as `unproven`."""
    path = tmp_path / "file"
    build = _proven(path)
    data = path.read_bytes().rstrip()

    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert fast_synch.proof_state(path, build) == "unproven"
    path.write_bytes(data)
    assert fast_synch.proof_state(path, build) == "proven"


def test_stored_results_are_separate_by_system_build_and_mlx_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of the system and versions of MLX have separate results."""
    system_file = tmp_path / "SystemVersion.plist"
    monkeypatch.setattr(fast_synch, "_SYSTEM_FILE", system_file)
    builds = {fast_synch.platform_build(METAL.kind, METAL.name, "darwin")}
    for number in ("25C56", "25C57"):
        plist = (
            f"<plist><dict><key>ProductBuildVersion</key><string>{number}</string></dict></plist>"
        )
        system_file.write_text(plist)
        builds.add(fast_synch.platform_build(METAL.kind, METAL.name, "darwin"))
    for text in ("no property list", "<plist><dict>"):
        system_file.write_text(text)
        builds.add(fast_synch.platform_build(METAL.kind, METAL.name, "darwin"))
    monkeypatch.setattr(fast_synch, "mlx_version", lambda: "99.0")
    builds.add(fast_synch.platform_build(METAL.kind, METAL.name, "darwin"))

    assert len(builds) == 4
    assert sum("25C57" in build for build in builds) == 1


def test_oldest_stored_results_are_dropped_beyond_limit(tmp_path: Path) -> None:
    """The file keeps the results of a bounded number of builds and drops the oldest."""
    path = tmp_path / "file"
    for number in range(fast_synch.BUILDS_MAX + 3):
        fast_synch.record_proof(path, f"build {number}")
    assert fast_synch.proof_state(path, "build 2") == "unproven"
    assert fast_synch.proof_state(path, "build 3") == "proven"


def test_result_that_cannot_be_written_stays_unproven_without_error(tmp_path: Path) -> None:
    """If the result cannot be written, it stays `unproven` and no error is raised."""
    (tmp_path / "in-the-way").write_text("")
    path = tmp_path / "in-the-way" / "file"
    note = _proof(path).recorder(FOUND)
    assert note is not None
    note()
    assert (
        fast_synch.proof_state(path, fast_synch.platform_build(METAL.kind, METAL.name, "darwin"))
        == "unproven"
    )


def test_result_file_is_in_lockstep_folder_of_user_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file of results is in Lockstep's part of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fast_synch.proof_file().name == fast_synch.FILE_NAME
    assert fast_synch.proof_file().parent.name == "lockstep"
