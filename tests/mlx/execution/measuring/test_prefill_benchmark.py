"""`lockstep bench prefill`: the steps that compute the prompts, and their times."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.fake_ranks.prompt_timer import PromptTimer
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.measuring.processes import LOCKSTEP_COMMAND
from services.rank_worker.device.execution_profile import ExecutionProfile
from shared.clock import ManualClock
from shared.configuration.settings import SchedulerConfig
from shared.errors import UsageError
from tests.mlx.executor_driver import make_executor
from tests.mlx.models import MakeModel, make_llama

ROUNDS = 2
CACHED = 300
"""More tokens than the filler's block has."""
CHUNKS = [(300, 20), (180, 12), (240, 16)]
"""Begins and lengths of three prompts of up to 20 tokens after up to CACHED."""


def _timer(
    model: Any, has_queue: bool = False, step_tokens_max: int = 8_192
) -> tuple[PromptTimer, list[list[tuple[int, int]]]]:
    """Return a timer, and the begins and lengths of the chunks of each step, which takes 1 s."""
    executor = make_executor(model, profile=ExecutionProfile(has_queue=has_queue))
    clock, steps, finish = ManualClock(), [], executor.finish

    def record(launched: Any) -> Any:
        if launched.plan.prefill_chunks:
            steps.append([(one.start, one.length) for one in launched.plan.prefill_chunks])
            clock.advance(1.0)
        return finish(launched)

    vars(executor)["finish"] = record
    rows = RowFiller(executor, SchedulerConfig(), 4_096, lambda: 2**30)
    return PromptTimer(executor, rows, step_tokens_max, has_queue, clock), steps


@pytest.mark.parametrize("has_queue", [False, True])
def test_prompts_are_computed_together_and_one_by_one_in_turn(has_queue: bool) -> None:
    """Rows have their cached tokens before the time begins, and all prompts after it ends."""
    timer, steps = _timer(make_llama(3), has_queue)
    found = timer.measure(3, 20, CACHED, ROUNDS)
    assert found == {
        "together_ms": 1e3,
        "one_by_one_ms": 3e3,
        "together_per_one_by_one": pytest.approx(1 / 3),
        "tokens_per_s": sum(length for _, length in CHUNKS),
    }
    # The block of which rows consist is computed once, as a prompt of its own.
    own = steps[1:]
    assert len(own) == ROUNDS * 4
    together, *apart = own[:4]
    assert sorted(together) == sorted(CHUNKS)
    assert apart == [[one] for one in together]
    assert own[4:] == own[:4]
    store = timer.executor.store
    assert [store.length(slot) for slot in range(3)] == [sum(one) for one in together]


def test_steps_have_no_more_prompt_tokens_than_the_setting_allows() -> None:
    """A prompt that does not fit any more begins the next step."""
    timer, steps = _timer(make_llama(3), step_tokens_max=30)
    timer.measure(4, 20, 0, 1)
    assert [[length for _, length in step] for step in steps[1:4]] == [[15], [20], [18, 12]]


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "mamba2"])
def test_prompts_of_every_kind_of_rows_are_computed(make_model: MakeModel, family: str) -> None:
    """Rows that cannot be rebuilt from blocks get their cached tokens by other steps before."""
    timer, _ = _timer(make_model(family))
    for cached in (40, 0):
        found = timer.measure(2, 20, cached, 1)
        assert found["together_per_one_by_one"] == 0.5
        lengths = sorted(timer.executor.store.length(slot) for slot in (0, 1))
        assert lengths == ([36, 60] if cached else [12, 20])


@pytest.mark.parametrize(
    ("prompts", "tokens", "cached", "message"),
    [
        (10, 20, 0, "23 or more"),
        (10, 2_000, 20, "23 or more"),
        (2, 2_000, 2_097, "4096 at most"),
    ],
)
def test_prompts_that_cannot_be_are_refused_in_a_sentence(
    prompts: int, tokens: int, cached: int, message: str
) -> None:
    """The next measurement is not affected."""
    timer, _ = _timer(make_llama(3))
    with pytest.raises(UsageError, match=message):
        timer.measure(prompts, tokens, cached, 1)
    assert timer.measure(1, 20, 0, 1)["together_ms"] == 1e3


@pytest.mark.proof
def test_bench_prefill_of_demo_model_prints_each_case(tmp_path: Path) -> None:
    """The command measures new prompts and those after cached tokens, in a process of its own."""
    options = ["--model", "demo", "--quick", "--repeats", "1", "--json", "--logs", str(tmp_path)]
    done = subprocess.run(
        [*LOCKSTEP_COMMAND, "bench", "prefill", *options, "--prompts", "3", "--cached", "0,64"],
        check=True,
        capture_output=True,
        timeout=300,
    )
    cases = json.loads(done.stdout)["cases"]
    assert [case["conditions"] for case in cases] == [
        {"prompts": 3, "tokens": 64, "cached": cached} for cached in (0, 64)
    ]
    for case in cases:
        found = {name: one["median"] for name, one in case["series"]["lockstep"].items()}
        ratio = found["together_ms"] / found["one_by_one_ms"]
        assert found["together_per_one_by_one"] == pytest.approx(ratio)
