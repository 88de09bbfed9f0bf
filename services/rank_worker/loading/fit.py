"""Whether a shard fits into this rank's memory, said with the sums before a weight is read."""

import os
import sys
from pathlib import Path

import mlx.core as mx
from mlx import nn

from services.rank_worker.device import Device
from services.rank_worker.kv.shapes import cache_bytes, read_shape
from shared.errors import ConfigError
from shared.log import Log

_log = Log("rank_worker.loading")

LEAST_TOKENS = 1_024
"""A rank that cannot keep so many tokens of one sequence cannot serve."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""What a container may use."""


def memory_of(device: Device, ranks_on_host: int) -> int:
    """Return the bytes that this rank can ever have; what others use now may be given back.

    Ranks of one host share its memory, except that each has a CUDA GPU of its own.
    """
    if device.kind == "cuda":
        return device.memory_bytes
    whole = device.memory_bytes if device.kind == "metal" else _host_bytes()
    return whole // max(1, ranks_on_host)


def check_fits(model: nn.Module, weight_bytes: int, context: int, memory_bytes: int) -> None:
    """Refuse a shard for which the device has no memory.

    Args:
        model: this rank's part, with arrays that need not be evaluated.
        weight_bytes: what its weights take.
        context: longest sequence in tokens.
        memory_bytes: what the rank may use.

    Raises:
        ConfigError: the sums, and what to do.
    """
    per_token, per_row = _kv_bytes(model)
    tokens = min(LEAST_TOKENS, context)
    kv_bytes = per_row + per_token * tokens
    used_bytes = mx.get_active_memory()
    need = weight_bytes + kv_bytes + used_bytes
    if need <= memory_bytes:
        return
    others = f" and {_size(used_bytes)} that are in use" if used_bytes > kv_bytes else ""
    raise ConfigError(
        f"This rank's shard does not fit: {_size(weight_bytes)} of weights and {_size(kv_bytes)} "
        f"for {tokens:,} tokens of KV{others} are {_size(need)}, the device has "
        f"{_size(memory_bytes)}: use more ranks, or a smaller or more strongly quantized model."
    )


def _kv_bytes(model: nn.Module) -> tuple[int, int]:
    """Return what a sequence takes per token and per row; 0 where only weights will tell."""
    try:
        sizes = [cache_bytes(cache) for cache in read_shape(model).caches]
    except Exception as error:  # noqa: BLE001 - the model's code ran; the executor will say more
        _log.debug("kv_not_foreseen", detail=repr(error))
        return 0, 0
    return sum(size[0] for size in sizes), sum(size[1] for size in sizes)


def _host_bytes() -> int:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "linux" and CGROUP_LIMIT.is_file():
        text = CGROUP_LIMIT.read_text().strip()
        return min(whole, int(text)) if text.isdigit() else whole
    return whole


def _size(count: int) -> str:
    """Return bytes in the unit that makes them readable."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
