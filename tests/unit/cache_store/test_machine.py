"""Any order of everything: the limit holds, pinned files stay, and the index equals the files."""

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
from tests.effort import cases
from tests.unit.cache_store.harness import NAMESPACE, Rank, Store, block_hash

_NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
_WHO = st.integers(0, 2)
_LIMIT = 6 * (HEADER_BYTES + 100)


class StoreMachine(RuleBasedStateMachine):
    """Three ranks in two folders on one real directory."""

    @initialize()
    def begin(self) -> None:
        """Start with an empty directory."""
        self.path = Path(tempfile.mkdtemp(prefix="ls-"))
        self.started = 0
        self.start()

    def start(self) -> None:
        """Start a store, its predecessor gone without a word."""
        self.store = Store(self.path / "blocks", _LIMIT)
        self.started += 1
        self.ranks = [
            Rank(self.store, f"{name}-{self.started}", namespace=namespace)
            for name, namespace in (("a", NAMESPACE), ("b", NAMESPACE), ("c", "cd" * 32))
        ]
        self.pinned: dict[tuple[int, int], list[tuple[Path, bytes]]] = {}

    @rule(who=_WHO, numbers=_NUMBERS, first=_NUMBERS, size=st.sampled_from([0, 100, 900]))
    def commit(self, who: int, numbers: list[int], first: list[int], size: int) -> None:
        """Commit a file; refusals are for lack of room or because the store is off."""
        rank = self.ranks[who]
        if not self.store.core.is_on:
            return
        answer = rank.commit(*numbers, evict_first=tuple(first), size_bytes=size)
        assert answer.accepted or "no room" in answer.detail

    @rule(who=_WHO, numbers=_NUMBERS)
    def locate(self, who: int, numbers: list[int]) -> None:
        """Locate blocks and keep them pinned; whatever is located reads as it should."""
        rank = self.ranks[who]
        query_id, places = rank.locate(*numbers)
        found = [
            (Path(rank.folder) / place.name, block_hash(number))
            for number, place in zip(numbers, places, strict=True)
            if place is not None
        ]
        if found:
            self.pinned[who, query_id] = found

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        """Release one question."""
        if self.pinned:
            who, query_id = sorted(self.pinned)[pick % len(self.pinned)]
            del self.pinned[who, query_id]
            self.ranks[who].release(query_id)

    @rule(who=_WHO, numbers=_NUMBERS)
    def quarantine(self, who: int, numbers: list[int]) -> None:
        """Name records as bad: no more is located in their files, though these may be pinned."""
        rank = self.ranks[who]
        hashes = [block_hash(number) for number in numbers]
        query_id, places = rank.locate(*numbers)
        rank.release(query_id)
        bad = {place.name for place in places if place is not None}
        rank.say(QuarantineBlocks(hashes=hashes, cause="damaged"))
        query_id, places = rank.locate(*range(10))
        rank.release(query_id)
        assert not bad & {place.name for place in places if place is not None}

    @rule(all_of_them=st.booleans())
    def clear(self, all_of_them: bool) -> None:
        """Clear one namespace or all."""
        namespace = "" if all_of_them else NAMESPACE
        self.ranks[0].tell(ClearBlocks(namespace=namespace), BlocksCleared)
        query_id, places = self.ranks[0].locate(*range(10))
        self.ranks[0].release(query_id)
        assert places == [None] * 10

    @rule(who=_WHO)
    def reconnect(self, who: int) -> None:
        """End one session, which ends its pins, and begin another."""
        old = self.ranks[who]
        old.leave()
        self.pinned = {key: files for key, files in self.pinned.items() if key[0] != who}
        self.started += 1
        name = f"{'abc'[who]}-{self.started}"
        self.ranks[who] = Rank(self.store, name, namespace=old.namespace)

    @rule()
    def switch_off(self) -> None:
        """Let a rank report that its disk failed."""
        self.ranks[0].say(SpillFailed(detail="Input/output error"))

    @rule(seconds=st.sampled_from([0.5, 2.0, 25.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass; a store that is off comes back."""
        self.store.pass_time(seconds)
        for rank in self.ranks:
            rank.open()

    @rule()
    def restart(self) -> None:
        """Kill the store and start another one: what could be located still can, no more."""
        was_on = self.store.core.is_on
        before = [rank.has(*range(10)) for rank in self.ranks]
        doomed = {path for files in self.pinned.values() for path, _ in files}
        self.store.close()
        self.start()
        after = [rank.has(*range(10)) for rank in self.ranks]
        if was_on and not doomed:
            assert after == before

    @invariant()
    def limit_holds(self) -> None:
        """Bytes on the disk are what the store says, and within the limit."""
        if not hasattr(self, "store") or not self.store.core.is_on:
            return
        files = [*self.store.files(), *(self.path / "blocks" / "quarantine").glob("*")]
        total = sum(path.stat().st_size for path in files)
        assert total == self.store.report().bytes_used
        assert total <= _LIMIT

    @invariant()
    def pinned_files_stay(self) -> None:
        """Every located and unreleased file is there, and its bytes are right."""
        for who, query_id in getattr(self, "pinned", {}):
            for path, _ in self.pinned[who, query_id]:
                assert path.exists()

    @invariant()
    def index_equals_files(self) -> None:
        """A fresh look at the files finds what the index has, doomed ones aside."""
        if not hasattr(self, "store") or not self.store.core.is_on:
            return
        indexed = {
            self.path / "blocks" / file.key.folder.path / file.key.name
            for file in self.store.core._files.index
        }
        doomed = {
            self.path / "blocks" / key.folder.path / key.name
            for key in self.store.core._files._pending_removal
        }
        assert indexed | doomed == set(self.store.files())

    def teardown(self) -> None:
        """Leave nothing behind."""
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


StoreMachine.TestCase.settings = settings(max_examples=cases(12, 60), stateful_step_count=40)
TestStoreMachine = StoreMachine.TestCase
