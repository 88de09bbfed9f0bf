"""`lockstep verify` on a real Lockstep: everything passes, and what it asks for really happens."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands import main
from services.commands.verify import ending, judging
from shared.os import process_file
from tests.end_to_end.running_lockstep import RunningLockstep

KEY = "only-for-this-test-" + "k" * 32


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that other tests keep busy need seconds for what takes milliseconds alone."""
    monkeypatch.setattr(judging, "ABORT_S", 15.0)
    monkeypatch.setattr(ending, "SHUTDOWN_S", 30.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """One rank with small blocks; every test leaves it serving."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own.toml").write_text("[cache]\nblock_tokens = 64\n")
    running = RunningLockstep(folder, 1, "--config", str(folder / "own.toml"))
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.close()


def verify(config_file: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        code = main.main(["verify", *arguments, "--config", str(config_file)])
    return code, said.getvalue()


def verdicts(text: str) -> dict[str, str]:
    """Return check -> verdict of a JSON document."""
    return {one["check"]: one["verdict"] for one in json.loads(text)["checks"]}


def test_one_rank_passes(running: RunningLockstep) -> None:
    """Everything that can be seen without ending anything; text for people."""
    code, said = verify(running.config_file)

    assert code == 0, said
    shown = [line for line in said.splitlines() if line[:4] in ("PASS", "FAIL", "SKIP")]
    expected = {
        judging.GATEWAY: "PASS",
        judging.CANARY: "SKIP",
        judging.ONE: "PASS",
        judging.AGAIN: "PASS",
        judging.TOGETHER: "PASS",
        judging.ABORT: "PASS",
        judging.RANKS: "PASS",
        judging.STORED: "PASS",
        judging.REUSED: "PASS",
        judging.CANARY_ANEW: "SKIP",
        judging.RESTORED: "SKIP",
        judging.SHUTDOWN: "SKIP",
    }
    assert [line[:4] for line in shown[:-1]] == list(expected.values()), said
    assert all(name in line for name, line in zip(expected, shown, strict=False))
    assert shown[-1] == "PASS  8 PASS, 0 FAIL, 4 SKIP"
    assert running.readiness() == 200


def test_nobody_there_fails_with_a_remedy(tmp_path: Path) -> None:
    """The gateway's line fails, all others say why they were not tried; exit code 1."""
    config = tmp_path / "config.toml"
    config.write_text(f'[paths]\nrun_dir = "{tmp_path}"\n[gateway]\nport = 1\n')
    code, said = verify(config, "--json", "--shutdown")

    assert code == 1
    document = json.loads(said)
    first, *others = document["checks"]
    assert not document["passed"]
    assert (first["check"], first["verdict"]) == (judging.GATEWAY, "FAIL")
    assert "127.0.0.1:1" in first["detail"]
    assert first["remedy"]
    assert {one["verdict"] for one in others} == {"SKIP"}


@pytest.mark.proof
def test_two_ranks_with_keys_and_all_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canaries compared and run anew, blocks restored by ranks that were started anew, a clean
    end."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"tester={KEY}")
    running = RunningLockstep(tmp_path, 2)
    try:
        running.wait_for_line("Lockstep is ready")
        running.wait_for_line("  -d '{")
        code, said = verify(running.config_file, "--json")
        assert code == 1
        assert any("401" in one["detail"] for one in json.loads(said)["checks"])

        monkeypatch.setenv("LOCKSTEP_API_KEY", KEY)
        code, said = verify(running.config_file, "--json", "--restart", "--shutdown")
        assert code == 0, said
        assert set(verdicts(said).values()) == {"PASS"}, said
        checks: dict[str, Any] = {one["check"]: one for one in json.loads(said)["checks"]}
        assert len(checks[judging.CANARY]["notes"]) == 2
        assert "us a sum" in checks[judging.CANARY]["notes"][1]
        # Other times of other sums: it ran, and nobody repeated what was known.
        assert checks[judging.CANARY_ANEW]["detail"] == checks[judging.CANARY]["detail"]
        assert checks[judging.CANARY_ANEW]["notes"] != checks[judging.CANARY]["notes"]
        assert "all 2 ranks" in checks[judging.STORED]["detail"]
        assert "2 equal receipts" in checks[judging.RANKS]["detail"]
        assert running.wait(30.0) == 0
        assert process_file.find_processes(tmp_path, "rank") == []
    finally:
        running.close()
