"""Each rank reads what it keeps, and has what it would have of a model that was read whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.model.loading import weights
from services.rank_worker.model.loading.loader import LoadedModel
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.messages.rank_link import Sharding
from tests.mlx import models
from tests.mlx.loading.model_checkpoints import (
    Rank,
    Weights,
    assert_equal,
    config_of_model,
    quantize,
    ranks,
    save,
    weights_of,
)
from tests.mlx.sharding import moe_models

Make = Callable[[str], nn.Module]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of weights that were computed from tensors read whole, as they come."""
    names: list[str] = []
    take = weights.plan_weights

    def note(*given: Any) -> weights.ModelWeights:
        weights = take(*given)
        names.extend(weights.computed)
        return weights

    monkeypatch.setattr("services.rank_worker.model.loading.loader.plan_weights", note)
    return names


def _check(folder: Path, sharding: Sharding, size: int, **settings: Any) -> list[LoadedModel]:
    config = ModelConfig(path=str(folder), **settings)
    shards = []
    for rank in ranks(sharding, size):
        expected = rank.cut(config)
        shards.append(rank.load(config))
        assert_equal(shards[-1], expected)
    return shards


@pytest.mark.parametrize("family", list(models.MAKERS))
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_one_rank_has_the_whole_model(
    tmp_path: Path, make_model: Make, family: str, dtype: str
) -> None:
    """Every family, cast or as it is stored, bit for bit."""
    model = make_model(family)
    weights = {path: array.astype(mx.bfloat16) for path, array in weights_of(model).items()}
    save(tmp_path, weights, config_of_model(model), files=3)

    (shard,) = _check(tmp_path, "none", 1, dtype=dtype)

    assert shard.bytes_read == sum(array.nbytes for array in weights.values())


@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek_v3", "deepseek_v32", "gpt_oss"])
@pytest.mark.parametrize("size", [2, 4])
def test_tensors_are_cut_as_they_are_read(
    tmp_path: Path, make_model: Make, family: str, size: int
) -> None:
    """Every rank of a world that shards tensors, from several files."""
    model = make_model(family)
    config = config_of_model(model)
    save(tmp_path, weights_of(model), config, files=2)
    if config["num_key_value_heads"] < size:
        with pytest.raises(ConfigError, match="cannot be split over 4 ranks"):
            ranks("tensor", size)[0].find(ModelConfig(path=str(tmp_path)))
        return

    _check(tmp_path, "tensor", size)


@pytest.mark.parametrize("family", sorted(moe_models.FAMILIES))
def test_experts_are_divided_as_they_are_read(
    tmp_path: Path, computed: list[str], family: str
) -> None:
    """Every family with routed experts; four ranks have unequal shares of six."""
    model = moe_models.make(family)
    save(tmp_path, weights_of(model), moe_models.config_of(family))
    settings = ModelConfig(path=str(tmp_path), context_tokens_max=64)
    for rank in (Rank("expert", 0, 2), Rank("expert", 2, 4), Rank("expert", 3, 4)):
        expected = rank.cut(settings)
        shard = rank.load(settings)
        assert_equal(shard, expected)
        large = {path for path in computed if expected[path].nbytes > 4_096}
        assert not large, "an expert's weights were read whole"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_layers_are_left_out(tmp_path: Path, make_model: Make, family: str) -> None:
    """A pipeline's rank reads its layers and what all ranks have."""
    model = make_model(family)
    save(tmp_path, weights_of(model), config_of_model(model))

    whole = sum(array.nbytes for array in weights_of(model).values())
    for shard in _check(tmp_path, "pipeline", 2):
        assert shard.bytes_read == shard.shard_bytes < whole


@pytest.mark.parametrize("sharding", ["tensor", "expert"])
def test_packed_numbers_are_cut_with_their_scales(tmp_path: Path, sharding: Sharding) -> None:
    """Quantized weights, shared experts among them."""
    model = moe_models.make("glm4_moe")
    config = {
        **moe_models.config_of("glm4_moe"),
        "hidden_size": 64,
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
    }
    kind: Any = type(model)
    model = kind(type(model.args).from_dict(config))
    config = quantize(model, config)
    save(tmp_path, weights_of(model), config)

    for shard in _check(tmp_path, sharding, 2, dtype="float16"):
        types = {array.dtype for array in weights_of(shard.model).values()}
        assert types >= {mx.uint32, mx.float16}


