"""The kernels of latent attention, run on a CPU."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.fast_path import opening
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import latent_kernels
from services.rank_worker.model.fast_path.kernels.attention.head_products import HeadProducts
from services.rank_worker.model.fast_path.kernels.attention.latent_kernels import (
    LatentAttentionKernels,
    LatentShape,
    LatentWeights,
    NewLatents,
)
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces, tile_count
from services.rank_worker.model.fast_path.known_form.rotation import read_rotation
from services.rank_worker.profiling.part_timer import count_primitives
from tests.mlx.execution.fast_path.attention_models import open_of
from tests.mlx.execution.fast_path.latent.latent_models import LATENT_KINDS, make_latent

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")

LENGTHS = (255, 0, 513, 1, 257, 256)
"""At the edges of tiles of 256 tokens; the empty row is not the first one."""
SLOTS = (4, 0, 6, 2, 1, 5)
EPSILON, SCALE = 1e-5, 0.11


@pytest.fixture(params=["any GPU", "tensor cores"])
def kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> LatentAttentionKernels:
    """Return the kernels for any GPU, and those for tensor cores, here with numbers of 4 bytes."""
    if request.param == "any GPU":
        return LatentAttentionKernels("metal")
    monkeypatch.setattr(latent_kernels, "DTYPES", (mx.float32,))
    monkeypatch.setattr(latent_kernels, "_TENSOR_SHARED_MAX", 2**20)
    return LatentAttentionKernels("cuda")


def _expected(
    shape: LatentShape, weight: mx.array, new: NewLatents, latents: mx.array, keys: mx.array
) -> list[tuple[mx.array, mx.array, mx.array]]:
    """Return (attended, new latent, new key) of each row, by MLX's operations in float32."""
    found = []
    rope = nn.RoPE(shape.rotated, traditional=shape.is_traditional)
    for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        latent, key = mx.split(
            new.projected[row, -(shape.latent + shape.rotated) :], [shape.latent]
        )
        latent = mx.fast.rms_norm(latent, weight, EPSILON)
        key = rope(key[None, None, None], offset=length).reshape(-1)
        heads = new.queries[row, : shape.query_heads * shape.head].reshape(shape.query_heads, -1)
        queries = rope(heads[None, :, None, shape.plain :], offset=length)[0, :, 0]
        all_latents = mx.concatenate([latents[slot, 0, :length], latent[None]])
        all_keys = mx.concatenate([keys[slot, 0, :length], key[None]])
        scores = SCALE * (new.absorbed[row, :, 0] @ all_latents.T + queries @ all_keys.T)
        found.append((mx.softmax(scores, axis=-1) @ all_latents, latent, key))
    mx.eval(found)
    return found


@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "plain", "traditional"),
    [
        (1, 32, 8, 12, True),
        (5, 40, 16, 8, False),
        (16, 24, 8, 20, True),
        pytest.param(24, 512, 64, 128, True, marks=pytest.mark.proof),
        pytest.param(20, 512, 64, 192, False, marks=pytest.mark.proof),
        pytest.param(11, 264, 40, 64, True, marks=pytest.mark.proof),
        pytest.param(7, 1024, 128, 32, True, marks=pytest.mark.proof),
        pytest.param(128, 256, 32, 64, True, marks=pytest.mark.proof),
    ],
)
def test_rows_of_all_lengths_are_attended_to_and_written(
    heads: int,
    latent: int,
    rotated: int,
    plain: int,
    traditional: bool,
    kernels: LatentAttentionKernels,
) -> None:
    """At the edges of tiles, for many numbers of heads and widths; other rows stay as they are."""
    shape = LatentShape(heads, latent, rotated, plain, traditional)
    mx.random.seed(heads)
    rows = len(LENGTHS)
    latents, keys = (mx.random.normal((7, 1, 520, width)) for width in (latent, rotated))
    weight = mx.random.normal((latent,))
    new = NewLatents(
        mx.random.normal((rows, heads * (plain + rotated) + 16)),
        mx.random.normal((rows, heads, 1, latent)),
        mx.random.normal((rows, 8 + latent + rotated)),
    )
    before = mx.array(latents), mx.array(keys)
    mx.eval(latents, keys, before, new.queries, new.absorbed, new.projected)
    expected = _expected(shape, weight, new, latents, keys)
    rotation = read_rotation(nn.RoPE(rotated, traditional=traditional), rotated)
    assert rotation is not None
    lengths = mx.array(LENGTHS, dtype=mx.int32)
    places = RowPlaces(lengths, mx.array(SLOTS, dtype=mx.int32), tile_count(max(LENGTHS)))
    weights = LatentWeights(weight, mx.array([SCALE, EPSILON]))
    table = rotation.table(lengths, 1, rows)
    attended = kernels.attend(shape, weights, new, latents, keys, places, table)
    assert attended.shape == (rows, heads, 1, latent)
    for row, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        wanted, new_latent, new_key = expected[row]
        assert mx.allclose(attended[row, :, 0], wanted, rtol=1e-4, atol=1e-4).item(), length
        assert mx.allclose(latents[slot, 0, length], new_latent, rtol=1e-5, atol=1e-5).item()
        assert mx.allclose(keys[slot, 0, length], new_key, rtol=1e-4, atol=1e-4).item()
        for old, array in zip(before, (latents, keys), strict=True):
            old[slot, 0, length] = array[slot, 0, length]
    assert mx.array_equal(before[0], latents).item()
    assert mx.array_equal(before[1], keys).item()


