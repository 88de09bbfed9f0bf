"""Which running Lockstep a command line means."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.commands.cli.flags import SettingSources
from services.commands.cli.running_config import names_one, running_config
from services.supervisor.status import running
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.errors import UsageError
from shared.os import process_file, run_folder
from shared.os.process_file import ProcessFile


def _config(folder: Path, port: int) -> Config:
    return config_from_tree({"paths": {"run_dir": str(folder)}, "gateway": {"port": port}})


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProcessFile]]:
    """Supervisors of two Locksteps, on ports 9001 and 9002, with run folders of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    files = []
    for port in (9001, 9002):
        folder = run_folder.prepare(tmp_path / str(port))
        running.register(folder)
        facts = running.facts(_config(folder, port))
        files.append(ProcessFile(folder, process_file.SUPERVISOR, is_only=True, facts=facts))
    yield files
    for file in files:
        if file.path.exists():
            file.release()


def test_command_without_flags_means_only_lockstep_that_runs(
    two: list[ProcessFile], tmp_path: Path
) -> None:
    """Its run folder and port may be any. The link to the ended one is removed."""
    two[0].release()
    found = running_config(SettingSources(), {})
    assert (found.gateway.port, found.run_dir) == (9002, tmp_path / "9002")
    links = [path for path in (tmp_path / "state").rglob("*") if path.is_symlink()]
    assert [link.resolve() for link in links] == [tmp_path / "9002"]


@pytest.mark.usefixtures("two")
def test_command_without_flags_is_refused_while_two_locksteps_run(tmp_path: Path) -> None:
    """The error lists both with the flag that chooses one."""
    with pytest.raises(UsageError, match=r"--port 9001 .*--port 9002 .*Choose one") as refused:
        running_config(SettingSources(), {})
    assert str(tmp_path / "9001") in str(refused.value)


@pytest.mark.usefixtures("two")
def test_port_flag_chooses_lockstep_whose_run_folder_is_elsewhere(tmp_path: Path) -> None:
    """A port alone suffices; the folder is that of the process file."""
    chosen = running_config(SettingSources(overrides={"gateway.port": "9002"}), {})
    assert chosen.run_dir == tmp_path / "9002"


@pytest.mark.usefixtures("two")
def test_run_folder_in_environment_names_one_lockstep() -> None:
    """Then nothing is searched; a variable that says nothing about the place does not count."""
    assert names_one(SettingSources(), {"LOCKSTEP_PATHS_RUN_DIR": "/x"})
    assert not names_one(SettingSources(), {"LOCKSTEP_LOG_LEVEL": "debug", **_without_settings()})


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
