"""Reuse of blocks for every family: the tokens equal those of a full prefill."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shared.messages import Sampling
from tests.mlx.blocks.block_driver import BLOCK_TOKENS, BlockDriver, as_restored_items, block_hash
from tests.mlx.executor_driver import GREEDY, generate_alone, make_prompt, prefill_chunk
from tests.mlx.models import MODEL_FACTORIES, STATEFUL_FAMILIES, MakeModel

FAMILIES = list(MODEL_FACTORIES)
FAMILIES_WITH_PARTIAL_REUSE = [family for family in FAMILIES if family not in STATEFUL_FAMILIES]
HALF_PRECISION_FAMILIES = ["qwen3", "llama", "gemma3", "mamba2", "falcon_h1"]
"""Families without experts: experts need float32 on a CPU."""
RANDOM = Sampling(seed=5, temperature=0.9, top_p=0.95, frequency_penalty=0.3)
PROMPT = make_prompt(3, 29)


def _decode(driver: BlockDriver, ids: list[int], count: int) -> None:
    for _ in range(count):
        driver.step(decodes=ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_sequence_reusing_resident_blocks_gets_tokens_of_full_prefill(
    make_model: MakeModel, family: str, sampling: Sampling
) -> None:
    """A sequence that reuses resident blocks of its prompt gets the tokens of a full prefill."""
    model = make_model(family)
    expected = generate_alone(model, PROMPT, 12, sampling)
    driver = BlockDriver(model)
    assert driver.start_from_blocks(1, 0, PROMPT, sampling) == 0
    _decode(driver, [1], 11)

    reused = driver.start_from_blocks(2, 2, PROMPT, sampling, dropped=[1])
    _decode(driver, [2], 11)

    # Rows that can be cut also reuse the agreeing part of the next block.
    assert reused == (24 if family in STATEFUL_FAMILIES else 28)
    assert driver.tokens[1] == driver.tokens[2] == expected


@pytest.mark.parametrize("blocks_per_run", [0, 2, 3, 6, 100])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_tokens_are_equal_for_blocks_copied_singly_or_several_at_once(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, family: str, blocks_per_run: int
) -> None:
    """Tokens are the same when blocks are copied singly and when several are copied at once."""
    model = make_model(family)
    prompt = make_prompt(5, 60)
    expected = generate_alone(model, prompt, 5)
    driver = BlockDriver(model)
    size_bytes = driver.executor.store.block_bytes(BLOCK_TOKENS)
    monkeypatch.setattr(driver.executor.store, "run_bytes_max", blocks_per_run * size_bytes)
    assert driver.start_from_blocks(1, 0, prompt) == 0
    _decode(driver, [1], 4)

    assert driver.start_from_blocks(2, 2, prompt, dropped=[1]) > 7 * BLOCK_TOKENS
    _decode(driver, [2], 4)

    assert driver.tokens[1] == driver.tokens[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_executor_reuses_blocks_spilled_by_another_executor(
    make_model: MakeModel, family: str
) -> None:
    """An executor that adopts the spilled bytes of another one reuses its blocks."""
    model = make_model(family)
    first = BlockDriver(model)
    first.start_from_blocks(1, 0, PROMPT)
    first.step(decodes=[1])
    names = list(first.resident)
    items = first.spill(names, decodes=[1], evict_blocks=names)

    second = BlockDriver(model)
    second.adopt(as_restored_items(items), [tuple(end) for end in _token_ranges(first, items)])
    assert second.start_from_blocks(2, 0, PROMPT) == 24
    _decode(second, [2], 8)

    kinds = {"block", "checkpoint"} if family in STATEFUL_FAMILIES else {"block"}
    assert {item.kind for item in items} == kinds
    assert second.tokens[2] == generate_alone(model, PROMPT, 9)


def _token_ranges(driver: BlockDriver, items: list[Any]) -> list[range]:
    """Return a range per item that is as long as all tokens up to the end of the item."""
    tokens = {block_hash(PROMPT[:stop]): stop for stop in range(0, 25, BLOCK_TOKENS)}
    return [range(tokens.get(item.hash, item.tokens)) for item in items]


@pytest.mark.parametrize("family", FAMILIES_WITH_PARTIAL_REUSE)
def test_prompt_diverging_inside_block_reuses_tokens_before_difference(
    make_model: MakeModel, family: str
) -> None:
    """A prompt that diverges inside a complete or last block reuses the tokens before."""
    model = make_model(family)
    driver = BlockDriver(model)
    driver.start_from_blocks(1, 0, PROMPT)
    tail = driver.keep_tail(1)
    driver.step(dropped=[1])
    prompts = {2: PROMPT[:13] + make_prompt(8, 10), 3: PROMPT[:27] + make_prompt(9, 10)}
    reused = [driver.start_from_blocks(one, one, prompt) for one, prompt in prompts.items()]
    assert driver.resident[tail] == tuple(PROMPT)
    _decode(driver, [2, 3], 7)

    assert reused == [13, 27]
    for one, prompt in prompts.items():
        assert driver.tokens[one] == generate_alone(model, prompt, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_preempted_sequence_resumes_from_its_blocks_with_unchanged_tokens(
    make_model: MakeModel, family: str, sampling: Sampling
) -> None:
    """A preempted sequence resumes from blocks of its own tokens and draws the same tokens."""
    model = make_model(family)
    expected = generate_alone(model, PROMPT, 24, sampling)
    driver = BlockDriver(model)
    driver.start_from_blocks(1, 1, PROMPT, sampling)
    _decode(driver, [1], 14)
    known = driver.all_tokens(1)
    driver.step(dropped=[1])
    admitted = driver.admit(2, 3, known, sampling, prompt_tokens=len(PROMPT))
    reused = admitted.reused_tokens
    driver.step(
        admitted=[admitted], prefill_chunks=[prefill_chunk(2, reused, len(known), len(known))]
    )
    _decode(driver, [2], 8)

    assert reused >= 40
    assert driver.tokens[1] + driver.tokens[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_reuses_blocks_of_first_prompt_and_completion(
    make_model: MakeModel, family: str
) -> None:
    """A second turn reuses prompt and completion of the first, at least up to the last block
    boundary.
    """
    model = make_model(family)
    driver = BlockDriver(model)
    first = {1: make_prompt(11, 21), 2: make_prompt(12, 9)}
    for one, prompt in first.items():
        driver.start_from_blocks(one, one, prompt)
    _decode(driver, [1, 2], 17)
    turns = {one + 2: driver.all_tokens(one) + make_prompt(13, 9) for one in first}
    if family in FAMILIES_WITH_PARTIAL_REUSE:
        driver.keep_tail(1)
        driver.keep_tail(2)
    driver.step(dropped=[1, 2])
    reused = [driver.start_from_blocks(one, one - 2, tokens) for one, tokens in turns.items()]
    _decode(driver, [3, 4], 6)

    assert reused == ([38, 26] if family in FAMILIES_WITH_PARTIAL_REUSE else [32, 24])
    for one, tokens in turns.items():
        assert driver.tokens[one] == generate_alone(model, tokens, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_rows_filled_from_same_blocks_keep_tokens_of_all_rows(
    make_model: MakeModel, family: str
) -> None:
    """When two rows are filled from the same blocks in one plan, all rows get their own tokens."""
    model = make_model(family)
    prompts = {2: PROMPT[:24] + make_prompt(21, 6), 3: PROMPT[:24] + make_prompt(22, 3)}
    driver = BlockDriver(model)
    driver.start_from_blocks(1, 0, PROMPT)
    driver.start_from_blocks(9, 3, make_prompt(23, 14))
    driver.step(decodes=[1, 9])
    admitted = [driver.admit(one, one - 1, prompt) for one, prompt in prompts.items()]
    assert [one.reused_tokens for one in admitted] == [24, 24]
    driver.step(
        admitted=admitted,
        prefill_chunks=[prefill_chunk(one, 24, len(p), len(p)) for one, p in prompts.items()],
        decodes=[1, 9],
    )
    _decode(driver, [1, 2, 3, 9], 7)

    for one in (1, 2, 3, 9):
        prompt = driver.all_tokens(one)[: -len(driver.tokens[one])]
        assert driver.tokens[one] == generate_alone(model, prompt, len(driver.tokens[one]))


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_launched_ahead_keep_and_reuse_blocks_of_unfinished_steps(
    make_model: MakeModel, family: str
) -> None:
    """A plan can keep blocks of unfinished steps and reuse them itself."""
    model = make_model(family)
    driver = BlockDriver(model)
    driver.start_from_blocks(9, 3, make_prompt(23, 14))
    launched = [
        driver.launch(
            admitted=[driver.admit(1, 0, PROMPT)] if start == 0 else [],
            prefill_chunks=[prefill_chunk(1, start, start + 8, 29)],
        )
        for start in (0, 8, 16)
    ]
    # The plan that keeps the third block also drops its sequence and builds a row from it.
    admitted = driver.admit(2, 1, PROMPT)
    launched.append(
        driver.launch(
            dropped=[1],
            admitted=[admitted],
            prefill_chunks=[prefill_chunk(2, 24, 29, 29)],
            decodes=[9],
        )
    )
    for one in launched:
        driver.finish(one)
    _decode(driver, [2, 9], 6)

    assert admitted.reused_tokens == 24
    assert driver.tokens[2] == generate_alone(model, PROMPT, 7)
    assert driver.tokens[9] == generate_alone(model, make_prompt(23, 14), 8)


@pytest.mark.parametrize("family", HALF_PRECISION_FAMILIES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_blocks_are_restored_bit_for_bit(family: str, dtype: mx.Dtype) -> None:
    """In half precision a row built from restored blocks holds the exact bits that were kept."""
    model = MODEL_FACTORIES[family]()
    model.set_dtype(dtype)
    cold, warm = BlockDriver(model), BlockDriver(model)
    cold.start_from_blocks(1, 0, PROMPT)
    items = cold.spill(list(cold.resident), decodes=[1])
    warm.adopt(as_restored_items(items), [tuple(end) for end in _token_ranges(cold, items)])
    again = warm.spill([item.hash for item in items])
    assert [bytes(one.payload) for one in again] == [bytes(one.payload) for one in items]

    warm.resident = dict(cold.resident)
    assert warm.start_from_blocks(2, 1, PROMPT) == 24
    store_cold, store_warm = cold.executor.store, warm.executor.store
    before, after = store_cold.read_block(0, 0, 29), store_warm.read_block(1, 0, 29)
    assert np.array(before).tobytes() == np.array(after).tobytes()
    _decode(cold, [1], 5)
    _decode(warm, [2], 6)
    assert cold.tokens[1] == warm.tokens[2]
