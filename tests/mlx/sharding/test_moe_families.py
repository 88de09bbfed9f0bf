"""Experts divided between ranks, for every family of mlx-lm that has routed experts."""

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
from tests.mlx.sharding.in_process_world import SeveralRanks, world
from tests.mlx.sharding.moe_models import FAMILIES, VOCAB, config_of, make

METAL_ONLY = {"muse_spark"}
"""Runs on Apple's GPUs only; that it is divided is tested, not what it computes."""

PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(11)]])


def split_models(ranks: SeveralRanks, family: str, **changes: Any) -> list[nn.Module]:
    """Return each rank's model; equal but for what it keeps."""
    models = []
    for one in ranks.worlds:
        model = make(family)
        split = Split("expert", one.rank, one.world_size, changes.get("memory_bytes", ()))
        apply_split(model, config_of(family), split, one)
        models.append(model)
    return models


def expert_layers(model: nn.Module) -> int:
    """Return how many layers of routed experts a model has."""
    return sum(sum(map(is_switch, module.children().values())) > 1 for module in model.modules())


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - METAL_ONLY))
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    """Each rank computes what one rank would, with one sum per layer of experts and no other."""
    whole = make(family)(PROMPT)
    ranks = SeveralRanks(monkeypatch, size)
    models = split_models(ranks, family)
    logits = ranks.run(models, PROMPT)
    assert len(ranks.sums) == expert_layers(models[0]) > 0
    for one in logits:
        assert mx.array_equal(one, logits[0]), "what is not divided is computed by all alike"
        assert float(mx.abs(one - whole).max()) < 1e-4


def test_every_family_with_routed_experts_is_here() -> None:
    """A family that a newer mlx-lm brings must be added to the table, and so to these tests."""
    found = {
        path.stem
        for path in Path(mlx_lm.models.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("SwitchGLU", "SwitchMLP")
    }
    assert found
    assert found <= set(FAMILIES)


def test_a_family_that_runs_on_metal_only_is_divided() -> None:
    """Its blocks hold a norm behind the experts, so the sum stands right behind these."""
    model = make("muse_spark")
    words = apply_split(model, config_of("muse_spark"), Split("expert", 1, 2), world(1, 2))
    assert words == "expert 3+3; sums: 3 behind the experts"
    for layer in model.layers:
        assert layer.mlp.sharding_group is None
        assert layer.mlp.experts.up_proj.weight.shape[0] == 3
        assert layer.mlp.gate.weight.shape[0] == 6, "a router knows all experts"


LONG_PROMPT = mx.array([[(37 * place + 5) % VOCAB for place in range(70)]])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "nemotron_h", "olmoe"])
def test_long_prompts_compute_no_foreign_slots(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The way of long forwards gives the same; with biases, one expert per token, two matrices."""
    monkeypatch.setitem(local_experts.WAIT_FLOPS, "cpu", 0.0)
    whole = make(family)(LONG_PROMPT)
    ranks = SeveralRanks(monkeypatch, 3)
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


def test_quantized_experts_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed numbers, scales and biases keep together, in routed and in shared experts."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}

    def quantized() -> nn.Module:
        model = make("deepseek_v3", **sizes)
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
    ranks = SeveralRanks(monkeypatch, 2)
    models = [quantized() for _ in ranks.worlds]
    for model, one in zip(models, ranks.worlds, strict=True):
        apply_split(model, config_of("deepseek_v3", **sizes), Split("expert", one.rank, 2), one)
    block = models[1].layers[-1].mlp
    assert block.switch_mlp.up_proj.scales.shape[0] == 3
    assert block.shared_experts.down_proj.scales.shape == (64, 1), "one of two groups of 32"
    logits = ranks.run(models, PROMPT)
    assert float(mx.abs(logits[0] - whole).max()) < 1e-4


def test_a_bias_behind_the_experts_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the sum stands behind the block, whose shared experts are cut; both are right."""
    places = []
    for bias in (True, False):
        whole = make("nemotron_h", mlp_bias=bias)(PROMPT)
        ranks = SeveralRanks(monkeypatch, 2)
        models = [make("nemotron_h", mlp_bias=bias) for _ in ranks.worlds]
        for model, one in zip(models, ranks.worlds, strict=True):
            config = config_of("nemotron_h", mlp_bias=bias)
            apply_split(model, config, Split("expert", one.rank, 2), one)
        logits = ranks.run(models, PROMPT)
        assert float(mx.abs(logits[0] - whole).max()) < 1e-4
        places.append([total.ndim for total in ranks.sums])
    assert places == [[4, 4], [3, 3]], "of each slot, or of each token"


def test_code_of_a_models_own_gets_the_sum_that_is_always_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has tested what such a block does with its experts; here it is not linear."""

    class Block(qwen3_moe.Qwen3MoeSparseMoeBlock):
        def __call__(self, x: mx.array) -> mx.array:
            y: mx.array = mx.tanh(super().__call__(x))
            return y

    def own() -> nn.Module:
        model = make("qwen3_moe")
        for layer in model.layers:
            layer.mlp.__class__ = Block
        return model

    whole = own()(PROMPT)
    ranks = SeveralRanks(monkeypatch, 2)
    models = [own() for _ in ranks.worlds]
    for model, one in zip(models, ranks.worlds, strict=True):
        apply_split(model, config_of("qwen3_moe"), Split("expert", one.rank, 2), one)
    logits = ranks.run(models, PROMPT)
    assert len(ranks.sums) == 3
    assert float(mx.abs(logits[1] - whole).max()) < 1e-4


def test_a_rank_holds_what_is_whole_and_its_part_of_the_experts() -> None:
    """Within 5 % of (replicated + experts / 2); shared experts are cut as well."""
    sizes = {"moe_intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}
    config = config_of("qwen3_5_moe", **sizes)
    model = make("qwen3_5_moe", **sizes)
    whole = _sizes(model)
    experts = sum(size for path, size in whole.items() if "switch_mlp" in path)
    replicated = sum(whole.values()) - experts
    assert experts > 5 * replicated, "or the test would not see the experts"
    apply_split(model, config, Split("expert", 0, 2), world(0, 2))
    held = sum(_sizes(model).values())
    assert held == pytest.approx(replicated + experts / 2, rel=0.05)


def test_where_the_sums_are_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read off mlx-lm's source. A rank that lacks it puts them elsewhere, and would add up
    other numbers than its peers: the words are part of what ranks must have in common to join.
    """

    def words() -> str:
        config = config_of("qwen3_moe")
        return apply_split(make("qwen3_moe"), config, Split("expert", 0, 2), world(0, 2))

    assert words() == "expert 3+3; sums: 3 in the block"

    def missing(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", missing)
    assert words() == "expert 3+3; sums: 3 behind the experts"


def _sizes(model: nn.Module) -> dict[str, int]:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {path: array.nbytes for path, array in arrays.items()}


def test_a_model_without_enough_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the config does not tell the built model does; what can be done is said."""
    ranks = SeveralRanks(monkeypatch, 8)
    with pytest.raises(ConfigError, match=r"6 routed experts, .* set world\.size to 6 or less"):
        # A config that hides how many there are.
        apply_split(
            make("mixtral"),
            {"model_type": "mixtral", "num_local_experts": 64},
            Split("expert", 0, 8),
            ranks.worlds[0],
        )
