"""Batch invariance: a sequence's numbers do not depend on the sequences beside it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import qwen3_moe

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.fast_path import merged_linear
from services.rank_worker.model.fast_path.opening import FastPathSettings
from services.rank_worker.model.fast_path.row_tiles import TILE_ROWS, multiply_in_tiles
from shared.errors import ConfigError
from shared.messages import TokenLogprobs
from tests.mlx.executor_driver import ExecutorDriver, make_executor, make_prompt
from tests.mlx.models import MODEL_FACTORIES, make_qwen3, with_random_weights

STEPS = 4
PROMPT = make_prompt(100, 37)


def _logprobs(
    make: Callable[[], nn.Module], others: int, slot: int = 0, **settings: Any
) -> list[TokenLogprobs]:
    """Return the log probabilities of one sequence that decodes beside others of all lengths."""
    driver = ExecutorDriver(make(), row_count=others + 1, row_tokens=96)
    driver.executor = make_executor(
        make(),
        profile=ExecutionProfile(grouped_tokens_max=0),
        **{"fast_path": FastPathSettings(batch_invariant=True), **settings},
    )
    ids = list(range(others + 1))
    ids[slot], ids[-1] = ids[-1], ids[slot]
    for place, one in enumerate(ids):
        driver.start(one, place, PROMPT if one == others else make_prompt(one, 1 + one % 50))
    for _ in range(STEPS):
        driver.step(decodes=ids)
    return driver.logprobs[others]


@pytest.mark.parametrize("kv_bits", [0, 8])
@pytest.mark.parametrize("quantized", [False, True])
def test_log_probabilities_have_same_bits_beside_1_to_63_other_sequences(
    quantized: bool, kv_bits: int
) -> None:
    """In any place of the batch, with any lengths beside it."""

    def make() -> nn.Module:
        mx.random.seed(1)
        model = make_qwen3(head_dim=64)
        if quantized:
            nn.quantize(model, group_size=32, bits=4, class_predicate=_is_wide)
        return model

    alone = _logprobs(make, 0, kv_bits=kv_bits)
    assert len(alone) == STEPS + 1
    for others, slot in ((1, 1), (2, 0), (TILE_ROWS, 3), (15, 9), (63, 40)):
        assert _logprobs(make, others, slot, kv_bits=kv_bits) == alone


def _is_wide(_path: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.weight.shape[-1] % 32 == 0


def test_every_product_has_the_same_number_of_rows() -> None:
    """The last tile is padded, and its padding is dropped."""
    seen = []

    def multiply(x: mx.array) -> mx.array:
        seen.append(x.shape[0])
        return 2 * x

    for rows in (1, TILE_ROWS, 3 * TILE_ROWS + 1):
        x = mx.arange(3 * rows).reshape(rows, 1, 3)
        assert mx.array_equal(multiply_in_tiles(multiply, x), 2 * x).item()
    assert set(seen) == {TILE_ROWS}
    assert len(seen) == 1 + 1 + 4


def _qwen3_moe() -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    arguments: dict[str, Any] = {
        **sizes,
        **heads,
        **experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return with_random_weights(
        qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                model_type="qwen3_moe",
                rms_norm_eps=1e-6,
                rope_theta=10_000.0,
                tie_word_embeddings=False,
                max_position_embeddings=4096,
                **arguments,
            )
        )
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_qwen3_moe, "this model's layers have experts"),
        (MODEL_FACTORIES["mamba2"], "this model is computed by mlx-lm's layers"),
    ],
)
def test_model_whose_results_would_depend_on_others_is_refused(
    make: Callable[[], nn.Module], reason: str
) -> None:
    """The sentence names the setting and the reason."""
    with pytest.raises(ConfigError, match=f"rank_worker.batch_invariant is true, but {reason}"):
        make_executor(make(), fast_path=FastPathSettings(batch_invariant=True))


def test_device_whose_products_depend_on_other_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it serves, a rank compares a row alone with the same row beside others."""

    def uneven(multiply: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        return multiply(x) * (1 + 1e-6 * mx.arange(x.shape[0])[:, None])

    monkeypatch.setattr(merged_linear, "multiply_in_tiles", uneven)
    with pytest.raises(ConfigError, match="the matrix library's sums depend on other rows"):
        make_executor(make_qwen3(16), fast_path=FastPathSettings(batch_invariant=True))
