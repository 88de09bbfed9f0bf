"""One layer of all rows, with the methods that mlx-lm's attention calls on its own caches."""

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.kv_shapes import LayerShape
from services.rank_worker.kv_cache.rows.views import PaddedView, RaggedView, UniformView

View = UniformView | RaggedView | PaddedView

Quantized = tuple[mx.array, mx.array, mx.array]
"""What `mx.quantize` returns: packed numbers, and per group a scale and a bias."""


class RowLayer:
    """Keys and values as the model computes them."""

    def __init__(self, shape: LayerShape) -> None:
        self.members: list[BlockPart] = list(shape.members)
        """What the arrays hold of one token, in their order."""
        self.arrays = [_empty(member) for member in self.members]
        """[rows, heads, tokens, dim] each."""
        self.offset: int | mx.array = 0
        self.view: View = UniformView(0, 0, 0, 0)

    @property
    def keys(self) -> mx.array:
        """The first of the arrays: a pipeline's last layer must wait for what its rank sends."""
        return self.arrays[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.arrays[0] = keys

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | Quantized, mx.array | Quantized]:
        """Store new keys and values [rows, heads, tokens, dim]; return all that may be seen."""
        seen_keys, seen_values = self._store([keys, values])
        return seen_keys, seen_values

    def make_mask(
        self,
        N: int,  # noqa: N803  (mlx-lm passes it by this name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the attention mask for `N` new tokens per row."""
        return self.view.mask(N, window_size, return_array=return_array)

    def resize(self, row_count: int, row_tokens: int, rows: int, columns: int) -> None:
        """Make arrays of this size; of the old ones only rows [0, rows) up to `columns` stay."""
        self.arrays = [
            _resized(array, row_count, row_tokens, rows, columns) for array in self.arrays
        ]

    def _store(self, new: list[mx.array]) -> list[mx.array]:
        """Write one array per member; return what may be seen of each."""
        view = self.view
        self.arrays = [view.write(array, one) for array, one in zip(self.arrays, new, strict=True)]
        self.offset = view.offset_after
        if isinstance(view, PaddedView):
            # Empty rows: what was just computed is all there is.
            return new
        return [view.fetch(array) for array in self.arrays]


class QuantizedRowLayer(RowLayer):
    """Keys and values of fewer bits, which mlx-lm's quantized attention reads as they are."""

    def __init__(self, shape: LayerShape, bits: int) -> None:
        """Make empty arrays.

        Args:
            shape: of what the model computes.
            bits: per number, 4 or 8.

        Raises:
            ValueError: no group size divides the keys' or the values' width.
        """
        super().__init__(shape)
        self.bits = bits
        """mlx-lm asks for it, and for the group size, by these names."""
        self.group_size = group_size(shape)
        self.members = [
            packed for member in shape.members for packed in self._packed_members(member)
        ]
        self.arrays = [_empty(member) for member in self.members]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Store new keys and values [rows, heads, tokens, dim]; return all that may be seen."""
        new = [
            one
            for array in (keys, values)
            for one in mx.quantize(array, group_size=self.group_size, bits=self.bits)
        ]
        seen = self._store(new)
        return (seen[0], seen[1], seen[2]), (seen[3], seen[4], seen[5])

    def _packed_members(self, member: BlockPart) -> list[BlockPart]:
        groups = BlockPart(member.heads, member.dim // self.group_size, member.dtype)
        numbers = BlockPart(member.heads, member.dim * self.bits // 32, mx.uint32)
        return [numbers, groups, groups]


def group_size(shape: LayerShape) -> int:
    """Return how many numbers share a scale: MLX's usual 64, or 32 for narrow heads.

    Raises:
        ValueError: neither divides the width.
    """
    for size in (64, 32):
        if all(member.dim and member.dim % size == 0 for member in shape.members):
            return size
    widths = sorted({member.dim for member in shape.members})
    raise ValueError(f"heads of width {widths} cannot be cut into groups of 64 or 32")


def _empty(member: BlockPart) -> mx.array:
    return mx.zeros((0, member.heads, 0, member.dim), dtype=member.dtype)


def _resized(old: mx.array, row_count: int, row_tokens: int, rows: int, columns: int) -> mx.array:
    new = mx.zeros((row_count, old.shape[1], row_tokens, old.shape[3]), dtype=old.dtype)
    if rows and columns:
        new[:rows, :, :columns] = old[:rows, :, :columns]
    return new
