"""Who holds references to blocks and checkpoints, so that they are not evicted.

A reference to the last block of a path holds the whole path: a block is never evicted before those
that follow it.
"""

from typing import Literal

from services.scheduler.cache.index.block_index import Entry
from shared.errors import InvariantBroken

Holder = tuple[Literal["restore", "waiting", "plan"], int]
"""A restore until it is adopted, a sequence that waits, or the plan in the making for a sequence.

Rows that must grow take blocks from the first two; what a plan relies on nobody takes."""


class BlockPins:
    """References by holder; each holder has some entries at most once."""

    def __init__(self) -> None:
        self._held: dict[Holder, tuple[Entry, ...]] = {}

    def __len__(self) -> int:
        """Return how many holders there are."""
        return len(self._held)

    def hold(self, holder: Holder, *entries: Entry) -> None:
        """Hold these entries, and no longer what this holder held before."""
        self.release(holder)
        if not entries:
            return
        self._held[holder] = entries
        for entry in entries:
            entry.references += 1
            entry.firm_references += holder[0] == "plan"

    def release(self, holder: Holder) -> None:
        """Hold nothing any more."""
        for entry in self._held.pop(holder, ()):
            entry.references -= 1
            entry.firm_references -= holder[0] == "plan"

    def release_plan(self) -> None:
        """The plan in the making has left."""
        for holder in [one for one in self._held if one[0] == "plan"]:
            self.release(holder)

    def give_up(self, entry: Entry) -> None:
        """Release whoever holds an entry that is evicted in spite of it."""
        if not entry.references:
            return
        for holder in [one for one, entries in self._held.items() if entry in entries]:
            self.release(holder)

    def clear(self) -> None:
        """Forget all holders; their entries are of an epoch that has ended."""
        self._held.clear()

    def check_invariants(self, entries: list[Entry]) -> None:
        """Raise InvariantBroken unless every reference has a holder, and only residents have any.

        Args:
            entries: all that are known.
        """
        held: dict[Entry, int] = {}
        for holder, mine in self._held.items():
            if holder[0] == "plan":
                raise InvariantBroken(f"{holder} outlives its plan")
            for entry in mine:
                held[entry] = held.get(entry, 0) + 1
        for entry in [one for one in entries if one.references or one.firm_references]:
            if entry.references != held.pop(entry, 0) or entry.firm_references:
                raise InvariantBroken(f"{entry.hash.hex()} has references that nobody holds")
            if not entry.is_resident:
                raise InvariantBroken(f"{entry.hash.hex()} is referenced and not resident")
        if held:
            raise InvariantBroken(f"{next(iter(held)).hash.hex()} is held and has no references")
