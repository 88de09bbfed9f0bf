"""Files that somebody may be reading: located, and not released yet. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator

from services.cache_store.file_names import FileKey
from shared.identifiers import PeerId


class FilePins:
    """For each peer and question, the files that were named in the answer."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, dict[int, frozenset[FileKey]]] = {}
        self._counts: Counter[FileKey] = Counter()

    def __contains__(self, key: FileKey) -> bool:
        return key in self._counts

    def __iter__(self) -> Iterator[FileKey]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def pin(self, peer: PeerId, query_id: int, keys: Iterable[FileKey]) -> list[FileKey]:
        """Pin files for a question; return what the same number's earlier pins leave free."""
        files = frozenset(keys)
        self._counts.update(files)
        freed = self.release(peer, query_id)
        if files:
            self._by_peer.setdefault(peer, {})[query_id] = files
        return freed

    def release(self, peer: PeerId, query_id: int) -> list[FileKey]:
        """Unpin a question's files; return those that nobody has pinned any more."""
        queries = self._by_peer.get(peer, {})
        files = queries.pop(query_id, frozenset())
        if not queries:
            self._by_peer.pop(peer, None)
        return self._unpin(files)

    def release_all(self, peer: PeerId) -> list[FileKey]:
        """Unpin everything of a peer; return what nobody has pinned any more."""
        queries = self._by_peer.pop(peer, {})
        return [key for files in queries.values() for key in self._unpin(files)]

    def _unpin(self, files: Iterable[FileKey]) -> list[FileKey]:
        freed = []
        for key in files:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                freed.append(key)
        return sorted(freed)
