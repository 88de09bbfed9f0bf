"""Reports of clients that are not installed."""

from pathlib import Path

import pytest

from tests.clients.agents import installation
from tests.clients.agents.catalog import AGENTS


def test_missing_clients_are_named_and_fail_only_where_all_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make clients` fails without npm, and says which programs are missing; `make proofs` goes
    on."""
    monkeypatch.setattr(installation, "FOLDER", tmp_path)
    monkeypatch.setattr(installation, "PROGRAMS", tmp_path / "bin")
    monkeypatch.setattr(installation, "_install_python_packages", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert installation.main([]) == 0
    assert installation.main(["--all"]) == 1
    said = capsys.readouterr().out
    assert "there is no `npm`" in said
    assert all(f"MISSING: {agent.program} (not installed" in said for agent in AGENTS)
