"""Models with latent attention of all families that have the same form, and of many shapes."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx import nn
from mlx_lm.models import deepseek_v3, glm4_moe_lite, kimi_k25, kimi_vl, mistral4

from tests.mlx.models import with_random_weights

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 20,
}
_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral4",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "topk_group": 1,
    "n_group": 1,
    "rope_parameters": {**_YARN, "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.1},
}
_GROUPS_OF_EXPERTS = {"n_group": 4, "topk_group": 2}


def _deepseek(sizes: dict[str, Any]) -> Any:
    return deepseek_v3.Model(deepseek_v3.ModelArgs(**sizes))


def _glm(sizes: dict[str, Any]) -> Any:
    return glm4_moe_lite.Model(glm4_moe_lite.ModelArgs(**sizes))


def _kimi(sizes: dict[str, Any]) -> Any:
    return kimi_k25.Model(kimi_k25.ModelArgs(text_config=sizes))


def _kimi_vl(sizes: dict[str, Any]) -> Any:
    return kimi_vl.Model(kimi_vl.ModelArgs(text_config=sizes, model_type="kimi_vl"))


def _mistral(sizes: dict[str, Any]) -> Any:
    return mistral4.Model(mistral4.ModelArgs(**sizes))


_KINDS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "deepseek_v3": (_deepseek, {}),
    "whole_queries": (_deepseek, {"q_lora_rank": None}),
    "scaled_positions": (_deepseek, {"rope_scaling": _YARN}),
    "groups_of_experts": (_deepseek, _GROUPS_OF_EXPERTS),
    "biased": (_deepseek, {"attention_bias": True}),
    "biased_whole_queries": (_deepseek, {"attention_bias": True, "q_lora_rank": None}),
    "glm4_moe_lite": (_glm, {}),
    "kimi_k25": (_kimi, {}),
    "kimi_vl": (_kimi_vl, {}),
    "dense": (_deepseek, {"first_k_dense_replace": 2}),
    "mistral4": (_mistral, _MISTRAL),
}
_QUICK = ("deepseek_v3", "whole_queries")
LATENT_KINDS = [
    one if one in _QUICK else pytest.param(one, marks=pytest.mark.proof)
    for one in _KINDS
    if one != "mistral4"
]
"""Those that the fast path computes, all of them in `make proofs`."""
FAMILIES = [
    *_QUICK,
    *(pytest.param(one, marks=pytest.mark.proof) for one in ("glm4_moe_lite", "kimi_k25")),
]
"""One kind of each family, and one without a narrow projection of queries."""


def make_latent(kind: str, heads: int = 4, **changes: Any) -> nn.Module:
    """Return a model of this kind, with random weights.

    Args:
        kind: one of `_KINDS`.
        heads: of each attention.
        changes: other fields of its settings.
    """
    build, fields = _KINDS[kind]
    counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return with_random_weights(build({**_SIZES, **fields, **counts, **changes}))
