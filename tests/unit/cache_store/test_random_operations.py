"""Random operations: the limit holds, pinned files stay, the index equals the files."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.block_record import HEADER_BYTES
from shared.messages import (
    BlocksCleared,
    ClearBlocks,
    QuarantineBlocks,
    SpillFailed,
)
from tests.support.effort import cases
from tests.unit.cache_store.harness import NAMESPACE, Rank, Store, block_hash

_NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
_RANKS = st.integers(0, 2)
_LIMIT = 6 * (HEADER_BYTES + 100)


class StoreOperations(RuleBasedStateMachine):
    """Three ranks in two folders on one real directory."""

    @initialize()
    def begin(self) -> None:
        """Start with an empty directory."""
        self.path = Path(tempfile.mkdtemp(prefix="ls-"))
        self.started = 0
        self.start()

    def start(self) -> None:
        """Start a store, as after the previous one was killed."""
        self.store = Store(self.path / "blocks", _LIMIT)
        self.started += 1
        self.ranks = [
            Rank(self.store, f"{name}-{self.started}", namespace=namespace)
            for name, namespace in (("a", NAMESPACE), ("b", NAMESPACE), ("c", "cd" * 32))
        ]
        self.pinned: dict[tuple[int, int], list[tuple[Path, bytes]]] = {}

    @rule(rank_number=_RANKS, numbers=_NUMBERS, first=_NUMBERS, size=st.sampled_from([0, 100, 900]))
    def commit(self, rank_number: int, numbers: list[int], first: list[int], size: int) -> None:
        """Commit a file; it may be refused only for lack of room."""
        rank = self.ranks[rank_number]
        if not self.store.core.is_on:
            return
        answer = rank.commit(*numbers, evict_first=tuple(first), size_bytes=size)
        assert answer.accepted or "no room" in answer.detail

    @rule(rank_number=_RANKS, numbers=_NUMBERS)
    def locate(self, rank_number: int, numbers: list[int]) -> None:
        """Locate blocks and keep them pinned."""
        rank = self.ranks[rank_number]
        query_id, places = rank.locate(*numbers)
        found = [
            (Path(rank.folder) / place.name, block_hash(number))
            for number, place in zip(numbers, places, strict=True)
            if place is not None
        ]
        if found:
            self.pinned[rank_number, query_id] = found

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        """Release the pins of one query."""
        if self.pinned:
            rank_number, query_id = sorted(self.pinned)[pick % len(self.pinned)]
            del self.pinned[rank_number, query_id]
            self.ranks[rank_number].release(query_id)

    @rule(rank_number=_RANKS, numbers=_NUMBERS)
    def quarantine(self, rank_number: int, numbers: list[int]) -> None:
        """Report records as bad; their files are no longer located, even while pinned."""
        rank = self.ranks[rank_number]
        hashes = [block_hash(number) for number in numbers]
        query_id, places = rank.locate(*numbers)
        rank.release(query_id)
        bad = {place.name for place in places if place is not None}
        rank.send(QuarantineBlocks(hashes=hashes, cause="damaged"))
        query_id, places = rank.locate(*range(10))
        rank.release(query_id)
        assert not bad & {place.name for place in places if place is not None}

    @rule(all_namespaces=st.booleans())
    def clear(self, all_namespaces: bool) -> None:
        """Clear one namespace or all."""
        namespace = "" if all_namespaces else NAMESPACE
        self.ranks[0].ask(ClearBlocks(namespace=namespace), BlocksCleared)
        query_id, places = self.ranks[0].locate(*range(10))
        self.ranks[0].release(query_id)
        assert places == [None] * 10

    @rule(rank_number=_RANKS)
    def reconnect(self, rank_number: int) -> None:
        """End one session, which releases its pins, and begin another."""
        old = self.ranks[rank_number]
        old.leave()
        self.pinned = {key: files for key, files in self.pinned.items() if key[0] != rank_number}
        self.started += 1
        name = f"{'abc'[rank_number]}-{self.started}"
        self.ranks[rank_number] = Rank(self.store, name, namespace=old.namespace)

    @rule()
    def switch_off(self) -> None:
        """Report a disk error of a rank, which switches the store off."""
        self.ranks[0].send(SpillFailed(detail="Input/output error"))

    @rule(seconds=st.sampled_from([0.5, 2.0, 25.0]))
    def wait(self, seconds: float) -> None:
        """Advance time until a store that is off may come back."""
        self.store.advance_time(seconds)
        for rank in self.ranks:
            rank.open()

    @rule()
    def restart(self) -> None:
        """Restart the store as after a kill; it locates the same blocks as before."""
        was_on = self.store.core.is_on
        before = [rank.has(*range(10)) for rank in self.ranks]
        pinned = {path for files in self.pinned.values() for path, _ in files}
        self.store.close()
        self.start()
        after = [rank.has(*range(10)) for rank in self.ranks]
        if was_on and not pinned:
            assert after == before

    @invariant()
    def limit_holds(self) -> None:
        """The bytes on the disk equal the store's figure and are within the limit."""
        if not hasattr(self, "store") or not self.store.core.is_on:
            return
        files = [*self.store.files(), *(self.path / "blocks" / "quarantine").glob("*")]
        total = sum(path.stat().st_size for path in files)
        assert total == self.store.report().bytes_used
        assert total <= _LIMIT

    @invariant()
    def pinned_files_stay(self) -> None:
        """Every located and unreleased file exists."""
        for rank_number, query_id in getattr(self, "pinned", {}):
            for path, _ in self.pinned[rank_number, query_id]:
                assert path.exists()

    @invariant()
    def index_equals_files(self) -> None:
        """The index and the files pending removal are the files on the disk."""
        if not hasattr(self, "store") or not self.store.core.is_on:
            return
        indexed = {
            self.path / "blocks" / file.key.folder.path / file.key.name
            for file in self.store.core._files.index
        }
        pending_removal = {
            self.path / "blocks" / key.folder.path / key.name
            for key in self.store.core._files._pending_removal
        }
        assert indexed | pending_removal == set(self.store.files())

    def teardown(self) -> None:
        """Delete the temporary directory."""
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


StoreOperations.TestCase.settings = settings(max_examples=cases(12, 60), stateful_step_count=40)
TestStoreOperations = StoreOperations.TestCase
