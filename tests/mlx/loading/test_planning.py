"""`lockstep plan` compared with the sizes that ranks report."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.commands.planning.budget import KV_SHARE
from services.commands.planning.hosts import RankMemory
from services.commands.planning.model.checkpoint import Checkpoint, read_checkpoint
from services.commands.planning.model.kv import KVBytes, model_kv
from services.commands.planning.model.recurrent import UNPLANNED
from services.commands.planning.splits import MemoryDemand, PlannedModel, plan_split
from services.rank_worker import worker
from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.peers.collectives import Collectives
from shared.messages.base import Sharding
from shared.model import checkpoint_files
from shared.model.sharding.feasibility import sharding_obstacle
from shared.model.sharding.shares import Split
from tests.mlx.models import MODEL_FACTORIES, MakeModel
from tests.mlx.sharding.in_process_world import FakeGroup
from tests.mlx.sharding.moe_models import MOE_FAMILIES, make_moe_model, moe_config


def _written_as_family(model: Any, family: str, folder: Path) -> Checkpoint:
    """Write a model with a config of this family and read its headers."""
    return _written(model, {**dataclasses.asdict(model.args), "model_type": family}, folder)


def _written(model: nn.Module, config: dict[str, Any], folder: Path) -> Checkpoint:
    """Write a model as a checkpoint and read its headers."""
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return read_checkpoint(
        checkpoint_files.read_config(folder), checkpoint_files.weight_files(folder)
    )


def _weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(one.nbytes for one in arrays.values())


def _wide_headed_qwen3() -> Any:
    """Return a Qwen3 model whose heads divide into quantization groups."""
    from mlx_lm.models import qwen3

    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=64, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
        vocab_size=97, max_position_embeddings=512, tie_word_embeddings=True, rope_theta=1e4,
    )  # fmt: skip
    return qwen3.Model(args)


def _model_type(family: str) -> str:
    """Return the model_type of a family."""
    return "gemma3_text" if family == "gemma3" else family


@pytest.mark.parametrize("family", list(MODEL_FACTORIES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_kv_and_weight_bytes_equal_bytes_of_loaded_model(
    make_model: MakeModel, family: str, dtype: str, tmp_path: Path
) -> None:
    """Planned bytes per token, per row and of all weights equal the reported ones in both
    dtypes.
    """
    model: Any = make_model(family) if dtype == "float32" else MODEL_FACTORIES[family]()
    if dtype == "bfloat16":
        model.set_dtype(mx.bfloat16)
    checkpoint = _written_as_family(model, _model_type(family), tmp_path)
    store = open_store(model, read_shape(model))

    kv = model_kv(checkpoint)

    assert kv.known
    assert kv.bytes() == KVBytes(store.bytes_per_token, store.bytes_per_row)
    assert checkpoint.bytes == _weight_bytes(model)


@pytest.mark.parametrize("bits", [8, 4])
def test_planned_quantized_kv_bytes_equal_bytes_of_loaded_model(bits: int, tmp_path: Path) -> None:
    """Planned bytes per token with 8 and 4 bits equal the reported ones."""
    model = _wide_headed_qwen3()
    kv = model_kv(_written_as_family(model, "qwen3", tmp_path))

    assert kv.quantizable()
    assert (
        kv.bytes(bits=bits).per_token == open_store(model, read_shape(model), bits).bytes_per_token
    )


def test_planned_bytes_of_quantized_weights_equal_loaded_ones(tmp_path: Path) -> None:
    """Packed weights, scales and biases are counted; KV is as wide as without quantization."""
    model = _wide_headed_qwen3()
    before = open_store(model, read_shape(model)).bytes_per_token
    nn.quantize(model, group_size=32, bits=4)
    checkpoint = _written_as_family(model, "qwen3", tmp_path)

    assert checkpoint.bytes == _weight_bytes(model)
    assert model_kv(checkpoint).bytes().per_token == before


def test_planning_and_rank_worker_use_equal_memory_share_for_kv() -> None:
    """Planning uses the same share of free memory for KV as the rank worker."""
    assert worker.KV_MEMORY_SHARE == KV_SHARE


UNSERVED = {"deepseek_v41", "llama4", "muse_spark"}
"""Families whose caches Lockstep refuses, or that run on Metal only."""
VOCAB = {"vocab_size": 256}
"""A vocabulary that families can divide between ranks."""
WEIGHT_TOLERANCES = {"nemotron_h": 0.06, "kimi_k3": 0.11}
"""Relative error allowed for the weights of a rank; 0.002 for the others, for norms over heads."""


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace collectives, so that the forward of one rank can be built without the others."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, **_: part)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda part, **_: mx.concatenate([part] * 2))


@pytest.mark.parametrize("family", sorted(set(MOE_FAMILIES) - UNSERVED))
def test_planned_weight_bytes_of_moe_models_equal_loaded_ones(family: str, tmp_path: Path) -> None:
    """All planned weights are exact; KV is exact or reported as unknown."""
    model = make_moe_model(family)
    checkpoint = _written(model, moe_config(family), tmp_path)
    store = open_store(model, read_shape(model))

    kv = model_kv(checkpoint)

    assert checkpoint.bytes == _weight_bytes(model)
    if kv.known:
        assert kv.bytes() == KVBytes(store.bytes_per_token, store.bytes_per_row)
    else:
        assert family in UNPLANNED or kv.bytes() == KVBytes(0, 0)


SPLITS = [
    (family, sharding)
    for family in sorted(set(MOE_FAMILIES) - UNSERVED)
    for sharding in ("tensor", "expert", "tensor+expert")
    if sharding_obstacle(moe_config(family, **VOCAB), sharding, 2) is None
]


@pytest.mark.usefixtures("no_sums")
@pytest.mark.parametrize(("family", "sharding"), SPLITS)
def test_planned_weight_and_kv_bytes_of_rank_equal_those_of_its_shard(
    family: str, sharding: Sharding, tmp_path: Path
) -> None:
    """The planned weights and KV of each rank equal those of its shard."""
    config = moe_config(family, **VOCAB)
    checkpoint = _written(make_moe_model(family, **VOCAB), config, tmp_path)
    plan = PlannedModel(checkpoint, model_kv(checkpoint))
    memory = [RankMemory("a", 2**30, 2**30)] * 2
    shares = plan_split(plan, sharding, memory, MemoryDemand(1_024, 1, 0, 256)).shares
    for rank, share in enumerate(shares):
        held = make_moe_model(family, **VOCAB)
        world = Collectives(FakeGroup(rank, 2), rank, 2)  # type: ignore[arg-type]
        apply_split(held, config, Split(sharding, rank, 2), world)
        planned = share.whole_bytes + share.divided_bytes
        assert planned == pytest.approx(
            _weight_bytes(held), rel=WEIGHT_TOLERANCES.get(family, 0.002)
        )
        if plan.kv.known:
            store = open_store(held, read_shape(held))
            kept = (share.kv_bytes_per_token, share.kv_bytes_per_row)
            assert kept == (store.bytes_per_token, store.bytes_per_row)


@pytest.mark.parametrize("memory", [[8, 8], [16, 8]])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_planned_weight_bytes_of_pipeline_rank_equal_those_of_its_layers(
    family: str, memory: list[int], tmp_path: Path
) -> None:
    """Each rank of a pipeline has the planned weight bytes, with equal and unequal memory."""
    config = moe_config(family)
    checkpoint = _written(make_moe_model(family), config, tmp_path)
    plan = PlannedModel(checkpoint, model_kv(checkpoint))
    places = [RankMemory("a", size * 2**30, size * 2**30) for size in memory]
    shares = plan_split(plan, "pipeline", places, MemoryDemand(1_024, 1, 0, 256)).shares
    for rank, share in enumerate(shares):
        held = make_moe_model(family)
        world = Collectives(FakeGroup(rank, 2), rank, 2)  # type: ignore[arg-type]
        usable = [place.usable_bytes for place in places]
        apply_split(held, config, Split("pipeline", rank, 2, usable), world)
        assert share.whole_bytes + share.divided_bytes == _weight_bytes(held)
