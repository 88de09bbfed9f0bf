"""Files that only their owner may access."""

import contextlib
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.os import private_files


def _read(path: Path) -> str:
    return private_files.read(path, not_allowed=0o077, remedy="chmod 600")


def test_private_file_reader_refuses_named_pipe_without_blocking(tmp_path: Path) -> None:
    """A path that is no regular file is refused before it is opened for reading."""
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        _read(tmp_path / "keys")


def test_private_file_with_group_access_is_refused_with_chmod_command(tmp_path: Path) -> None:
    """The error contains the chmod command."""
    private_files.replace(tmp_path / "keys", "text")
    assert _read(tmp_path / "keys") == "text"
    (tmp_path / "keys").chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*`chmod 600 "):
        _read(tmp_path / "keys")


def test_replacing_private_file_follows_link_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    """The target of a symbolic link is replaced as a whole, and its signature changes."""
    private_files.replace(tmp_path / "real", "before")
    (tmp_path / "keys").symlink_to(tmp_path / "real")
    before = private_files.signature(tmp_path / "keys")
    private_files.replace(tmp_path / "keys", "after")
    assert (tmp_path / "real").read_text() == "after"
    assert (tmp_path / "keys").is_symlink()
    assert private_files.signature(tmp_path / "keys") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "real"]
    assert private_files.signature(tmp_path / "none") == ()


def test_private_folder_lock_makes_second_thread_wait_until_release(tmp_path: Path) -> None:
    """A second thread waits until the lock is released."""
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


OWN, OTHER, ROOT = 1_000, 2_000, 0


@pytest.mark.parametrize(
    ("place", "owner", "mode", "is_accepted"),
    [
        ("secrets", OTHER, 0o444, True),
        ("secrets", OWN, 0o444, True),
        ("secrets", OTHER, 0o664, False),
        ("read-only", OTHER, 0o444, True),
        ("read-only", ROOT, 0o644, True),
        ("ordinary", OTHER, 0o400, False),
        ("ordinary", OWN, 0o444, False),
        ("ordinary", OWN, 0o600, True),
        ("ordinary", ROOT, 0o640, True),
        ("ordinary", ROOT, 0o660, False),
    ],
)
def test_key_file_of_container_runtime_is_accepted_if_others_cannot_write_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    owner: int,
    mode: int,
    *,
    is_accepted: bool,
) -> None:
    """Secrets may have any owner and be readable for all in /run/secrets and on read-only mounts.
    Elsewhere a file of this user must be private, and one of root not writable for others."""
    path = tmp_path / "keys"
    path.write_text("text")
    facts = path.stat()
    facts = os.stat_result((stat.S_IFREG | mode, *facts[1:4], owner, *facts[5:]))
    monkeypatch.setattr(os, "geteuid", lambda: OWN)
    if place == "secrets":
        monkeypatch.setattr(private_files, "SECRET_FOLDERS", (tmp_path,))
    if place == "read-only":
        read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
        monkeypatch.setattr(os, "statvfs", lambda _path: read_only)
    expected: Any = contextlib.nullcontext()
    if not is_accepted:
        expected = pytest.raises(ConfigError, match=r"run `chmod|another user|must run `chmod")
    with expected:
        private_files.check_owner(path, facts, not_allowed=0o077, remedy="chmod 600")
