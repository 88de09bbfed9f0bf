"""Blocks of routed experts whose tokens kernels route, and whose results they add up."""

import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.model.fast_path import expert_opening
from services.rank_worker.model.fast_path.expert_opening import open_expert_kernels
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.expert_counts import ExpertCounts
from services.rank_worker.model.fast_path.kernels.few_experts import TOKENS_MAX, FewExperts
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.kernels.routing import (
    ExpertResults,
    RoutingKernels,
    RoutingRule,
)
from services.rank_worker.model.fast_path.routed_block import RoutedBlock, find_routed
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.model.sharding.local_experts import keep_all
from shared.messages.base import Sharding
from shared.model.sharding.shares import Split
from tests.mlx.sharding.in_process_world import InProcessWorld, unlinked_collectives
from tests.mlx.sharding.moe_models import VOCAB, make_moe_model, moe_config

SIZES = {"moe_intermediate_size": 32, "hidden_size": 64, "intermediate_size": 64}
"""Multiples of 32, which tensor cores multiply at a time."""
ROUTED = "experts and routing with kernels"
TOKENS = mx.array([[(37 * place + 5) % VOCAB for place in range(11)]])


@pytest.fixture(autouse=True)
def _tensor_cores_of_4_bytes(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> None:
    monkeypatch.setattr(tensor_cores, "DTYPES", (mx.float32,))


def _model(family: str, **changes: Any) -> nn.Module:
    model = make_moe_model(family, **{**SIZES, **changes})
    keep_all(model)
    return model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen2_moe", {}),
        ("deepseek_v3", {}),
        pytest.param("qwen3_moe", {"norm_topk_prob": False}, marks=pytest.mark.proof),
        *(
            pytest.param(family, {}, marks=pytest.mark.proof)
            for family in (
                "qwen3_next",
                "mixtral",
                "deepseek_v2",
                "kimi_k25",
                "glm4_moe",
                "minimax",
            )
        ),
    ],
)
def test_block_with_kernels_computes_what_mlx_lm_does(family: str, changes: dict[str, Any]) -> None:
    """Also with shared experts, their gate, a bias of the choice, and a factor of the weights."""
    expected = _model(family, **changes)(TOKENS)
    model = _model(family, **changes)
    assert open_expert_kernels(model, "cuda", bool) == ROUTED
    assert any(map(find_routed, model.modules()))
    assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-4).item()


def _quantized(family: str, bits: int, mode: str = "affine") -> nn.Module:
    """Return a model whose matrices are quantized, as mlx-lm quantizes it: also routers that are
    plain matrices."""
    model = make_moe_model(family, **SIZES)
    nn.quantize(
        model,
        32,
        bits,
        mode=mode,
        class_predicate=lambda path, module: (
            "mlp" in path and hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
        ),
    )
    keep_all(model)
    return model


