"""Model checkpoints on disk, and the shard that a rank must load from them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.model.loading.build import build_model, cast_dtype, cast_parameters
from services.rank_worker.model.loading.loader import LoadedModel, open_model
from services.rank_worker.model.loading.memory_fit import check_fits
from services.rank_worker.model.loading.source import ModelSource, find_source
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.peers.collectives import Collectives
from shared.configuration.settings import ModelConfig
from shared.messages.base import Sharding
from shared.model.sharding.shares import Split
from tests.mlx.sharding.in_process_world import FakeGroup

Weights = dict[str, mx.array]


def model_config(model: Any) -> dict[str, Any]:
    """Return a config.json that builds a model like this one."""
    config = dataclasses.asdict(model.args)
    config.setdefault("model_type", type(model).__module__.rpartition(".")[2])
    config["max_position_embeddings"] = config.get("max_position_embeddings") or 4_096
    return config


def quantize_in_groups(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Quantize all divisible weights to 4 bits in groups of 32; return the matching config."""

    def is_wide(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=is_wide)
    return {**config, "quantization": {"group_size": 32, "bits": 4}}


def model_weights(model: nn.Module) -> Weights:
    """Return a model's parameters by path."""
    return dict(tree_flatten(model.parameters()))


def save_checkpoint(folder: Path, weights: Weights, config: dict[str, Any], files: int = 1) -> None:
    """Write weights, spread over `files` files with an index, and a config."""
    where: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        held = {path: weights[path] for path in sorted(weights)[number::files]}
        mx.save_safetensors(str(folder / name), held)
        where |= dict.fromkeys(held, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))


@dataclasses.dataclass(frozen=True)
class LoadingRank:
    """One rank that loads; loading needs no collectives."""

    sharding: Sharding
    rank: int
    size: int
    memory_bytes: tuple[int, ...] = ()

    @property
    def world(self) -> Collectives:
        """Collectives without links, with the number of this rank."""
        group: Any = FakeGroup(self.rank, self.size) if self.size > 1 else None
        return Collectives(group, self.rank, self.size)

    @property
    def split(self) -> Split:
        """This rank's part of the model."""
        return Split(self.sharding, self.rank, self.size, self.memory_bytes)

    def find(self, settings: ModelConfig) -> ModelSource:
        """Return the source of the model, which exists."""
        source = find_source(settings, self.size, self.sharding)
        assert source is not None
        return source

    def load(self, settings: ModelConfig, memory_bytes: int = 0) -> LoadedModel:
        """Load the rank's shard with the code under test, if it fits into the memory."""
        source = self.find(settings)
        opened = open_model(settings, source, self.split, self.world, lambda *_: None)
        check_fits(opened.needs, opened.context_tokens_max, memory_bytes)
        return opened.read(lambda *_: None)

    def cut(self, settings: ModelConfig) -> Weights:
        """Return the shard cut from a whole model that MLX has read."""
        source = self.find(settings)
        model = build_model(source, settings)
        mx.eval(model.parameters())
        apply_split(model, source.config, self.split, self.world)
        dtype = cast_dtype(settings)
        if dtype is not None:
            cast_parameters(model, dtype)
        return model_weights(model)


def loading_ranks(sharding: Sharding, size: int) -> list[LoadingRank]:
    """Return every rank of a world."""
    return [LoadingRank(sharding, rank, size) for rank in range(size)]


def assert_shard_equal(loaded: LoadedModel, expected: Weights) -> None:
    """Assert that a loaded shard has the expected names, shapes, dtypes and bits."""
    found = model_weights(loaded.model)
    assert list(found) == list(expected)
    for path, array in expected.items():
        got = found[path]
        assert (got.shape, got.dtype) == (array.shape, array.dtype), path
        assert mx.array_equal(got, array, equal_nan=True), path
    assert loaded.shard_bytes == sum(array.nbytes for array in expected.values())
