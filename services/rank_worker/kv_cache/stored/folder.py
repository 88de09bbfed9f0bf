"""Where one rank's records of one namespace lie, and who they must say they are."""

import dataclasses
from pathlib import Path

from services.rank_worker.kv_cache.blocks.transfer import Kind
from shared.block_record import RecordIdentity


@dataclasses.dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """The folder that the store named for one rank in one namespace."""

    namespace: str
    rank: int
    world_size: int
    path: Path

    def identity(self, block_hash: bytes, kind: Kind, tokens: int) -> RecordIdentity:
        """Return what a record of this folder must say about itself."""
        return RecordIdentity(
            namespace=self.namespace,
            rank=self.rank,
            world_size=self.world_size,
            hash=block_hash,
            kind=kind,
            tokens=tokens,
        )
