"""The cache store's shell. Receives messages, calls the core, performs its actions.

The scan of the directory has a thread of its own, because it takes seconds; meanwhile peers are
told that the store is off. Documents have one too, so that no rank waits for them.
"""

import contextlib
import signal
import threading
import time
from collections import deque

from services.cache_store import events
from services.cache_store.core import StoreCore
from services.cache_store.files.directory import Directory, DirectoryHeld
from services.cache_store.files.disk import Disk
from services.cache_store.files.document_thread import DocumentThread
from services.cache_store.records.documents import DocumentLimits
from shared import limits, log
from shared.clock import SystemClock
from shared.configuration.loading import prepare_run_dir
from shared.configuration.settings import Config
from shared.errors import ConfigError, LinkFull, PeerUnknown
from shared.identifiers import PeerId
from shared.messages import ToStore
from shared.os import lifeline
from shared.transport.links import Listener, Lost

_TICK_S = 0.1

DOCUMENT_BYTES_UNACKED_MAX = 32 * 1024 * 1024
"""Unacknowledged bytes of a peer above which no document is read for it. A document more is far
below the link's own bound, beyond which the peer would be dropped."""

CLAIM_WAIT_S = 1.0
"""Seconds to retry a locked directory: a killed predecessor may hold the lock until the kernel has
ended it."""


class Shell:
    """Feeds messages, disk results and ticks to the core, and performs the core's actions."""

    def __init__(self, config: Config, directory: Directory) -> None:
        """Bind the store's address. `run` then serves it.

        Args:
            config: all settings.
            directory: the store's directory, which this process has locked if its disk was usable.

        Raises:
            ConfigError: the address is not available.
        """
        self._clock = SystemClock()
        self._log = log.Log("cache_store")
        documents_bytes_max = config.cache.responses_bytes_max
        document_limits = DocumentLimits(
            bytes_max=documents_bytes_max,
            owner_bytes_max=int(documents_bytes_max * config.tenants.share),
            ttl_s=config.cache.responses_ttl_s,
        )
        self._core = StoreCore(str(directory.path), config.cache.ttl_s, document_limits)
        self._disk = Disk(directory)
        self._link: Listener[ToStore] = Listener(
            config.store_address,
            ToStore,
            keys_dir=config.keys_dir,
            roles=("store-client", "cache", "gateway"),
        )
        self._events: deque[events.Event] = deque()
        self._documents = DocumentThread(Disk(directory), self._link.wake)
        self._must_open = False
        """The directory is opened as soon as no document is being written."""
        self._opened: deque[events.Event | BaseException] = deque()
        """Results of the thread that opens the directory."""
        self._must_stop = False

    def run(self) -> int:
        """Serve until `stop` is called; return the exit code."""
        ticked_at_s = float("-inf")
        while not self._must_stop:
            for event in self._link.poll(_TICK_S):
                self._handle(event)
            for result in self._documents.take_results():
                self._handle(result)
            while self._opened:
                opened = self._opened.popleft()
                if isinstance(opened, BaseException):
                    raise opened
                self._handle(opened)
            if self._clock.now() - ticked_at_s >= _TICK_S:
                ticked_at_s = self._clock.now()
                self._handle(events.TimePassed())
            self._documents.start_next(self._may_read_for)
            if self._must_open and self._documents.is_idle:
                self._must_open = False
                threading.Thread(target=self._open, name="open", daemon=True).start()
        self._documents.finish()
        self._link.close(wait_s=0.0)
        return limits.EXIT_OK

    def stop(self) -> None:
        """Make `run` return after the events already received. Safe in a signal handler."""
        self._must_stop = True
        self._link.wake()

    def _handle(self, event: events.Event) -> None:
        """Handle an event and all events that its actions cause."""
        self._events.append(event)
        while self._events:
            for action in self._core.handle(self._events.popleft(), self._clock.now()):
                self._perform(action)

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Send():
                self._send(action)
            case events.WriteLog():
                getattr(self._log, action.level)(action.event, **action.fields)
            case events.OpenDirectory():
                self._must_open = True
            case events.WriteDocument() | events.LoadDocument() | events.RemoveDocument():
                self._documents.add(action)
            case _:
                self._events.extend(self._disk.perform(action))

    def _send(self, action: events.Send) -> None:
        try:
            self._link.send(action.peer, action.message)
        except PeerUnknown:
            # The peer has left; its Lost event will release its pins.
            pass
        except LinkFull as error:
            self._log.warning("peer_too_slow", peer=action.peer, detail=str(error))
            self._link.drop(action.peer)
            self._events.append(Lost(action.peer, str(error)))

    def _may_read_for(self, peer: PeerId) -> bool:
        return self._link.unacknowledged_bytes(peer) <= DOCUMENT_BYTES_UNACKED_MAX

    def _open(self) -> None:
        try:
            self._opened.append(self._disk.open())
        except BaseException as error:  # noqa: BLE001 - the main thread raises it again
            self._opened.append(error)
        self._link.wake()


def run(config: Config) -> int:
    """Run the cache store until it is told to stop; return the exit code.

    Raises:
        ConfigError: it is switched off, or its directory or address is not available.
    """
    lifeline.exit_with_parent()
    log.set_up("store", config.log, config.log_directory)
    if not (config.cache.enabled and config.cache.ssd):
        key = "cache.ssd" if config.cache.enabled else "cache.enabled"
        raise ConfigError(f"{key} is off, so a cache store has no blocks to keep. Set it to true.")
    prepare_run_dir(config)
    directory = Directory(config.cache_directory, config.cache.ssd_bytes_max, config.store_address)
    _claim(directory)
    shell = Shell(config, directory)
    signal.signal(signal.SIGTERM, lambda *_: shell.stop())
    signal.signal(signal.SIGINT, lambda *_: shell.stop())
    return shell.run()


def _claim(directory: Directory) -> None:
    """Lock the directory, waiting for a predecessor that is ending.

    Raises:
        ConfigError: another process has locked it, or this user cannot use it.
    """
    until_s = time.monotonic() + CLAIM_WAIT_S
    while True:
        try:
            # A full or read-only disk may be usable later; the core tries again.
            with contextlib.suppress(OSError):
                directory.claim()
        except DirectoryHeld:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return
