"""The KV rows of all ranks: who holds which slot, and how large the arrays are. Pure accounting.

Every rank keeps one array of `row_count` rows of `row_tokens` tokens each per layer. The shape is
decided here and travels in every plan, so no rank can differ. Rows are left-aligned; slots may have
holes. Resident blocks live in the same budget; rows that need their memory take it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot
from shared.messages import RankReady, SlotMove

_SPARE_SLOTS = 4
"""Short rows are made so many at once ..."""
_LONG_ROW_TOKENS = 2_048
"""... and longer ones as they are needed, doubling."""

_NOTHING_TAKEN = 2**62
"""Memory is no bound for a rank that keeps nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowBudget:
    """What the poorest rank can hold."""

    bytes_max: int
    bytes_per_token: int
    bytes_per_row: int
    draft_bytes_per_token: int = 0
    """What a token of a row takes more, for a draft model or head; blocks do not hold it."""

    @property
    def row_bytes_per_token(self) -> int:
        """What a token of a row takes in all."""
        return self.bytes_per_token + self.draft_bytes_per_token

    def row_bytes(self, row_count: int, row_tokens: int) -> int:
        """Return what arrays of this shape take."""
        return row_count * (row_tokens * self.row_bytes_per_token + self.bytes_per_row)

    def longest_row(self) -> int:
        """Return how many tokens a single row may have."""
        if self.row_bytes_per_token == 0:
            return 2**31 - 1
        return max(0, (self.bytes_max - self.bytes_per_row) // self.row_bytes_per_token)


def poorest(reports: Sequence[RankReady]) -> RowBudget:
    """Return a budget such that rows and blocks that keep to it fit on every rank.

    What a token and a row take are those of the rank where they are most. Ranks may hold unequal
    parts of the model, so the budget is what the poorest has, as others would count it.

    Args:
        reports: of all ranks.
    """
    per_token = max(report.kv_bytes_per_token for report in reports)
    per_row = max(report.kv_bytes_per_row for report in reports)
    drafts = max(report.draft_bytes_per_token for report in reports)

    def bytes_max(report: RankReady) -> int:
        # Of what is counted this rank takes no larger part than this, whatever it is made of.
        tokens = report.kv_bytes_per_token
        parts = (
            (tokens, per_token),
            (tokens + report.draft_bytes_per_token, per_token + drafts),
            (report.kv_bytes_per_row, per_row),
        )
        taken, counted = max(
            (part for part in parts if part[1]), key=lambda part: part[0] / part[1], default=(0, 0)
        )
        return report.kv_budget_bytes * counted // taken if taken else _NOTHING_TAKEN

    least = min(bytes_max(report) for report in reports)
    if least == _NOTHING_TAKEN:
        least = min(report.kv_budget_bytes for report in reports)
    return RowBudget(least, per_token, per_row, drafts)


class SharedMemory(Protocol):
    """What else lives in the rows' budget, and gives way to them."""

    @property
    def held_bytes(self) -> int:
        """What it takes now."""

    def shrink_to(self, bytes_max: int) -> bool:
        """Give back until at most this is taken; False, and nothing changed, when it cannot."""


class Rows:
    """Slots and the shape of the arrays.

    Growing is geometric, so that joining and growing copy each row a bounded number of times on
    average; shrinking happens only when something else would not fit, and to rows that nobody holds
    when the others become much longer.
    """

    def __init__(self, slots_max: int, tokens_step: int) -> None:
        self.row_count = 0
        self.row_tokens = 0
        self._slots_max = slots_max
        self._tokens_step = tokens_step
        self._budget = RowBudget(0, 1, 0)
        self._holders: dict[Slot, SequenceId] = {}
        self._others: SharedMemory | None = None

    @property
    def budget(self) -> RowBudget:
        """The budget of the present epoch."""
        return self._budget

    @property
    def tokens_max(self) -> int:
        """Tokens that fit in all rows together, for reports."""
        if self._budget.row_bytes_per_token == 0:
            return 0
        return self._budget.bytes_max // self._budget.row_bytes_per_token

    @property
    def bytes_left(self) -> int:
        """What the arrays leave of the budget."""
        return self._left(self.row_count, self.row_tokens)

    @property
    def used(self) -> int:
        """Slots that are held."""
        return len(self._holders)

    @property
    def has_free_slot(self) -> bool:
        """Tell whether one more sequence may run."""
        return len(self._holders) < self._slots_max

    @property
    def has_holes(self) -> bool:
        """Tell whether a slot below a held one is free."""
        return self.rows_needed() > self.used

    def share_with(self, others: SharedMemory) -> None:
        """Let something else live in what rows leave."""
        self._others = others

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
        that nobody needs. What else lives in the budget gives way only when none of these fits
        beside it.
        """
        if slots <= self.row_count and tokens <= self.row_tokens:
            return True
        beside, instead = self._shapes(slots, tokens)
        for shapes, may_take in ((beside, False), (instead, True)):
            for row_count, row_tokens in shapes:
                if row_count >= slots and self._fits(row_count, row_tokens, may_take=may_take):
                    self.row_count, self.row_tokens = row_count, row_tokens
                    return True
        return False

    def makes_long(self, tokens: int) -> bool:
        """Tell whether rows of so many tokens are another matter than the present ones.

        They are made anew then, and rows that nobody holds need not become long too. Not at every
        growth: who comes and goes beside a long text would make them again each time.
        """
        return tokens > max(2 * self.row_tokens, _LONG_ROW_TOKENS)

    def trim(self, *, slots: int, tokens: int) -> None:
        """Give up room that nobody needs, if that is at least half.

        What stays is generous, so that one more sequence does not make rows grow again at once.
        """
        row_count = min(self.row_count, self._generous_slots(slots + slots // 2, tokens))
        row_tokens = min(self.row_tokens, self._generous_tokens(max(1, tokens)))
        wanted = self._budget.row_bytes(row_count, row_tokens)
        if 2 * wanted <= self._budget.row_bytes(self.row_count, self.row_tokens):
            self.row_count, self.row_tokens = row_count, row_tokens

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
        others = self._others.held_bytes if self._others else 0
        if self.row_count and self.bytes_left < others:
            raise InvariantBroken(
                f"{self.row_count} x {self.row_tokens} and {others} bytes exceed {self._budget}"
            )

    def _shapes(
        self, slots: int, tokens: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return which shapes to try beside what else is there, and which instead of it."""
        idle = 0 if self.makes_long(tokens) else self.row_count
        wide = max(idle, self._generous_slots(slots, tokens))
        count = max(slots, idle)
        long = max(self.row_tokens, self._generous_tokens(tokens))
        exact = self._round(tokens)
        longer = max(exact, self.row_tokens)
        beside = [(wide, long), (count, long), (wide, longer), (slots, longer)]
        beside += [(wide, exact), (slots, exact)]
        # A row of exactly the tokens that it holds grows again with the next one.
        return beside, [(count, long), (slots, longer), (slots, exact), (slots, tokens)]

    def _fits(self, row_count: int, row_tokens: int, *, may_take: bool) -> bool:
        left = self._left(row_count, row_tokens)
        if left < 0 or self._others is None:
            return left >= 0
        return self._others.held_bytes <= left or (may_take and self._others.shrink_to(left))

    def _left(self, row_count: int, row_tokens: int) -> int:
        return self._budget.bytes_max - self._budget.row_bytes(row_count, row_tokens)

    def _round(self, tokens: int) -> int:
        return -(-tokens // self._tokens_step) * self._tokens_step

    def _generous_tokens(self, tokens: int) -> int:
        # An eighth more: long rows are copied a bounded number of times while they grow.
        return self._round(tokens + tokens // 8)

    def _generous_slots(self, slots: int, tokens: int) -> int:
        # Who comes alone with a long text mostly stays alone, and pays for every row: an agent.
        least = _SPARE_SLOTS if tokens <= _LONG_ROW_TOKENS else 1
        return min(self._slots_max, max(least, 1 << max(0, slots - 1).bit_length()))
