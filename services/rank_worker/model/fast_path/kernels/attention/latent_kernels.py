"""Kernels of latent attention. Owns how heads are divided over groups of threads."""

import dataclasses
import functools
import math
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.attention.head_products import HeadProducts
from services.rank_worker.model.fast_path.kernels.attention.row_places import (
    TILE_TOKENS,
    RowPlaces,
)
from services.rank_worker.model.fast_path.kernels.attention.tiled_attention import (
    AttentionKernel,
    TiledAttention,
    attend_in_parts,
    tried_places,
)
from services.rank_worker.model.fast_path.kernels.dialects import (
    Gpu,
    largest_divisor,
    make_kernel,
    norm_threads,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    CHUNK,
    DTYPES,
    HEADER,
    OUTPUTS,
    can_multiply,
)

_THREADS = 256
"""Threads of a group."""
_HEADS_MAX = 8
"""Heads of a group; each thread sums up some numbers of the latents for all of them."""
_TENSOR_HEADS_MAX = 16
"""Heads of a group whose products tensor cores compute: the rows of a tile."""
_SHARED_NUMBERS_MAX = 8_000
"""Numbers of 4 bytes that a group's threads share; Metal allows 32 KiB."""
_TENSOR_SHARED_MAX = 48 * 1024
"""Bytes that they share on CUDA."""
_WIDTH_UNIT = 8
"""Divides the widths of latents and of rotated parts, so that vectors of numbers fit."""
_VALUE_NUMBERS_MAX = 4
"""Numbers of a latent that one thread sums up."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatentShape:
    """What the kernels of a latent attention are compiled for."""

    query_heads: int
    latent: int
    """Numbers of a latent; a multiple of 8."""
    rotated: int
    """Numbers of the rotated part of queries and keys; a multiple of 8."""
    plain: int
    """Numbers of the other part of queries, before it is multiplied into the space of latents."""
    is_traditional: bool
    """Rotated pairs stand beside each other, not half of `rotated` apart."""

    @property
    def head(self) -> int:
        """Numbers of a head of new queries: the plain part, then the rotated one."""
        return self.plain + self.rotated


@dataclasses.dataclass(frozen=True, slots=True)
class LatentWeights:
    """Arrays of one layer's attention that its kernel reads."""

    norm: mx.array
    """[latent], of the norm of new latents."""
    constants: mx.array
    """`device_numbers`: factor of the scores, epsilon of that norm."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewLatents:
    """What a layer has computed of its new tokens, row-contiguous and of one dtype."""

    queries: mx.array
    """[rows, any]: each row begins with `head` numbers of each head, not rotated yet."""
    absorbed: mx.array
    """[rows, query_heads, 1, latent]: their plain part in the space of latents."""
    projected: mx.array
    """[rows, any]: each row ends with the new latent, not normalized yet, and the new key's rotated
    part, not rotated yet. May be the same array as `queries`."""


class LatentAttentionKernels(TiledAttention):
    """Starts the kernels on one kind of GPU. Compiled kernels are kept by MLX."""

    def __init__(self, device: Gpu) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        super().__init__(device)
        inputs = ["queries", "absorbed", "projected", "latents", "rotated_keys"]
        inputs += ["lengths", "slots", "rotations", "latent_weight", "constants"]
        outputs = ["attended", "tile_sums"]
        self._attend = make_kernel(
            device, "latent/latent_attention", inputs, outputs, in_place=True
        )
        self._write = make_kernel(
            device, "latent/write_latents", inputs, ["written"], in_place=True
        )
        self.products = HeadProducts() if device == "cuda" else None
        """Products with one matrix per head, also by tensor cores; None: MLX multiplies."""
        if device == "cuda":
            path = "latent/tensor_latent_attention"
            self._tensor_attend = make_kernel(
                device, path, inputs, outputs, header=HEADER, in_place=True
            )
        names = ["input", "weight", "constants"]
        self._part_norm = make_kernel(device, "norms/part_norm", names, ["normalized"])

    def leave_tensor_cores(self) -> None:
        """Have the other kernel serve all shapes, and MLX multiply."""
        super().leave_tensor_cores()
        self.products = None

    def _obstacle(self, shape: LatentShape, dtype: mx.Dtype) -> str:
        if shape.latent % _WIDTH_UNIT or shape.rotated % _WIDTH_UNIT:
            return f"no kernel for latents of {shape.latent} and {shape.rotated} numbers"
        if _shared_numbers(shape, 1, dtype) > _SHARED_NUMBERS_MAX:
            return f"no kernel for latents of {shape.latent} numbers"
        return ""

    def _attend_once(self, shape: LatentShape, dtype: mx.Dtype) -> None:
        heads = shape.query_heads
        latents, keys = (
            mx.zeros((1, 1, TILE_TOKENS + 1, width), dtype=dtype)
            for width in (shape.latent, shape.rotated)
        )
        weights = LatentWeights(mx.zeros((shape.latent,), dtype=dtype), mx.ones((2,)))
        new = NewLatents(
            mx.ones((1, heads * shape.head), dtype=dtype),
            mx.ones((1, heads, 1, shape.latent), dtype=dtype),
            mx.ones((1, shape.latent + shape.rotated), dtype=dtype),
        )
        matrices = mx.ones((heads, OUTPUTS, CHUNK), dtype=dtype)
        if self.products is not None and can_multiply(matrices):
            mx.eval(self.products.multiply(matrices.reshape(1, -1), matrices, CHUNK))
        normalized = self.normalize_part(new.projected, weights.norm, mx.zeros((1,)))
        rotations = mx.ones((1, shape.rotated), dtype=mx.float32)
        for places in tried_places():
            mx.eval(normalized, self.attend(shape, weights, new, latents, keys, places, rotations))

    def normalize_part(self, rows: mx.array, weight: mx.array, epsilon: mx.array) -> mx.array:
        """Normalize the first numbers of each row (RMS norm).

        Args:
            rows: [rows, any], row-contiguous.
            weight: [width], of the norm.
            epsilon: `device_numbers`, of the norm.

        Returns:
            [rows, width].
        """
        count, stride = rows.shape
        width, dtype = weight.size, rows.dtype
        threads = norm_threads(width, dtype)
        normalized: mx.array
        (normalized,) = self._part_norm(
            inputs=[rows, weight, epsilon],
            template=[
                *(("T", dtype), ("DIM", width)),
                # Each row begins at a whole vector.
                ("VECTOR_SIZE", vector_size(math.gcd(width, stride), dtype)),
                ("THREADS", threads),
            ],
            grid=(threads, count, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(count, width)],
            output_dtypes=[dtype],
        )
        return normalized

    def attend(
        self,
        shape: LatentShape,
        weights: LatentWeights,
        new: NewLatents,
        latents: mx.array,
        rotated_keys: mx.array,
        places: RowPlaces,
        rotations: mx.array,
    ) -> mx.array:
        """Write the latent and key of each new token, and attend to its row up to itself.

        Args:
            shape: of the attention.
            weights: of the layer.
            new: of the new tokens.
            latents: [row_count, 1, room, latent], row-contiguous, changed in place. MLX does not
                know of the change: all other work on them must begin after this is computed.
            rotated_keys: the same for the rotated parts of keys, [row_count, 1, room, rotated].
            places: where the tokens are in these arrays.
            rotations: table of `Rotation`, `rotated` numbers per token.

        Returns:
            [tokens, query_heads, 1, latent].
        """
        tokens, heads, _, width = new.absorbed.shape
        dtype = new.absorbed.dtype
        chosen = self._choose(shape, dtype)

        def inputs(where: RowPlaces, *rows: mx.array) -> list[mx.array]:
            *new_rows, table = rows
            return [
                *(*new_rows, latents, rotated_keys, where.lengths, where.slots, table),
                *(weights.norm, weights.constants),
            ]

        def attend(where: RowPlaces, *rows: mx.array) -> mx.array:
            template = _template(shape, dtype, chosen.heads)
            result = (len(where.lengths), heads, 1, width), dtype
            given = inputs(where, *rows)
            return self._attend_to_tiles(chosen, given, template, where, result, heads)

        rows, grid = (new.queries, new.absorbed, new.projected, rotations), (_THREADS, 1, tokens)
        places = self._write_first(places, inputs(places, *rows), _template(shape, dtype, 0), grid)
        return attend_in_parts(attend, places.parts(heads, width), rows)

    def _choose(self, shape: LatentShape, dtype: mx.Dtype) -> AttentionKernel:
        if self._tensor_attend is not None and _fits_tensor_cores(shape, dtype):
            heads = largest_divisor(shape.query_heads, _TENSOR_HEADS_MAX)
            return AttentionKernel(self._tensor_attend, heads, _THREADS)
        return AttentionKernel(self._attend, _heads_of_group(shape, dtype), _THREADS)


@functools.lru_cache(maxsize=64)
def _heads_of_group(shape: LatentShape, dtype: mx.Dtype) -> int:
    most = _HEADS_MAX
    while _shared_numbers(shape, most, dtype) > _SHARED_NUMBERS_MAX:
        most -= 1
    return largest_divisor(shape.query_heads, most)


def _fits_tensor_cores(shape: LatentShape, dtype: mx.Dtype) -> bool:
    """Tell whether tensor cores take these numbers, and what a group shares has room."""
    chunks = -(-shape.latent // CHUNK) + -(-shape.rotated // CHUNK)
    # Of queries, and of TILE_TOKENS weights.
    parts = (chunks + TILE_TOKENS // CHUNK) * CHUNK * _TENSOR_HEADS_MAX * dtype.size
    sums = (2 * _THREADS // 32 + 1) * _TENSOR_HEADS_MAX
    numbers = (_TENSOR_HEADS_MAX + 1) * shape.rotated + shape.latent + sums
    return dtype in DTYPES and parts + 4 * numbers <= _TENSOR_SHARED_MAX


def _shared_numbers(shape: LatentShape, heads: int, dtype: mx.Dtype) -> int:
    """Return how many numbers the threads of a group with these heads share."""
    of_warp = 32 * _sizes(shape, dtype)[0]
    query = -(-shape.latent // of_warp) * of_warp + shape.rotated
    # Beside its query, a head has a weight per token, the new one too, and two numbers of the tile.
    return heads * (query + TILE_TOKENS + 3) + shape.rotated + shape.latent


def _sizes(shape: LatentShape, dtype: mx.Dtype) -> tuple[int, int, int]:
    """Return how many numbers of a latent, of a rotated part, and of a value threads read at once.

    A warp's threads share a key, those of a group share a value.
    """
    value = _VALUE_NUMBERS_MAX
    while value > 1 and value * _THREADS > shape.latent:
        value //= 2
    return (
        vector_size(max(shape.latent // 32, 1), dtype),
        vector_size(max(shape.rotated // 32, 1), dtype),
        value,
    )


@functools.lru_cache(maxsize=64)
def _template(shape: LatentShape, dtype: mx.Dtype, heads: int) -> list[tuple[str, Any]]:
    latent_size, rotated_size, value_size = _sizes(shape, dtype)
    return [
        ("T", dtype),
        ("QUERY_HEADS", shape.query_heads),
        ("HEADS", heads),
        ("HEAD", shape.head),
        ("LATENT", shape.latent),
        ("ROTATED", shape.rotated),
        ("VECTOR_SIZE", latent_size),
        ("ROTATED_SIZE", rotated_size),
        ("VALUE_SIZE", value_size),
        ("THREADS", _THREADS),
        ("TILE", TILE_TOKENS),
        ("TRADITIONAL", shape.is_traditional),
    ]
