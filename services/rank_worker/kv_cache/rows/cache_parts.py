"""What the caches of mlx-lm's families are made of, and how a block or state is read off them.

Reads what mlx-lm keeps in its batch caches beside the arrays: columns are left-padded, so that the
last one is every row's newest, and a window that is full has wrapped around.
"""

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

PartKind = Literal["tokens", "window", "arrays", "unused"]
"""Plain keys and values; a sliding window of them; recurrent state; a layer that shares another's.
Only the first can be cut into blocks."""

STATE_KINDS = ("window", "arrays")
"""What a checkpoint holds."""


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Return the caches in order, with what is in a CacheList in its place."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def part_kinds(used_caches: Sequence[Any], tokens: int) -> list[PartKind] | None:
    """Tell what each leaf is.

    Args:
        used_caches: of one sequence, after one forward of `tokens` tokens.
        tokens: how many.

    Returns:
        None: some leaf is of another kind, so rows cannot be rebuilt from blocks.
    """
    kinds: list[PartKind] = []
    for leaf in leaves(used_caches):
        if _is_exactly(leaf, ArraysCache):
            whole = all(one is None or isinstance(one, mx.array) for one in leaf.cache)
            if not whole or leaf.lengths is not None or leaf.left_padding is not None:
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


def cut_tokens(cache: Any, row: int, length: int, start: int, stop: int) -> list[mx.array]:
    """Return keys and values of tokens [start, stop) of one row, views [1, heads, tokens, dim].

    Args:
        cache: a KVCache (row 0) or a BatchKVCache.
        row: which row of it.
        length: tokens that the row holds.
        start: first token.
        stop: behind the last one.
    """
    padding = 0 if isinstance(cache, KVCache) else cache._idx - length  # noqa: SLF001
    columns = slice(padding + start, padding + stop)
    return [array[row : row + 1, :, columns] for array in (cache.keys, cache.values)]


def read_state(cache: Any, row: int, length: int) -> list[mx.array | None]:
    """Return the state of one row, copied where views would keep much more memory alive.

    Args:
        cache: an ArraysCache, RotatingKVCache (row 0) or BatchRotatingKVCache.
        row: which row of it.
        length: tokens that the row has seen.

    Returns:
        Of a window keys and values, [1, heads, columns, dim] in temporal order, no longer than the
        window; of recurrent state each array, [1, ...] or None.
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
    """Give a fresh ArraysCache or RotatingKVCache the state that `read_state` returned."""
    if _is_exactly(cache, ArraysCache):
        cache.cache = list(arrays)
        return
    cache.keys, cache.values = arrays
    cache.offset = length
    cache._idx = cache.keys.shape[2]  # noqa: SLF001


def write_tokens(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Give a fresh KVCache the keys and values [1, heads, tokens, dim] of its first tokens."""
    cache.keys, cache.values = keys, values
    cache.offset = keys.shape[2]


def _is_exactly(cache: Any, kind: type) -> bool:
    """Tell whether a cache is of this very class: what a subclass keeps beside is not known."""
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
