"""Link to the cache store, whose capacity tenants share."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.links import document_client
from services.gateway.links.document_client import DocumentClient
from shared.configuration.settings import CacheConfig, Config
from shared.errors import UnavailableError
from shared.identifiers import PeerId
from shared.messages import (
    DocumentKept,
    DocumentRead,
    KeepDocument,
    QueryStore,
    ReadDocument,
    StoreReported,
    ToStore,
)
from shared.transport.links import Listener, Received

_DOCUMENT = bytes(1_000_000)


class SilentStore:
    """A store that answers documents only when it is told to."""

    def __init__(self, address: str) -> None:
        self._link: Listener[msgspec.Struct] = Listener(address, ToStore)
        self._gateway = PeerId(b"")
        self.kept: list[KeepDocument] = []
        self.asked: list[ReadDocument] = []

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Receive messages until a condition holds."""
        async with asyncio.timeout(10.0):
            while not condition():
                for event in self._link.poll(0.0):
                    match event:
                        case Received(peer=peer, message=QueryStore()):
                            self._gateway = peer
                            self._link.send(peer, _REPORT)
                        case Received(message=KeepDocument() as order):
                            self.kept.append(order)
                        case Received(message=ReadDocument() as question):
                            self.asked.append(question)
                await asyncio.sleep(0.005)

    def answer(self, *, is_accepted: bool) -> None:
        """Answer all documents."""
        for order in self.kept:
            answer = DocumentKept(
                owner=order.owner, name=order.name, accepted=is_accepted, detail=""
            )
            self._link.send(self._gateway, answer)
        self.kept.clear()

    def send_document(self) -> None:
        """Answer the oldest question with a document."""
        answer = DocumentRead(query_id=self.asked.pop(0).query_id, data=_DOCUMENT)
        self._link.send(self._gateway, answer)

    def close(self) -> None:
        """End the session."""
        self._link.close(0.0)


_REPORT = StoreReported(
    on=True,
    cause="",
    directory="/",
    bytes_used=0,
    bytes_max=0,
    records=0,
    namespaces=0,
    foreign_files=0,
    started_s=0.0,
    counters={},
)

Scenario = Callable[[DocumentClient, SilentStore], Coroutine[Any, Any, None]]


def _run(tmp_path: Path, scenario: Scenario) -> None:
    address = f"ipc://{tmp_path}/store.sock"

    async def run() -> None:
        store = SilentStore(address)
        client = DocumentClient(Config(cache=CacheConfig(store_address=address)))
        client.start()
        try:
            await store.wait_for(lambda: client.is_on)
            await scenario(client, store)
        finally:
            store.close()
            client.close()

    asyncio.run(run())


def _keep_all(client: DocumentClient, owner: str) -> int:
    """Keep documents until one is refused; return how many were sent."""
    sent = 0
    while client.keep(owner, f"resp_{sent}", _DOCUMENT):
        sent += 1
    return sent


@pytest.mark.parametrize("is_accepted", [True, False])
def test_owner_with_many_unwritten_documents_leaves_room_for_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
) -> None:
    """A flood fills a part of the link, and the store's answers make room again."""
    monkeypatch.setattr(document_client, "KEEPING_BYTES_MAX", 8 * len(_DOCUMENT))

    async def scenario(client: DocumentClient, store: SilentStore) -> None:
        assert _keep_all(client, "anna") == 6
        assert client.keep("ben", "resp_0", _DOCUMENT)
        await store.wait_for(lambda: len(store.kept) == 7)
        store.answer(is_accepted=is_accepted)
        await store.wait_for(lambda: client.keep("anna", "resp_9", _DOCUMENT))
        await store.wait_for(lambda: len(store.kept) == 1)
        assert _keep_all(client, "anna") == 5

    _run(tmp_path, scenario)


def test_owner_that_asks_for_many_documents_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner has a largest number of open reads; the next one is refused at once."""
    monkeypatch.setattr(document_client, "READING_MAX", 8)
    monkeypatch.setattr(document_client, "ANSWER_S_MAX", 0.2)

    async def scenario(client: DocumentClient, _store: SilentStore) -> None:
        reads = [client.load("anna", f"resp_{number}") for number in range(7)]
        reads.append(client.load("ben", "resp_0"))
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(result, UnavailableError) for result in results)
        refused = [number for number, result in enumerate(results) if "Too much" in str(result)]
        assert refused == [6]

    _run(tmp_path, scenario)


def test_document_of_one_owner_is_asked_for_while_another_reads_many(tmp_path: Path) -> None:
    """Documents arrive one after the other, so the store is asked for few of one owner at once."""

    async def scenario(client: DocumentClient, store: SilentStore) -> None:
        reads = [asyncio.create_task(client.load("anna", f"resp_{one}")) for one in range(6)]
        await store.wait_for(lambda: len(store.asked) == 3)
        reads.append(asyncio.create_task(client.load("ben", "resp_b")))
        await store.wait_for(lambda: len(store.asked) == 4)
        names = [one.name for one in store.asked]
        assert names == ["resp_0", "resp_1", "resp_2", "resp_b"]
        reads.pop(3).cancel()  # it waits for its turn, and one that has its turn comes next
        reads.pop(1).cancel()
        await store.wait_for(lambda: len(store.asked) == 5)
        assert store.asked[-1].name == "resp_4"

        def have_all_arrived() -> bool:
            if store.asked:
                store.send_document()
            return all(read.done() for read in reads)

        await store.wait_for(have_all_arrived)
        assert await asyncio.gather(*reads) == [_DOCUMENT] * 5

    _run(tmp_path, scenario)
