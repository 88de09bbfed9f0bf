"""KV rows that fit into a rank's memory, as rank worker and scheduler compute it. Pure."""

import dataclasses
import math

from services.commands.planning.model.kv import KVBytes
from services.scheduler.cache.kv_rows import RowBudget

KV_SHARE = 0.6
"""Share of the memory without weights that KV rows may use; the rest is for activations and MLX
itself. It equals the rank worker's share, which a test checks."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVRoom:
    """Memory of one rank, its weights, and the KV rows that fit beside them."""

    usable_bytes: int
    """Memory that the rank's device may use, weights included."""
    weights_bytes: int
    """Weights that the rank holds, with those of the draft model."""
    kv: KVBytes
    """KV of the model per token and per row."""
    draft_bytes_per_token: int = 0
    """KV of the draft model per token; 0: no draft model."""
    kv_bytes_max: int = 0
    """`rank_worker.kv_bytes_max`; 0: as KV_SHARE says."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that this rank's KV rows may use, of the memory that its weights leave.

        That is at most `kv_bytes_max` if it is set, else the share KV_SHARE.
        """
        free = max(0, self.usable_bytes - self.weights_bytes)
        return min(free, self.kv_bytes_max) if self.kv_bytes_max else int(KV_SHARE * free)

    @property
    def reserve_bytes(self) -> int:
        """Bytes of usable memory left for activations and MLX, beside weights and KV rows."""
        return max(0, self.usable_bytes - self.weights_bytes - self.budget_bytes)

    @property
    def rows(self) -> RowBudget:
        """`budget_bytes` with the bytes per token and per row, as the scheduler's own type."""
        return RowBudget(
            bytes_max=self.budget_bytes,
            bytes_per_token=self.kv.per_token,
            bytes_per_row=self.kv.per_row,
            draft_bytes_per_token=self.draft_bytes_per_token,
        )

    def sequences(self, tokens: int) -> int:
        """Return how many KV rows of `tokens` tokens fit; 2**31 - 1 if rows need no memory."""
        if self.weights_bytes > self.usable_bytes:
            return 0
        row = self.rows.row_bytes(1, tokens)
        return self.budget_bytes // row if row else 2**31 - 1

    def longest(self, step: int) -> int:
        """Return the tokens of the longest sequence that fits if no other runs; 0: none fits.

        Args:
            step: number of tokens by which a row's array grows; a result above it is rounded down
                to a multiple of it.
        """
        if self.weights_bytes > self.usable_bytes or self.budget_bytes < self.kv.per_row:
            return 0
        longest = self.rows.longest_row()
        return longest - longest % step if longest > step else longest

    def short_bytes(self, sequences: int, tokens: int) -> int:
        """Return how many more bytes this rank needs to hold weights and KV rows; 0: they fit.

        With `kv_bytes_max` set and too small for the rows, it is what that limit lacks.

        Args:
            sequences: number of rows, one per sequence.
            tokens: length of each row in tokens.
        """
        wanted = self.rows.row_bytes(sequences, tokens)
        if self.kv_bytes_max and wanted > self.kv_bytes_max:
            # The setting is the limit: more memory would not help.
            return wanted - self.kv_bytes_max
        return max(0, -self.spare_bytes(sequences, tokens))

    def spare_bytes(self, sequences: int, tokens: int) -> int:
        """Return how many bytes of weights fit in addition; below 0: not even these fit.

        Args:
            sequences: number of rows, one per sequence.
            tokens: length of each row in tokens.
        """
        wanted = self.rows.row_bytes(sequences, tokens)
        needed = wanted if self.kv_bytes_max else math.ceil(wanted / KV_SHARE)
        return self.usable_bytes - self.weights_bytes - needed


def row_length(tokens: int, step: int) -> int:
    """Return the allocated length of a KV row: `tokens` rounded up to a multiple of `step`."""
    return math.ceil(tokens / step) * step
