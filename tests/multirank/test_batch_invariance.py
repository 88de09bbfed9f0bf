"""`rank_worker.batch_invariant` over HTTP: one request alone, beside others, and again."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep

SETTINGS = (
    "[rank_worker]\nbatch_invariant = true\n[cache]\nblock_tokens = 64\n"
    "[scheduler]\nstep_tokens_max = 300\n"
)
REQUEST: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three four five six seven " * 90,
    "temperature": 0.8,
    "seed": 3,
    "max_tokens": 40,
    "logprobs": 3,
    "return_token_ids": True,
}
"""Its prompt has more than two cells of the grid, and ends within one."""


def _beside(running: RunningLockstep, count: int) -> dict[str, Any]:
    """Return the choice of the request, sent after others that decode while it runs."""
    others = [
        threading.Thread(
            target=running.post,
            args=(
                "/v1/completions",
                {**REQUEST, "prompt": f"{number} seven " * (20 * number), "max_tokens": 150},
            ),
        )
        for number in range(1, count + 1)
    ]
    for one in others:
        one.start()
    choice: dict[str, Any] = running.post("/v1/completions", REQUEST)["choices"][0]
    for one in others:
        one.join()
    return choice


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probabilities_are_same_numbers_alone_and_beside_12_requests(
    ranks: int, tmp_path: Path
) -> None:
    """Prompt chunks, decodes and draws do not depend on others, nor on what the cache holds."""
    with running_lockstep(tmp_path, ranks, settings=SETTINGS) as running:
        first = _beside(running, 12)
        assert [_beside(running, count) for count in (0, 3)] == [first, first]
        # A prompt does not wait for blocks that an equal one will never have kept.
        open_stream = running.stream("/v1/completions", {**REQUEST, "max_tokens": 1_200})
        next(open_stream)
        assert _beside(running, 0) == first
        assert sum(1 for _ in open_stream) > 1_000
        used = running.post("/v1/completions", REQUEST)["usage"]
        assert used["prompt_tokens_details"]["cached_tokens"] % 256 == 0
        assert used["prompt_tokens_details"]["cached_tokens"] > 0
