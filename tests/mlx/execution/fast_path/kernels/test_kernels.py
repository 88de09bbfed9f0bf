"""The text of the kernels, run on a CPU in Metal's dialect."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import make_row_layer
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels, row_places
from services.rank_worker.model.fast_path.kernels.dialects import Gpu
from services.rank_worker.model.fast_path.kernels.few_experts import FewExperts
from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.kernels.matrices import PlainMatrix
from services.rank_worker.model.fast_path.merged_linear import MergedLinear
from tests.mlx.execution.fast_path.attention_models import SHAPES, make, open_of


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("kind", "query_heads", "kv_heads", "head_dim"),
    [SHAPES[0], *(pytest.param(*one, marks=pytest.mark.proof) for one in SHAPES[1:])],
)
def test_kernels_compute_and_write_like_mlx_lm_for_every_attention_shape(
    kind: str, query_heads: int, kv_heads: int, head_dim: int
) -> None:
    """They pass the proof: an empty row, a short one and one of two tiles, in another order."""
    opened = open_of(make(kind, query_heads, kv_heads, head_dim), device="metal")
    assert opened.state == "fast path with kernels"


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("kind", "query_heads", "kv_heads", "head_dim"),
    [SHAPES[0], *(pytest.param(*one, marks=pytest.mark.proof) for one in SHAPES[1:])],
)
def test_attention_of_tensor_cores_computes_and_writes_like_mlx_lm(
    kind: str, query_heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the same proof, also for prompts. Here its products are of numbers of 4 bytes."""
    for module in (head_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))
    model = make(kind, query_heads, kv_heads, head_dim)
    opened = open_of(model, device="cuda", prompts_in_place=True)
    prompts = "; kernels attend to prompts too" if head_dim <= 128 else ""
    assert opened.state == f"fast path with kernels{prompts}"


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("device", ["metal", "cuda"])
@pytest.mark.parametrize(
    ("bits", "kind", "query_heads", "kv_heads", "head_dim"),
    [
        (8, "qwen3", 4, 2, 32),
        *(
            pytest.param(*one, marks=pytest.mark.proof)
            for one in [
                (4, "qwen3", 8, 2, 64),
                (8, "qwen2", 6, 2, 64),
                (4, "llama", 5, 1, 128),
                (8, "traditional", 4, 4, 96),
                (8, "partial", 4, 2, 64),
                (4, "llama", 4, 1, 256),
            ]
        ),
    ],
)
def test_kernels_read_and_write_quantized_rows_like_mlx_lm(
    bits: int, kind: str, query_heads: int, kv_heads: int, head_dim: int, device: str
) -> None:
    """They pass the same proof, in which mlx-lm quantizes new keys and values."""
    opened = open_of(make(kind, query_heads, kv_heads, head_dim), bits, device=device)
    assert opened.state == "fast path with kernels"


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("spread", [1.0, 0.0, 1e-6])
def test_new_keys_are_quantized_to_the_words_of_mlx(bits: int, spread: float) -> None:
    """Also where all numbers of a group are equal, are 0, or hardly differ.

    Where all are negative, MLX's words on a CPU differ from those on GPUs, which the kernels write.
    """
    shape = head_kernels.AttentionShape(2, 1, 64, 0, is_traditional=False, normalizes=False)
    attend = head_kernels.HeadAttentionKernels("metal", bits).attend
    weights = head_kernels.AttentionWeights(
        mx.zeros((1,)), mx.zeros((1,)), mx.array([0.1, 0.0, 0.0])
    )
    middle = mx.array([3.0, 0.5, 0.0])[:, None]
    qkv = middle + spread * mx.random.normal((3, 4 * 64), key=mx.random.key(bits))
    rows = make_row_layer([BlockPart(1, 64, mx.float32)] * 2, bits)
    rows.resize(3, 9, 0, 0)
    mx.eval(rows.arrays, qkv)
    lengths = [0, 4, 8]
    places = row_places.RowPlaces(mx.array(lengths), mx.array([2, 0, 1]), 1)
    attend(shape, weights, qkv, rows.arrays, places, None)
    parts = [qkv[:, start : start + 64] for start in (128, 192)]
    expected = [one for part in parts for one in mx.quantize(part, 64, bits)]
    for found, wanted in zip(rows.arrays, expected, strict=True):
        whole = mx.zeros_like(found)
        whole[mx.array([2, 0, 1]), 0, mx.array(lengths)] = wanted
        assert mx.array_equal(found, whole).item()


