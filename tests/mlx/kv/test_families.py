"""Every family: sequences in a busy batch get the tokens that they get alone."""

import itertools
from typing import Any

import pytest
from mlx import nn

from services.rank_worker.kv_cache.rows.batch_cache_store import BatchCacheStore
from shared.messages import Sampling
from tests.mlx.executor_driver import (
    GREEDY,
    ExecutorDriver,
    admission,
    generate_alone,
    generate_with_mlx_lm,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MODEL_FACTORIES, PLAIN_FAMILIES, STATEFUL_FAMILIES, MakeModel

FAMILIES = list(MODEL_FACTORIES)
RANDOM = Sampling(seed=2**63 - 1, temperature=0.8, top_p=0.95, frequency_penalty=0.3)


def _assert_matches_mlx_lm(
    model: nn.Module, driver: ExecutorDriver, one: int, prompt: list[int]
) -> None:
    got = driver.tokens[one]
    tokens, distributions = generate_with_mlx_lm(model, prompt, len(got))
    for index, logprobs in enumerate(driver.logprobs[one]):
        distribution = distributions[index]
        best = sorted(distribution, reverse=True)[:3]
        assert logprobs.top_logprobs == pytest.approx(best, abs=2e-3)
        assert logprobs.logprob == pytest.approx(distribution[got[index]], abs=2e-3)
    assert got == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_joining_and_leaving_get_tokens_of_mlx_lm(
    make_model: MakeModel, family: str
) -> None:
    """Sequences of any lengths that join and leave at any step get the tokens of mlx-lm."""
    model = make_model(family)
    prompts = {i: make_prompt(i, n) for i, n in {1: 5, 2: 19, 3: 3, 4: 30, 5: 11}.items()}
    driver = ExecutorDriver(model, row_count=4)
    driver.start(1, 0, prompts[1])
    driver.step(decodes=[1])
    driver.step(
        admitted=[admission(2, 1, prompts[2]), admission(3, 2, prompts[3])],
        prefill_chunks=[prefill_chunk(2, 0, 19, 19), prefill_chunk(3, 0, 3, 3)],
        decodes=[1],
    )
    for _ in range(4):
        driver.step(decodes=[1, 2, 3])
    driver.step(
        dropped=[2],
        admitted=[admission(4, 3, prompts[4])],
        prefill_chunks=[prefill_chunk(4, 0, 30, 30)],
        decodes=[1, 3],
    )
    driver.step(
        admitted=[admission(5, 1, prompts[5])],
        prefill_chunks=[prefill_chunk(5, 0, 11, 11)],
        decodes=[1, 3, 4],
    )
    for _ in range(6):
        driver.step(decodes=[1, 5, 3, 4])
    driver.step(dropped=[1, 3], decodes=[5, 4])
    for _ in range(3):
        driver.step(decodes=[5, 4])
    assert len(driver.tokens[1]) == 15
    for one, prompt in prompts.items():
        _assert_matches_mlx_lm(model, driver, one, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_with_random_weights_generate_varied_tokens(
    make_model: MakeModel, family: str
) -> None:
    """The tiny models generate varied tokens, so a mix-up of rows would be visible."""
    model = make_model(family)
    first = generate_alone(model, make_prompt(1, 5), 15)
    second = generate_alone(model, make_prompt(2, 19), 15)
    assert len(set(first)) > 5
    assert first != second


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_gives_tokens_of_whole_prefill(make_model: MakeModel, family: str) -> None:
    """A prefill in chunks gives the same tokens while another sequence decodes in between."""
    model = make_model(family)
    prompts = {1: make_prompt(8, 6), 2: make_prompt(9, 29)}
    driver = ExecutorDriver(model, row_count=2)
    driver.start(1, 0, prompts[1])
    borders = [0, 1, 12, 20, 29]
    for start, stop in itertools.pairwise(borders):
        driver.step(
            admitted=[admission(2, 1, prompts[2])] if start == 0 else [],
            prefill_chunks=[prefill_chunk(2, start, stop, 29)],
            decodes=[1],
        )
    for _ in range(4):
        driver.step(decodes=[1, 2])
    for one, prompt in prompts.items():
        _assert_matches_mlx_lm(model, driver, one, prompt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_preempted_sequence_resumes_with_tokens_of_uninterrupted_run(
    make_model: MakeModel, family: str, sampling: Sampling
) -> None:
    """A sequence that is dropped and admitted again with its tokens continues unchanged."""
    model = make_model(family)
    prompt, other = make_prompt(3, 13), make_prompt(4, 7)
    expected = generate_alone(model, prompt, 12, sampling)
    driver = ExecutorDriver(model)
    driver.start(9, 0, other)
    driver.start(1, 1, prompt, sampling)
    for _ in range(4):
        driver.step(decodes=[9, 1])
    driver.step(dropped=[1], decodes=[9])
    known = prompt + driver.tokens[1]
    driver.step(
        admitted=[admission(2, 2, known, sampling, prompt_tokens=len(prompt))],
        prefill_chunks=[prefill_chunk(2, 0, 10, len(known))],
        decodes=[9],
    )
    driver.step(prefill_chunks=[prefill_chunk(2, 10, len(known), len(known))])
    for _ in range(6):
        driver.step(decodes=[9, 2])
    assert driver.tokens[1] + driver.tokens[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_launched_ahead_give_tokens_and_digests_of_sequential_plans(
    make_model: MakeModel, family: str
) -> None:
    """Launching a plan before the previous one is finished changes neither tokens nor digests."""
    model = make_model(family)
    prompts = {1: make_prompt(5, 9), 2: make_prompt(6, 17)}
    drivers = [ExecutorDriver(model), ExecutorDriver(model)]
    plans: list[dict[str, Any]] = [
        {
            "admitted": [admission(1, 0, prompts[1], RANDOM)],
            "prefill_chunks": [prefill_chunk(1, 0, 9, 9)],
        },
        {"decodes": [1]},
        {
            "admitted": [admission(2, 1, prompts[2])],
            "prefill_chunks": [prefill_chunk(2, 0, 8, 17)],
            "decodes": [1],
        },
        {"prefill_chunks": [prefill_chunk(2, 8, 17, 17)]},
        *[{"decodes": [1, 2]} for _ in range(4)],
        {"dropped": [1], "decodes": [2]},
        {"decodes": [2]},
    ]
    for fields in plans:
        drivers[0].step(**fields)
    ahead = None
    for fields in plans:
        launched = drivers[1].launch(**fields)
        if ahead is not None:
            drivers[1].finish(ahead)
        ahead = launched
    assert ahead is not None
    drivers[1].finish(ahead)
    assert drivers[0].tokens == drivers[1].tokens
    assert drivers[0].digests == drivers[1].digests


@pytest.mark.parametrize("family", FAMILIES)
def test_row_skipped_in_some_decode_steps_gets_tokens_of_mlx_lm(
    make_model: MakeModel, family: str
) -> None:
    """A row that is not decoded in some steps, and the rows beside it, get the tokens of mlx-lm."""
    model = make_model(family)
    prompts = {i: make_prompt(20 + i, n) for i, n in {1: 4, 2: 12, 3: 9}.items()}
    driver = ExecutorDriver(model)
    for one, prompt in prompts.items():
        driver.start(one, one, prompt)
    for decodes in ([1, 2, 3], [1, 3], [3], [2], [1, 2], [1, 2, 3], [2, 3], [1, 2, 3]):
        driver.step(decodes=decodes)
    for one, prompt in prompts.items():
        _assert_matches_mlx_lm(model, driver, one, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_rows_continue_unchanged_after_moves_and_resizes(
    make_model: MakeModel, family: str
) -> None:
    """Rows continue unchanged after moves and after the arrays grow and shrink."""
    model = make_model(family)
    prompts = {i: make_prompt(30 + i, n) for i, n in {1: 4, 2: 12, 3: 9}.items()}
    driver = ExecutorDriver(model, row_count=3, row_tokens=16)
    for one, prompt in prompts.items():
        driver.start(one, one - 1, prompt)
    driver.step(decodes=[1, 2, 3])
    driver.row_tokens = 40
    driver.row_count = 5
    driver.step(decodes=[1, 2, 3])
    driver.step(dropped=[1], moves=[(3, 0)], decodes=[3, 2])
    driver.row_count = 2
    driver.step(decodes=[3, 2])
    driver.row_tokens = 20
    driver.step(decodes=[3, 2])
    driver.step()
    driver.step(decodes=[3, 2])
    for one, prompt in prompts.items():
        _assert_matches_mlx_lm(model, driver, one, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_making_rows_fewer_and_longer_changes_no_tokens(
    make_model: MakeModel, family: str
) -> None:
    """While a step runs, one plan drops most rows, moves the rest and admits a longer sequence."""
    model = make_model(family)
    prompts = {i: make_prompt(40 + i, 5 + i) for i in (1, 2, 3, 4)} | {5: make_prompt(45, 60)}
    driver = ExecutorDriver(model, row_count=4, row_tokens=32)
    for one in (1, 2, 3, 4):
        driver.start(one, one - 1, prompts[one])
    driver.step(decodes=[1, 2, 3, 4])
    under_way = driver.launch(decodes=[1, 2, 3, 4])
    driver.row_count, driver.row_tokens = 2, 96
    launched = driver.launch(
        dropped=[1, 2, 4],
        moves=[(3, 0)],
        admitted=[admission(5, 1, prompts[5])],
        prefill_chunks=[prefill_chunk(5, 0, 60, 60)],
        decodes=[3],
    )
    driver.finish(under_way)
    driver.finish(launched)
    for _ in range(4):
        driver.step(decodes=[3, 5])
    for one, prompt in prompts.items():
        _assert_matches_mlx_lm(model, driver, one, prompt)


@pytest.mark.parametrize("family", STATEFUL_FAMILIES)
def test_batch_cache_is_freed_when_last_row_leaves(make_model: MakeModel, family: str) -> None:
    """The batch cache is freed with its last row, even if no decode follows."""
    model = make_model(family)
    driver = ExecutorDriver(model)
    for one in (1, 2):
        driver.start(one, one - 1, make_prompt(one, 9))
    driver.step(decodes=[1, 2])
    store = driver.executor.store
    assert isinstance(store, BatchCacheStore)
    driver.step(dropped=[1], decodes=[2])
    assert store._batch
    driver.step(dropped=[2])
    assert not store._batch
    prompt = make_prompt(7, 30)
    driver.start(3, 0, prompt)
    for _ in range(3):
        driver.step(decodes=[3])
    _assert_matches_mlx_lm(model, driver, 3, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_executor_reports_kv_bytes_per_token_and_row(make_model: MakeModel, family: str) -> None:
    """Plain families report bytes per token only; windows and recurrent state add bytes per row."""
    executor = ExecutorDriver(make_model(family)).executor
    assert executor.vocab_size == 211
    assert executor.store.can_roll_back == (family in PLAIN_FAMILIES)
    assert (executor.kv_bytes_per_row > 0) == (family in STATEFUL_FAMILIES)
    expected = {
        "qwen3": 3 * 2 * 2 * 16 * 4,
        "llama": 3 * 2 * 4 * 12 * 4,
        "deepseek_v3": 3 * (16 + 8) * 4,
        "gemma3": 1 * 2 * 2 * 16 * 4,
        "gpt_oss": 1 * 2 * 2 * 16 * 4,
        "qwen3_next": 1 * 2 * 2 * 16 * 4,
        "mamba2": 0,
        "falcon_h1": 2 * 2 * 2 * 16 * 4,
        "deepseek_v32": 2 * (16 + 8 + 2 * 16) * 4,
    }
    assert executor.store.bytes_per_token == expected[family]
    if family == "gemma3":
        assert executor.kv_bytes_per_row == 2 * 8 * 2 * 2 * 16 * 4
