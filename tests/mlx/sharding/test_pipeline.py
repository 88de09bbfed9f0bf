"""Pipelines: division of layers between ranks, and refusals."""

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
from tests.mlx.executor_driver import make_executor
from tests.mlx.sharding.in_process_world import unlinked_collectives
from tests.mlx.sharding.moe_models import MOE_FAMILIES, make_moe_model, moe_config

METAL_ONLY = {"muse_spark"}
WITHOUT_OWN_LAYERS = {"kimi_vl", "qwen3_vl_moe"}
"""Families whose `layers` are those of all ranks, so a rank would make too many caches."""


def _pipelines(name: str) -> bool:
    found = model_family({"model_type": name})
    return found is not None and found.pipelines


@pytest.fixture(autouse=True)
def _no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the collectives of pipelines by functions with the same result shapes."""
    for name in ("all_gather", "recv_like", "send"):
        monkeypatch.setattr(mx.distributed, name, lambda x, *_, **__: x)
    monkeypatch.setattr(
        mx.distributed, "recv", lambda shape, dtype, *_, **__: mx.zeros(shape, dtype)
    )


def _divided(name: str, memory: tuple[int, ...] = (), **sizes: int) -> list[nn.Module]:
    """Return the model of each rank of a pipeline."""
    size = len(memory) or 2
    models = []
    for rank in range(size):
        model = make_moe_model(name, **sizes)
        split = Split("pipeline", rank, size, memory)
        apply_split(model, moe_config(name, **sizes), split, unlinked_collectives(rank, size))
        models.append(model)
    return models


@pytest.mark.parametrize(
    "name", sorted(set(filter(_pipelines, MOE_FAMILIES)) - METAL_ONLY - WITHOUT_OWN_LAYERS)
)
def test_pipeline_rank_keeps_only_its_own_layers_and_caches(name: str) -> None:
    """Each layer is on one rank, and each rank has caches for its own layers only."""
    sizes = {"num_hidden_layers": 6} if name == "bailing_hybrid" else {}
    whole = len(make_moe_model(name, **sizes).layers)
    models = _divided(name, (), **sizes)
    assert sum(len(model.layers) for model in models) == whole
    for model in models:
        assert all(layer is not None for layer in model.layers)
        assert len(read_shape(model).caches) == len(model.layers)


def _row_handling(model: nn.Module, traits: UnshardedTraits | None) -> tuple[object, ...] | str:
    """Return the properties that determine how rows are ordered, grouped, cut and restored."""
    try:
        executor = make_executor(model, traits=traits)
    except ConfigError as error:
        return str(error)
    return (
        type(executor.store),
        executor._prefill._grouped_tokens_max,
        executor._decode.forward.can_select,
        executor.store.can_roll_back,
        executor.store.needs_state,
        bool(executor.store.layout_text),
    )


@pytest.mark.parametrize(
    "name", sorted(set(filter(_pipelines, MOE_FAMILIES)) - METAL_ONLY - WITHOUT_OWN_LAYERS)
)
def test_pipeline_rank_lacking_layer_kinds_groups_and_restores_rows_like_whole_model(
    name: str,
) -> None:
    """Every rank orders, groups, cuts and restores rows like the whole model, even if it lacks some
    kinds of layers.
    """
    sizes = {"num_hidden_layers": 6} if name == "bailing_hybrid" else {}
    ranks = 2 if name == "bailing_hybrid" else 3
    expected = _row_handling(make_moe_model(name, **sizes), None)
    for rank in range(ranks):
        model = make_moe_model(name, **sizes)
        kinds = [type(module) for module in model.modules()]
        traits = read_traits(model)
        assert [type(module) for module in model.modules()] == kinds, (
            "read_traits changes the model"
        )
        apply_split(
            model,
            moe_config(name, **sizes),
            Split("pipeline", rank, ranks),
            unlinked_collectives(rank, ranks),
        )
        assert _row_handling(model, traits) == expected


def test_pipeline_rank_computes_selected_logits_only_if_whole_model_can() -> None:
    """A rank computes logits of selected positions only if the whole model can.

    A rank that cannot although the whole model can is refused.
    """
    traits = read_traits(make_moe_model("qwen2"))
    assert traits.can_select
    wide = make_executor(
        make_moe_model("qwen2"), traits=dataclasses.replace(traits, can_select=False)
    )
    assert not wide._decode.forward.can_select
    assert not wide._prefill._grouped_tokens_max
    model = make_moe_model("qwen2")
    inner = type(model.model)

    class ShorteningLayers(inner):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            hidden: mx.array = super().__call__(*args, **kwargs)
            return hidden[:, :2]

    model.model.__class__ = ShorteningLayers
    with pytest.raises(ConfigError, match=r"mlx_lm\.models\.qwen2 computes its logits differently"):
        make_executor(model, traits=traits)


def test_pipeline_rank_with_triple_memory_gets_triple_layers() -> None:
    """A rank with three times the memory gets three times the layers; the last rank has the first
    layers.
    """
    models = _divided("qwen2", (1 << 30, 3 << 30), num_hidden_layers=8)
    assert [len(model.layers) for model in models] == [2, 6]
    assert [(model.model.start_idx, model.model.end_idx) for model in models] == [(6, 8), (0, 6)]


def test_pipeline_of_equal_memory_ranks_uses_mlx_lm_split() -> None:
    """Equal memory uses the split of mlx-lm; a split without an attention layer on a rank is
    refused.
    """
    model = make_moe_model("bailing_hybrid", num_hidden_layers=6)
    config = moe_config("bailing_hybrid", num_hidden_layers=6)
    description = apply_split(model, config, Split("pipeline", 0, 2), unlinked_collectives(0, 2))
    assert description == "pipeline even"
    model = make_moe_model("bailing_hybrid", num_hidden_layers=6)
    split = Split("pipeline", 1, 2, (9 << 30, 1 << 30))
    with pytest.raises(ConfigError, match=r"between 2 ranks: split .* without an MLA layer"):
        apply_split(model, config, split, unlinked_collectives(1, 2))


def test_pipeline_is_refused_for_models_without_support_or_enough_layers() -> None:
    """Models without a pipeline and with fewer layers than ranks are refused."""
    with pytest.raises(ConfigError, match='does not pipeline models of type "mixtral"'):
        _divided("mixtral")
    with pytest.raises(
        ConfigError, match=r"mlx_lm\.models\.mixtral: choose another world\.sharding"
    ):
        split_layers(make_moe_model("mixtral"), [1, 1], unlinked_collectives(0, 2))
    with pytest.raises(ConfigError, match=r"3 layers: set world\.size to 3 or less"):
        split_layers(make_moe_model("qwen3_moe"), [1] * 4, unlinked_collectives(0, 4))


@pytest.mark.parametrize("name", sorted(WITHOUT_OWN_LAYERS))
def test_pipeline_is_refused_for_model_code_not_stating_layers_of_rank(name: str) -> None:
    """A family whose code does not state the layers of a rank is refused when loaded."""
    with pytest.raises(
        ConfigError, match="does not say which layers of a pipeline belong to this rank"
    ):
        _divided(name)
