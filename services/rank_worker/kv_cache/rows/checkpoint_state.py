"""The contents of a checkpoint: the state of one row that cannot be divided into tokens.

A payload is the header's length (4 bytes, little endian), the header (msgpack), and every array in
C order at the next multiple of 64 bytes.
"""

import dataclasses
import itertools
import math
from typing import Annotated

import mlx.core as mx
import msgspec
import numpy as np

from services.rank_worker.kv_cache.rows.block_layout import dtype_name
from shared.errors import FrameRefused, InvariantBroken
from shared.transport import codec

ALIGNMENT_BYTES = 64
LENGTH_BYTES = 4

_DTYPES = {dtype_name(one): one for one in vars(mx).values() if isinstance(one, mx.Dtype)}


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointState:
    """The windows and recurrent state of one row after `tokens` tokens."""

    tokens: int
    parts: list[list[mx.array | None]]
    """Result of `cache_parts.read_state`, by layer with a window or recurrent state."""

    def arrays(self) -> list[mx.array]:
        """Return the arrays of all layers in one list, without the missing ones."""
        return [one for part in self.parts for one in part if one is not None]


class _Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(_DTYPES[self.dtype].size)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int
    parts: list[list[_Shape | None]]

    def shapes(self) -> list[_Shape]:
        return [one for part in self.parts for one in part if one is not None]


def encode_state(state: CheckpointState) -> mx.array:
    """Return the payload of a checkpoint, uint8 [bytes], with memory of its own."""
    header = _Header(
        tokens=state.tokens,
        parts=[
            [
                None if one is None else _Shape(dtype_name(one.dtype), list(one.shape))
                for one in part
            ]
            for part in state.parts
        ],
    )
    packed = codec.encode(header)
    prefix = len(packed).to_bytes(LENGTH_BYTES, "little") + packed
    padded = prefix + bytes(-len(prefix) % ALIGNMENT_BYTES)
    buffers = [mx.array(np.frombuffer(padded, dtype=np.uint8))]
    for array in state.arrays():
        if array.size:
            buffers.append(array.reshape(-1).view(mx.uint8))
            buffers.append(mx.zeros((-array.nbytes % ALIGNMENT_BYTES,), dtype=mx.uint8))
    return mx.concatenate(buffers)


def decode_state(payload: mx.array) -> CheckpointState:
    """Return the state in a payload.

    Args:
        payload: uint8 [bytes], computed.

    Returns:
        A state whose arrays are views of the payload.

    Raises:
        InvariantBroken: when the payload is malformed.
    """
    view = memoryview(payload)  # type: ignore[arg-type]  # missing in MLX's stubs
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    try:
        fields = codec.unpack(bytes(view[LENGTH_BYTES : LENGTH_BYTES + length]))
        header = msgspec.convert(fields, _Header, strict=True)
        sizes = [one.bytes for one in header.shapes()]
    except (FrameRefused, msgspec.ValidationError, KeyError) as error:
        raise InvariantBroken(f"a checkpoint's header cannot be read: {error}") from error
    starts = list(itertools.accumulate(map(_padded, sizes), initial=_padded(LENGTH_BYTES + length)))
    if starts[-1] != payload.nbytes:
        raise InvariantBroken(
            f"a checkpoint has {payload.nbytes} bytes, its header says {starts[-1]}"
        )
    arrays = (
        _array(payload, one, start) for one, start in zip(header.shapes(), starts, strict=False)
    )
    parts = [[None if one is None else next(arrays) for one in part] for part in header.parts]
    return CheckpointState(header.tokens, parts)


def _array(payload: mx.array, one: _Shape, start: int) -> mx.array:
    if not one.bytes:
        return mx.zeros(one.shape, dtype=_DTYPES[one.dtype])
    return payload[start : start + one.bytes].view(_DTYPES[one.dtype]).reshape(one.shape)


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES
