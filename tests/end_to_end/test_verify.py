"""`lockstep verify` on a running Lockstep."""

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
from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep

KEY = "only-for-this-test-" + "k" * 32


@pytest.fixture(autouse=True)
def _longer_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the deadlines of checks: other tests may keep both cores busy for seconds."""
    monkeypatch.setattr(judging, "ABORT_S", 15.0)
    monkeypatch.setattr(ending, "SHUTDOWN_S", 30.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """One rank with small blocks; every test leaves it ready."""
    folder = tmp_path_factory.mktemp("run")
    with running_lockstep(folder, settings="[cache]\nblock_tokens = 64\n") as running:
        yield running


def run_verify(config_file: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its exit code and its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = main.main(["verify", *arguments, "--config", str(config_file)])
    return code, output.getvalue()


def verdicts_by_check(text: str) -> dict[str, str]:
    """Return the verdict of each check in a JSON document."""
    return {one["check"]: one["verdict"] for one in json.loads(text)["checks"]}


def test_verify_command_passes_on_running_lockstep_with_one_rank(running: RunningLockstep) -> None:
    """All checks that end nothing pass, and the output is text for people."""
    code, output = run_verify(running.config_file)

    assert code == 0, output
    verdict_lines = [line for line in output.splitlines() if line[:4] in ("PASS", "FAIL", "SKIP")]
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
    assert [line[:4] for line in verdict_lines[:-1]] == list(expected.values()), output
    assert all(name in line for name, line in zip(expected, verdict_lines, strict=False))
    assert verdict_lines[-1] == "PASS  8 PASS, 0 FAIL, 4 SKIP"
    assert running.readiness() == 200


def test_verify_without_gateway_fails_and_skips_other_checks(tmp_path: Path) -> None:
    """The gateway check fails with a remedy, all other checks are skipped, and the exit code is
    1."""
    config = tmp_path / "config.toml"
    config.write_text(f'[paths]\nrun_dir = "{tmp_path}"\n[gateway]\nport = 1\n')
    code, output = run_verify(config, "--json", "--shutdown")

    assert code == 1
    document = json.loads(output)
    first, *others = document["checks"]
    assert not document["passed"]
    assert (first["check"], first["verdict"]) == (judging.GATEWAY, "FAIL")
    assert "127.0.0.1:1" in first["detail"]
    assert first["remedy"]
    assert {one["verdict"] for one in others} == {"SKIP"}


@pytest.mark.proof
def test_verify_with_restart_and_shutdown_passes_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API key, the canary runs again, restarted ranks restore blocks, and Lockstep ends
    cleanly."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"tester={KEY}")
    with running_lockstep(tmp_path, 2) as running:
        code, output = run_verify(running.config_file, "--json")
        assert code == 1
        assert any("401" in one["detail"] for one in json.loads(output)["checks"])

        monkeypatch.setenv("LOCKSTEP_API_KEY", KEY)
        code, output = run_verify(running.config_file, "--json", "--restart", "--shutdown")
        assert code == 0, output
        assert set(verdicts_by_check(output).values()) == {"PASS"}, output
        checks: dict[str, Any] = {one["check"]: one for one in json.loads(output)["checks"]}
        assert len(checks[judging.CANARY]["notes"]) == 2
        assert "us a sum" in checks[judging.CANARY]["notes"][1]
        # Its long prompt has passed within the hour, so there is one finding less.
        before, anew = (
            checks[name]["detail"].split(" ", 1) for name in (judging.CANARY, judging.CANARY_ANEW)
        )
        assert (int(anew[0]), anew[1]) == (int(before[0]) - 1, before[1])
        # Other durations prove that the canary ran again and that the report is not the old one.
        assert checks[judging.CANARY_ANEW]["notes"] != checks[judging.CANARY]["notes"]
        assert "all 2 ranks" in checks[judging.STORED]["detail"]
        assert "2 equal receipts" in checks[judging.RANKS]["detail"]
        assert running.wait(30.0) == 0
        assert process_file.find_processes(tmp_path, "rank") == []
