"""Differences between CPUs, Metal and CUDA in executing step plans."""

import dataclasses

from services.rank_worker.device.description import Device
from shared.messages.rank_link import Backend

GROUPED_TOKENS_MAX, _CUDA_GROUPED_TOKENS_MAX = 512, 1_024
"""Longest prompt that shares a forward: a longer one keeps a device busy by itself. But a GPU with
CUDA multiplies the rows of two prompts of 1,024 tokens faster together."""
FREED_SHARE = 0.1
"""Part of the free memory that MLX may keep as freed buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionProfile:
    """The ways of executing plans that differ between devices. The defaults are those of a CPU."""

    has_queue: bool = False
    """The device accepts a step while it computes another one."""
    grouped_tokens_max: int = GROUPED_TOKENS_MAX
    """Longest prompt that shares a forward with others of similar length; 0: none does."""
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
        backend: the world's backend for collectives; prompts are padded, and long ones grouped,
            only if all devices are alike.
        free_bytes: free memory of the device after loading, which limits the freed buffers.
        batch_invariant: prompts must not share a forward, nor depend on the room of rows.
    """
    grouped_tokens_max = 0 if batch_invariant else GROUPED_TOKENS_MAX
    if device.kind == "cpu":
        return ExecutionProfile(grouped_tokens_max=grouped_tokens_max)
    # Other backends allow different devices in one world. If only some ranks padded, or grouped
    # long prompts, the sizes of their collectives would differ. An invariant batch does neither:
    # the room for padding depends on the other rows.
    all_are_cuda = device.kind == "cuda" and backend in ("off", "nccl")
    pads = all_are_cuda and not batch_invariant
    return ExecutionProfile(
        has_queue=True,
        grouped_tokens_max=_CUDA_GROUPED_TOKENS_MAX if pads else grouped_tokens_max,
        pads_prefill=pads,
        freed_bytes_max=int(FREED_SHARE * free_bytes),
    )
