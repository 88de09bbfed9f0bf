"""Layers divided between ranks: which families can, who gets which, what is refused."""

import dataclasses
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.model.sharding.layer_split import split_layers
from services.rank_worker.model.unsharded_traits import UnshardedTraits, read_traits
from shared.errors import ConfigError
from shared.model.sharding.families import model_family
from shared.model.sharding.shares import Split
from tests.mlx.executor_driver import executor_of
from tests.mlx.sharding.in_process_world import world
from tests.mlx.sharding.moe_models import FAMILIES, config_of, make

METAL_ONLY = {"muse_spark"}
UNKNOWN = {"kimi_vl", "qwen3_vl_moe"}
"""Their `layers` are those of all ranks, so caches would be made for layers that are elsewhere."""


def _pipelines(name: str) -> bool:
    found = model_family({"model_type": name})
    return found is not None and found.pipelines


@pytest.fixture(autouse=True)
def _no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are only built here: what would cross ranks may be anything of that shape."""
    for name in ("all_gather", "recv_like", "send"):
        monkeypatch.setattr(mx.distributed, name, lambda x, *_, **__: x)
    monkeypatch.setattr(
        mx.distributed, "recv", lambda shape, dtype, *_, **__: mx.zeros(shape, dtype)
    )


def _divided(name: str, memory: tuple[int, ...] = (), **sizes: int) -> list[nn.Module]:
    size = len(memory) or 2
    models = []
    for rank in range(size):
        model = make(name, **sizes)
        split = Split("pipeline", rank, size, memory)
        apply_split(model, config_of(name, **sizes), split, world(rank, size))
        models.append(model)
    return models


@pytest.mark.parametrize("name", sorted(set(filter(_pipelines, FAMILIES)) - METAL_ONLY - UNKNOWN))
def test_families_with_pipelines_keep_layers_and_caches_of_their_own(name: str) -> None:
    """Each layer is on one rank, and each rank has caches for its own layers only."""
    sizes = {"num_hidden_layers": 6} if name == "bailing_hybrid" else {}
    whole = len(make(name, **sizes).layers)
    models = _divided(name, (), **sizes)
    assert sum(len(model.layers) for model in models) == whole
    for model in models:
        assert all(layer is not None for layer in model.layers)
        assert len(read_shape(model).caches) == len(model.layers)


def _held(model: nn.Module, traits: UnshardedTraits | None) -> tuple[object, ...] | str:
    """Return all that decides how a rank's rows are ordered, grouped, cut back and rebuilt."""
    try:
        executor = executor_of(model, traits=traits)
    except ConfigError as error:
        return str(error)
    return (
        type(executor._store),
        executor._prefill._groups_chunks,
        executor._forward.can_select,
        executor.can_roll_back,
        executor.needs_checkpoints,
        bool(executor.kv_layout),
    )


@pytest.mark.parametrize("name", sorted(set(filter(_pipelines, FAMILIES)) - METAL_ONLY - UNKNOWN))
def test_every_rank_holds_rows_as_the_whole_model_does(name: str) -> None:
    """Whatever kind its own layers are: hybrids have ranks with attention only, or without any."""
    sizes = {"num_hidden_layers": 6} if name == "bailing_hybrid" else {}
    ranks = 2 if name == "bailing_hybrid" else 3
    due = _held(make(name, **sizes), None)
    for rank in range(ranks):
        model = make(name, **sizes)
        kinds = [type(module) for module in model.modules()]
        traits = read_traits(model)
        assert [type(module) for module in model.modules()] == kinds, "it stays as it is"
        apply_split(
            model, config_of(name, **sizes), Split("pipeline", rank, ranks), world(rank, ranks)
        )
        assert _held(model, traits) == due


def test_a_head_is_computed_as_the_whole_model_allows() -> None:
    """One that cannot be narrowed elsewhere is not here: the ranks would take other forwards. One
    that cannot be narrowed here, but elsewhere, is refused.
    """
    traits = read_traits(make("qwen2"))
    assert traits.can_select
    wide = executor_of(make("qwen2"), traits=dataclasses.replace(traits, can_select=False))
    assert not wide._forward.can_select
    assert not wide._prefill._groups_chunks
    model = make("qwen2")
    inner = type(model.model)

    class Short(inner):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            hidden: mx.array = super().__call__(*args, **kwargs)
            return hidden[:, :2]

    model.model.__class__ = Short
    with pytest.raises(ConfigError, match=r"mlx_lm\.models\.qwen2 computes its logits differently"):
        executor_of(model, traits=traits)


def test_shares_follow_memory() -> None:
    """A rank with three times the memory has three times the weights; the last has the first."""
    models = _divided("qwen2", (1 << 30, 3 << 30), num_hidden_layers=8)
    assert [len(model.layers) for model in models] == [2, 6]
    assert [(model.model.start_idx, model.model.end_idx) for model in models] == [(6, 8), (0, 6)]


def test_equal_memory_takes_mlx_lms_own_split() -> None:
    """One family's own has a layer of full attention on every rank; its words are "even"."""
    model = make("bailing_hybrid", num_hidden_layers=6)
    config = config_of("bailing_hybrid", num_hidden_layers=6)
    words = apply_split(model, config, Split("pipeline", 0, 2), world(0, 2))
    assert words == "pipeline even"
    model = make("bailing_hybrid", num_hidden_layers=6)
    split = Split("pipeline", 1, 2, (9 << 30, 1 << 30))
    with pytest.raises(ConfigError, match=r"between 2 ranks: split .* without an MLA layer"):
        apply_split(model, config, split, world(1, 2))


def test_a_model_without_a_pipeline_is_refused() -> None:
    """From its config, or, where that says nothing, from the model that is built."""
    with pytest.raises(ConfigError, match='does not pipeline models of type "mixtral"'):
        _divided("mixtral")
    with pytest.raises(
        ConfigError, match=r"mlx_lm\.models\.mixtral: choose another world\.sharding"
    ):
        split_layers(make("mixtral"), [1, 1], world(0, 2))
    with pytest.raises(ConfigError, match=r"3 layers: set world\.size to 3 or less"):
        split_layers(make("qwen3_moe"), [1] * 4, world(0, 4))


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_pipeline_that_does_not_tell_its_own_layers_is_refused(name: str) -> None:
    """Better said at load than by caches of the wrong layers."""
    with pytest.raises(
        ConfigError, match="does not say which layers of a pipeline belong to this rank"
    ):
        _divided(name)
