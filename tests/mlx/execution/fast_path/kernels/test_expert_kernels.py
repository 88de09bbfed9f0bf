"""Layers of routed experts whose decodes kernels compute."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.expert_opening import open_expert_kernels
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels
from services.rank_worker.model.fast_path.kernels.few_experts import FewExperts
from services.rank_worker.model.fast_path.opening import FastPathSettings
from services.rank_worker.model.sharding.local_experts import expert_layers, keep_all
from tests.mlx.executor_driver import ExecutorDriver, make_executor, make_prompt
from tests.mlx.models import make_qwen3
from tests.mlx.sharding.moe_models import make_moe_model

PROMPTS = {1: make_prompt(1, 9), 2: make_prompt(2, 5)}
LAYERS = "fast path with kernels"


@pytest.fixture(autouse=True)
def _tensor_cores_of_4_bytes(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> None:
    for module in (head_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))


def _model(family: str = "qwen3_moe", width: int = 32) -> nn.Module:
    model = make_moe_model(family, moe_intermediate_size=width, hidden_size=64)
    keep_all(model)
    return model


def _generate(model: nn.Module, **settings: Any) -> tuple[dict[int, list[int]], Any, str]:
    """Decode two sequences; return their tokens, the counts of experts, and who computes layers."""
    counter = ExpertCounter(model, 0, "none", 1)
    driver = ExecutorDriver(model, row_count=3, row_tokens=48)
    driver.executor = make_executor(
        model,
        profile=ExecutionProfile(has_queue=True),
        fast_path=FastPathSettings(**settings),
        expert_counter=counter,
    )
    counter.restart()
    driver.start(1, 0, PROMPTS[1])
    driver.start(2, 1, PROMPTS[2])
    for _ in range(4):
        driver.step(decodes=[1, 2])
    return driver.tokens, counter.counts, driver.executor.layers_state


def test_decodes_with_kernels_have_the_tokens_and_the_counts_of_mlx_lms_experts() -> None:
    """The calls of a decode are counted as results of its graph."""
    tokens, counts, _ = _generate(_model())
    found = _generate(_model(), device="cuda")
    assert found[2] == f"{LAYERS}; experts and routing with kernels"
    assert found[0] == tokens
    assert np.array_equal(found[1], counts)
    assert counts.sum() > 0


def test_decodes_are_counted_by_a_kernel() -> None:
    """Otherwise each layer would cost an operation."""
    model = _model()
    counter = ExpertCounter(model, 0, "none", 1)
    open_expert_kernels(model, "cuda", bool, counter)
    assert counter.kernel is not None


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compares them with mlx-lm's code before it serves."""
    real = FewExperts.__call__
    monkeypatch.setattr(FewExperts, "__call__", lambda *args: 1.1 * real(*args))
    model = _model()
    state = open_expert_kernels(model, "cuda", bool)
    assert state.endswith("mlx-lm's experts: layer 0 of experts differs by 10.0%")
    assert all(local.few is None for _, local in expert_layers(model))


@pytest.mark.parametrize(("family", "width"), [("gpt_oss", 32), ("qwen3_moe", 48)])
def test_experts_of_another_form_are_left_to_mlx_lm(family: str, width: int) -> None:
    """gpt_oss has biases and an activation of its own; 48 inputs are no whole chunks."""
    state = open_expert_kernels(_model(family, width), "cuda", bool)
    assert "mlx-lm's experts: their form has no kernels" in state


def test_only_cuda_has_kernels_that_multiply_experts() -> None:
    """MLX's own are fast on Metal, where kernels only route tokens and add up results."""
    model = _model()
    state = open_expert_kernels(model, "metal", bool)
    reason = "this device has no kernels for their products"
    assert state == f"routing with kernels, mlx-lm's experts: {reason}"
    assert all(local.few is None for _, local in expert_layers(model))


@pytest.mark.parametrize("device", ["cpu", "metal", "cuda"])
def test_every_rank_votes_also_without_kernels_or_experts(device: Any) -> None:
    """A vote is a collective: a rank that left it out would answer the next one with it."""
    votes: list[bool] = []

    def all_agree(vote: bool) -> bool:
        votes.append(vote)
        return vote

    for model in (make_qwen3(head_dim=16), _model()):
        open_expert_kernels(model, device, all_agree)
    # Kernels at all, products, logits of 32 bits, and four rules of routing.
    rules = [True, False, False, False]
    of_experts = {
        "cuda": [True, True, True, *rules],
        "metal": [True, False, False, *rules],
        "cpu": [False],
    }
    assert votes == [True] * 7 + of_experts[device]


def test_numbers_that_are_no_experts_give_zeros() -> None:
    """Nothing that memory held before, such as another tenant's numbers, reaches a result."""
    layer = expert_layers(_model())[0][0]
    x = mx.random.normal((2, 64))
    indices = mx.array([[0, 99], [1, 99]], dtype=mx.uint32)
    found = FewExperts()(layer, x, indices, range(4))
    assert mx.array_equal(found[:, 1], mx.zeros((2, 64))).item()
