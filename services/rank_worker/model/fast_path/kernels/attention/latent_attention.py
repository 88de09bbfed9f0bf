"""Kernels of latent attention. Owns how heads are divided over groups of threads."""

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.attention.head_products import HeadProducts
from services.rank_worker.model.fast_path.kernels.attention.row_places import (
    TILE_TOKENS,
    RowPlaces,
    TileSums,
    halves,
    tile_count,
    write_first,
)
from services.rank_worker.model.fast_path.kernels.dialects import (
    Gpu,
    largest_divisor,
    make_kernel,
    norm_threads,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    CHUNK,
    DTYPES,
    HEADER,
    OUTPUTS,
    can_multiply,
)
from shared.log import Log

_log = Log("rank_worker.fast_path")

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

    def halves(self) -> list["NewLatents"]:
        """Return those of the first half of the rows, and of the others."""
        parts = zip(*map(halves, (self.queries, self.absorbed, self.projected)), strict=True)
        return [NewLatents(*part) for part in parts]


class LatentAttentionKernels:
    """Starts the kernels on one kind of GPU. Compiled kernels are kept by MLX."""

    def __init__(self, device: Gpu) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        inputs = ["queries", "absorbed", "projected", "latents", "rotated_keys"]
        inputs += ["lengths", "slots", "rotations", "latent_weight", "constants"]
        outputs = ["attended", "tile_sums"]
        self._attend = make_kernel(
            device, "latent/latent_attention", inputs, outputs, in_place=True
        )
        self._write = make_kernel(
            device, "latent/write_latents", inputs, ["written"], in_place=True
        )
        self._tensor_attend = None
        """Uses tensor cores; None: this GPU has none that it can use."""
        self.products = None
        """Products with one matrix per head, also by tensor cores; None: MLX multiplies."""
        if device == "cuda":
            path = "latent/tensor_latent_attention"
            self._tensor_attend = make_kernel(
                device, path, inputs, outputs, header=HEADER, in_place=True
            )
            self.products = HeadProducts()
        names = ["input", "weight", "constants"]
        self._part_norm = make_kernel(device, "norms/part_norm", names, ["normalized"])
        self._tile_sums = TileSums(device)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the kernel for tensor cores serves the shapes and dtypes that fit it."""
        return self._tensor_attend is not None

    def leave_tensor_cores(self) -> None:
        """Have the other kernel serve all shapes, and MLX multiply."""
        self._tensor_attend = self.products = None

    def find_fault(self, shapes: Collection[LatentShape], dtype: mx.Dtype) -> str:
        """Compile and run the kernels once; return why they cannot serve, "" if they can.

        Without the kernels for tensor cores the other one serves, and MLX multiplies.

        Args:
            shapes: of all attentions, each once.
            dtype: of the model.
        """
        for shape in shapes:
            if shape.latent % _WIDTH_UNIT or shape.rotated % _WIDTH_UNIT:
                return f"no kernel for latents of {shape.latent} and {shape.rotated} numbers"
            if _shared_numbers(shape, 1, dtype) > _SHARED_NUMBERS_MAX:
                return f"no kernel for latents of {shape.latent} numbers"
        fault = self._try(shapes, dtype)
        if fault and self._tensor_attend is not None:
            _log.info("no_tensor_cores", detail=fault)
            self.leave_tensor_cores()
            fault = self._try(shapes, dtype)
        return f"a kernel does not run ({fault})" if fault else ""

    def _try(self, shapes: Collection[LatentShape], dtype: mx.Dtype) -> str:
        return first_error(functools.partial(self._attend_once, dtype=dtype), shapes)

    def _attend_once(self, shape: LatentShape, dtype: mx.Dtype) -> None:
        """Attend to one row, of one tile and of two."""
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
        for length in (1, TILE_TOKENS):
            places = RowPlaces(
                *(mx.array([length]), mx.array([0]), tile_count(length)),
                tokens_share_rows=length > 1,
            )
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
        """Write the new latent and key of each row, and attend to all tokens of the row.

        Args:
            shape: of the attention.
            weights: of the layer.
            new: the new token of each row.
            latents: [row_count, 1, room, latent], row-contiguous, changed in place. MLX does not
                know of the change: all other work on them must begin after this is computed.
            rotated_keys: the same for the rotated parts of keys, [row_count, 1, room, rotated].
            places: where the rows are in these arrays.
            rotations: table of `Rotation`, `rotated` numbers per row.

        Returns:
            [rows, query_heads, 1, latent].
        """
        rows, heads, _, width = new.absorbed.shape
        dtype, tiles = new.absorbed.dtype, places.tiles
        inputs = [
            *(new.queries, new.absorbed, new.projected, latents, rotated_keys),
            *(places.lengths, places.slots, rotations, weights.norm, weights.constants),
        ]
        if places.must_be_written:
            grid = (_THREADS, 1, rows)
            lengths = write_first(self._write, inputs, _template(shape, dtype, 0), grid)
            places = places.written(lengths)
            return self.attend(shape, weights, new, latents, rotated_keys, places, rotations)
        if places.has_many_sums(heads, width):
            parts = zip(new.halves(), places.halves(), halves(rotations), strict=True)
            attended_parts = [
                self.attend(shape, weights, its, latents, rotated_keys, where, table)
                for its, where, table in parts
            ]
            return mx.concatenate(attended_parts)
        kernel, shared_by = self._choose(shape, dtype)
        result, no_result = (rows, heads, 1, width), (1,)
        # One tile gives the result, several give sums of tiles. The kernel sees which.
        sums = (rows, heads, tiles, width + 2) if tiles > 1 else (1,)
        attended: mx.array
        attended, tile_sums = kernel(
            inputs=inputs,
            template=_template(shape, dtype, shared_by),
            grid=(heads // shared_by * _THREADS, rows, tiles),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[result if tiles == 1 else no_result, sums],
            output_dtypes=[dtype, mx.float32],
        )
        if tiles > 1:
            attended = self._tile_sums.add_up(tile_sums, places.lengths, dtype, result)
        return attended

    def _choose(self, shape: LatentShape, dtype: mx.Dtype) -> tuple[Any, int]:
        """Return the kernel, and the heads of a group."""
        if self._tensor_attend is not None and _fits_tensor_cores(shape, dtype):
            return self._tensor_attend, largest_divisor(shape.query_heads, _TENSOR_HEADS_MAX)
        return self._attend, _heads_of_group(shape, dtype)


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
