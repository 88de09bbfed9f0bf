"""The file of a listener's ipc socket. Owns binding the address again when the file was deleted.

Cleaners of temporary folders delete such files. Connections stay open without the file, but new
peers find no listener.
"""

import os
from collections.abc import Callable
from pathlib import Path

from shared.log import Log
from shared.os import run_folder

CHECK_INTERVAL_S = 0.5
"""Seconds between two checks whether the file exists."""

_LOG = Log("link")


class SocketFile:
    """The file of one bound address; without effect for an address over tcp."""

    def __init__(self, address: str, bind: Callable[[str], None]) -> None:
        """Record who owns the file's folder, after the address was bound.

        Args:
            address: the bound address.
            bind: binds an address once more.
        """
        scheme, _, path = address.partition("://")
        self._address = address
        self._bind = bind
        is_file = scheme == "ipc" and not path.startswith("@")  # Linux has names without a file
        self._path = Path(path) if is_file else None
        self._folder_owner = self._path.parent.stat().st_uid if self._path else -1
        self._check_at_s = 0.0
        self._cause = ""

    def restore(self, now_s: float) -> None:
        """Bind the address again if its file was deleted, and log that. Call it regularly.

        Args:
            now_s: the current monotonic time, in seconds.
        """
        if self._path is None or now_s < self._check_at_s:
            return
        self._check_at_s = now_s + CHECK_INTERVAL_S
        if os.path.lexists(self._path):
            return
        try:
            self._restore_folder(self._path.parent)
            # The old socket stays bound as well: closing it would end its connections. So each
            # deletion costs a descriptor until the process ends.
            self._bind(self._address)
        except Exception as error:  # noqa: BLE001 - only sockets.py knows ZeroMQ's errors
            if str(error) != self._cause:
                self._cause = str(error)
                _LOG.error("socket_deleted", link=self._address, cause=self._cause)
        else:
            self._cause = ""
            _LOG.warning("socket_bound_again", link=self._address, cause="its file was deleted")

    def _restore_folder(self, folder: Path) -> None:
        """Create a deleted folder; refuse one that another user has created in its place."""
        if not folder.is_dir():
            run_folder.prepare(folder)
        owner = folder.lstat().st_uid
        if owner not in (self._folder_owner, os.geteuid()):
            raise PermissionError(f"the folder {folder} belongs to another user now")
