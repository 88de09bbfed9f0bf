"""Memory used by loading, and refusal of shards that do not fit."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.device import hardware
from services.rank_worker.device.description import Device
from services.rank_worker.model.loading import memory_fit
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from tests.mlx.loading.model_checkpoints import (
    LoadingRank,
    Weights,
    model_config,
    model_weights,
    save_checkpoint,
)
from tests.mlx.models import MODEL_FACTORIES
from tests.support.control_groups import show_control_groups
from tests.support.waiting import PROCESS_DEADLINE_S

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1_024,
    "num_hidden_layers": 12,
    "intermediate_size": 6_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40_000,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
MOE: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1_024,
    "norm_topk_prob": True,
}


def _write_published_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint as models are published: bfloat16, separate experts, one file per
    layer.
    """
    wide, inner = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * inner
    keys = config["num_key_value_heads"] * inner
    weights: Weights = {
        "model.embed_tokens.weight": mx.ones((config["vocab_size"], wide), mx.bfloat16),
        "model.norm.weight": mx.ones((wide,), mx.bfloat16),
    }
    experts = config.get("num_experts", 0)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, wide),
            "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide),
            "self_attn.o_proj": (wide, queries),
            "self_attn.q_norm": (inner,),
            "self_attn.k_norm": (inner,),
            "input_layernorm": (wide,),
            "post_attention_layernorm": (wide,),
        }
        if experts:
            shapes["mlp.gate"] = (experts, wide)
        for name in [f"experts.{number}." for number in range(experts)] or [""]:
            shapes[f"mlp.{name}gate_proj"] = shapes[f"mlp.{name}up_proj"] = (width, wide)
            shapes[f"mlp.{name}down_proj"] = (wide, width)
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = mx.ones(shape, mx.bfloat16)
    save_checkpoint(folder, weights, config, files=config["num_hidden_layers"])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("config", "sharding", "dtype"),
    [(DENSE, "tensor", "bfloat16"), (DENSE, "tensor", "float32"), (MOE, "expert", "float32")],
    ids=["tensor", "tensor-cast", "expert-cast"],
)
def test_loading_uses_at_most_a_tenth_more_memory_than_shard(
    tmp_path: Path, config: dict[str, Any], sharding: str, dtype: str
) -> None:
    """Reading, cutting, stacking and casting use at most a tenth more than the shard."""
    _write_published_checkpoint(tmp_path, config)
    command = [sys.executable, "-m", "tests.mlx.loading.test_loading_memory", str(tmp_path)]
    done = subprocess.run(
        [*command, sharding, dtype],
        check=False,
        capture_output=True,
        text=True,
        timeout=PROCESS_DEADLINE_S,
    )

    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["shard"] > 100 * 2**20
    assert measured["peak"] <= 1.1 * measured["shard"]
    assert measured["resident"] <= 1.1 * measured["shard"]


def _print_loading_memory(folder: str, sharding: Any, dtype: Any) -> None:
    """Load the shard of rank 1 of two in this process, and print the memory used."""
    unit = 1 if sys.platform == "darwin" else 1_024

    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    settings, rank = ModelConfig(path=folder, dtype=dtype), LoadingRank(sharding, 1, 2)
    before = resident()
    shard = rank.load(settings)
    facts = {
        "shard": shard.shard_bytes,
        "peak": mx.get_peak_memory(),
        "resident": resident() - before,
    }
    print(json.dumps(facts))


def test_shard_exceeding_memory_is_refused_with_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that does not fit is refused with all sizes before any weight is read."""
    model = MODEL_FACTORIES["qwen3"]()
    save_checkpoint(tmp_path, model_weights(model), model_config(model))
    settings, rank = ModelConfig(path=str(tmp_path)), LoadingRank("none", 0, 1)
    shard = rank.load(settings)
    monkeypatch.setattr("services.rank_worker.model.loading.loader.load_weights", None)
    kv_bytes = 3 * 2 * 2 * 16 * 4 * memory_fit.CONTEXT_TOKENS_MIN
    message = (
        rf"does not fit: {shard.shard_bytes / 1e3:.1f} KB of weights and {kv_bytes / 1e3:.1f} KB "
        r"for 1,024 tokens of KV.*the device has 100\.0 KB: use more ranks"
    )

    with pytest.raises(ConfigError, match=message):
        rank.load(settings, memory_bytes=100_000)


def test_shard_that_fits_once_is_refused_where_spare_process_loads_it_too() -> None:
    """The error names the spare process, and the setting that saves its memory."""
    needs = memory_fit.MemoryNeeds(weight_bytes=10**12)
    memory = mx.get_active_memory() + 15 * 10**11
    memory_fit.check_fits(needs, 1_024, memory)

    with pytest.raises(
        ConfigError, match=r"twice because of.*set rank_worker.spare to \"started\""
    ):
        memory_fit.check_fits(needs, 1_024, memory, copies=2)


def test_shard_fitting_beside_used_memory_is_loaded(tmp_path: Path) -> None:
    """A shard is loaded when its needs and the memory in use fit."""
    model = MODEL_FACTORIES["mamba2"]()
    save_checkpoint(tmp_path, model_weights(model), model_config(model))
    settings, rank = ModelConfig(path=str(tmp_path)), LoadingRank("none", 0, 1)
    needed = rank.load(settings).shard_bytes + mx.get_active_memory() + 10**6

    assert rank.load(settings, memory_bytes=needed).shard_bytes > 0


def test_host_memory_is_divided_among_cpu_or_metal_ranks_but_not_cuda_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a host, or the limit of its container, is divided among its ranks; a CUDA GPU
    belongs to one rank.
    """
    cpu = Device(kind="cpu", name="", memory_bytes=1)
    metal = Device(kind="metal", name="", memory_bytes=6_000)
    cuda = Device(kind="cuda", name="", memory_bytes=6_000)
    show_control_groups(tmp_path, monkeypatch, {"memory.max": "8000", "memory.current": "2000"})

    sizes = [memory_fit.rank_memory_bytes(device, 2) for device in (cpu, metal, cuda)]
    assert sizes == [4_000, 3_000, 6_000]
    assert memory_fit.rank_memory_bytes(metal, 2, machine_share=0.25) == 1_500
    show_control_groups(tmp_path, monkeypatch, {"memory.max": "max", "memory.current": "2000"})
    assert memory_fit.rank_memory_bytes(cpu, 1) > 10**6


def test_kv_budget_of_cpu_rank_stays_within_limit_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free memory of a CPU rank is what its control group has left, not what the machine
    has."""
    cpu = Device(kind="cpu", name="", memory_bytes=1)
    show_control_groups(tmp_path, monkeypatch, {"memory.max": "8000", "memory.current": "2000"})

    assert hardware.free_bytes(cpu, 1) == 6_000
    assert hardware.free_bytes(cpu, 2) == 3_000
    assert hardware.free_bytes(cpu, 1, machine_share=0.5) == 6_000
    assert hardware.describe_device().memory_bytes == 6_000


if __name__ == "__main__":
    _print_loading_memory(*sys.argv[1:])
