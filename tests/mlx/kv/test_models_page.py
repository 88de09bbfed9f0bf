"""The table of model families: cache, KV bits and speculation are those of the models."""

from typing import Any

import pytest
from mlx import nn
from mlx_lm.models import llama

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store, row_kind
from shared.errors import ConfigError
from tests.mlx.models import make_qwen3, with_random_weights
from tests.mlx.sharding.moe_models import make_moe_model
from tests.unit.gateway.tokenizing import models_page

_HIDDEN: dict[str, Any] = {"hidden_size": 128}
_HEADS: dict[str, Any] = {"head_dim": 32}
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
_WIDE = {
    "mixtral": _HIDDEN,
    "granitemoehybrid": _HIDDEN,
    "qwen3_moe": _HEADS,
    "glm4_moe": _HEADS,
    "minimax": _HEADS,
    "deepseek_v3": _LATENT,
    "kimi_k25": _LATENT,
    "mistral4": _LATENT,
}
"""Changes that make keys and values as wide as `rank_worker.kv_bits` needs them."""


def _make(family: str) -> nn.Module:
    if family == "qwen3":
        return make_qwen3(head_dim=32)
    if family == "llama":
        return _make_wide_llama()
    return make_moe_model(family, **_WIDE.get(family, {}))


def _make_wide_llama() -> nn.Module:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
        vocab_size=211,
    )
    return with_random_weights(llama.Model(args))


@pytest.mark.parametrize("row", models_page.rows(), ids=lambda row: row["model_type"])
def test_row_of_models_page_has_the_cache_of_the_family(row: dict[str, str]) -> None:
    """A tiny model of the family has the cache, the KV bits and the speculation of its row."""
    model = _make(row["model_type"])
    shape = read_shape(model)
    kind = row_kind(model, shape)
    assert open_store(model, shape, 0, kind).layout is not None
    try:
        open_store(model, shape, 8, kind)
        has_bits = True
    except ConfigError:
        has_bits = False
    assert row["cache"] == ("checkpoints" if kind.needs_state else "blocks")
    assert row["kv_bits"] == ("yes" if has_bits else "no")
    assert row["speculation"] == ("yes" if kind.can_roll_back else "no")
