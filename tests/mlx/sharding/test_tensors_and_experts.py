"""Experts divided by number and all other matrices by mlx-lm, for all families that offer both."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.sharding.apply import apply_split, describe_share
from services.rank_worker.model.sharding.local_experts import is_switch
from services.rank_worker.model.sharding.tensor_split import (
    split_tensors,
    split_tensors_and_experts,
)
from shared.errors import ConfigError
from shared.messages.base import Sharding
from shared.model.sharding.feasibility import check_sharding
from shared.model.sharding.shares import DIVIDES_MATRICES, Split
from tests.mlx.sharding.in_process_world import InProcessWorld, unlinked_collectives
from tests.mlx.sharding.moe_models import (
    EXPERTS,
    VOCAB,
    families_of_sharding,
    make_moe_model,
    moe_config,
)

METAL_ONLY = {"muse_spark"}
"""Families that run on Metal only; their division is tested, not their logits."""
CHANGES: dict[str, dict[str, Any]] = {
    # Its compiled norm over the heads of all ranks cannot be stopped at a sum.
    "minimax": {"use_qk_norm": False},
    # With a head of its own, mlx-lm gathers logits.
    "qwen3_5_moe": {"tie_word_embeddings": True},
}
PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(11)]])


def _split(model: nn.Module, family: str, rank: int, sharding: Any, **changes: Any) -> str:
    """Divide a model between two ranks, of which the second gets most of the experts."""
    split = Split(sharding, rank, 2, expert_shares=(1, 2))
    return apply_split(model, moe_config(family, **changes), split, unlinked_collectives(rank, 2))


def _experts(model: nn.Module) -> dict[str, mx.array]:
    """Return all arrays of routed experts by path."""
    paths = [path for path, module in model.named_modules() if is_switch(module)]
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {name: one for name, one in arrays.items() if name.rpartition(".")[0] in paths}


@pytest.mark.parametrize("family", sorted({*families_of_sharding("tensor+expert")} - METAL_ONLY))
def test_ranks_with_divided_tensors_and_experts_compute_logits_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Each rank computes the logits of a single rank, with experts of that rank's values."""
    changes = {**CHANGES.get(family, {}), "vocab_size": VOCAB + 1}
    one_rank = make_moe_model(family, **changes)
    ranks = InProcessWorld(monkeypatch, 2)
    models = [make_moe_model(family, **changes) for _ in ranks.worlds]
    for rank, model in enumerate(models):
        _split(model, family, rank, "tensor+expert", **changes)
    logits = ranks.run(models, PROMPT)
    assert mx.array_equal(logits[0], logits[1]), "the ranks compute different logits"
    assert float(mx.abs(logits[0] - one_rank(PROMPT)).max()) < 1e-4
    whole, held = _experts(one_rank), [_experts(model) for model in models]
    for path, array in whole.items():
        assert mx.array_equal(array, mx.concatenate([one[path] for one in held]))


def test_model_needing_metal_keeps_whole_experts_that_its_block_sums() -> None:
    """The experts of a family that needs Metal are divided by number, unread; its block sums."""
    model = make_moe_model("muse_spark", vocab_size=VOCAB + 1)
    whole = _experts(model)
    description = _split(model, "muse_spark", 1, "tensor+expert", vocab_size=VOCAB + 1)
    assert description == "tensor+expert 2+4"
    for path, array in _experts(model).items():
        assert mx.array_equal(array, whole[path][2:])
    for layer in model.layers:
        assert layer.mlp.sharding_group is not None
        assert layer.self_attn.n_kv_heads == 1


def test_rank_has_half_of_kv_and_the_other_weights_of_a_split_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The split differs from that of all tensors in the routed experts only."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, **_: part)
    for family in ("qwen3_moe", "glm4_moe"):
        whole = make_moe_model(family)
        kv_bytes = open_store(whole, read_shape(whole)).bytes_per_token
        found = []
        for sharding in sorted(DIVIDES_MATRICES):
            model = make_moe_model(family)
            _split(model, family, 1, sharding)
            arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
            found.append({path: arrays[path].shape for path in set(arrays) - set(_experts(model))})
            assert open_store(model, read_shape(model)).bytes_per_token == kv_bytes // 2
        assert found[0] == found[1]


