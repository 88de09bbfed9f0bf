"""Functions that start the kernels of the fast path on a GPU. Owns their template constants.

Lengths and tile counts are arguments, not template constants: each new constant compiles a kernel
anew, which takes seconds on CUDA.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import CUDA, METAL, read_source
from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from shared.log import Log

_log = Log("rank_worker.fast_path")

TILE_TOKENS = 256
"""Tokens that one group of threads sums up. A row's result depends on it, and on nothing else of
the batch."""
ATTENTION_THREADS = 128
"""Threads of a group; with 256, fewer groups fit on a processor of a GPU."""
HEADS_MAX = 5
"""Query heads of a group; more of them do not fit into the registers of its threads."""
_WIDE_HEAD_DIM = 128
"""From this width on, fewer heads fit."""
_LANES = 8
"""Threads that share a key; equal to LANES of the source."""
_ROW_THREADS = 256
"""Threads of a group that computes an activation."""
_ROW_THREADS_MAX = 512
"""Most threads of a group that normalizes a row; each reads a vector at a time."""
_VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention's kernels are compiled for."""

    query_heads: int
    kv_heads: int
    head_dim: int
    """Numbers per head; a multiple of 8."""
    rotated: int
    """Numbers of a head that the rotary embedding changes; 0: none."""
    is_traditional: bool
    """Rotated pairs stand beside each other, not half of `rotated` apart."""
    normalizes: bool
    """Queries and keys are normalized per head."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Arrays of one layer's attention that its kernel reads."""

    query_norm: mx.array
    """[head_dim] in the model's dtype; any array if heads are not normalized."""
    key_norm: mx.array
    """The same for keys."""
    constants: mx.array
    """float32 [3]: factor of the scores, epsilon of the queries' norm, epsilon of the keys'."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlaces:
    """The rows of one decode in the KV arrays."""

    lengths: mx.array
    """int32 [rows]: tokens in each row before this decode."""
    slots: mx.array
    """int32 [rows]: index of each row in the arrays."""
    tiles: int
    """Tiles of TILE_TOKENS that the longest row needs, its new token included."""


class Kernels:
    """Starts kernels on one kind of GPU. Compiled kernels are kept by MLX."""

    def __init__(self, device: Literal["cuda", "metal"]) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        self._dialect = CUDA if device == "cuda" else METAL
        self._make: Any = mx.fast.cuda_kernel if device == "cuda" else mx.fast.metal_kernel
        inputs = ["qkv", "keys", "values", "lengths", "slots", "rotations"]
        inputs += ["query_weight", "key_weight", "constants"]
        self._attend = self._kernel("decode_attention", inputs, ["attended", "tile_sums"])
        self._add_tiles = self._kernel("add_tiles", ["tile_sums", "lengths"], ["attended"])
        names = ["input", "change", "weight", "constants"]
        self._add_norm = self._kernel("add_norm", names, ["added", "normalized"])
        self._silu_product = self._kernel("silu_product", ["gate_up"], ["product"])
        self.few_rows = FewRows() if device == "cuda" else None
        """Products of few rows; None: MLX's are used."""

    def _kernel(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
        return self._make(
            name=f"lockstep_{name}",
            input_names=list(inputs),
            output_names=list(outputs),
            source=self._dialect.prologue + read_source(name),
            header=self._dialect.header,
            # A copy of keys and values would be written instead of the row.
            ensure_row_contiguous=name != "decode_attention",
        )

    def find_fault(self, shape: AttentionShape, weight: mx.array) -> str:
        """Compile and run all kernels once; return why they cannot serve, "" if they can.

        Without a kernel for products of few rows the others still serve, and MLX multiplies.

        Args:
            shape: of an attention.
            weight: [dim], of a norm of the model.
        """
        if shape.head_dim % _LANES:
            return f"no kernel for heads of {shape.head_dim} numbers"
        dtype, epsilon = weight.dtype, mx.zeros((1,), dtype=mx.float32)
        heads = shape.query_heads + 2 * shape.kv_heads
        room = TILE_TOKENS + 1
        row = mx.zeros((1, shape.kv_heads, room, shape.head_dim), dtype=dtype)
        weights = AttentionWeights(
            mx.zeros((shape.head_dim,), dtype=dtype),
            mx.zeros((shape.head_dim,), dtype=dtype),
            mx.ones((3,), dtype=mx.float32),
        )
        try:
            for length in (1, TILE_TOKENS):
                qkv = mx.ones((1, heads * shape.head_dim), dtype=dtype)
                rotations = mx.ones((1, shape.rotated), dtype=mx.float32)
                lengths, slots = mx.array([length]), mx.array([0])
                places = RowPlaces(lengths, slots, tile_count(length))
                mx.eval(self.attend(shape, weights, qkv, row, row, places, rotations))
            hidden = mx.ones((1, weight.size), dtype=dtype)
            mx.eval(self.add_norm(hidden, hidden, weight, epsilon), self.silu_product(hidden))
        except (RuntimeError, ValueError) as error:
            return f"a kernel does not run ({str(error).splitlines()[0]})"
        if self.few_rows is not None and (fault := self.few_rows.find_fault(dtype)):
            _log.info("mlx_products", detail=fault)
            self.few_rows = None
        return ""

    def attend(
        self,
        shape: AttentionShape,
        weights: AttentionWeights,
        qkv: mx.array,
        keys: mx.array,
        values: mx.array,
        places: RowPlaces,
        rotations: mx.array | None,
    ) -> mx.array:
        """Write the new key and value of each row, and attend to all tokens of the row.

        Args:
            shape: of the attention.
            weights: of the layer.
            qkv: [rows, (query_heads + 2 * kv_heads) * head_dim], row-contiguous: new queries, keys
                and values before norm and rotation.
            keys: [row_count, kv_heads, room, head_dim], row-contiguous, changed in place. MLX does
                not know of the change: all other work on them must begin after this is computed.
            values: like `keys`.
            places: where the rows are in these arrays.
            rotations: table of `Rotation`, `rotated` numbers per row; None: heads are not rotated.

        Returns:
            [rows, query_heads * head_dim] in the dtype of `qkv`.
        """
        rows, dtype, tiles = qkv.shape[0], qkv.dtype, places.tiles
        groups = shape.query_heads // heads_per_group(shape)
        # One tile gives the result, several give sums of tiles. The kernel sees which.
        result = (rows, shape.query_heads * shape.head_dim)
        sums = (rows, shape.query_heads, tiles, shape.head_dim + 2)
        attended, tile_sums = self._attend(
            inputs=[
                *(qkv, keys, values, places.lengths, places.slots),
                weights.constants if rotations is None else rotations,
                *(weights.query_norm, weights.key_norm, weights.constants),
            ],
            template=_attention_template(shape, dtype),
            grid=(tiles * ATTENTION_THREADS, groups, rows),
            threadgroup=(ATTENTION_THREADS, 1, 1),
            output_shapes=[result, (1,)] if tiles == 1 else [(1,), sums],
            output_dtypes=[dtype, mx.float32],
        )
        if tiles > 1:
            (attended,) = self._add_tiles(
                inputs=[tile_sums, places.lengths],
                template=[
                    ("T", dtype),
                    ("HEAD_DIM", shape.head_dim),
                    ("QUERY_HEADS", shape.query_heads),
                    ("THREADS", ATTENTION_THREADS),
                    ("TILE", TILE_TOKENS),
                ],
                grid=(ATTENTION_THREADS, shape.query_heads, rows),
                threadgroup=(ATTENTION_THREADS, 1, 1),
                output_shapes=[result],
                output_dtypes=[dtype],
            )
        done: mx.array = attended
        return done

    def add_norm(
        self, hidden: mx.array, change: mx.array, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add a layer's output to its input, and normalize the sum (RMS norm).

        Args:
            hidden: [..., dim].
            change: like `hidden`.
            weight: [dim], of the norm.
            epsilon: float32 [1], of the norm.

        Returns:
            (sum, normalized sum), both like `hidden`.
        """
        dim = hidden.shape[-1]
        vector = _vector_size(dim, hidden.dtype.size)
        threads = min(-(-dim // (vector * 32)) * 32, _ROW_THREADS_MAX)
        added, normalized = self._add_norm(
            inputs=[hidden, change, weight, epsilon],
            template=[
                *(("T", hidden.dtype), ("DIM", dim)),
                *(("VECTOR_SIZE", vector), ("THREADS", threads)),
            ],
            grid=(threads, hidden.size // dim, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[hidden.shape, hidden.shape],
            output_dtypes=[hidden.dtype, hidden.dtype],
        )
        return added, normalized

    def silu_product(self, gate_up: mx.array) -> mx.array:
        """Compute silu(gate) * up.

        Args:
            gate_up: [..., 2 * width]: gate, then up.

        Returns:
            [..., width].
        """
        width = gate_up.shape[-1] // 2
        groups = -(-width // _ROW_THREADS)
        product: mx.array
        (product,) = self._silu_product(
            inputs=[gate_up],
            template=[("T", gate_up.dtype), ("WIDTH", width), ("THREADS", _ROW_THREADS)],
            grid=(groups * _ROW_THREADS, gate_up.size // (2 * width), 1),
            threadgroup=(_ROW_THREADS, 1, 1),
            output_shapes=[(*gate_up.shape[:-1], width)],
            output_dtypes=[gate_up.dtype],
        )
        return product


def tile_count(length_max: int) -> int:
    """Return how many tiles a row of `length_max` tokens and its new token need."""
    return length_max // TILE_TOKENS + 1


def heads_per_group(shape: AttentionShape) -> int:
    """Return how many query heads share a group of threads: a divisor of the heads per key head."""
    heads_per_key = shape.query_heads // shape.kv_heads
    limit = HEADS_MAX if shape.head_dim <= _WIDE_HEAD_DIM else HEADS_MAX // 2
    return max(one for one in range(1, limit + 1) if heads_per_key % one == 0)


@functools.lru_cache(maxsize=64)
def _attention_template(shape: AttentionShape, dtype: mx.Dtype) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("HEAD_DIM", shape.head_dim),
        ("HEADS", heads_per_group(shape)),
        ("HEADS_PER_KEY", shape.query_heads // shape.kv_heads),
        ("QUERY_HEADS", shape.query_heads),
        ("KV_HEADS", shape.kv_heads),
        ("VECTOR_SIZE", _vector_size(shape.head_dim // _LANES, dtype.size)),
        ("THREADS", ATTENTION_THREADS),
        ("TILE", TILE_TOKENS),
        ("NORMALIZES", shape.normalizes),
        ("TRADITIONAL", shape.is_traditional),
        ("ROTATED", shape.rotated),
    ]


def _vector_size(count: int, number_bytes: int) -> int:
    """Return how many numbers a thread reads at once: a divisor of `count`.

    Args:
        count: numbers side by side.
        number_bytes: bytes of a number.
    """
    size = _VECTOR_BYTES // number_bytes
    while count % size:
        size //= 2
    return size
