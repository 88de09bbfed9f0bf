"""The kinds of mlx-lm's caches, and how tokens and states are copied out of them and back.

Uses internal fields of mlx-lm's batch caches: columns are left-padded, so the last column is the
newest of every row, and a full sliding window wraps around.
"""

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

PartKind = Literal["tokens", "window", "arrays", "unused"]
"""Plain keys and values; a sliding window; recurrent state; a layer that uses another layer's KV.
Only "tokens" can be divided into blocks."""

STATE_KINDS = ("window", "arrays")
"""Kinds of which a checkpoint holds the state."""


def leaf_caches(caches: Sequence[Any]) -> list[Any]:
    """Return the caches in order, each CacheList replaced by its members."""
    found: list[Any] = []
    for cache in caches:
        found += leaf_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def part_kinds(used_caches: Sequence[Any], tokens: int) -> list[PartKind] | None:
    """Return the kind of each of mlx-lm's caches: tokens, window, recurrent arrays or unused.

    Args:
        used_caches: caches of one sequence after one forward of `tokens` tokens.
        tokens: number of tokens.

    Returns:
        One kind per cache, members of a CacheList in its place; None when a cache is of an unknown
        kind, so that rows cannot be rebuilt from blocks.
    """
    kinds: list[PartKind] = []
    for leaf in leaf_caches(used_caches):
        if _is_exactly(leaf, ArraysCache):
            is_known = all(one is None or isinstance(one, mx.array) for one in leaf.cache)
            if not is_known or leaf.lengths is not None or leaf.left_padding is not None:
                return None
            kinds.append("arrays")
        elif leaf.empty():
            kinds.append("unused")
        elif _is_exactly(leaf, KVCache) and leaf.offset == tokens:
            kinds.append("tokens")
        elif _is_exactly(leaf, RotatingKVCache) and leaf.offset == tokens and not leaf.keep:
            kinds.append("window")
        else:
            return None
    return kinds


def slice_tokens(cache: Any, row: int, length: int, start: int, stop: int) -> list[mx.array]:
    """Return keys and values of tokens [start, stop) of one row.

    Args:
        cache: a KVCache (row 0) or a BatchKVCache.
        row: the row in the cache.
        length: number of tokens in the row.
        start: first token.
        stop: the token after the last one.

    Returns:
        [keys, values], views [1, kv_heads, stop - start, head_dim].
    """
    padding = 0 if isinstance(cache, KVCache) else cache._idx - length  # noqa: SLF001
    columns = slice(padding + start, padding + stop)
    return [array[row : row + 1, :, columns] for array in (cache.keys, cache.values)]


def read_state(cache: Any, row: int, length: int) -> list[mx.array | None]:
    """Return a copy of one row's window or recurrent state in one layer.

    Args:
        cache: an ArraysCache, RotatingKVCache (row 0) or BatchRotatingKVCache.
        row: the row in the cache.
        length: number of tokens that the row has processed.

    Returns:
        For a window: keys and values, [1, kv_heads, columns, head_dim] in temporal order, at most
        the window long. For recurrent state: each array, [1, ...], or None.
    """
    if _is_exactly(cache, ArraysCache):
        arrays = [None if one is None else one[row : row + 1] for one in cache.cache]
    else:
        columns = min(length, cache.max_size)
        arrays = [
            _in_temporal_order(cache, array, row)[:, :, -columns:]
            for array in (cache.keys, cache.values)
        ]
    return [None if array is None else mx.contiguous(array) for array in arrays]


def write_state(cache: Any, arrays: Sequence[mx.array | None], length: int) -> None:
    """Store the result of `read_state` in an empty ArraysCache or RotatingKVCache.

    Args:
        cache: an empty cache of one sequence.
        arrays: as `read_state` returns them.
        length: number of tokens that the sequence has processed.
    """
    if _is_exactly(cache, ArraysCache):
        cache.cache = list(arrays)
        return
    cache.keys, cache.values = arrays
    cache.offset = length
    cache._idx = cache.keys.shape[2]  # noqa: SLF001


def write_tokens(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Store keys and values [1, kv_heads, tokens, head_dim] in an empty KVCache."""
    cache.keys, cache.values = keys, values
    cache.offset = keys.shape[2]


def _is_exactly(cache: Any, kind: type) -> bool:
    """Tell whether a cache is of exactly this class. A subclass may have more state.

    In a function, so that mypy does not take mlx-lm's arrays for None, as which they begin.
    """
    return type(cache) is kind


def _in_temporal_order(cache: Any, array: mx.array, row: int) -> mx.array:
    if isinstance(cache, RotatingKVCache):
        ordered: mx.array = cache._temporal_order(array)  # noqa: SLF001
        return ordered
    index = cache._idx  # noqa: SLF001
    one = array[row : row + 1]
    if cache.rotated:
        return mx.concatenate([one[:, :, index:], one[:, :, :index]], axis=2)
    return one[:, :, :index]