def test_row_is_summed_up_in_one_order_beside_any_other_rows(
    kernels: LatentAttentionKernels,
) -> None:
    """Its bits do not depend on the others, nor on the number of tiles that they need."""
    shape = LatentShape(3, 32, 8, 8, is_traditional=True)
    latents, keys = (mx.random.normal((3, 1, 600, width)) for width in (32, 8))
    new = NewLatents(*(mx.random.normal(one) for one in ((3, 48), (3, 3, 1, 32), (3, 40))))
    weights = LatentWeights(mx.ones((32,)), mx.array([SCALE, EPSILON]))
    table = mx.random.normal((3, 8))
    lengths, slots = mx.array([200, 3, 590]), mx.array([0, 1, 2])
    mx.eval(latents, keys)
    together = kernels.attend(
        shape, weights, new, latents, keys, RowPlaces(lengths, slots, 3), table
    )
    for row, tiles in ((0, 1), (1, 1), (2, 3)):
        own = NewLatents(
            *(one[row : row + 1] for one in (new.queries, new.absorbed, new.projected))
        )
        places = RowPlaces(lengths[row : row + 1], slots[row : row + 1], tiles)
        alone = kernels.attend(shape, weights, own, latents, keys, places, table[row : row + 1])
        assert mx.array_equal(alone[0], together[row]).item()


@pytest.mark.parametrize(("width", "stride"), [(24, 64), (1536, 2112), (768, 768), (40, 42)])
def test_first_numbers_of_rows_are_normalized(
    width: int, stride: int, kernels: LatentAttentionKernels
) -> None:
    """The others are not read; rows need not begin at a whole vector."""
    rows, weight = mx.random.normal((3, stride)), mx.random.normal((width,))
    found = kernels.normalize_part(rows, weight, mx.array([EPSILON]))
    expected = mx.fast.rms_norm(rows[:, :width], weight, EPSILON)
    assert mx.allclose(found, expected, rtol=1e-5, atol=1e-5).item()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["dense", pytest.param("whole_queries", marks=pytest.mark.proof)])
