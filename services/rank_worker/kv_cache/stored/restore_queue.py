"""All restores of one rank: asked, located, handed to the readers, answered. Link's thread only."""

import dataclasses
from collections.abc import Callable

from services.rank_worker.kv_cache.stored.folder import NamespaceFolder
from services.rank_worker.kv_cache.stored.restore_task import Cause, RestoreTask
from services.rank_worker.kv_cache.stored.staging import Staging
from shared import limits
from shared.clock import Clock
from shared.log import Log
from shared.messages import (
    BlocksLocated,
    BlocksRestored,
    LocateBlocks,
    Message,
    QuarantineBlocks,
    ReleaseBlocks,
)

_log = Log("rank_worker.stored")


@dataclasses.dataclass(frozen=True, slots=True)
class TierContext:
    """What spills and restores act on. None of it waits."""

    rank: int
    epoch: int
    clock: Clock
    say: Callable[[Message], None]
    """To the scheduler."""
    tell: Callable[[Message], bool]
    """To the store; False when there is none."""


class RestoreQueue:
    """Every restore is answered exactly once, at its deadline at the latest."""

    def __init__(
        self,
        outside: TierContext,
        read: Callable[[RestoreTask], None],
        staging: Staging,
    ) -> None:
        self._outside = outside
        self._read = read
        self._staging = staging
        self._open: dict[int, RestoreTask] = {}
        """Not answered, by restore id."""
        self._questions: dict[int, tuple[RestoreTask, list[bytes]]] = {}
        """Asked of the store, by query id: for what, and the hashes in order."""
        self._query_id = 0
        self._session = 0
        """Counts the sessions with the store: pins end with theirs."""

    @property
    def next_deadline_at_s(self) -> float | None:
        """When the next one must be answered; None: there is none."""
        return min((restore.deadline_at_s for restore in self._open.values()), default=None)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, restore: RestoreTask, folder: NamespaceFolder | None) -> None:
        """Take one in; without a folder it waits for `open`."""
        self._open[restore.order.restore_id] = restore
        if folder is not None:
            self._locate(restore, folder)

    def open(self, folder: NamespaceFolder) -> None:
        """Go on with those that wait for this folder."""
        for restore in list(self._open.values()):
            if restore.folder is None and restore.order.namespace == folder.namespace:
                self._locate(restore, folder)

    def located(self, message: BlocksLocated) -> None:
        """Take in what the store answers; when all is answered, begin to read."""
        question = self._questions.pop(message.query_id, None)
        if question is None or len(question[1]) != len(message.places):
            _log.warning("unexpected_reply", query_id=message.query_id)
            return
        restore, hashes = question
        restore.unanswered.discard(message.query_id)
        if restore.closed:
            self._release(restore)
            return
        for one, place in zip(hashes, message.places, strict=True):
            if place is not None:
                restore.places[one] = place
        if not restore.unanswered:
            self._begin(restore)

    def read_ended(self, restore: RestoreTask) -> None:
        """Answer one that a reader has left, unless its time was over before."""
        restore.is_reading = False
        for one, cause in restore.unreadable:
            _log.warning("record_unreadable", block=one.hex(), cause=cause)
            self._outside.tell(QuarantineBlocks(hashes=[one], cause=cause[:4_000]))
        if restore.closed:
            self._release(restore)
        else:
            self._answer(restore, restore.stopped_by)

    def forget(self, restore_id: int) -> None:
        """Give up one that nobody will adopt."""
        restore = self._open.get(restore_id)
        if restore is not None:
            self._answer(restore, "late", keep=False)
        self._staging.forget(restore_id)

    def check_deadlines(self) -> None:
        """Answer those whose time is over with what is there."""
        now_s = self._outside.clock.now()
        for restore in list(self._open.values()):
            if now_s >= restore.deadline_at_s:
                self._answer(restore, "late")

    def stop(self) -> None:
        """The store is gone or off: answer all with what is there, forget what was asked."""
        for restore in list(self._open.values()):
            self._answer(restore, "off")

    def lose_session(self) -> None:
        """Nothing asked before will be answered, and nothing is pinned any more."""
        self.stop()
        self._questions.clear()
        self._session += 1

    def _locate(self, restore: RestoreTask, folder: NamespaceFolder) -> None:
        restore.folder, restore.session = folder, self._session
        hashes = restore.wanted()
        for first in range(0, len(hashes), limits.BLOCKS_PER_MESSAGE_MAX):
            part = hashes[first : first + limits.BLOCKS_PER_MESSAGE_MAX]
            self._query_id += 1
            if not self._outside.tell(LocateBlocks(query_id=self._query_id, hashes=part)):
                self._answer(restore, "off")
                return
            self._questions[self._query_id] = (restore, part)
            restore.query_ids.append(self._query_id)
            restore.unanswered.add(self._query_id)
        if not hashes:
            self._begin(restore)

    def _begin(self, restore: RestoreTask) -> None:
        taken = self._staging.size_bytes + sum(one.planned_bytes for one in self._open.values())
        restore.select_prefix(self._staging.bytes_max - taken)
        if restore.target_items == 0:
            self._answer(restore, restore.stopped_by)
            return
        restore.is_reading, restore.read_began_at_s = True, self._outside.clock.now()
        self._read(restore)

    def _answer(self, restore: RestoreTask, cause: Cause, *, keep: bool = True) -> None:
        """Close it: the scheduler hears once what can be adopted, and why not more."""
        order = restore.order
        count = restore.close(keep=keep)
        del self._open[order.restore_id]
        if count:
            self._staging.put(restore, count)
        self._outside.say(
            BlocksRestored(
                epoch=self._outside.epoch,
                rank=self._outside.rank,
                restore_id=order.restore_id,
                count=count,
                stopped_by="" if count == len(order.items) else cause,
                bytes_read=restore.bytes_read,
                read_ms=max(0.0, self._outside.clock.now() - restore.arrived_at_s) * 1e3,
            )
        )
        if not restore.is_reading:
            self._release(restore)

    def _release(self, restore: RestoreTask) -> None:
        """Unpin what is pinned for it; what the store has yet to answer, when it has."""
        if restore.session != self._session:
            return
        for query_id in restore.query_ids:
            if query_id not in restore.unanswered:
                self._outside.tell(ReleaseBlocks(query_id=query_id))
        restore.query_ids = [one for one in restore.query_ids if one in restore.unanswered]
