"""Feasible splits of a model and the shares of ranks, computed without MLX."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.model.sharding.families import ModelFamily, model_family
from shared.model.sharding.feasibility import (
    SHARDINGS,
    check_sharding,
    expert_count,
    list_numbers,
    possible_world_sizes,
    sharding_obstacle,
)
from shared.model.sharding.shares import divide, divide_layers, item_range, rank_weights

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("config", "sharding", "size", "expected_words"),
    [
        (
            MOE,
            "tensor",
            8,
            (
                "by tensors, because its num_key_value_heads is 4: set world.size to 1, 2 "
                'or 4, or world.sharding to "expert" or "pipeline".'
            ),
        ),
        (
            DENSE,
            "expert",
            2,
            (
                "by experts, because it has no routed experts: set world.size to 1, or "
                'world.sharding to "tensor".'
            ),
        ),
        (
            {**MOE, "num_experts": 6},
            "expert",
            8,
            (
                "because it has 6 routed experts: set world.size to 1-6, or world.sharding to "
                '"pipeline".'
            ),
        ),
        (
            {**MOE, "num_hidden_layers": 3},
            "pipeline",
            4,
            (
                "because it has 3 layers: set world.size to 1-3, or world.sharding to "
                '"tensor" or "expert" or "tensor+expert".'
            ),
        ),
        (
            DENSE,
            "pipeline",
            2,
            (
                'because mlx-lm does not pipeline models of type "qwen3": set world.size to 1, or '
                'world.sharding to "tensor".'
            ),
        ),
        (
            {**MOE, "model_type": "mixtral"},
            "tensor",
            2,
            (
                'because mlx-lm does not shard models of type "mixtral": set world.size to 1, or '
                'world.sharding to "expert".'
            ),
        ),
        (
            {**MOE, "model_type": "mixtral"},
            "tensor+expert",
            2,
            (
                "by tensors and experts, because mlx-lm does not shard models of type "
                '"mixtral": set world.size to 1, or world.sharding to "expert".'
            ),
        ),
        (
            MOE,
            "tensor+expert",
            8,
            (
                "because its num_key_value_heads is 4: set world.size to 1, 2 or 4, or "
                'world.sharding to "expert" or "pipeline".'
            ),
        ),
        (
            {**MOE, "num_experts": 2},
            "tensor+expert",
            4,
            (
                "because it has 2 routed experts: set world.size to 1 or 2, or world.sharding to "
                '"tensor" or "pipeline".'
            ),
        ),
        (
            {**MOE, "model_type": "glm4_moe", "moe_intermediate_size": 33, "n_shared_experts": 1},
            "tensor",
            2,
            (
                "because its moe_intermediate_size is 33: set world.size to 1, or "
                'world.sharding to "expert" or "pipeline".'
            ),
        ),
        (MOE, "none", 2, "because one rank would have to hold it all: set world.size to 1, or"),
    ],
)
def test_impossible_model_split_error_names_obstacle_and_alternatives(
    config: dict[str, Any], sharding: Any, size: int, expected_words: str
) -> None:
    """The error follows from the config alone: the obstacle, other world sizes, other shardings."""
    with pytest.raises(ConfigError) as refused:
        check_sharding(config, sharding, size)
    assert expected_words in str(refused.value)


def test_check_of_model_split_raises_no_error_for_possible_splits() -> None:
    """A MoE model can be split in all ways; one rank is always possible."""
    for sharding in SHARDINGS:
        check_sharding(MOE, sharding, 4)
        check_sharding(DENSE, sharding, 1)
    assert possible_world_sizes(MOE, "tensor") == [2, 4]
    assert possible_world_sizes(MOE, "pipeline") == list(range(2, 25))
    assert possible_world_sizes(DENSE, "expert") == []


@pytest.mark.parametrize(
    ("widths", "obstacle"),
    [
        ({"intermediate_size": 2_880}, None),
        ({"intermediate_size": 2_880, "moe_intermediate_size": 768}, "its intermediate_size is"),
        ({"moe_intermediate_size": 800}, None),
        ({"shared_expert_intermediate_size": 800}, "its shared_expert_intermediate_size is 800"),
    ],
)
def test_width_of_whole_experts_is_no_obstacle(
    widths: dict[str, int], obstacle: str | None
) -> None:
    """Ranks that divide experts by number divide all widths but theirs, also one without a name
    of its own."""
    config = {**MOE, "quantization": {"group_size": 64, "bits": 4}}
    del config["moe_intermediate_size"]
    found = sharding_obstacle({**config, **widths}, "tensor+expert", 4)
    assert (found or "").startswith(obstacle or "")
    assert (found is None) == (obstacle is None)
    assert sharding_obstacle({**config, **widths}, "tensor", 4)


@pytest.mark.parametrize(
    ("widths", "obstacle"),
    [
        ({"n_shared_experts": 1}, "its shared experts' width is 96, quantized in groups of 32"),
        ({"num_shared_experts": 3}, "its shared experts' width is 288, quantized in groups of 32"),
        ({"n_shared_experts": 2}, None),
        ({"n_shared_experts": 0}, None),
        ({"n_shared_experts": None}, None),
        ({"share_expert_dim": 96}, "its share_expert_dim is 96, quantized in groups of 32"),
        ({"shared_intermediate_size": 33}, "its shared_intermediate_size is 33"),
        (
            {"shared_intermediate_size": 0, "n_shared_experts": 1},
            "its shared experts' width is 96, quantized in groups of 32",
        ),
        ({"dense_intermediate_size": 33}, "its dense_intermediate_size is 33"),
        ({"n_shared_experts": 1, "shared_expert_intermediate_size": 64}, None),
        # Experts of no width of their own have that of dense layers.
        ({"moe_intermediate_size": None, "intermediate_size": 96}, None),
    ],
)
def test_width_of_shared_experts_must_be_divisible_if_routed_ones_stay_whole(
    widths: dict[str, int | None], obstacle: str | None
) -> None:
    """mlx-lm divides shared experts, whose width has another name or is a multiple."""
    quantized = {"quantization": {"group_size": 32, "bits": 4}}
    config = {**MOE, "moe_intermediate_size": 96, **quantized, **widths}
    assert sharding_obstacle(config, "tensor+expert", 2) == obstacle
    assert sharding_obstacle(config, "tensor", 2)
    assert sharding_obstacle(config, "expert", 2) is None


def test_split_of_unknown_model_family_is_refused_only_for_numbers_in_config() -> None:
    """For custom code or an unknown model type, only the numbers of the config can be an
    obstacle."""
    own = {**DENSE, "model_file": "model.py"}
    assert model_family(own) is None
    assert sharding_obstacle(own, "pipeline", 2) is None
    assert sharding_obstacle(own, "tensor", 32) == "its num_attention_heads is 16"
    assert sharding_obstacle({**MOE, "model_type": "never_heard_of"}, "expert", 2) is None
    assert sharding_obstacle({**MOE, "model_type": "../../etc/passwd"}, "expert", 2) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ModelFamily(shards=True, pipelines=False, has_experts=False)),
        ("qwen2", ModelFamily(shards=True, pipelines=True, has_experts=False)),
        ("mixtral", ModelFamily(shards=False, pipelines=False, has_experts=True)),
        ("deepseek_v3", ModelFamily(shards=True, pipelines=True, has_experts=True)),
        # A second name for the code of another type.
        ("kimi_k2", ModelFamily(shards=True, pipelines=True, has_experts=True)),
        # A subclass of a model in another file, whose layers come from a third file.
        ("qwen3_5_moe", ModelFamily(shards=True, pipelines=True, has_experts=True)),
        ("glm_moe_dsa", ModelFamily(shards=True, pipelines=True, has_experts=True)),
    ],
)
def test_supported_splits_of_model_family_are_read_from_mlx_lm_source(
    name: str, expected: ModelFamily
) -> None:
    """Traits are found through base classes and through imports of other model files."""
    assert model_family({"model_type": name}) == expected


def test_check_of_model_split_imports_no_mlx() -> None:
    """The check works on a machine, and in a process, without MLX."""
    code = (
        "import sys\n"
        "from shared.model.sharding.feasibility import sharding_obstacle\n"
        "assert sharding_obstacle({'model_type': 'qwen3'}, 'pipeline', 2)\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("facts", "count"),
    [
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"num_local_experts": 8}, 8),
        ({"moe_num_experts": [64, 32]}, 32),
        ({"text_config": {"n_routed_experts": 16}}, 16),
        ({"num_experts": 1}, 0),
        ({"num_experts": None}, 0),
        ({}, 0),
    ],
)
def test_number_of_experts_is_found_under_every_config_key(
    facts: dict[str, Any], count: int
) -> None:
    """Layers with different numbers of experts count as the smallest; one expert counts as none."""
    assert expert_count(facts) == count


def test_ranks_with_similar_free_memory_get_equal_weights_for_splitting_model() -> None:
    """Free memory varies from start to start; equal weights keep shards, and so stored blocks,
    usable."""
    assert rank_weights([64 * GIB, 59 * GIB], 2) == [1, 1]
    assert rank_weights([], 3) == [1, 1, 1]
    assert rank_weights([64 * GIB], 2) == [1, 1]
    assert rank_weights([512 * GIB, 96 * GIB], 2) == [512 * GIB, 96 * GIB]


def test_experts_are_divided_in_proportion_to_memory_weights_of_ranks() -> None:
    """The numbers of experts are rounded, and each rank has at least one."""
    assert divide(128, [1, 1]) == [64, 64]
    assert divide(7, [1, 1, 1]) == [3, 2, 2]
    assert divide(128, [512, 128]) == [102, 26]
    assert divide(4, [10_000, 1, 1, 1]) == [1, 1, 1, 1]
    assert [item_range([3, 2, 2], rank) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    with pytest.raises(ValueError, match="2 cannot be divided between 3 ranks"):
        divide(2, [1, 1, 1])


@given(st.integers(1, 300), st.lists(st.integers(1, 1 << 45), min_size=1, max_size=64))
def test_number_of_experts_per_rank_grows_with_memory_weight_of_rank(
    count: int, weights: list[int]
) -> None:
    """For any weights the numbers sum to the total, are at least one, and grow with the weight."""
    if count < len(weights):
        return
    shares = divide(count, weights)
    assert sum(shares) == count
    assert min(shares) >= 1
    ordered = sorted(zip(weights, shares, strict=True))
    for (light, few), (heavy, many) in itertools.pairwise(ordered):
        assert few <= many + (1 if light == heavy else 0)


def test_ranks_get_layers_whose_total_size_is_proportional_to_memory_weight_of_rank() -> None:
    """The last rank has the first layers; a rank of small layers has more of them."""
    assert divide_layers([1] * 24, [1, 1]) == [12, 12]
    assert divide_layers([1] * 24, [3, 1]) == [18, 6]
    # The first three layers are dense and a tenth of the size of the others.
    assert divide_layers([1, 1, 1, *[10] * 12], [1, 1]) == [6, 9]
    assert divide_layers([100, 1, 1, 1], [1, 1, 1, 1]) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="3 layers cannot be divided between 4 ranks"):
        divide_layers([1, 1, 2], [1, 1, 1, 1])


@given(
    st.lists(st.integers(1, 1 << 40), min_size=1, max_size=100),
    st.lists(st.integers(1, 1 << 45), min_size=1, max_size=20),
)
def test_every_layer_has_one_rank_and_every_rank_has_a_layer(
    sizes: list[int], weights: list[int]
) -> None:
    """For any sizes and weights, every layer has a rank and every rank has a layer."""
    if len(sizes) < len(weights):
        return
    shares = divide_layers(sizes, weights)
    assert len(shares) == len(weights)
    assert sum(shares) == len(sizes)
    assert min(shares) >= 1


def test_list_of_numbers_prints_three_consecutive_numbers_as_range() -> None:
    """Three or more consecutive numbers become a range."""
    assert list_numbers([1]) == "1"
    assert list_numbers([1, 2, 4]) == "1, 2 or 4"
    assert list_numbers([1, 2, 3, 4, 8, 9]) == "1-4, 8 or 9"
