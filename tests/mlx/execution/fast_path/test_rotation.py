"""Rotations read from mlx-lm's rotary embeddings."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from services.rank_worker.model.fast_path.known_form.rotation import read_rotation

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.3,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [32, 24])
@pytest.mark.parametrize("scaling", [None, _LLAMA3, _YARN, {"rope_type": "linear", "factor": 2.0}])
def test_table_of_rotary_embedding_rotates_as_module_does(
    scaling: dict[str, Any] | None, dims: int, traditional: bool
) -> None:
    """Several tokens per row, from positions of their own, in heads that are rotated in part."""
    rope: Any = initialize_rope(
        dims, 10_000.0, traditional, scaling_config=scaling, max_position_embeddings=4096
    )
    rotation = read_rotation(rope, 32)
    assert rotation is not None
    assert (rotation.width, rotation.is_traditional) == (dims, traditional)
    x = mx.random.normal((3, 4, 5, 32))
    offset = mx.array([0, 900, 17], dtype=mx.int32)
    found = rotation.rotate(x, rotation.table(offset, 5, 3))
    assert mx.allclose(rope(x + 0.0, offset=offset), found, atol=1e-4).item()


def test_module_that_does_not_rotate_pairs_is_unknown() -> None:
    """An embedding that also adds would be computed wrongly."""

    class Shifted(nn.RoPE):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            result: mx.array = super().__call__(x, offset=offset) + 0.01
            return result

    assert read_rotation(Shifted(32), 32) is None


def test_equal_rotations_are_told_from_others() -> None:
    """Layers with one rotation share a table; another base needs another."""
    one, same, other = (
        read_rotation(nn.RoPE(32, base=base), 32) for base in (10_000.0, 10_000.0, 500_000.0)
    )
    assert one is not None
    assert same is not None
    assert other is not None
    assert one.equals(same)
    assert not one.equals(other)
