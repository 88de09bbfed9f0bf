"""Concurrent ends of requests on real ranks.

Another system hung with two concurrent requests on two ranks: the ranks disagreed about a finished
request, and the next all_sum had two shapes. In Lockstep ranks never end a sequence.
"""

import random
from collections.abc import Iterator
from functools import cache

import pytest

from shared.messages import RequestFinished
from tests.multirank.worlds.cluster import Client, cluster

PROMPTS = [[10 + (7 * i + 3 * j) % 900 for j in range(5 + 9 * i)] for i in range(8)]
LENGTH = 30


@cache
def single_rank_tokens() -> dict[int, list[int]]:
    """Return the tokens of each prompt from one rank, greedy and without stop tokens."""
    with cluster(1) as client:
        for index, prompt in enumerate(PROMPTS):
            client.submit(f"r{index}", prompt, max_tokens=LENGTH)
        client.wait_for_ends([f"r{index}" for index in range(len(PROMPTS))], 60.0)
        return {index: client.tokens[f"r{index}"] for index in range(len(PROMPTS))}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.proof)])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Return a client of a world of 2, then 4 ranks; all tests of this file share it."""
    single_rank_tokens()
    with cluster(request.param) as client:
        yield client
        status = client.query_status()
        assert status.ready
        assert status.counters.get("receipts_mismatched_total", 0.0) == 0.0
        assert status.counters["epochs_total"] == 1.0
        assert (status.running, status.waiting, status.kv_tokens_used) == (0, 0, 0)


def finished_request(client: Client, name: str) -> RequestFinished:
    """Return the message with which a request finished."""
    end = client.ends[name]
    assert isinstance(end, RequestFinished), end
    return end


def test_two_requests_that_finish_together_get_same_tokens_as_on_one_rank(client: Client) -> None:
    """Two requests of equal length that start together get the tokens that one rank generates."""
    prompt = PROMPTS[1]
    client.submit("same-a", prompt, max_tokens=LENGTH)
    client.submit("same-b", list(prompt), max_tokens=LENGTH)
    client.wait_for_ends(["same-a", "same-b"], 60.0)
    assert client.tokens["same-a"] == client.tokens["same-b"] == single_rank_tokens()[1]


def test_one_step_finishes_requests_by_stop_token_and_by_length(client: Client) -> None:
    """One request finishes by a stop token in the step in which another finishes by length."""
    expected = single_rank_tokens()
    stop = expected[2][9]
    count = expected[2].index(stop) + 1
    client.submit("by-stop", PROMPTS[2], max_tokens=LENGTH, stop_ids=[stop])
    client.submit("by-length", PROMPTS[3], max_tokens=count)
    client.wait_for_ends(["by-stop", "by-length"], 60.0)
    assert finished_request(client, "by-stop").finish_reason == "stop"
    assert finished_request(client, "by-length").finish_reason == "length"
    assert client.tokens["by-stop"] == expected[2][:count]
    assert client.tokens["by-length"] == expected[3][:count]


def test_abort_near_last_step_leaves_tokens_of_other_request_unchanged(client: Client) -> None:
    """Repeated aborts of a request that is about to end leave the tokens of another request
    unchanged."""
    client.submit("ends", PROMPTS[0], max_tokens=6)
    client.submit("stays", PROMPTS[4], max_tokens=LENGTH)
    client.poll_until(lambda: len(client.tokens["ends"]) >= 5, 60.0, "no 5 tokens")
    client.abort("ends")
    client.abort("ends")
    client.wait_for_ends(["ends", "stays"], 60.0)
    client.abort("ends")
    assert client.tokens["ends"] == single_rank_tokens()[0][: len(client.tokens["ends"])]
    assert client.tokens["stays"] == single_rank_tokens()[4]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_200_requests_with_random_aborts_get_same_tokens_as_on_one_rank(client: Client) -> None:
    """200 random requests, 8 at a time, all end, and their tokens equal those of one rank."""
    rng = random.Random(5)
    expected = single_rank_tokens()
    # Four ranks on two cores take a quarter of a second per step, so completions are shorter.
    longest = 12 if client.query_status().world_size == 2 else 6
    expected_tokens: dict[str, list[int]] = {}
    aborted = set()
    for number in range(200):

        def active_requests() -> list[str]:
            return [name for name in expected_tokens if name not in client.ends]

        client.poll_until(lambda: len(active_requests()) < 8, 60.0, "eight requests never end")
        active = active_requests()
        index = rng.randrange(len(PROMPTS))
        length = rng.randrange(1, longest)
        stops = rng.sample(expected[index], 2) if rng.random() < 0.4 else []
        name = f"round-{number}"
        expected_tokens[name] = _cut_at_stop(expected[index][:length], stops)
        client.submit(name, PROMPTS[index], max_tokens=length, stop_ids=stops)
        if active and rng.random() < 0.25:
            victim = rng.choice(active)
            aborted.add(victim)
            client.abort(victim)
            if rng.random() < 0.5:
                client.abort(victim)
        client.poll(0.0 if rng.random() < 0.7 else 0.03)
    client.wait_for_ends(list(expected_tokens), 200.0)
    for name, tokens in expected_tokens.items():
        if finished_request(client, name).finish_reason == "abort":
            assert name in aborted
            assert client.tokens[name] == tokens[: len(client.tokens[name])]
        else:
            assert client.tokens[name] == tokens


def _cut_at_stop(tokens: list[int], stops: list[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