@pytest.mark.parametrize("device", ["cuda", "metal"])
@pytest.mark.parametrize(
    ("family", "bits", "mode"),
    [
        ("qwen3_moe", 4, "affine"),
        pytest.param("deepseek_v3", 8, "affine", marks=pytest.mark.proof),
        pytest.param("qwen2_moe", 8, "affine", marks=pytest.mark.proof),
        pytest.param("kimi_k25", 4, "affine", marks=pytest.mark.proof),
        pytest.param("glm4_moe", 4, "mxfp4", marks=pytest.mark.proof),
    ],
)
def test_quantized_experts_are_routed_and_added_up_by_kernels(
    family: str, bits: int, mode: str, device: Any
) -> None:
    """On Metal mlx-lm's products of quantized experts stay between the kernels."""
    expected = _quantized(family, bits, mode)(TOKENS)
    model = _quantized(family, bits, mode)
    state = open_expert_kernels(model, device, bool)
    on_metal = "routing with kernels, mlx-lm's experts: this device has no kernels"
    assert state == ROUTED if device == "cuda" else state.startswith(on_metal)
    assert any(map(find_routed, model.modules()))
    assert mx.allclose(model(TOKENS), expected, rtol=1e-3, atol=1e-4).item()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        # It multiplies an expert's input by the weight.
        ("llama4", {}, "block 0 chooses in another way"),
        # Its router is a module of its own kind.
        ("granitemoe", {}, "the block around them has no kernels"),
        # Two of three groups of experts are chosen from.
        ("deepseek_v3", {"n_group": 3, "topk_group": 2}, "the block around them has no kernels"),
    ],
)
def test_blocks_of_another_form_are_left_to_mlx_lm(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    """Their experts have kernels all the same."""
    model = _model(family, **changes)
    state = open_expert_kernels(model, "cuda", bool)
    assert state == f"experts with kernels, mlx-lm's routing: {reason}"
    assert not any(map(find_routed, model.modules()))


def test_kernels_that_choose_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compares the whole block before it serves."""
    real = RoutingKernels.add_experts
    monkeypatch.setattr(RoutingKernels, "add_experts", lambda *args: 1.1 * real(*args))
    state = open_expert_kernels(_model("qwen3_moe"), "cuda", bool)
    assert state.endswith("mlx-lm's routing: block 0 chooses in another way")


def test_one_rank_without_kernels_keeps_all_ranks_from_them() -> None:
    """The votes are about kernels at all, products, logits, and the rules of routing."""
    votes = iter([True, True, True, False, False, False, False])
    model = _model("qwen3_moe")
    state = open_expert_kernels(model, "cuda", lambda _: next(votes))
    assert state.endswith("mlx-lm's routing: another rank has no kernels")
    assert not any(map(find_routed, model.modules()))


@pytest.mark.parametrize(
    ("family", "sharding"),
    [
        ("qwen2_moe", "expert"),
        ("deepseek_v3", "tensor+expert"),
        pytest.param("qwen3_moe", "expert", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "tensor+expert", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", "expert", marks=pytest.mark.proof),
    ],
)
def test_ranks_with_divided_experts_and_kernels_compute_logits_of_one_rank(
    family: str, sharding: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are summed over ranks as before, with shared experts that are divided or whole: in
    mlx-lm's code, or behind it."""
    whole = _model(family)(TOKENS)
    ranks = InProcessWorld(monkeypatch, 2)
    models = []
    for one in ranks.worlds:
        model = make_moe_model(family, **SIZES)
        split = Split(sharding, one.rank, one.world_size)
        apply_split(model, moe_config(family, **SIZES), split, one)
        assert open_expert_kernels(model, "cuda", bool) == ROUTED
        models.append(model)
    logits = ranks.run(models, TOKENS)
    assert mx.array_equal(logits[0], logits[1]).item()
    assert mx.allclose(logits[0], whole, rtol=1e-3, atol=1e-4).item()


def _votes(model: nn.Module) -> list[bool]:
    votes: list[bool] = []

    def all_agree(vote: bool) -> bool:
        votes.append(vote)
        return vote

    open_expert_kernels(model, "cuda", all_agree)
    return votes


@pytest.mark.parametrize("family", ["minimax", pytest.param("qwen3_moe", marks=pytest.mark.proof)])
def test_ranks_find_the_rule_that_their_experts_do_not_show(family: str) -> None:
    """A rank with one of six experts may find several rules right; all ranks take the same one."""
    votes = []
    for rank in range(4):
        model = make_moe_model(family, **SIZES)
        split = Split("expert", rank, 4)
        apply_split(model, moe_config(family, **SIZES), split, unlinked_collectives(rank, 4))
        votes.append(_votes(model)[3:])
    common = [all(of_rule) for of_rule in zip(*votes, strict=True)]
    is_sigmoid = family == "minimax"
    assert common == [not is_sigmoid, False, is_sigmoid, False]


@pytest.mark.parametrize("spread", [0.05, pytest.param(20.0, marks=pytest.mark.proof)])
def test_rule_is_found_whether_logits_are_alike_or_not(spread: float) -> None:
    """Softmax and sigmoid give the same weights for equal logits, so these are enlarged."""
    model = _model("deepseek_v3")
    for module in model.modules():
        if "e_score_correction_bias" in module:
            module.weight = module.weight * spread / (mx.std(module.weight) * 8)
            module.e_score_correction_bias = mx.zeros_like(module.e_score_correction_bias)
    assert open_expert_kernels(model, "cuda", bool) == ROUTED
    rules = [one.rule for one in map(find_routed, model.modules()) if one is not None]
    assert all(one.is_sigmoid and one.normalizes for one in rules)


@pytest.mark.parametrize(("tokens", "is_few"), [(TOKENS_MAX, True), (TOKENS_MAX + 1, False)])
def test_many_tokens_are_computed_by_mlx_lms_code(
    tokens: int, is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grouped products are faster then. The block takes rows of tokens either way."""
    calls: list[int] = []
    real = RoutedBlock.compute_own

    def counted(block: RoutedBlock, x: mx.array, **options: bool) -> mx.array:
        calls.append(len(x))
        return real(block, x, **options)

    model = _model("qwen3_moe")
    open_expert_kernels(model, "cuda", bool)
    monkeypatch.setattr(RoutedBlock, "compute_own", counted)
    block: Any = next(one for one in model.modules() if find_routed(one))
    x = mx.random.normal((tokens, 64), key=mx.random.key(3))
    assert mx.allclose(block(x), block(x[:, None])[:, 0], rtol=1e-4, atol=1e-5).item()
    assert calls == ([tokens] * 2 if is_few else [])


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_route_chooses_the_best_and_weighs_them(
    is_sigmoid: bool, normalizes: bool, has_bias: bool
) -> None:
    """More tokens than warps, and more experts than a warp has threads; a bias only chooses. The
    kernel that does not sort chooses the same."""
    rule, local = RoutingRule(4, is_sigmoid, normalizes), range(10, 30)
    logits = mx.random.normal((70, 40), key=mx.random.key(1))
    bias = 0.1 * mx.random.normal((40,), key=mx.random.key(2)) if has_bias else None
    routed = RoutingKernels("cuda").route(logits, bias, mx.array([2.5]), rule, local)
    alone = RoutingKernels("metal").route(logits, bias, mx.array([2.5]), rule)
    scores = mx.sigmoid(logits) if is_sigmoid else mx.softmax(logits, axis=-1)
    order = mx.argsort(-(scores if bias is None else scores + bias), axis=-1)[:, :4]
    weights = mx.take_along_axis(scores, order, axis=-1)
    if normalizes:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    assert mx.array_equal(routed.experts, order).item()
    assert mx.allclose(routed.weights, 2.5 * weights, rtol=1e-5).item()
    assert mx.array_equal(alone.experts, routed.experts).item()
    assert mx.array_equal(alone.weights, routed.weights).item()
    assert routed.groups is not None
    assert mx.array_equal(routed.groups[280:], FewExperts().sort(order, local)[280:]).item()


def test_weights_are_zeros_where_all_scores_are() -> None:
    """A sum of zeros must not make them infinite."""
    rule = RoutingRule(2, is_sigmoid=True, normalizes=True)
    logits = mx.full((1, 5), -200.0)
    routed = RoutingKernels("cuda").route(logits, None, mx.array([1.0]), rule, range(5))
    assert routed.weights.tolist() == [[0.0, 0.0]]


def test_equal_scores_are_chosen_in_the_order_of_experts() -> None:
    """So that all ranks choose the same, and a token's choice does not depend on the others."""
    logits = mx.array([[0.0] * 70, [1.0 if one in (3, 35, 67) else -0.0 for one in range(70)]])
    rule = RoutingRule(5, is_sigmoid=False, normalizes=True)
    routed = RoutingKernels("cuda").route(logits, None, mx.array([1.0]), rule, range(70))
    assert routed.experts.tolist() == [[0, 1, 2, 3, 4], [3, 35, 67, 0, 1]]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_give_numbers_of_experts(number: float) -> None:
    """A model that has gone wrong must not have the kernels read other memory."""
    rule = RoutingRule(3, is_sigmoid=False, normalizes=True)
    logits = mx.full((2, 40), number)
    routed = RoutingKernels("cuda").route(logits, None, mx.array([1.0]), rule, range(40))
    assert routed.experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("has_shared", [False, True])
def test_sum_with_norm_has_the_bits_of_sum_and_norm(has_shared: bool) -> None:
    """A measured step does both in turn, and must have the same tokens."""
    keys = [mx.random.key(number) for number in range(5)]
    product = mx.random.normal((3, 4, 96), key=keys[0])
    weights, hidden = mx.random.uniform(shape=(3, 4), key=keys[1]), product[:, 0] * 3
    shared = mx.random.normal((3, 96), key=keys[2]) if has_shared else None
    gate = mx.random.normal((3, 1), key=keys[3]) if has_shared else None
    norm, epsilon = mx.random.normal((96,), key=keys[4]), mx.array([1e-6])
    results, kernels = ExpertResults(product, weights, shared, gate), RoutingKernels("cuda")
    change = kernels.add_experts(results)
    expected = (product * weights[..., None]).sum(axis=1)
    if shared is not None and gate is not None:
        expected = expected + mx.sigmoid(gate) * shared
    assert mx.allclose(change, expected, rtol=1e-5, atol=1e-5).item()
    found = kernels.add_experts_norm(hidden, results, norm, epsilon)
    wanted = Kernels("cuda").add_norm(hidden, change, norm, epsilon)
    assert all(mx.array_equal(*pair).item() for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("has_real", [False, True])
def test_kernel_counts_the_assignments_of_all_layers(has_real: bool) -> None:
    """Layers that are left out keep their counts; a number that is no expert stays in its layer."""
    chosen: dict[int, list[list[int]]] = {2: [[0, 3], [3, 99]], 0: [[1, 2], [0, 1]]}
    noted = [(layer, mx.array(experts)) for layer, experts in chosen.items()]
    real = mx.array([[True], [False]]) if has_real else None
    counted = ExpertCounts().add(mx.arange(12, dtype=mx.uint32), 4, noted, real)
    expected = list(range(12))
    for layer, experts in chosen.items():
        for expert in itertools.chain(*experts[: 1 if has_real else 2]):
            expected[layer * 4 + min(expert, 3)] += 1
    assert counted.tolist() == expected


def test_counts_are_mlxs_where_the_kernel_counts_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried once, as all kernels are."""
    assert expert_opening._open_counts(3) is not None
    monkeypatch.setattr(ExpertCounts, "add", lambda _, counts, *args: counts)
    assert expert_opening._open_counts(3) is None
