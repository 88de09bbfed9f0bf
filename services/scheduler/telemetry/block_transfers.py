"""History of the last restores and spills. Owns when each was ordered and reported. Pure."""

from collections import deque

from services.scheduler.cache.restore_order import RestoreOrder
from shared import limits
from shared.messages import BlocksRestored, BlocksSpilled, RecordedBlockTransfer


class BlockTransferHistory:
    """The block transfers between ranks and stores that were reported last, bounded in number."""

    def __init__(self) -> None:
        self._transfers: deque[RecordedBlockTransfer] = deque(
            maxlen=limits.RECORDED_BLOCK_TRANSFERS_MAX
        )

    def add_restore(
        self, rank: int, order: RestoreOrder, report: BlocksRestored, now_s: float
    ) -> None:
        """Add what a rank reports of a restore now.

        Args:
            rank: the rank.
            order: the restore.
            report: the rank's answer.
            now_s: the monotonic time in seconds.
        """
        self._transfers.append(
            RecordedBlockTransfer(
                kind="restore",
                rank=rank,
                epoch=report.epoch,
                ordered_at_s=order.ordered_at_s,
                ended_at_s=now_s,
                disk_ms=report.read_ms,
                bytes=report.bytes_read,
                blocks=report.count,
                failed_blocks=len(order.items) - report.count,
                request_id=order.request_id,
            )
        )

    def add_spill(
        self, rank: int, ordered_at_s: float, report: BlocksSpilled, now_s: float
    ) -> None:
        """Add what a rank reports of a spill now.

        Args:
            rank: the rank.
            ordered_at_s: when its first block was ordered.
            report: the rank's report.
            now_s: the monotonic time in seconds.
        """
        self._transfers.append(
            RecordedBlockTransfer(
                kind="spill",
                rank=rank,
                epoch=report.epoch,
                ordered_at_s=ordered_at_s,
                ended_at_s=now_s,
                disk_ms=report.write_ms,
                bytes=report.bytes_written,
                blocks=len(report.stored),
                failed_blocks=len(report.lost),
            )
        )

    def report(self, since_s: float) -> list[RecordedBlockTransfer]:
        """Return the transfers that were reported after a time, in the order of their reports."""
        return [one for one in self._transfers if one.ended_at_s > since_s]
