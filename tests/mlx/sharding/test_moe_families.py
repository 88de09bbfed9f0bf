"""Experts divided between ranks, for all of mlx-lm's families with routed experts."""

import ast
import inspect
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from services.rank_worker.model.sharding import local_experts
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.model.sharding.local_experts import is_switch
from shared.errors import ConfigError
from shared.model.sharding.shares import Split
from tests.mlx.sharding.in_process_world import InProcessWorld, unlinked_collectives
from tests.mlx.sharding.moe_models import MOE_FAMILIES, VOCAB, make_moe_model, moe_config

METAL_ONLY = {"muse_spark"}
"""Families that run on Metal only; their division is tested, not their logits."""

PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(11)]])


def split_models(ranks: InProcessWorld, family: str, **changes: Any) -> list[nn.Module]:
    """Return the model of each rank; they differ only in their experts."""
    models = []
    for one in ranks.worlds:
        model = make_moe_model(family)
        split = Split("expert", one.rank, one.world_size, changes.get("memory_bytes", ()))
        apply_split(model, moe_config(family), split, one)
        models.append(model)
    return models


def expert_layers(model: nn.Module) -> int:
    """Return the number of layers with routed experts."""
    return sum(sum(map(is_switch, module.children().values())) > 1 for module in model.modules())


@pytest.mark.parametrize("family", sorted(set(MOE_FAMILIES) - METAL_ONLY))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_divided_experts_compute_logits_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    """Each rank computes the logits of a single rank, with one sum per layer of experts."""
    whole = make_moe_model(family)(PROMPT)
    ranks = InProcessWorld(monkeypatch, size)
    models = split_models(ranks, family)
    logits = ranks.run(models, PROMPT)
    assert len(ranks.sums) == expert_layers(models[0]) > 0
    for one in logits:
        assert mx.array_equal(one, logits[0]), "the ranks compute different logits"
        assert float(mx.abs(one - whole).max()) < 1e-4


