"""The KV rows of all ranks. Owns the slots and the array shape; allocates nothing.

Every rank keeps one array of `row_count` rows of `row_tokens` tokens per layer. Every plan carries
this shape, so ranks cannot differ. Rows are left-aligned; slots may have holes. Resident blocks
share the memory budget, and rows that grow take memory from them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot
from shared.messages import RankReady, SlotMove

_SHORT_ROWS_MIN = 4
"""Smallest number of rows that are allocated at once while rows are short."""
_SHORT_ROW_TOKENS = 512
"""Rows longer than this are allocated as they are needed, with doubling. On a CPU the first touch
of 4 MiB takes 2 ms, so four rows of 1,280 tokens took longer than restoring 1,024 from SSD."""
_LONG_ROW_TOKENS = 2_048
"""Idle rows longer than this may be dropped, although sequences have used them."""

_UNLIMITED_BYTES = 2**62
"""The budget of a rank that keeps no KV memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowBudget:
    """KV memory that rows and blocks may use on each rank, and the bytes that rows take of it.

    It is the same for all ranks, so that it fits on the rank with the least memory.
    """

    bytes_max: int
    """Most bytes per rank for rows and blocks together."""
    bytes_per_token: int
    """Bytes of one token's KV in a row or block, without a draft model's."""
    bytes_per_row: int
    """Bytes of a row that do not depend on its length, such as recurrent state."""
    draft_bytes_per_token: int = 0
    """Additional bytes per token of a row for a draft model or head; blocks do not hold them."""

    @property
    def row_bytes_per_token(self) -> int:
        """Bytes of one token of a row, with the KV of a draft model or head."""
        return self.bytes_per_token + self.draft_bytes_per_token

    def row_bytes(self, row_count: int, row_tokens: int) -> int:
        """Return the bytes per rank of `row_count` rows of `row_tokens` tokens each."""
        return row_count * (row_tokens * self.row_bytes_per_token + self.bytes_per_row)

    def longest_row(self) -> int:
        """Return the most tokens that a row can have when it is alone and no block is resident."""
        if self.row_bytes_per_token == 0:
            return 2**31 - 1
        return max(0, (self.bytes_max - self.bytes_per_row) // self.row_bytes_per_token)


def smallest_budget(reports: Sequence[RankReady]) -> RowBudget:
    """Return a budget whose rows and blocks fit on every rank.

    Bytes per token and per row are those of the rank where they are largest. Ranks may hold unequal
    parts of the model, so each rank's memory is scaled to these bytes before the smallest is taken.

    Args:
        reports: the reports of all ranks.
    """
    per_token = max(report.kv_bytes_per_token for report in reports)
    per_row = max(report.kv_bytes_per_row for report in reports)
    drafts = max(report.draft_bytes_per_token for report in reports)

    def scaled_budget(report: RankReady) -> int:
        # The largest share of the counted bytes that this rank uses, over all mixes of them.
        tokens = report.kv_bytes_per_token
        parts = (
            (tokens, per_token),
            (tokens + report.draft_bytes_per_token, per_token + drafts),
            (report.kv_bytes_per_row, per_row),
        )
        used, counted = max(
            (part for part in parts if part[1]), key=lambda part: part[0] / part[1], default=(0, 0)
        )
        return report.kv_budget_bytes * counted // used if used else _UNLIMITED_BYTES

    least = min(scaled_budget(report) for report in reports)
    if least == _UNLIMITED_BYTES:
        least = min(report.kv_budget_bytes for report in reports)
    return RowBudget(least, per_token, per_row, drafts)


class SharedMemory(Protocol):
    """Other users of the KV memory that rows use, which can give it back, such as cache blocks."""

    @property
    def held_bytes(self) -> int:
        """Bytes per rank that these other users hold."""

    def shrink_to(self, bytes_max: int) -> bool:
        """Free memory until they hold at most `bytes_max` per rank; return False if impossible."""


class Rows:
    """The slots of running sequences, and the shape of the KV arrays on every rank.

    The shape is `row_count` rows of `row_tokens` tokens each. It grows geometrically, so each row
    is copied a bounded number of times on average. It shrinks only when something else does not
    fit, or when unused rows would become much longer or rows with much unused length more.
    """

    def __init__(self, slots_max: int, tokens_step: int) -> None:
        self.row_count = 0
        self.row_tokens = 0
        self._slots_max = slots_max
        self._slots_needed_max = 0
        """The most rows that were needed at once in this epoch."""
        self._tokens_step = tokens_step
        self.budget = RowBudget(0, 1, 0)
        """Memory that rows and blocks may use on each rank in this epoch, and the size of a row."""
        self.others: SharedMemory | None = None
        """The resident blocks and checkpoints, which give memory back when rows grow."""
        self._holders: dict[Slot, SequenceId] = {}

    @property
    def tokens_max(self) -> int:
        """Most tokens that all rows together can hold while no block is resident, for reports.

        It is 0 before the first epoch and when tokens take no KV memory.
        """
        if self.budget.row_bytes_per_token == 0:
            return 0
        return self.budget.bytes_max // self.budget.row_bytes_per_token

    @property
    def bytes_left(self) -> int:
        """Bytes per rank of the KV memory that the arrays of rows, used or not, leave to blocks."""
        return self._left(self.row_count, self.row_tokens)

    @property
    def slots_used(self) -> int:
        """Number of slots in use."""
        return len(self._holders)

    @property
    def has_free_slot(self) -> bool:
        """Whether fewer sequences run than the operator's limit allows."""
        return len(self._holders) < self._slots_max

    @property
    def has_holes(self) -> bool:
        """Whether a slot below a used one is free."""
        return self.rows_needed() > self.slots_used

    def start(self, budget: RowBudget) -> None:
        """Start an epoch without rows and with all slots free.

        Args:
            budget: memory that rows and blocks may use on each rank, and the size of a row.
        """
        self.budget = budget
        self._holders.clear()
        self.row_count = 0
        self.row_tokens = 0
        self._slots_needed_max = 0

    def longest_sequence_tokens(self) -> int:
        """Return the most tokens that a sequence can have when it is alone in memory.

        It is rounded down to whole steps in which rows grow.
        """
        longest = self.budget.longest_row()
        return longest - longest % self._tokens_step if longest > self._tokens_step else longest

    def resize(self, *, slots: int, tokens: int) -> bool:
        """Grow the shape as needed to hold `slots` rows (0 .. slots - 1) of `tokens` tokens.

        Tries, in this order: the present shape, shapes with spare rows and an eighth more tokens,
        the smallest shape. Blocks are evicted only when no shape fits beside them. Rows that were
        never needed are dropped rather than lengthened, unless they stay short.

        Args:
            slots: number of rows that are needed.
            tokens: row length that is needed.

        Returns:
            False, with the shape unchanged, when there is too little memory.
        """
        self._slots_needed_max = max(self._slots_needed_max, slots)
        if slots <= self.row_count and tokens <= self.row_tokens:
            return True
        shapes, evicting_shapes = self._shapes(slots, tokens)
        for candidates, may_evict in ((shapes, False), (evicting_shapes, True)):
            for row_count, row_tokens in candidates:
                if row_count >= slots and self._fits(row_count, row_tokens, may_evict=may_evict):
                    self.row_count, self.row_tokens = row_count, row_tokens
                    return True
        return False

    def drops_idle_rows(self, tokens: int) -> bool:
        """Tell whether rows that no sequence uses are dropped when rows grow to this length.

        They are dropped only when rows more than double and become long: otherwise short sequences
        beside a long one would allocate them again each time.

        Args:
            tokens: the new row length.
        """
        return tokens > max(2 * self.row_tokens, _LONG_ROW_TOKENS)

    def drops_idle_length(self, slots: int, tokens: int) -> bool:
        """Tell whether rows are shortened when their number grows.

        That is so when rows are long and at least half of each is unused: more of them would take
        much memory, and allocating it takes time.

        Args:
            slots: the new number of rows that are needed.
            tokens: row length that is needed.
        """
        idle_from = max(_LONG_ROW_TOKENS, 2 * self._generous_tokens(tokens))
        return slots > self.row_count and self.row_tokens > idle_from

    def trim(self, *, slots: int, tokens: int) -> None:
        """Shrink the shape when at least half of the memory of all rows is unused.

        The new shape has some spare rows and tokens, so that one more sequence does not make it
        grow at once.

        Args:
            slots: rows that are needed.
            tokens: row length that is needed.
        """
        row_count = min(self.row_count, self._generous_slots(slots + slots // 2, tokens))
        row_tokens = min(self.row_tokens, self._generous_tokens(max(1, tokens)))
        wanted = self.budget.row_bytes(row_count, row_tokens)
        if 2 * wanted <= self.budget.row_bytes(self.row_count, self.row_tokens):
            self.row_count, self.row_tokens = row_count, row_tokens

    def assign_slot(self, sequence_id: SequenceId) -> Slot:
        """Assign the lowest free slot to a sequence, after `resize` made room for it.

        Raises:
            InvariantBroken: there is no row for that slot.
        """
        slot = self.lowest_free_slot()
        if slot >= self.row_count:
            raise InvariantBroken(f"slot {slot} exceeds {self.row_count} rows")
        self._holders[slot] = sequence_id
        return slot

    def lowest_free_slot(self) -> Slot:
        """Return the lowest free slot."""
        slot = 0
        while slot in self._holders:
            slot += 1
        return Slot(slot)

    def release_slot(self, slot: Slot, sequence_id: SequenceId) -> None:
        """Free a slot.

        Raises:
            InvariantBroken: another sequence has it.
        """
        if self._holders.pop(slot, None) != sequence_id:
            raise InvariantBroken(f"slot {slot} is not held by sequence {sequence_id}")

    def rows_needed(self) -> int:
        """Return how many rows the used slots need: the highest used slot plus one."""
        return max(self._holders, default=-1) + 1

    def compact(self) -> list[SlotMove]:
        """Move the highest rows into the lowest free slots; return the moves in order.

        No slot below a used one is free afterwards.
        """
        moves = []
        while self._holders:
            highest = max(self._holders)
            hole = self.lowest_free_slot()
            if hole > highest:
                break
            sequence_id = self._holders.pop(highest)
            self._holders[hole] = sequence_id
            moves.append(SlotMove(sequence_id=sequence_id, slot=hole))
        return moves

    def check_invariants(self, held: dict[Slot, SequenceId]) -> None:
        """Compare slots, row count and memory with the running sequences and the budget (I9).

        Args:
            held: the slots of all running sequences.

        Raises:
            InvariantBroken: the slots differ, a slot has no row, or rows and blocks exceed the
                budget.
        """
        if held != self._holders:
            raise InvariantBroken(f"slots held {self._holders}, sequences say {held}")
        if self.rows_needed() > self.row_count:
            raise InvariantBroken(f"slot beyond {self.row_count} rows: {self._holders}")
        others = self.others.held_bytes if self.others else 0
        if self.row_count and self.bytes_left < others:
            raise InvariantBroken(
                f"{self.row_count} x {self.row_tokens} and {others} bytes exceed {self.budget}"
            )

    def _shapes(
        self, slots: int, tokens: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (row count, row tokens) to try without evictions, and with them."""
        used_rows = min(self.row_count, self._slots_needed_max)
        idle_rows = 0 if self.drops_idle_rows(tokens) else used_rows
        wide = max(idle_rows, self._generous_slots(slots, tokens))
        count = max(slots, idle_rows)
        long = self._generous_tokens(tokens)
        if not self.drops_idle_length(slots, tokens):
            long = max(self.row_tokens, long)
        exact = self._round(tokens)
        longer = max(exact, self.row_tokens)
        shapes = [(wide, long), (count, long), (wide, longer), (slots, longer)]
        shapes += [(wide, exact), (slots, exact)]
        # With evictions, (slots, exact tokens) comes last: such rows grow again at the next token.
        return shapes, [(count, long), (slots, longer), (slots, exact), (slots, tokens)]

    def _fits(self, row_count: int, row_tokens: int, *, may_evict: bool) -> bool:
        left = self._left(row_count, row_tokens)
        if left < 0 or self.others is None:
            return left >= 0
        return self.others.held_bytes <= left or (may_evict and self.others.shrink_to(left))

    def _left(self, row_count: int, row_tokens: int) -> int:
        return self.budget.bytes_max - self.budget.row_bytes(row_count, row_tokens)

    def _round(self, tokens: int) -> int:
        return -(-tokens // self._tokens_step) * self._tokens_step

    def _generous_tokens(self, tokens: int) -> int:
        # One eighth more, so that a growing row is copied a bounded number of times.
        return self._round(tokens + tokens // 8)

    def _generous_slots(self, slots: int, tokens: int) -> int:
        # A single sequence that is not short, such as an agent's, mostly stays alone.
        least = _SHORT_ROWS_MIN if tokens <= _SHORT_ROW_TOKENS else 1
        return min(self._slots_max, max(least, 1 << max(0, slots - 1).bit_length()))
