"""Thread that writes, reads and deletes documents. Owns whose turn it is; decides nothing else.

A document has up to 24 MB, and ranks wait for blocks of KV. So the thread that serves all peers
hands documents to this one. What concerns one owner happens in order, and owners take turns.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from services.cache_store import events
from services.cache_store.files.disk import Disk
from shared.identifiers import PeerId
from shared.tenants.tenant_queues import TenantQueues


class DocumentThread:
    """Performs actions one after another in its thread. Used from the main thread only."""

    def __init__(self, disk: Disk, wake: Callable[[], None]) -> None:
        """Begin without actions.

        Args:
            disk: performs the actions; no other thread uses it.
            wake: called in the thread when `take_results` has something to return.
        """
        self._disk = disk
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="documents")
        self._waiting: TenantQueues[events.DocumentAction] = TenantQueues()
        """Actions by owner."""
        self._running: Future[list[events.Event]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no action waits or runs, and no result was left."""
        return self._running is None and not self._waiting

    def add(self, action: events.DocumentAction) -> None:
        """Perform an action after all earlier ones of the document's owner."""
        self._waiting.add(action.key.owner, action)

    def start_next(self, may_read_for: Callable[[PeerId], bool]) -> None:
        """Start the next action if none runs.

        Args:
            may_read_for: whether a peer may be sent a document now. If it may not, the owner waits.
        """
        if self._running is not None:
            return
        action = self._waiting.take(
            lambda one: not isinstance(one, events.LoadDocument) or may_read_for(one.peer)
        )
        if action is not None:
            self._running = self._pool.submit(self._disk.perform, action)
            self._running.add_done_callback(lambda _: self._wake())

    def take_results(self) -> list[events.Event]:
        """Return the results of the action that has ended; [] if none has."""
        if self._running is None or not self._running.done():
            return []
        results = self._running.result()
        self._running = None
        return results

    def finish(self) -> None:
        """Perform everything that waits, but read nothing, and end the thread."""
        self._pool.shutdown()
        while (action := self._waiting.take()) is not None:
            if not isinstance(action, events.LoadDocument):
                self._disk.perform(action)
