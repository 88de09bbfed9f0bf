"""Checks that a shard fits into this rank's memory before any weight is read."""

import dataclasses

import mlx.core as mx
from mlx import nn

from services.rank_worker.device.description import Device, own_part
from services.rank_worker.kv_cache.rows.kv_shapes import cache_bytes, read_shape
from shared.errors import ConfigError
from shared.log import Log
from shared.os.memory import usable_memory

_log = Log("rank_worker.loading")

CONTEXT_TOKENS_MIN = 1_024
"""A rank must have room for the KV of at least one sequence of this length."""


def rank_memory_bytes(device: Device, ranks_on_host: int, machine_share: float = 0.0) -> int:
    """Return the most memory that this rank may use, in bytes, including memory in use now.

    Ranks of one host share its memory; with CUDA each rank has its own GPU.

    Args:
        device: the rank's device.
        ranks_on_host: number of ranks on this host.
        machine_share: this rank's part of the host's memory; 0: equal parts.
    """
    if device.kind == "cuda":
        return device.memory_bytes
    if device.kind == "metal":
        return own_part(device, ranks_on_host, machine_share)
    return usable_memory(ranks_on_host, machine_share).total_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model takes on this rank: its weights, and its KV per token and per row."""

    weight_bytes: int
    kv_bytes_per_token: int = 0
    kv_bytes_per_row: int = 0

    def kv_bytes(self, tokens: int) -> int:
        """Return the KV bytes on this rank of one row with this many tokens."""
        return self.kv_bytes_per_row + self.kv_bytes_per_token * tokens


def memory_needs(model: nn.Module, weight_bytes: int) -> MemoryNeeds:
    """Return the bytes of a model's weights and of its KV per token and per row.

    KV sizes are read from a forward that is not computed. They are 0 when the model cannot run
    without evaluated weights.

    Args:
        model: this rank's shard; its parameters may be lazy.
        weight_bytes: size of its weights.
    """
    try:
        bytes_per_token, bytes_per_row = cache_bytes(read_shape(model).caches)
    except Exception as error:  # noqa: BLE001 - the model's code ran; the executor reports it
        _log.debug("kv_size_unknown", detail=repr(error))
        return MemoryNeeds(weight_bytes)
    return MemoryNeeds(weight_bytes, bytes_per_token, bytes_per_row)


def check_fits(
    shard: MemoryNeeds,
    context_tokens: int,
    memory_bytes: int,
    drafter: MemoryNeeds | None = None,
    *,
    copies: int = 1,
) -> None:
    """Compare what weights, KV of one sequence and memory in use need with this rank's memory.

    The sequence has 1,024 tokens, or the longest allowed if that is shorter.

    Args:
        shard: needs of the served model's shard.
        context_tokens: longest sequence in tokens.
        memory_bytes: memory that the rank may use; 0: unknown, so everything fits.
        drafter: needs of the draft model or head, which every rank holds whole.
        copies: how many processes hold the weights; 2 with a loaded spare process.

    Raises:
        ConfigError: when memory is too small; names the sizes and the remedy.
    """
    tokens = min(CONTEXT_TOKENS_MIN, context_tokens)
    parts = [one for one in (shard, drafter) if one is not None]
    kv_bytes = sum(one.kv_bytes(tokens) for one in parts)
    used_bytes = mx.get_active_memory()
    need = copies * sum(one.weight_bytes for one in parts) + kv_bytes + used_bytes
    if not memory_bytes or need <= memory_bytes:
        return
    subject, drafter_size = "This rank's shard does not fit", ""
    remedy = "or a smaller or more strongly"
    if drafter is not None:
        subject = "This rank's shard and the draft model do not fit"
        drafter_size = f", {_size(drafter.weight_bytes)} of speculation.draft_model's"
        remedy = "no or a smaller draft model, or a smaller or more strongly"
    if copies > 1:
        drafter_size += ", twice because of a loaded spare process,"
        remedy = f'set rank_worker.spare to "started", {remedy}'
    in_use = f" and {_size(used_bytes)} that are in use" if used_bytes > kv_bytes else ""
    raise ConfigError(
        f"{subject}: {_size(shard.weight_bytes)} of weights{drafter_size} and "
        f"{_size(kv_bytes)} for {tokens:,} tokens of KV{in_use} are {_size(need)}, the device has "
        f"{_size(memory_bytes)}: use more ranks, {remedy} quantized model."
    )


def _size(count: int) -> str:
    """Return a size as text in GB, MB, KB or bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
