"""The KV rows of all ranks: who holds which slot, and how large the arrays are. Pure accounting.

Every rank keeps one array of `row_count` rows of `row_tokens` tokens each per layer. The shape is
decided here and travels in every plan, so no rank can differ. Rows are left-aligned; slots may have
holes.
"""

import dataclasses

from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot
from shared.messages import SlotMove


@dataclasses.dataclass(frozen=True, slots=True)
class RowBudget:
    """What the poorest rank can hold."""

    bytes_max: int
    bytes_per_token: int
    bytes_per_row: int

    def fits(self, row_count: int, row_tokens: int) -> bool:
        """Tell whether arrays of this shape stay within the budget."""
        row_bytes = row_tokens * self.bytes_per_token + self.bytes_per_row
        return row_count * row_bytes <= self.bytes_max

    def longest_row(self) -> int:
        """Return how many tokens a single row may have."""
        if self.bytes_per_token == 0:
            return 2**31 - 1
        return max(0, (self.bytes_max - self.bytes_per_row) // self.bytes_per_token)


class Rows:
    """Slots and the shape of the arrays.

    Growing is geometric, so that joining and growing copy each row a bounded number of times on
    average; shrinking happens only when something else would not fit.
    """

    def __init__(self, slots_max: int, tokens_step: int) -> None:
        self.row_count = 0
        self.row_tokens = 0
        self._slots_max = slots_max
        self._tokens_step = tokens_step
        self._budget = RowBudget(0, 1, 0)
        self._holders: dict[Slot, SequenceId] = {}

    @property
    def budget(self) -> RowBudget:
        """The budget of the present epoch."""
        return self._budget

    @property
    def tokens_max(self) -> int:
        """Tokens that fit in all rows together, for reports."""
        if self._budget.bytes_per_token == 0:
            return 0
        return self._budget.bytes_max // self._budget.bytes_per_token

    @property
    def used(self) -> int:
        """Slots that are held."""
        return len(self._holders)

    @property
    def has_free_slot(self) -> bool:
        """Tell whether one more sequence may run."""
        return len(self._holders) < self._slots_max

    def start(self, budget: RowBudget) -> None:
        """Begin an epoch: no rows, nobody holds a slot."""
        self._budget = budget
        self._holders.clear()
        self.row_count = 0
        self.row_tokens = 0

    def longest(self) -> int:
        """Return the longest sequence that fits alone, rounded down to whole growth steps."""
        longest = self._budget.longest_row()
        return longest - longest % self._tokens_step if longest > self._tokens_step else longest

    def resize(self, *, slots: int, tokens: int) -> bool:
        """Make room for `slots` rows (0 .. slots - 1) of `tokens` tokens; False when it cannot be.

        Tries, in this order: as it is; grown generously; grown as little as needed, giving up room
        that nobody needs.
        """
        if slots <= self.row_count and tokens <= self.row_tokens:
            return True
        wide = max(self.row_count, self._generous_slots(slots))
        long = max(self.row_tokens, self._generous_tokens(tokens))
        exact = self._round(tokens)
        for row_count, row_tokens in (
            (wide, long),
            (max(slots, self.row_count), long),
            (wide, max(exact, self.row_tokens)),
            (slots, max(exact, self.row_tokens)),
            (wide, exact),
            (slots, exact),
            (slots, tokens),
        ):
            if row_count >= slots and self._budget.fits(row_count, row_tokens):
                self.row_count, self.row_tokens = row_count, row_tokens
                return True
        return False

    def take(self, sequence_id: SequenceId) -> Slot:
        """Give the lowest free slot to a sequence. The caller has called `resize` for it."""
        slot = self.lowest_free()
        if slot >= self.row_count:
            raise InvariantBroken(f"slot {slot} lies beyond {self.row_count} rows")
        self._holders[slot] = sequence_id
        return slot

    def lowest_free(self) -> Slot:
        """Return the lowest slot that nobody holds."""
        slot = 0
        while slot in self._holders:
            slot += 1
        return Slot(slot)

    def give_back(self, slot: Slot, sequence_id: SequenceId) -> None:
        """Free a slot."""
        if self._holders.pop(slot, None) != sequence_id:
            raise InvariantBroken(f"slot {slot} is not held by sequence {sequence_id}")

    def rows_needed(self) -> int:
        """Return the highest held slot plus one."""
        return max(self._holders, default=-1) + 1

    def compact(self) -> list[SlotMove]:
        """Move the highest rows into the lowest holes until none is left; return the moves."""
        moves = []
        while self._holders:
            highest = max(self._holders)
            hole = self.lowest_free()
            if hole > highest:
                break
            sequence_id = self._holders.pop(highest)
            self._holders[hole] = sequence_id
            moves.append(SlotMove(sequence_id=sequence_id, slot=hole))
        return moves

    def check_invariants(self, held: dict[Slot, SequenceId]) -> None:
        """Raise InvariantBroken unless exactly `held` is held, within arrays and budget (I9)."""
        if held != self._holders:
            raise InvariantBroken(f"slots held {self._holders}, sequences say {held}")
        if self.rows_needed() > self.row_count:
            raise InvariantBroken(f"slot beyond {self.row_count} rows: {self._holders}")
        if self.row_count and not self._budget.fits(self.row_count, self.row_tokens):
            raise InvariantBroken(f"{self.row_count} x {self.row_tokens} exceeds {self._budget}")

    def _round(self, tokens: int) -> int:
        return -(-tokens // self._tokens_step) * self._tokens_step

    def _generous_tokens(self, tokens: int) -> int:
        # An eighth more: long rows are copied a bounded number of times while they grow.
        return self._round(tokens + tokens // 8)

    def _generous_slots(self, slots: int) -> int:
        return min(self._slots_max, max(4, 1 << (slots - 1).bit_length()))
