"""Differences between CPUs, Metal and CUDA in executing step plans."""

import dataclasses

from services.rank_worker.device.description import Device
from shared.messages.rank_link import Backend

FREED_SHARE = 0.1
"""Part of the free memory that MLX may keep as freed buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionProfile:
    """The ways of executing plans that differ between devices. The defaults are those of a CPU."""

    has_queue: bool = False
    """The device accepts a step while it computes another one."""
    groups_prefill: bool = True
    """Short prompts of similar length share one forward."""
    pads_prefill: bool = False
    """Prefill forwards are padded to few widths, because CUDA prepares attention for each new pair
    of lengths, which delays all rows by 45 to 90 ms."""
    freed_bytes_max: int = 0
    """Limit for freed buffers that MLX keeps for reuse, in bytes."""


def execution_profile(
    device: Device, backend: Backend, free_bytes: int, *, batch_invariant: bool = False
) -> ExecutionProfile:
    """Return how plans are executed on a device.

    Args:
        device: the rank's device.
        backend: the world's backend for collectives; prefills are padded only if all devices are
            alike.
        free_bytes: free memory of the device after loading, which limits the freed buffers.
        batch_invariant: prompts must not share a forward, nor depend on the room of rows.
    """
    if device.kind == "cpu":
        return ExecutionProfile(groups_prefill=not batch_invariant)
    # Other backends allow different devices in one world. If only some ranks padded, the sizes of
    # their collectives would differ.
    is_uniform = backend in ("off", "nccl")
    return ExecutionProfile(
        has_queue=True,
        groups_prefill=not batch_invariant,
        # The room for padding depends on the other rows.
        pads_prefill=device.kind == "cuda" and is_uniform and not batch_invariant,
        freed_bytes_max=int(FREED_SHARE * free_bytes),
    )
