"""The fast path opens where it computes what mlx-lm's code computes, and nowhere else."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import ministral3

from services.rank_worker.model.fast_path.merged_linear import MergedLinear
from tests.mlx.execution.fast_path.attention_models import SHAPES, make, open_of
from tests.mlx.models import with_random_weights


@pytest.mark.parametrize(("kind", "query_heads", "kv_heads", "head_dim"), SHAPES)
def test_fast_path_opens_on_cpu_for_every_attention_shape(
    kind: str, query_heads: int, kv_heads: int, head_dim: int
) -> None:
    """MLX's own operations in another order give the results of mlx-lm's layers."""
    opened = open_of(make(kind, query_heads, kv_heads, head_dim))
    assert opened.state == "fast path"
    assert opened.layers is not None
    assert not opened.layers.has_kernels


def _gelu_in_layer_1(model: Any) -> None:
    class Mlp(type(model.layers[1].mlp)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            product = nn.gelu(self.gate_proj(x)) * self.up_proj(x)
            result: mx.array = self.down_proj(product)
            return result

    model.layers[1].mlp.__class__ = Mlp


def _scaled_residual(model: Any) -> None:
    block = type(model.layers[0])

    class Block(block):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            output: mx.array = super().__call__(x, mask, cache)
            return x + 0.9 * (output - x)

    model.layers[0].__class__ = Block


def _scaled_embedding(model: Any) -> None:
    inner = type(model.model)

    class Inner(inner):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: mx.array, cache: Any = None, _: Any = None) -> mx.array:
            embedded = 4.0 * self.embed_tokens(inputs) + 1.0
            result: mx.array = super().__call__(inputs, cache, embedded)
            return result

    model.model.__class__ = Inner


def _other_scale_in_layer_1(model: Any) -> None:
    attention = type(model.layers[1].self_attn)

    class Attention(attention):  # type: ignore[misc, valid-type]
        scale: float

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            scale, self.scale = self.scale, 2 * self.scale
            result: mx.array = super().__call__(x, mask, cache)
            self.scale = scale
            return result

    model.layers[1].self_attn.__class__ = Attention


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_gelu_in_layer_1, "layer 1 differs by"),
        (_other_scale_in_layer_1, "layer 1 differs by"),
        (_scaled_residual, "layer 0 differs by"),
        (_scaled_embedding, "the embedding or the last norm differs"),
    ],
)
def test_layers_that_compute_something_else_keep_mlx_lms_code(
    change: Callable[[nn.Module], None], said: str
) -> None:
    """A model of known form that computes something else is found by the proof, and named."""
    model = make("qwen3", 4, 2, 16)
    change(model)
    opened = open_of(model)
    assert opened.layers is None
    assert opened.state.startswith(f"mlx-lm's layers: {said}")


def test_disagreement_of_another_rank_closes_fast_path() -> None:
    """Ranks that compute differently would run other collectives."""
    opened = open_of(make("qwen3", 4, 2, 16), all_agree=lambda _: False)
    assert (opened.layers, opened.state) == (
        None,
        "mlx-lm's layers: another rank has no fast path",
    )


def test_product_that_does_not_run_keeps_mlx_lms_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels meet the shapes of the weights last; all ranks are told, and the model still runs."""
    model, votes = make("llama", 4, 2, 16), []

    def vote(statement: bool) -> bool:
        votes.append(statement)
        return statement

    def fail(*_args: object, **_named: object) -> None:
        raise RuntimeError("[few_rows] too many registers\nptxas: ...")

    monkeypatch.setattr(MergedLinear, "compile", fail)
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens)
    opened = open_of(model, all_agree=vote)
    assert opened.layers is None
    assert "a product does not run ([few_rows] too many registers)" in opened.state
    assert votes.count(False) >= 1
    assert mx.allclose(model(tokens), expected, rtol=1e-4, atol=1e-4).item()


def test_layers_that_are_given_more_than_mask_and_cache_keep_mlx_lms_code() -> None:
    """Such as a scale of queries that depends on the position; the proof cannot call them."""
    position_scale = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8_192}
    arguments = ministral3.ModelArgs(
        model_type="ministral3",
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=211,
        rope_parameters={"type": "default", "rope_theta": 10_000.0, **position_scale},
    )
    opened = open_of(with_random_weights(ministral3.Model(arguments)))
    assert opened.state == "mlx-lm's layers: layers are given more than a mask and a cache"


def test_model_with_recurrent_state_keeps_mlx_lms_code(
    make_model: Callable[[str], nn.Module],
) -> None:
    """Its caches are not plain keys and values."""
    opened = open_of(make_model("qwen3_next"))
    assert opened.state == "mlx-lm's layers: the model keeps other state than keys and values"
