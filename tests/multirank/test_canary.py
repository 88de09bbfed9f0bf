"""The canary on real ranks: equal results, and detection of a rank with wrong results."""

import json
from contextlib import AbstractContextManager

import pytest

from shared.measurements.canary_names import parse_decode_name
from shared.model.location import demo_folder
from tests.chaos.cluster.stack import StackOptions
from tests.chaos.cluster.unsupervised_stack import UnsupervisedStack
from tests.multirank.worlds.cluster import cluster
from tests.multirank.worlds.refused_world import DEADLINE_S, ROLES, run_stack, wait_for_failure
from tests.support.waiting import wait_until


def faulty_world(kind: str, **settings: object) -> AbstractContextManager[UnsupervisedStack]:
    """Start a world of two whose rank 1 has wrong results of this kind."""
    options = StackOptions(ranks=2, settings=(("cache.ssd", False), *settings.items()))
    commands = {
        "rank 1": lambda _: ["-m", "tests.multirank.worlds.faulty_rank", kind, "--rank", "1"]
    }
    return run_stack(UnsupervisedStack(options, commands, ROLES))


def test_two_ranks_report_equal_canary_results() -> None:
    """Two ranks report equal sums and an equal prompt, each with bytes and time."""
    with cluster(2) as client:
        first, second = client.query_status().ranks
    assert [one.digest for one in first.canary] == [one.digest for one in second.canary]
    assert [one.name for one in first.canary] == [one.name for one in second.canary]
    names = [one.name for one in first.canary]
    assert "sum of 32 KiB and 1 of float32" in names
    assert names[-1].startswith("prompt of ")
    layers = json.loads((demo_folder() / "config.json").read_text())["num_hidden_layers"]
    # Two collectives per layer, and one that distributes rank 0's token ids.
    decodes = [found for name in names if (found := parse_decode_name(name))]
    assert decodes == [(2 * layers + 1, rows) for rows in (1, 2, 4, 8)]
    assert all(one.microseconds > 0.0 and one.bytes > 0 for one in first.canary)


@pytest.mark.proof
def test_canary_runs_4500_token_prompt_when_canary_prompt_s_is_120() -> None:
    """With `world.canary_prompt_s` of 120 a prompt of 4,500 tokens runs with equal bits."""
    with cluster(2, WORLD_CANARY_PROMPT_S="120") as client:
        first, second = (rank.canary[-1] for rank in client.query_status().ranks)
    assert first.name == second.name == "prompt of 4,500 tokens"
    assert first.digest == second.digest
    assert first.bytes == 4 * 4_500


@pytest.mark.proof
def test_world_with_canary_off_is_ready_without_canary_results() -> None:
    """With `world.canary` off the world is ready without canary results."""
    with cluster(2, WORLD_CANARY="false") as client:
        assert [rank.canary for rank in client.query_status().ranks] == [[], []]


@pytest.mark.proof
def test_status_names_rank_with_wrong_collective_sums_after_two_failed_starts() -> None:
    """A rank with wrong sums fails the canary of two starts in a row; the status names the rank and
    the first wrong element."""
    with faulty_world("sum") as stack:
        status = wait_for_failure(stack)
    assert status.failure == "epochs"
    assert "2 starts in a row" in status.reason
    assert "Rank 1 failed: " in status.reason
    assert "known sums over 2 ranks are wrong here" in status.reason
    assert "element 7 is " in status.reason


@pytest.mark.proof
def test_rank_with_wrong_logits_of_long_prompt_fails_canary() -> None:
    """A rank with correct sums and wrong logits of long prompts is found by the prompt's digest."""
    with faulty_world("prompt") as stack:
        status = wait_for_failure(stack)
    assert status.failure == "epochs"
    assert "The canary differs: no result of the prompt of " in status.reason
    assert "rank 0 " in status.reason
    assert "rank 1 " in status.reason


@pytest.mark.proof
def test_world_with_faulty_rank_becomes_ready_when_canary_is_off() -> None:
    """Without the canary the same faulty world becomes ready."""
    with faulty_world("sum", **{"world.canary": False}) as stack:
        wait_until(
            lambda: (status := stack.try_status()) is not None and status.ready,
            DEADLINE_S,
            failure="the world is not ready",
        )
