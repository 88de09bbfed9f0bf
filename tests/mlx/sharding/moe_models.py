"""Tiny models of all of mlx-lm's families with routed experts, with random float32 weights."""

import dataclasses
import importlib
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path

from services.rank_worker.model.sharding.local_experts import is_switch, keep_local
from shared.messages.base import Sharding
from shared.model.sharding.feasibility import sharding_obstacle

VOCAB = 211
LAYERS = 3
EXPERTS = 6
"""Divisible by 2 and 3; four ranks get unequal shares."""

COMMON_FIELDS: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 48,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 2048,
    "intermediate_size": 64,
    "kv_lora_rank": 16,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "moe_num_experts": EXPERTS,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_qk_norm": True,
    "v_head_dim": 16,
    "vocab_size": VOCAB,
}
"""Values of config fields that families have in common."""

_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "full_attention_interval": 3,
}
_FULL = ["full_attention"] * LAYERS
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
_KDA = {
    "kda_layers": [1, 2],
    "full_attn_layers": [3],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
_GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

MOE_FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afmoe": {"layer_types": _SLIDING, "num_dense_layers": 1},
    "bailing_hybrid": {"layer_group_size": 3, "group_norm_size": 2},
    "bailing_moe": {},
    "bailing_moe_linear": {"layer_group_size": 3, "group_norm_size": 2, "topk_group": 1},
    "bailing_moe_v3": {},
    "deepseek": {},
    "deepseek_v2": {"rope_scaling": {"type": "yarn", **_YARN}, "topk_method": "greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {"moe_intermediate_size": 32},
    "dots1": {},
    "ernie4_5_moe": {"use_bias": True, "moe_num_shared_experts": 2, "moe_k": 2},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True]},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "layer_types": _SLIDING,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": False,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
    "gpt_oss": {
        "layer_types": _SLIDING,
        "rope_scaling": {"rope_type": "default"},
    },
    "granitemoe": _GRANITE,
    "granitemoehybrid": {**_GRANITE, "layer_types": ["attention"] * LAYERS},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": {}},
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": {**_KDA, "gate_lower_bound": -5.0},
            "num_experts_per_token": 2,
            "routed_expert_hidden_size": 24,
            "latent_moe_use_norm": True,
        }
    },
    "kimi_linear": {
        "linear_attn_config": _KDA,
        "model_max_length": 4096,
        "num_experts_per_token": 2,
    },
    "kimi_vl": {"text_config": {}},
    "laguna": {},
    "lfm2_moe": {
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "llama4": {
        "text_config": {
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
            # Every fourth layer has full attention, and the caches need one of them.
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "model_type": "llama4_text",
        }
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mellum": {
        "layer_types": _SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 64,
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10_000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 64,
            "moe_layer_freq": [0, 1, 1],
            "rotary_dim": 8,
        }
    },
    "mistral4": {
        "rope_parameters": {
            **_YARN,
            "rope_theta": 10_000.0,
            "type": "yarn",
            "llama_4_scaling_beta": 0.1,
            "mscale_all_dim": 1.0,
        }
    },
    "mixtral": {},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "layer_rope_theta": [10_000.0] * LAYERS,
            "layer_types": _SLIDING,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 24,
            "num_shared_experts": 0,
        }
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": True,
        "layer_norm_epsilon": 1e-6,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "E", "*", "E"],
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 24,
    },
    "olmoe": {},
    "phimoe": {},
    "phixtral": {
        "num_vocab": VOCAB,
        "model_dim": 64,
        "num_heads": 2,
        "num_layers": 2,
        "num_experts_per_tok": 2,
        "num_local_experts": EXPERTS,
        "rotary_dim": 16,
    },
    "qwen2_moe": {},
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "solar_open": {},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": _SLIDING,
        "share_expert_dim": 32,
        "moe_top_k": 2,
        "moe_layers_enum": "1,2",
        "swiglu_limits": [0, 7.0, 7.0],
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
}
"""Other config fields of each family, by the name of mlx-lm's module."""


def moe_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a family's tiny model."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    own = MOE_FAMILIES.get(family, {})
    if "text_config" in own:
        text = {**COMMON_FIELDS, **own["text_config"], **changes}
        for kind in ("TextConfig", "TextArgs"):
            if hasattr(module, kind):
                text = _dataclass_fields(getattr(module, kind), text)
        return {"model_type": family, "text_config": text}
    return {
        **_dataclass_fields(module.ModelArgs, {**COMMON_FIELDS, **own, **changes}),
        "model_type": family,
    }


def make_moe_model(family: str, **changes: Any) -> nn.Module:
    """Return a family's tiny model, with the same weights at each call."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(moe_config(family, **changes)))

    def redraw(path: str, weight: mx.array) -> mx.array:
        if "conv" in path or not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if weight.ndim < 2:
            # Biases are random too: a sum over ranks must add each of them once.
            return mx.random.normal(weight.shape) * 0.1 + weight
        scale = 1.2 / weight.shape[-1] ** 0.5
        drawn: mx.array = mx.random.normal(weight.shape) * scale
        return drawn

    model.update(tree_map_with_path(redraw, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    result: nn.Module = model
    return result


def families_of_sharding(sharding: Sharding) -> list[str]:
    """Return the families whose tiny models, with an even vocabulary, two ranks can divide so."""
    return [
        family
        for family in sorted(MOE_FAMILIES)
        if not sharding_obstacle(moe_config(family, vocab_size=VOCAB + 1), sharding, 2)
    ]


def make_half_of_experts(family: str) -> nn.Module:
    """Return a model that has only the first half of its experts."""
    model = make_moe_model(family)
    for module in list(model.modules()):
        if sum(map(is_switch, module.children().values())) > 1:
            keep_local(module, 0, EXPERTS // 2)
    return model


def _dataclass_fields(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}
