"""How the bytes of a block lie: one flat buffer that holds all layers of one rank."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

LAYOUT_VERSION = 1
"""Part of the layout's text, hence of the blocks' namespace: raise it when the bytes change."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPart:
    """The keys or the values of one layer: [heads, tokens, dim]."""

    heads: int
    dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        return self.heads * self.dim * int(self.dtype.size)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Members of one shape; they lie side by side as [members, heads, tokens, dim]."""

    shape: BlockPart
    indices: list[int]
    """Which members, rising."""

    @property
    def bytes_per_token(self) -> int:
        return len(self.indices) * self.shape.bytes_per_token


class BlockLayout:
    """Members (layer by layer: keys, then values) <-> one flat uint8 array.

    A block is the concatenation of its groups, widest dtype first, so that every group begins at a
    multiple of its item size. Members without width take no bytes.
    """

    def __init__(self, members: Sequence[BlockPart]) -> None:
        self._members = list(members)
        by_shape: dict[BlockPart, list[int]] = {}
        for index, member in enumerate(members):
            if member.bytes_per_token:
                by_shape.setdefault(member, []).append(index)
        groups = [_Group(shape, indices) for shape, indices in by_shape.items()]
        self._groups = sorted(groups, key=lambda group: -int(group.shape.dtype.size))

    @property
    def text(self) -> str:
        """The layout in words: equal texts of one model mean exchangeable bytes."""
        groups = [
            f"{len(group.indices)}x{group.shape.heads}x{group.shape.dim} "
            f"{dtype_name(group.shape.dtype)}"
            for group in self._groups
        ]
        return f"{LAYOUT_VERSION}: {' + '.join(groups) or 'no bytes'}"

    def block_bytes(self, tokens: int) -> int:
        """Return the bytes of a block of so many tokens."""
        return tokens * sum(group.bytes_per_token for group in self._groups)

    def pack(self, parts: Sequence[mx.array]) -> mx.array:
        """Copy members into one block.

        Args:
            parts: one per member, [1, heads, tokens, dim]; may be views.

        Returns:
            uint8 [block_bytes(tokens)]. It shares no memory with the parts.
        """
        pieces = []
        for group in self._groups:
            members = [parts[index] for index in group.indices]
            pieces.append(mx.concatenate(members).reshape(-1).view(mx.uint8))
        if len(self._groups) == 1 and len(self._groups[0].indices) > 1:
            return pieces[0]
        # One member alone would stay a view into a row, and keep all rows from being written in
        # place; with nothing behind it MLX would not copy it here either.
        return mx.concatenate([*pieces, mx.zeros((0,), dtype=mx.uint8)])

    def pack_run(self, parts: Sequence[mx.array], tokens: int, count: int) -> list[mx.array]:
        """Copy members into consecutive blocks.

        The bytes are copied twice more than by `pack`, but by a kernel per member, one per group of
        them and one per block, instead of one per member and block.

        Args:
            parts: one per member, [1, heads, count * tokens, dim]; may be views.
            tokens: of each block.
            count: of the blocks.

        Returns:
            The blocks in their order, each as from `pack`.
        """
        pieces = [mx.zeros((count, 0), dtype=mx.uint8)]
        for group in self._groups:
            heads, dim = group.shape.heads, group.shape.dim
            members = mx.concatenate([parts[index] for index in group.indices])
            by_block = members.reshape(len(group.indices), heads, count, tokens, dim)
            flat = by_block.transpose(2, 0, 1, 3, 4).reshape(count, -1)
            pieces.append(flat.view(mx.uint8))
        blocks = mx.concatenate(pieces, axis=1) if len(pieces) != 2 else pieces[1]
        # Memory of its own for each: one that is evicted must not stay because of the others.
        return [mx.concatenate([block, mx.zeros((0,), dtype=mx.uint8)]) for block in blocks]

    def unpack(self, payload: mx.array, tokens: int, used: int) -> list[mx.array]:
        """Return views of what `pack` put together.

        Args:
            payload: uint8 [block_bytes(tokens)].
            tokens: that the block holds.
            used: how many of them, from the first on, are wanted.

        Returns:
            One per member, [1, heads, used, dim].
        """

        def whole(group: _Group, start: int, size: int) -> mx.array:
            shape = (len(group.indices), group.shape.heads, tokens, group.shape.dim)
            typed = payload[start : start + size].view(group.shape.dtype).reshape(shape)
            return typed if used == tokens else typed[:, :, :used]

        return self._split(tokens, used, whole)

    def unpack_run(self, payloads: Sequence[mx.array], tokens: int, used: int) -> list[mx.array]:
        """Put consecutive blocks together, all layers at once.

        The bytes are copied twice more than by `unpack`, but by a kernel per block and two per
        group of members instead of one per block and member: a GPU takes thousands of small copies
        longer than the bytes.

        Args:
            payloads: uint8 [block_bytes(tokens)] each.
            tokens: that every one of them holds.
            used: how many of all of them, from the first on, are wanted.

        Returns:
            One per member, [1, heads, used, dim].
        """
        run = mx.stack(list(payloads))

        def whole(group: _Group, start: int, size: int) -> mx.array:
            count, heads, dim = len(group.indices), group.shape.heads, group.shape.dim
            typed = run[:, start : start + size].view(group.shape.dtype)
            by_block = typed.reshape(len(payloads), count, heads, tokens, dim)
            joined = by_block.transpose(1, 2, 0, 3, 4).reshape(count, heads, -1, dim)
            return joined[:, :, :used]

        return self._split(tokens, used, whole)

    def _split(
        self, tokens: int, used: int, whole: Callable[[_Group, int, int], mx.array]
    ) -> list[mx.array]:
        """Return one array per member, [1, heads, used, dim].

        Args:
            tokens: of a block.
            used: tokens that are wanted.
            whole: gives all members of a group, [members, heads, used, dim], from where its bytes
                begin in a block of so many tokens, and how many they are.
        """
        members: dict[int, mx.array] = {}
        start = 0
        for group in self._groups:
            size = group.bytes_per_token * tokens
            arrays = whole(group, start, size)
            start += size
            for place, index in enumerate(group.indices):
                members[index] = arrays[place : place + 1]
        return [
            members[index]
            if index in members
            else mx.zeros((1, member.heads, used, member.dim), dtype=member.dtype)
            for index, member in enumerate(self._members)
        ]


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name without its module, for example "bfloat16"."""
    return str(dtype).rpartition(".")[2]
