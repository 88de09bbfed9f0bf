"""Differences between CPUs, Metal and CUDA in executing step plans."""

import dataclasses

from services.rank_worker.device.description import Device
from shared.messages.rank_link import Backend

GROUPED_TOKENS_MAX, _CUDA_GROUPED_TOKENS_MAX = 512, 1_024
"""Longest prompt that shares a forward: a longer one keeps a device busy by itself. But a GPU with
CUDA multiplies the rows of two prompts of 1,024 tokens faster together."""
FREED_SHARE, _CUDA_FREED_SHARE = 0.1, 0.25
"""Part of the free memory that MLX may keep as freed buffers. With CUDA the host starts forwards
ahead of the device, so two of 2,048 tokens hold all their activations at once, 14 GB for a model
with 8 GB of weights, and free them together. MLX frees buffers itself where memory gets scarce."""
RESIZE_AT_ONCE_BYTES_MAX = 256 * 1024 * 1024
"""Rows up to this size are resized in all layers at once on any device."""
_RESIZE_AT_ONCE_SHARE = 0.05
"""Part of the free memory of a GPU with CUDA that may hold rows twice."""


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
    resize_at_once_bytes_max: int = RESIZE_AT_ONCE_BYTES_MAX
    """Larger rows are resized layer by layer, so that KV is never held twice. The rank then
    waits for the device after each layer, which takes tens of milliseconds."""


def execution_profile(
    device: Device, backend: Backend, free_bytes: int, *, batch_invariant: bool = False
) -> ExecutionProfile:
    """Return how plans are executed on a device.

    Args:
        device: the rank's device.
        backend: the world's backend for collectives; prompts are padded, and long ones grouped,
            only if all devices are alike.
        free_bytes: free memory of the device after loading, without what a loaded spare needs.
        batch_invariant: prompts must not share a forward, nor depend on the room of rows.
    """
    grouped_tokens_max = 0 if batch_invariant else GROUPED_TOKENS_MAX
    if device.kind == "cpu":
        return ExecutionProfile(grouped_tokens_max=grouped_tokens_max)
    # Other backends allow different devices in one world. If only some ranks padded, or grouped
    # long prompts, the sizes of their collectives would differ. An invariant batch does neither:
    # the room for padding depends on the other rows.
    is_cuda = device.kind == "cuda"
    all_are_cuda = is_cuda and backend in ("off", "nccl")
    pads = all_are_cuda and not batch_invariant
    return ExecutionProfile(
        has_queue=True,
        grouped_tokens_max=_CUDA_GROUPED_TOKENS_MAX if pads else grouped_tokens_max,
        pads_prefill=pads,
        freed_bytes_max=int((_CUDA_FREED_SHARE if is_cuda else FREED_SHARE) * free_bytes),
        resize_at_once_bytes_max=max(
            RESIZE_AT_ONCE_BYTES_MAX, int(_RESIZE_AT_ONCE_SHARE * free_bytes) if is_cuda else 0
        ),
    )
