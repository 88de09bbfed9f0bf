"""Prompts of the cache tests, and their completions from one rank without a cache."""

from functools import cache

from shared.messages import RequestFinished
from tests.multirank.worlds.cluster import Client, cluster

BLOCK = 16
SETTINGS = {"CACHE_BLOCK_TOKENS": str(BLOCK)}
LENGTH = 12
SYSTEM = [20 + (11 * place) % 900 for place in range(5 * BLOCK + 3)]
PROMPTS = [SYSTEM + [30 + (7 * place + 5 * one) % 900 for place in range(9)] for one in range(6)]


@cache
def uncached_tokens() -> dict[int, list[int]]:
    """Return the tokens of each prompt from one rank without a cache."""
    with cluster(1, CACHE_ENABLED="false") as client:
        return {one: generate(client, f"r{one}", prompt)[0] for one, prompt in enumerate(PROMPTS)}


def generate(
    client: Client, name: str, prompt: list[int], **options: object
) -> tuple[list[int], int]:
    """Return the generated tokens and the number of cached prompt tokens of one request."""
    client.submit(name, prompt, max_tokens=LENGTH, **options)
    client.wait_for_ends([name], 60.0)
    end = client.ends[name]
    assert isinstance(end, RequestFinished), end
    assert client.cached[name] == end.cached
    return client.tokens[name], end.cached.memory_tokens + end.cached.stored_tokens
