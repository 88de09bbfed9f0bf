"""Kernels of attention with heads of keys and values. Owns the choice of the kernel.

Lengths and tile counts are arguments, not template constants: each new constant compiles a kernel
anew, which takes seconds on CUDA.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import make_row_layer
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
    VECTOR_BYTES,
    Gpu,
    largest_divisor,
    make_kernel,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.tensor_cores import DTYPES, HEADER

_THREADS = 128
"""Threads of a group; with 256, fewer groups fit on a processor of a GPU."""
_PREPARED_HEADS_MAX = 8
"""Query heads of a group that only normalizes and rotates. It has a warp for each, and for the key
and the value."""
_WRITERS = 64
"""Threads of a group that only writes a new key and value: a warp for each."""
_HEADS_MAX = 5
"""Query heads of a group; more of them do not fit into the registers of its threads."""
_TENSOR_HEADS_MAX = 8
"""Query heads of a group whose products tensor cores compute: the rows of half a tile."""
_TENSOR_QUERIES_MAX = 16
"""Queries of such a group, of several tokens of a row: the rows of a tile."""
_WIDE_HEAD_DIM = 128
"""From this width on, fewer heads fit, and none with tensor cores."""
_WORD_BITS = 32
"""Of an array's words that hold numbers of fewer bits."""
_LANES = 8
"""Divides a head: `decode_attention` shares it between as many threads (its LANES), and threads of
`tensor_attention` read as many numbers at once."""


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
    """`device_numbers`: factor of the scores, epsilons of the queries' norm and of the keys'."""


