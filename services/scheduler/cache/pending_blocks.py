"""Which blocks running sequences are about to compute, so that others wait for them.

Whoever runs makes progress or leaves, and both end its claims: nobody waits for good.
"""

from services.scheduler.cache.index.sequence_blocks import SequenceBlocks


class PendingBlocks:
    """Hashes by the sequence that computes them."""

    def __init__(self) -> None:
        self.version = 0
        """Changes whenever a wait may begin or end."""
        self._owners: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        """Tell whether somebody computes this block or checkpoint."""
        return name in self._owners

    def claim(self, blocks: SequenceBlocks, wanted: list[tuple[int, bytes]]) -> None:
        """A sequence will compute these (end, hash); what another one computes stays its own."""
        for end, name in wanted:
            if self._owners.setdefault(name, blocks.sequence_id) == blocks.sequence_id:
                blocks.claims.append((end, name))
        self.version += 1

    def release(self, blocks: SequenceBlocks, until: int) -> None:
        """What the sequence has computed up to a length is kept by now, or never will be."""
        while blocks.claims and blocks.claims[0][0] <= until:
            _, name = blocks.claims.popleft()
            del self._owners[name]
            self.version += 1

    def clear(self) -> None:
        """Nobody runs any more."""
        self._owners.clear()
        self.version += 1

    def check_invariants(self, running: list[SequenceBlocks]) -> None:
        """Assert that every claim belongs to a sequence that runs."""
        claimed = {name: one.sequence_id for one in running for _, name in one.claims}
        assert claimed == self._owners, (len(claimed), len(self._owners))
