"""Draft tokens of the scheduler, verified by real ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.messages import RolledBack, Sampling
from tests.multirank.worlds.planned_world import PlannedWorld
from tests.multirank.worlds.scripted_scheduler import ScriptedScheduler

MIXES = [
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8, top_p=0.95),
    Sampling(seed=3, temperature=0.0, frequency_penalty=0.5, top_logprobs=2),
    Sampling(seed=4, temperature=0.7, presence_penalty=0.3),
]
PROMPTS = {one: list(range(40 * one, 43 * one + 3)) for one in range(1, 9)}
SAMPLING = {one: MIXES[one % 4] for one in PROMPTS}
COUNTS = (0, 4, 1, 16, 0, 2, 0, 0)
"""Draft counts of the eight rows of a step; uneven, so that a step needs two forward passes."""

TOKENS = 24


@contextmanager
def _join_world(folder: Path, size: int) -> Iterator[PlannedWorld]:
    folder.mkdir()
    link = ScriptedScheduler(folder)
    try:
        if size == 1:
            link.join_rank_0()
            link.poll_until(
                lambda: any(type(one).__name__ == "RankReady" for _, one in link.messages)
            )
        else:
            for rank in range(size):
                link.start(rank, size)
            assert all(ready.can_roll_back for ready in link.join_world(size))
        yield PlannedWorld(link, PROMPTS, SAMPLING)
    finally:
        link.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Return the tokens of one rank without drafts."""
    with _join_world(tmp_path_factory.mktemp("one") / "r", 1) as world:
        world.prefill()
        for _ in range(TOKENS + 32):
            world.step(decodes=list(PROMPTS))
    return world.tokens


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_right_and_wrong_drafts_in_step_plans_do_not_change_generated_tokens(
    tmp_path: Path, expected: dict[int, list[int]], size: int
) -> None:
    """With right and wrong drafts in the step plans, receipts are equal, and the tokens equal those
    of one rank without drafts."""
    with _join_world(tmp_path / "r", size) as world:
        world.prefill()
        rolled_back: list[RolledBack] = []
        step = accepted = 0
        while min(map(len, world.tokens.values())) < TOKENS:
            drafts = [_drafts(expected, world, one, step) for one in PROMPTS]
            tokens = world.step(rolled_back=rolled_back, decodes=list(PROMPTS), drafts=drafts)
            rolled_back = [
                RolledBack(sequence_id=one, length=len(PROMPTS[one]) + len(world.tokens[one]) - 1)
                for one, row_drafts in zip(PROMPTS, drafts, strict=True)
                if row_drafts
            ]
            accepted += sum(map(len, tokens)) - len(tokens)
            step += 1

    assert accepted > 20
    assert step < TOKENS
    for one, tokens_so_far in world.tokens.items():
        assert tokens_so_far == expected[one][: len(tokens_so_far)]


def _drafts(expected: dict[int, list[int]], world: PlannedWorld, one: int, step: int) -> list[int]:
    if len(world.tokens[one]) >= TOKENS:
        return []
    count = COUNTS[(one + step) % 8]
    done = len(world.tokens[one])
    drafts = expected[one][done : done + count]
    if count and (one + step) % 3 == 0:
        drafts[count // 2] = (drafts[count // 2] + 1) % 2_000
    return drafts
