"""The blocks and checkpoints in this rank's memory, by hash. Plans alone decide what stays."""

import dataclasses

import mlx.core as mx

from services.rank_worker.kv_cache.blocks.transfer import Kind
from shared.errors import InvariantBroken


@dataclasses.dataclass(frozen=True, slots=True)
class Resident:
    """One block or checkpoint. It is shared by reference and never changes."""

    kind: Kind
    tokens: int
    """Of a block: how many it holds. Of a checkpoint: at how many tokens its state stands."""
    payload: mx.array
    """uint8 [bytes], with memory of its own."""


class ResidentBlocks:
    """Hash -> block or checkpoint."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Resident] = {}
        self._total_bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_hash

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return self._total_bytes

    def add(self, name: bytes, resident: Resident) -> None:
        """Take one in.

        Raises:
            InvariantBroken: the hash is resident already.
        """
        if name in self._by_hash:
            raise InvariantBroken(f"{name.hex()} is resident already")
        self._by_hash[name] = resident
        self._total_bytes += resident.payload.nbytes

    def get(self, name: bytes, kind: Kind | None = None) -> Resident:
        """Return one.

        Raises:
            InvariantBroken: it is not resident, or is not of this kind.
        """
        resident = self._by_hash.get(name)
        if resident is None or kind not in (None, resident.kind):
            raise InvariantBroken(f"the plan names {name.hex()}; no such {kind or 'block'} is here")
        return resident

    def evict(self, name: bytes) -> None:
        """Forget one; its memory is free when nobody uses it any more.

        Raises:
            InvariantBroken: it is not resident.
        """
        self._total_bytes -= self.get(name).payload.nbytes
        del self._by_hash[name]
