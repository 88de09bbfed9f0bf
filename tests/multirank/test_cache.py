"""Prefix cache on real ranks: hits are equal on all ranks and do not change a text."""

import random
from collections.abc import Iterator

import pytest

from tests.multirank.worlds.cached_prompts import (
    LENGTH,
    PROMPTS,
    SETTINGS,
    SYSTEM,
    generate,
    uncached_tokens,
)
from tests.multirank.worlds.cluster import Client, cluster


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.proof)])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Return a client of a world of 2, then 4 ranks, without a cache store."""
    uncached_tokens()
    with cluster(request.param, **SETTINGS) as client:
        yield client
        status = client.query_status()
        assert status.counters.get("receipts_mismatched_total", 0.0) == 0.0
        assert status.counters["epochs_total"] == 1.0
        assert (status.running, status.waiting) == (0, 0)


def test_prompt_with_cached_prefix_reuses_it_and_gets_same_tokens_as_uncached(
    client: Client,
) -> None:
    """The second prompt with the same prefix reuses it and gets the same tokens as without a
    cache."""
    first, _ = generate(client, "cold", PROMPTS[0])
    second, found = generate(client, "warm", PROMPTS[1])
    again, whole = generate(client, "again", PROMPTS[0])

    assert found >= len(SYSTEM)
    assert whole == len(PROMPTS[0]) - 1
    assert [first, second, again] == [
        uncached_tokens()[0],
        uncached_tokens()[1],
        uncached_tokens()[0],
    ]


def test_prompt_continuing_completion_reuses_kv_of_generated_tokens(client: Client) -> None:
    """A prompt that continues a completion reuses the completion's KV."""
    answer, _ = generate(client, "turn-1", PROMPTS[2])
    conversation = PROMPTS[2] + answer

    _, found = generate(client, "turn-2", [*conversation, 40, 41, 42])

    # The last token of the answer has no KV, because it was never an input.
    assert found == len(conversation) - 1


def test_request_with_other_cache_salt_reuses_no_prefix(client: Client) -> None:
    """A request with another salt finds no cached prefix."""
    generate(client, "mine", PROMPTS[3], cache_salt="mine")

    assert generate(client, "theirs", PROMPTS[3], cache_salt="theirs")[1] == 0
    tokens, found = generate(client, "mine-again", PROMPTS[3], cache_salt="mine")
    assert (tokens, found) == (uncached_tokens()[3], len(PROMPTS[3]) - 1)


def test_random_requests_give_same_tokens_with_cache_as_one_rank_without_cache(
    client: Client,
) -> None:
    """Under random requests and aborts the tokens of each request equal those of one rank without a
    cache."""
    rng = random.Random(5)
    names: dict[str, int] = {}
    for number in range(60):
        one = rng.randrange(len(PROMPTS))
        name = f"traffic-{number}"
        names[name] = one
        client.submit(name, PROMPTS[one], max_tokens=LENGTH)
        if rng.random() < 0.3:
            client.poll(0.02 * rng.random())
            client.abort(name)
        if rng.random() < 0.3:
            client.poll(0.05)
    client.wait_for_ends(list(names), 120.0)
    for name, one in names.items():
        assert client.tokens[name] == uncached_tokens()[one][: len(client.tokens[name])]