def test_experts_of_a_width_that_ranks_cannot_divide_are_divided_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three groups of quantized numbers have no half, and whole experts need none."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "vocab_size": VOCAB + 1}

    def quantized() -> nn.Module:
        model = make_moe_model("qwen3_moe", **sizes)
        nn.quantize(model, 32, 4, class_predicate=lambda _, module: is_switch(module))
        return model

    config = {**moe_config("qwen3_moe", **sizes), "quantization": {"group_size": 32, "bits": 4}}
    with pytest.raises(ConfigError, match=r'its moe_intermediate_size is 96.* "tensor\+expert"'):
        check_sharding(config, "tensor", 2)
    check_sharding(config, "tensor+expert", 2)
    ranks = InProcessWorld(monkeypatch, 2)
    models = [quantized() for _ in ranks.worlds]
    for rank, model in enumerate(models):
        _split(model, "qwen3_moe", rank, "tensor+expert", **sizes)
    assert models[1].layers[0].mlp.switch_mlp.down_proj.scales.shape == (4, 64, 3)
    logits = ranks.run(models, PROMPT)
    assert float(mx.abs(logits[1] - quantized()(PROMPT)).max()) < 1e-4


def test_shared_experts_of_a_width_that_ranks_cannot_divide_are_refused_before_the_build() -> None:
    """mlx-lm divides them, also where routed experts stay whole; the alternative works."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "vocab_size": VOCAB + 1}
    quantization = {"quantization": {"group_size": 32, "bits": 4}}
    config = {**moe_config("glm4_moe", **sizes), **quantization}
    shardings: tuple[Sharding, ...] = ("tensor", "tensor+expert")
    for sharding in shardings:
        with pytest.raises(ConfigError, match=r'size to 1, or world\.sharding to "expert" or'):
            check_sharding(config, sharding, 2)
    model = make_moe_model("glm4_moe", **sizes)
    nn.quantize(model, 32, 4, class_predicate=lambda _, one: hasattr(one, "to_quantized"))
    description = apply_split(model, config, Split("expert", 0, 2), unlinked_collectives(0, 2))
    assert description.startswith("expert 3+3")


def test_description_of_share_names_part_of_layers_and_experts() -> None:
    """Operators see both divisions of a rank."""
    model = make_moe_model("qwen3_moe")
    description = _split(model, "qwen3_moe", 1, "tensor+expert")
    found = describe_share(model, description, Split("tensor+expert", 1, 2))
    assert found == f"part 2 of 2 of every layer, experts 2 to {EXPERTS - 1} of {EXPERTS}"


def test_model_whose_block_does_not_sum_over_ranks_is_refused() -> None:
    """A model's own `shard` may leave its experts whole; then nothing would sum them."""

    model: Any = nn.Sequential(make_moe_model("qwen3_moe").model)
    model.shard = lambda _: None
    with pytest.raises(
        ConfigError, match=r'over ranks: set world\.sharding to "tensor" or "expert"'
    ):
        _split(model, "qwen3_moe", 0, "tensor+expert")
    assert _experts(model), "its experts are as before"


@pytest.mark.parametrize("sharding", sorted(DIVIDES_MATRICES))
@pytest.mark.parametrize(
    ("experts", "remedy"), [(EXPERTS, ', or world.sharding to "expert"'), (0, "")]
)
def test_model_that_the_build_cannot_shard_names_experts_where_it_may_have_them(
    sharding: Any, experts: int, remedy: str
) -> None:
    """A model's own code may have no `shard`, or one that fails."""
    config = {"model_type": "own", "model_file": "model.py", "num_experts": experts}
    collectives = unlinked_collectives(0, 2)
    model: Any = nn.Sequential(make_moe_model("qwen3_moe").model)

    def split() -> None:
        if sharding == "tensor":
            split_tensors(model, config, collectives)
        else:
            split_tensors_and_experts(model, config, [1, 1], collectives)

    with pytest.raises(ConfigError, match=f"by tensors: set world.size to 1{remedy}.$"):
        split()

    def shard(_group: object) -> None:
        raise ValueError("This width is odd.")

    model.shard = shard
    with pytest.raises(ConfigError, match=f'says "This width is odd": set .* to 1{remedy}.$'):
        split()
