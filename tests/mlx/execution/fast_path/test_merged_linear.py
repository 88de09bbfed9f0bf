"""Merged matrices: same products, no second copy of the weights, modules that still work."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.nn.layers import distributed

from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from services.rank_worker.model.fast_path.merged_linear import MergedLinear, can_merge, packed_bits


def _modules(quantization: dict[str, Any] | None, *, bias: bool) -> list[Any]:
    mx.random.seed(3)
    modules: list[Any] = [nn.Linear(256, width, bias=bias) for width in (512, 128, 128)]
    if quantization is not None:
        modules = [one.to_quantized(**quantization) for one in modules]
    mx.eval([one.parameters() for one in modules])
    return modules


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"group_size": 64, "bits": 4},
        {"group_size": 32, "bits": 8},
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    ],
)
def test_merged_matrices_give_products_of_modules_in_same_memory(
    quantization: dict[str, Any] | None, bias: bool
) -> None:
    """The modules keep views of the merged weights, so memory does not grow."""
    modules = _modules(quantization, bias=bias)
    x = mx.random.normal((5, 256))
    expected = mx.concatenate([one(x) for one in modules], axis=-1)
    mx.eval(expected)
    mx.clear_cache()
    before = mx.get_active_memory()
    merged = MergedLinear(modules)
    mx.clear_cache()
    weights = sum(array.nbytes for one in modules for array in one.parameters().values())
    assert mx.get_active_memory() - before < weights / 10
    assert mx.allclose(merged(x), expected, rtol=1e-4, atol=1e-4).item()
    again = mx.concatenate([one(x) for one in modules], axis=-1)
    assert mx.allclose(again, expected, rtol=1e-4, atol=1e-4).item()


def test_matrices_of_different_kinds_are_not_merged() -> None:
    """One that is quantized otherwise, has a bias, or is an adapter, would change the product."""
    whole, four, eight = (
        _modules(None, bias=False)[0],
        _modules({"group_size": 64, "bits": 4}, bias=False)[0],
        _modules({"group_size": 64, "bits": 8}, bias=False)[0],
    )
    biased = _modules(None, bias=True)[0]

    class Adapter(nn.Linear):
        pass

    assert can_merge([whole, whole])
    for other in (four, biased, Adapter(256, 128, bias=False)):
        assert not can_merge([whole, other])
    assert not can_merge([four, eight])


def test_rows_of_another_type_than_the_matrix_are_multiplied_by_mlx() -> None:
    """MiniMax's router is a matrix of 16 bits, which multiplies numbers of 32 bits."""
    module = nn.Linear(256, 64, bias=False)
    module.set_dtype(mx.bfloat16)
    x = mx.random.normal((5, 256))
    calls: list[mx.Dtype] = []

    class Noting(FewRows):
        def __init__(self) -> None:
            pass

        def multiply(self, rows: mx.array, *_: Any, **__: Any) -> mx.array:
            calls.append(rows.dtype)
            return mx.zeros((5, 64))

    merged = MergedLinear([module], Noting())
    merged(x.astype(mx.bfloat16))
    assert calls == [mx.bfloat16]
    assert mx.array_equal(merged(x), module(x)).item()
    assert calls == [mx.bfloat16]


def test_bits_of_packed_matrices_are_found_in_those_divided_by_inputs_too() -> None:
    """Their kernels are tried before ranks vote; other modes than affine have none."""
    group = mx.distributed.init()
    divided = nn.Linear(64, 64).to_quantized(32, 8)
    model = nn.Sequential(
        nn.Linear(64, 64).to_quantized(32, 4),
        distributed.QuantizedShardedToAllLinear.from_quantized_linear(divided, group=group),
        nn.Linear(64, 64, bias=False).to_quantized(32, 4, mode="mxfp4"),
        nn.Linear(64, 64),
    )
    assert packed_bits(model) == {4, 8}
