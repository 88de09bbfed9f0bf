"""What the core is told and what it orders. Neither crosses a process; messages do."""

import dataclasses
from typing import Any

from shared.identifiers import PeerId
from shared.messages import ToGateway, ToRank, ToScheduler


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConnected:
    """A gateway has a session."""

    gateway: PeerId


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway is gone, and with it whoever waits for its requests."""

    gateway: PeerId
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayTold:
    """A gateway sent a message."""

    gateway: PeerId
    message: ToScheduler


@dataclasses.dataclass(frozen=True, slots=True)
class RankConnected:
    """A rank process has a session."""

    peer: PeerId


@dataclasses.dataclass(frozen=True, slots=True)
class RankLost:
    """A rank process is gone or does not answer."""

    peer: PeerId
    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class RankTold:
    """A rank sent a message."""

    peer: PeerId
    message: ToScheduler


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the deadlines."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainOrdered:
    """Accept nothing new; finish what was accepted, then stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
    """Stop at once and end no request: gateways keep them for the scheduler that comes next."""


Event = (
    GatewayConnected
    | GatewayLost
    | GatewayTold
    | RankConnected
    | RankLost
    | RankTold
    | TimePassed
    | DrainOrdered
    | HandOver
)


@dataclasses.dataclass(frozen=True, slots=True)
class SendToGateway:
    """Send a message to one gateway."""

    gateway: PeerId
    message: ToGateway


@dataclasses.dataclass(frozen=True, slots=True)
class SendToRanks:
    """Send the same message to some ranks."""

    peers: tuple[PeerId, ...]
    message: ToRank
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Say:
    """Write a log line."""

    level: str
    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class KeepEvidence:
    """Keep facts about receipts that differ, for whoever looks into it."""

    name: str
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Everything is finished: end the process."""

    exit_code: int


Action = SendToGateway | SendToRanks | Say | KeepEvidence | Stop
