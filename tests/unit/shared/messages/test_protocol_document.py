"""docs/reference/protocol.md and shared/ say the same."""

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


def test_every_table_is_what_the_structs_say() -> None:
    """Fields, order, types, ranges and defaults are those of the code (`make generated`)."""
    assert write_protocol_tables.render(TEXT) == TEXT


def test_every_message_is_documented_once() -> None:
    """All messages and their parts have a section, and the document knows no other."""
    structs = {
        name
        for name in messages.__all__
        if isinstance(kind := getattr(messages, name), type)
        and issubclass(kind, msgspec.Struct)
        and kind is not Message
    }

    documented = write_protocol_tables.documented(TEXT)

    assert sorted(documented) == sorted(structs)
    assert all(f"\n### {name}\n" in TEXT for name in structs)


@pytest.mark.parametrize(
    ("union", "senders"),
    [
        (ToGateway, ("Scheduler to gateway",)),
        (ToRank, ("Scheduler to rank",)),
        (ToStore, ("Rank to store", "Anybody on the store link")),
        (FromStore, ("Store to rank", "Store to anybody")),
        (
            ToScheduler,
            (
                "Gateway to scheduler",
                "Rank to scheduler",
                "Anybody on the gateway link",
                "An operator",
            ),
        ),
    ],
)
def test_every_message_says_who_sends_it(union: object, senders: tuple[str, ...]) -> None:
    """The first words below a message's heading name its direction."""
    for message in get_args(union):
        section = TEXT.partition(f"\n### {message.__name__}\n")[2].strip()

        assert section.startswith(senders), message.__name__


def test_no_field_is_without_meaning() -> None:
    """A reader of the tables finds a sentence for every field."""
    empty = re.findall(r"^\| `(\w+)` \|.*\| \|$", TEXT, re.MULTILINE)

    assert sorted(set(empty)) == []


def test_the_header_is_as_documented() -> None:
    """The header's fields come in the documented order."""
    names = re.findall(r"^\| \d \| (\w+) \|", TEXT, re.MULTILINE)
    frame = Frame(2, Incarnation(3), Incarnation(4), 5, 6, delivery.MESSAGE, b"body")

    header = msgpack.unpackb(framing.pack(frame)[0])

    assert names == [
        "version", "epoch", "sender", "receiver", "number", "acknowledged", "kind",
    ]  # fmt: skip
    assert header == [limits.PROTOCOL_VERSION, 2, 3, 4, 5, 6, "m"]


def test_the_control_kinds_are_as_documented() -> None:
    """Every kind of frame has its line."""
    kinds = set(re.findall(r"^\| `(\w+)` \| (?:dialler|listener|both) \|", TEXT, re.MULTILINE))

    assert kinds == {
        delivery.HELLO,
        delivery.WELCOME,
        delivery.MESSAGE,
        delivery.ALIVE,
        delivery.RESET,
        delivery.GOODBYE,
    }


@pytest.mark.parametrize(
    "words",
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
def test_numbers_are_those_of_the_limits(words: str) -> None:
    """A bound that moves in shared/limits.py moves in the document."""
    assert words in " ".join(TEXT.split())
