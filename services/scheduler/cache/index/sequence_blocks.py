"""One sequence as the cache sees it."""

import dataclasses
from collections import deque
from typing import Literal

from services.scheduler.cache.index.block_index import Entry, Node
from services.scheduler.cache.index.hashes import Chain
from shared.messages import CachedPrefix, SubmitRequest

NEVER = 2**62
"""A row length that no sequence reaches."""


@dataclasses.dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What is remembered about a sequence's blocks while it waits and runs. Counts are tokens."""

    sequence_id: int
    tokens: list[int]
    """The sequence's own list; it only grows."""
    request: SubmitRequest
    chain: Chain | None = None
    """Kept as long as the namespace stays the same."""
    cached: CachedPrefix | None = None
    """What its first admission found."""

    # While it waits.
    epoch: int = 0
    """The epoch that all below belongs to."""
    looked_at: tuple[int, int] = (-1, -1)
    """Versions of index and claims when it was found that it need not wait."""
    found_tokens: int = 0
    """How much of it was resident then."""
    waits_for: bytes | None = None
    """What another sequence computes or another restore reads, and this one will reuse."""
    restore_id: int | None = None
    """The restore that it waits for."""
    restores: int = 0
    """Restores that were asked for it."""
    patience_until_s: float = 0.0
    """Until then it waits for other restores to end, so that its own can begin; 0: it does not."""
    restored: tuple[int, int] = (0, 0)
    """From where to where its tokens came from SSD."""
    restore_miss: Literal["", "slow", "unreadable"] = ""
    """Why a restore brought less than was asked for, as a cause of CachedPrefix.miss."""

    # While it runs.
    border: int = NEVER
    """When its row and its known tokens reach this length, one more block is whole."""
    path: list[Node] = dataclasses.field(default_factory=list)
    """Its whole blocks, from the first on, that were resident when its row was looked at last."""
    handled: int = 0
    """Whole blocks that were reused, kept, or given up for lack of memory."""
    claims: deque[tuple[int, bytes]] = dataclasses.field(default_factory=deque)
    """(end, hash) of what it is about to compute, that others may wait for; rising."""
    cuts: deque[int] = dataclasses.field(default_factory=deque)
    """Lengths at which prefill stops, so that the state there is set aside; rising."""
    set_aside: int = 0
    """Length of the row when its state was set aside last and not kept since; 0: none."""
    is_decode_state: bool = False
    """That state was set aside while decoding."""
    decode_checkpoint: Entry | None = None
    """Its last checkpoint that was taken while decoding."""

    @property
    def system_tokens(self) -> int:
        """So many first tokens are a system prompt."""
        return self.request.system_tokens

    def begin_waiting(self, epoch: int, chain: Chain) -> None:
        """Forget what belonged to another epoch, or to the time before a preemption."""
        self.epoch, self.chain = epoch, chain
        self.looked_at, self.found_tokens, self.waits_for = (-1, -1), 0, None
        self.restore_id, self.restores, self.patience_until_s = None, 0, 0.0
        self.restored, self.restore_miss = (0, 0), ""
        self.stop_running()

    def stop_running(self) -> None:
        """Forget what belonged to its row."""
        self.border = NEVER
        self.path.clear()
        self.handled = 0
        self.claims.clear()
        self.cuts.clear()
        self.set_aside = 0
        self.decode_checkpoint = None
