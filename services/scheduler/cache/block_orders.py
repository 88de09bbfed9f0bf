"""What the plan in the making says about blocks."""

import dataclasses

from shared.messages import AdoptedRestore, KeptBlock, KeptCheckpoint, SpillOrder


@dataclasses.dataclass(slots=True)
class PlannedBlockOrders:
    """The parts of a StepPlan that are about blocks, in the order in which ranks apply them."""

    keep_blocks: list[KeptBlock] = dataclasses.field(default_factory=list)
    keep_checkpoints: list[KeptCheckpoint] = dataclasses.field(default_factory=list)
    adopted: list[AdoptedRestore] = dataclasses.field(default_factory=list)
    spill: SpillOrder | None = None
    evicted: dict[bytes, None] = dataclasses.field(default_factory=dict)
    """Hashes, in order."""

    def __bool__(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(
            self.keep_blocks
            or self.keep_checkpoints
            or self.adopted
            or self.evicted
            or self.spill is not None
        )

    def evict(self, name: bytes) -> None:
        """Have ranks forget a block or checkpoint."""
        self.evicted[name] = None

    def keep_block(self, kept: KeptBlock) -> None:
        """Have ranks keep a block."""
        if not self._take_back(kept.hash):
            self.keep_blocks.append(kept)

    def keep_checkpoint(self, kept: KeptCheckpoint) -> None:
        """Have ranks keep a checkpoint that was set aside."""
        if not self._take_back(kept.hash):
            self.keep_checkpoints.append(kept)

    def take(self) -> "PlannedBlockOrders":
        """Return what has come together, and begin with nothing."""
        if not self:
            return _NOTHING
        taken = dataclasses.replace(self)
        self.keep_blocks, self.keep_checkpoints, self.adopted = [], [], []
        self.spill, self.evicted = None, {}
        return taken

    def _take_back(self, name: bytes) -> bool:
        """Cancel an eviction: ranks evict after they keep, so both would end in nothing."""
        if name not in self.evicted:
            return False
        del self.evicted[name]
        return True


_NOTHING = PlannedBlockOrders()
"""Most plans say nothing about blocks. Nobody changes what was taken."""
