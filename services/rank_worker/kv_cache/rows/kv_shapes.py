"""What a model keeps per token and per row, read off a forward that is never evaluated."""

import dataclasses
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer for one token; multi-head latent attention has two widths."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(member.bytes_per_token for member in self.members)

    @property
    def members(self) -> tuple[BlockPart, BlockPart]:
        """What the layer has in a block: its keys, then its values."""
        keys = BlockPart(self.key_heads, self.key_dim, self.dtype)
        return keys, BlockPart(self.value_heads, self.value_dim, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What one forward of two tokens shows about a model."""

    vocab_size: int
    caches: list[Any]
    """The model's own caches after it; their arrays have shapes but no contents."""

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps plain keys and values."""
        return all(type(cache) is KVCache for cache in self.caches)

    def layers(self) -> list[LayerShape]:
        """Return the shape of every layer of a plain model."""
        return [layer_shape(cache) for cache in self.caches]


PROBE_TOKENS = 2
"""Length of the forward that shows a model's shape."""


def read_shape(model: nn.Module) -> ModelShape:
    """Build a forward of two tokens on scratch caches; nothing is computed, no collective runs."""
    caches = make_prompt_cache(model)
    logits = model(mx.zeros((1, PROBE_TOKENS), dtype=mx.int32), cache=caches)
    return ModelShape(vocab_size=logits.shape[-1], caches=caches)


def layer_shape(cache: Any) -> LayerShape:
    """Return the shape of a plain or rotating cache that has been updated once."""
    keys, values = cache.keys, cache.values
    return LayerShape(
        key_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_heads=values.shape[1],
        value_dim=values.shape[3],
        dtype=keys.dtype,
    )


def cache_bytes(cache: Any) -> tuple[int, int]:
    """Return the bytes that a cache takes per token, and per row whatever its length.

    Raises:
        ConfigError: the model keeps a kind of state that cannot be batched.
    """
    if isinstance(cache, CacheList):
        parts = [cache_bytes(part) for part in cache.caches]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)
    if isinstance(cache, ArraysCache):
        return 0, int(cache.nbytes)
    if cache.empty():
        # A layer that shares another's keys and values.
        return 0, 0
    if isinstance(cache, RotatingKVCache):
        return 0, layer_shape(cache).bytes_per_token * int(cache.max_size)
    if type(cache) is KVCache:
        return layer_shape(cache).bytes_per_token, 0
    raise ConfigError(
        f"This model keeps its state in a {type(cache).__name__}, which cannot be batched: "
        "choose another model."
    )
