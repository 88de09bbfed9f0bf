"""KV cache of 8 or 4 bits: smaller, with the tokens of mlx-lm at the same bits."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import QuantizedKVCache

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.kv_cache.rows import row_layers
from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_store import RowStore
from shared.errors import ConfigError
from shared.messages import RolledBack
from tests.mlx import models
from tests.mlx.blocks.block_driver import BlockDriver, as_restored_items
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MakeModel

BITS = [8, 4]
WIDTHS = {32: 32, 64: 64}
"""Quantization group size, by width of the heads."""


@pytest.fixture(scope="module", params=WIDTHS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Return a small model whose heads divide into quantization groups."""
    return models.make_qwen3(head_dim=request.param)


def _driver(model: nn.Module, bits: int) -> ExecutorDriver:
    driver = ExecutorDriver(model)
    driver.executor = make_executor(model, kv_bits=bits)
    return driver


def _blocks(model: nn.Module, bits: int) -> BlockDriver:
    driver = BlockDriver(model)
    driver.executor = make_executor(model, kv_bits=bits, take_restored=driver._take_restored)
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
def test_quantized_kv_rows_give_tokens_of_mlx_lm(model: nn.Module, bits: int) -> None:
    """Rows that join, leave and move get the tokens of mlx-lm with the same bits."""
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
def test_rows_that_attention_reads_dequantized_give_tokens_of_mlx_lm(
    model: nn.Module, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA MLX cannot multiply many tokens with packed keys, so there attention gets numbers."""
    monkeypatch.setattr(row_layers, "device_kind", lambda: "cuda")
    prompts = {one: make_prompt(one, length) for one, length in ((1, 21), (2, 5))}
    driver = _driver(model, bits)
    for one, prompt in prompts.items():
        driver.start(one, one, prompt)
    for _ in range(6):
        driver.step(decodes=[1, 2])
    driver.step(decodes=[1, 2], drafts=[[5], [7, 8]])
    (layer, *_) = driver.executor.store.decode([1], 1).caches
    assert type(layer) is row_layers.QuantizedRowLayer
    for one, prompt in prompts.items():
        tokens = driver.tokens[one]
        assert tokens == _expected(model, prompt, len(tokens), bits)


def test_copies_of_long_quantized_rows_are_in_memory_for_few_layers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX would have memory for those of all layers before it has used the first."""
    layers, rows, tokens, heads, width = 12, 4, 4_000, 2, 64
    copies_bytes = 2 * rows * tokens * heads * width * 4
    peaks = []
    for limit in (2**40, 2**16):
        monkeypatch.setattr(row_layers, "COPY_BYTES_MAX", limit)
        part = BlockPart(heads, width, mx.float32)
        store = RowStore([[part, part]] * layers, 4, reads_packed=False)
        store.resize(rows, tokens + 1)
        for slot in range(rows):
            store.prefill(slot, tokens)
        mx.eval(store._arrays())
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        x = mx.ones((rows, heads, 1, width))
        for cache in store.decode(range(rows), 1).caches:
            keys, values = cache.update_and_fetch(x, x)
            x = (keys * values).mean(axis=2, keepdims=True)
        mx.eval(x)
        peaks.append((mx.get_peak_memory() - before) / copies_bytes)
    assert peaks[0] > 2.5
    assert peaks[1] < 1.5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_whose_copies_wait_for_the_device_waits_for_earlier_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tokens of these steps are sent before. Packed numbers need no copy for few tokens."""
    monkeypatch.setattr(row_layers, "device_kind", lambda: device)
    driver = _driver(models.make_qwen3(head_dim=32), 8)
    driver.start(1, 0, make_prompt(1, 40))
    prefill = driver.plan(prefill_chunks=[prefill_chunk(2, 0, 40, 40)])
    decode, verification = (driver.plan(decodes=[1], drafts=one) for one in ([], [[5] * 20]))
    waits = driver.executor.waits_for_earlier_steps
    assert [waits(one) for one in (prefill, decode, verification)] == [False] * 3
    # Keys and values of one layer, 40 tokens of two heads of 32 numbers of 4 bytes.
    monkeypatch.setattr(row_layers, "COPY_BYTES_MAX", 2 * 40 * 2 * 32 * 4 - 1)
    assert [waits(one) for one in (prefill, decode, verification)] == [
        True,
        device == "cuda",
        True,
    ]


@pytest.mark.parametrize("bits", BITS)
def test_reported_kv_bytes_per_token_are_quantized_numbers_plus_scales_and_biases(
    model: nn.Module, bits: int
) -> None:
    """The reported bytes of a token are those of the quantized numbers and of two more numbers per
    group.
    """
    plain = make_executor(model).store.bytes_per_token
    executor = make_executor(model, kv_bits=bits)
    width = model.layers[0].self_attn.q_norm.weight.shape[0]

    share = bits / 32 + 2 / WIDTHS[width]
    assert executor.store.bytes_per_token == plain * share
    assert executor.store.layout_text != make_executor(model).store.layout_text


@pytest.mark.parametrize("bits", BITS)
def test_reused_quantized_blocks_give_tokens_of_full_prefill(model: nn.Module, bits: int) -> None:
    """Reuse of resident and restored quantized blocks gives the tokens of a full prefill."""
    prompt = make_prompt(3, 29)
    expected = _expected(model, prompt, 8, bits)
    driver = _blocks(model, bits)
    driver.start_from_blocks(1, 0, prompt)
    for _ in range(7):
        driver.step(decodes=[1])
    assert driver.start_from_blocks(2, 2, prompt, dropped=[1]) == 28
    for _ in range(7):
        driver.step(decodes=[2])
    assert driver.tokens[1] == driver.tokens[2] == expected

    names = [name for name, end in driver.resident.items() if list(end) == prompt[: len(end)]]
    ends = [driver.resident[name] for name in names]
    second = _blocks(model, bits)
    second.adopt(as_restored_items(driver.spill(names)), ends)
    assert second.start_from_blocks(7, 1, prompt) == 24
    for _ in range(7):
        second.step(decodes=[7])
    assert second.tokens[7] == expected


@pytest.mark.parametrize("bits", BITS)
def test_drafts_with_quantized_kv_change_no_tokens(model: nn.Module, bits: int) -> None:
    """Right and wrong drafts change no token; rejected columns are overwritten."""
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
def test_models_without_quantizable_kv_are_refused_when_loaded(
    make_model: MakeModel, family: str
) -> None:
    """Narrow heads, latent attention, windows and recurrent state are refused when loaded."""
    with pytest.raises(ConfigError, match=r"kv_bits: .* cannot keep its KV in fewer bits"):
        make_executor(make_model(family), kv_bits=8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_latent_attention_model_is_refused_when_kv_is_quantized(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention is refused at any width and on all devices, as ranks must agree."""
    monkeypatch.setattr(row_layers, "device_kind", lambda: device)
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
        make_executor(deepseek_v3.Model(args), kv_bits=8)


@pytest.mark.parametrize("bits", BITS)
def test_padded_prefills_of_quantized_rows_give_tokens_of_unpadded_ones(
    model: nn.Module, bits: int
) -> None:
    """Prefills padded on the right give the same tokens with quantized rows."""
    prompt = make_prompt(5, 90)
    tokens = []
    for pads in (True, False):
        driver = ExecutorDriver(model, row_count=1, row_tokens=192)
        profile = ExecutionProfile(pads_prefill=pads)
        driver.executor = make_executor(model, profile=profile, kv_bits=bits)
        driver.step(
            admitted=[admission(1, 0, prompt)], prefill_chunks=[prefill_chunk(1, 0, 30, 90)]
        )
        driver.step(prefill_chunks=[prefill_chunk(1, 30, 90, 90)])
        for _ in range(4):
            driver.step(decodes=[1])
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
