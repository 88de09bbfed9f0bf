"""The thread of documents: order of one owner, turns of owners, and waits of slow peers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cache_store import events
from services.cache_store.file_names import DocumentKey
from services.cache_store.files.directory import Directory
from services.cache_store.files.disk import Disk
from services.cache_store.files.document_thread import DocumentThread
from shared.identifiers import PeerId
from tests.support.waiting import wait_until

ANNA, BEN = "aa" * 16, "bb" * 16
SLOW, FAST = PeerId(b"slow"), PeerId(b"fast")


class RunningThread:
    """A thread on a real directory."""

    def __init__(self, path: Path) -> None:
        self.directory = Directory(path, 2**30, "")
        self.directory.open()
        self.woken = threading.Event()
        self.thread = DocumentThread(Disk(self.directory), self.woken.set)
        self.results: list[events.Event] = []

    def write(self, owner: str, name: str, data: bytes = b"x") -> None:
        """Let a document be written."""
        self.thread.add(events.WriteDocument(FAST, DocumentKey(owner, name), 1, data))

    def read(self, owner: str, name: str, peer: PeerId = FAST) -> None:
        """Let a document be read."""
        self.thread.add(events.LoadDocument(peer, 1, DocumentKey(owner, name), 1))

    def run(self, *slow: PeerId) -> list[str]:
        """Run until nothing can be done; return its actions, each as `<owner's letter><name>`."""
        first = len(self.results)
        while True:
            self.woken.clear()
            self.thread.start_next(lambda peer: peer not in slow)
            if self.thread._running is None:
                break
            wait_until(self.woken.is_set, 10.0, failure="the action does not end")
            self.results += self.thread.take_results()
        done: list[str] = []
        for result in self.results[first:]:
            assert isinstance(result, events.DocumentWritten | events.DocumentLoaded)
            done.append(result.action.key.owner[0] + result.action.key.name)
        return done


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningThread]:
    """Return a thread without actions."""
    started = RunningThread(tmp_path / "blocks")
    yield started
    started.thread.finish()
    started.directory.release()


def test_owners_take_turns_and_the_actions_of_each_stay_in_order(running: RunningThread) -> None:
    """Many documents of one owner delay another owner's by one at most."""
    for name in "123":
        running.write(ANNA, name)
    running.read(ANNA, "3")
    running.write(BEN, "1")
    assert running.run() == ["a1", "b1", "a2", "a3", "a3"]
    assert isinstance(loaded := running.results[-1], events.DocumentLoaded)
    assert loaded.data == b"x"
    assert running.thread.is_idle


def test_no_document_is_read_for_a_peer_that_does_not_keep_up(running: RunningThread) -> None:
    """Its documents wait on the disk and not in memory; other peers are served."""
    running.write(ANNA, "1")
    running.read(ANNA, "1", SLOW)
    running.write(BEN, "1")
    running.read(BEN, "1")
    assert running.run(SLOW) == ["a1", "b1", "b1"]
    assert not running.thread.is_idle
    assert running.run() == ["a1"]


def test_documents_that_wait_are_written_at_the_end(running: RunningThread) -> None:
    """A gateway that ended before the store has lost nothing."""
    for name in "123":
        running.write(ANNA, name)
    running.read(ANNA, "1", SLOW)
    running.thread.finish()
    files = sorted(path.name for path in running.directory.path.glob("documents/*/*"))
    assert files == ["1.document", "2.document", "3.document"]
