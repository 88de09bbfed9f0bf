"""The shapes of a model's KV, read from a forward that is built but never computed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.cache_parts import leaf_caches
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """Vocabulary size and kinds of caches of a model, read from a forward that is not computed."""

    vocab_size: int
    """Logits of a token: of this rank's part where the head is divided."""
    caches: list[Any]
    """The model's own caches after the forward; their arrays are zeros that are not computed."""

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps plain keys and values: no window, recurrent or shared state."""
        return all(type(cache) is KVCache for cache in self.caches)

    def layers(self) -> list[list[BlockPart]]:
        """Return the shapes of every layer's keys and values in a plain model."""
        return [layer_parts(cache) for cache in self.caches]


PROBE_TOKENS = 2
"""Length of the forward that shows a model's shapes."""


def read_shape(model: nn.Module) -> ModelShape:
    """Return vocabulary size and caches of a model from a forward that is built, not computed.

    It communicates with no other rank.

    Args:
        model: the model, or this rank's shard; its parameters may be lazy.
    """
    caches = make_prompt_cache(model)
    logits = model(mx.zeros((1, PROBE_TOKENS), dtype=mx.int32), cache=caches)
    for cache in leaf_caches(caches):
        # The forward's own arrays would keep weights in memory that are replaced later.
        vars(cache).update(tree_map(_without_inputs, vars(cache)))
    return ModelShape(vocab_size=logits.shape[-1], caches=caches)


def _without_inputs(value: Any) -> Any:
    """Return an array of the same shape that depends on no other; anything else as it is."""
    return mx.zeros(value.shape, value.dtype) if isinstance(value, mx.array) else value


def layer_parts(cache: Any) -> list[BlockPart]:
    """Return the shapes of one layer's keys and of its values; with latent attention they differ.

    Args:
        cache: the layer's KVCache or RotatingKVCache after one forward.
    """
    return [
        BlockPart(array.shape[1], array.shape[3], array.dtype)
        for array in (cache.keys, cache.values)
    ]


def cache_bytes(used_caches: Sequence[Any]) -> tuple[int, int]:
    """Return the memory that all layers' caches take on this rank, without computing anything.

    Args:
        used_caches: mlx-lm's caches, one per layer, after one forward.

    Returns:
        (bytes per token, bytes per row that do not depend on its length).

    Raises:
        ConfigError: when a cache is of a kind that cannot be batched.
    """
    per_token = per_row = 0
    for cache in leaf_caches(used_caches):
        if isinstance(cache, ArraysCache):
            per_row += int(cache.nbytes)
        elif cache.empty():
            # A layer that uses another layer's keys and values.
            continue
        elif isinstance(cache, RotatingKVCache):
            per_row += _token_bytes(cache) * int(cache.max_size)
        elif type(cache) is KVCache:
            per_token += _token_bytes(cache)
        else:
            raise unbatchable(cache)
    return per_token, per_row


def unbatchable(cache: Any) -> ConfigError:
    """Return the error for a model with a cache of a kind that cannot be batched."""
    return ConfigError(
        f"This model keeps its state in a {type(cache).__name__}, which cannot be batched: "
        "choose another model."
    )


def _token_bytes(cache: KVCache | RotatingKVCache) -> int:
    return sum(part.bytes_per_token for part in layer_parts(cache))