def test_tensor_cores_compute_latent_attention_like_mlx_lm(
    kind: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the same proof. Here their products are of numbers of 4 bytes."""
    for module in (latent_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))
    monkeypatch.setattr(latent_kernels, "_TENSOR_SHARED_MAX", 2**20)
    model = make_latent(kind, first_k_dense_replace=2, qk_nope_head_dim=32)
    opened = open_of(model, device="cuda", batch_invariant=batch_invariant)
    assert opened.state == "fast path with kernels"


@pytest.mark.parametrize("rows", [1, 9, 35])
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 40, 32), (2, 16, 352)])
def test_products_of_heads_are_those_of_mlx_and_do_not_depend_on_other_rows(
    rows: int, heads: int, outputs: int, inputs: int
) -> None:
    """Vectors of heads need not stand side by side, and outputs and rows need not fill a group."""
    x, weight = (
        mx.random.normal((rows, heads * (inputs + 8) + 8)),
        mx.random.normal((heads, outputs, inputs)),
    )
    mx.eval(x, weight)
    vectors = x[:, : heads * (inputs + 8)].reshape(rows, heads, -1)[..., :inputs]
    expected = vectors[:, :, None] @ weight.swapaxes(-1, -2)
    found = HeadProducts().multiply(x, weight, inputs + 8)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4).item()
    alone = HeadProducts().multiply(x[-1:], weight, inputs + 8)
    assert mx.array_equal(alone[0], found[-1]).item()


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_kernels_compute_latent_attention_of_every_family_like_mlx_lm(kind: str) -> None:
    """They pass the proof: an empty row, a short one and one of two tiles, in another order."""
    assert open_of(make_latent(kind), device="metal").state == "fast path with kernels"


@pytest.mark.parametrize(
    "text",
    [
        "total = WARP_SUM(total) + new_weight",
        pytest.param("WARP_SUM(squares)", marks=pytest.mark.proof),
    ],
)
def test_wrong_kernel_of_latent_attention_keeps_mlx_lms_code(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that runs and computes something else is found by the proof."""
    real: Any = mx.fast.metal_kernel

    def broken(**made: Any) -> object:
        source = made["source"].replace(text, f"{text} * 1.2f")
        return real(**{**made, "source": source})

    monkeypatch.setattr(mx.fast, "metal_kernel", broken)
    opened = open_of(make_latent("deepseek_v3"), device="metal")
    assert opened.state.startswith("mlx-lm's layers: layer 0 differs by")


@pytest.mark.parametrize(
    ("widths", "said"),
    [({"kv_lora_rank": 28}, "28 and 8 numbers"), ({"qk_rope_head_dim": 12}, "32 and 12 numbers")],
)
def test_latents_that_kernels_cannot_divide_are_computed_without_them(
    widths: dict[str, int], said: str
) -> None:
    """Threads read vectors of numbers, so widths must be multiples of 8."""
    opened = open_of(make_latent("deepseek_v3", **widths), device="metal")
    assert opened.state == f"fast path without kernels: no kernel for latents of {said}"


class _OneOperation:
    """A kernel that is one operation of a graph, and computes nothing."""

    def __init__(self, **_made: Any) -> None:
        pass

    def __call__(
        self, *, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any
    ) -> list[mx.array]:
        pairs = zip(output_shapes, output_dtypes, strict=True)
        outputs = [mx.zeros(shape, dtype=dtype) for shape, dtype in pairs]
        mx.eval(outputs)
        dependent: list[mx.array] = mx.depends(outputs, inputs)
        return dependent


@pytest.mark.parametrize(
    ("device", "rows", "longest", "bound"),
    [
        ("metal", 1, 100, 15),
        ("metal", 4, 100, 17),
        ("metal", 1, 600, 16),
        ("metal", 4, 600, 18),
        ("cuda", 1, 100, 12),
        ("cuda", 4, 600, 13),
    ],
)
def test_layer_of_a_decode_with_kernels_has_no_more_operations_than_today(
    device: Any, rows: int, longest: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and the MLP are five of them, on CUDA four. Fewer are better: then lower the bound.

    Rows of several tiles need one more; MLX's products for several rows need two that copy nothing.
    """
    for module in (latent_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))
    for name in ("metal_kernel", "cuda_kernel"):
        monkeypatch.setattr(mx.fast, name, _OneOperation)
    monkeypatch.setattr(opening, "find_difference", lambda *_: None)
    counts = []
    for layers in (2, 4):
        counted = {"num_hidden_layers": layers, "first_k_dense_replace": layers}
        model = make_latent("dense", qk_nope_head_dim=32, **counted)
        stack = open_of(model, device=device).layers
        assert stack is not None
        caches = [RowLayer(parts) for parts in read_shape(model).layers()]
        for cache in caches:
            cache.resize(rows, longest + 1, 0, 0)
            cache.view = InPlaceView(range(rows), [longest] * rows)
        mx.eval([cache.arrays for cache in caches])
        counts.append(count_primitives([stack(mx.zeros((rows, 1), dtype=mx.int32), caches)]))
    assert (counts[1] - counts[0]) / 2 <= bound
