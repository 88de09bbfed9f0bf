"""How a device wants to be used: what differs between CPUs, Metal and CUDA in executing plans."""

import dataclasses

from services.rank_worker.device.description import Device
from shared.messages.rank_link import Backend

FREED_SHARE = 0.1
"""Part of the free memory that MLX may keep of what activations have used."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionProfile:
    """By default as a CPU."""

    has_queue: bool = False
    """It takes a step while it computes another."""
    groups_prefill: bool = True
    """Short prompts of nearly one length are read by one forward."""
    pads_prefill: bool = False
    """Forwards over prompts are padded to widths that come again: CUDA prepares its attention for
    each pair of lengths anew, 45 to 90 ms that all rows wait for."""
    freed_bytes_max: int = 0
    """Of memory that is not used any more, so much is kept for what comes."""


def execution_profile(here: Device, backend: Backend, free_bytes: int) -> ExecutionProfile:
    """Return how to use a device.

    Args:
        here: the device.
        backend: of the world's collectives.
        free_bytes: memory of it that nobody uses before anything is computed.
    """
    if here.kind == "cpu":
        return ExecutionProfile()
    # A world over any other backend may have devices of several kinds, and what is padded on one
    # rank makes collectives of other sizes than on the next.
    is_alike = backend in ("off", "nccl")
    return ExecutionProfile(
        has_queue=True,
        pads_prefill=here.kind == "cuda" and is_alike,
        freed_bytes_max=int(FREED_SHARE * free_bytes),
    )
