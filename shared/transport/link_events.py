"""What a link tells its owner: messages that arrived, and sessions that began and ended."""

import dataclasses
from typing import Generic, TypeVar

import msgspec

from shared.identifiers import Incarnation, PeerId

M = TypeVar("M", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True)
class Received(Generic[M]):
    """A message arrived, once and in order."""

    peer: PeerId
    epoch: int
    message: M


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """A session with a new incarnation of the peer begins. Nothing sent before reaches it."""

    peer: PeerId
    incarnation: Incarnation = dataclasses.field(default=Incarnation(0), compare=False)
    """A listener has one as long as it lives; a dialler draws one for each session."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The session with this peer is over: goodbye, silence, or it was restarted."""

    peer: PeerId
    cause: str


LinkEvent = Received[M] | Connected | Lost


@dataclasses.dataclass(slots=True)
class LinkCounters:
    """What was refused or repaired since the link was opened."""

    refused: int = 0
    """Frames that are no valid message, or of another protocol version."""
    stale: int = 0
    """Frames meant for another incarnation or session."""
    resent: int = 0
    duplicates: int = 0
    strangers: int = 0
    """Handshakes and frames of keys that are not allowed, or not as what they announced; on a
    dialler its own handshakes that failed."""
