"""Blocks and checkpoints as flat bytes: exact round trips in memory of their own."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.rank_worker.kv_cache.rows.block_layout import BlockLayout, BlockPart
from services.rank_worker.kv_cache.rows.checkpoint_state import (
    ALIGNMENT_BYTES,
    CheckpointState,
    decode_state,
    encode_state,
)
from shared.errors import InvariantBroken

FLOAT16, BFLOAT16, FLOAT32 = mx.float16, mx.bfloat16, mx.float32
LAYOUTS = {
    "one shape": [BlockPart(2, 4, BFLOAT16)] * 6,
    "two widths": [BlockPart(1, 16, FLOAT16), BlockPart(1, 4, FLOAT16)] * 3,
    "narrow dtype first": [
        BlockPart(1, 3, FLOAT16),
        BlockPart(1, 5, FLOAT32),
        BlockPart(3, 1, mx.uint8),
    ],
    "without width": [BlockPart(1, 4, FLOAT32), BlockPart(1, 0, FLOAT32)],
    "one member": [BlockPart(1, 4, FLOAT32)],
    "nothing": [],
}
EVERY_DTYPE = [
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
]


def _bits(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def _noise(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Return an array with random bits, which include NaN and negative zero."""
    random = np.random.default_rng(seed)
    size = int(np.prod(shape)) * int(dtype.size)
    return mx.array(random.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)


@pytest.mark.parametrize("members", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("used", [1, 5, 7])
def test_unpacked_kv_block_equals_row_slices_it_was_packed_from(
    members: list[BlockPart], used: int
) -> None:
    """A block, whole or cut, returns the exact bits of the row slices that it was packed from."""
    layout = BlockLayout(members)
    rows = [_noise((3, one.heads, 20, one.dim), one.dtype, seed=i) for i, one in enumerate(members)]
    mx.eval(rows)
    payload = layout.pack([row[1:2, :, 6:13] for row in rows])

    assert payload.dtype == mx.uint8
    assert payload.shape == (layout.block_bytes(7),)
    for row, part in zip(rows, layout.unpack(payload, 7, used), strict=True):
        assert part.dtype == row.dtype
        assert part.shape == (1, row.shape[1], used, row.shape[3])
        assert _bits(part) == _bits(row[1:2, :, 6 : 6 + used])


@pytest.mark.parametrize("members", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("used", [15, 18, 21])
def test_kv_blocks_unpacked_together_equal_row_they_were_cut_from(
    members: list[BlockPart], used: int
) -> None:
    """Three blocks unpacked together return the exact bits of the row that they were cut from."""
    layout = BlockLayout(members)
    rows = [_noise((1, one.heads, 21, one.dim), one.dtype, seed=i) for i, one in enumerate(members)]
    mx.eval(rows)
    payloads = [
        layout.pack([row[:, :, start : start + 7] for row in rows]) for start in range(0, 21, 7)
    ]

    for row, part in zip(rows, layout.unpack_run(payloads, 7, used), strict=True):
        assert part.dtype == row.dtype
        assert part.shape == (1, row.shape[1], used, row.shape[3])
        assert _bits(part) == _bits(row[:, :, :used])


@pytest.mark.parametrize("members", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kv_blocks_packed_together_equal_blocks_packed_singly(members: list[BlockPart]) -> None:
    """Three blocks packed in one call have the bytes of each packed alone, each in memory of its
    own.
    """
    layout = BlockLayout(members)
    rows = [_noise((1, one.heads, 30, one.dim), one.dtype, seed=i) for i, one in enumerate(members)]
    mx.eval(rows)
    before = mx.get_active_memory()
    together = layout.pack_run([row[:, :, 5:26] for row in rows], 7, 3)
    mx.eval(together)
    held = mx.get_active_memory() - before

    for number, payload in enumerate(together):
        first = 5 + 7 * number
        alone = layout.pack([row[:, :, first : first + 7] for row in rows])
        assert (payload.dtype, payload.shape) == (alone.dtype, alone.shape)
        assert _bits(payload) == _bits(alone)
    del together[1:], alone, payload
    assert held >= 3 * layout.block_bytes(7)
    assert mx.get_active_memory() - before <= held - 2 * layout.block_bytes(7)


@pytest.mark.parametrize("members", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_packed_kv_block_shares_no_memory_with_rows(members: list[BlockPart]) -> None:
    """A packed block stays valid without the rows, even where a slice of a row is contiguous."""
    layout = BlockLayout(members)
    rows = [mx.zeros((1, one.heads, 4_096, one.dim), dtype=one.dtype) for one in members]
    mx.eval(rows)
    before = mx.get_active_memory()
    payload = layout.pack([row[:, :, :2_048] for row in rows])
    mx.eval(payload)

    assert mx.get_active_memory() - before >= layout.block_bytes(2_048)
    del rows
    assert mx.get_active_memory() <= before + layout.block_bytes(2_048)


def test_description_of_block_layout_differs_when_heads_widths_dtypes_or_layers_differ() -> None:
    """The description of a block layout differs for other heads, widths, dtypes and numbers of
    layers.
    """
    variants = [
        [BlockPart(2, 4, BFLOAT16)] * 2,
        [BlockPart(2, 4, FLOAT16)] * 2,
        [BlockPart(4, 2, BFLOAT16)] * 2,
        [BlockPart(2, 4, BFLOAT16)] * 4,
        [BlockPart(2, 4, BFLOAT16), BlockPart(1, 4, BFLOAT16)],
        [],
    ]

    assert len({BlockLayout(members).text for members in variants}) == len(variants)


def test_decoded_state_checkpoint_equals_encoded_arrays_bit_for_bit() -> None:
    """A checkpoint preserves arrays of every dtype, empty arrays and missing arrays bit for bit."""
    arrays: list[mx.array | None] = [
        _noise((1, 3, index + 1), dtype, seed=index) for index, dtype in enumerate(EVERY_DTYPE)
    ]
    state = CheckpointState(
        1_234, [arrays, [], [None, mx.zeros((1, 0, 4)), None], [_noise((1,), mx.int8)]]
    )
    payload = encode_state(state)
    mx.eval(payload)
    again = decode_state(payload)

    assert payload.nbytes % ALIGNMENT_BYTES == 0
    assert again.tokens == 1_234
    assert [len(part) for part in again.parts] == [len(part) for part in state.parts]
    every = (itertools.chain.from_iterable(one.parts) for one in (state, again))
    for old, new in zip(*every, strict=True):
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert (old.dtype, old.shape) == (new.dtype, new.shape)
            assert _bits(old) == _bits(new)


def test_decoding_damaged_state_checkpoint_raises_invariant_broken() -> None:
    """Decoding a checkpoint that is cut, doubled or has a damaged header raises InvariantBroken."""
    payload = np.array(encode_state(CheckpointState(5, [[_noise((1, 4), mx.float32)]])))
    wrong: list[Any] = [payload[:cut] for cut in range(0, len(payload), 7)]
    wrong.append(np.concatenate([payload, payload]))
    for place in range(4):
        flipped = payload.copy()
        flipped[place] ^= 0x80
        wrong.append(flipped)
    for old, new in ((b"float32", b"float33"), (b"tokens", b"tokenz"), (b"shape", b"shale")):
        wrong.append(np.frombuffer(payload.tobytes().replace(old, new), dtype=np.uint8))

    for one in wrong:
        with pytest.raises(InvariantBroken):
            decode_state(mx.array(one))
