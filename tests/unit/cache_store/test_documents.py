"""Documents that gateways keep in the store: their limits, ends and files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cache_store.events import DirectoryUnusable, DocumentWritten, WriteDocument
from services.cache_store.records.documents import FILE_OVERHEAD_BYTES, DocumentLimits
from shared.identifiers import PeerId
from shared.messages import (
    DeleteDocument,
    DocumentDeleted,
    DocumentKept,
    DocumentRead,
    KeepDocument,
    ReadDocument,
)
from shared.transport.link_events import Connected, Received
from tests.unit.cache_store.harness import NO_LIMIT, Store

ANNA, BEN, CARL = "aa" * 16, "bb" * 16, "cc" * 16
GATEWAY = PeerId(b"gateway-1")
SIZE_BYTES = 1_000
SPACE_BYTES = SIZE_BYTES + FILE_OVERHEAD_BYTES
"""Space that a document of `SIZE_BYTES` takes."""

MakeStore = Callable[..., "DocumentStore"]


class DocumentStore(Store):
    """The store's core with its disk, and a gateway connected to it."""

    def __init__(self, path: Path, limits: DocumentLimits) -> None:
        super().__init__(path, NO_LIMIT, 0.0, limits)
        self.handle(Connected(GATEWAY))

    def keep(self, owner: str, name: str, data: bytes = b"x" * SIZE_BYTES) -> str:
        """Store a document; return why it was refused, "" when it was not."""
        order = KeepDocument(owner=owner, name=name, data=data)
        [answer] = self.deliver(GATEWAY, order)
        assert isinstance(answer, DocumentKept)
        assert answer.accepted == (answer.detail == "")
        return answer.detail

    def read(self, owner: str, name: str) -> bytes | None:
        """Return a document."""
        [answer] = self.deliver(GATEWAY, ReadDocument(query_id=1, owner=owner, name=name))
        assert isinstance(answer, DocumentRead)
        return answer.data

    def delete(self, owner: str, name: str) -> bool:
        """Delete a document; return whether it existed."""
        [answer] = self.deliver(GATEWAY, DeleteDocument(query_id=1, owner=owner, name=name))
        assert isinstance(answer, DocumentDeleted)
        return answer.existed

    def document_files(self) -> list[str]:
        """Return the names of all files of documents."""
        return sorted(path.name for path in self.directory.path.glob("documents/*/*"))


@pytest.fixture
def make_documents(tmp_path: Path) -> Iterator[MakeStore]:
    """Create stores on one directory; the next one closes the previous one as a kill does."""
    stores: list[DocumentStore] = []

    def make(
        bytes_max: int = NO_LIMIT, owner_bytes_max: int = NO_LIMIT, ttl_s: float = 0.0
    ) -> DocumentStore:
        if stores:
            stores[-1].close()
        limits = DocumentLimits(bytes_max, owner_bytes_max, ttl_s)
        stores.append(DocumentStore(tmp_path / "blocks", limits))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_document_is_read_by_its_owner_until_it_is_deleted(make_documents: MakeStore) -> None:
    """A kept document comes back unchanged; another owner does not find it."""
    store = make_documents()
    assert store.keep(ANNA, "resp_1", b"one") == ""
    assert store.read(ANNA, "resp_1") == b"one"
    assert store.read(BEN, "resp_1") is None
    assert not store.delete(BEN, "resp_1")
    assert store.delete(ANNA, "resp_1")
    assert store.read(ANNA, "resp_1") is None
    assert not store.delete(ANNA, "resp_1")
    assert not list(store.directory.path.glob("documents/*"))


def test_later_document_of_one_name_replaces_the_earlier(make_documents: MakeStore) -> None:
    """A name has one document, and its bytes count once."""
    store = make_documents()
    store.keep(ANNA, "a", b"one")
    store.keep(ANNA, "a", b"two!")
    assert store.read(ANNA, "a") == b"two!"
    report = store.report()
    assert (report.documents, report.documents_bytes) == (1, 4 + FILE_OVERHEAD_BYTES)


def test_documents_survive_a_killed_store_in_the_order_of_their_use(
    make_documents: MakeStore,
) -> None:
    """A new process finds the files, and evicts those used longest ago first."""
    store = make_documents()
    for name in "abc":
        store.keep(ANNA, name)
    store.read(ANNA, "a")
    store = make_documents(bytes_max=2 * SPACE_BYTES + 100, owner_bytes_max=2 * SPACE_BYTES + 100)
    assert [store.read(ANNA, name) is not None for name in "abc"] == [True, False, True]
    assert store.document_files() == ["a.document", "c.document"]


def test_owner_beyond_its_part_loses_its_own_oldest_documents_only(
    make_documents: MakeStore,
) -> None:
    """No tenant can push out another tenant's documents with its part of the space."""
    store = make_documents(bytes_max=3 * SPACE_BYTES, owner_bytes_max=2 * SPACE_BYTES)
    store.keep(BEN, "old")
    for name in "abcd":
        assert store.keep(ANNA, name) == ""
    assert store.read(BEN, "old") is not None
    assert [store.read(ANNA, name) is not None for name in "abcd"] == [False, False, True, True]
    store.keep(BEN, "new")
    assert store.report().documents == 3
    assert store.report().counters["evicted_documents_total"] == 3


