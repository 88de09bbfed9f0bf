"""The simulation finds bugs: each of these, planted into the real code, breaks a promise in it."""

import pytest

from tests.simulation.mutations import PLANTS
from tests.simulation.run import simulate

SEEDS_MAX = 2_000


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    """Some seed, and one of the first, shows what the bug breaks."""
    for seed in range(SEEDS_MAX):
        with PLANTS[name]():
            outcome = simulate(seed)
        if outcome.violation:
            assert not simulate(seed).violation, "found without the bug, too"
            return
    pytest.fail(f"{name} is not found within {SEEDS_MAX} seeds")
