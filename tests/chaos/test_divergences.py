"""Mismatched receipts at a real scheduler with ranks without a model."""

import os

import pytest

from tests.chaos import divergences

pytestmark = pytest.mark.alone
COUNT = int(os.environ.get("LOCKSTEP_TEST_DIVERGENCES", "30"))


def test_scheduler_releases_no_token_when_receipts_differ() -> None:
    """Wrong digests, tokens and rows are all detected before a token of their step is sent."""
    result = divergences.run(COUNT, ranks=2, streams=16, seed=1)

    print(
        f"{result.injected} faults in {result.seconds:.1f} s, {result.complete} requests complete"
    )
    assert result.is_good, result
    assert result.injected == COUNT
    assert result.complete > COUNT // 4
