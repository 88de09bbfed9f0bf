"""The rows of a forward as kernels of all kinds of attention see them.

Owns how a row is divided into tiles, and tokens into parts that have memory for their sums.
"""

import dataclasses
from typing import Self

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_views import InPlaceView

TILE_TOKENS = 256
"""Tokens that one group of threads sums up. A row's result depends on it, and on nothing else of
the batch."""
SUMS_BYTES_MAX = 1 << 29
"""Most memory for the sums of tiles of one operation; more rows are divided among several."""


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
        """Return the places of tokens that are written, given their lengths anew."""
        return dataclasses.replace(self, lengths=lengths, are_written=True)

    def has_many_sums(self, heads: int, width: int) -> bool:
        """Tell whether the sums of tiles of all tokens, of heads of this width, are too large.

        Of a long row beside many short ones, all have sums of as many tiles.
        """
        tokens, tiles = len(self.lengths), self.tiles
        return min(tokens, tiles) > 1 and 4 * tokens * heads * tiles * (width + 2) > SUMS_BYTES_MAX

    def parts(self, heads: int, width: int) -> list["RowPlaces"]:
        """Return the places of parts of the tokens, in order, none of which `has_many_sums`."""
        if not self.has_many_sums(heads, width):
            return [self]
        return [part for half in self.halves() for part in half.parts(heads, width)]

    def halves(self) -> list["RowPlaces"]:
        """Return the places of the first half of the tokens, and of the others."""
        half = len(self.lengths) // 2
        return [
            dataclasses.replace(
                self, lengths=self.lengths[part], slots=self.slots[part], arrived=None
            )
            for part in (slice(half), slice(half, None))
        ]


def tile_count(length_max: int) -> int:
    """Return how many tiles a row of `length_max` tokens and its new token need."""
    return length_max // TILE_TOKENS + 1
