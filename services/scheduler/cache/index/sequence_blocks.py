"""The cache's record of one sequence. Owns no block; the parts of the cache fill it in."""

import dataclasses
from array import array
from collections import deque
from typing import Literal

from services.scheduler.cache.index.block_index import Entry, Node
from services.scheduler.cache.index.hashes import Chain
from shared.messages import CachedPrefix, SubmitRequest

UNREACHABLE_TOKENS = 2**62
"""A row length that no sequence reaches."""


@dataclasses.dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The cache's record of a sequence while it waits and runs. Lengths are in tokens."""

    sequence_id: int
    tokens: "array[int]"
    """All tokens of the sequence, which only grow."""
    prompt_tokens: int
    """Length of the prompt."""
    request: SubmitRequest
    """The request, without its token ids."""
    chain: Chain = dataclasses.field(init=False)
    """Hashes of its whole blocks, kept while the namespace stays the same; none before its first
    lookup."""
    cached: CachedPrefix | None = None
    """The report of its first admission."""

    # While it waits.
    epoch: int = 0
    """The epoch that all following fields belong to."""
    ready_at_versions: tuple[int, int] = (-1, -1)
    """Versions of the index and of the pending blocks when it last was ready for admission."""
    resident_tokens: int = 0
    """Tokens of it that resident blocks held at the last lookup."""
    awaited_hash: bytes | None = None
    """The block or checkpoint it waits for, which another sequence computes or restores."""
    restore_id: int | None = None
    """The restore that it waits for."""
    restores_requested: int = 0
    """Restores requested since it began to wait."""
    queue_until_s: float = 0.0
    """How long it waits until fewer restores are open; 0: it does not wait for that."""
    restored_range: tuple[int, int] = (0, 0)
    """First and last position of its tokens that came from SSD."""
    restore_miss: Literal["", "slow", "unreadable"] = ""
    """Why a restore brought less than requested, as a cause of CachedPrefix.miss."""

    # While it runs.
    next_boundary: int = UNREACHABLE_TOKENS
    """Row length at which the next block is complete."""
    resident_path: list[Node] = dataclasses.field(default_factory=list)
    """Its leading whole blocks that were resident at the last keep."""
    settled_blocks: int = 0
    """Whole blocks that were reused, kept, or dropped for lack of memory."""
    pending: deque[tuple[int, bytes]] = dataclasses.field(default_factory=deque)
    """(end, hash) of the blocks it will compute and others may wait for; rising."""
    snapshot_stops: deque[int] = dataclasses.field(default_factory=deque)
    """Row lengths at which prefill stops for a snapshot of the state; rising."""
    snapshot_tokens: int = 0
    """Row length of the latest snapshot that is not kept yet; 0: there is no snapshot."""
    is_decode_snapshot: bool = False
    """The snapshot was taken while decoding."""
    decode_checkpoint: Entry | None = None
    """Its latest checkpoint that was taken while decoding."""

    def __post_init__(self) -> None:
        """Start without hashes, since the namespace is not known."""
        self.chain = Chain(b"", 1, self.tokens)

    def replace_tokens(self, tokens: "array[int]") -> None:
        """Use another copy of the same tokens from now on."""
        self.tokens = self.chain.tokens = tokens

    def reset(self, epoch: int, chain: Chain) -> None:
        """Reset the record of a sequence that starts to wait: nothing of earlier admissions stays.

        Args:
            epoch: number of the epoch in which it waits.
            chain: hashes of its whole blocks in the namespace of the epoch.
        """
        self.epoch, self.chain = epoch, chain
        self.ready_at_versions, self.resident_tokens, self.awaited_hash = (-1, -1), 0, None
        self.restore_id, self.restores_requested, self.queue_until_s = None, 0, 0.0
        self.restored_range, self.restore_miss = (0, 0), ""
        self.reset_row()

    def reset_row(self) -> None:
        """Reset the record of the sequence's row: its kept blocks and its snapshots."""
        self.next_boundary = UNREACHABLE_TOKENS
        self.resident_path.clear()
        self.settled_blocks = 0
        self.pending.clear()
        self.snapshot_stops.clear()
        self.snapshot_tokens = 0
        self.decode_checkpoint = None
