"""References that keep blocks and checkpoints resident. Owns the holders; evicts nothing.

A reference to the last block of a path protects the whole path, because a block is evicted only
after all blocks that follow it.
"""

from typing import Literal

from services.scheduler.cache.index.block_index import Entry
from shared.errors import InvariantBroken

Holder = tuple[Literal["restore", "waiting", "plan"], int]
"""A kind of holder and its id.

"restore": a restore until it is adopted, by restore id. "waiting": a waiting sequence, by sequence
id. "plan": the plan being built, by the sequence that needs the entry. Rows that grow may evict
entries held by the first two kinds, never those of a plan.
"""


class BlockPins:
    """Protects blocks and checkpoints from eviction while a holder references them.

    A holder, such as a waiting sequence, references an entry at most once.
    """

    def __init__(self) -> None:
        self._held: dict[Holder, tuple[Entry, ...]] = {}

    def __len__(self) -> int:
        """Return the number of holders."""
        return len(self._held)

    def hold(self, holder: Holder, *entries: Entry) -> None:
        """Replace all references of a holder by references to `entries`.

        Args:
            holder: kind and id of the holder.
            entries: the resident blocks and checkpoints that it needs.
        """
        self.release(holder)
        if not entries:
            return
        self._held[holder] = entries
        for entry in entries:
            entry.references += 1
            entry.firm_references += holder[0] == "plan"

    def release(self, holder: Holder) -> None:
        """Remove all references of a holder."""
        for entry in self._held.pop(holder, ()):
            entry.references -= 1
            entry.firm_references -= holder[0] == "plan"

    def release_plan(self) -> None:
        """Remove all references that belong to the plan being built, which is complete."""
        for holder in [one for one in self._held if one[0] == "plan"]:
            self.release(holder)

    def release_entry(self, entry: Entry) -> None:
        """Remove every holder's reference to an entry, because it is evicted."""
        if not entry.references:
            return
        for holder in [one for one, entries in self._held.items() if entry in entries]:
            self.release(holder)

    def clear(self) -> None:
        """Forget all holders after an epoch; `BlockIndex.end_epoch` resets the entries' counts."""
        self._held.clear()

    def check_invariants(self, entries: list[Entry]) -> None:
        """Check that references and holders agree and that only resident entries have any.

        Args:
            entries: all known entries.

        Raises:
            InvariantBroken: they disagree, or a plan's references were not released.
        """
        held: dict[Entry, int] = {}
        for holder, mine in self._held.items():
            if holder[0] == "plan":
                raise InvariantBroken(f"{holder} outlives its plan")
            for entry in mine:
                held[entry] = held.get(entry, 0) + 1
        for entry in [one for one in entries if one.references or one.firm_references]:
            if entry.references != held.pop(entry, 0) or entry.firm_references:
                raise InvariantBroken(f"{entry.hash.hex()} has references without a holder")
            if not entry.is_resident:
                raise InvariantBroken(f"{entry.hash.hex()} is referenced and not resident")
        if held:
            raise InvariantBroken(f"{next(iter(held)).hash.hex()} is held and has no references")
