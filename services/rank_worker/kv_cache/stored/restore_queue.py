"""All restores of one rank. Owns queries to the store and answers. For the tier's thread."""

from collections.abc import Callable

from services.rank_worker.kv_cache.stored.context import TierContext
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder
from services.rank_worker.kv_cache.stored.restore_task import Cause, RestoreTask
from services.rank_worker.kv_cache.stored.staging import Staging
from shared import limits
from shared.log import Log
from shared.messages import (
    BlocksLocated,
    BlocksRestored,
    LocateBlocks,
    QuarantineBlocks,
    ReleaseBlocks,
)

_log = Log("rank_worker.stored")

_CAUSE_CHARS_MAX = 4_000


class RestoreQueue:
    """The restores that the scheduler ordered and this rank has not answered yet.

    Each is answered exactly once, at its deadline at the latest, with the number of leading items
    that a plan may adopt.
    """

    def __init__(
        self, context: TierContext, read: Callable[[RestoreTask], None], staging: Staging
    ) -> None:
        """Start without restores.

        Args:
            context: clock, scheduler and store.
            read: starts to read the selected items of a restore in other threads.
            staging: receives restored items until a plan adopts them.
        """
        self._context = context
        self._read = read
        self._staging = staging
        self._open: dict[int, RestoreTask] = {}
        """Unanswered restores by id."""
        self._queries: dict[int, tuple[RestoreTask, list[bytes]]] = {}
        """Open queries to the store by id: the restore, and the hashes in order."""
        self._query_id = 0
        self._session = 0
        """Number of the session with the store; pins end with their session."""

    @property
    def next_deadline_at_s(self) -> float | None:
        """Earliest deadline of an unanswered restore, in clock seconds; None without any."""
        return min((restore.deadline_at_s for restore in self._open.values()), default=None)

    def __bool__(self) -> bool:
        """Return True while a restore is open."""
        return bool(self._open)

    def add(self, restore: RestoreTask, folder: NamespaceFolder | None) -> None:
        """Add a restore and ask the store for the places of its records.

        Args:
            restore: the restore.
            folder: folder of its namespace; None: the restore waits until `open` gets that folder.
        """
        self._open[restore.order.restore_id] = restore
        if folder is not None:
            self._locate(restore, folder)

    def open(self, folder: NamespaceFolder) -> None:
        """Ask the store for the records of the restores that wait for this folder."""
        for restore in list(self._open.values()):
            if restore.folder is None and restore.order.namespace == folder.namespace:
                self._locate(restore, folder)

    def handle_located(self, message: BlocksLocated) -> None:
        """Record the files and offsets that the store has sent for one query of a restore.

        After the answer to the restore's last query, start to read its records.

        Args:
            message: the store's answer, with one place or None per hash of the query.
        """
        query = self._queries.pop(message.query_id, None)
        if query is None or len(query[1]) != len(message.places):
            _log.warning("unexpected_reply", query_id=message.query_id)
            return
        restore, hashes = query
        restore.open_queries.discard(message.query_id)
        restore.pinning_queries.append(message.query_id)
        if restore.is_answered:
            self._release(restore)
            return
        for one, place in zip(hashes, message.places, strict=True):
            if place is not None:
                restore.places[one] = place
        if not restore.open_queries:
            self._start_reading(restore)

    def finish_reading(self, restore: RestoreTask) -> None:
        """Answer a restore that all reading threads are done with, unless it is answered already.

        Asks the store to quarantine its unreadable records.

        Args:
            restore: the restore.
        """
        restore.is_reading = False
        for one, cause in restore.unreadable:
            _log.warning("record_unreadable", block=one.hex(), cause=cause)
            self._context.send_to_store(
                QuarantineBlocks(hashes=[one], cause=cause[:_CAUSE_CHARS_MAX])
            )
        if restore.is_answered:
            self._release(restore)
        else:
            self._answer(restore, restore.stopped_by)

    def forget(self, restore_id: int) -> None:
        """Answer a restore with 0 items, if it is unanswered, and discard its items.

        Args:
            restore_id: id of a restore that no plan will adopt.
        """
        restore = self._open.get(restore_id)
        if restore is not None:
            self._answer(restore, "late", keep=False)
        self._staging.forget(restore_id)

    def check_deadlines(self) -> None:
        """Answer the restores whose deadline has passed with the items read so far."""
        now_s = self._context.clock.now()
        for restore in list(self._open.values()):
            if now_s >= restore.deadline_at_s:
                self._answer(restore, "late")

    def stop(self) -> None:
        """Answer all restores with the items read so far: the store is off or gone."""
        for restore in list(self._open.values()):
            self._answer(restore, "off")

    def lose_session(self) -> None:
        """Answer all restores with the items read so far and forget all queries to the store.

        To be called when the connection to the store is lost.
        """
        self.stop()
        self._queries.clear()
        self._session += 1

    def _locate(self, restore: RestoreTask, folder: NamespaceFolder) -> None:
        restore.folder, restore.session = folder, self._session
        hashes = restore.record_hashes()
        for first in range(0, len(hashes), limits.BLOCKS_PER_MESSAGE_MAX):
            part = hashes[first : first + limits.BLOCKS_PER_MESSAGE_MAX]
            self._query_id += 1
            query = LocateBlocks(query_id=self._query_id, hashes=part)
            if not self._context.send_to_store(query):
                self._answer(restore, "off")
                return
            self._queries[self._query_id] = (restore, part)
            restore.open_queries.add(self._query_id)
        if not hashes:
            self._start_reading(restore)

    def _start_reading(self, restore: RestoreTask) -> None:
        used = self._staging.size_bytes + sum(one.planned_bytes for one in self._open.values())
        restore.select_prefix(self._staging.bytes_max - used)
        if restore.target_items == 0:
            self._answer(restore, restore.stopped_by)
            return
        restore.is_reading, restore.read_began_at_s = True, self._context.clock.now()
        self._read(restore)

    def _answer(self, restore: RestoreTask, cause: Cause, *, keep: bool = True) -> None:
        """Report to the scheduler how many items can be adopted, and why not more."""
        order = restore.order
        restore.finish(keep=keep)
        del self._open[order.restore_id]
        if restore.adoptable:
            self._staging.put(restore)
        self._context.send_to_scheduler(
            BlocksRestored(
                epoch=self._context.epoch,
                rank=self._context.rank,
                restore_id=order.restore_id,
                count=restore.adoptable,
                stopped_by="" if restore.adoptable == len(order.items) else cause,
                bytes_read=restore.bytes_read,
                read_ms=max(0.0, self._context.clock.now() - restore.arrived_at_s) * 1e3,
            )
        )
        if not restore.is_reading:
            self._release(restore)

    def _release(self, restore: RestoreTask) -> None:
        """Release the pins of a restore's answered queries."""
        if restore.session != self._session:
            return
        for query_id in restore.pinning_queries:
            self._context.send_to_store(ReleaseBlocks(query_id=query_id))
        restore.pinning_queries = []
