"""Attention of prompts in place, on CUDA: chunks of any rows and lengths in two kernels a layer.

MLX's attention reads chunks of one length, so each chunk has an operation of its own, two copies
into its row, and another preparation for each new pair of lengths.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_views import PROMPT_BLOCK
from services.rank_worker.model.fast_path.kernels.attention.head_kernels import (
    AttentionShape,
    AttentionWeights,
    made_up_token,
)
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces
from services.rank_worker.model.fast_path.kernels.dialects import largest_divisor, make_kernel
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.tensor_cores import HEADER, multiplies

_THREADS = 2 * PROMPT_BLOCK
"""Of a group that attends: a warp for 16 queries."""
_HEADS_MAX = 8
"""Query heads of a group that prepares; it has a warp for each, and for the key and the value."""
_HEAD_DIM_MAX = 128
"""Widest head whose sums fit into the registers of a warp."""


class PromptAttention:
    """Starts the kernels. Compiled kernels are kept by MLX."""

    def __init__(self) -> None:
        """Prepare; nothing is compiled yet."""
        weights = ["rotations", "query_weight", "key_weight", "constants"]
        self._write = make_kernel(
            "cuda",
            "heads/write_prompts",
            ["qkv", "lengths", "slots", *weights, "keys", "values"],
            ["queries"],
            header=HEADER,
            in_place=True,
        )
        self._attend = make_kernel(
            "cuda",
            "heads/prompt_attention",
            ["queries", "lengths", "slots", "blocks", "constants", "keys", "values"],
            ["attended"],
            header=HEADER,
            in_place=True,
        )

    def find_fault(self, shapes: Collection[AttentionShape], dtype: mx.Dtype) -> str:
        """Compile and run the kernels once; return why they cannot serve, "" if they can.

        Args:
            shapes: of all attentions, each once.
            dtype: of the model.
        """
        if not multiplies(dtype):
            return f"no attention of prompts for {dtype}"
        if wide := [one.head_dim for one in shapes if not _fits(one)]:
            return f"no attention of prompts for heads of {wide[0]} numbers"
        return first_error(functools.partial(self._attend_once, dtype=dtype), shapes)

    def _attend_once(self, shape: AttentionShape, dtype: mx.Dtype) -> None:
        weights, qkv, rotations = made_up_token(shape, dtype)
        stored = [mx.zeros((1, shape.kv_heads, 1, shape.head_dim), dtype=dtype) for _ in range(2)]
        first = mx.zeros((1,), dtype=mx.int32)
        places = RowPlaces(first, first, 1, blocks=mx.array([[0, 1]], dtype=mx.int32))
        mx.eval(stored)
        mx.eval(self.attend(shape, weights, qkv, stored, places, rotations))

    def attend(
        self,
        shape: AttentionShape,
        weights: AttentionWeights,
        qkv: mx.array,
        stored: Sequence[mx.array],
        places: RowPlaces,
        rotations: mx.array | None,
    ) -> mx.array:
        """Write the keys and values of all new tokens, and attend to all tokens before each.

        Args:
            shape: of the attention.
            weights: of the layer.
            qkv: [tokens, (query_heads + 2 * kv_heads) * head_dim], row-contiguous: new queries,
                keys and values before norm and rotation.
            stored: as for `HeadAttentionKernels.attend`.
            places: where the tokens are, with blocks of them.
            rotations: as for `HeadAttentionKernels.attend`.

        Returns:
            [tokens, query_heads * head_dim] in the dtype of `qkv`.
        """
        assert places.blocks is not None
        tokens, dtype = qkv.shape[0], qkv.dtype
        heads = largest_divisor(shape.query_heads // shape.kv_heads, _HEADS_MAX)
        threads = 32 * (heads + 2)
        of_rows, constants = [places.lengths, places.slots], weights.constants
        queries: mx.array
        (queries,) = self._write(
            inputs=[
                *(qkv, *of_rows, constants if rotations is None else rotations),
                *(weights.query_norm, weights.key_norm, constants, *stored),
            ],
            template=_template(shape, dtype, heads, threads),
            grid=(shape.query_heads // heads * threads, tokens, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(tokens, shape.query_heads * shape.head_dim)],
            output_dtypes=[dtype],
        )
        attended: mx.array
        (attended,) = self._attend(
            inputs=[queries, *of_rows, places.blocks, constants, *stored],
            template=_template(shape, dtype, 1, _THREADS),
            grid=(shape.query_heads * _THREADS, places.blocks.shape[0], 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[queries.shape],
            output_dtypes=[dtype],
        )
        return attended


def _fits(shape: AttentionShape) -> bool:
    return shape.head_dim % 8 == 0 and shape.head_dim <= _HEAD_DIM_MAX


@functools.lru_cache(maxsize=64)
def _template(
    shape: AttentionShape, dtype: mx.Dtype, heads: int, threads: int
) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("HEAD_DIM", shape.head_dim),
        ("HEADS", heads),
        ("HEADS_PER_KEY", shape.query_heads // shape.kv_heads),
        ("QUERY_HEADS", shape.query_heads),
        ("KV_HEADS", shape.kv_heads),
        ("THREADS", threads),
        ("NORMALIZES", shape.normalizes),
        ("TRADITIONAL", shape.is_traditional),
        ("ROTATED", shape.rotated),
    ]
