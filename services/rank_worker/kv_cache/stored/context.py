"""What the parts of the stored tier share: settings, and the way to scheduler and store."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from shared.clock import Clock
from shared.messages import Message


@dataclasses.dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of a rank's spills and restores: store address, rank and memory bound."""

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
    """Identity and clock of the rank, and functions that send to scheduler and store at once.

    None of the functions waits.
    """

    rank: int
    epoch: int
    clock: Clock
    send_to_scheduler: Callable[[Message], None]
    send_to_store: Callable[[Message], bool]
    """Returns False without a connection to the store."""
