"""Grammars over HTTP when a rank is killed: the next epoch compiles them again and goes on."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.multirank.grammars.test_grammars import LIST, slow_schema
from tests.support.captured_process import READY_DEADLINE_S
from tests.support.waiting import wait_until

LONG_LIST = LIST.replace("{6,9}", "{40,60}")
REQUEST: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "A list of words: ",
    "guided_regex": LONG_LIST,
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 500,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """Two ranks over the ring."""
    with running_lockstep(tmp_path_factory.mktemp("run"), 2) as running:
        yield running


@pytest.mark.proof
def test_constrained_stream_is_unchanged_when_a_rank_is_killed_in_the_middle(
    pair: RunningLockstep,
) -> None:
    """The matchers of the next epoch take the tokens so far, and masks go on from there."""
    expected = pair.post("/v1/completions", REQUEST)["choices"][0]
    stream = pair.stream("/v1/completions", REQUEST)
    events = [next(stream) for _ in range(20)]
    os.kill(pair.children()["rank-worker 1"], signal.SIGKILL)
    events += list(stream)
    assert events[-1] == "[DONE]"
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert expected["finish_reason"] == "stop"
    assert re.fullmatch(LONG_LIST, text)
    assert text == expected["text"]
    pair.wait_for_line("ready again")


@pytest.mark.proof
def test_request_goes_on_when_a_rank_is_killed_before_it_has_compiled_the_grammar(
    pair: RunningLockstep,
) -> None:
    """The grammar is compiled again in the next epoch, and the answer matches it."""
    large = {"name": "large", "schema": slow_schema(2_000)}
    body = {
        "model": "lockstep-demo",
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": large},
        "temperature": 0,
        "max_tokens": 16,
    }
    rank = pair.children()["rank-worker 0"]
    # Stopped before the request, it cannot have compiled the grammar when it is killed.
    os.kill(rank, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pair.post, "/v1/chat/completions", body)
        wait_until(lambda: _running(pair) == 1, READY_DEADLINE_S, failure="it was not admitted")
        os.kill(rank, signal.SIGKILL)
        ended = answer.result(READY_DEADLINE_S)
    assert ended["choices"][0]["message"]["content"].lstrip().startswith("{")
    assert ended["usage"]["completion_tokens"] > 0


def _running(pair: RunningLockstep) -> int:
    """Return the number of running sequences, as the gateway knows it."""
    with urlopen(f"http://127.0.0.1:{pair.port}/v1/lockstep/status", timeout=10) as answer:
        return int(json.load(answer)["scheduler"]["running"])
