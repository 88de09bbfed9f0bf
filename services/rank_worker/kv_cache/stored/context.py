"""What the parts of the stored tier share: settings, and the way to scheduler and store."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from shared.clock import Clock
from shared.messages import Message


@dataclasses.dataclass(frozen=True, slots=True)
class TierSettings:
    """Store address, identity of the rank and memory bound of one rank's spills and restores."""

    store_address: str
    """Address of this host's cache store."""
    epoch: int
    rank: int
    world_size: int
    spill_bytes_max: int
    """Most payload bytes that wait to be written."""
    keys_dir: Path | None = None
    """This host's keys, for a store that listens on TCP."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierContext:
    """The rank's identity, its clock, and its ways to scheduler and store. No call waits."""

    rank: int
    epoch: int
    clock: Clock
    send_to_scheduler: Callable[[Message], None]
    send_to_store: Callable[[Message], bool]
    """Returns False without a connection to the store."""