@pytest.mark.usefixtures("kernels_on_cpu")
def test_heads_whose_shares_are_no_whole_words_are_computed_without_kernels() -> None:
    """Eight threads share a head, and a word has 8 numbers of 4 bits."""
    opened = open_of(make("qwen3", 4, 2, 32), 4, device="metal")
    assert opened.state == (
        "fast path without kernels: no kernel for heads of 32 numbers in 4 bits"
    )


@pytest.mark.usefixtures("kernels_on_cpu")
def test_layers_of_one_forward_count_finished_groups_in_one_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last group of a row leaves a 0, also in a row of one tile beside one of three."""
    monkeypatch.setattr(head_kernels, "DTYPES", (mx.float32,))
    attend = head_kernels.HeadAttentionKernels("cuda").attend
    shape = head_kernels.AttentionShape(4, 2, 16, 0, is_traditional=False, normalizes=False)
    constants = mx.array([0.25, 0.0, 0.0])
    weights = head_kernels.AttentionWeights(mx.zeros((1,)), mx.zeros((1,)), constants)
    lengths = [3, 2 * row_places.TILE_TOKENS + 9]
    room = (2, 2, lengths[1] + 1, 16)
    keys, values = (mx.random.normal(room, key=mx.random.key(one)) for one in (1, 2))
    qkv = mx.random.normal((2, 8 * 16), key=mx.random.key(3))
    arrived = mx.zeros((2, 4), dtype=mx.int32)
    counts = row_places.tile_count(lengths[1])
    places = row_places.RowPlaces(mx.array(lengths), mx.array([0, 1]), counts, arrived)
    first, second = (attend(shape, weights, qkv, [keys, values], places, None) for _ in range(2))
    assert mx.array_equal(first, second).item()
    assert not arrived.any().item()
    alone = row_places.RowPlaces(mx.array(lengths[:1]), mx.array([0]), 1)
    one = attend(shape, weights, qkv[:1], [keys, values], alone, None)
    assert mx.allclose(one[0], first[0], rtol=1e-5, atol=1e-6).item()


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("query_heads", [2, 8, pytest.param(14, marks=pytest.mark.proof)])
def test_new_tokens_of_a_row_share_its_keys_and_do_not_depend_on_other_rows(
    query_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have more new tokens than a group of threads takes, or one, and reach over a tile.

    The results are those of the kernel that reads a row once per token.
    """
    monkeypatch.setattr(head_kernels, "DTYPES", (mx.float32,))
    shape = head_kernels.AttentionShape(
        query_heads, 2, 16, 16, is_traditional=False, normalizes=False
    )
    constants = mx.array([0.25, 0.0, 0.0])
    weights = head_kernels.AttentionWeights(mx.zeros((1,)), mx.zeros((1,)), constants)
    tile = row_places.TILE_TOKENS
    # The last token repeats that of the shortest row.
    lengths = [*range(tile - 3, tile + 6), 0, *range(2 * tile - 1, 2 * tile + 4), 0]
    slots = [2] * 9 + [0] + [1] * 5 + [0]
    qkv = mx.random.normal((len(slots), (query_heads + 4) * 16), key=mx.random.key(1))
    qkv[-1] = qkv[9]
    table = mx.random.normal((len(slots), 16), key=mx.random.key(2))
    table[-1] = table[9]

    def attended(device: Gpu, first: int = 0, stop: int = 16) -> mx.array:
        rows = (3, 2, 2 * tile + 9, 16)
        stored = [mx.random.normal(rows, key=mx.random.key(one)) for one in (3, 4)]
        places = row_places.RowPlaces(
            mx.array(lengths[first:stop]), mx.array(slots[first:stop]), 3, tokens_share_rows=True
        )
        attend = head_kernels.HeadAttentionKernels(device).attend
        return attend(shape, weights, qkv[first:stop], stored, places, table[first:stop])

    shared = attended("cuda")
    assert mx.allclose(shared, attended("metal"), rtol=1e-4, atol=1e-5).item()
    alone = attended("cuda", 10, 15)
    assert mx.array_equal(alone, shared[10:15]).item()


