"""Simulated disk of a rank, and the block I/O on it: slow, damaged, lossy, off or silent."""

import dataclasses
import random
from collections.abc import Callable
from typing import Literal, Protocol

from shared.messages import BlocksRestored, BlocksSpilled, Message, RestoreBlocks
from tests.unit.scheduler.support.reference_rank import Block, ReferenceRank

DiskFault = Literal["", "slow", "late", "damaged", "lossy", "off", "silent"]
DISK_FAULTS: tuple[DiskFault, ...] = ("slow", "late", "damaged", "lossy", "off", "silent")

SILENT_S = 6.0
"""Longer than any deadline for a disk."""


@dataclasses.dataclass
class Disk:
    """Contents of a rank's store, which outlive the rank's processes."""

    rng: random.Random
    blocks: dict[bytes, Block] = dataclasses.field(default_factory=dict)
    fault: DiskFault = ""


def draw_disk(rng: random.Random) -> Disk:
    """Return an empty disk; a quarter of the disks have a fault from the start."""
    fault = rng.choice(DISK_FAULTS) if rng.random() < 0.25 else ""
    return Disk(rng, fault=fault)


class BlockIoProcess(Protocol):
    """The rank process."""

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> None:
        """Call a function of this process after `seconds`."""
        ...


class BlockIo:
    """Restores and spills of one rank process."""

    def __init__(
        self,
        host: BlockIoProcess,
        rank: ReferenceRank,
        disk: Disk,
        send: Callable[[Message], object],
    ) -> None:
        self._process = host
        self._rank = rank
        self._disk = disk
        self._send = send

    def restore(self, order: RestoreBlocks) -> None:
        """Read blocks, and answer before the deadline, after it, or not at all."""
        disk = self._disk
        rng = disk.rng
        match disk.fault:
            case "silent" if rng.random() < 0.5:
                answer, seconds = self._rank.answer(order, 0, "late"), SILENT_S
            case "late":
                answer, seconds = self._rank.answer(order, 0, "late"), order.deadline_s
            case "off":
                answer, seconds = self._rank.answer(order, 0, "off"), 0.0
            case "slow" if rng.random() < 0.5:
                answer, seconds = self._rank.restore(order), 3.0 * order.deadline_s
            case "damaged" if rng.random() < 0.5:
                wanted = rng.choice(order.items).block or b""
                answer, seconds = self._rank.restore(order, wanted), 0.001
            case _:
                if disk.fault == "lossy" and rng.random() < 0.4:
                    for item in order.items:
                        disk.blocks.pop(item.block or b"", None)
                answer, seconds = self._rank.restore(order), 0.02 * rng.random()
        self._process.call_later(seconds, self._answer, answer)

    def _answer(self, answer: BlocksRestored) -> None:
        self._send(answer)

    def write(self) -> None:
        """Write the blocks that the last plan has spilled, and report the result."""
        spills = list(self._rank.spills)
        self._rank.spills.clear()
        if not spills:
            return
        seconds = 0.05 * self._disk.rng.random()
        if self._disk.fault == "slow":
            seconds *= 40.0
        elif self._disk.fault == "silent":
            seconds = SILENT_S
        self._process.call_later(seconds, self._written, spills)

    def _written(self, spills: list[tuple[bytes, Block]]) -> None:
        disk = self._disk
        is_lossy = disk.fault in ("lossy", "off")
        stored, lost = [], []
        for name, block in spills:
            if is_lossy and disk.rng.random() < 0.5:
                lost.append(name)
            else:
                disk.blocks[name] = block
                stored.append(name)
        self._send(
            BlocksSpilled(
                epoch=self._rank.epoch,
                rank=self._rank.rank,
                stored=stored,
                lost=lost,
                bytes_written=len(stored),
                store_bytes=len(disk.blocks),
            )
        )
