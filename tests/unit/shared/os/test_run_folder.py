"""The private run folder: created with its mode, checked and never changed."""

import os
import stat
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.os import run_folder


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_run_folder_and_its_missing_parents_are_created_for_this_user_only(tmp_path: Path) -> None:
    """A generous umask changes nothing."""
    before = os.umask(0)
    try:
        run_folder.prepare(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (_mode(tmp_path / "a"), _mode(tmp_path / "a" / "b")) == (0o700, 0o700)


def test_existing_run_folder_open_to_others_is_refused_and_keeps_its_mode(tmp_path: Path) -> None:
    """The error contains the command that closes it; nothing is changed."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.*`chmod 700 "):
        run_folder.prepare(folder)
    assert _mode(folder) == 0o755


def test_symbolic_link_as_run_folder_is_refused_and_its_target_keeps_its_mode(
    tmp_path: Path,
) -> None:
    """A link could lead to any folder of this user, whose mode must stay."""
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        run_folder.prepare(tmp_path / "run")
    assert _mode(tmp_path / "target") == 0o755


def test_run_folder_below_folder_writable_for_all_is_refused_unless_sticky(tmp_path: Path) -> None:
    """Others could replace the folder, but not in a sticky one such as /tmp."""
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ConfigError, match="to which other users can write"):
        run_folder.prepare(parent / "run")
    parent.chmod(0o1777)
    assert run_folder.prepare(parent / "run") == parent / "run"


@pytest.mark.parametrize("foreign", ["run", "."])
def test_run_folder_that_another_user_owns_or_could_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    """The error names the owner and the setting."""
    (tmp_path / "parent" / "run").mkdir(parents=True, mode=0o700)
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        facts = real(path)
        is_foreign = path == tmp_path / "parent" / foreign
        return os.stat_result((*facts[:4], 54_321, *facts[5:])) if is_foreign else facts

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(ConfigError, match=r"another user \(54321\).*set paths\.run_dir"):
        run_folder.prepare(tmp_path / "parent" / "run")
