"""A real `lockstep cache-store` process, and a peer that speaks for a rank."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

from services.commands import main
from shared.block_record import (
    HEADER_BYTES,
    RecordIdentity,
    RecordUnreadable,
    check_record,
)
from shared.messages import (
    BlockPlace,
    BlocksCommitted,
    BlocksLocated,
    CommitBlocks,
    FromStore,
    LocateBlocks,
    NamespaceOpened,
    OpenNamespace,
    QueryStore,
    ReleaseBlocks,
    StoreReported,
    ToStore,
    WrittenRecord,
)
from shared.os.lifeline import VARIABLE
from shared.transport.links import Connected, Dialer, Lost, Received
from tests.support.waiting import poll_until
from tests.unit.cache_store.harness import NAMESPACE, payload_of, record_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
A = TypeVar("A")


class RunningStore:
    """One store process at a time, on one directory and address."""

    def __init__(self, home: Path, **settings: str) -> None:
        """Prepare; `start` starts it.

        Args:
            home: short enough for a socket's path.
            settings: environment overrides, for example CACHE_SSD_BYTES_MAX="1000".
        """
        self.directory = home / "blocks"
        self.run_dir = home / "run"
        self.address = f"ipc://{self.run_dir}/store.sock"
        self.environment = {
            **os.environ,
            "LOCKSTEP_PATHS_RUN_DIR": str(self.run_dir),
            "LOCKSTEP_CACHE_DIRECTORY": str(self.directory),
            **{f"LOCKSTEP_{name}": value for name, value in settings.items()},
        }
        self.program: tuple[str, ...] = ("-m", "services.commands.main")
        """Arguments with which Python runs `lockstep`."""
        self.log = home / "log"
        self.process: subprocess.Popen[bytes] | None = None
        # The store ends when this pipe closes, also if this test process is killed.
        self._lifeline, self._lifeline_end = os.pipe()

    def start(self) -> None:
        """Start the process."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "cache-store"],
                cwd=ROOT,
                env={**self.environment, VARIABLE: str(self._lifeline)},
                pass_fds=[self._lifeline],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask the process to end; return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another `lockstep` command with the same configuration to its end."""
        return subprocess.run(
            [sys.executable, "-m", "services.commands.main", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def cache(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `lockstep cache` in this process; starting a new one takes half a second."""
        command = ["cache", *arguments]
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ, self.environment),
        ):
            code = main.main(command)
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    @property
    def text(self) -> str:
        """Everything that the processes have logged."""
        return self.log.read_text(encoding="utf-8")

    def close(self) -> None:
        """Kill the process and close the lifeline."""
        if self.is_alive:
            self.kill()
        os.close(self._lifeline)
        os.close(self._lifeline_end)


