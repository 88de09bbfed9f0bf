"""Gathers of the canary: exchanges of a divided head, checked against known results."""

import hashlib
import statistics

import mlx.core as mx
import numpy as np

from services.rank_worker.canary.sums import period_indices, summand
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.clock import Clock
from shared.errors import CanaryFailed
from shared.messages import CanaryFinding

SMALL_COUNT = 65
"""Numbers that a rank gives to the smaller gather, about those of a few candidates."""

REPETITIONS = 4
"""Gathers of each size; the first is not timed."""


def check_gathers(
    world: Collectives, vocabulary: VocabularyPart, clock: Clock
) -> list[CanaryFinding]:
    """Gather known numbers of all ranks and compare every one.

    Every rank runs all gathers even after an error, so that the ranks stay in step.

    Args:
        world: all ranks call this at the same point.
        vocabulary: divided; the larger gather has a number for each token of a part.
        clock: measures durations.

    Returns:
        One finding per size: digest of the results, bytes that a rank gives, and median
        microseconds.

    Raises:
        CanaryFailed: a number is wrong on this rank.
    """
    findings, wrong = [], []
    for count in (SMALL_COUNT, vocabulary.part_size):
        indices = period_indices(count, world.world_size)
        digest = hashlib.blake2b(digest_size=16)
        seconds: list[float] = []
        name = f"gather of {count:,} float32"
        for repetition in range(REPETITIONS):
            given = [
                summand(rank, world.world_size, repetition)[indices].astype(np.float32)
                for rank in range(world.world_size)
            ]
            own = mx.array(given[world.rank])
            mx.eval(own)
            began_s = clock.now()
            gathered = world.gather_arrays(own)
            mx.eval(gathered)
            seconds.append(clock.now() - began_s)
            found, expected = np.array(gathered), np.concatenate(given)
            digest.update(found.tobytes())
            if not np.array_equal(found, expected):
                wrong.append(f"{name}: {int((found != expected).sum()):,} are wrong")
        findings.append(
            CanaryFinding(
                name=name,
                digest=digest.digest(),
                bytes=4 * count,
                microseconds=statistics.median(seconds[1:]) * 1e6,
            )
        )
    if wrong:
        raise CanaryFailed(
            f"{len(wrong)} known gathers over {world.world_size} ranks are wrong here. "
            f"{wrong[0]}. Check cables and drivers of the links between the ranks, or set "
            "world.split_vocabulary to off."
        )
    return findings