class HeadAttentionKernels(TiledAttention):
    """Starts the kernels on one kind of GPU. Compiled kernels are kept by MLX."""

    def __init__(self, device: Gpu, kv_bits: int = 0) -> None:
        """Prepare; nothing is compiled yet.

        Args:
            device: kind of the GPU.
            kv_bits: bits per number of stored keys and values; 0: the model's own dtype.
        """
        super().__init__(device)
        self._kv_bits = kv_bits
        weights = ["rotations", "query_weight", "key_weight", "constants"]
        self.can_prepare = True
        """Whether `prepare` serves."""
        prepared = ["queries", "keys", "values"]
        self._prepare = make_kernel(device, "heads/prepare_heads", ["qkv", *weights], prepared)
        inputs = ["qkv", "lengths", "slots", *weights]
        parts = ("", "_scales", "_biases") if kv_bits else ("",)
        inputs += [f"{name}{part}" for name in ("keys", "values") for part in parts]
        outputs = ["attended", "tile_sums"]
        path = "heads/quantized_attention" if kv_bits else "heads/decode_attention"
        self._attend = make_kernel(device, path, inputs, outputs, in_place=True)
        path = "heads/write_quantized_rows" if kv_bits else "heads/write_rows"
        self._write = make_kernel(device, path, inputs, ["written"], in_place=True)
        if device == "cuda" and not kv_bits:
            names, path = [*inputs, "arrived"], "heads/tensor_attention"
            self._tensor_attend = make_kernel(
                device, path, names, outputs, header=HEADER, in_place=True
            )

    def _obstacle(self, shape: AttentionShape, dtype: mx.Dtype) -> str:
        if _vector_size(shape, dtype, self._kv_bits):
            return ""
        stored = f" in {self._kv_bits} bits" if self._kv_bits else ""
        return f"no kernel for heads of {shape.head_dim} numbers{stored}"

    def find_fault_of_prepare(self, shapes: Collection[AttentionShape], dtype: mx.Dtype) -> str:
        """Compile and run `prepare` once; return why it cannot serve, "" if it can."""
        return first_error(functools.partial(self._prepare_once, dtype=dtype), shapes)

    def _prepare_once(self, shape: AttentionShape, dtype: mx.Dtype) -> None:
        weights, qkv, rotations = made_up_token(shape, dtype)
        mx.eval(self.prepare(shape, weights, qkv, 1, rotations))

    def _attend_once(self, shape: AttentionShape, dtype: mx.Dtype) -> None:
        part = BlockPart(shape.kv_heads, shape.head_dim, dtype)
        layer = make_row_layer([part, part], self._kv_bits)
        layer.resize(1, TILE_TOKENS + 1, 0, 0)
        weights, qkv, rotations = made_up_token(shape, dtype)
        for places in tried_places():
            mx.eval(self.attend(shape, weights, qkv, layer.arrays, places, rotations))

    def prepare(
        self,
        shape: AttentionShape,
        weights: AttentionWeights,
        qkv: mx.array,
        rows: int,
        rotations: mx.array | None,
    ) -> list[mx.array]:
        """Normalize and rotate new queries and keys, for an attention that MLX computes.

        Args:
            shape: of the attention.
            weights: of the layer.
            qkv: [rows * count, (query_heads + 2 * kv_heads) * head_dim]: new queries, keys and
                values of each row's tokens before norm and rotation.
            rows: number of rows.
            rotations: as for `attend`.

        Returns:
            Queries, keys and values, [rows, heads, count, head_dim]. In memory each token's queries
            are side by side: MLX gives the attention's result the same order.
        """
        tokens, dtype, dim = qkv.shape[0], qkv.dtype, shape.head_dim
        heads = largest_divisor(shape.query_heads // shape.kv_heads, _PREPARED_HEADS_MAX)
        threads = 32 * (heads + 2)
        kv_shape = (rows, shape.kv_heads, tokens // rows, dim)
        queries, keys, values = self._prepare(
            inputs=[
                qkv,
                weights.constants if rotations is None else rotations,
                *(weights.query_norm, weights.key_norm, weights.constants),
            ],
            template=_template(shape, dtype, 0, 0, heads, threads),
            grid=(shape.query_heads // heads * threads, rows, tokens // rows),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, tokens // rows, shape.query_heads, dim), kv_shape, kv_shape],
            output_dtypes=[dtype] * 3,
        )
        return [queries.swapaxes(1, 2), keys, values]

    def attend(
        self,
        shape: AttentionShape,
        weights: AttentionWeights,
        qkv: mx.array,
        stored: Sequence[mx.array],
        places: RowPlaces,
        rotations: mx.array | None,
    ) -> mx.array:
        """Write the key and value of each new token, and attend to its row up to itself.

        Args:
            shape: of the attention.
            weights: of the layer.
            qkv: [tokens, (query_heads + 2 * kv_heads) * head_dim], row-contiguous: new queries,
                keys and values before norm and rotation.
            stored: keys and values of all rows, row-contiguous: `RowLayer.arrays`. They are changed
                in place. MLX does not know of the change: all other work on them must begin after
                this is computed.
            places: where the tokens are in these arrays.
            rotations: table of `Rotation`, `rotated` numbers per token; None: none are rotated.

        Returns:
            [tokens, query_heads * head_dim] in the dtype of `qkv`.
        """
        template = functools.partial(
            _template, shape, qkv.dtype, self._kv_bits, self._group(stored)
        )

        def inputs(where: RowPlaces, new: mx.array, table: mx.array | None) -> list[mx.array]:
            return [
                *(new, where.lengths, where.slots),
                weights.constants if table is None else table,
                *(weights.query_norm, weights.key_norm, weights.constants, *stored),
            ]

        def attend(where: RowPlaces, *rows: Any) -> mx.array:
            return self._attend_to_part(shape, inputs(where, *rows), where, template)

        rows, grid = (qkv, rotations), (_WRITERS, shape.kv_heads, qkv.shape[0])
        places = self._write_first(places, inputs(places, *rows), template(0, _WRITERS), grid)
        return attend_in_parts(attend, places.parts(shape.query_heads, shape.head_dim), rows)

    def _attend_to_part(
        self,
        shape: AttentionShape,
        inputs: list[mx.array],
        places: RowPlaces,
        template: Callable[[int, int], list[tuple[str, Any]]],
    ) -> mx.array:
        """Start the kernels that attend; `template` is called with heads and threads of a group."""
        (rows, _), dtype = inputs[0].shape, inputs[0].dtype
        chosen = self._choose(shape, dtype)
        constants = template(chosen.heads, chosen.threads)
        if chosen.adds_up:
            # With one tile there is nothing to count.
            arrived = places.arrived if places.tiles > 1 else places.lengths
            if arrived is None:
                arrived = mx.zeros((rows, shape.query_heads), dtype=mx.int32)
            inputs = [*inputs, arrived]
            tokens = _TENSOR_QUERIES_MAX // chosen.heads if places.are_written else 1
            constants = [*constants, ("TOKENS", tokens)]
        result = (rows, shape.query_heads * shape.head_dim), dtype
        return self._attend_to_tiles(chosen, inputs, constants, places, result, shape.query_heads)

    def _group(self, stored: Sequence[mx.array]) -> int:
        """Return how many numbers of rows of fewer bits share a scale; 0 for other rows."""
        if not self._kv_bits:
            return 0
        return stored[0].shape[-1] * _WORD_BITS // self._kv_bits // stored[1].shape[-1]

    def _choose(self, shape: AttentionShape, dtype: mx.Dtype) -> AttentionKernel:
        heads_per_key = shape.query_heads // shape.kv_heads
        if self._tensor_attend is not None and _fits_tensor_cores(shape, dtype):
            heads = largest_divisor(heads_per_key, _TENSOR_HEADS_MAX)
            return AttentionKernel(self._tensor_attend, heads, _THREADS, adds_up=True)
        heads = largest_divisor(heads_per_key, _heads_max(shape))
        return AttentionKernel(self._attend, heads, _THREADS)


def made_up_token(
    shape: AttentionShape, dtype: mx.Dtype
) -> tuple[AttentionWeights, mx.array, mx.array | None]:
    """Return weights, new heads and rotations of one token, to try a kernel with.

    Args:
        shape: of the attention.
        dtype: of the model.
    """
    heads = shape.query_heads + 2 * shape.kv_heads
    norm = mx.zeros((shape.head_dim,), dtype=dtype)
    weights = AttentionWeights(norm, norm, mx.ones((3,), dtype=mx.float32))
    qkv = mx.ones((1, heads * shape.head_dim), dtype=dtype)
    rotations = mx.ones((1, shape.rotated), dtype=mx.float32) if shape.rotated else None
    return weights, qkv, rotations


def _heads_max(shape: AttentionShape) -> int:
    return _HEADS_MAX if shape.head_dim <= _WIDE_HEAD_DIM else _HEADS_MAX // 2


def _fits_tensor_cores(shape: AttentionShape, dtype: mx.Dtype) -> bool:
    return dtype in DTYPES and shape.head_dim <= _WIDE_HEAD_DIM


def _vector_size(shape: AttentionShape, dtype: mx.Dtype, kv_bits: int) -> int:
    """Return how many numbers of a key a thread reads at once; 0: heads cannot be divided so."""
    share, rest = divmod(shape.head_dim, _LANES)
    if rest:
        return 0
    if not kv_bits:
        return vector_size(share, dtype)
    size = VECTOR_BYTES * 8 // kv_bits
    while share % size:
        size //= 2
    # Threads read whole words.
    return size if size * kv_bits >= _WORD_BITS else 0


@functools.lru_cache(maxsize=64)
def _template(
    shape: AttentionShape, dtype: mx.Dtype, kv_bits: int, group: int, heads: int, threads: int
) -> list[tuple[str, Any]]:
    of_bits = [("BITS", kv_bits), ("GROUP", group)] if kv_bits else []
    of_bits += [("PER_WORD", _WORD_BITS // kv_bits)] if kv_bits else []
    return [
        ("T", dtype),
        ("HEAD_DIM", shape.head_dim),
        ("HEADS", heads),
        ("HEADS_PER_KEY", shape.query_heads // shape.kv_heads),
        ("QUERY_HEADS", shape.query_heads),
        ("KV_HEADS", shape.kv_heads),
        ("VECTOR_SIZE", _vector_size(shape, dtype, kv_bits)),
        ("THREADS", threads),
        ("TILE", TILE_TOKENS),
        ("NORMALIZES", shape.normalizes),
        ("TRADITIONAL", shape.is_traditional),
        ("ROTATED", shape.rotated),
        *of_bits,
    ]
