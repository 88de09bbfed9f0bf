"""Models of any form whose decodes attend by kernels, beside mlx-lm's own code."""

import gc
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path import opening
from services.rank_worker.model.fast_path.any_form import proof as any_form_proof
from services.rank_worker.model.fast_path.any_form.merged_products import MergedProducts
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels
from services.rank_worker.model.fast_path.merged_linear import MergedLinear
from services.rank_worker.model.fast_path.opening import FastPathSettings, open_fast_path
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.sharding.local_experts import keep_all
from tests.mlx.execution.fast_path.attention_models import make, open_of
from tests.mlx.executor_driver import make_prompt
from tests.mlx.sharding.moe_models import make_moe_model
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver, make_drafts

PROMPTS = {one: make_prompt(one, 4 + 5 * one) for one in (1, 2, 3)}
KERNELS = "mlx-lm's layers, attention with kernels: "


def _proof(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.proof)


def _model(family: str, hidden_size: int = 64) -> nn.Module:
    model = make_moe_model(family, hidden_size=hidden_size)
    keep_all(model)
    return model


def _driver(family: str, kv_bits: int = 0, **settings: Any) -> SpeculationDriver:
    # Quantized heads must have 32 numbers.
    model = _model(family, 128 if kv_bits else 64)
    driver = SpeculationDriver(
        model,
        3,
        block_tokens=NO_BLOCKS,
        kv_bits=kv_bits,
        expert_counter=ExpertCounter(model, 0, "none", 1),
        fast_path=FastPathSettings(**settings),
    )
    for one, prompt in PROMPTS.items():
        driver.start(one, one - 1, prompt)
    return driver


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("family", "device", "kv_bits"),
    [
        ("mixtral", "metal", 0),
        # Its queries and keys are normalized over all heads; its model takes a mask before caches.
        ("minimax", "cuda", 0),
        # Norms stand behind attention and MLP.
        _proof("olmo2", "cuda", 0),
        _proof("gemma", "metal", 0),
        _proof("glm4", "metal", 0),
        _proof("phi3", "cuda", 0),
        # Attention and MLP have one input.
        _proof("cohere", "cuda", 0),
        _proof("granitemoe", "metal", 8),
        _proof("bailing_moe", "cuda", 8),
        _proof("starcoder2", "metal", 0),
    ],
)
def test_decodes_and_drafts_have_the_tokens_and_counts_of_mlx_lms_attention(
    family: str, device: Any, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have several lengths; of the drafts of a row all, some, or none are right."""
    for module in (head_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))
    plain, driver = (_driver(family, kv_bits, device=one) for one in ("cpu", device))
    assert plain.executor.layers_state.startswith("mlx-lm's layers: ")
    assert driver.executor.layers_state.startswith(KERNELS)
    for _ in range(16):
        plain.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 3])
    for counts, right in [((3, 0, 1), 3), ((1, 4, 1), 0), ((2, 2, 2), 1)]:
        drafts = {
            one: make_drafts(plain.tokens[one], len(driver.tokens[one]), count, min(right, count))
            for one, count in zip(PROMPTS, counts, strict=True)
        }
        driver.step(decodes=[1, 2, 3], drafts=drafts)
    for one in PROMPTS:
        assert driver.tokens[one] == plain.tokens[one][: len(driver.tokens[one])]


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    ("family", "obstacle"),
    [
        # It attends to latents by products of its own.
        ("mistral4", "a layer attends in a way of its own"),
        # Its keys are wider than its values.
        ("deepseek_v2", "layer 0 has heads of different widths"),
    ],
)
def test_other_attention_is_left_to_mlx_lm(family: str, obstacle: str) -> None:
    """The state says why, for operators."""
    opened = open_of(_model(family), device="metal")
    assert opened.layers is None
    assert opened.state.startswith("mlx-lm's layers: ")
    assert f"; {obstacle}; " in f"{opened.state}; "


@pytest.mark.usefixtures("kernels_on_cpu")
def test_layers_of_a_known_form_keep_mlx_lms_code_if_wanted() -> None:
    """`rank_worker.fast_path = "attention"` is this setting."""
    opened = open_of(make("qwen3", 4, 2, 16), device="metal", keeps_layers=True)
    assert opened.state == f'{KERNELS}rank_worker.fast_path is "attention"'


@pytest.mark.usefixtures("kernels_on_cpu")
def test_function_and_classes_of_mlx_lm_are_as_before_outside_of_a_decode() -> None:
    """Only while a decode is built they are others: prompts are computed by mlx-lm alone."""
    model = _model("mixtral")
    module: Any = sys.modules["mlx_lm.models.mixtral"]
    before = module.scaled_dot_product_attention, [type(one) for one in model.modules()]
    opened = open_of(model, device="metal")
    assert opened.state.startswith(KERNELS)
    assert module.scaled_dot_product_attention is before[0]
    attentions = [one for one in model.modules() if "Attention" in type(one).__name__]
    assert attentions
    for attention in attentions:
        assert {type(one) for one in attention.children().values()} <= {nn.Linear, nn.RoPE}


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("keeps_layers", [True, False])
def test_merged_matrices_are_held_once_as_soon_as_they_are_merged(
    keeps_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when Python has collected what refers to itself, which could be too late."""
    model = make("qwen3", 8, 8, 64)
    shape = read_shape(model)
    store, forward = open_store(model, shape, 0), Forward(model)
    gc.collect()
    mx.clear_cache()
    loaded = mx.get_active_memory()
    found: list[int] = []

    def noting(*_: Any) -> str:
        mx.clear_cache()
        found.append(mx.get_active_memory())
        return "the rest is not tested"

    monkeypatch.setattr(any_form_proof, "find_fault", noting)
    monkeypatch.setattr(opening, "find_difference", noting)
    gc.disable()
    try:
        settings = FastPathSettings("metal", keeps_layers=keeps_layers)
        open_fast_path(forward, store, shape, settings, 0)
    finally:
        gc.enable()
    assert found
    assert found[0] < 1.05 * loaded


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("tiles", [1, 2])
def test_attention_that_computes_something_else_keeps_mlx_lms_code(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one tile and of more are compared."""
    real: Any = mx.fast.metal_kernel
    old, new = ("= number;", "= number * 1.1f;") if tiles > 1 else ("(number /", "(1.1f * number /")

    def wrong(**made: Any) -> object:
        if made["name"] == "lockstep_decode_attention":
            made["source"] = made["source"].replace(old, new)
        return real(**made)

    monkeypatch.setattr(mx.fast, "metal_kernel", wrong)
    opened = open_of(_model("olmo2"), device="metal")
    assert opened.layers is None
    assert "; attention 2 differs by " in opened.state
    opened = open_of(make("qwen3", 4, 2, 16), device="metal")
    assert opened.layers is None
    assert opened.state.startswith("mlx-lm's layers: ")


@pytest.mark.usefixtures("kernels_on_cpu")
def test_merged_product_that_is_something_else_keeps_mlx_lms_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing bias changes little in hidden states, so each product is compared by itself."""
    monkeypatch.setattr(MergedLinear, "_multiply", lambda merged, x: x @ merged._transposed)
    opened = open_of(make("qwen2", 4, 2, 16), device="metal", keeps_layers=True)
    assert opened.layers is None
    assert "; a merged product differs by " in opened.state


@pytest.mark.usefixtures("kernels_on_cpu")
def test_decode_that_cannot_be_built_keeps_mlx_lms_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of the family's code is a reason, so that all ranks vote as often."""
    votes: list[bool] = []

    def fails(*_: Any) -> None:
        raise KeyError("a name")

    monkeypatch.setattr(MergedProducts, "compile", fails)

    def vote(agrees: bool) -> bool:
        votes.append(agrees)
        return agrees

    opened = open_of(_model("olmo2"), device="metal", all_agree=vote)
    assert opened.layers is None
    assert opened.state.endswith("; a decode cannot be built (KeyError('a name'))")
    assert not votes[-1]


@pytest.mark.usefixtures("kernels_on_cpu")
def test_compiled_decode_that_computes_something_else_keeps_mlx_lms_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX orders the operations of a graph, and does not know what kernels write."""
    monkeypatch.setattr(
        mx, "compile", lambda function: lambda *args: [-one for one in function(*args)]
    )
    opened = open_of(_model("olmo2"), device="metal")
    assert opened.layers is None
    assert opened.state.endswith("; the compiled decode differs by 200.0%")
