"""The bug that this system must be immune to, on real ranks over the ring.

A known system hung with two concurrent requests on two ranks: the ranks disagreed on who had ended,
and the next all_sum had two shapes. Here ranks never end anything; these tests end requests in
every way at once.
"""

import random
from collections.abc import Iterator
from functools import cache

import pytest

from shared.messages import RequestFinished
from tests.multirank.cluster import Client, cluster

PROMPTS = [[10 + (7 * i + 3 * j) % 900 for j in range(5 + 9 * i)] for i in range(8)]
LENGTH = 30


@cache
def reference() -> dict[int, list[int]]:
    """Return what one rank generates for each prompt, greedily and without stop."""
    with cluster(1) as client:
        for index, prompt in enumerate(PROMPTS):
            client.submit(f"r{index}", prompt, max_tokens=LENGTH)
        client.wait([f"r{index}" for index in range(len(PROMPTS))], 60.0)
        return {index: client.tokens[f"r{index}"] for index in range(len(PROMPTS))}


@pytest.fixture(scope="module", params=[2, 4])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a world of 2, then 4 ranks; one world for all tests of this file."""
    reference()
    with cluster(request.param) as client:
        yield client
        status = client.ask_status()
        assert status.ready
        assert status.counters.get("receipts_mismatched_total", 0.0) == 0.0
        assert status.counters["epochs_total"] == 1.0
        assert (status.running, status.waiting, status.kv_tokens_used) == (0, 0, 0)


def finished(client: Client, name: str) -> RequestFinished:
    """Return how a request finished."""
    end = client.ends[name]
    assert isinstance(end, RequestFinished), end
    return end


def test_two_requests_end_in_the_same_step(client: Client) -> None:
    """Two requests of 30 tokens that start together end together, with one rank's tokens."""
    prompt = PROMPTS[1]
    client.submit("same-a", prompt, max_tokens=LENGTH)
    client.submit("same-b", list(prompt), max_tokens=LENGTH)
    client.wait(["same-a", "same-b"], 60.0)
    assert client.tokens["same-a"] == client.tokens["same-b"] == reference()[1]


def test_one_ends_by_text_and_one_by_length(client: Client) -> None:
    """One ends by a stop token in the step in which the other ends by length."""
    expected = reference()
    stop = expected[2][9]
    count = expected[2].index(stop) + 1
    client.submit("by-stop", PROMPTS[2], max_tokens=LENGTH, stop_ids=[stop])
    client.submit("by-length", PROMPTS[3], max_tokens=count)
    client.wait(["by-stop", "by-length"], 60.0)
    assert finished(client, "by-stop").finish_reason == "stop"
    assert finished(client, "by-length").finish_reason == "length"
    assert client.tokens["by-stop"] == expected[2][:count]
    assert client.tokens["by-length"] == expected[3][:count]


def test_abort_in_the_step_of_the_end(client: Client) -> None:
    """An abort that crosses the end, and a second one, change nothing for the neighbour."""
    client.submit("ends", PROMPTS[0], max_tokens=6)
    client.submit("stays", PROMPTS[4], max_tokens=LENGTH)
    while len(client.tokens["ends"]) < 5:
        client.poll(0.05)
    client.abort("ends")
    client.abort("ends")
    client.wait(["ends", "stays"], 60.0)
    client.abort("ends")
    assert client.tokens["ends"] == reference()[0][: len(client.tokens["ends"])]
    assert client.tokens["stays"] == reference()[4]


@pytest.mark.timeout(600)
def test_random_rounds(client: Client) -> None:
    """200 random rounds, 8 requests at once: no hang, equal receipts, tokens as on one rank."""
    chance = random.Random(5)
    expected = reference()
    # Four spinning ranks on two cores take a quarter of a second a step: shorter completions there.
    longest = 12 if client.ask_status().world_size == 2 else 6
    wanted: dict[str, list[int]] = {}
    aborted = set()
    for round_ in range(200):
        active = [name for name in wanted if name not in client.ends]
        while len(active) >= 8:
            client.poll(0.05)
            active = [name for name in active if name not in client.ends]
        index = chance.randrange(len(PROMPTS))
        length = chance.randrange(1, longest)
        stops = chance.sample(expected[index], 2) if chance.random() < 0.4 else []
        name = f"round-{round_}"
        wanted[name] = _until(expected[index][:length], stops)
        client.submit(name, PROMPTS[index], max_tokens=length, stop_ids=stops)
        if active and chance.random() < 0.25:
            victim = chance.choice(active)
            aborted.add(victim)
            client.abort(victim)
            if chance.random() < 0.5:
                client.abort(victim)
        client.poll(0.0 if chance.random() < 0.7 else 0.03)
    client.wait(list(wanted), 200.0)
    for name, tokens in wanted.items():
        if finished(client, name).finish_reason == "abort":
            assert name in aborted
            assert client.tokens[name] == tokens[: len(client.tokens[name])]
        else:
            assert client.tokens[name] == tokens


def _until(tokens: list[int], stops: list[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens
