"""Files that only their user may reach."""

import os
import threading
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.os import private_files


def _read(path: Path) -> str:
    return private_files.read(path, not_allowed=0o077, remedy="chmod 600")


def test_a_pipe_of_that_name_does_not_hang(tmp_path: Path) -> None:
    """What is no regular file is refused, whoever would write to its other end."""
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        _read(tmp_path / "keys")


def test_rights_of_others_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """The sentence names the command that mends it."""
    private_files.replace(tmp_path / "keys", "text")
    assert _read(tmp_path / "keys") == "text"
    (tmp_path / "keys").chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*`chmod 600 "):
        _read(tmp_path / "keys")


def test_replacing_keeps_a_link_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The file that a link names is replaced as a whole; its signature changes."""
    private_files.replace(tmp_path / "real", "before")
    (tmp_path / "keys").symlink_to(tmp_path / "real")
    before = private_files.signature(tmp_path / "keys")
    private_files.replace(tmp_path / "keys", "after")
    assert (tmp_path / "real").read_text() == "after"
    assert (tmp_path / "keys").is_symlink()
    assert private_files.signature(tmp_path / "keys") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "real"]
    assert private_files.signature(tmp_path / "none") == ()


def test_one_at_a_time(tmp_path: Path) -> None:
    """Who holds the lock keeps others out until the end."""
    order: list[str] = []

    def second() -> None:
        with private_files.locked(tmp_path / "folder"):
            order.append("second")

    with private_files.locked(tmp_path / "folder"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10.0)
    assert order == ["first", "second"]
