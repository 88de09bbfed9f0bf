"""Executor: execution of plans, and refusal of plans that contradict its state."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2
from mlx_lm.models.cache import ConcatenateKVCache, RotatingKVCache

from shared.errors import ConfigError, InvariantBroken
from shared.messages import PrefillChunk, Sampling
from tests.mlx.executor_driver import (
    GREEDY,
    ExecutorDriver,
    admission,
    generate_alone,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MakeModel, WrappedModel

PROMPT = make_prompt(1, 10)


def _chunk(start: int, length: int, *, samples: bool, sequence_id: int = 2) -> dict[str, Any]:
    one = PrefillChunk(sequence_id=sequence_id, start=start, length=length, samples=samples)
    return {"prefill_chunks": [one]}


INVALID_PLANS: dict[str, dict[str, Any]] = {
    "decode of nobody": {"decodes": [99]},
    "drop of nobody": {"dropped": [99]},
    "move of nobody": {"moves": [(99, 0)]},
    "move upwards": {"moves": [(1, 3)]},
    "move onto another": {"moves": [(2, 1)]},
    "slot taken": {"admitted": [admission(3, 1, PROMPT)]},
    "slot beyond the rows": {"admitted": [admission(3, 4, PROMPT)]},
    "admitted twice": {"admitted": [admission(1, 3, PROMPT)]},
    "token beyond the vocabulary": {"admitted": [admission(3, 3, [0, 211])]},
    "prompt longer than the tokens": {"admitted": [admission(3, 3, PROMPT, prompt_tokens=11)]},
    "chunk of nobody": _chunk(0, 4, samples=False, sequence_id=99),
    "chunk with a gap": _chunk(5, 5, samples=True),
    "chunk computed before": _chunk(0, 4, samples=False),
    "chunk past the end": _chunk(4, 7, samples=True),
    "end that does not sample": _chunk(4, 6, samples=False),
    "sample before the end": _chunk(4, 5, samples=True),
    "decode before the prefill has ended": {"decodes": [1, 2]},
    "decodes out of slot order": {"decodes": [1, 5]},
    "decode twice": {"decodes": [1, 1]},
    "drafts of nobody": {"decodes": [1], "drafts": [[3], [4]]},
}


@pytest.mark.parametrize("fields", INVALID_PLANS.values(), ids=INVALID_PLANS.keys())
def test_plan_contradicting_executor_state_raises_invariant_broken(
    make_model: MakeModel, fields: dict[str, Any]
) -> None:
    """A plan that contradicts rows, slots or prefill progress raises InvariantBroken."""
    driver = ExecutorDriver(make_model("qwen3"), row_count=4, row_tokens=32)
    driver.start(5, 0, PROMPT)
    driver.start(1, 1, PROMPT)
    driver.step(admitted=[admission(2, 2, PROMPT)], prefill_chunks=[prefill_chunk(2, 0, 4, 10)])

    with pytest.raises(InvariantBroken):
        driver.launch(**fields)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(("row_count", "row_tokens"), [(1, 32), (2, 11), (2, 12)])
def test_plan_removing_or_shortening_row_of_sequence_is_refused(
    make_model: MakeModel, family: str, row_count: int, row_tokens: int
) -> None:
    """A plan that removes the row of a sequence or makes it too short is refused."""
    driver = ExecutorDriver(make_model(family), row_count=2, row_tokens=32)
    driver.start(1, 1, PROMPT)
    driver.step(decodes=[1])
    driver.step(decodes=[1])
    driver.row_count, driver.row_tokens = row_count, row_tokens

    with pytest.raises(InvariantBroken):
        driver.launch(decodes=[1])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=1), Sampling(seed=1, temperature=0.0)])
def test_step_with_nan_logits_raises_instead_of_returning_token(
    make_model: MakeModel, sampling: Sampling
) -> None:
    """A step whose logits contain NaN raises instead of returning a token."""

    class ScaledLogit(WrappedModel):
        factor = 1.0

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = super().__call__(tokens, cache)
            is_scaled = mx.arange(logits.shape[-1]) == 50
            return mx.where(is_scaled, logits * self.factor, logits)

    model = ScaledLogit(make_model("llama"))
    driver = ExecutorDriver(model)
    driver.start(1, 0, PROMPT, sampling)
    driver.step(decodes=[1])
    model.factor = float("nan")
    launched = driver.launch(decodes=[1])

    with pytest.raises(InvariantBroken, match="not finite"):
        driver.finish(launched)


def test_step_results_list_finished_prefills_before_decodes_in_plan_order(
    make_model: MakeModel,
) -> None:
    """Tokens of finished prefills come first, in plan order, then those of decodes."""
    model = make_model("qwen3")
    prompts = {i: make_prompt(i, n) for i, n in {1: 4, 2: 30, 3: 31, 4: 9, 5: 30}.items()}
    asked = {i: GREEDY if i % 2 else Sampling(seed=i, temperature=0.0) for i in prompts}
    driver = ExecutorDriver(model, row_count=5)
    driver.start(1, 4, prompts[1], asked[1])
    order = [4, 5, 2, 3]
    result = driver.step(
        admitted=[admission(i, i - 2, prompts[i], asked[i]) for i in (2, 3, 4, 5)],
        prefill_chunks=[prefill_chunk(i, 0, len(prompts[i]), len(prompts[i])) for i in order],
        decodes=[1],
    )

    expected = [generate_alone(model, prompts[i], 1)[0] for i in order] + [
        generate_alone(model, prompts[1], 2)[1]
    ]
    assert result.tokens == [[token] for token in expected]
    assert [len(one) for one in result.logprobs] == [0, 1, 0, 1, 1]


def test_plan_without_chunks_and_decodes_returns_receipt_without_tokens(
    make_model: MakeModel,
) -> None:
    """A plan without chunks and decodes returns no tokens and a receipt."""
    driver = ExecutorDriver(make_model("qwen3"))
    first = driver.step()
    driver.start(1, 0, PROMPT)
    last = driver.step(dropped=[1])

    assert first.tokens == last.tokens == []
    assert first.digest != last.digest


def test_receipt_digests_differ_when_seeds_or_receipt_settings_differ(
    make_model: MakeModel,
) -> None:
    """Equal work gives equal digests; another seed or receipt setting gives others."""

    def run(seed: int, *, receipt_logits: bool = True) -> list[bytes]:
        driver = ExecutorDriver(make_model("qwen3"))
        driver.executor = make_executor(make_model("qwen3"), receipt_logits=receipt_logits)
        driver.start(1, 0, PROMPT, Sampling(seed=seed))
        driver.step(decodes=[1])
        return driver.digests

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]
    assert run(1)[0] != run(1, receipt_logits=False)[0]


def test_broadcast_sampling_gives_all_ranks_tokens_of_rank_0(make_model: MakeModel) -> None:
    """With "broadcast" every rank uses the summed ids, to which only rank 0 contributes."""
    model = make_model("qwen3")
    shares: list[Any] = []

    def collective_of(theirs: list[int]) -> Callable[[mx.array], mx.array]:
        def all_sum(ids: mx.array) -> mx.array:
            shares.append(ids)
            return ids + mx.array(theirs, dtype=mx.int32)

        return all_sum

    expected = generate_alone(model, PROMPT, 3)
    tokens = {}
    # The other rank contributes 0 to the sum of rank 0, and token 7 to that of rank 1.
    for rank, theirs in ((0, 0), (1, 7)):
        driver = ExecutorDriver(model)
        driver.executor = make_executor(
            model, rank=rank, world_size=2, sum_ids=collective_of([theirs])
        )
        driver.start(1, 0, PROMPT)
        driver.step(decodes=[1])
        driver.step(decodes=[1])
        tokens[rank] = driver.tokens[1]

    assert tokens == {0: expected, 1: [7, 7, 7]}
    assert [one.tolist() for one in shares] == [[token] for token in expected] + [[0]] * 3
    with pytest.raises(InvariantBroken):
        make_executor(model, world_size=2)


def test_ranks_with_independent_sampling_run_no_collective_for_token_ids(
    make_model: MakeModel,
) -> None:
    """With "independent" the collective for token ids is never run."""

    def never(ids: mx.array) -> mx.array:
        raise AssertionError

    driver = ExecutorDriver(make_model("qwen3"))
    driver.executor = make_executor(
        make_model("qwen3"), world_size=2, synchronization="independent", sum_ids=never
    )
    driver.start(1, 0, PROMPT)

    assert driver.tokens[1] == generate_alone(make_model("qwen3"), PROMPT, 1)


def test_model_failing_on_rows_of_different_lengths_is_refused_when_loaded() -> None:
    """A family that fails on rows of different lengths is refused when it is loaded."""
    args = gemma2.ModelArgs(
        model_type="gemma2",
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        vocab_size=11,
    )

    with pytest.raises(ConfigError, match="different lengths"):
        make_executor(gemma2.Model(args))


@pytest.mark.parametrize("cache", [ConcatenateKVCache(), RotatingKVCache(8, keep=4)])
def test_model_with_unbatchable_cache_class_is_refused_when_loaded(
    make_model: MakeModel, cache: Any
) -> None:
    """A cache class that mlx-lm cannot batch is refused by name when the model is loaded."""

    class ModelWithCache(WrappedModel):
        def make_cache(self) -> list[Any]:
            return [cache for _ in self.wrapped.layers]

    with pytest.raises(ConfigError, match="cannot be batched"):
        make_executor(ModelWithCache(make_model("qwen3")))
