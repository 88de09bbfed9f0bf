"""The frame of attention by tiles of rows, which is that of heads and of latents.

Owns the order of the kernels: new tokens that attend to each other are written first, then tiles
are attended to, then these are added up. Also owns when kernels for tensor cores are left.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.attention.row_places import (
    TILE_TOKENS,
    RowPlaces,
    tile_count,
)
from services.rank_worker.model.fast_path.kernels.dialects import Gpu, make_kernel
from services.rank_worker.model.fast_path.kernels.faults import first_error
from shared.log import Log

_log = Log("rank_worker.fast_path")

_ADDING_THREADS = 128
"""Of a group that adds up tiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel that attends, and how its threads are grouped."""

    kernel: Any
    heads: int
    """Query heads of a group."""
    threads: int
    """Of a group."""
    adds_up: bool = False
    """Its last group of a row adds up the tiles of the row."""


class TiledAttention(abc.ABC):
    """The common part of attention with heads and of attention with latents."""

    _write: Any
    """Writes new tokens; its result is their lengths."""
    _tensor_attend: Any = None
    """Uses tensor cores; None: this GPU has none that it can use."""

    def __init__(self, device: Gpu) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        self._tile_sums = TileSums(device)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the kernel for tensor cores serves the shapes and dtypes that fit it."""
        return self._tensor_attend is not None

    def leave_tensor_cores(self) -> None:
        """Have the other kernel serve all shapes."""
        self._tensor_attend = None

    def find_fault(self, shapes: Collection[Any], dtype: mx.Dtype) -> str:
        """Compile and run the kernels once; return why they cannot serve, "" if they can.

        Without the kernel for tensor cores the other one serves.

        Args:
            shapes: of all attentions, each once.
            dtype: of the model.
        """
        for shape in shapes:
            if obstacle := self._obstacle(shape, dtype):
                return obstacle
        attend_once = functools.partial(self._attend_once, dtype=dtype)
        fault = first_error(attend_once, shapes)
        if fault and self.has_tensor_cores:
            _log.info("no_tensor_cores", detail=fault)
            self.leave_tensor_cores()
            fault = first_error(attend_once, shapes)
        return f"a kernel does not run ({fault})" if fault else ""

    @abc.abstractmethod
    def _obstacle(self, shape: Any, dtype: mx.Dtype) -> str:
        """Return why no kernel is made for a shape, "" if there is one."""

    @abc.abstractmethod
    def _attend_once(self, shape: Any, dtype: mx.Dtype) -> None:
        """Attend to each of the `tried_places`."""

    def _write_first(
        self,
        places: RowPlaces,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
    ) -> RowPlaces:
        """Write new tokens before any of them attends to others of its row, if there are such.

        Kernels that attend to the tokens of one at a time write it again, with the same numbers.

        Args:
            places: where the tokens are.
            inputs: of the kernel that writes.
            template: of this kernel.
            grid: threads of a group, groups per token, tokens.

        Returns:
            Where the tokens are, of which the inputs of all that attends must be made.
        """
        if not places.must_be_written:
            return places
        (lengths,) = self._write(
            inputs=inputs,
            template=template,
            grid=grid,
            threadgroup=(grid[0], 1, 1),
            output_shapes=[grid[2:]],
            output_dtypes=[mx.int32],
        )
        return places.written(lengths)

    def _attend_to_tiles(
        self,
        chosen: AttentionKernel,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        places: RowPlaces,
        result: tuple[tuple[int, ...], mx.Dtype],
        heads: int,
    ) -> mx.array:
        """Attend to the tiles of each token's row, and add them up.

        Args:
            chosen: attends.
            inputs: of its kernel.
            template: of this kernel.
            places: where the tokens are.
            result: shape, with its numbers in the order tokens, query heads, width; and dtype.
            heads: query heads.
        """
        (shape, dtype), tokens, tiles = result, result[0][0], places.tiles
        width = math.prod(shape) // (tokens * heads)
        # One tile gives the result, several give sums of tiles. The kernel sees which.
        sums = (tokens, heads, tiles, width + 2) if tiles > 1 else (1,)
        is_done = tiles == 1 or chosen.adds_up
        attended: mx.array
        attended, tile_sums = chosen.kernel(
            inputs=inputs,
            template=template,
            grid=(heads // chosen.heads * chosen.threads, tokens, tiles),
            threadgroup=(chosen.threads, 1, 1),
            output_shapes=[shape if is_done else (1,), sums],
            output_dtypes=[dtype, mx.float32],
        )
        if not is_done:
            attended = self._tile_sums.add_up(tile_sums, places.lengths, dtype, shape)
        return attended


def attend_in_parts(
    attend: Callable[..., mx.array],
    places: list[RowPlaces],
    rows: Sequence[mx.array | None],
) -> mx.array:
    """Attend to the tokens of one part after the other.

    Args:
        attend: given the places of a part, and its share of each of `rows`.
        places: of each part.
        rows: arrays [tokens, ...] of all tokens; None stays None.

    Returns:
        The results of all tokens, in order.
    """
    if len(places) == 1:
        return attend(places[0], *rows)
    attended, start = [], 0
    for part in places:
        stop = start + len(part.lengths)
        attended.append(attend(part, *(None if one is None else one[start:stop] for one in rows)))
        start = stop
    return mx.concatenate(attended)


def tried_places() -> list[RowPlaces]:
    """Return the places of one token to try kernels with: in a row of one tile, and of two."""
    return [
        RowPlaces(
            *(mx.array([length]), mx.array([0]), tile_count(length)),
            tokens_share_rows=length > 1,
        )
        for length in (1, TILE_TOKENS)
    ]


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
            tile_sums: float32 [tokens, query heads, tiles, width + 2]: sums of a tile's values,
                its highest score, and the sum of its weights.
            lengths: see `RowPlaces`.
            dtype: of the result.
            shape: of the result, with its numbers in the order tokens, query heads, width.
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
