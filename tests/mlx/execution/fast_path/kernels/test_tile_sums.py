"""What kernels share: sums of the tiles of a row, and numbers that all groups read."""

import mlx.core as mx
import pytest

from services.rank_worker.model.fast_path.kernels.attention import head_kernels, row_places
from services.rank_worker.model.fast_path.kernels.attention.tiled_attention import TileSums
from services.rank_worker.model.fast_path.kernels.dialects import Gpu, device_numbers

TILE = row_places.TILE_TOKENS


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("width", [16, 80, 512])
def test_tiles_of_rows_of_all_lengths_are_added_up(width: int) -> None:
    """Rows have fewer tiles than a warp has threads, as many, and more; others hold no numbers."""
    tiles = [1, 5, 32, 33, 70]
    shape = (len(tiles), 2, max(tiles))
    values = mx.random.normal((*shape, width), key=mx.random.key(1))
    highest = 20 * mx.random.normal((*shape, 1), key=mx.random.key(2))
    weights = mx.random.uniform(1, 9, (*shape, 1), key=mx.random.key(3))
    is_tile = (mx.arange(max(tiles)) < mx.array(tiles)[:, None])[:, None, :, None]
    scores = mx.where(is_tile, highest, -float("inf"))
    kept = 2.0 ** (scores - scores.max(axis=2, keepdims=True))
    expected = (values * kept).sum(axis=2) / (weights * kept).sum(axis=2)
    sums = mx.where(is_tile, mx.concatenate([values, highest, weights], axis=3), float("nan"))
    lengths = mx.array([TILE * one - 1 for one in tiles])
    found = TileSums("metal").add_up(sums, lengths, mx.float32, (len(tiles), 2 * width))
    assert mx.allclose(found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5).item()


@pytest.mark.usefixtures("kernels_on_cpu")
def test_last_group_of_a_row_of_many_tiles_adds_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several new tokens that share the row as with one."""
    monkeypatch.setattr(head_kernels, "DTYPES", (mx.float32,))
    shape = head_kernels.AttentionShape(2, 1, 16, 0, is_traditional=False, normalizes=False)
    weights = head_kernels.AttentionWeights(
        mx.zeros((1,)), mx.zeros((1,)), mx.array([0.5, 0.0, 0.0])
    )
    length = 33 * TILE + 7
    qkv = mx.random.normal((2, 4 * 16), key=mx.random.key(1))

    def attended(device: Gpu, lengths: list[int]) -> mx.array:
        room = (1, 1, length + 2, 16)
        stored = [mx.random.normal(room, key=mx.random.key(one)) for one in (2, 3)]
        places = row_places.RowPlaces(
            mx.array(lengths),
            mx.array([0] * len(lengths)),
            row_places.tile_count(max(lengths)),
            tokens_share_rows=len(lengths) > 1,
        )
        attend = head_kernels.HeadAttentionKernels(device).attend
        return attend(shape, weights, qkv[: len(lengths)], stored, places, None)

    for lengths in ([length], [length, length + 1]):
        found = attended("cuda", lengths)
        expected = attended("metal", lengths)
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()


def test_numbers_of_a_kernel_are_too_many_for_the_memory_of_the_host() -> None:
    """MLX on CUDA keeps arrays of up to 8 bytes where each read of a GPU takes microseconds."""
    numbers = device_numbers(0.5)
    assert numbers.nbytes > 8
    assert numbers[0].item() == 0.5