@pytest.mark.usefixtures("kernels_on_cpu")
def test_heads_that_kernels_cannot_share_are_computed_without_them() -> None:
    """Eight threads share a head, so its width must be a multiple of 8."""
    opened = open_of(make("qwen3", 4, 2, 12), device="metal")
    assert opened.state == "fast path without kernels: no kernel for heads of 12 numbers"


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("number", [float("nan"), pytest.param(0.0, marks=pytest.mark.proof)])
def test_compiled_decode_that_computes_something_else_keeps_mlx_lms_code(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of a whole decode is compared too, not only layers one by one."""

    def compiled(function: Any) -> Any:
        return lambda *args: [number * one for one in function(*args)]

    monkeypatch.setattr(mx, "compile", compiled)
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.layers is None
    assert opened.state.startswith("mlx-lm's layers: the compiled decode differs by")


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("failing_rank", ["this one", "another one", "none"])
def test_ranks_use_kernels_of_tensor_cores_only_together(
    failing_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others round differently, and ranks would route a token to different experts."""
    for module in (head_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))
    real: Any = mx.fast.cuda_kernel

    def failing(**made: Any) -> object:
        def refuse(**_: Any) -> list[mx.array]:
            raise RuntimeError("no such instruction")

        return refuse if made["name"] == "lockstep_tensor_attention" else real(**made)

    if failing_rank == "this one":
        monkeypatch.setattr(mx.fast, "cuda_kernel", failing)
    kernels, votes = Kernels("cuda", prompts_in_place=True), []
    shapes = [head_kernels.AttentionShape(4, 2, 16, 0, is_traditional=False, normalizes=False)]
    assert kernels.find_fault(shapes, mx.float32, 32) == ""

    def all_agree(vote: bool) -> bool:
        votes.append(vote)
        return vote and failing_rank != "another one"

    kernels.keep_common(all_agree)
    assert votes == [True, True, True, failing_rank != "this one"]
    assert (kernels.prompt_attention is not None) == (failing_rank != "another one")
    assert kernels.head_attention.can_prepare == (failing_rank != "another one")
    assert kernels.head_attention.has_tensor_cores == (failing_rank == "none")


@pytest.mark.usefixtures("kernels_on_cpu")
def test_rank_on_a_gpu_beside_one_on_a_cpu_votes_as_often_and_has_no_kernels() -> None:
    """A vote is a collective, so a rank that votes more often would wait for ever."""
    on_cpu: list[bool] = []
    on_gpu: list[bool] = []

    def note(vote: bool) -> bool:
        on_cpu.append(vote)
        return vote

    def both(vote: bool) -> bool:
        on_gpu.append(vote)
        return vote and on_cpu[len(on_gpu) - 1]

    assert open_of(make("qwen3", 4, 2, 16), device="cpu", all_agree=note).state == "fast path"
    opened = open_of(make("qwen3", 4, 2, 16), device="metal", all_agree=both)
    assert opened.state == "fast path without kernels: another rank has none"
    assert len(on_gpu) == len(on_cpu)


