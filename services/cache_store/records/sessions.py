"""Which peer writes into which folder, and what becomes of what it leaves half-written. Pure."""

from collections.abc import Iterator

from services.cache_store.events import Action, DeletePartials, MakeFolder
from services.cache_store.file_names import FolderKey
from shared.identifiers import PeerId

PARTIAL_AGE_S = 60.0
"""A file that nobody has written to for so long is nobody's: it takes seconds to write one."""


class Sessions:
    """The peers, and the folder that each has opened last."""

    def __init__(self, out: list[Action]) -> None:
        self._out = out
        self._folders: dict[PeerId, FolderKey | None] = {}
        self._sweeps: dict[FolderKey, float] = {}
        """When to look for what a lost session has left in a folder that another uses."""

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._folders)

    def begin(self, peer: PeerId) -> None:
        """Take up a peer."""
        self._folders[peer] = None

    def end(self, peer: PeerId) -> None:
        """Forget a peer; `leave` first."""
        self._folders.pop(peer, None)

    def folder_of(self, peer: PeerId) -> FolderKey | None:
        """Return what a peer has opened."""
        return self._folders.get(peer)

    def with_folders(self) -> list[tuple[PeerId, FolderKey]]:
        """Return the peers that have opened a folder, with it."""
        return [(peer, folder) for peer, folder in self._folders.items() if folder is not None]

    def is_open(self, folder: FolderKey) -> bool:
        """Tell whether any peer has this folder open."""
        return folder in self._folders.values()

    def open(self, peer: PeerId, folder: FolderKey, *, is_on: bool) -> None:
        """Give a peer a folder, empty of what earlier sessions have left half-written."""
        if is_on:
            if not self.is_open(folder):
                self._out.append(DeletePartials(folder, 0.0))
            self._out.append(MakeFolder(folder))
        self._folders[peer] = folder

    def leave(self, peer: PeerId, now_s: float, *, is_on: bool) -> FolderKey | None:
        """Take a peer's folder from it; return the folder when nobody else has it open."""
        folder = self._folders.get(peer)
        self._folders[peer] = None
        if folder is None or not is_on:
            # A directory that is off is swept when it is opened again.
            return None
        if self.is_open(folder):
            # Its successor writes already, and nobody knows which of the files are whose.
            self._sweeps[folder] = now_s + PARTIAL_AGE_S
            return None
        self._out.append(DeletePartials(folder, 0.0))
        return folder

    def sweep(self, now_s: float, *, is_on: bool) -> None:
        """Order what is due to be looked through for what lost sessions have left."""
        for folder in [one for one, at_s in self._sweeps.items() if now_s >= at_s]:
            del self._sweeps[folder]
            if is_on:
                self._out.append(DeletePartials(folder, PARTIAL_AGE_S))
