"""Tiny models of mlx-lm's families with random float32 weights."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models import (
    deepseek_v3,
    deepseek_v32,
    falcon_h1,
    gemma3_text,
    gpt_oss,
    llama,
    mamba2,
    qwen3,
    qwen3_next,
)

MakeModel = Callable[[str], nn.Module]
"""Returns the tiny model of a family: the type of the fixture `make_model`."""

VOCAB = 211
WINDOW = 8


_LATENT_ATTENTION_AND_EXPERTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_nope_head_dim": 12,
}


def with_random_weights(model: Any) -> nn.Module:
    """Give a model random weights.

    They are wide enough that the highest logit stands out and differs from step to step.
    """
    mx.random.seed(7)

    def redraw(path: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2 or "conv1d" in path:
            return weight
        scale = 1.0 if "embed_tokens" in path else 1.6 / weight.shape[-1] ** 0.5
        return mx.random.normal(weight.shape) * scale

    model.update(tree_map_with_path(redraw, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    result: nn.Module = model
    return result


def _qwen3() -> nn.Module:
    return make_qwen3(head_dim=16)


def make_qwen3(head_dim: int, layers: int = 3) -> nn.Module:
    """Return a Qwen3 model with heads of this width and this number of layers."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=48,
        num_hidden_layers=layers,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
    )
    return with_random_weights(qwen3.Model(args))


def _llama() -> nn.Module:
    return make_llama(3)


def make_llama(layers: int) -> nn.Module:
    """Return a Llama model with this number of layers."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=48,
        num_hidden_layers=layers,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    return with_random_weights(llama.Model(args))


def _deepseek_v3() -> nn.Module:
    args = deepseek_v3.ModelArgs(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        **_LATENT_ATTENTION_AND_EXPERTS,
    )
    return with_random_weights(deepseek_v3.Model(args))


def _gemma3() -> nn.Module:
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=48,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
    )
    return with_random_weights(gemma3_text.Model(args))


def _gpt_oss() -> nn.Module:
    args = gpt_oss.ModelArgs(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=48,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        rope_theta=10_000,
        rope_scaling={"rope_type": "default"},
        layer_types=["sliding_attention", "full_attention"],
    )
    return with_random_weights(gpt_oss.Model(args))


def _qwen3_next() -> nn.Module:
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[],
        moe_intermediate_size=32,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        rope_theta=10_000.0,
        partial_rotary_factor=0.5,
        max_position_embeddings=4096,
        full_attention_interval=2,
    )
    return with_random_weights(qwen3_next.Model(args))


def _mamba2() -> nn.Module:
    args = mamba2.ModelArgs(
        model_type="mamba2",
        num_heads=4,
        head_dim=16,
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        state_size=16,
        num_hidden_layers=2,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=False,
        time_step_limit=(0.0, 100.0),
        time_step_rank="auto",
    )
    return with_random_weights(mamba2.Model(args))


def _falcon_h1() -> nn.Module:
    args = falcon_h1.ModelArgs(
        head_dim=16,
        hidden_size=48,
        intermediate_size=96,
        mamba_d_head=16,
        mamba_d_ssm=64,
        mamba_d_state=16,
        mamba_n_heads=4,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        embedding_multiplier=1.0,
        lm_head_multiplier=1.0,
        key_multiplier=1.0,
    )
    return with_random_weights(falcon_h1.Model(args))


def _deepseek_v32() -> nn.Module:
    args = deepseek_v32.ModelArgs(
        vocab_size=VOCAB,
        hidden_size=48,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=2048,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        **_LATENT_ATTENTION_AND_EXPERTS,
    )
    return with_random_weights(deepseek_v32.Model(args))


MODEL_FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "deepseek_v32": _deepseek_v32,
}

PLAIN_FAMILIES = ["qwen3", "llama", "deepseek_v3"]
"""Families whose layers all have plain keys and values."""

STATEFUL_FAMILIES = ["gemma3", "gpt_oss", "qwen3_next", "mamba2", "falcon_h1"]
"""Families with sliding windows or recurrent state.

deepseek_v32 is in neither list: it has plain keys and values, but two sets in each layer.
"""


class WrappedModel(nn.Module):
    """Model that calls another one; subclasses change its logits or its caches."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrapped = wrapped

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return logits [rows, count, vocab]."""
        logits: mx.array = self.wrapped(tokens, cache=cache)
        return logits

    @property
    def layers(self) -> Any:
        """The layers, which mlx-lm counts to make caches."""
        return self.wrapped.layers


class SoftCappedModel(WrappedModel):
    """Plain family whose logits are changed after the head, so the head cannot be narrowed."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return mx.tanh(super().__call__(tokens, cache) / 30.0) * 30.0