class Peer:
    """A rank's side of the store: writes and reads files, and checks every byte that it reads."""

    def __init__(
        self,
        store: RunningStore,
        rank: int = 0,
        world_size: int = 1,
        namespace: str = NAMESPACE,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.namespace = namespace
        self._store = store
        self.folder = ""
        self.reports: list[StoreReported] = []
        self.sessions = 0
        self._link: Dialer[FromStore] = Dialer(store.address, f"rank-{rank}", FromStore)
        self._answers: list[FromStore] = []
        self._numbers = 0

    def connect(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the store is connected and on."""
        failure = "the store is not connected or is off"
        self.poll_until(lambda: bool(self.folder), deadline_s, failure=failure)

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""
        return self._link.is_connected

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process arrived messages; open the namespace when a session begins."""
        for event in self._link.poll(timeout_s):
            match event:
                case Connected():
                    self.sessions += 1
                    self._link.send(
                        OpenNamespace(
                            namespace=self.namespace, rank=self.rank, world_size=self.world_size
                        )
                    )
                case Lost():
                    self.folder = ""
                    self._answers.clear()
                case Received(message=NamespaceOpened() as opened):
                    self.folder = opened.folder
                case Received(message=StoreReported() as report):
                    self.reports.append(report)
                case Received():
                    self._answers.append(event.message)

    def poll_until(
        self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S, *, failure: str
    ) -> None:
        """Poll until `condition` holds; fail with `failure` after `deadline_s` seconds."""
        poll_until(lambda: self.poll(0.05), condition, deadline_s, failure=failure)

    def ask(self, message: ToStore, answer: type[A]) -> A | None:
        """Send a message and return its answer, or None if the store is lost before it comes."""
        session = self.sessions
        if not self._link.is_connected:
            return None
        self._link.send(message)

        def is_over() -> bool:
            # A link is lost 10 s after the process ends; there is no need to wait for that.
            connected = session == self.sessions and self.is_connected and self._store.is_alive
            return not connected or any(isinstance(one, answer) for one in self._answers)

        self.poll_until(is_over, failure=f"no {answer.__name__}")
        for place, received in enumerate(self._answers):
            if isinstance(received, answer):
                del self._answers[place]
                return received
        return None

    def send(self, message: ToStore) -> None:
        """Send a message that has no answer."""
        self._link.send(message)

    def report(self) -> StoreReported:
        """Return the store's state."""
        before = len(self.reports)
        self._link.send(QueryStore())
        self.poll_until(lambda: len(self.reports) > before, failure="no report")
        return self.reports[-1]

    def wait_for_notice(self, *, on: bool, deadline_s: float) -> float:
        """Wait for the store's own notice that it is on or off; return the seconds it took."""
        began_s = time.monotonic()
        self.poll_until(
            lambda: on in [report.on for report in self.reports],
            deadline_s,
            failure=f"the store is not {'on' if on else 'off'}",
        )
        return time.monotonic() - began_s

    def write(self, *hashes: bytes, size_bytes: int = 200) -> CommitBlocks:
        """Write a file with these records; return the request to take it over."""
        records: list[WrittenRecord] = []
        data = b""
        for block_hash in hashes:
            record = record_of(self.identity(block_hash), size_bytes)
            records.append(WrittenRecord(hash=block_hash, offset=len(data), size_bytes=len(record)))
            data += record
        self._numbers += 1
        name = f"partial-{self._numbers}"
        (Path(self.folder) / name).write_bytes(data)
        return CommitBlocks(name=name, records=records)

    def commit(self, *hashes: bytes, size_bytes: int = 200) -> BlocksCommitted | None:
        """Write a file and commit it; return None when the store or the folder is lost."""
        try:
            request = self.write(*hashes, size_bytes=size_bytes)
        except OSError:
            return None
        return self.ask(request, BlocksCommitted)

    def locate(self, *hashes: bytes) -> tuple[int, list[BlockPlace | None]]:
        """Ask where records are; a lost store gives None for each place."""
        self._numbers += 1
        query = LocateBlocks(query_id=self._numbers, hashes=list(hashes))
        located = self.ask(query, BlocksLocated)
        return self._numbers, located.places if located is not None else [None] * len(hashes)

    def has(self, *hashes: bytes) -> list[bool]:
        """Return for each record whether it can be located and is whole."""
        query_id, places = self.locate(*hashes)
        found = [
            self.read(place, block_hash) if place is not None else False
            for place, block_hash in zip(places, hashes, strict=True)
        ]
        if self._link.is_connected:
            self.send(ReleaseBlocks(query_id=query_id))
        return found

    def read(self, place: BlockPlace, block_hash: bytes) -> bool:
        """Read and check a record; return False for a miss and fail the test for wrong bytes."""
        try:
            with (Path(self.folder) / place.name).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.size_bytes)
            _, payload = check_record(data, self.identity(block_hash))
        except (OSError, RecordUnreadable):
            return False
        assert bytes(payload) == payload_of(block_hash, place.size_bytes - HEADER_BYTES)
        return True

    def identity(self, block_hash: bytes) -> RecordIdentity:
        """Return the identity that this rank's record of a hash must have."""
        return RecordIdentity(self.namespace, self.rank, self.world_size, block_hash, "block", 16)

    def close(self) -> None:
        """Close the link with a goodbye."""
        with contextlib.suppress(OSError):
            self._link.close(wait_s=0.0)
