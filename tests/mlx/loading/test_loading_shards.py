"""Shards: each rank reads its own part, and has the same weights as a cut whole model."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.model.loading import weights
from services.rank_worker.model.loading.loader import LoadedModel
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.messages.base import Sharding
from tests.mlx import models
from tests.mlx.loading.model_checkpoints import (
    LoadingRank,
    Weights,
    assert_shard_equal,
    loading_ranks,
    model_config,
    model_weights,
    quantize_in_groups,
    save_checkpoint,
)
from tests.mlx.models import MakeModel
from tests.mlx.sharding import moe_models


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of weights that are computed from whole tensors; it grows during loads."""
    names: list[str] = []
    take = weights.plan_weights

    def note(*given: Any) -> weights.ModelWeights:
        weights = take(*given)
        names.extend(weights.computed)
        return weights

    monkeypatch.setattr("services.rank_worker.model.loading.loader.plan_weights", note)
    return names


def _load_and_compare(
    folder: Path, sharding: Sharding, size: int, **settings: Any
) -> list[LoadedModel]:
    """Load the shard of every rank and compare it with the cut of the whole model."""
    config = ModelConfig(path=str(folder), **settings)
    shards = []
    for rank in loading_ranks(sharding, size):
        expected = rank.cut(config)
        shards.append(rank.load(config))
        assert_shard_equal(shards[-1], expected)
    return shards


@pytest.mark.parametrize("family", list(models.MODEL_FACTORIES))
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_single_rank_loads_whole_model_bit_for_bit(
    tmp_path: Path, make_model: MakeModel, family: str, dtype: str
) -> None:
    """A single rank loads every family bit for bit, stored or cast."""
    model = make_model(family)
    weights = {path: array.astype(mx.bfloat16) for path, array in model_weights(model).items()}
    save_checkpoint(tmp_path, weights, model_config(model), files=3)

    (shard,) = _load_and_compare(tmp_path, "none", 1, dtype=dtype)

    assert shard.bytes_read == sum(array.nbytes for array in weights.values())


@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek_v3", "deepseek_v32", "gpt_oss"])
@pytest.mark.parametrize("size", [2, 4])
def test_loaded_tensor_shards_equal_parts_cut_from_whole_model(
    tmp_path: Path, make_model: MakeModel, family: str, size: int
) -> None:
    """Tensor-sharded ranks load their parts from several files."""
    model = make_model(family)
    config = model_config(model)
    save_checkpoint(tmp_path, model_weights(model), config, files=2)
    if config["num_key_value_heads"] < size:
        with pytest.raises(ConfigError, match="cannot be split over 4 ranks"):
            loading_ranks("tensor", size)[0].find(ModelConfig(path=str(tmp_path)))
        return

    _load_and_compare(tmp_path, "tensor", size)


@pytest.mark.parametrize("family", sorted(moe_models.MOE_FAMILIES))
def test_loaded_expert_shards_equal_parts_cut_from_whole_model(
    tmp_path: Path, computed: list[str], family: str
) -> None:
    """Each rank reads only its experts, for every MoE family and unequal shares."""
    model = moe_models.make_moe_model(family)
    save_checkpoint(tmp_path, model_weights(model), moe_models.moe_config(family))
    settings = ModelConfig(path=str(tmp_path), context_tokens_max=64)
    for rank in (
        LoadingRank("expert", 0, 2),
        LoadingRank("expert", 2, 4),
        LoadingRank("expert", 3, 4),
    ):
        expected = rank.cut(settings)
        shard = rank.load(settings)
        assert_shard_equal(shard, expected)
        large = {path for path in computed if expected[path].nbytes > 4_096}
        assert not large, "an expert's weights were read whole"


