"""Files that only their owner may access."""

import os
import threading
from pathlib import Path

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize(
    ("place", "owner", "mode", "is_accepted"),
    [
        ("secrets", 54_321, 0o444, True),
        ("secrets", 0, 0o444, True),
        ("secrets", 54_321, 0o664, False),
        ("read-only", 54_321, 0o444, True),
        ("read-only", 0, 0o644, True),
        ("ordinary", 54_321, 0o400, False),
        ("ordinary", 0, 0o444, False),
        ("ordinary", 0, 0o600, True),
    ],
)
def test_key_file_of_container_runtime_is_accepted_if_nobody_else_can_write_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    owner: int,
    mode: int,
    is_accepted: bool,
) -> None:
    """Secrets may have any owner and be readable for all in /run/secrets and on read-only mounts;
    elsewhere a file of this user must be private."""
    path = tmp_path / "keys"
    path.write_text("text")
    path.chmod(mode)
    os.chown(path, owner, owner)
    if place == "secrets":
        monkeypatch.setattr(private_files, "SECRET_FOLDERS", (tmp_path,))
    if place == "read-only":
        monkeypatch.setattr(private_files, "_is_read_only", lambda _path: True)
    if is_accepted:
        assert _read(path) == "text"
    else:
        with pytest.raises(ConfigError, match=r"run `chmod|another user|must run `chmod"):
            _read(path)


def test_key_file_of_root_may_be_readable_for_group_of_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This user cannot change the mode of a file of root, and root has chosen it."""
    path = tmp_path / "keys"
    path.write_text("text")
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    path.chmod(0o640)
    private_files.check_owner(path, _as_roots(path), not_allowed=0o077, remedy="chmod 600")
    path.chmod(0o660)
    with pytest.raises(ConfigError, match="Other users can write"):
        private_files.check_owner(path, _as_roots(path), not_allowed=0o077, remedy="chmod 600")


def _as_roots(path: Path) -> os.stat_result:
    facts = path.stat()
    return os.stat_result((*facts[:4], 0, *facts[5:]))
