"""A rank's disk and what comes of orders to it: slow, damaged, lost, off, or no answer at all."""

import dataclasses
import random
from collections.abc import Callable
from typing import Literal, Protocol

from shared.messages import BlocksRestored, BlocksSpilled, Message, RestoreBlocks
from tests.unit.scheduler.reference_rank import Block, ReferenceRank

Trouble = Literal["", "slow", "late", "damaged", "lossy", "off", "silent"]
TROUBLES: tuple[Trouble, ...] = ("slow", "late", "damaged", "lossy", "off", "silent")

SILENT_S = 6.0
"""Nobody waits so long for a disk."""


@dataclasses.dataclass
class Disk:
    """What a rank's store holds; it outlives the rank's processes."""

    chance: random.Random
    blocks: dict[bytes, Block] = dataclasses.field(default_factory=dict)
    trouble: Trouble = ""


def draw_disk(chance: random.Random) -> Disk:
    """Return an empty disk; some are in trouble from the start."""
    trouble = chance.choice(TROUBLES) if chance.random() < 0.25 else ""
    return Disk(chance, trouble=trouble)


class Host(Protocol):
    """The rank process."""

    def later(self, seconds: float, do: Callable[..., object], *args: object) -> None:
        """Let something happen in this process."""
        ...


class DiskTraffic:
    """The orders of one rank process to its disk."""

    def __init__(
        self,
        host: Host,
        rank: ReferenceRank,
        disk: Disk,
        say: Callable[[Message], object],
    ) -> None:
        self._host = host
        self._rank = rank
        self._disk = disk
        self._say = say

    def restore(self, order: RestoreBlocks) -> None:
        """Read, and answer by the deadline, late, or never."""
        disk = self._disk
        chance = disk.chance
        match disk.trouble:
            case "silent" if chance.random() < 0.5:
                answer, seconds = self._rank.answer(order, 0, "late"), SILENT_S
            case "late":
                answer, seconds = self._rank.answer(order, 0, "late"), order.deadline_s
            case "off":
                answer, seconds = self._rank.answer(order, 0, "off"), 0.0
            case "slow" if chance.random() < 0.5:
                answer, seconds = self._rank.restore(order), 3.0 * order.deadline_s
            case "damaged" if chance.random() < 0.5:
                wanted = chance.choice(order.items).block or b""
                answer, seconds = self._rank.restore(order, wanted), 0.001
            case _:
                if disk.trouble == "lossy" and chance.random() < 0.4:
                    for item in order.items:
                        disk.blocks.pop(item.block or b"", None)
                answer, seconds = self._rank.restore(order), 0.02 * chance.random()
        self._host.later(seconds, self._answer, answer)

    def _answer(self, answer: BlocksRestored) -> None:
        self._say(answer)

    def write(self) -> None:
        """Write what the last plan has spilled, and say what became of it."""
        spills = list(self._rank.spills)
        self._rank.spills.clear()
        if not spills:
            return
        seconds = 0.05 * self._disk.chance.random()
        if self._disk.trouble == "slow":
            seconds *= 40.0
        elif self._disk.trouble == "silent":
            seconds = SILENT_S
        self._host.later(seconds, self._written, spills)

    def _written(self, spills: list[tuple[bytes, Block]]) -> None:
        disk = self._disk
        is_lossy = disk.trouble in ("lossy", "off")
        stored, lost = [], []
        for name, block in spills:
            if is_lossy and disk.chance.random() < 0.5:
                lost.append(name)
            else:
                disk.blocks[name] = block
                stored.append(name)
        self._say(
            BlocksSpilled(
                epoch=self._rank.epoch,
                rank=self._rank.rank,
                stored=stored,
                lost=lost,
                bytes_written=len(stored),
                store_bytes=len(disk.blocks),
            )
        )
