"""Folders of a user with a home folder, and of a user without one."""

import pwd
from pathlib import Path

import pytest

from services.commands import main
from shared import limits
from shared.errors import ConfigError
from shared.os import user_folders


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without HOME whose user is not in the user database, as in some containers."""

    def unknown(_user: object) -> pwd.struct_passwd:
        raise KeyError("unknown")

    monkeypatch.delenv("HOME", raising=False)
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, name, unknown)


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        ["gateway"],
        ["scheduler"],
        ["cache-store"],
        ["rank-worker"],
        ["keys", "show"],
        ["cache", "stats"],
        ["status"],
        ["restart", "ranks"],
        ["drain"],
        ["doctor"],
        ["up", "--model", "~nouser/model"],
    ],
    ids=" ".join,
)
def test_command_without_home_folder_ends_with_sentence(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence names the missing folder and the setting; there is no traceback."""
    code = main.main(command)
    error = capfd.readouterr().err
    if command[0] != "doctor":
        assert code == limits.EXIT_CONFIG
        assert "here is no" in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("no_home")
def test_state_folder_named_by_environment_needs_no_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """XDG_STATE_HOME suffices, as in a container with a volume."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert user_folders.run_folders().is_relative_to(tmp_path)


def test_home_folder_of_unknown_user_in_setting_is_refused_before_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`up` starts nothing: its cache store would only be restarted again and again."""
    monkeypatch.setenv("LOCKSTEP_CACHE_DIRECTORY", "~nouser/x")
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path / "run"))
    assert main.main(["up"]) == limits.EXIT_CONFIG
    assert "cache.directory is ~nouser/x, but there is no user nouser" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_default_run_folders_are_in_home_folder_of_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder is in the state folder, which no cleaner empties, and not in the temporary one."""
    home = Path("/home/someone")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert user_folders.run_folders().is_relative_to(home)
    with pytest.raises(ConfigError, match=r"paths\.run_dir is ~nouser/run, but there is no user"):
        user_folders.expand("~nouser/run", "paths.run_dir")
    assert user_folders.expand(str(tmp_path), "paths.run_dir") == tmp_path
