"""Receipts that differ, many times, at a real scheduler with ranks that have no model."""

import os

import pytest

from tests.chaos import divergences

pytestmark = pytest.mark.alone
COUNT = int(os.environ.get("LOCKSTEP_TEST_DIVERGENCES", "30"))


def test_no_token_of_a_step_with_a_lie_leaves() -> None:
    """Flipped digests, wrong tokens and wrong rows are all found, before anything was sent."""
    result = divergences.run(COUNT, ranks=2, streams=16, seed=1)

    print(f"{result.told} lies in {result.seconds:.1f} s, {result.complete} requests complete")
    assert result.is_good, result
    assert result.told == COUNT
    assert result.complete > COUNT // 4
