"""The device that MLX computes on: its description, free memory and wired memory."""

import sys

import mlx.core as mx
import msgspec

from services.rank_worker.device.description import Device, DeviceKind, own_part
from shared.os.memory import usable_memory


def device_kind() -> DeviceKind:
    """Return the kind of MLX's default device, without choosing a GPU."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def describe_device() -> Device:
    """Return a description of MLX's default device.

    On CUDA this fixes the GPUs that the process can use.
    """
    facts = mx.device_info()
    name = str(facts.get("device_name", facts.get("architecture", "")))
    kind = device_kind()
    if kind == "cpu":
        return Device(kind=kind, name=name, memory_bytes=usable_memory().free_bytes)
    if kind == "metal":
        size = facts.get("max_recommended_working_set_size", facts.get("memory_size", 0))
        return Device(kind=kind, name=name, memory_bytes=int(size))
    return Device(kind=kind, name=name, memory_bytes=int(facts.get("total_memory", 0)))


def free_bytes(device: Device, ranks_on_host: int, machine_share: float = 0.0) -> int:
    """Return the bytes of memory that are free now for this rank.

    Args:
        device: the rank's device; on Metal the memory in use by MLX is subtracted from its memory.
        ranks_on_host: number of ranks on this host, which share its memory equally; with CUDA each
            has its own GPU.
        machine_share: this rank's part of the host's memory, instead of an equal one; 0: an equal
            one.
    """
    if device.kind == "cpu":
        return usable_memory(ranks_on_host, machine_share).free_bytes
    if device.kind == "cuda":
        # Free memory of the GPU, plus buffers that MLX keeps for reuse.
        return int(mx.device_info().get("free_memory", 0)) + mx.get_cache_memory()
    return max(0, own_part(device, ranks_on_host, machine_share) - mx.get_active_memory())


def used_bytes() -> int:
    """Return the bytes that MLX's arrays use in this process now."""
    return int(mx.get_active_memory())


def wire_memory(device: Device) -> None:
    """Let MLX wire as much memory as the device has, on Metal; does nothing elsewhere.

    macOS does not compress wired memory. It compresses other memory that is idle for a while,
    weights included.
    """
    if device.kind == "metal" and device.memory_bytes:
        mx.set_wired_limit(device.memory_bytes)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(describe_device()))
