"""The canary on real ring ranks: what they find, and what a rank that computes wrongly ends in."""

import json
import time
from contextlib import AbstractContextManager

import pytest

from shared.canary_names import parse_decode_name
from shared.model.location import demo_folder
from tests.chaos.parts import Parts
from tests.chaos.stack import Shape
from tests.multirank.cluster import cluster
from tests.multirank.refused_world import DEADLINE_S, ROLES, given_up, running


def wrong(kind: str, **settings: object) -> AbstractContextManager[Parts]:
    """Start a world of two whose rank 1 is wrong."""
    shape = Shape(ranks=2, settings=(("cache.ssd", False), *settings.items()))
    commands = {"rank 1": lambda _: ["-m", "tests.multirank.wrong_rank", kind, "--rank", "1"]}
    return running(Parts(shape, commands, ROLES))


def test_ranks_find_the_same() -> None:
    """Two ring ranks: equal sums and an equal prompt, each with bytes and time."""
    with cluster(2) as client:
        first, second = client.ask_status().ranks
    assert [one.digest for one in first.canary] == [one.digest for one in second.canary]
    assert [one.name for one in first.canary] == [one.name for one in second.canary]
    names = [one.name for one in first.canary]
    assert "sum of 32 KiB and 1 of float32" in names
    assert names[-1].startswith("prompt of ")
    layers = json.loads((demo_folder() / "config.json").read_text())["num_hidden_layers"]
    # Two per layer, and the one by which all get rank 0's ids.
    decodes = [found for name in names if (found := parse_decode_name(name))]
    assert decodes == [(2 * layers + 1, rows) for rows in (1, 2, 4, 8)]
    assert all(one.microseconds > 0.0 and one.bytes > 0 for one in first.canary)


@pytest.mark.proof
def test_an_operator_may_have_the_longest_prompt_on_cpus_too() -> None:
    """`world.canary_prompt_s`: 4,500 tokens through the model, the same bits on both ranks."""
    with cluster(2, WORLD_CANARY_PROMPT_S="120") as client:
        first, second = (rank.canary[-1] for rank in client.ask_status().ranks)
    assert first.name == second.name == "prompt of 4,500 tokens"
    assert first.digest == second.digest
    assert first.bytes == 4 * 4_500


def test_without_the_canary_nothing_is_computed() -> None:
    """world.canary off: the world is ready and has no findings."""
    with cluster(2, WORLD_CANARY="false") as client:
        assert [rank.canary for rank in client.ask_status().ranks] == [[], []]


def test_a_rank_whose_sums_are_wrong_is_caught_and_named() -> None:
    """It says so itself, what and where; two starts in a row end all trying."""
    with wrong("sum") as parts:
        status = given_up(parts)
    assert status.failure == "epochs"
    assert "2 starts in a row" in status.reason
    assert "Rank 1 failed: " in status.reason
    assert "known sums over 2 ranks are wrong here" in status.reason
    assert "element 7 is " in status.reason


@pytest.mark.proof
def test_a_rank_whose_long_prompts_are_wrong_is_caught() -> None:
    """Its sums and its shortest prompts are right: only the digests of a longer one differ."""
    with wrong("prompt") as parts:
        status = given_up(parts)
    assert status.failure == "epochs"
    assert "The canary differs: no result of the prompt of " in status.reason
    assert "rank 0 " in status.reason
    assert "rank 1 " in status.reason


@pytest.mark.proof
def test_without_the_canary_a_wrong_rank_would_serve() -> None:
    """The same rank and no canary: the world becomes ready, so it is the canary that caught it."""
    with wrong("sum", **{"world.canary": False}) as parts:
        until_s = time.monotonic() + DEADLINE_S
        while (status := parts.try_status()) is None or not status.ready:
            assert time.monotonic() < until_s, "it never became ready"
