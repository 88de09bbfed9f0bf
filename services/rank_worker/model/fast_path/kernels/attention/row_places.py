"""The rows of a forward as kernels of all kinds of attention see them.

Owns how a row is divided into tiles, how these are added up, and how new tokens that attend to each
other are written first.
"""

import dataclasses
from typing import Any, Self

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.fast_path.kernels.dialects import Gpu, make_kernel

TILE_TOKENS = 256
"""Tokens that one group of threads sums up. A row's result depends on it, and on nothing else of
the batch."""
SUMS_BYTES_MAX = 1 << 29
"""Most memory for the sums of tiles of one operation; more rows are divided among several."""
_ADDING_THREADS = 128
"""Of a group that adds up tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the new tokens of one forward are in the KV arrays."""

    lengths: mx.array
    """int32 [tokens]: tokens before each in its row."""
    slots: mx.array
    """int32 [tokens]: index of each one's row in the arrays."""
    tiles: int
    """Tiles of TILE_TOKENS that the longest row needs, its new tokens included; not used for
    prompts."""
    arrived: mx.array | None = None
    """int32 zeros [tokens, query heads], with which one forward's kernels count groups of threads
    that have finished; None: the forward has one attention, or its rows one tile."""
    tokens_share_rows: bool = False
    """Some are of the same row, side by side, and attend to each other: they must be written
    first."""
    are_written: bool = False
    """Those that share rows are in the arrays already."""
    blocks: mx.array | None = None
    """Of prompts, see `InPlaceView`; None: each token attends by itself."""

    @classmethod
    def of(cls, view: InPlaceView) -> Self:
        """Return the places of a forward with one attention, given where its tokens are."""
        tiles, shares_rows = tile_count(view.longest), view.tokens_share_rows
        return cls(
            view.lengths, view.slots, tiles, tokens_share_rows=shares_rows, blocks=view.blocks
        )

    @property
    def must_be_written(self) -> bool:
        """Whether the tokens must be written before any of them attends to others."""
        return self.tokens_share_rows and not self.are_written

    def written(self, lengths: mx.array) -> "RowPlaces":
        """Return the places of tokens that are written, given the result of `write_first`."""
        return dataclasses.replace(self, lengths=lengths, are_written=True)

    def has_many_sums(self, heads: int, width: int) -> bool:
        """Tell whether the sums of tiles of all tokens, of heads of this width, are too large.

        Of a long row beside many short ones, all have sums of as many tiles.
        """
        tokens, tiles = len(self.lengths), self.tiles
        return min(tokens, tiles) > 1 and 4 * tokens * heads * tiles * (width + 2) > SUMS_BYTES_MAX

    def halves(self) -> list["RowPlaces"]:
        """Return the places of the first half of the tokens, and of the others."""
        half = len(self.lengths) // 2
        return [
            dataclasses.replace(
                self, lengths=self.lengths[part], slots=self.slots[part], arrived=None
            )
            for part in (slice(half), slice(half, None))
        ]


def halves(rows: mx.array) -> list[mx.array]:
    """Return the first half of the rows of an array, and the others."""
    return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]


def tile_count(length_max: int) -> int:
    """Return how many tiles a row of `length_max` tokens and its new token need."""
    return length_max // TILE_TOKENS + 1


def write_first(
    kernel: Any,
    inputs: list[mx.array],
    template: list[tuple[str, Any]],
    grid: tuple[int, int, int],
) -> mx.array:
    """Start a kernel that writes new tokens, before any of them attends to others of its row.

    Kernels that attend to the tokens of one at a time write it again, with the same numbers.

    Args:
        kernel: writes the tokens; its result is the tokens' lengths.
        inputs: of the kernel.
        template: of the kernel.
        grid: threads of a group, groups per token, tokens.

    Returns:
        Lengths as in `RowPlaces`, int32 [tokens], of which all that attends must be made.
    """
    lengths: mx.array
    (lengths,) = kernel(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=(grid[0], 1, 1),
        output_shapes=[grid[2:]],
        output_dtypes=[mx.int32],
    )
    return lengths


class TileSums:
    """Starts the kernel that adds up the tiles of rows."""

    def __init__(self, device: Gpu) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        self._kernel = make_kernel(device, "add_tiles", ["tile_sums", "lengths"], ["attended"])

    def add_up(
        self, tile_sums: mx.array, lengths: mx.array, dtype: mx.Dtype, shape: tuple[int, ...]
    ) -> mx.array:
        """Add up.

        Args:
            tile_sums: float32 [rows, query heads, tiles, width + 2]: sums of a tile's values, its
                highest score, and the sum of its weights.
            lengths: see `RowPlaces`.
            dtype: of the result.
            shape: of the result, with its numbers in the order rows, query heads, width.
        """
        rows, query_heads, _, numbers = tile_sums.shape
        width = numbers - 2
        attended: mx.array
        (attended,) = self._kernel(
            inputs=[tile_sums, lengths],
            template=[
                ("T", dtype),
                ("HEAD_DIM", width),
                ("QUERY_HEADS", query_heads),
                ("THREADS", _ADDING_THREADS),
                ("TILE", TILE_TOKENS),
            ],
            grid=(_ADDING_THREADS, query_heads, rows),
            threadgroup=(_ADDING_THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )
        return attended