@pytest.mark.parametrize("family", moe_models.families_of_sharding("tensor+expert"))
def test_loaded_shards_of_tensors_and_experts_equal_parts_cut_from_whole_model(
    tmp_path: Path, computed: list[str], family: str
) -> None:
    """Each rank reads only its experts and its part of all else."""
    sizes = {"vocab_size": moe_models.VOCAB + 1}
    model = moe_models.make_moe_model(family, **sizes)
    save_checkpoint(tmp_path, model_weights(model), moe_models.moe_config(family, **sizes))
    settings = ModelConfig(path=str(tmp_path), context_tokens_max=64)
    rank = LoadingRank("tensor+expert", 1, 2, memory_bytes=(1, 2))
    expected = rank.cut(settings)
    assert_shard_equal(rank.load(settings), expected)
    large = {path for path in computed if expected[path].nbytes > 4_096}
    assert not large, "a matrix was read whole"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_pipeline_rank_reads_only_its_layers_and_shared_weights(
    tmp_path: Path, make_model: MakeModel, family: str
) -> None:
    """A rank of a pipeline reads its own layers and the shared weights only."""
    model = make_model(family)
    save_checkpoint(tmp_path, model_weights(model), model_config(model))

    whole = sum(array.nbytes for array in model_weights(model).values())
    for shard in _load_and_compare(tmp_path, "pipeline", 2):
        assert shard.bytes_read == shard.shard_bytes < whole


@pytest.mark.parametrize("sharding", ["tensor", "expert"])
def test_quantized_weights_are_cut_together_with_their_scales(
    tmp_path: Path, sharding: Sharding
) -> None:
    """Quantized weights, also of shared experts, are cut together with their scales."""
    model = moe_models.make_moe_model("glm4_moe")
    config = {
        **moe_models.moe_config("glm4_moe"),
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
    }
    kind: Any = type(model)
    model = kind(type(model.args).from_dict(config))
    config = quantize_in_groups(model, config)
    save_checkpoint(tmp_path, model_weights(model), config)

    for shard in _load_and_compare(tmp_path, sharding, 2, dtype="float16"):
        types = {array.dtype for array in model_weights(shard.model).values()}
        assert types >= {mx.uint32, mx.float16}


def _with_separate_experts(weights: Weights) -> Weights:
    """Return a checkpoint with separate matrices per expert, as models are published."""
    apart: Weights = {}
    for path, array in weights.items():
        before, is_expert, name = path.partition("switch_mlp.")
        if is_expert:
            for number in range(array.shape[0]):
                apart[f"{before}experts.{number}.{name}"] = array[number]
        else:
            apart[path] = array
    return apart


@pytest.mark.parametrize(("sharding", "size"), [("tensor", 2), ("expert", 2), ("expert", 4)])
def test_rank_stacks_separate_expert_matrices_and_reads_only_its_own(
    tmp_path: Path, computed: list[str], sharding: Sharding, size: int
) -> None:
    """Separate expert matrices are stacked as in mlx-lm; a rank reads only its own."""
    model = moe_models.make_moe_model("qwen3_moe")
    save_checkpoint(
        tmp_path,
        _with_separate_experts(model_weights(model)),
        moe_models.moe_config("qwen3_moe"),
        files=3,
    )

    shards = _load_and_compare(tmp_path, sharding, size)

    assert computed == []
    if sharding == "expert":
        assert all(shard.bytes_read == shard.shard_bytes for shard in shards)


def test_rank_with_more_memory_gets_more_experts(tmp_path: Path) -> None:
    """A rank with more memory gets more experts and reads more bytes."""
    model = moe_models.make_moe_model("qwen3_moe")
    save_checkpoint(tmp_path, model_weights(model), moe_models.moe_config("qwen3_moe"))
    settings = ModelConfig(path=str(tmp_path))
    read = []
    for number in (0, 1):
        rank = LoadingRank("expert", number, 2, memory_bytes=(20 * 10**9, 10 * 10**9))
        shard = rank.load(settings)
        assert_shard_equal(shard, rank.cut(settings))
        read.append(shard.bytes_read)

    assert read[0] > read[1]


