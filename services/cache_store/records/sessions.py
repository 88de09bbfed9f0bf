"""Sessions of peers. Owns which folder each peer writes to, and when leftovers are deleted."""

from collections.abc import Iterator

from services.cache_store.events import Action, DeletePartials, MakeFolder
from services.cache_store.file_names import FolderKey
from shared.identifiers import PeerId

PARTIAL_AGE_S = 60.0
"""A partial file that was not written to for this long is abandoned: a write takes seconds."""


class Sessions:
    """The connected peers and the folder that each opened last."""

    def __init__(self, actions: list[Action]) -> None:
        """Start without peers; `actions` are the core's, to which file operations are appended."""
        self._actions = actions
        self._folders: dict[PeerId, FolderKey | None] = {}
        self._sweeps: dict[FolderKey, float] = {}
        """When to delete a lost session's partial files in a folder that another session uses."""

    def __iter__(self) -> Iterator[PeerId]:
        """Iterate over the connected peers."""
        return iter(self._folders)

    def begin(self, peer: PeerId) -> None:
        """Add a connected peer, which has not opened a folder yet."""
        self._folders[peer] = None

    def end(self, peer: PeerId) -> None:
        """Forget a disconnected peer. Call `leave` before, which closes its folder."""
        self._folders.pop(peer, None)

    def folder_of(self, peer: PeerId) -> FolderKey | None:
        """Return the folder that a peer has opened; None when it has opened none."""
        return self._folders.get(peer)

    def with_folders(self) -> list[tuple[PeerId, FolderKey]]:
        """Return (peer, folder) for each peer that has opened a folder."""
        return [(peer, folder) for peer, folder in self._folders.items() if folder is not None]

    def is_open(self, folder: FolderKey) -> bool:
        """Return True when a peer has this folder open."""
        return folder in self._folders.values()

    def open(self, peer: PeerId, folder: FolderKey, *, is_on: bool) -> None:
        """Record that a peer writes to a folder, and have the folder created.

        Its partial files, which an earlier session has not finished, are deleted unless another
        peer has the folder open.

        Args:
            peer: the peer.
            folder: its folder.
            is_on: the store is on, so the directory can be changed.
        """
        if is_on:
            if not self.is_open(folder):
                self._actions.append(DeletePartials(folder, 0.0))
            self._actions.append(MakeFolder(folder))
        self._folders[peer] = folder

    def leave(self, peer: PeerId, now_s: float, *, is_on: bool) -> None:
        """Close a peer's folder, and have the partial files in it deleted.

        While another peer has the folder open, its partial files cannot be told from those of this
        peer, so `sweep` deletes the old ones PARTIAL_AGE_S later.

        Args:
            peer: the peer.
            now_s: the time in monotonic seconds.
            is_on: the store is on, so the directory can be changed. If it is off, the files are
                deleted when it opens the directory.
        """
        folder = self._folders.get(peer)
        self._folders[peer] = None
        if folder is None or not is_on:
            return
        if self.is_open(folder):
            # A successor may be writing, and the files do not tell whose they are.
            self._sweeps[folder] = now_s + PARTIAL_AGE_S
        else:
            self._actions.append(DeletePartials(folder, 0.0))

    def sweep(self, now_s: float, *, is_on: bool) -> None:
        """Delete old partial files in folders that a peer left PARTIAL_AGE_S ago and another uses.

        Args:
            now_s: the time in monotonic seconds.
            is_on: the store is on. If it is off, the files are deleted when it opens the directory.
        """
        for folder in [one for one, at_s in self._sweeps.items() if now_s >= at_s]:
            del self._sweeps[folder]
            if is_on:
                self._actions.append(DeletePartials(folder, PARTIAL_AGE_S))
