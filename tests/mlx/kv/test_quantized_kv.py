"""KV of 8 or 4 bits: more tokens in the same memory, and every promise as without."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import qwen3
from mlx_lm.models.cache import QuantizedKVCache

from services.rank_worker.device.execution_profile import ExecutionProfile
from shared.errors import ConfigError
from shared.messages import RolledBack
from tests.mlx import models
from tests.mlx.blocks.block_driver import BlockDriver, restored
from tests.mlx.executor_driver import Driver, admit, chunk, executor_of, make_prompt

Make = Callable[[str], nn.Module]
BITS = [8, 4]
WIDTHS = {32: 32, 64: 64}
"""Width of the heads: numbers that share a scale."""


@pytest.fixture(scope="module", params=WIDTHS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Return a small model whose heads can be cut into groups."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=48,
        num_hidden_layers=3,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=request.param,
        rms_norm_eps=1e-6,
        vocab_size=models.VOCAB,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_theta=10_000.0,
    )
    return models._finish(qwen3.Model(args))


def _driver(model: nn.Module, bits: int) -> Driver:
    driver = Driver(model)
    driver.executor = executor_of(model, kv_bits=bits)
    return driver


def _blocks(model: nn.Module, bits: int) -> BlockDriver:
    driver = BlockDriver(model)
    driver.executor = executor_of(model, kv_bits=bits, take_restored=driver._take)
    return driver


def _expected(model: nn.Module, prompt: list[int], count: int, bits: int) -> list[int]:
    """Generate with mlx-lm's own quantized caches, one sequence alone."""
    width = model.layers[0].self_attn.q_norm.weight.shape[0]
    caches = [QuantizedKVCache(WIDTHS[width], bits) for _ in model.layers]
    tokens: list[int] = []
    inputs = mx.array(prompt)[None]
    for _ in range(count):
        logits = model(inputs, cache=caches)[0, -1]
        tokens.append(int(np.argmax(np.array(logits))))
        inputs = mx.array([tokens[-1:]])
    return tokens


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_several_lengths_are_as_mlx_lm_alone(model: nn.Module, bits: int) -> None:
    """Joining, leaving and moving change nothing; every text is mlx-lm's with the same bits."""
    prompts = {one: make_prompt(one, length) for one, length in ((1, 21), (2, 5), (3, 34))}
    driver = _driver(model, bits)
    for one, prompt in prompts.items():
        driver.start(one, one, prompt)
        driver.step(decodes=[*range(1, one + 1)])
    driver.step(decodes=[3, 2], dropped=[1], moves=[(3, 0)])
    driver.row_tokens = 128
    for _ in range(6):
        driver.step(decodes=[3, 2])

    for one, prompt in prompts.items():
        tokens = driver.tokens[one]
        assert tokens == _expected(model, prompt, len(tokens), bits)


@pytest.mark.parametrize("bits", BITS)
def test_a_token_takes_fewer_bytes(model: nn.Module, bits: int) -> None:
    """Numbers of so many bits, and two more per group."""
    plain = executor_of(model).kv_bytes_per_token
    executor = executor_of(model, kv_bits=bits)
    width = model.layers[0].self_attn.q_norm.weight.shape[0]

    share = bits / 32 + 2 / WIDTHS[width]
    assert executor.kv_bytes_per_token == plain * share
    assert executor.kv_layout != executor_of(model).kv_layout


@pytest.mark.parametrize("bits", BITS)
def test_a_hit_is_as_cold(model: nn.Module, bits: int) -> None:
    """From memory and from files, whole blocks and part of one."""
    prompt = make_prompt(3, 29)
    expected = _expected(model, prompt, 8, bits)
    driver = _blocks(model, bits)
    driver.begin(1, 0, prompt)
    for _ in range(7):
        driver.step(decodes=[1])
    assert driver.begin(2, 2, prompt, dropped=[1]) == 28
    for _ in range(7):
        driver.step(decodes=[2])
    assert driver.tokens[1] == driver.tokens[2] == expected

    names = [name for name, end in driver.resident.items() if list(end) == prompt[: len(end)]]
    ends = [driver.resident[name] for name in names]
    second = _blocks(model, bits)
    second.adopt(restored(driver.spill(names)), ends)
    assert second.begin(7, 1, prompt) == 24
    for _ in range(7):
        second.step(decodes=[7])
    assert second.tokens[7] == expected


@pytest.mark.parametrize("bits", BITS)
def test_drafts_change_nothing(model: nn.Module, bits: int) -> None:
    """Right ones and wrong ones: what is cut off is written over."""
    prompt = make_prompt(5, 17)
    expected = _expected(model, prompt, 12, bits)
    driver = _driver(model, bits)
    driver.start(1, 0, prompt)
    right, wrong = expected[1:4], [(expected[4] + 1) % models.VOCAB] * 3
    driver.step(decodes=[1], drafts=[right])
    length = len(prompt) + 4
    driver.step(
        decodes=[1],
        drafts=[wrong],
        rolled_back=[RolledBack(sequence_id=1, length=length)],
    )
    driver.step(decodes=[1], rolled_back=[RolledBack(sequence_id=1, length=length + 1)])
    while len(driver.tokens[1]) < 12:
        driver.step(decodes=[1])

    assert driver.tokens[1] == expected


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3", "qwen3_next"])
def test_what_cannot_be_quantized_is_refused(make_model: Make, family: str) -> None:
    """Narrow heads, latent attention, windows and recurrent state: a sentence at load."""
    with pytest.raises(ConfigError, match=r"kv_bits: .* cannot keep its KV in fewer bits"):
        executor_of(make_model(family), kv_bits=8)


def test_latent_attention_of_any_width_is_refused() -> None:
    """Its own attention would read packed numbers; that shows before anything is computed."""
    from mlx_lm.models import deepseek_v3

    args = deepseek_v3.ModelArgs(
        hidden_size=64,
        num_hidden_layers=1,
        vocab_size=models.VOCAB,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=64,
        q_lora_rank=32,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=None,
    )
    with pytest.raises(ConfigError, match="cannot keep its KV in fewer bits"):
        executor_of(deepseek_v3.Model(args), kv_bits=8)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_rows_can_be_padded(model: nn.Module, bits: int) -> None:
    """Prompts that are padded on the right get the same tokens: the mask is as wide as they are."""
    prompt = make_prompt(5, 90)
    tokens = []
    for pads in (True, False):
        driver = Driver(model, row_count=1, row_tokens=192)
        profile = ExecutionProfile(pads_prefill=pads)
        driver.executor = executor_of(model, profile=profile, kv_bits=bits)
        driver.step(admitted=[admit(1, 0, prompt)], prefill_chunks=[chunk(1, 0, 30, 90)])
        driver.step(prefill_chunks=[chunk(1, 30, 90, 90)])
        for _ in range(4):
            driver.step(decodes=[1])
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
