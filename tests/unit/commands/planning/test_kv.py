"""KV bytes per token and per row from tensor shapes, for known models and every split."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from services.commands.planning.model.kv import KVBytes, ModelKV, model_kv
from services.commands.planning.model.recurrent import RECURRENT, UNPLANNED
from services.commands.planning.model.windows import WINDOWED
from tests.unit.commands.planning import sparse_checkpoints

KIB = 1_024


def _kv(folder: Path, config: dict[str, Any], shapes: sparse_checkpoints.Shapes) -> ModelKV:
    return model_kv(sparse_checkpoints.read(sparse_checkpoints.write(folder, config, shapes)))


def test_ranks_divide_kv_heads_of_grouped_query_attention(tmp_path: Path) -> None:
    """Llama 3.1 70B has 320 KiB of KV per token; ranks divide its 8 heads, at least one each."""
    kv = _kv(tmp_path, sparse_checkpoints.DENSE, sparse_checkpoints.dense_shapes())

    assert kv.known
    assert kv.bytes() == KVBytes(320 * KIB, 0)
    assert [kv.bytes(ranks=n).per_token for n in (2, 8, 16)] == [160 * KIB, 40 * KIB, 40 * KIB]


def test_planned_bytes_of_quantized_kv_include_scales_and_biases(tmp_path: Path) -> None:
    """8 bits take 8 per number and 32 per group of 64 for scale and bias; 4 bits take half."""
    kv = _kv(tmp_path, sparse_checkpoints.DENSE, sparse_checkpoints.dense_shapes())

    numbers = 80 * 2 * 8 * 128
    assert kv.quantizable()
    assert kv.bytes(bits=8).per_token == numbers + numbers // 64 * 4
    assert kv.bytes(bits=4, ranks=2).per_token == (numbers // 2 + numbers // 64 * 4) // 2


def test_pipeline_rank_keeps_kv_of_its_own_layers_only(tmp_path: Path) -> None:
    """The KV bytes of two ranks' layers sum to those of the whole model."""
    kv = _kv(tmp_path, sparse_checkpoints.DENSE, sparse_checkpoints.dense_shapes())

    parts = [kv.bytes(first=0, last=30), kv.bytes(first=30, last=80)]

    assert sum(part.per_token for part in parts) == kv.bytes().per_token
    assert parts[0].per_token == 30 * 4 * KIB


def test_plan_counts_whole_latent_kv_on_every_rank(tmp_path: Path) -> None:
    """DeepSeek V3 keeps 512 + 64 numbers per layer and token on every rank."""
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163_840,
    }  # fmt: skip
    shapes: sparse_checkpoints.Shapes = {
        f"model.layers.{layer}.self_attn.{name}.weight": ("BF16", shape)
        for layer in range(61)
        for name, shape in (
            ("kv_a_proj_with_mqa", (576, 7_168)),
            ("kv_b_proj", (32_768, 512)),
            ("q_a_proj", (1_536, 7_168)),
        )
    }

    kv = _kv(tmp_path / "v3", config, shapes)
    expanded = _kv(tmp_path / "v2", {**config, "model_type": "deepseek_v2"}, shapes)

    assert kv.bytes(ranks=8) == kv.bytes() == KVBytes(61 * 576 * 2, 0)
    assert not kv.quantizable()
    assert expanded.bytes().per_token == 61 * 128 * (192 + 128) * 2


def test_planned_kv_of_sliding_window_layers_is_independent_of_sequence_length(
    tmp_path: Path,
) -> None:
    """gpt-oss keeps half of its layers for 128 tokens only, at any row length."""
    config = {
        **sparse_checkpoints.DENSE, "model_type": "gpt_oss", "num_hidden_layers": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip

    kv = _kv(tmp_path, config, sparse_checkpoints.dense_shapes(config))

    assert kv.bytes() == KVBytes(2 * 4 * KIB, 2 * 4 * KIB * 128)
    assert not kv.quantizable()


def test_plan_ignores_sliding_window_that_mlx_lm_ignores(tmp_path: Path) -> None:
    """qwen2 configs name a window that mlx-lm ignores: KV of all tokens is kept."""
    config = {**sparse_checkpoints.DENSE, "model_type": "qwen2", "sliding_window": 4_096}

    assert _kv(tmp_path, config, sparse_checkpoints.dense_shapes(config)).bytes() == KVBytes(
        320 * KIB, 0
    )


def test_plan_counts_no_kv_bytes_for_layers_that_share_kv(tmp_path: Path) -> None:
    """The last layers of Gemma 3n and 4 read the KV of earlier layers."""
    config = {
        **sparse_checkpoints.DENSE, "model_type": "gemma4_text", "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4,
    }  # fmt: skip

    assert _kv(tmp_path, config, sparse_checkpoints.dense_shapes(config)).bytes() == KVBytes(
        8 * KIB, 0
    )


def test_plan_gives_no_kv_size_for_layers_with_unknown_attention(tmp_path: Path) -> None:
    """A layer whose attention has unknown tensors gets no KV size."""
    shapes: sparse_checkpoints.Shapes = {"model.layers.0.attn.mystery.weight": ("F32", (8, 8))}
    odd: sparse_checkpoints.Shapes = {"model.layers.0.mixer.A_log": ("F32", (8,))}
    config = {"model_type": "strange", "num_hidden_layers": 1}

    assert not _kv(tmp_path / "one", config, shapes).known
    assert not _kv(tmp_path / "two", config, odd).known


def _families_with(pattern: str) -> list[str]:
    """Return the mlx-lm families whose source matches `pattern`."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8")) and path.stem != "cache"
    )


@pytest.mark.parametrize("family", _families_with(r"RotatingKVCache"))
def test_kv_planning_lists_every_mlx_lm_model_family_with_sliding_window(family: str) -> None:
    """Every family of mlx-lm with a sliding window is listed as planned or as unplanned."""
    assert family in WINDOWED.keys() | UNPLANNED


@pytest.mark.parametrize("family", _families_with(r"\b(Arrays|Chunked\w*|Layer)Cache\("))
def test_kv_planning_lists_every_mlx_lm_model_family_with_recurrent_state(family: str) -> None:
    """Every family of mlx-lm with other state than keys and values is listed as planned or as
    unplanned."""
    assert family in RECURRENT | UNPLANNED
