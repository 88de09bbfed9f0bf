"""One layer of all rows, with the interface of mlx-lm's caches."""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.device.hardware import device_kind
from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_views import (
    ConcatenatedView,
    InPlaceView,
    PaddedView,
    RaggedView,
    UniformView,
)

View = UniformView | RaggedView | InPlaceView | ConcatenatedView

Quantized = tuple[mx.array, mx.array, mx.array]
"""Result of `mx.quantize`: packed uint32 numbers, and a scale and a bias per group."""

COPY_BYTES_MAX = 64 * 1024 * 1024
"""Before a larger copy of quantized rows is made, the device must have finished the layers before.
MLX would otherwise have memory for the copies of all layers at once."""

PACKED_TOKENS_MAX = 16
"""Most new tokens per row for which attention multiplies packed numbers, where it can."""


class RowLayer:
    """Keys and values of all rows in one layer; the model uses it as that layer's cache.

    They have the dtype that the model computes.
    """

    def __init__(self, parts: Sequence[BlockPart]) -> None:
        self.parts = list(parts)
        """Shape and type of each array, for one token."""
        self.arrays = [mx.zeros((0, one.heads, 0, one.dim), dtype=one.dtype) for one in parts]
        """[row_count, kv_heads, row_tokens, head_dim] each."""
        self.offset: int | mx.array = 0
        """Position of the next new token: of all rows, or int32 [rows]. The model's rotary
        embedding reads it."""
        self.view: View = UniformView(0, 0, 0, 0)

    @property
    def keys(self) -> mx.array:
        """Keys of all rows. mlx-lm's pipelines set them to make later work depend on a send."""
        return self.arrays[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.arrays[0] = keys

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | Quantized, mx.array | Quantized]:
        """Write new keys and values at the ends of the rows of the present forward.

        Args:
            keys: [rows, kv_heads, count, head_dim].
            values: [rows, kv_heads, count, head_dim].

        Returns:
            All keys and values of these rows that attention reads, [rows, kv_heads, tokens,
            head_dim]: arrays, or `Quantized` where rows are quantized. `tokens` is the length of
            the longest row; the mask hides the tokens after the end of a shorter one.
        """
        all_keys, all_values = self._store([keys, values])
        return all_keys, all_values

    def update_and_fetch_each(
        self, keys: mx.array, values: mx.array
    ) -> list[tuple[mx.array, mx.array]]:
        """Write the keys and values of a forward that concatenates chunks, see `ConcatenatedView`.

        Args:
            keys: [1, kv_heads, count, head_dim].
            values: [1, kv_heads, count, head_dim].

        Returns:
            Per chunk all keys and values of its row, [1, kv_heads, tokens, head_dim].
        """
        view = self.view
        assert isinstance(view, ConcatenatedView)
        pairs = zip(self.arrays, (keys, values), strict=True)
        all_keys, all_values = self.arrays = [view.write(array, new) for array, new in pairs]
        return [(part.fetch(all_keys), part.fetch(all_values)) for part in view.parts]

    def make_mask(
        self,
        N: int,  # noqa: N803  (mlx-lm passes it by this name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the attention mask for the new tokens of the present forward.

        Args:
            N: number of new tokens per row.
            return_array: whether the mask must be an array, never "causal".
            window_size: length of a sliding window in tokens; None: all earlier tokens are visible.

        Returns:
            None, "causal", or a bool array that is true where a token may attend.
        """
        assert not isinstance(self.view, InPlaceView | ConcatenatedView)
        return self.view.mask(N, window_size, return_array=return_array)

    def copies_wait_for_device(self, rows: int, tokens: int, count: int) -> bool:
        """Do as `KVStore.copies_wait_for_device`, for this layer."""
        del rows, tokens, count
        return False

    def resize(self, row_count: int, row_tokens: int, rows: int, columns: int) -> None:
        """Replace the arrays, keeping the contents of rows [0, rows) up to `columns`.

        Args:
            row_count: new number of rows.
            row_tokens: new capacity of a row in tokens.
            rows: number of rows to keep.
            columns: number of tokens per row to keep.
        """
        self.arrays = [
            _resized(array, row_count, row_tokens, rows, columns) for array in self.arrays
        ]

    def _store(self, new: list[mx.array]) -> list[mx.array]:
        """Write one array per part; return the parts that attention reads."""
        view = self.view
        assert not isinstance(view, InPlaceView | ConcatenatedView)
        self.arrays = [view.write(array, one) for array, one in zip(self.arrays, new, strict=True)]
        self.offset = view.offset_after
        if isinstance(view, PaddedView):
            # The rows were empty, so attention reads only the new tokens.
            return new
        return [view.fetch(array) for array in self.arrays]


class QuantizedRowLayer(RowLayer):
    """Like `RowLayer`, with keys and values stored quantized.

    Attention reads a copy of them in the type that the model computes.
    """

    def __init__(self, parts: Sequence[BlockPart], bits: int) -> None:
        """Make empty arrays.

        Args:
            parts: shapes of the keys and of the values that the model computes.
            bits: bits per number, 4 or 8.

        Raises:
            ValueError: when no group size divides the width of keys and values.
        """
        self.stored_bits = bits
        """Per number. mlx-lm takes a cache with an attribute `bits` for one of packed numbers."""
        self.stored_group = group_size(parts)
        """Numbers that share a scale and a bias."""
        self._token_bytes = sum(one.heads * one.dim * one.dtype.size for one in parts)
        super().__init__([packed for part in parts for packed in self._packed_parts(part)])

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | Quantized, mx.array | Quantized]:
        """Quantize new keys and values and write them; see `RowLayer.update_and_fetch`."""
        all_keys, all_values = self._store_quantized(keys, values)
        rows, _, tokens, _ = all_keys[0].shape
        if self.copies_wait_for_device(rows, tokens, keys.shape[2]):
            # The copies of all layers before are not needed any more.
            mx.eval(self.arrays)
        return self.dequantize(all_keys), self.dequantize(all_values)

    def copies_wait_for_device(self, rows: int, tokens: int, count: int) -> bool:
        """Do as `KVStore.copies_wait_for_device`, for this layer."""
        del count
        return rows * tokens * self._token_bytes > COPY_BYTES_MAX

    def quantize(self, numbers: mx.array) -> Quantized:
        """Return numbers [..., head_dim] as they are stored."""
        packed, scales, biases = mx.quantize(numbers, self.stored_group, self.stored_bits)
        return packed, scales, biases

    def dequantize(self, stored: Quantized) -> mx.array:
        """Return stored numbers as [..., head_dim] in the type that the model computes."""
        return mx.dequantize(*stored, self.stored_group, self.stored_bits)

    def _store_quantized(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        new = [*self.quantize(keys), *self.quantize(values)]
        stored = self._store(new)
        return (stored[0], stored[1], stored[2]), (stored[3], stored[4], stored[5])

    def _packed_parts(self, part: BlockPart) -> list[BlockPart]:
        groups = BlockPart(part.heads, part.dim // self.stored_group, part.dtype)
        numbers = BlockPart(part.heads, part.dim * self.stored_bits // 32, mx.uint32)
        return [numbers, groups, groups]


class PackedRowLayer(QuantizedRowLayer):
    """A quantized layer whose packed numbers mlx-lm's attention multiplies for few tokens per row.

    That saves a copy. For many tokens it would take more memory than the copy: for the scores of
    each new token with all others.
    """

    def __init__(self, parts: Sequence[BlockPart], bits: int) -> None:
        """Make empty arrays; arguments and errors as those of `QuantizedRowLayer`."""
        super().__init__(parts, bits)
        self.group_size = self.stored_group

    def copies_wait_for_device(self, rows: int, tokens: int, count: int) -> bool:
        """Do as `KVStore.copies_wait_for_device`, for this layer."""
        return count > PACKED_TOKENS_MAX and super().copies_wait_for_device(rows, tokens, count)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | Quantized, mx.array | Quantized]:
        """Quantize new keys and values and write them at the ends of the present forward's rows.

        Args:
            keys: [rows, kv_heads, count, head_dim].
            values: [rows, kv_heads, count, head_dim].

        Returns:
            Keys and values of all tokens that attention reads, [rows, kv_heads, tokens, any], for
            few new tokens as packed numbers, scales and biases each.
        """
        if keys.shape[2] > PACKED_TOKENS_MAX:
            self.__dict__.pop("bits", None)
            return super().update_and_fetch(keys, values)
        self.bits = self.stored_bits
        return self._store_quantized(keys, values)


def make_row_layer(
    parts: Sequence[BlockPart], bits: int, *, reads_packed: bool | None = None
) -> RowLayer:
    """Return a layer without rows.

    Args:
        parts: shapes of the keys and of the values that the model computes.
        bits: bits per stored number, 4 or 8; 0: the type that the model computes.
        reads_packed: whether attention gets packed numbers; None: where this device can.

    Raises:
        ValueError: when these shapes cannot be quantized.
    """
    if not bits:
        return RowLayer(parts)
    if reads_packed is None:
        # MLX has no products of many tokens with packed keys on CUDA.
        reads_packed = device_kind() != "cuda"
    return (PackedRowLayer if reads_packed else QuantizedRowLayer)(parts, bits)


def group_size(parts: Sequence[BlockPart]) -> int:
    """Return how many numbers of a key or value share a quantization scale.

    Args:
        parts: shapes of the layer's keys and of its values.

    Returns:
        64, MLX's default, or 32 where 64 does not divide the widths of both.

    Raises:
        ValueError: when 32 does not divide them either.
    """
    for size in (64, 32):
        if all(part.dim and part.dim % size == 0 for part in parts):
            return size
    widths = sorted({part.dim for part in parts})
    raise ValueError(f"heads of width {widths} cannot be divided into groups of 64 or 32")


def _resized(old: mx.array, row_count: int, row_tokens: int, rows: int, columns: int) -> mx.array:
    new = mx.zeros((row_count, old.shape[1], row_tokens, old.shape[3]), dtype=old.dtype)
    if rows and columns:
        new[:rows, :, :columns] = old[:rows, :, :columns]
    return new
