"""Scheduler stand-in: makes plans by hand and collects the tokens of each sequence."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.batch.step_outputs import LaunchedStep, StepResult
from services.rank_worker.execution.executor import Executor
from services.rank_worker.model.fast_path.opening import FastPathSettings
from shared.messages import (
    AdmittedSequence,
    PrefillChunk,
    Sampling,
    SlotMove,
    StepPlan,
    TokenLogprobs,
)

GREEDY = Sampling(seed=0, temperature=0.0, top_logprobs=3)


def make_prompt(seed: int, length: int, vocab_size: int = 211) -> list[int]:
    """Return a pseudo-random prompt.

    Args:
        seed: equal seeds give equal prompts.
        length: tokens.
        vocab_size: token ids are below.
    """
    state = seed * 7_919 + 13
    prompt = []
    for _ in range(length):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        prompt.append(state // 8 % vocab_size)
    return prompt


def make_executor(model: nn.Module, **changes: Any) -> Executor:
    """Return the executor of a world of one rank.

    Args:
        model: the model that it runs.
        changes: arguments of `Executor` that differ from the defaults here.
    """
    arguments: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "synchronization": "broadcast",
        "receipt_logits": True,
        "sum_ids": None,
        "fast_path": FastPathSettings(),
    }
    return Executor(model, **{**arguments, **changes})


def admission(
    sequence_id: int,
    slot: int,
    tokens: list[int],
    sampling: Sampling = GREEDY,
    prompt_tokens: int | None = None,
) -> AdmittedSequence:
    """Return an admission.

    Args:
        sequence_id: of the admitted sequence.
        slot: row that it gets.
        tokens: its known tokens.
        sampling: greedy by default.
        prompt_tokens: how many of the tokens are the prompt; None: all of them.
    """
    return AdmittedSequence(
        sequence_id=sequence_id,
        slot=slot,
        tokens=tokens,
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        sampling=sampling,
    )


def prefill_chunk(sequence_id: int, start: int, stop: int, known: int) -> PrefillChunk:
    """Return the chunk [start, stop) of a sequence that has `known` tokens."""
    return PrefillChunk(
        sequence_id=sequence_id, start=start, length=stop - start, samples=stop == known
    )


class ExecutorDriver:
    """One executor, consecutive step ids, and all results by sequence."""

    def __init__(self, model: nn.Module, row_count: int = 4, row_tokens: int = 96) -> None:
        self.executor = make_executor(model)
        self.row_count = row_count
        self.row_tokens = row_tokens
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.digests: list[bytes] = []
        self._step_id = 0

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan with these fields."""
        self._step_id += 1
        moves = [SlotMove(sequence_id=one, slot=slot) for one, slot in fields.pop("moves", [])]
        size = {"row_count": self.row_count, "row_tokens": self.row_tokens}
        return StepPlan(
            epoch=1, step_id=self._step_id, deadline_s=5.0, moves=moves, **{**size, **fields}
        )

    def launch(self, **fields: Any) -> LaunchedStep:
        """Launch the next plan."""
        return self.executor.launch(self.plan(**fields))

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Finish a step and record its tokens."""
        result = self.executor.finish(launched)
        plan = launched.plan
        ids = [one.sequence_id for one in plan.prefill_chunks if one.samples] + plan.decodes
        assert len(result.tokens) == len(ids)
        for index, one in enumerate(ids):
            self.tokens.setdefault(one, []).extend(result.tokens[index])
            if result.logprobs:
                self.logprobs.setdefault(one, []).extend(result.logprobs[index])
        self.digests.append(result.digest)
        return result

    def step(self, **fields: Any) -> StepResult:
        """Launch and finish the next plan."""
        return self.finish(self.launch(**fields))

    def decode_uneven_rows(self, ids: list[int]) -> int:
        """Start rows of different lengths, decode once and reset the peak of used memory.

        Returns:
            The bytes in use now.
        """
        for one in ids:
            self.start(one, one - 1, make_prompt(one, 10 + one))
        self.step(decodes=ids)
        mx.clear_cache()
        mx.reset_peak_memory()
        return int(mx.get_active_memory())

    def start(
        self, sequence_id: int, slot: int, tokens: list[int], sampling: Sampling = GREEDY
    ) -> None:
        """Admit a sequence and prefill it in one chunk."""
        self.step(
            admitted=[admission(sequence_id, slot, tokens, sampling)],
            prefill_chunks=[prefill_chunk(sequence_id, 0, len(tokens), len(tokens))],
        )


def generate_with_mlx_lm(
    model: nn.Module, prompt: Sequence[int], count: int
) -> tuple[list[int], list[list[float]]]:
    """Generate greedily with the model's own caches, one sequence alone, as mlx-lm does.

    Returns:
        (tokens, log probabilities of the whole vocabulary for each token).
    """
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    distributions: list[list[float]] = []
    inputs = mx.array(list(prompt))[None]
    for _ in range(count):
        logits = model(inputs, cache=cache)[0, -1]
        logprobs = logits - mx.logsumexp(logits)
        token = int(np.argmax(np.array(logits)))
        tokens.append(token)
        distributions.append(logprobs.tolist())
        inputs = mx.array([[token]])
    return tokens, distributions


def generate_alone(
    model: nn.Module, prompt: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """Generate one sequence with an executor of its own."""
    driver = ExecutorDriver(model, row_count=1)
    driver.start(1, 0, prompt, sampling)
    for _ in range(count - 1):
        driver.step(decodes=[1])
    return driver.tokens[1]
