"""The stored tier's interface for the rank, and the thread that talks to this host's cache store.

No call waits for disk or store, and the thread reads no file. Every order is answered, without a
store immediately with "off" or "lost".
"""

import contextlib
import functools
import os
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from services.rank_worker.kv_cache.blocks.items import CachedItem, SpillItem
from services.rank_worker.kv_cache.stored.context import TierContext, TierSettings
from services.rank_worker.kv_cache.stored.disk_threads import DiskThreads
from services.rank_worker.kv_cache.stored.record_files import Allocate, BlockBytes, NamespaceFolder
from services.rank_worker.kv_cache.stored.restore_queue import RestoreQueue
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from services.rank_worker.kv_cache.stored.spill_queue import SpillFile, SpillQueue
from services.rank_worker.kv_cache.stored.staging import Staging
from shared.clock import Clock, SystemClock
from shared.errors import LinkFull, PeerUnknown
from shared.log import Log
from shared.messages import (
    AdoptedRestore,
    BlocksCommitted,
    BlocksLocated,
    FromStore,
    Message,
    NamespaceOpened,
    OpenNamespace,
    RestoreBlocks,
    SpillOrder,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Lost, Received

_log = Log("rank_worker.stored")

IDLE_S = 1.0
"""Longest sleep of the tier's thread; orders wake it."""


class StoredTier:
    """Writes spilled blocks of one rank to SSD and restores stored ones, through the cache store.

    Every hash of a spill order is reported once (BlocksSpilled). Every restore is answered once, at
    its deadline at the latest (BlocksRestored). Disk and store errors only change these reports.
    """

    def __init__(
        self,
        settings: TierSettings,
        send_to_scheduler: Callable[[Message], None],
        allocate: Allocate,
        *,
        is_on: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Open the link to the store; `start` begins to use it.

        Args:
            settings: the tier's settings.
            send_to_scheduler: sends a message without waiting; called by any thread.
            allocate: allocates the memory that records are read into.
            is_on: use the store; otherwise orders are answered with "lost" and "off".
            clock: monotonic time.

        Raises:
            ConfigError: the store's address is not allowed.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._link: Dialer[FromStore] | None = None
        if is_on:
            self._link = Dialer(
                settings.store_address,
                "store-client",
                FromStore,
                self._clock,
                keys_dir=settings.keys_dir,
                listener="store",
            )
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls that other threads post for this tier's thread."""
        self._context = TierContext(
            settings.rank, settings.epoch, self._clock, send_to_scheduler, self._send
        )
        self._staging = Staging()
        self._disk = DiskThreads(self._clock, allocate, self._post_done)
        self._thread = threading.Thread(target=self._run, name="stored-link", daemon=True)
        self._is_closing = False
        self._is_closed = False
        self._file_prefix = f"partial-{os.getpid()}-{secrets.token_hex(4)}"
        self._reset()
        self._namespace: str | None = None
        """The namespace opened last; None before the first order."""
        self._folder: NamespaceFolder | None = None
        """Set while the store is on and has opened the namespace."""
        self._store: Literal["away", "opening", "off", "on", "failed"] = "away"

    def _reset(self) -> None:
        self._restores = RestoreQueue(self._context, self._disk.read, self._staging)
        self._spills = SpillQueue(
            self._context,
            self._disk.write,
            self._disk.delete,
            bytes_max=self._settings.spill_bytes_max,
            file_prefix=self._file_prefix,
        )

    def start(self) -> None:
        """Connect to the store and start the threads, which run until the process ends."""
        if self._link is not None:
            self._disk.start()
            self._thread.start()

    def close(self) -> None:
        """Disconnect and end the threads, without answering more orders. Only tests need this."""
        if self._link is not None:
            self._is_closing = True
            self._post(lambda: None)
            self._thread.join()

    def expect(self, block_bytes: BlockBytes | None, staged_bytes_max: int) -> None:
        """Set the sizes that restored blocks must have, and the memory that they may take.

        Before the first call, restores are answered with 0 items, stopped by "full".

        Args:
            block_bytes: returns the payload bytes of a block of n tokens; blocks of other sizes are
                unreadable. None accepts every size.
            staged_bytes_max: most payload bytes that are being restored or not adopted yet.
        """
        self._staging.bytes_max = staged_bytes_max
        self._disk.block_bytes = block_bytes

    def spill(self, order: SpillOrder, items: list[SpillItem]) -> None:
        """Queue resident blocks to be written to SSD; for the main thread, after the plan's step.

        Args:
            order: the plan's spill order.
            items: the payloads that this rank holds; blocks without one are reported lost.
        """
        self._post(functools.partial(self._add_spill, order, items))

    def restore(self, order: RestoreBlocks) -> None:
        """Queue stored blocks to be read from SSD; the thread of the scheduler link calls it.

        Args:
            order: the scheduler's order, with hashes and a deadline.
        """
        restore = RestoreTask(order, self._clock.now())
        self._post(functools.partial(self._add_restore, restore))

    def take(self, adopted: AdoptedRestore) -> list[CachedItem]:
        """Remove and return the restored items that a plan adopts, in order. For the main thread.

        Args:
            adopted: the restore's id and the number of leading items; 0 discards the restore.

        Raises:
            InvariantBroken: this rank's answer had fewer items.
        """
        if adopted.count:
            return self._staging.take(adopted.restore_id, adopted.count)
        self._post(lambda: self._restores.forget(adopted.restore_id))
        return []

    def _post(self, call: Callable[[], None]) -> None:
        """Have the tier's thread make a call, without waiting for it. Thread-safe."""
        if self._link is None:
            # Without a store an order is answered at once; there is no thread.
            call()
            return
        self._posted.put(call)
        if not self._is_closed:
            self._link.wake()

    def _post_done(self, work: RestoreTask | SpillFile) -> None:
        self._post(functools.partial(self._finish, work))

    def _run(self) -> None:
        assert self._link is not None
        try:
            while not self._is_closing:
                self._run_once(self._link)
        except Exception:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("stored_tier_failed")
            self._run_without_store()
        self._is_closed = True
        self._link.close(0.0)
        self._disk.close()

    def _run_once(self, link: Dialer[FromStore]) -> None:
        for event in link.poll(self._wait_s()):
            self._handle_event(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._posted.get_nowait()()
        self._restores.check_deadlines()
        self._spills.check_deadlines()
        self._spills.write_next(self._folder, is_restoring=bool(self._restores))

    def _run_without_store(self) -> None:
        """Answer all open and later orders without the store, after an unexpected error.

        The rank continues to serve without this tier.
        """
        self._store, self._folder = "failed", None
        for lose_session in (self._restores.lose_session, self._spills.lose_session):
            with contextlib.suppress(Exception):
                lose_session()
        self._reset()
        while not self._is_closing:
            call = self._posted.get()
            with contextlib.suppress(Exception):
                call()

    def _wait_s(self) -> float:
        now_s = self._clock.now()
        deadlines = (self._restores.next_deadline_at_s, self._spills.next_deadline_at_s)
        return max(0.0, min([IDLE_S, *(at_s - now_s for at_s in deadlines if at_s is not None)]))

    def _handle_event(self, event: LinkEvent[FromStore]) -> None:
        match event:
            case Connected():
                _log.info("store_connected")
                self._store = "off"
                if self._namespace is not None:
                    self._open(self._namespace)
            case Lost(cause=cause):
                _log.warning("store_lost", cause=cause)
                self._store, self._folder = "away", None
                self._restores.lose_session()
                self._spills.lose_session()
            case Received(message=NamespaceOpened() as message):
                self._handle_opened(message)
            case Received(message=BlocksLocated() as message):
                self._restores.handle_located(message)
            case Received(message=BlocksCommitted() as message):
                self._spills.handle_committed(message)

    def _add_spill(self, order: SpillOrder, items: list[SpillItem]) -> None:
        self._ensure_namespace(order.namespace)
        self._spills.add(order, items, can_write=self._store in ("opening", "on"))

    def _add_restore(self, restore: RestoreTask) -> None:
        self._ensure_namespace(restore.order.namespace)
        self._restores.add(restore, self._folder)
        if self._store not in ("opening", "on"):
            self._restores.stop()

    def _finish(self, work: RestoreTask | SpillFile) -> None:
        if isinstance(work, SpillFile):
            self._spills.finish_write(work, self._folder)
        else:
            self._restores.finish_reading(work)

    def _handle_opened(self, message: NamespaceOpened) -> None:
        if message.namespace != self._namespace:
            return
        if not message.folder:
            if self._store != "off":
                _log.warning("store_off")
            self._store, self._folder = "off", None
            self._restores.stop()
            self._spills.lose_queue()
            return
        self._store = "on"
        rank, world_size = self._settings.rank, self._settings.world_size
        folder = Path(message.folder)
        self._folder = NamespaceFolder(message.namespace, rank, world_size, folder)
        _log.info("namespace_opened", namespace=message.namespace)
        self._restores.open(self._folder)

    def _ensure_namespace(self, namespace: str) -> None:
        """Open a namespace at the store unless it was opened last."""
        if namespace != self._namespace and self._store != "failed":
            self._namespace, self._folder = namespace, None
            if self._store != "away":
                self._open(namespace)

    def _open(self, namespace: str) -> None:
        message = OpenNamespace(
            namespace=namespace, rank=self._settings.rank, world_size=self._settings.world_size
        )
        if self._send(message):
            self._store = "opening"
        else:
            # The next order tries again.
            self._store, self._namespace = "off", None

    def _send(self, message: Message) -> bool:
        if self._link is None:
            return False
        try:
            self._link.send(message, self._settings.epoch)
        except (LinkFull, PeerUnknown):
            return False
        return True
