"""The link to this host's cache store. Owns the tier's state in one thread; reads no file.

Every order is answered, without a store immediately with "off" or "lost".
"""

import contextlib
import dataclasses
import os
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from services.rank_worker.kv_cache.blocks.items import SpillItem
from services.rank_worker.kv_cache.stored.context import TierContext, TierSettings
from services.rank_worker.kv_cache.stored.disk_threads import DiskThreads
from services.rank_worker.kv_cache.stored.record_files import Allocate, NamespaceFolder
from services.rank_worker.kv_cache.stored.restore_queue import RestoreQueue
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from services.rank_worker.kv_cache.stored.spill_queue import SpillFile, SpillQueue
from services.rank_worker.kv_cache.stored.staging import Staging
from shared.clock import Clock
from shared.errors import LinkFull, PeerUnknown
from shared.log import Log
from shared.messages import (
    BlocksCommitted,
    BlocksLocated,
    FromStore,
    Message,
    NamespaceOpened,
    OpenNamespace,
    SpillOrder,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Lost, Received

_log = Log("rank_worker.stored")

IDLE_S = 1.0
"""Longest sleep of the thread; `post` wakes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpillRequest:
    """A plan's spill order with its payloads, which the main thread posts to the store link."""

    order: SpillOrder
    items: list[SpillItem]


@dataclasses.dataclass(frozen=True, slots=True)
class ForgetRestore:
    """Message of the main thread to the store link: no plan will adopt this restore."""

    restore_id: int


Post = SpillRequest | RestoreTask | ForgetRestore | SpillFile
"""Posts of other threads: orders and finished disk work."""


class StoreLink:
    """The thread that talks to this host's cache store on behalf of one rank.

    `start`, `close` and `post` are for other threads.
    """

    def __init__(
        self,
        settings: TierSettings,
        send_to_scheduler: Callable[[Message], None],
        allocate: Allocate,
        staging: Staging,
        clock: Clock,
    ) -> None:
        """Open the link; `start` starts the thread.

        Args:
            settings: the tier's settings.
            send_to_scheduler: sends a message without waiting; called by any thread.
            allocate: allocates the memory that records are read into.
            staging: receives restored items.
            clock: monotonic time.

        Raises:
            ConfigError: the store's address is not allowed.
        """
        self._settings = settings
        self._clock = clock
        self._link: Dialer[FromStore] = Dialer(
            settings.store_address,
            "store-client",
            FromStore,
            clock,
            keys_dir=settings.keys_dir,
            listener="store",
        )
        self._posted: queue.SimpleQueue[Post] = queue.SimpleQueue()
        self._context = TierContext(
            settings.rank, settings.epoch, clock, send_to_scheduler, self._send
        )
        self._staging = staging
        self.disk = DiskThreads(clock, allocate, self.post)
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
        self._restores = RestoreQueue(self._context, self.disk.read, self._staging)
        self._spills = SpillQueue(
            self._context,
            self.disk.write,
            self.disk.delete,
            bytes_max=self._settings.spill_bytes_max,
            file_prefix=self._file_prefix,
        )

    def start(self) -> None:
        """Start the threads: they connect to the store and serve until `close`."""
        self.disk.start()
        self._thread.start()

    def close(self) -> None:
        """Disconnect and end the threads. Orders are not answered any more."""
        self._is_closing = True
        self.post(ForgetRestore(-1))
        self._thread.join()

    def post(self, post: Post) -> None:
        """Pass an order or finished disk work to the link's thread without waiting. Thread-safe."""
        self._posted.put(post)
        if not self._is_closed:
            self._link.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_once()
        except Exception:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("stored_tier_failed")
            self._run_without_store()
        self._is_closed = True
        self._link.close(0.0)
        self.disk.close()

    def _run_once(self) -> None:
        for event in self._link.poll(self._wait_s()):
            self._handle_event(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle_post(self._posted.get_nowait())
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
            post = self._posted.get()
            with contextlib.suppress(Exception):
                self._handle_post(post)

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

    def _handle_post(self, post: Post) -> None:
        match post:
            case SpillRequest(order=order, items=items):
                self._ensure_namespace(order.namespace)
                self._spills.add(order, items, can_write=self._store in ("opening", "on"))
            case RestoreTask(is_reading=False):
                self._ensure_namespace(post.order.namespace)
                self._restores.add(post, self._folder)
                if self._store not in ("opening", "on"):
                    self._restores.stop()
            case RestoreTask():
                self._restores.finish_reading(post)
            case ForgetRestore(restore_id=restore_id):
                self._restores.forget(restore_id)
            case SpillFile():
                self._spills.finish_write(post, self._folder)

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
        self._folder = NamespaceFolder(
            message.namespace,
            self._settings.rank,
            self._settings.world_size,
            Path(message.folder),
        )
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
        try:
            self._link.send(message, self._settings.epoch)
        except (LinkFull, PeerUnknown):
            return False
        return True
