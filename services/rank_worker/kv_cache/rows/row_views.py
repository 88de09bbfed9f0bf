"""Where one forward reads and writes the rows. Built once per step, shared by all layers.

Arrays of a layer are [row_count, kv_heads, row_tokens, head_dim]; new keys or values are
[rows, kv_heads, count, head_dim].
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.base import create_causal_mask

Indices = Sequence[int] | npt.NDArray[np.int64]
"""Of rows, or of tokens in them."""


@dataclasses.dataclass(slots=True)
class UniformView:
    """Adjacent rows of equal length in one forward: a prefill chunk, one decode, or several.

    Writing is a slice update and no mask array is needed, which is fastest in MLX.
    """

    first: int
    last: int
    """Rows [first, last)."""
    offset: int
    """First column that is written: the position of the first new token."""
    offset_after: int
    """Column, and position, after the last new token."""

    @property
    def ends(self) -> list[int]:
        """Tokens of each row after this forward."""
        return [self.offset_after] * (self.last - self.first)

    def write(self, target: mx.array, new: mx.array) -> mx.array:
        """Write new keys or values into a layer's array at the rows and columns of this view.

        Args:
            target: [row_count, kv_heads, row_tokens, head_dim], changed in place and returned.
            new: [rows, kv_heads, count, head_dim].
        """
        target[self.first : self.last, :, self.offset : self.offset_after] = new
        return target

    def fetch(self, source: mx.array) -> mx.array:
        """Return the filled part of these rows, which attention reads.

        Args:
            source: [row_count, kv_heads, row_tokens, head_dim].

        Returns:
            [rows, kv_heads, offset_after, head_dim].
        """
        return source[self.first : self.last, :, : self.offset_after]

    def mask(
        self, count: int, window_size: int | None, *, return_array: bool
    ) -> mx.array | str | None:
        """Return the attention mask in the form that mlx-lm's own caches use.

        Args:
            count: new tokens per row.
            window_size: length of a sliding window in tokens; None: all earlier tokens are visible.
            return_array: never return "causal".

        Returns:
            None, "causal", or bool [count, offset_after] that is true where a token may attend.
        """
        if window_size is None and count == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        mask: mx.array = create_causal_mask(count, self.offset, window_size=window_size)
        return mask


class RaggedView:
    """Decoding rows of different lengths in one forward over rows 0 to the last one of them.

    New tokens of each row are written after its own length, and attend to no column beyond them.
    """

    def __init__(
        self, lengths: Sequence[int], written: Sequence[int], count: int, room: int
    ) -> None:
        """Build the indices and offsets.

        Args:
            lengths: tokens in every row before this forward, from row 0.
            written: rows that get new tokens, rising. Rows between them are computed and ignored.
            count: new tokens per row.
            room: capacity of the rows in tokens.
        """
        self._rows = written[-1] + 1
        self._columns = max(lengths[row] for row in written) + count
        self._masks: dict[int | None, mx.array] = {}
        self.ends = [min(one + count, self._columns) for one in lengths[: self._rows]]
        """Tokens of each fetched row after this forward."""
        starts = mx.array(list(lengths), dtype=mx.int32)
        self.offset = starts[: self._rows]
        self.offset_after = self.offset + count
        positions = starts[:, None]
        if count > 1:
            positions = positions + mx.arange(count, dtype=mx.int32)
        self._positions = positions[: self._rows]
        self._spare_rows = len(lengths) - self._rows
        # Other rows receive their ignored results after their length, where they are masked and
        # overwritten later. A full row has no place for them, so then only `written` is written.
        others = set(range(len(lengths))) - set(written)
        self._taken: mx.array | None = None
        if any(lengths[row] + count > room for row in others):
            self._taken = mx.array(list(written), dtype=mx.int32)
        self._index = positions[:, None, :, None]

    def write(self, target: mx.array, new: mx.array) -> mx.array:
        """Write new keys or values into a layer's array at each row's own length; return the array.

        Args:
            target: [row_count, kv_heads, row_tokens, head_dim].
            new: [rows, kv_heads, count, head_dim].
        """
        if self._taken is not None:
            columns = self._positions[self._taken]
            update = new[self._taken].transpose(0, 2, 1, 3)
            target[self._taken[:, None], :, columns] = update
            return target
        if self._spare_rows:
            new = mx.pad(new, [(0, self._spare_rows), (0, 0), (0, 0), (0, 0)])
        # This adds two nodes to the graph. Indexed assignment adds a dozen for every layer, which
        # doubled the time of a step on a GPU.
        written: mx.array = mx.put_along_axis(target, self._index, new, axis=2)
        return written

    def fetch(self, source: mx.array) -> mx.array:
        """Return all rows up to the end of the longest written row, for attention to read.

        Args:
            source: [row_count, kv_heads, row_tokens, head_dim].

        Returns:
            [rows, kv_heads, columns, head_dim].
        """
        return source[: self._rows, :, : self._columns]

    def mask(self, count: int, window_size: int | None, *, return_array: bool) -> mx.array:
        """Return the attention mask of all rows, built once per window size.

        Args:
            count: not used: the view knows it.
            window_size: length of a sliding window in tokens; None: all earlier tokens are visible.
            return_array: not used: the mask is always an array.

        Returns:
            bool [rows, 1, count, columns] that is true where a token may attend.
        """
        del count, return_array
        mask = self._masks.get(window_size)
        if mask is None:
            columns = mx.arange(self._columns, dtype=mx.int32)
            positions = self._positions[:, None, :, None]
            mask = columns <= positions
            if window_size is not None:
                mask = mask & (columns > positions - window_size)
            self._masks[window_size] = mask
        return mask


class PaddedView(UniformView):
    """Several empty rows that one right-padded forward fills. No token attends to the padding."""

    def __init__(self, slots: Sequence[int], columns: int) -> None:
        """Find how the rows are written.

        Args:
            slots: the rows.
            columns: width of the padded input in tokens.
        """
        are_adjacent = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        # No other range of rows is theirs.
        rows = (slots[0], slots[-1] + 1) if are_adjacent else (0, 0)
        super().__init__(*rows, 0, columns)
        self._row_index = None if are_adjacent else mx.array(list(slots), dtype=mx.int32)

    def write(self, target: mx.array, new: mx.array) -> mx.array:
        """Write new keys or values into the first columns of these rows; return the changed array.

        Args:
            target: [row_count, kv_heads, row_tokens, head_dim].
            new: [rows, kv_heads, columns, head_dim], padding included, which no token attends to.
        """
        if self._row_index is None:
            return super().write(target, new)
        target[self._row_index, :, : self.offset_after] = new
        return target


class ConcatenatedView:
    """Chunks of several rows side by side in one forward of a single input row.

    All of them are written before any is read: an array that is referenced is not written in place.
    """

    def __init__(self, parts: Sequence[UniformView]) -> None:
        """Build the borders of the chunks.

        Args:
            parts: where each chunk is written and read, in the order of the input.
        """
        self.parts = list(parts)
        self.offset = 0
        """Each part has its own, which attention reads."""
        counts = [one.offset_after - one.offset for one in parts]
        self._borders = list(itertools.accumulate(counts))[:-1]

    def split(self, x: mx.array) -> list[mx.array]:
        """Return the part of each chunk of an array [1, heads, count, head_dim]."""
        parts: Any = mx.split(x, self._borders, axis=2)
        return list(parts)

    def write(self, target: mx.array, new: mx.array) -> mx.array:
        """Write new keys or values of all chunks into a layer's array, and return it.

        Args:
            target: [row_count, kv_heads, row_tokens, head_dim], changed in place.
            new: [1, kv_heads, count, head_dim].
        """
        for part, own in zip(self.parts, self.split(new), strict=True):
            target = part.write(target, own)
        return target


PROMPT_BLOCK = 64
"""Most tokens of a prompt that kernels attend for together."""
_BLOCKS_STEP = 4
"""Divides the number of blocks of a forward."""


def prompt_blocks(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first token of each block, and the number of its tokens.

    Args:
        widths: of the chunks that stand side by side, in their order.
    """
    firsts = list(itertools.accumulate(widths, initial=0))[:-1]
    blocks = [
        (first + place, min(PROMPT_BLOCK, width - place))
        for first, width in zip(firsts, widths, strict=True)
        for place in range(0, width, PROMPT_BLOCK)
    ]
    # Repeats of the last block compute the same again; so a compiled forward has few shapes.
    return blocks + blocks[-1:] * (-len(blocks) % _BLOCKS_STEP)


class InPlaceView:
    """New tokens for which kernels attend, which write keys and values into the arrays.

    MLX does not know that they change. So a forward with this view can be started behind others
    without waiting and without copies, but nothing else may use the rows before it has ended.
    """

    def __init__(
        self,
        slots: Indices,
        lengths: Indices,
        *,
        tokens_share_rows: bool = False,
        blocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Build the indices.

        Args:
            slots: the row of each token.
            lengths: tokens before it in its row.
            tokens_share_rows: some are of the same row.
            blocks: of prompts, see `prompt_blocks`; the lengths of a block do not fall. Empty: each
                token attends by itself.
        """
        self.slots = mx.array(np.asarray(slots, dtype=np.int32))
        self.lengths = mx.array(np.asarray(lengths, dtype=np.int32))
        self.longest = int(np.max(lengths))
        """Tokens before the last one of the longest row."""
        self.tokens_share_rows = tokens_share_rows
        self.blocks = mx.array(np.array(blocks, dtype=np.int32)) if blocks else None
        """int32 [blocks, 2]; None: each token attends by itself."""
        self.offset = self.lengths