def _as_published(weights: Weights) -> Weights:
    """Return a checkpoint with every expert's matrices apart, as Hugging Face's have them."""
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
def test_experts_that_are_stored_apart_are_stacked(
    tmp_path: Path, computed: list[str], sharding: Sharding, size: int
) -> None:
    """mlx-lm stacks them; a rank still reads its own only."""
    model = moe_models.make("qwen3_moe")
    save(
        tmp_path,
        _as_published(weights_of(model)),
        moe_models.config_of("qwen3_moe"),
        files=3,
    )

    shards = _check(tmp_path, sharding, size)

    assert computed == []
    if sharding == "expert":
        assert all(shard.bytes_read == shard.shard_bytes for shard in shards)


def test_unequal_memory_gives_unequal_shares(tmp_path: Path) -> None:
    """Experts follow the memory of the ranks, and so do the bytes that are read."""
    model = moe_models.make("qwen3_moe")
    save(tmp_path, weights_of(model), moe_models.config_of("qwen3_moe"))
    settings = ModelConfig(path=str(tmp_path))
    read = []
    for number in (0, 1):
        rank = Rank("expert", number, 2, memory_bytes=(20 * 10**9, 10 * 10**9))
        shard = rank.load(settings)
        assert_equal(shard, rank.cut(settings))
        read.append(shard.bytes_read)

    assert read[0] > read[1]


def test_a_tied_embedding_is_read_once(tmp_path: Path) -> None:
    """The head is the embedding."""
    model = moe_models.make("qwen3_moe")
    config = {**moe_models.config_of("qwen3_moe"), "tie_word_embeddings": True}
    weights = weights_of(model)
    save(tmp_path, weights, config)

    (shard,) = _check(tmp_path, "none", 1)

    assert "lm_head.weight" in weights
    assert shard.bytes_read == sum(a.nbytes for path, a in weights.items() if "lm_head" not in path)


def test_a_published_checkpoint_is_read_by_parts(
    tmp_path: Path, make_model: Make, computed: list[str]
) -> None:
    """Layers that predict further stay in the file, convolutions are turned, norms computed."""
    model = make_model("qwen3_next")
    weights = _as_published(weights_of(model))
    weights |= {
        path: array.moveaxis(1, 2) for path, array in weights.items() if "conv1d.weight" in path
    }
    extra = {"mtp.layers.0.mlp.gate_proj.weight": mx.ones((512, 512))}
    save(tmp_path, {**weights, **extra}, config_of_model(model))

    whole = sum(array.nbytes for array in weights.values())
    for shard in _check(tmp_path, "expert", 2):
        assert 0 < shard.bytes_read < 0.8 * whole
    assert computed
    assert all("norm" in path for path in computed)


def test_what_a_family_computes_is_computed(tmp_path: Path, computed: list[str]) -> None:
    """Numbers stored in eight bits with scales for blocks become others; the rest is read."""
    model = moe_models.make("deepseek_v3")
    weights = weights_of(model)
    path = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = weights[path].shape
    weights[path] = mx.random.randint(0, 120, (rows, columns)).astype(mx.uint8)
    weights[f"{path}_scale_inv"] = mx.full((-(-rows // 128), -(-columns // 128)), 0.5)
    save(tmp_path, weights, moe_models.config_of("deepseek_v3"))

    _check(tmp_path, "tensor", 2)

    assert set(computed) == {path}


def test_a_model_that_looks_at_its_weights_is_loaded(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be followed is read whole, layer by layer, with the same result."""
    model = moe_models.make("qwen3_moe")
    save(tmp_path, weights_of(model), moe_models.config_of("qwen3_moe"))
    kind: Any = type(model)
    sanitize = kind.sanitize

    def looking(self: Any, weights: Weights) -> Weights:
        assert mx.all(mx.isfinite(weights["model.norm.weight"])).item()
        result: Weights = sanitize(self, weights)
        return result

    monkeypatch.setattr(kind, "sanitize", looking)
    shards = _check(tmp_path, "expert", 2)

    assert [shard.bytes_read for shard in shards] == [0, 0]
    assert computed


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_little_more_than_its_shard(tmp_path: Path, size: int) -> None:
    """With rows as long as those of large models, cut along either side."""
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
    save(tmp_path, weights, config)

    for shard in _check(tmp_path, "tensor", size, dtype="bfloat16"):
        assert shard.shard_bytes <= shard.bytes_read < 1.01 * shard.shard_bytes
