"""Mutation tests: the simulation finds bugs that are planted into the real code."""

import pytest

from tests.simulation.faults.planted_bugs import PLANTED_BUGS
from tests.simulation.run import simulate

SEEDS_MAX = 2_000

FAILING_SEEDS = {
    "a_session_delivers_duplicates": 56,
    "a_session_delivers_past_a_gap": 71,
    "an_old_acknowledgement_counts_for_all": 34,
    "a_session_begins_under_the_old_incarnation": 90,
    "a_moment_of_silence_loses_a_peer": 165,
    "a_dead_peer_is_missed_only_by_its_silence": 10,
    "a_rank_takes_plans_of_any_epoch": 46,
    "a_rank_outlives_its_scheduler": 2,
    "hung_steps_are_not_noticed": 0,
    "a_receipt_of_an_old_epoch_counts": 42,
    "one_sequence_is_not_requeued": 6,
    "ranks_are_not_told_to_leave": 1,
    "a_lost_rank_does_not_end_the_epoch": 4,
    "tokens_leave_before_all_receipts": 1,
    "differing_receipts_are_ignored": 15,
    "tokens_are_sent_twice": 0,
    "a_token_is_skipped": 0,
    "replay_begins_a_token_too_early": 13,
    "a_slot_is_not_given_back": 0,
    "plans_omit_dropped_sequences": 0,
    "the_best_rank_decides_a_restore": 12,
    "a_block_in_use_is_evicted": 11,
    "unread_draft_row_tokens_are_ignored": 21,
    "a_draft_row_outlives_preemption": 113,
    "a_resumed_request_forgets_its_tokens": 32,
    "requests_are_not_resumed": 2,
    "requests_of_a_lost_gateway_stay": 10,
}
"""A seed that finds each bug. A change of the code may make another seed necessary:
`test_at_least_one_of_2000_simulated_seeds_detects_each_planted_bug` tells which one."""


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_simulation_of_known_seed_detects_its_planted_bug(name: str) -> None:
    """The run of the bug's known seed violates a check."""
    with PLANTED_BUGS[name]():
        outcome = simulate(FAILING_SEEDS[name])

    assert outcome.violation, "another seed is needed in FAILING_SEEDS: run `make proofs`"


@pytest.mark.proof
@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_at_least_one_of_2000_simulated_seeds_detects_each_planted_bug(name: str) -> None:
    """At least one of 2,000 seeds finds the bug, and passes without it."""
    for seed in [FAILING_SEEDS[name], *range(SEEDS_MAX)]:
        with PLANTED_BUGS[name]():
            outcome = simulate(seed)
        if outcome.violation:
            assert not simulate(seed).violation, f"seed {seed} fails without the bug, too"
            if seed != FAILING_SEEDS[name]:
                print(f"{name}: the first seed that finds it is {seed}")
            return
    pytest.fail(f"none of {SEEDS_MAX} seeds finds {name}")


def test_every_planted_bug_has_a_known_seed() -> None:
    """The table of seeds names exactly the planted bugs."""
    assert set(FAILING_SEEDS) == set(PLANTED_BUGS)
    assert max(FAILING_SEEDS.values()) < SEEDS_MAX