@pytest.mark.usefixtures("kernels_on_cpu")
def test_prompts_without_their_kernel_are_prepared_by_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fault keeps the kernels of decodes."""
    real: Any = mx.fast.metal_kernel

    def failing(**made: Any) -> object:
        def refuse(**_: Any) -> list[mx.array]:
            raise RuntimeError("no such instruction")

        return refuse if made["name"] == "lockstep_prepare_heads" else real(**made)

    monkeypatch.setattr(mx.fast, "metal_kernel", failing)
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.state == "fast path with kernels"


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("text", "wrong", "said"),
    [
        ("total += sums[other", "total += 1.1f * sums[other", ": layer 0"),
        (
            "keys[head * HEAD_DIM + dim] = static_cast<T>(",
            "keys[head * HEAD_DIM + dim] = 1.1f * (",
            ", attention with kernels: attention 0 to several new tokens",
        ),
    ],
)
def test_wrong_kernel_keeps_mlx_lms_code(
    text: str, wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that runs and computes something else is found by the proof.

    Where only that of prompts is wrong, kernels still attend in decodes.
    """
    real: Any = mx.fast.metal_kernel

    def broken(**made: Any) -> object:
        return real(**{**made, "source": made["source"].replace(text, wrong)})

    monkeypatch.setattr(mx.fast, "metal_kernel", broken)
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.state.startswith(f"mlx-lm's layers{said} differs by")


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("row_count", "outputs", "inputs", "gated", "has_bias"),
    [
        (1, 16, 32, False, False),
        (5, 48, 96, False, True),
        (9, 72, 352, False, False),
        (16, 80, 160, True, False),
        (3, 40, 544, True, True),
        (35, 24, 64, False, False),
    ],
)
def test_product_of_few_rows_is_that_of_mlx_and_does_not_depend_on_other_rows(
    row_count: int, outputs: int, inputs: int, gated: bool, has_bias: bool
) -> None:
    """Also where outputs and rows do not fill a group, and warps have unequal shares."""
    mx.random.seed(row_count)
    rows, weight = mx.random.normal((row_count, inputs)), mx.random.normal((outputs, inputs))
    bias = mx.random.normal((outputs,)) if has_bias else None
    product = rows @ weight.T + (0 if bias is None else bias)
    if gated:
        gate, other = mx.split(product, 2, axis=-1)
        product = nn.silu(gate) * other
    found = FewRows().multiply(rows, PlainMatrix(weight), bias, gated=gated)
    assert mx.allclose(found, product, rtol=1e-4, atol=1e-4).item()
    alone = FewRows().multiply(rows[-1:], PlainMatrix(weight), bias, gated=gated)
    assert mx.array_equal(alone[0], found[-1]).item()


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("row_count", "outputs", "inputs", "gated", "has_bias", "bits", "group_size"),
    [
        (1, 16, 32, False, False, 4, 32),
        (9, 72, 384, False, True, 4, 128),
        (16, 80, 192, True, False, 8, 64),
        (35, 48, 64, True, True, 4, 64),
    ],
)
def test_packed_product_of_few_rows_is_that_of_mlx_and_does_not_depend_on_other_rows(
    row_count: int,
    outputs: int,
    inputs: int,
    gated: bool,
    has_bias: bool,
    bits: int,
    group_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merged matrix multiplies with the kernel up to 16 rows, or any number if invariant."""
    monkeypatch.setattr(tensor_cores, "DTYPES", (mx.float32,))
    mx.random.seed(row_count)
    linear: Any = nn.Linear(inputs, outputs, bias=has_bias)
    linear = linear.to_quantized(group_size, bits)
    rows = mx.random.normal((row_count, inputs))
    product = linear(rows)
    if gated:
        gate, other = mx.split(product, 2, axis=-1)
        product = nn.silu(gate) * other
    merged = MergedLinear([linear], FewRows())

    def multiply(rows: mx.array) -> Any:
        return merged.gate(rows, invariant=True) if gated else merged(rows, invariant=True)

    monkeypatch.setattr(mx, "quantized_matmul", None)
    found = multiply(rows)
    assert mx.allclose(found, product, rtol=1e-4, atol=1e-4).item()
    assert mx.array_equal(multiply(rows[-1:])[0], found[-1]).item()


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("tokens", "local"), [(1, range(12)), (6, range(4, 9)), (19, range(12)), (3, range(11, 12))]
)
def test_experts_of_few_tokens_are_those_of_mlx_lm_and_zero_for_other_ranks(
    tokens: int, local: range
) -> None:
    """Also where an expert has more tokens than a group computes at once, and where it has none."""
    mx.random.seed(tokens)
    layer = SwitchGLU(64, 40, 12)
    layer.down_proj.weight = mx.random.normal((12, 64, 32))
    layer.gate_proj.weight = mx.random.normal((12, 32, 64))
    layer.up_proj.weight = mx.random.normal((12, 32, 64))
    x = mx.random.normal((tokens, 64))
    # Few experts are chosen often.
    chances = mx.random.normal((tokens, 12)) + mx.arange(12) * 0.5
    indices = mx.argpartition(-chances, kth=3, axis=-1)[:, :4]
    whole = layer(x, indices)
    is_local = (indices >= local.start) & (indices < local.stop)
    for one in (layer.gate_proj, layer.up_proj, layer.down_proj):
        one.weight = mx.contiguous(one.weight[local.start : local.stop])
    found = FewExperts()(layer, x, indices, local)
    expected = mx.where(is_local[..., None], whole, 0)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-3).item()
    alone = FewExperts()(layer, x[-1:], indices[-1:], local)
    assert mx.array_equal(alone[0], found[-1]).item()
