"""Blocks on real ranks over the ring: a hit is the same on every rank, and never another text."""

import random
from collections.abc import Iterator

import pytest

from tests.multirank.cache_work import LENGTH, PROMPTS, SETTINGS, SYSTEM, ask, reference
from tests.multirank.cluster import Client, cluster


@pytest.fixture(scope="module", params=[2, 4])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a world of 2, then 4 ranks; one world for the tests without a store."""
    reference()
    with cluster(request.param, **SETTINGS) as client:
        yield client
        status = client.ask_status()
        assert status.counters.get("receipts_mismatched_total", 0.0) == 0.0
        assert status.counters["epochs_total"] == 1.0
        assert (status.running, status.waiting) == (0, 0)


def test_a_shared_prefix_is_computed_once(client: Client) -> None:
    """The second prompt with the same beginning reuses all of it, and gets the tokens of cold."""
    first, _ = ask(client, "cold", PROMPTS[0])
    second, found = ask(client, "warm", PROMPTS[1])
    again, whole = ask(client, "again", PROMPTS[0])

    assert found >= len(SYSTEM)
    assert whole == len(PROMPTS[0]) - 1
    assert [first, second, again] == [reference()[0], reference()[1], reference()[0]]


def test_the_next_turn_reuses_what_was_generated(client: Client) -> None:
    """A prompt that goes on from an answer finds the answer's KV too."""
    answer, _ = ask(client, "turn-1", PROMPTS[2])
    conversation = PROMPTS[2] + answer

    _, found = ask(client, "turn-2", [*conversation, 40, 41, 42])

    # The last token of the answer was never an input, so it has no KV.
    assert found == len(conversation) - 1


def test_another_tenant_finds_nothing(client: Client) -> None:
    """A salt hides every prefix from those who do not have it."""
    ask(client, "mine", PROMPTS[3], cache_salt="mine")

    assert ask(client, "theirs", PROMPTS[3], cache_salt="theirs")[1] == 0
    tokens, found = ask(client, "mine-again", PROMPTS[3], cache_salt="mine")
    assert (tokens, found) == (reference()[3], len(PROMPTS[3]) - 1)


def test_traffic_with_shared_prefixes_and_aborts(client: Client) -> None:
    """Whatever arrives and leaves together, every text is that of one rank without a cache."""
    chance = random.Random(5)
    names: dict[str, int] = {}
    for number in range(60):
        one = chance.randrange(len(PROMPTS))
        name = f"traffic-{number}"
        names[name] = one
        client.submit(name, PROMPTS[one], max_tokens=LENGTH)
        if chance.random() < 0.3:
            client.poll(0.02 * chance.random())
            client.abort(name)
        if chance.random() < 0.3:
            client.poll(0.05)
    client.wait(list(names), 120.0)
    for name, one in names.items():
        assert client.tokens[name] == reference()[one][: len(client.tokens[name])]
