"""Layers of routed experts with packed numbers, whose products kernels compute."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from services.rank_worker.model.fast_path.expert_opening import open_expert_kernels
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels
from services.rank_worker.model.fast_path.kernels.few_experts import FewExperts
from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from services.rank_worker.model.fast_path.kernels.matrices import Matrix, PackedMatrix
from services.rank_worker.model.sharding.local_experts import keep_all
from tests.mlx.execution.fast_path.attention_models import make, open_of

Kind = tuple[str, int, int]
"""Mode, bits, and size of a group."""

_EXPERTS = 12
_AFFINE_4, _AFFINE_8 = ("affine", 4, 64), ("affine", 8, 64)


@pytest.fixture(autouse=True)
def _tensor_cores_of_4_bytes(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> None:
    monkeypatch.setattr(tensor_cores, "DTYPES", (mx.float32,))


def _layer(dim: int, width: int, gate_up: Kind, down: Kind, experts: int = _EXPERTS) -> Any:
    layer = SwitchGLU(dim, width, experts)
    for name in ("gate_proj", "up_proj", "down_proj"):
        mode, bits, group_size = down if name == "down_proj" else gate_up
        layer[name].weight = mx.random.normal(layer[name].weight.shape)
        layer[name] = layer[name].to_quantized(group_size, bits, mode)
    return layer


def _keep(layer: Any, local: range) -> None:
    """Keep the weights of some experts."""
    for one in (layer.gate_proj, layer.up_proj, layer.down_proj):
        for name, array in one.parameters().items():
            one[name] = mx.contiguous(array[local.start : local.stop])


def _are_near(found: mx.array, expected: mx.array) -> bool:
    return bool((mx.abs(found - expected).max() < 1e-4 * mx.abs(expected).max()).item())


@pytest.mark.parametrize(
    ("kind", "dim", "width", "words"),
    [
        (("affine", 4, 32), 128, 128, 4),
        (("affine", 4, 64), 64, 192, 2),
        pytest.param(*(("affine", 4, 128), 384, 128, 4), marks=pytest.mark.proof),
        pytest.param(*(("affine", 8, 32), 96, 64, 2), marks=pytest.mark.proof),
        pytest.param(*(("affine", 8, 64), 192, 64, 4), marks=pytest.mark.proof),
        pytest.param(*(("affine", 8, 128), 128, 128, 4), marks=pytest.mark.proof),
        (("mxfp4", 4, 32), 96, 160, 1),
        pytest.param(*(("mxfp8", 8, 32), 64, 96, 4), marks=pytest.mark.proof),
        pytest.param(*(("nvfp4", 4, 16), 64, 96, 2), marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize(("tokens", "local"), [(1, range(_EXPERTS)), (19, range(4, 9))])
def test_packed_experts_are_those_of_mlx_lm_and_zero_for_other_ranks(
    kind: Kind, dim: int, width: int, words: int, tokens: int, local: range
) -> None:
    """In every kind of packing, for every number of words that a thread reads at once, and where an
    expert has more tokens than a group of threads computes at once."""
    mx.random.seed(dim + tokens)
    layer = _layer(dim, width, kind, kind)
    assert ("WORDS", words) in PackedMatrix.of(layer.gate_proj).constants
    x = mx.random.normal((tokens, dim))
    # Few experts are chosen often.
    chances = mx.random.normal((tokens, _EXPERTS)) + mx.arange(_EXPERTS) * 0.5
    indices = mx.argpartition(-chances, kth=3, axis=-1)[:, :4]
    whole = layer(x, indices)
    is_local = (indices >= local.start) & (indices < local.stop)
    _keep(layer, local)
    found = FewExperts()(layer, x, indices, local)
    expected = mx.where(is_local[..., None], whole, 0)
    assert _are_near(found, expected)
    alone = FewExperts()(layer, x[-1:], indices[-1:], local)
    assert mx.array_equal(alone[0], found[-1]).item()


def test_scales_beyond_all_common_ones_are_read_rightly() -> None:
    """Of the small floats of nvfp4 those below 2^-6 are written in another way; so is 2^-127."""
    for kind in (("nvfp4", 4, 16), ("mxfp4", 4, 32)):
        layer = _layer(64, 64, kind, kind, experts=1)
        scales = layer.gate_proj.scales
        layer.gate_proj.scales = (
            (mx.arange(scales.size) % 120).astype(mx.uint8).reshape(scales.shape)
        )
        x, indices = mx.random.normal((2, 64)), mx.zeros((2, 1), dtype=mx.uint32)
        found, expected = FewExperts()(layer, x, indices, range(1)), layer(x, indices)
        assert _are_near(found, expected)


def _state(layer: Any) -> str:
    model = nn.Module()
    model.experts = layer
    keep_all(model)
    return open_expert_kernels(model, "cuda", bool)


@pytest.mark.parametrize("down", [_AFFINE_4, _AFFINE_8, ("mxfp4", 4, 32)])
def test_down_may_be_packed_in_another_way_than_gate_and_up(down: Kind) -> None:
    """Models of mixed precision have more bits there."""
    layer = _layer(64, 64, _AFFINE_4, down, experts=4)
    assert _state(layer).startswith("experts with kernels")


def _of_other_bits(layer: Any) -> None:
    layer.up_proj = _layer(64, 64, _AFFINE_8, _AFFINE_8, experts=4).up_proj


def _of_five_bits(layer: Any) -> None:
    five = _layer(64, 64, ("affine", 5, 64), _AFFINE_4, experts=4)
    layer.gate_proj, layer.up_proj = five.gate_proj, five.up_proj


def _with_bias(layer: Any) -> None:
    layer.down_proj.bias = mx.zeros((4, 64))


def _with_global_scale(layer: Any) -> None:
    layer.down_proj.global_scale = mx.ones((4,))


@pytest.mark.parametrize("change", [_of_other_bits, _of_five_bits, _with_bias, _with_global_scale])
def test_packed_experts_of_another_form_are_left_to_mlx_lm(change: Any) -> None:
    """The kernels know neither of these."""
    layer = _layer(64, 64, _AFFINE_4, _AFFINE_4, experts=4)
    change(layer)
    assert _state(layer).startswith("mlx-lm's experts: their form has no kernels")


def test_tokens_of_another_type_are_left_to_mlx_lm() -> None:
    """Scales have the type that tokens must have; small floats have tokens of any of 16 bits."""
    x = mx.zeros((2, 64))
    for kind, takes in ((_AFFINE_4, [True, False]), (("mxfp4", 4, 32), [True, False])):
        layer = _layer(64, 64, kind, kind, experts=4)
        found = [FewExperts().takes(layer, one, 2) for one in (x, x.astype(mx.float16))]
        assert found == takes


@pytest.mark.parametrize("keeps_layers", [False, True])
def test_packed_matrices_of_a_dense_model_are_multiplied_by_the_kernel(
    keeps_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers pass the proof, in which all products are compared."""
    monkeypatch.setattr(head_kernels, "DTYPES", (mx.float32,))
    used: list[int] = []
    multiply = FewRows.multiply

    def noting(few_rows: FewRows, rows: mx.array, matrix: Matrix, *args: Any, **named: Any) -> Any:
        used.append(matrix.bits if isinstance(matrix, PackedMatrix) else 16)
        return multiply(few_rows, rows, matrix, *args, **named)

    monkeypatch.setattr(FewRows, "multiply", noting)
    model = make("qwen2", 4, 2, 16)
    nn.quantize(model, 32, 8, class_predicate=lambda path, one: "gate_proj" in path or "up" in path)
    opened = open_of(model, device="cuda", keeps_layers=keeps_layers)
    assert opened.layers is not None
    assert {8, 16} <= set(used)
