"""Every family: whatever a row is built from, its tokens are those of a prefill from the start."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from shared.messages import Sampling
from tests.mlx.blocks.block_driver import BLOCK_TOKENS, BlockDriver, block_hash, restored
from tests.mlx.executor_driver import GREEDY, alone, chunk, make_prompt
from tests.mlx.models import MAKERS, OTHERS

Make = Callable[[str], nn.Module]
FAMILIES = list(MAKERS)
CUTTABLE = [family for family in FAMILIES if family not in OTHERS]
HALVED = ["qwen3", "llama", "gemma3", "mamba2", "falcon_h1"]
"""Experts, which the others have, need float32 on a CPU."""
RANDOM = Sampling(seed=5, temperature=0.9, top_p=0.95, frequency_penalty=0.3)
PROMPT = make_prompt(3, 29)


def _decode(driver: BlockDriver, ids: list[int], count: int) -> None:
    for _ in range(count):
        driver.step(decodes=ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_hit_in_memory(make_model: Make, family: str, sampling: Sampling) -> None:
    """A sequence that reuses the blocks of its prompt gets the tokens of one that does not."""
    model = make_model(family)
    expected = alone(model, PROMPT, 12, sampling)
    driver = BlockDriver(model)
    assert driver.begin(1, 0, PROMPT, sampling) == 0
    _decode(driver, [1], 11)

    reused = driver.begin(2, 2, PROMPT, sampling, dropped=[1])
    _decode(driver, [2], 11)

    # Rows that can be cut take the part that agrees of the next block too.
    assert reused == (24 if family in OTHERS else 28)
    assert driver.tokens[1] == driver.tokens[2] == expected


@pytest.mark.parametrize("blocks_per_run", [0, 2, 3, 6, 100])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_hit_is_the_same_however_blocks_are_written(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, family: str, blocks_per_run: int
) -> None:
    """One by one as on a CPU, or some together as on a GPU, and read from the row likewise: with a
    shorter block at the end.
    """
    model = make_model(family)
    prompt = make_prompt(5, 60)
    expected = alone(model, prompt, 5)
    driver = BlockDriver(model)
    size_bytes = driver.executor.block_payload_bytes(BLOCK_TOKENS)
    monkeypatch.setattr(driver.executor._store, "run_bytes_max", blocks_per_run * size_bytes)
    assert driver.begin(1, 0, prompt) == 0
    _decode(driver, [1], 4)

    assert driver.begin(2, 2, prompt, dropped=[1]) > 7 * BLOCK_TOKENS
    _decode(driver, [2], 4)

    assert driver.tokens[1] == driver.tokens[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_from_files(make_model: Make, family: str) -> None:
    """What was spilled as bytes serves an executor that has computed nothing."""
    model = make_model(family)
    first = BlockDriver(model)
    first.begin(1, 0, PROMPT)
    first.step(decodes=[1])
    names = list(first.resident)
    items = first.spill(names, decodes=[1], evict_blocks=names)

    second = BlockDriver(model)
    second.adopt(restored(items), [tuple(end) for end in _ends(first, items)])
    assert second.begin(2, 0, PROMPT) == 24
    _decode(second, [2], 8)

    kinds = {"block", "checkpoint"} if family in OTHERS else {"block"}
    assert {item.kind for item in items} == kinds
    assert second.tokens[2] == alone(model, PROMPT, 9)


def _ends(driver: BlockDriver, items: list[Any]) -> list[range]:
    """Return ranges as long as all tokens up to the end of each item: borders, kind by kind."""
    tokens = {block_hash(PROMPT[:stop]): stop for stop in range(0, 25, BLOCK_TOKENS)}
    return [range(tokens.get(item.hash, item.tokens)) for item in items]


@pytest.mark.parametrize("family", CUTTABLE)
def test_part_of_a_block_is_used(make_model: Make, family: str) -> None:
    """A prompt that diverges inside a block, whole or tail, reuses what is before."""
    model = make_model(family)
    driver = BlockDriver(model)
    driver.begin(1, 0, PROMPT)
    tail = driver.keep_tail(1)
    driver.step(dropped=[1])
    prompts = {2: PROMPT[:13] + make_prompt(8, 10), 3: PROMPT[:27] + make_prompt(9, 10)}
    reused = [driver.begin(one, one, prompt) for one, prompt in prompts.items()]
    assert driver.resident[tail] == tuple(PROMPT)
    _decode(driver, [2, 3], 7)

    assert reused == [13, 27]
    for one, prompt in prompts.items():
        assert driver.tokens[one] == alone(model, prompt, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_preempted_sequence_takes_up_its_own_blocks(
    make_model: Make, family: str, sampling: Sampling
) -> None:
    """Blocks of generated tokens serve the sequence that comes back; its draws go on too."""
    model = make_model(family)
    expected = alone(model, PROMPT, 24, sampling)
    driver = BlockDriver(model)
    driver.begin(1, 1, PROMPT, sampling)
    _decode(driver, [1], 14)
    known = driver.known(1)
    driver.step(dropped=[1])
    admitted = driver.admit(2, 3, known, sampling, prompt_tokens=len(PROMPT))
    reused = admitted.reused_tokens
    driver.step(admitted=[admitted], prefill_chunks=[chunk(2, reused, len(known), len(known))])
    _decode(driver, [2], 8)

    assert reused >= 40
    assert driver.tokens[1] + driver.tokens[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_reuses_the_first(make_model: Make, family: str) -> None:
    """Prompt, answer, new question: all that the row held, or up to its last border, is reused."""
    model = make_model(family)
    driver = BlockDriver(model)
    first = {1: make_prompt(11, 21), 2: make_prompt(12, 9)}
    for one, prompt in first.items():
        driver.begin(one, one, prompt)
    _decode(driver, [1, 2], 17)
    turns = {one + 2: driver.known(one) + make_prompt(13, 9) for one in first}
    if family in CUTTABLE:
        driver.keep_tail(1)
        driver.keep_tail(2)
    driver.step(dropped=[1, 2])
    reused = [driver.begin(one, one - 2, tokens) for one, tokens in turns.items()]
    _decode(driver, [3, 4], 6)

    assert reused == ([38, 26] if family in CUTTABLE else [32, 24])
    for one, tokens in turns.items():
        assert driver.tokens[one] == alone(model, tokens, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_share_blocks(make_model: Make, family: str) -> None:
    """Two rows built from the same blocks in one plan, beside one that is not, disturb no other."""
    model = make_model(family)
    prompts = {2: PROMPT[:24] + make_prompt(21, 6), 3: PROMPT[:24] + make_prompt(22, 3)}
    driver = BlockDriver(model)
    driver.begin(1, 0, PROMPT)
    driver.begin(9, 3, make_prompt(23, 14))
    driver.step(decodes=[1, 9])
    admitted = [driver.admit(one, one - 1, prompt) for one, prompt in prompts.items()]
    assert [one.reused_tokens for one in admitted] == [24, 24]
    driver.step(
        admitted=admitted,
        prefill_chunks=[chunk(one, 24, len(p), len(p)) for one, p in prompts.items()],
        decodes=[1, 9],
    )
    _decode(driver, [1, 2, 3, 9], 7)

    for one in (1, 2, 3, 9):
        prompt = driver.known(one)[: -len(driver.tokens[one])]
        assert driver.tokens[one] == alone(model, prompt, len(driver.tokens[one]))


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_ahead_of_results_keep_and_reuse(make_model: Make, family: str) -> None:
    """Blocks are kept from steps that are not finished yet, and reused in the plan that keeps."""
    model = make_model(family)
    driver = BlockDriver(model)
    driver.begin(9, 3, make_prompt(23, 14))
    launched = [
        driver.launch(
            admitted=[driver.admit(1, 0, PROMPT)] if start == 0 else [],
            prefill_chunks=[chunk(1, start, start + 8, 29)],
        )
        for start in (0, 8, 16)
    ]
    # The plan that keeps the third block also drops its sequence and builds a row from it.
    admitted = driver.admit(2, 1, PROMPT)
    launched.append(
        driver.launch(
            dropped=[1], admitted=[admitted], prefill_chunks=[chunk(2, 24, 29, 29)], decodes=[9]
        )
    )
    for one in launched:
        driver.finish(one)
    _decode(driver, [2, 9], 6)

    assert admitted.reused_tokens == 24
    assert driver.tokens[2] == alone(model, PROMPT, 7)
    assert driver.tokens[9] == alone(model, make_prompt(23, 14), 8)


@pytest.mark.parametrize("family", HALVED)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_are_kept_bit_by_bit(family: str, dtype: mx.Dtype) -> None:
    """In half precision a row from blocks holds the very bits that were kept, through files too."""
    model = MAKERS[family]()
    model.set_dtype(dtype)
    cold, warm = BlockDriver(model), BlockDriver(model)
    cold.begin(1, 0, PROMPT)
    items = cold.spill(list(cold.resident), decodes=[1])
    warm.adopt(restored(items), [tuple(end) for end in _ends(cold, items)])
    again = warm.spill([item.hash for item in items])
    assert [bytes(one.payload) for one in again] == [bytes(one.payload) for one in items]

    warm.resident = dict(cold.resident)
    assert warm.begin(2, 1, PROMPT) == 24
    store_cold, store_warm = cold.executor._store, warm.executor._store
    before, after = store_cold.read_block(0, 0, 29), store_warm.read_block(1, 0, 29)
    assert np.array(before).tobytes() == np.array(after).tobytes()
    _decode(cold, [1], 5)
    _decode(warm, [2], 6)
    assert cold.tokens[1] == warm.tokens[2]
