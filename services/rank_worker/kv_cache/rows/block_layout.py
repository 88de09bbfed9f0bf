"""The byte layout of a block, one flat buffer with the KV of all layers of one rank."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

LAYOUT_VERSION = 1
"""Part of the layout's text and so of the blocks' namespace: increase it when bytes change."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPart:
    """Shape and dtype of one layer's keys or values in a block, [kv_heads, tokens, head_dim]."""

    heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in this part."""
        return self.heads * self.dim * int(self.dtype.size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Parts of equal shape and type, stored together as [parts, kv_heads, tokens, head_dim]."""

    shape: BlockPart
    indices: list[int]
    """Indices of the parts, rising."""

    @property
    def bytes_per_token(self) -> int:
        return len(self.indices) * self.shape.bytes_per_token


class BlockLayout:
    """Converts between the KV of one block by layer and one flat uint8 array.

    The parts are keys, then values, layer by layer; if quantized, each is three parts: packed
    numbers, scales and biases. A block is the concatenation of groups of parts of equal shape,
    widest type first, so that every group starts at a multiple of its item size. Parts of width 0
    take no bytes.
    """

    def __init__(self, parts: Sequence[BlockPart]) -> None:
        self._parts = list(parts)
        by_shape: dict[BlockPart, list[int]] = {}
        for index, part in enumerate(parts):
            if part.bytes_per_token:
                by_shape.setdefault(part, []).append(index)
        groups = [_Group(shape, indices) for shape, indices in by_shape.items()]
        self._groups = sorted(groups, key=lambda group: -int(group.shape.dtype.size))

    @property
    def text(self) -> str:
        """Description of the layout. Ranks of one model with equal texts could exchange blocks."""
        groups = [
            f"{len(group.indices)}x{group.shape.heads}x{group.shape.dim} "
            f"{dtype_name(group.shape.dtype)}"
            for group in self._groups
        ]
        return f"{LAYOUT_VERSION}: {' + '.join(groups) or 'no bytes'}"

    def block_bytes(self, tokens: int) -> int:
        """Return the size in bytes of a block of this many tokens."""
        return tokens * sum(group.bytes_per_token for group in self._groups)

    def pack(self, arrays: Sequence[mx.array]) -> mx.array:
        """Copy the keys and values of some tokens, layer by layer, into one block.

        Args:
            arrays: one per part of the layout, [1, kv_heads, tokens, head_dim]; may be views.

        Returns:
            uint8 [block_bytes(tokens)] with memory of its own.
        """
        buffers = []
        for group in self._groups:
            parts = [arrays[index] for index in group.indices]
            buffers.append(mx.concatenate(parts).reshape(-1).view(mx.uint8))
        if len(self._groups) == 1 and len(self._groups[0].indices) > 1:
            return buffers[0]
        # A single part would stay a view of a row, and prevent writing the rows in place. MLX
        # copies it only if something is concatenated.
        return mx.concatenate([*buffers, mx.zeros((0,), dtype=mx.uint8)])

    def pack_run(self, arrays: Sequence[mx.array], tokens: int, count: int) -> list[mx.array]:
        """Copy the keys and values of consecutive tokens, layer by layer, into several blocks.

        Copies the bytes two times more than `pack`, but runs one kernel per part, per group and per
        block, instead of one per part and block.

        Args:
            arrays: one per part of the layout, [1, kv_heads, count * tokens, head_dim]; may be
                views.
            tokens: tokens per block.
            count: number of blocks.

        Returns:
            `count` blocks in order, each as returned by `pack`.
        """
        buffers = [mx.zeros((count, 0), dtype=mx.uint8)]
        for group in self._groups:
            heads, dim = group.shape.heads, group.shape.dim
            parts = mx.concatenate([arrays[index] for index in group.indices])
            by_block = parts.reshape(len(group.indices), heads, count, tokens, dim)
            flat = by_block.transpose(2, 0, 1, 3, 4).reshape(count, -1)
            buffers.append(flat.view(mx.uint8))
        blocks = mx.concatenate(buffers, axis=1) if len(buffers) != 2 else buffers[1]
        # Each gets memory of its own, so that evicting one block frees its memory.
        return [mx.concatenate([block, mx.zeros((0,), dtype=mx.uint8)]) for block in blocks]

    def unpack(self, payload: mx.array, tokens: int, used: int) -> list[mx.array]:
        """Return views of the keys and values in a block, layer by layer.

        Args:
            payload: uint8 [block_bytes(tokens)].
            tokens: tokens in the block.
            used: number of tokens to return, from the first on.

        Returns:
            One array per part of the layout, [1, kv_heads, used, head_dim] in the part's dtype.
        """

        def group_array(group: _Group, start: int, size: int) -> mx.array:
            shape = (len(group.indices), group.shape.heads, tokens, group.shape.dim)
            typed = payload[start : start + size].view(group.shape.dtype).reshape(shape)
            return typed if used == tokens else typed[:, :, :used]

        return self._split(tokens, used, group_array)

    def unpack_run(self, payloads: Sequence[mx.array], tokens: int, used: int) -> list[mx.array]:
        """Join the keys and values of consecutive blocks, layer by layer.

        Copies the bytes two times more than `unpack`, but runs one kernel per block and two per
        group instead of one per block and part. On a GPU thousands of small copies take longer.

        Args:
            payloads: the blocks, uint8 [block_bytes(tokens)] each.
            tokens: tokens in each block.
            used: number of tokens to return, from the first on.

        Returns:
            One array per part of the layout, [1, kv_heads, used, head_dim] in the part's dtype.
        """
        run = mx.stack(list(payloads))

        def group_array(group: _Group, start: int, size: int) -> mx.array:
            count, heads, dim = len(group.indices), group.shape.heads, group.shape.dim
            typed = run[:, start : start + size].view(group.shape.dtype)
            by_block = typed.reshape(len(payloads), count, heads, tokens, dim)
            joined = by_block.transpose(1, 2, 0, 3, 4).reshape(count, heads, -1, dim)
            return joined[:, :, :used]

        return self._split(tokens, used, group_array)

    def _split(
        self, tokens: int, used: int, group_array: Callable[[_Group, int, int], mx.array]
    ) -> list[mx.array]:
        """Return one array per part, [1, kv_heads, used, head_dim].

        Args:
            tokens: tokens in a block.
            used: number of tokens to return.
            group_array: called with (group, first byte in the block, number of bytes); returns the
                group's parts, [parts, kv_heads, used, head_dim].
        """
        parts: dict[int, mx.array] = {}
        start = 0
        for group in self._groups:
            size = group.bytes_per_token * tokens
            arrays = group_array(group, start, size)
            start += size
            for place, index in enumerate(group.indices):
                parts[index] = arrays[place : place + 1]
        return [
            parts[index]
            if index in parts
            else mx.zeros((1, part.heads, used, part.dim), dtype=part.dtype)
            for index, part in enumerate(self._parts)
        ]


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name without its module, for example "bfloat16"."""
    return str(dtype).rpartition(".")[2]
