"""How a device wants to be used: what differs between CPUs, Metal and CUDA in executing plans."""

import dataclasses

from services.rank_worker.device import Device

FREED_SHARE = 0.1
"""Part of the free memory that MLX may keep of what activations have used."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceUse:
    """By default as a CPU, with nothing kept."""

    has_queue: bool = False
    """It takes a step while it computes another."""
    groups_prefill: bool = True
    """Short prompts of nearly one length are read by one forward."""
    pads_prefill: bool = False
    """Forwards over prompts are padded to widths that come again: CUDA prepares its attention for
    each pair of lengths anew, 45 to 90 ms that all rows wait for."""
    freed_bytes_max: int = 0
    """Of memory that is not used any more, so much is kept for what comes."""


def device_use(here: Device, free_bytes: int) -> DeviceUse:
    """Return how to use a device.

    Args:
        here: the device.
        free_bytes: memory of it that nobody uses before anything is computed.
    """
    return DeviceUse(
        has_queue=here.kind != "cpu",
        pads_prefill=here.kind == "cuda",
        freed_bytes_max=int(FREED_SHARE * free_bytes),
    )
