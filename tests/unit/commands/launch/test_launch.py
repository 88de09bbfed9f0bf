"""Command `lockstep launch` with a running gateway and programs in place of the clients."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands.launch.clients import CLIENTS, NO_KEY
from shared import limits
from shared.os import user_folders
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ready_status
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.unit.commands.command_lines import run

ROOT = Path(__file__).resolve().parents[4]
KEY = "k" * 40
CONTEXT_TOKENS = 98_304
OUTPUT_TOKENS = 98_304 // 4
PROGRAMS = {"continue": "cn"}
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
words = sys.argv[1:]
named = [value for value in [*os.environ.values(), *words] if "/" in value]
paths = [pathlib.Path(one.rpartition("=")[2].strip('"')) for one in named]
files = {{path.name: path.read_text() for path in paths if path.suffix in (".json", ".yaml")}}
seen = {{"words": words, "variables": dict(os.environ), "files": files,
        "folders": [str(path.parent) for path in paths if path.name in files]}}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
sys.exit(int(os.environ.get("CODE", "0")))
"""
"""Writes down everything that the client would read."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """Run a gateway that has one key and an alias of its model."""
    folder = tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("model"))
    with RunningGateway.start(
        folder,
        tmp_path_factory.mktemp("run"),
        environment={"LOCKSTEP_API_KEYS": f"me={KEY}"},
        report=ready_status(context_tokens_max=CONTEXT_TOKENS),
        aliases=["coder", "claude-*"],
    ) as running:
        yield running


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for every client into PATH; return the file that they write."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for client in CLIENTS:
        program = folder / PROGRAMS.get(client, client)
        program.write_text(STAND_IN)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("LOCKSTEP_API_KEY", KEY)
    monkeypatch.setattr(user_folders, "config_folder", lambda _setting: tmp_path / "config")
    return tmp_path / "seen"


@pytest.mark.parametrize("client", CLIENTS)
def test_client_sees_server_key_model_context_and_longest_answer(
    capfd: pytest.CaptureFixture[str], gateway: RunningGateway, programs: Path, client: str
) -> None:
    """Each client gets these five facts, as far as it has settings for them, and the user's words;
    its files are gone afterwards."""
    code, out, err = run(capfd, "launch", client, "--run", "--url", gateway.url, "--", "-p", "Hi")

    assert (code, out, err) == (0, "", "")
    seen = json.loads(programs.read_text())
    everything = json.dumps([seen["words"], seen["variables"], seen["files"]])
    assert f"{gateway.url}" in everything
    assert KEY in seen["variables"].values()
    assert KEY not in json.dumps([seen["words"], seen["files"]])
    assert "tiny" in everything
    if client != "open-webui":
        assert str(CONTEXT_TOKENS) in everything
    if client not in ("codex", "open-webui"):
        assert str(OUTPUT_TOKENS) in everything
    assert seen["words"][-2:] == ["-p", "Hi"]
    assert [one for one in seen["folders"] if Path(one).exists()] == []


@pytest.mark.parametrize("client", CLIENTS)
def test_printed_script_starts_client_as_run_does(
    capfd: pytest.CaptureFixture[str], gateway: RunningGateway, programs: Path, client: str
) -> None:
    """The script holds no key, writes only into Lockstep's own folder, and gives the client the
    same words, variables and files as --run."""
    assert run(capfd, "launch", client, "--run", "--url", gateway.url)[0] == 0
    expected = json.loads(programs.read_text())

    code, out, _ = run(capfd, "launch", client, "--url", gateway.url)

    assert code == 0
    assert KEY not in out
    subprocess.run(["sh", "-eu", "-c", out], check=True)
    seen = json.loads(programs.read_text())
    exported = re.findall(r"^export (\w+)=", out, re.MULTILINE)
    assert len(exported) >= 1
    assert _relevant(seen, exported) == _relevant(expected, exported)
    assert {Path(one) for one in seen["folders"]} <= {user_folders.config_folder("") / "clients"}


def _relevant(seen: dict[str, Any], variables: list[str]) -> str:
    """Return words, some variables and files as text, with the folder of the files replaced."""
    values = {name: seen["variables"][name] for name in variables}
    text = json.dumps([seen["words"], values, seen["files"]])
    for folder in seen["folders"]:
        text = text.replace(folder, "FOLDER")
    return text


def test_name_chooses_alias_that_server_knows(
    capfd: pytest.CaptureFixture[str], gateway: RunningGateway, programs: Path
) -> None:
    """--name may be an alias or match a pattern of the server; any other name is a wrong usage."""
    for name in ("coder", "claude-opus-5"):
        words = ("launch", "codex", "--run", "--url", gateway.url, "--name", name)
        assert run(capfd, *words)[0] == 0
        seen = json.loads(programs.read_text())
        assert f'model="{name}"' in seen["words"]
        catalog = json.loads(seen["files"]["codex-models.json"])
        assert name in [one["slug"] for one in catalog["models"]]

    code, _, err = run(capfd, "launch", "codex", "--url", gateway.url, "--name", "gpt-9")

    assert code == limits.EXIT_USAGE
    assert "gpt-9" in err
    assert "tiny" in err


def test_exit_code_is_that_of_client(
    capfd: pytest.CaptureFixture[str],
    gateway: RunningGateway,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--run exits as the client does."""
    monkeypatch.setenv("CODE", "7")

    code, *_ = run(capfd, "launch", "aider", "--run", "--url", gateway.url)

    assert programs.exists()
    assert code == 7