def test_table_of_moe_families_lists_every_one_in_mlx_lm() -> None:
    """Every family of mlx-lm with routed experts is in the table of families."""
    found = {
        path.stem
        for path in Path(mlx_lm.models.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("SwitchGLU", "SwitchMLP")
    }
    assert found
    assert found <= set(MOE_FAMILIES)


def test_model_needing_metal_has_experts_divided_and_summed_directly_after_them() -> None:
    """The experts of a family that needs Metal are divided; the sum over the ranks is directly
    after them.
    """
    model = make_moe_model("muse_spark")
    description = apply_split(
        model, moe_config("muse_spark"), Split("expert", 1, 2), unlinked_collectives(1, 2)
    )
    assert description == "expert 3+3; sums: 3 behind the experts"
    for layer in model.layers:
        assert layer.mlp.sharding_group is None
        assert layer.mlp.experts.up_proj.weight.shape[0] == 3
        assert layer.mlp.gate.weight.shape[0] == 6, "a router knows all experts"


LONG_PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(70)]])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "nemotron_h", "olmoe"])
def test_long_prefill_computes_only_local_experts_with_equal_logits(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Long prefills compute only the slots of local experts and give the same logits."""
    monkeypatch.setitem(local_experts.WAIT_FLOPS, "cpu", 0.0)
    whole = make_moe_model(family)(LONG_PROMPT)
    ranks = InProcessWorld(monkeypatch, 3)
    models = split_models(ranks, family, memory_bytes=(4 << 30, 4 << 30, 2 << 30))
    rows: list[int] = []
    gather = mx.gather_mm

    def counted(*args: Any, **kwargs: Any) -> mx.array:
        rows.append(kwargs["rhs_indices"].size)
        return gather(*args, **kwargs)

    monkeypatch.setattr(mx, "gather_mm", counted)
    with local_experts.allow_device_wait():
        logits = ranks.run(models, LONG_PROMPT)
    assert float(mx.abs(logits[2] - whole).max()) < 1e-4
    slots = LONG_PROMPT.size * (1 if family == "llama4" else 2)
    assert max(rows) <= slots
    assert all(count % local_experts.ROWS_MULTIPLE == 0 or count == slots for count in rows)
    assert sum(rows) / len(rows) < 0.95 * slots, "most slots are on other ranks"


def test_quantized_experts_are_divided_with_scales_and_biases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed weights, scales and biases of routed and shared experts are divided together."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}

    def quantized() -> nn.Module:
        model = make_moe_model("deepseek_v3", **sizes)
        nn.quantize(
            model,
            32,
            4,
            class_predicate=lambda path, module: (
                "mlp" in path and "gate." not in path and hasattr(module, "to_quantized")
            ),
        )
        return model

    whole = quantized()(PROMPT)
    ranks = InProcessWorld(monkeypatch, 2)
    models = [quantized() for _ in ranks.worlds]
    for model, one in zip(models, ranks.worlds, strict=True):
        apply_split(model, moe_config("deepseek_v3", **sizes), Split("expert", one.rank, 2), one)
    block = models[1].layers[-1].mlp
    assert block.switch_mlp.up_proj.scales.shape[0] == 3
    assert block.shared_experts.down_proj.scales.shape == (64, 1), "one of two groups of 32"
    logits = ranks.run(models, PROMPT)
    assert float(mx.abs(logits[0] - whole).max()) < 1e-4


def test_bias_of_divided_experts_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with a bias are summed per slot, others per token; both give the right logits."""
    places = []
    for bias in (True, False):
        whole = make_moe_model("nemotron_h", mlp_bias=bias)(PROMPT)
        ranks = InProcessWorld(monkeypatch, 2)
        models = [make_moe_model("nemotron_h", mlp_bias=bias) for _ in ranks.worlds]
        for model, one in zip(models, ranks.worlds, strict=True):
            config = moe_config("nemotron_h", mlp_bias=bias)
            apply_split(model, config, Split("expert", one.rank, 2), one)
        logits = ranks.run(models, PROMPT)
        assert float(mx.abs(logits[0] - whole).max()) < 1e-4
        places.append([total.ndim for total in ranks.sums])
    assert places == [[4, 4], [3, 3]], "of each slot, or of each token"


def test_custom_non_linear_moe_block_gives_logits_of_one_rank_when_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A custom block, which may be non-linear, gives the same logits: its sums are directly after
    the experts.
    """

    class NonLinearBlock(qwen3_moe.Qwen3MoeSparseMoeBlock):
        def __call__(self, x: mx.array) -> mx.array:
            y: mx.array = mx.tanh(super().__call__(x))
            return y

    def make_custom() -> nn.Module:
        model = make_moe_model("qwen3_moe")
        for layer in model.layers:
            layer.mlp.__class__ = NonLinearBlock
        return model

    whole = make_custom()(PROMPT)
    ranks = InProcessWorld(monkeypatch, 2)
    models = [make_custom() for _ in ranks.worlds]
    for model, one in zip(models, ranks.worlds, strict=True):
        apply_split(model, moe_config("qwen3_moe"), Split("expert", one.rank, 2), one)
    logits = ranks.run(models, PROMPT)
    assert len(ranks.sums) == 3
    assert float(mx.abs(logits[1] - whole).max()) < 1e-4


def test_weight_bytes_of_rank_are_replicated_weights_plus_half_of_experts() -> None:
    """One of two ranks has the replicated weights and half of the experts, within 5 %."""
    sizes = {"moe_intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}
    config = moe_config("qwen3_5_moe", **sizes)
    model = make_moe_model("qwen3_5_moe", **sizes)
    whole = _sizes(model)
    experts = sum(size for path, size in whole.items() if "switch_mlp" in path)
    replicated = sum(whole.values()) - experts
    assert experts > 5 * replicated, "the experts are too small for this test"
    apply_split(model, config, Split("expert", 0, 2), unlinked_collectives(0, 2))
    held = sum(_sizes(model).values())
    assert held == pytest.approx(replicated + experts / 2, rel=0.05)


def test_description_of_expert_split_names_position_of_sums_over_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The description of a split says where the sums over the ranks are.

    A rank without the source of mlx-lm puts them elsewhere; ranks compare the description when they
    join.
    """

    def description() -> str:
        config = moe_config("qwen3_moe")
        return apply_split(
            make_moe_model("qwen3_moe"), config, Split("expert", 0, 2), unlinked_collectives(0, 2)
        )

    assert description() == "expert 3+3; sums: 3 in the block"

    def missing(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", missing)
    assert description() == "expert 3+3; sums: 3 behind the experts"


def _sizes(model: nn.Module) -> dict[str, int]:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {path: array.nbytes for path, array in arrays.items()}


def test_model_with_fewer_experts_than_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built model with fewer experts than ranks is refused with the remedy."""
    ranks = InProcessWorld(monkeypatch, 8)
    with pytest.raises(ConfigError, match=r"6 routed experts, .* set world\.size to 6 or less"):
        # The config states a wrong number of experts.
        apply_split(
            make_moe_model("mixtral"),
            {"model_type": "mixtral", "num_local_experts": 64},
            Split("expert", 0, 8),
            ranks.worlds[0],
        )
