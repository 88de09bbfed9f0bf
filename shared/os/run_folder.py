"""Private folder of sockets and process files. Owns its creation and the checks of its owners.

Another user with write access to the folder or its parents could put sockets in Lockstep's places.
"""

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from shared.errors import ConfigError

_MODE = 0o700
_ROOT = 0


def prepare(folder: Path, setting: str = "paths.run_dir") -> Path:
    """Create the folder with mode 0700 if it is missing, else check it; return its absolute path.

    An existing folder is never changed. Missing parents are created with mode 0700 too.

    Args:
        folder: the folder.
        setting: the setting that names it, for errors.

    Raises:
        ConfigError: when it cannot be created, or another user can access, change or replace it.
    """
    folder = folder.absolute()
    try:
        _create(folder)
        _check_folder(folder, folder.lstat(), setting)
        real = folder.parent.resolve()
        for parent in dict.fromkeys([*folder.parents, real, *real.parents]):
            _check_parent(parent, folder, setting)
    except OSError as error:
        raise ConfigError(f"Cannot use {folder} as {setting}: {error.strerror}.") from None
    return folder


def _create(folder: Path) -> None:
    missing = [folder]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        # The mode is set by the same call, so that no other user can enter before.
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=_MODE)


def _check_folder(folder: Path, facts: os.stat_result, setting: str) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise ConfigError(
            f"The run folder {folder} is a symbolic link: set {setting} to {folder.resolve()}, or "
            "remove the link."
        )
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"Cannot use {folder} as {setting}: it is not a folder.")
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            f"The run folder {folder} belongs to another user ({_user_name(facts.st_uid)}): set "
            f"{setting} to a folder of the user who runs Lockstep."
        )
    if facts.st_mode & 0o077:
        raise ConfigError(
            f"Other users can access the run folder {folder} (mode "
            f"{stat.S_IMODE(facts.st_mode):04o}): run `chmod 700 {folder}`, or set {setting}."
        )


def _check_parent(parent: Path, folder: Path, setting: str) -> None:
    """Check that only this user and root can replace the entries of `parent`."""
    facts = parent.lstat()
    if facts.st_uid not in (_ROOT, os.geteuid()):
        raise ConfigError(
            f"The run folder {folder} is below {parent}, which belongs to another user "
            f"({_user_name(facts.st_uid)}) who could replace it: set {setting}."
        )
    mode = facts.st_mode
    # In a sticky folder such as /tmp only the owner of an entry can rename it.
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_trusted_group(facts.st_gid)):
        raise ConfigError(
            f"The run folder {folder} is below {parent}, to which other users can write (mode "
            f"{stat.S_IMODE(mode):04o}), so that they could replace it: run `chmod go-w {parent}`, "
            f"or set {setting}."
        )


def _is_trusted_group(group_id: int) -> bool:
    """Tell whether only this user, root and administrators are in a group.

    Many systems give each user a group of the same name and make new folders writable for it.
    """
    try:
        group = grp.getgrgid(group_id)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return group_id == _ROOT
    # Administrators of macOS can become root anyway.
    is_administrators = group_id == _ROOT or group.gr_name == "admin"
    return is_administrators or (group.gr_name == user and set(group.gr_mem) <= {user})


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)
