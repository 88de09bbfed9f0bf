"""Events of a link for its owner: received messages, and begins and ends of sessions."""

import dataclasses
from typing import Generic, TypeVar

import msgspec

from shared.identifiers import Incarnation, PeerId

M = TypeVar("M", bound=msgspec.Struct)


class Received(msgspec.Struct, Generic[M], frozen=True):
    """A message was received, exactly once and in order.

    It is a struct, which is made faster than a frozen dataclass.
    """

    peer: PeerId
    epoch: int
    """Epoch in the frame's header; 0 on links without epochs."""
    message: M


@dataclasses.dataclass(frozen=True, slots=True)
class Connected:
    """A session with a new incarnation of the peer begins. Messages sent before do not reach it."""

    peer: PeerId
    incarnation: Incarnation = dataclasses.field(default=Incarnation(0), compare=False)
    """A listener keeps its incarnation as long as it lives; a dialer has a new one per session."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """The session has ended: by a goodbye, by silence, or because the peer restarted."""

    peer: PeerId
    cause: str
    """A phrase, for example "goodbye" or "silent for 10 s"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing came from the peer for half of the time after which it counts as lost."""

    peer: PeerId


LinkEvent = Received[M] | Connected | Lost | Quiet


@dataclasses.dataclass(slots=True)
class LinkCounters:
    """Counts of refused traffic since the link was opened."""

    refused: int = 0
    """Frames that are invalid or have another protocol version."""
    stale: int = 0
    """Frames for another incarnation or session."""
    strangers: int = 0
    """Handshakes and frames of keys without permission. On a dialer, its own failed handshakes."""
