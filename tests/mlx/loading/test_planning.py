"""`lockstep plan` against what ranks report, for models that it has only seen the headers of."""

import dataclasses
import json
from collections.abc import Callable
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
from services.rank_worker.collectives import Collectives
from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.sharding.apply import apply_split
from shared.messages.rank_link import Sharding
from shared.model import checkpoint_files
from shared.model.sharding.feasibility import sharding_obstacle
from shared.model.sharding.shares import Split
from tests.mlx.models import MAKERS
from tests.mlx.sharding.in_process_world import Place
from tests.mlx.sharding.moe_models import FAMILIES, config_of, make

Make = Callable[[str], nn.Module]


def _saved(model: Any, family: str, folder: Path) -> Checkpoint:
    return _written(model, {**dataclasses.asdict(model.args), "model_type": family}, folder)


def _written(model: nn.Module, config: dict[str, Any], folder: Path) -> Checkpoint:
    """Write a model as a checkpoint and read its headers back."""
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return read_checkpoint(
        checkpoint_files.read_config(folder), checkpoint_files.weight_files(folder)
    )


def _bytes(model: nn.Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(one.nbytes for one in arrays.values())


def _qwen3() -> Any:
    from mlx_lm.models import qwen3

    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=64, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
        vocab_size=97, max_position_embeddings=512, tie_word_embeddings=True, rope_theta=1e4,
    )  # fmt: skip
    return qwen3.Model(args)


def _name(family: str) -> str:
    return "gemma3_text" if family == "gemma3" else family


@pytest.mark.parametrize("family", list(MAKERS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_and_weights_are_what_ranks_report(
    make_model: Make, family: str, dtype: str, tmp_path: Path
) -> None:
    """Bytes per token, per row and of all weights agree exactly, in either precision."""
    model: Any = make_model(family) if dtype == "float32" else MAKERS[family]()
    if dtype == "bfloat16":
        model.set_dtype(mx.bfloat16)
    checkpoint = _saved(model, _name(family), tmp_path)
    store = open_store(model, read_shape(model))

    kv = model_kv(checkpoint)

    assert kv.known
    assert kv.bytes() == KVBytes(store.bytes_per_token, store.bytes_per_row)
    assert checkpoint.bytes == _bytes(model)


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits_are_what_ranks_report(bits: int, tmp_path: Path) -> None:
    """With heads of a width that groups divide, 8 and 4 bits agree too."""
    model = _qwen3()
    kv = model_kv(_saved(model, "qwen3", tmp_path))

    assert kv.quantizable()
    assert (
        kv.bytes(bits=bits).per_token == open_store(model, read_shape(model), bits).bytes_per_token
    )


def test_quantized_weights_are_counted_as_they_are(tmp_path: Path) -> None:
    """Packed numbers, scales and biases: KV stays as wide as the matrices' outputs."""
    model = _qwen3()
    before = open_store(model, read_shape(model)).bytes_per_token
    nn.quantize(model, group_size=32, bits=4)
    checkpoint = _saved(model, "qwen3", tmp_path)

    assert checkpoint.bytes == _bytes(model)
    assert model_kv(checkpoint).bytes().per_token == before


def test_the_budget_is_the_rank_workers() -> None:
    """The part of free memory that KV may take is written twice, because planning loads no MLX."""
    assert worker.KV_MEMORY_SHARE == KV_SHARE


UNSERVED = {"deepseek_v41", "llama4", "muse_spark"}
"""Keep caches that Lockstep refuses, or run on Metal only."""
VOCAB = {"vocab_size": 256}
"""Some families divide their output between ranks."""
ALMOST = {"nemotron_h": 0.06, "kimi_k3": 0.11}
"""How far a rank's weights may be off; the others: what norms over all heads take."""


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one rank's forward be built without the others: shapes need no sums."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, **_: part)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda part, **_: mx.concatenate([part] * 2))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNSERVED))
def test_every_family_with_experts(family: str, tmp_path: Path) -> None:
    """All weights exactly; KV exactly, or it is said that shapes do not tell it."""
    model = make(family)
    checkpoint = _written(model, config_of(family), tmp_path)
    store = open_store(model, read_shape(model))

    kv = model_kv(checkpoint)

    assert checkpoint.bytes == _bytes(model)
    if kv.known:
        assert kv.bytes() == KVBytes(store.bytes_per_token, store.bytes_per_row)
    else:
        assert family in UNPLANNED or kv.bytes() == KVBytes(0, 0)


SPLITS = [
    (family, sharding)
    for family in sorted(set(FAMILIES) - UNSERVED)
    for sharding in ("tensor", "expert")
    if sharding_obstacle(config_of(family, **VOCAB), sharding, 2) is None
]


@pytest.mark.usefixtures("no_sums")
@pytest.mark.parametrize(("family", "sharding"), SPLITS)
def test_shares_are_what_ranks_hold(family: str, sharding: Sharding, tmp_path: Path) -> None:
    """Bytes of each rank's weights and its KV are those of the model that was really split."""
    config = config_of(family, **VOCAB)
    checkpoint = _written(make(family, **VOCAB), config, tmp_path)
    plan = PlannedModel(checkpoint, model_kv(checkpoint))
    memory = [RankMemory("a", 2**30, 2**30)] * 2
    shares = plan_split(plan, sharding, memory, MemoryDemand(1_024, 1, 0, 256)).shares
    for rank, share in enumerate(shares):
        held = make(family, **VOCAB)
        world = Collectives(Place(rank, 2), rank, 2)  # type: ignore[arg-type]
        apply_split(held, config, Split(sharding, rank, 2), world)
        planned = share.whole_bytes + share.divided_bytes
        assert planned == pytest.approx(_bytes(held), rel=ALMOST.get(family, 0.002))
        if plan.kv.known:
            store = open_store(held, read_shape(held))
            kept = (share.kv_bytes_per_token, share.kv_bytes_per_row)
            assert kept == (store.bytes_per_token, store.bytes_per_row)


@pytest.mark.parametrize("memory", [[8, 8], [16, 8]])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_layers_of_a_pipeline_are_where_they_are_planned(
    family: str, memory: list[int], tmp_path: Path
) -> None:
    """Equal hosts and unequal ones: each rank holds the bytes that are planned for it."""
    config = config_of(family)
    checkpoint = _written(make(family), config, tmp_path)
    plan = PlannedModel(checkpoint, model_kv(checkpoint))
    places = [RankMemory("a", size * 2**30, size * 2**30) for size in memory]
    shares = plan_split(plan, "pipeline", places, MemoryDemand(1_024, 1, 0, 256)).shares
    for rank, share in enumerate(shares):
        held = make(family)
        world = Collectives(Place(rank, 2), rank, 2)  # type: ignore[arg-type]
        usable = [place.usable_bytes for place in places]
        apply_split(held, config, Split("pipeline", rank, 2, usable), world)
        assert share.whole_bytes + share.divided_bytes == _bytes(held)
