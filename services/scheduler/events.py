"""Events and actions of the core. Owns their types; messages between processes are in `shared`.

Those of every step are structs: making one takes a tenth of the time of a frozen dataclass.
"""

import dataclasses
from typing import Any

from msgspec import Struct

from shared.identifiers import PeerId
from shared.messages import ToGateway, ToRank, ToScheduler


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConnected:
    """A gateway has connected."""

    gateway: PeerId


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayLost:
    """The link to a gateway is lost, and with it the clients of its requests."""

    gateway: PeerId


class GatewayMessageReceived(Struct, frozen=True):
    """A gateway sent a message."""

    gateway: PeerId
    message: ToScheduler


@dataclasses.dataclass(frozen=True, slots=True)
class RankLost:
    """The link to a rank process is lost, or it does not answer."""

    peer: PeerId
    cause: str
    """Why the transport considers the link lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerSilent:
    """A rank or gateway was silent for half of the time after which it counts as lost."""


class RankMessageReceived(Struct, frozen=True):
    """A rank sent a message."""

    peer: PeerId
    message: ToScheduler


class TimePassed(Struct, frozen=True):
    """A tick of the shell: deadlines must be checked."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainRequested:
    """A signal asks to accept no new requests, finish the open ones, then stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverRequested:
    """A signal asks to stop at once; gateways keep the requests for the next scheduler."""


Event = (
    GatewayConnected
    | GatewayLost
    | GatewayMessageReceived
    | RankLost
    | PeerSilent
    | RankMessageReceived
    | TimePassed
    | DrainRequested
    | HandOverRequested
)


class SendToGateway(Struct, frozen=True):
    """Send a message to one gateway."""

    gateway: PeerId
    message: ToGateway


class SendToRanks(Struct, frozen=True):
    """Send the same message to several ranks."""

    peers: tuple[PeerId, ...]
    message: ToRank
    epoch: int
    """Epoch of the message, which the transport sends with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllowSilence:
    """Let the links of some ranks be silent, or judge their silence again from now on.

    A rank inside MLX's init cannot send: MLX holds the interpreter's lock while it waits. A closed
    connection or a restarted process still loses a rank.
    """

    peers: tuple[PeerId, ...]
    is_allowed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WriteLog:
    """Write a log line."""

    level: str
    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SaveEvidence:
    """Write a step's plan and its differing receipts to a file, for an investigation."""

    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SaveWorldFacts:
    """Keep facts about the world for the next scheduler process, in place of older ones."""

    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""

    exit_code: int


Action = (
    SendToGateway | SendToRanks | AllowSilence | WriteLog | SaveEvidence | SaveWorldFacts | Stop
)
