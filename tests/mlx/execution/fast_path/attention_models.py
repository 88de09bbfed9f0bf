"""Models with attention of many kinds and shapes, and their fast paths."""

from typing import Any

from mlx import nn
from mlx_lm.models import glm4_moe, llama, qwen2, qwen3

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.fast_path.opening import (
    FastPath,
    FastPathSettings,
    open_fast_path,
)
from services.rank_worker.model.forward import Forward
from tests.mlx.models import with_random_weights

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "vocab_size": 211,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_DENSE_GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": False,
    "rope_scaling": None,
}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (qwen3.Model, qwen3.ModelArgs, {"model_type": "qwen3"}),
    "qwen2": (qwen2.Model, qwen2.ModelArgs, {"model_type": "qwen2"}),
    "llama": (llama.Model, llama.ModelArgs, {"model_type": "llama"}),
    # Half of each head is rotated.
    "partial": (glm4_moe.Model, glm4_moe.ModelArgs, _DENSE_GLM),
    "traditional": (
        llama.Model,
        llama.ModelArgs,
        {"model_type": "llama", "rope_traditional": True, "attention_bias": True},
    ),
}


def make(kind: str, query_heads: int, kv_heads: int, head_dim: int) -> nn.Module:
    """Return a model with attention of this kind and shape."""
    model, arguments, fields = _KINDS[kind]
    heads: dict[str, Any] = {
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    if kind == "qwen2":
        del heads["head_dim"]
        heads["hidden_size"] = query_heads * head_dim
    return with_random_weights(model(arguments(**{**_SIZES, **fields, **heads})))


def open_of(model: nn.Module, kv_bits: int = 0, **settings: Any) -> FastPath:
    """Open the fast path of a model."""
    shape = read_shape(model)
    store = open_store(model, shape, kv_bits)
    return open_fast_path(Forward(model), store, shape, FastPathSettings(**settings), kv_bits)


SHAPES = [
    ("qwen3", 4, 2, 16),
    ("qwen3", 8, 2, 32),
    ("qwen2", 6, 2, 64),
    ("llama", 5, 1, 128),
    ("traditional", 4, 4, 80),
    ("partial", 4, 2, 16),
    ("qwen3", 7, 1, 64),
    ("llama", 4, 1, 256),
    ("qwen3", 16, 2, 96),
]