def test_sigterm_is_passed_to_client_and_its_files_are_deleted(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    """SIGTERM ends the client first, and leaves no folder behind."""
    program, seen = tmp_path / "cn", tmp_path / "seen"
    lines = ["#!/bin/sh", f'echo "$2" > {seen}.part', f"mv {seen}.part {seen}", "exec sleep 60"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["launch", "continue", "--run", "--url", gateway.url, "--api-key", KEY]
    command = [sys.executable, "-m", "services.commands.main", *words]
    with subprocess.Popen(command, env=environment) as process:
        wait_until(seen.exists, 20.0)
        file = Path(seen.read_text().strip())
        assert file.exists()

        process.send_signal(signal.SIGTERM)

        assert process.wait(10) == 128 + signal.SIGTERM
    assert not file.parent.exists()


def test_server_without_keys_needs_none(
    capfd: pytest.CaptureFixture[str],
    programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that need some key get a placeholder, and Codex no variable; a model that is
    still loading is an error of its own."""
    monkeypatch.delenv("LOCKSTEP_API_KEY")
    folder = tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("model"))
    with RunningGateway.start(folder, tmp_path_factory.mktemp("run")) as running:
        words = ("launch", "opencode", "--run", "--port", str(running.port))
        assert run(capfd, *words)[0] == 0
        assert json.loads(programs.read_text())["variables"]["LOCKSTEP_API_KEY"] == NO_KEY
        assert "LOCKSTEP_API_KEY" not in run(capfd, "launch", "codex", "--url", running.url)[1]

        running.scheduler.status = ready_status(context_tokens_max=0)
        wait_until(lambda: run(capfd, *words)[0] == limits.EXIT_UNAVAILABLE, 10.0, poll_s=0.2)
        assert "not loaded yet" in run(capfd, *words)[2]


def test_errors_are_one_sentence_with_documented_exit_code(
    capfd: pytest.CaptureFixture[str],
    gateway: RunningGateway,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gateway, no key, a wrong key, a wrong URL and a client that is not installed are each
    explained with a remedy."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    here = ("launch", "claude", "--url", gateway.url)
    found = {
        "start `lockstep up`": run(capfd, "launch", "claude", "--url", nowhere),
        "refuses this API key": run(capfd, *here, "--api-key", "wrong"),
        "is malformed": run(capfd, "launch", "claude", "--url", "studio-1"),
        "is not one of": run(capfd, "launch", "emacs"),
        "copied completely": run(capfd, *here, "--api-key", "k\u00e9y"),
    }
    monkeypatch.delenv("LOCKSTEP_API_KEY")
    found["needs an API key"] = run(capfd, *here)
    monkeypatch.setenv("PATH", "/nowhere")
    found["npm install -g"] = run(capfd, *here, "--run", "--api-key", KEY)

    unavailable = {"start `lockstep up`", "npm install -g"}
    assert not programs.exists()
    for expected, (code, out, err) in found.items():
        wanted = limits.EXIT_UNAVAILABLE if expected in unavailable else limits.EXIT_USAGE
        assert code == wanted, err
        assert expected in err
        assert out == ""
        assert err.count("\n") == 1
