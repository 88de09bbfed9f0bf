"""Drafts on real ranks over the ring: equal receipts, and the text of one rank without drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.messages import (
    AdmittedSequence,
    PrefillChunk,
    RolledBack,
    Sampling,
    StepFinished,
    StepPlan,
)
from tests.multirank.test_join import EPOCH, Scheduler

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


class World:
    """Real ranks of one world, and what they have generated."""

    def __init__(self, link: Scheduler, size: int) -> None:
        self.size = size
        self.tokens: dict[int, list[int]] = {one: [] for one in PROMPTS}
        self.digests: list[set[bytes]] = []
        self.link = link
        self._step_id = 0

    def begin(self) -> None:
        """Admit and prefill all sequences."""
        self.step(
            admitted=[
                AdmittedSequence(
                    sequence_id=one,
                    slot=one - 1,
                    tokens=prompt,
                    prompt_tokens=len(prompt),
                    sampling=SAMPLING[one],
                )
                for one, prompt in PROMPTS.items()
            ],
            prefill_chunks=[
                PrefillChunk(sequence_id=one, start=0, length=len(prompt), samples=True)
                for one, prompt in PROMPTS.items()
            ],
        )

    def step(self, **fields: Any) -> list[list[int]]:
        """Have all ranks execute the next plan; return what each sequence generated."""
        self._step_id += 1
        plan = StepPlan(
            epoch=EPOCH,
            step_id=self._step_id,
            deadline_s=20.0,
            row_count=len(PROMPTS),
            row_tokens=96,
            **fields,
        )
        self.link.order_all(plan)
        due = self.size * self._step_id
        self.link.until(lambda: len(self.link.of(StepFinished)) == due)
        answers = [one for one in self.link.of(StepFinished) if one.step_id == self._step_id]
        self.digests.append({answer.digest for answer in answers})
        (tokens,) = (answer.tokens for answer in answers if answer.rank == 0)
        ids = [one.sequence_id for one in plan.prefill_chunks] + plan.decodes
        for one, some in zip(ids, tokens, strict=True):
            self.tokens[one] += some
        return list(tokens)


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
        yield World(link, size)
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

    assert all(len(found) == 1 for found in world.digests)
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