def test_owner_with_the_most_bytes_makes_room_for_another_owner(
    make_documents: MakeStore,
) -> None:
    """Who keeps little keeps it, however long ago it was used."""
    store = make_documents(bytes_max=4 * SPACE_BYTES, owner_bytes_max=3 * SPACE_BYTES)
    store.keep(BEN, "old")
    for name in "abc":
        store.keep(ANNA, name)
    assert store.keep(CARL, "new") == ""
    assert store.read(BEN, "old") is not None
    assert [store.read(ANNA, name) is not None for name in "abc"] == [False, True, True]


def test_document_that_could_not_be_written_is_refused_and_not_found(
    make_documents: MakeStore,
) -> None:
    """It is indexed before it is written, so a failure takes it out, but no later one."""
    store = make_documents()
    order = KeepDocument(owner=ANNA, name="a", data=b"one")
    [failed] = store.core.handle(Received(GATEWAY, 0, order), 0.0)
    assert isinstance(failed, WriteDocument)
    store.handle(DocumentWritten(failed, "no room"))
    assert store.sent[-1].message == DocumentKept(
        owner=ANNA, name="a", accepted=False, detail="no room"
    )
    assert store.read(ANNA, "a") is None
    store.core.handle(Received(GATEWAY, 0, order), 0.0)
    store.keep(ANNA, "a", b"two")
    store.handle(DocumentWritten(failed, "no room"))
    assert store.read(ANNA, "a") == b"two"


def test_document_larger_than_the_part_of_an_owner_is_refused(make_documents: MakeStore) -> None:
    """A document that never fits evicts nothing."""
    store = make_documents(bytes_max=9 * SPACE_BYTES, owner_bytes_max=SPACE_BYTES)
    store.keep(ANNA, "small")
    assert "bytes" in store.keep(ANNA, "large", b"x" * (SIZE_BYTES + 1))
    assert store.read(ANNA, "small") is not None


def test_document_unused_for_its_time_to_live_is_deleted(make_documents: MakeStore) -> None:
    """A use begins the time anew; it also counts while no store runs."""
    store = make_documents(ttl_s=100.0)
    store.keep(ANNA, "used")
    store.keep(ANNA, "unused")
    store.advance_time(60.0)
    store.read(ANNA, "used")
    store.advance_time(60.0)
    assert store.read(ANNA, "unused") is None
    assert store.read(ANNA, "used") is not None
    assert store.document_files() == ["used.document"]


def test_store_that_keeps_no_documents_deletes_those_of_earlier_starts(
    make_documents: MakeStore,
) -> None:
    """An operator who sets the limit to 0 wants them gone."""
    store = make_documents()
    store.keep(ANNA, "a")
    store = make_documents(bytes_max=0, owner_bytes_max=0)
    assert store.document_files() == []
    assert "bytes" in store.keep(ANNA, "b")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:40] + b"?" + data[41:],
        lambda data: bytes(len(data)),
    ],
)
def test_damaged_document_is_not_found_and_deleted(
    make_documents: MakeStore, damage: Callable[[bytes], bytes]
) -> None:
    """After a crash a file may have any bytes; wrong ones are never returned."""
    store = make_documents()
    store.keep(ANNA, "a")
    [path] = store.directory.path.glob("documents/*/*")
    path.write_bytes(damage(path.read_bytes()))
    store = make_documents()
    assert store.read(ANNA, "a") is None
    assert store.document_files() == []


def test_file_of_another_document_is_not_returned(make_documents: MakeStore) -> None:
    """The checksum covers owner and name."""
    store = make_documents()
    store.keep(ANNA, "a", b"Anna's")
    [path] = store.directory.path.glob("documents/*/*")
    (path.parent / "b.document").write_bytes(path.read_bytes())
    store = make_documents()
    assert store.read(ANNA, "b") is None
    assert store.read(ANNA, "a") == b"Anna's"


def test_partial_files_are_deleted_and_foreign_ones_left_alone(make_documents: MakeStore) -> None:
    """A store that was killed while writing leaves no rest; files of others stay."""
    store = make_documents()
    store.keep(ANNA, "a")
    folder = store.directory.path / "documents" / ANNA
    (folder / "b.partial").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"mine")
    store = make_documents()
    assert store.document_files() == ["a.document", "notes.txt"]
    assert store.report().foreign_files == 1


def test_store_that_is_off_refuses_documents_and_finds_none(make_documents: MakeStore) -> None:
    """A broken disk is an answer, not a wait."""
    store = make_documents()
    store.keep(ANNA, "a")
    store.handle(DirectoryUnusable("It is gone."))
    assert store.keep(ANNA, "b") == "It is gone."
    assert store.read(ANNA, "a") is None
    store.advance_time(30.0)
    assert store.read(ANNA, "a") is not None


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "read", "delete", "wait"]),
            st.sampled_from([ANNA, BEN]),
            st.sampled_from("abcde"),
            st.integers(min_value=0, max_value=2_000),
        ),
        max_size=40,
    )
)
def test_any_order_of_operations_keeps_the_limits_and_the_files_agree(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str, int]]
) -> None:
    """Index and disk have the same documents after every step, within all limits."""
    limits = DocumentLimits(4 * SPACE_BYTES, 3 * SPACE_BYTES, 60.0)
    store = DocumentStore(tmp_path_factory.mktemp("store") / "blocks", limits)
    try:
        for kind, owner, name, number in steps:
            if kind == "keep":
                store.keep(owner, name, bytes([number % 256]) * number)
            elif kind == "read":
                store.read(owner, name)
            elif kind == "delete":
                store.delete(owner, name)
            else:
                store.advance_time(number % 40)
            # The harness checks the invariants; here the files are compared with the index.
            assert len(store.document_files()) == store.report().documents
    finally:
        store.close()
