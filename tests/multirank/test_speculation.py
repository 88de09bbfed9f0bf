"""Drafts on real ranks over the ring: equal receipts, and the text of one rank without drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.messages import RolledBack, Sampling
from tests.multirank.test_join import Scheduler
from tests.multirank.world import World

MIXES = [
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8, top_p=0.95),
    Sampling(seed=3, temperature=0.0, frequency_penalty=0.5, top_logprobs=2),
    Sampling(seed=4, temperature=0.7, presence_penalty=0.3),
]
PROMPTS = {one: list(range(40 * one, 43 * one + 3)) for one in range(1, 9)}
SAMPLING = {one: MIXES[one % 4] for one in PROMPTS}
COUNTS = (0, 4, 1, 16, 0, 2, 0, 0)
"""Drafts of the eight rows of a step: so uneven that they are split over two forwards."""

TOKENS = 24


@contextmanager
def _world(folder: Path, size: int) -> Iterator[World]:
    folder.mkdir()
    link = Scheduler(folder)
    try:
        if size == 1:
            link.join_alone()
            link.until(lambda: any(type(one).__name__ == "RankReady" for _, one in link.heard))
        else:
            for rank in range(size):
                link.start(rank, size)
            assert all(ready.can_roll_back for ready in link.join(size))
        yield World(link, PROMPTS, SAMPLING)
    finally:
        link.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """What one rank generates without drafts."""
    with _world(tmp_path_factory.mktemp("one") / "r", 1) as world:
        world.begin()
        for _ in range(TOKENS + 32):
            world.step(decodes=list(PROMPTS))
    return world.tokens


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_on_drafts(tmp_path: Path, expected: dict[int, list[int]], size: int) -> None:
    """Right and wrong drafts of any number beside rows without: receipts are equal on all ranks,
    and each sequence has the text that one rank gives it without drafts."""
    with _world(tmp_path / "r", size) as world:
        world.begin()
        waiting: list[RolledBack] = []
        round_ = accepted = 0
        while min(map(len, world.tokens.values())) < TOKENS:
            drafts = [_drafts(expected, world, one, round_) for one in PROMPTS]
            tokens = world.step(rolled_back=waiting, decodes=list(PROMPTS), drafts=drafts)
            waiting = [
                RolledBack(sequence_id=one, length=len(PROMPTS[one]) + len(world.tokens[one]) - 1)
                for one, some in zip(PROMPTS, drafts, strict=True)
                if some
            ]
            accepted += sum(map(len, tokens)) - len(tokens)
            round_ += 1

    assert accepted > 20
    assert round_ < TOKENS
    for one, got in world.tokens.items():
        assert got == expected[one][: len(got)]


def _drafts(expected: dict[int, list[int]], world: World, one: int, round_: int) -> list[int]:
    if len(world.tokens[one]) >= TOKENS:
        return []
    count = COUNTS[(one + round_) % 8]
    done = len(world.tokens[one])
    drafts = expected[one][done : done + count]
    if count and (one + round_) % 3 == 0:
        drafts[count // 2] = (drafts[count // 2] + 1) % 2_000
    return drafts