def test_embedding_tied_to_head_is_read_once(tmp_path: Path) -> None:
    """A tied head is not read a second time."""
    model = moe_models.make_moe_model("qwen3_moe")
    config = {**moe_models.moe_config("qwen3_moe"), "tie_word_embeddings": True}
    weights = model_weights(model)
    save_checkpoint(tmp_path, weights, config)

    (shard,) = _load_and_compare(tmp_path, "none", 1)

    assert "lm_head.weight" in weights
    assert shard.bytes_read == sum(a.nbytes for path, a in weights.items() if "lm_head" not in path)


def test_layers_that_a_hybrid_model_does_not_use_are_not_read_from_its_files(
    tmp_path: Path, make_model: MakeModel, computed: list[str]
) -> None:
    """Unused layers are not read, convolutions are transposed, and only norms are computed."""
    model = make_model("qwen3_next")
    weights = _with_separate_experts(model_weights(model))
    weights |= {
        path: array.moveaxis(1, 2) for path, array in weights.items() if "conv1d.weight" in path
    }
    extra = {"mtp.layers.0.mlp.gate_proj.weight": mx.ones((512, 512))}
    save_checkpoint(tmp_path, {**weights, **extra}, model_config(model))

    whole = sum(array.nbytes for array in weights.values())
    for shard in _load_and_compare(tmp_path, "expert", 2):
        assert 0 < shard.bytes_read < 0.8 * whole
    assert computed
    assert all("norm" in path for path in computed)


def test_fp8_weights_are_converted_and_others_read_directly(
    tmp_path: Path, computed: list[str]
) -> None:
    """Weights of eight bits with block scales are converted; all others are read directly."""
    model = moe_models.make_moe_model("deepseek_v3")
    weights = model_weights(model)
    path = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = weights[path].shape
    weights[path] = mx.random.randint(0, 120, (rows, columns)).astype(mx.uint8)
    weights[f"{path}_scale_inv"] = mx.full((-(-rows // 128), -(-columns // 128)), 0.5)
    save_checkpoint(tmp_path, weights, moe_models.moe_config("deepseek_v3"))

    _load_and_compare(tmp_path, "tensor", 2)

    assert set(computed) == {path}


def test_model_whose_code_inspects_weights_is_read_whole_with_equal_shards(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family whose code inspects weights while loading is read whole, with equal shards."""
    model = moe_models.make_moe_model("qwen3_moe")
    save_checkpoint(tmp_path, model_weights(model), moe_models.moe_config("qwen3_moe"))
    kind: Any = type(model)
    sanitize = kind.sanitize

    def looking(self: Any, weights: Weights) -> Weights:
        assert mx.all(mx.isfinite(weights["model.norm.weight"])).item()
        result: Weights = sanitize(self, weights)
        return result

    monkeypatch.setattr(kind, "sanitize", looking)
    shards = _load_and_compare(tmp_path, "expert", 2)

    assert [shard.bytes_read for shard in shards] == [0, 0]
    assert computed


@pytest.mark.parametrize("size", [2, 4])
def test_rank_reads_at_most_1_percent_more_than_its_shard(tmp_path: Path, size: int) -> None:
    """A rank reads at most 1 % more than its shard of long rows cut along either axis."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 131_072,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    wide = (131_072, 64)
    weights: Weights = {"model.embed_tokens.weight": mx.ones((96, 64), mx.bfloat16)}
    weights["model.norm.weight"] = mx.ones((64,), mx.bfloat16)
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (64, 64),
            "self_attn.v_proj": (64, 64),
            "self_attn.o_proj": (64, 64),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": wide,
            "mlp.up_proj": wide,
            "mlp.down_proj": wide[::-1],
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }
        for name, shape in shapes.items():
            array = mx.random.normal(shape).astype(mx.bfloat16)
            weights[f"model.layers.{layer}.{name}.weight"] = array
    save_checkpoint(tmp_path, weights, config)

    for shard in _load_and_compare(tmp_path, "tensor", size, dtype="bfloat16"):
        assert shard.shard_bytes <= shard.bytes_read < 1.01 * shard.shard_bytes
