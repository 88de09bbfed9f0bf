"""The link to this host's cache store, in a thread that holds the tier's state and reads no file.

Whatever the store does, orders are answered: without a store at once, with "off" and "lost".
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

from services.rank_worker.kv_cache.blocks.transfer import SpillItem
from services.rank_worker.kv_cache.stored.disk_threads import DiskThreads
from services.rank_worker.kv_cache.stored.folder import NamespaceFolder
from services.rank_worker.kv_cache.stored.record_files import Allocate
from services.rank_worker.kv_cache.stored.restore_queue import RestoreQueue, TierContext
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
"""How long the thread sleeps at most; what is posted wakes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpillRequest:
    """Posted by the main thread: a plan's order and what it names."""

    order: SpillOrder
    items: list[SpillItem]


@dataclasses.dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Posted by the main thread: a plan adopts nothing of this restore."""

    restore_id: int


Post = SpillRequest | RestoreTask | ForgetBlocks | SpillFile
"""What other threads tell the link: orders, and finished disk work."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierSettings:
    """What one rank's stored tier must know."""

    store_address: str
    epoch: int
    rank: int
    world_size: int
    spill_bytes_max: int
    """Payloads that wait to be written."""
    keys_dir: Path | None = None
    """This host's keys, for a store that listens on tcp."""


class StoreLink:
    """The thread. `post` is for other threads, everything else for this one."""

    def __init__(
        self,
        settings: TierSettings,
        say: Callable[[Message], None],
        allocate: Allocate,
        staging: Staging,
        clock: Clock,
    ) -> None:
        """Open the link; `start` begins to use it.

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
        self._outside = TierContext(settings.rank, settings.epoch, clock, say, self._tell)
        self._staging = staging
        self.disk = DiskThreads(clock, allocate, self.post)
        self._thread = threading.Thread(target=self._run, name="stored-link", daemon=True)
        self._is_closing = False
        self._is_closed = False
        self._file_prefix = f"partial-{os.getpid()}-{secrets.token_hex(4)}"
        self._begin()
        self._namespace: str | None = None
        """The one that was asked for last; None: no order has named any."""
        self._folder: NamespaceFolder | None = None
        """Set while the store is there and on."""
        self._store: Literal["away", "opening", "off", "on", "failed"] = "away"

    def _begin(self) -> None:
        self._restores = RestoreQueue(self._outside, self.disk.read, self._staging)
        self._spills = SpillQueue(
            self._outside,
            self.disk.write,
            self.disk.delete,
            bytes_max=self._settings.spill_bytes_max,
            file_prefix=self._file_prefix,
        )

    def start(self) -> None:
        """Dial, and serve until the process ends."""
        self.disk.start()
        self._thread.start()

    def close(self) -> None:
        """Leave the store and end the threads that do not hang; nothing is answered any more."""
        self._is_closing = True
        self.post(ForgetBlocks(-1))
        self._thread.join()

    def post(self, post: Post) -> None:
        """Hand something over, without waiting. Thread-safe."""
        self._posted.put(post)
        if not self._is_closed:
            self._link.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("stored_tier_failed")
            self._run_without_store()
        self._is_closed = True
        self._link.close(0.0)
        self.disk.close()

    def _turn(self) -> None:
        for event in self._link.poll(self._wait_s()):
            self._take_event(event)
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_post(self._posted.get_nowait())
        self._restores.check_deadlines()
        self._spills.check_deadlines()
        self._spills.go_on(self._folder, is_restoring=bool(self._restores))

    def _run_without_store(self) -> None:
        """Answer what is open and all that comes. The link is left alone; nothing of it is known.

        After a bug of ours, which is logged: serving goes on, without this tier.
        """
        self._store, self._folder = "failed", None
        for lose_session in (self._restores.lose_session, self._spills.lose_session):
            with contextlib.suppress(Exception):
                lose_session()
        self._begin()
        while not self._is_closing:
            post = self._posted.get()
            with contextlib.suppress(Exception):
                self._take_post(post)

    def _wait_s(self) -> float:
        now_s = self._clock.now()
        ends = (self._restores.next_deadline_at_s, self._spills.next_deadline_at_s)
        return max(0.0, min([IDLE_S, *(at_s - now_s for at_s in ends if at_s is not None)]))

    def _take_event(self, event: LinkEvent[FromStore]) -> None:
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
                self._take_opened(message)
            case Received(message=BlocksLocated() as message):
                self._restores.located(message)
            case Received(message=BlocksCommitted() as message):
                self._spills.committed(message)

    def _take_post(self, post: Post) -> None:
        match post:
            case SpillRequest(order=order, items=items):
                self._need(order.namespace)
                self._spills.add(order, items, can_write=self._store in ("opening", "on"))
            case RestoreTask(is_reading=False):
                self._need(post.order.namespace)
                self._restores.add(post, self._folder)
                if self._store not in ("opening", "on"):
                    self._restores.stop()
            case RestoreTask():
                self._restores.read_ended(post)
            case ForgetBlocks(restore_id=restore_id):
                self._restores.forget(restore_id)
            case SpillFile():
                self._spills.written(post, self._folder)

    def _take_opened(self, message: NamespaceOpened) -> None:
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

    def _need(self, namespace: str) -> None:
        """Have the store open a namespace unless it is the one that was asked for last."""
        if namespace != self._namespace and self._store != "failed":
            self._namespace, self._folder = namespace, None
            if self._store != "away":
                self._open(namespace)

    def _open(self, namespace: str) -> None:
        order = OpenNamespace(
            namespace=namespace, rank=self._settings.rank, world_size=self._settings.world_size
        )
        if self._tell(order):
            self._store = "opening"
        else:
            # The next order asks again.
            self._store, self._namespace = "off", None

    def _tell(self, message: Message) -> bool:
        try:
            self._link.send(message, self._settings.epoch)
        except (LinkFull, PeerUnknown):
            return False
        return True
