"""The simulation finds bugs: each of these, planted into the real code, breaks a promise in it."""

import pytest

from tests.simulation.faults.planted_bugs import PLANTS
from tests.simulation.run import simulate

SEEDS_MAX = 2_000

FOUND_BEFORE = {
    "a_session_delivers_duplicates": 28,
    "a_session_delivers_past_a_gap": 71,
    "an_old_acknowledgement_counts_for_all": 34,
    "a_session_begins_under_the_old_incarnation": 90,
    "a_moment_of_silence_loses_a_peer": 165,
    "a_dead_peer_is_missed_only_by_its_silence": 10,
    "a_rank_takes_plans_of_any_epoch": 46,
    "a_receipt_of_an_old_epoch_counts": 42,
    "differing_receipts_are_ignored": 15,
    "replay_begins_a_token_too_early": 13,
    "the_best_rank_decides_a_restore": 12,
    "a_block_in_use_is_evicted": 11,
    "a_draft_row_lacks_nothing": 21,
    "a_draft_row_outlives_preemption": 113,
    "a_resumed_request_forgets_its_tokens": 32,
    "requests_of_a_lost_gateway_stay": 10,
}
"""The first seed that showed a bug, where that is not one of the very first: it is tried before all
others. When a change makes it a harmless one the search takes longer, and finds another."""


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    """Some seed, and one of the first, shows what the bug breaks."""
    for seed in [FOUND_BEFORE.get(name, 0), *range(SEEDS_MAX)]:
        with PLANTS[name]():
            outcome = simulate(seed)
        if outcome.violation:
            assert not simulate(seed).violation, "found without the bug, too"
            return
    pytest.fail(f"{name} is not found within {SEEDS_MAX} seeds")


def test_only_bugs_that_are_planted_are_remembered() -> None:
    """A bug that has another name now is not looked for under its old one."""
    assert set(FOUND_BEFORE) <= set(PLANTS)
    assert max(FOUND_BEFORE.values()) < SEEDS_MAX
