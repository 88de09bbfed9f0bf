"""Random plans with drafts, compared with the tokens that each sequence gets alone."""

import random
from typing import Any

import pytest
from mlx import nn

from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.execution.executor import Executor
from shared.messages import Sampling, StepPlan
from tests.mlx.executor_driver import (
    GREEDY,
    admission,
    generate_alone,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import PLAIN_FAMILIES, MakeModel
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver, make_drafts
from tests.support.effort import cases

PLANS = cases(12, 60)
ROWS = 6
TOKENS_MAX = 40
SAMPLINGS = [
    GREEDY,
    Sampling(seed=21, temperature=0.9, top_p=0.9, top_logprobs=1),
    Sampling(seed=22, temperature=0.0, frequency_penalty=1.1, repetition_penalty=1.2),
    Sampling(seed=23, temperature=0.7, presence_penalty=0.8, top_k=50),
    Sampling(seed=24, temperature=1.0, logit_bias=[(5, 3.0)]),
]


class RandomScheduler:
    """Makes random valid plans one step ahead of the results.

    It knows the results of all steps but the last one. Sequences with drafts in that step wait.
    """

    def __init__(self, model: nn.Module, seed: int, forward_cost_tokens: int) -> None:
        self.random = random.Random(seed)
        self.driver = SpeculationDriver(
            model, ROWS, 96, block_tokens=NO_BLOCKS, forward_cost_tokens=forward_cost_tokens
        )
        self.prompts = [make_prompt(100 + one, 3 + 5 * one) for one in range(5)]
        self.expected = [
            generate_alone(model, prompt, TOKENS_MAX + 20, sampling)
            for prompt, sampling in zip(self.prompts, SAMPLINGS, strict=True)
        ]
        self.slots: dict[int, int] = {}
        self.kinds: dict[int, int] = {}
        self.in_flight: LaunchedStep | None = None
        self.plans: list[StepPlan] = []
        self.accepted = self.checked = 0
        self._ids = iter(range(1, 10_000))

    def run_plan(self) -> None:
        """Make and launch one plan, then finish the one before it."""
        fields: dict[str, Any] = {"dropped": self._drop(), "moves": self._moves()}
        known = [one for one in self.driver.accepted if one not in fields["dropped"]]
        fields["roll_back"] = [one for one in known if self.random.random() < 0.8]
        waiting = self.driver.verifying - set(fields["roll_back"])
        ready = [one for one in self.slots if one not in waiting and self.random.random() < 0.85]
        fields["decodes"] = sorted(ready, key=lambda one: self.slots[one])
        self._draft(fields)
        self._admit(fields)
        self.driver.row_tokens = self.random.choice([96, 100, 112])
        launched = self.driver.launch(**fields)
        self.plans.append(launched.plan)
        self._finish()
        self.in_flight = launched

    def finish_all(self) -> None:
        """Finish the step in flight and check all remaining sequences."""
        self._finish()
        for one in self.slots:
            self._check(one)

    def _finish(self) -> None:
        if self.in_flight is not None:
            result = self.driver.finish(self.in_flight)
            self.accepted += sum(len(tokens) - 1 for tokens in result.tokens)

    def _check(self, one: int) -> None:
        got = self.driver.tokens[one]
        assert got == self.expected[self.kinds[one]][: len(got)]
        self.checked += len(got)

    def _drop(self) -> list[int]:
        ends = []
        for one in list(self.slots):
            got = len(self.driver.tokens.get(one, ()))
            # A step in flight may return 1 to 17 tokens.
            if got > TOKENS_MAX - 20 or self.random.random() < 0.03:
                ends.append(one)
        for one in ends:
            # The scheduler discards the result in flight of a dropped sequence.
            if one in self.driver.tokens:
                self._check(one)
            del self.slots[one]
        return ends

    def _moves(self) -> list[tuple[int, int]]:
        taken = {slot: one for one, slot in self.slots.items()}
        free = [slot for slot in range(ROWS) if slot not in taken]
        if not taken or not free or free[0] > max(taken) or self.random.random() < 0.5:
            return []
        one = taken[max(taken)]
        self.slots[one] = free[0]
        return [(one, free[0])]

    def _draft(self, fields: dict[str, Any]) -> None:
        if self.random.random() < 0.3:
            return
        in_flight = set(self.in_flight.plan.decodes) if self.in_flight is not None else set()
        drafts = {}
        for one in fields["decodes"]:
            # Known tokens, and the one that a step in flight returns.
            done = len(self.driver.tokens[one]) + (one in in_flight)
            count = self.random.choice([0, 1, 2, 5, 16])
            right = self.random.randint(0, count)
            drafts[one] = make_drafts(self.expected[self.kinds[one]], done, count, right)
        fields["drafts"] = drafts

    def _admit(self, fields: dict[str, Any]) -> None:
        free = [slot for slot in range(ROWS) if slot not in self.slots.values()]
        fields["admitted"], fields["prefill_chunks"] = [], []
        for slot in free:
            if self.random.random() < 0.6:
                continue
            one, kind = next(self._ids), self.random.randrange(len(self.prompts))
            prompt = self.prompts[kind]
            self.slots[one], self.kinds[one] = slot, kind
            self.driver.tokens[one] = []
            fields["admitted"].append(admission(one, slot, prompt, SAMPLINGS[kind]))
            fields["prefill_chunks"].append(prefill_chunk(one, 0, len(prompt), len(prompt)))


def run_built_ahead(executor: Executor, plans: list[StepPlan]) -> list[bytes]:
    """Build each step before the one before it is finished, start it afterwards; return the
    digests.
    """
    digests = []
    before: LaunchedStep | None = None
    for plan in plans:
        following = executor.prepare(plan)
        if before is not None:
            digests.append(executor.finish(before).digest)
        executor.start(following)
        before = following
    assert before is not None
    return [*digests, executor.finish(before).digest]


@pytest.mark.deep
@pytest.mark.parametrize(
    "forward_cost_tokens",
    [1, pytest.param(12, marks=pytest.mark.proof), pytest.param(64, marks=pytest.mark.proof)],
)
@pytest.mark.parametrize(("seed", "family"), list(enumerate(PLAIN_FAMILIES)))
def test_random_plans_with_drafts_change_no_tokens(
    make_model: MakeModel, seed: int, family: str, forward_cost_tokens: int
) -> None:
    """Random plans that join, drop, move, resize and roll back with any drafts change no token.

    A rank that finishes each step before the next one, or builds the next one early, has the same
    receipts.
    """
    model = make_model(family)
    scheduler = RandomScheduler(model, 10 * seed + forward_cost_tokens, forward_cost_tokens)
    for _ in range(PLANS):
        scheduler.run_plan()
    scheduler.finish_all()
    in_step = make_executor(model, forward_cost_tokens=forward_cost_tokens)
    digests = [in_step.finish(in_step.launch(plan)).digest for plan in scheduler.plans]

    assert digests == scheduler.driver.digests
    ahead = make_executor(model, forward_cost_tokens=forward_cost_tokens)
    assert digests == run_built_ahead(ahead, scheduler.plans)
    assert scheduler.checked > cases(40, 270)
    assert scheduler.accepted > cases(12, 100)
