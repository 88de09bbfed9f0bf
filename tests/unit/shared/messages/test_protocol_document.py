"""docs/reference/protocol.md against the code in shared/."""

import re
from pathlib import Path
from typing import get_args

import msgpack
import msgspec
import pytest

from shared import limits, messages
from shared.identifiers import Incarnation
from shared.messages import FromStore, Message, ToGateway, ToRank, ToScheduler, ToStore
from shared.transport import delivery, framing
from shared.transport.delivery import Frame
from tools import write_protocol_tables

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "reference" / "protocol.md").read_text(
    encoding="utf-8"
)


def test_message_tables_of_protocol_document_equal_code() -> None:
    """Fields, order, types, ranges and defaults are those of the code (`make generated`)."""
    assert write_protocol_tables.render(TEXT) == TEXT


def test_every_message_has_exactly_one_section_in_protocol_document() -> None:
    """All messages and their parts have a section, and there is no other section."""
    structs = {
        name
        for name, kind in vars(messages).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not Message
    }

    documented = write_protocol_tables.documented_structs(TEXT)

    assert sorted(documented) == sorted(structs)
    assert all(f"\n### {name}\n" in TEXT for name in structs)


@pytest.mark.parametrize(
    ("union", "senders"),
    [
        (ToGateway, ("Scheduler to gateway",)),
        (ToRank, ("Scheduler to rank",)),
        (ToStore, ("Rank to store", "Gateway to store", "Any peer on the store link")),
        (FromStore, ("Store to rank", "Store to gateway", "Store to any peer")),
        (
            ToScheduler,
            (
                "Gateway to scheduler",
                "Rank to scheduler",
                "Any peer on the gateway link",
                "An operator",
            ),
        ),
    ],
)
def test_every_message_section_begins_with_its_sender_and_receiver(
    union: object, senders: tuple[str, ...]
) -> None:
    """The first words below a message's heading name sender and receiver."""
    for message in get_args(union):
        section = TEXT.partition(f"\n### {message.__name__}\n")[2].strip()

        assert section.startswith(senders), message.__name__


def test_every_message_field_has_description_in_protocol_document() -> None:
    """No field of a table has an empty description."""
    empty = re.findall(r"^\| `(\w+)` \|.*\| \|$", TEXT, re.MULTILINE)

    assert sorted(set(empty)) == []


def test_frame_header_fields_have_documented_order() -> None:
    """The fields of a packed header come in the documented order."""
    names = re.findall(r"^\| \d \| (\w+) \|", TEXT, re.MULTILINE)
    frame = Frame(2, Incarnation(3), Incarnation(4), 5, 6, delivery.MESSAGE, b"body")

    header = msgpack.unpackb(framing.pack(frame)[0])

    assert names == [
        "version", "epoch", "sender", "receiver", "number", "acknowledged", "kind",
    ]  # fmt: skip
    assert header == [limits.PROTOCOL_VERSION, 2, 3, 4, 5, 6, "m"]


def test_protocol_document_lists_exactly_the_frame_kinds_of_code() -> None:
    """The table of frame kinds contains exactly the kinds in the code."""
    kinds = set(re.findall(r"^\| `(\w+)` \| (?:dialer|listener|both) \|", TEXT, re.MULTILINE))

    assert kinds == {
        delivery.HELLO,
        delivery.WELCOME,
        delivery.MESSAGE,
        delivery.ALIVE,
        delivery.RESET,
        delivery.GOODBYE,
    }


@pytest.mark.parametrize(
    "statement",
    [
        f"**Version {limits.PROTOCOL_VERSION}.**",
        f"`MAXMSGSIZE` {limits.MESSAGE_BYTES_MAX // 2**20} MiB",
        f"Repeated every {limits.HELLO_INTERVAL_S:g} s until welcomed",
        f"after {limits.ACK_EVERY_MESSAGES} messages or {limits.ACK_DELAY_S * 1_000:g} ms",
        f"not acknowledged for {limits.RESEND_AFTER_S:g} s",
        f"at most {limits.RESEND_MESSAGES_MAX} messages at once",
        f"{limits.UNACKED_MESSAGES_MAX:,} messages and {limits.UNACKED_BYTES_MAX // 2**20} MiB",
        f"sent nothing for {limits.KEEPALIVE_S:g} s",
        f"not been heard for {limits.PEER_SILENCE_S:g} s",
        f"waits up to {limits.GOODBYE_S:g} s",
        f"At most {limits.PEERS_MAX} peers",
        f"nesting is deeper than {limits.MESSAGE_DEPTH_MAX}",
        f"{limits.STEP_DEADLINE_FACTOR:g} times its predicted time",
        f"{limits.STEP_DEADLINE_MIN_S:g} to {limits.STEP_DEADLINE_MAX_S:g} s",
    ],
)
def test_protocol_document_has_current_values_of_limits(statement: str) -> None:
    """The document contains the current values of shared/limits.py."""
    assert statement in " ".join(TEXT.split())
