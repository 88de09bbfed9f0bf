"""The blocks and checkpoints in this rank's memory, by hash. Step plans decide on eviction."""

import dataclasses

import mlx.core as mx

from services.rank_worker.kv_cache.blocks.items import ItemKind
from shared.errors import InvariantBroken


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentItem:
    """A block or checkpoint in this rank's memory. Immutable, so rows and spills may share it."""

    kind: ItemKind
    tokens: int
    """Tokens in a block, or tokens before a checkpoint's state."""
    payload: mx.array
    """uint8 [bytes] with memory of its own."""


class ResidentBlocks:
    """The blocks and checkpoints in this rank's memory by hash, with their total size."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, ResidentItem] = {}
        self._total_bytes = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def total_bytes(self) -> int:
        """Bytes of the payloads of all blocks and checkpoints."""
        return self._total_bytes

    def add(self, block_hash: bytes, resident: ResidentItem) -> None:
        """Add a block or checkpoint under its hash.

        Raises:
            InvariantBroken: when the hash is resident already.
        """
        if block_hash in self._by_hash:
            raise InvariantBroken(f"{block_hash.hex()} is already resident")
        self._by_hash[block_hash] = resident
        self._total_bytes += resident.payload.nbytes

    def get(self, block_hash: bytes, kind: ItemKind | None = None) -> ResidentItem:
        """Return a block or checkpoint by its hash.

        Args:
            block_hash: its hash.
            kind: the kind that it must have; None: any.

        Raises:
            InvariantBroken: when it is not resident or not of this kind.
        """
        resident = self._by_hash.get(block_hash)
        if resident is None or kind not in (None, resident.kind):
            raise InvariantBroken(
                f"the plan names {block_hash.hex()}, but no such {kind or 'block'} is resident"
            )
        return resident

    def evict(self, block_hash: bytes) -> None:
        """Remove a block or checkpoint; its memory is freed with the last reference.

        Raises:
            InvariantBroken: when it is not resident.
        """
        self._total_bytes -= self.get(block_hash).payload.nbytes
        del self._by_hash[block_hash]
