"""Blocks on real ranks over the ring: a hit is the same on every rank, and never another text."""

import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shared.messages import RequestFinished
from tests.multirank.cluster import Client, cluster

BLOCK = 16
SETTINGS = {"CACHE_BLOCK_TOKENS": str(BLOCK)}
LENGTH = 12
SYSTEM = [20 + (11 * place) % 900 for place in range(5 * BLOCK + 3)]
PROMPTS = [SYSTEM + [30 + (7 * place + 5 * one) % 900 for place in range(9)] for one in range(6)]


@cache
def reference() -> dict[int, list[int]]:
    """Return what one rank without any cache generates for each prompt."""
    with cluster(1, CACHE_ENABLED="false") as client:
        return {one: _ask(client, f"r{one}", prompt)[0] for one, prompt in enumerate(PROMPTS)}


def _ask(client: Client, name: str, prompt: list[int], **options: object) -> tuple[list[int], int]:
    """Return (tokens, tokens of the prompt that were found) of one request."""
    client.submit(name, prompt, max_tokens=LENGTH, **options)
    client.wait([name], 60.0)
    end = client.ends[name]
    assert isinstance(end, RequestFinished), end
    assert client.cached[name] == end.cached
    return client.tokens[name], end.cached.memory_tokens + end.cached.stored_tokens


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
    first, _ = _ask(client, "cold", PROMPTS[0])
    second, found = _ask(client, "warm", PROMPTS[1])
    again, whole = _ask(client, "again", PROMPTS[0])

    assert found >= len(SYSTEM)
    assert whole == len(PROMPTS[0]) - 1
    assert [first, second, again] == [reference()[0], reference()[1], reference()[0]]


def test_the_next_turn_reuses_what_was_generated(client: Client) -> None:
    """A prompt that goes on from an answer finds the answer's KV too."""
    answer, _ = _ask(client, "turn-1", PROMPTS[2])
    conversation = PROMPTS[2] + answer

    _, found = _ask(client, "turn-2", [*conversation, 40, 41, 42])

    # The last token of the answer was never an input, so it has no KV.
    assert found == len(conversation) - 1


def test_another_tenant_finds_nothing(client: Client) -> None:
    """A salt hides every prefix from those who do not have it."""
    _ask(client, "mine", PROMPTS[3], cache_salt="mine")

    assert _ask(client, "theirs", PROMPTS[3], cache_salt="theirs")[1] == 0
    tokens, found = _ask(client, "mine-again", PROMPTS[3], cache_salt="mine")
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


def _spilled(client: Client, blocks: int) -> None:
    """Wait until so many blocks are stored on every rank."""
    until_s = time.monotonic() + 30.0
    while client.ask_status().counters.get("cache_blocks_spilled_total", 0.0) < blocks:
        assert time.monotonic() < until_s, client.ask_status().counters
        time.sleep(0.05)


def _fill(ranks: int, blocks: Path) -> None:
    with cluster(ranks, blocks, **SETTINGS) as client:
        tokens, found = _ask(client, "cold", PROMPTS[0])
        assert (tokens, found) == (reference()[0], 0)
        _spilled(client, len(PROMPTS[0]) // BLOCK)


@pytest.mark.parametrize("damage", ["nothing", "deleted", "flipped", "torn"])
def test_blocks_outlive_all_processes(tmp_path: Path, damage: str) -> None:
    """After a restart blocks come from SSD; what one rank has lost, no rank uses."""
    _fill(2, tmp_path)
    (folder,) = tmp_path.glob("*/rank-1-of-2")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    assert files
    for path in files if damage != "nothing" else []:
        content = bytearray(path.read_bytes())
        if damage == "deleted":
            path.unlink()
        elif damage == "flipped":
            content[-7] ^= 4
            path.write_bytes(content)
        else:
            path.write_bytes(content[: len(content) // 2])

    with cluster(2, tmp_path, **SETTINGS) as client:
        tokens, found = _ask(client, "restored", PROMPTS[0])
        status = client.ask_status()

    assert tokens == reference()[0]
    whole = len(PROMPTS[0]) // BLOCK * BLOCK
    assert found == whole if damage == "nothing" else found < whole
    assert status.counters["epochs_total"] == 1.0


def test_another_world_size_is_a_clean_miss(tmp_path: Path) -> None:
    """What two ranks have stored is not for one rank: nothing is found, nothing is wrong."""
    _fill(2, tmp_path)
    with cluster(1, tmp_path, **SETTINGS) as client:
        assert _ask(client, "alone", PROMPTS[0]) == (reference()[0], 0)
