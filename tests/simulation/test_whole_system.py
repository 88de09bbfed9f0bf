"""The whole system under faults, thousands of times: every run keeps every promise.

A failure names its seed; `python -m tests.simulation --seed N --verbose` plays exactly that run.
"""

import os
import subprocess
import sys

import pytest

from tests.effort import cases
from tests.simulation.run import simulate

CHUNKS = cases(2, 100)
SEEDS_PER_CHUNK = 100


@pytest.mark.deep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_promise_is_broken(chunk: int) -> None:
    """I1 to I9 hold at every event, every stream ends right, nothing hangs and nothing is left."""
    broken = {}
    finished = faults = 0
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        outcome = simulate(seed)
        finished += outcome.outcomes.get("finished", 0)
        faults += outcome.faults
        if outcome.violation:
            broken[seed] = outcome.violation

    assert broken == {}
    assert finished > 3 * SEEDS_PER_CHUNK, "hardly a stream has run"
    assert faults > SEEDS_PER_CHUNK, "hardly a fault has struck"


@pytest.mark.parametrize("seed", [31_461, 33_616])
def test_what_was_found_once(seed: int) -> None:
    """Somebody is admitted beside rows that verify, and no row is too short for the padding."""
    assert simulate(seed).violation == ""


@pytest.mark.proof
def test_a_thousand_divergences_release_no_token() -> None:
    """A rank that computed something else is found out at that step, every time (I6)."""
    divergences, broken = 0, {}
    for seed in range(400):
        outcome = simulate(seed, only="_tamper")
        divergences += outcome.divergences
        if outcome.violation:
            broken[seed] = outcome.violation
        if divergences >= 1_000:
            break

    assert broken == {}
    assert divergences >= 1_000


def test_a_seed_is_one_run() -> None:
    """The same seed does the same at the same time, in any process: a failure can be replayed."""
    seeds = range(40)
    code = (
        "from tests.simulation.run import simulate\n"
        f"print([simulate(seed).digest for seed in {seeds!r}])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=100,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = [simulate(seed).digest for seed in seeds]

    assert printed == {f"{here}\n"}
    assert len(set(here)) == len(seeds), "different seeds are different runs"
