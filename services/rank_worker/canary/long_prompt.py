"""The canary's prompt: a long one through the model, as the executor prefills it.

Some collectives go wrong only with the sizes of a long prefill (mlx issue 4342: JACCL, past about
2,000 tokens). Ranks whose devices are alike must get the same bits of log probabilities, others
the same likeliest token.
"""

import hashlib
import itertools
import struct

import mlx.core as mx

from services.rank_worker.canary.sums import CHUNK_TOKENS
from services.rank_worker.collectives import Collectives
from services.rank_worker.execution.executor import Executor, StepResult
from shared import limits
from shared.canary_names import PROMPT
from shared.clock import Clock
from shared.errors import CanaryFailed, InvariantBroken
from shared.messages import AdmittedSequence, CanaryFinding, PrefillChunk, Sampling, StepPlan

PROMPT_TOKENS = (64, 256, 1_024, 4_500)
"""Lengths that are run in turn; the last that is affordable is the finding. The warm-up has
compiled what the first one needs."""

_CPU_BUDGET_S, _BUDGET_S = 0.5, 120.0

PREFILL_TIME_EXPONENT = 1.5
"""The time of a prefill grows with this power of its length, between linear and quadratic."""

ROW_GROWTH_TOKENS = 256

_SAMPLING = Sampling(seed=1, temperature=0.0, top_logprobs=limits.TOP_LOGPROBS_MAX)


def check_prompt(
    executor: Executor,
    world: Collectives,
    context_tokens_max: int,
    clock: Clock,
    *,
    budget_s: float,
    bits: bool,
) -> CanaryFinding:
    """Run a prompt of 4,500 tokens, or of the length that rank 0 finds affordable; digest its end.

    Args:
        executor: fresh and warm, and as fresh again afterwards.
        world: all ranks call this at the same point.
        context_tokens_max: no sequence becomes longer.
        clock: measures.
        budget_s: how long the next length may be expected to take, seconds; rank 0's counts.
        bits: digest the bits of log probabilities (all devices alike), else the likeliest token.

    Raises:
        CanaryFailed: the model gives no numbers.
    """
    lengths = prompt_lengths(max(1, context_tokens_max - 1))
    for count, following in itertools.zip_longest(lengths, lengths[1:]):
        try:
            result, seconds = _run(executor, count, clock)
        except InvariantBroken as error:
            raise CanaryFailed(
                f"The model computes no numbers for a prompt of {count:,} tokens ({error})."
            ) from error
        # Time is rank 0's alone, or the ranks' prompts would differ in length.
        if following is None or not _rank_0_says(
            world, is_true=seconds * (following / count) ** PREFILL_TIME_EXPONENT <= budget_s
        ):
            break
    executor.restart_receipts()
    return CanaryFinding(
        name=f"{PROMPT}{count:,} tokens",
        digest=_digest(result, bits=bits),
        bytes=4 * count,
        microseconds=seconds * 1e6,
    )


def default_budget_s(*, on_cpu: bool) -> float:
    """Return the seconds where no setting says another.

    A CPU world is for development, and the faults that a long prompt shows are those of fast links.
    """
    return _CPU_BUDGET_S if on_cpu else _BUDGET_S


def prompt_lengths(longest: int) -> list[int]:
    """Return the lengths to run, rising, none above `longest`."""
    return sorted({min(longest, count) for count in PROMPT_TOKENS})


def longest_prompt_within(room_tokens: int) -> int:
    """Return the longest prompt whose row, which is rounded up, has no more than so many tokens.

    Never less than the first length: the warm-up had two rows as long as that one's.
    """
    return max(PROMPT_TOKENS[0], room_tokens // ROW_GROWTH_TOKENS * ROW_GROWTH_TOKENS - 1)


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """Return token ids that follow from their places alone."""
    return [(31 * place * place + 7 * place + 1) % vocabulary for place in range(count)]


def _rank_0_says(world: Collectives, *, is_true: bool) -> bool:
    """Return rank 0's answer on all ranks. A collective, at load (I3)."""
    own = mx.array([int(is_true and world.rank == 0)], dtype=mx.int32)
    return bool((world.sum_ids(own) > 0).item())


def _run(executor: Executor, count: int, clock: Clock) -> tuple[StepResult, float]:
    """Prefill a prompt in chunks and drop it; return its last step and the seconds."""
    tokens = prompt_ids(count, executor.vocab_size)
    admitted = AdmittedSequence(
        sequence_id=1, slot=0, tokens=tokens, prompt_tokens=count, sampling=_SAMPLING
    )
    row_tokens = (count // ROW_GROWTH_TOKENS + 1) * ROW_GROWTH_TOKENS
    began_s = clock.now()
    step = 0
    for step, start in enumerate(range(0, count, CHUNK_TOKENS), 1):
        length = min(CHUNK_TOKENS, count - start)
        chunk = PrefillChunk(
            sequence_id=1, start=start, length=length, samples=start + length == count
        )
        plan = StepPlan(
            epoch=1,
            step_id=step,
            deadline_s=0.0,
            row_count=1,
            row_tokens=row_tokens,
            admitted=[] if start else [admitted],
            prefill_chunks=[chunk],
        )
        result = executor.finish(executor.launch(plan))
    seconds = clock.now() - began_s
    end = StepPlan(
        epoch=1, step_id=step + 1, deadline_s=0.0, dropped=[1], row_count=0, row_tokens=0
    )
    executor.finish(executor.launch(end))
    return result, seconds


def _digest(result: StepResult, *, bits: bool) -> bytes:
    """Digest what this rank computed itself: the sampled id may be rank 0's."""
    last = result.logprobs[0][0]
    digest = hashlib.blake2b(digest_size=16)
    ids = last.top_ids if bits else last.top_ids[:1]
    digest.update(struct.pack(f"<{len(ids)}i", *ids))
    if bits:
        digest.update(struct.pack(f"<{len(ids)}f", *last.top_logprobs))
    return digest.digest()
