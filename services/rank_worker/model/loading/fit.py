"""Whether a shard fits into this rank's memory, said with the sums before a weight is read."""

import dataclasses
import os
import sys
from pathlib import Path

import mlx.core as mx
from mlx import nn

from services.rank_worker.device.description import Device
from services.rank_worker.kv_cache.rows.shapes import cache_bytes, read_shape
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


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes on this rank, in bytes."""

    weight_bytes: int
    kv_bytes_per_token: int = 0
    kv_bytes_per_row: int = 0

    def kv_bytes(self, tokens: int) -> int:
        """Return what a row of so many tokens takes."""
        return self.kv_bytes_per_row + self.kv_bytes_per_token * tokens


def needs_of(model: nn.Module, weight_bytes: int) -> Needs:
    """Return what a model takes, its KV read off a forward; 0 where only weights will tell.

    Args:
        model: this rank's part, with arrays that need not be evaluated.
        weight_bytes: what its weights take.
    """
    try:
        sizes = [cache_bytes(cache) for cache in read_shape(model).caches]
    except Exception as error:  # noqa: BLE001 - the model's code ran; the executor will say more
        _log.debug("kv_not_foreseen", detail=repr(error))
        return Needs(weight_bytes)
    return Needs(weight_bytes, sum(size[0] for size in sizes), sum(size[1] for size in sizes))


def check_fits(shard: Needs, context: int, memory_bytes: int, draft: Needs | None = None) -> None:
    """Refuse a shard, and what drafts for it, for which the device has no memory.

    Args:
        shard: of the model that is served.
        context: longest sequence in tokens.
        memory_bytes: what the rank may use; 0: not known.
        draft: of the draft model or head, which every rank holds whole; None: there is none.

    Raises:
        ConfigError: the sums, and what to do.
    """
    tokens = min(LEAST_TOKENS, context)
    parts = [one for one in (shard, draft) if one is not None]
    kv_bytes = sum(one.kv_bytes(tokens) for one in parts)
    used_bytes = mx.get_active_memory()
    need = sum(one.weight_bytes for one in parts) + kv_bytes + used_bytes
    if not memory_bytes or need <= memory_bytes:
        return
    what, whose, remedy = "This rank's shard does not fit", "", "or a smaller or more strongly"
    if draft is not None:
        what = "This rank's shard and what drafts for it do not fit"
        whose = f", {_size(draft.weight_bytes)} of speculation.draft_model's"
        remedy = "no or a smaller draft model, or a smaller or more strongly"
    others = f" and {_size(used_bytes)} that are in use" if used_bytes > kv_bytes else ""
    raise ConfigError(
        f"{what}: {_size(shard.weight_bytes)} of weights{whose} and {_size(kv_bytes)} for "
        f"{tokens:,} tokens of KV{others} are {_size(need)}, the device has "
        f"{_size(memory_bytes)}: use more ranks, {remedy} quantized model."
    )


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
