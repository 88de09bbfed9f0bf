"""A tree of control groups in files, as Linux shows them to a process."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.os import memory

GROUPS = "groups"
MEMBERSHIP = "membership"


def write_group(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of one control group: name -> content."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def hide_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a member of no control group, as on macOS."""
    monkeypatch.setattr(memory, "MEMBERSHIP_FILE", Path("/nowhere"))


def show_control_groups(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, str],
    membership: str = "0::/",
) -> None:
    """Make this process a member of one control group of version 2 that has these files."""
    write_group(folder / GROUPS, {"cgroup.procs": "1", **files})
    (folder / MEMBERSHIP).write_text(f"{membership}\n")
    monkeypatch.setattr(memory, "GROUPS_FOLDER", folder / GROUPS)
    monkeypatch.setattr(memory, "MEMBERSHIP_FILE", folder / MEMBERSHIP)
