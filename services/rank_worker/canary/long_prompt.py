"""The canary's prompt: a long prefill through the executor.

Some collectives fail only with the sizes of a long prefill (mlx issue 4342: JACCL, above about
2,000 tokens). Ranks with equal devices must compute the same log probabilities bit for bit, others
the same likeliest token.
"""

import hashlib
import itertools
import struct

from services.rank_worker.batch.step_outputs import StepResult
from services.rank_worker.canary.sums import CHUNK_TOKENS, of_rank_0
from services.rank_worker.execution.executor import Executor
from services.rank_worker.peers.collectives import Collectives
from shared import limits
from shared.clock import Clock
from shared.errors import CanaryFailed, InvariantBroken
from shared.measurements.canary_names import PROMPT_PREFIX
from shared.messages import AdmittedSequence, CanaryFinding, PrefillChunk, Sampling, StepPlan

PROMPT_TOKENS = (64, 256, 1_024, 4_500)
"""Lengths that are run in turn; the finding is that of the last one within the time budget. The
warm-up has compiled the kernels of the first."""

CPU_BUDGET_S, BUDGET_S = 0.5, 120.0
"""Limits for the expected duration of one prompt, without a setting. It is small on a CPU: such
worlds are for development, and long prompts reveal faults of fast links."""

PREFILL_TIME_EXPONENT = 1.5
"""Exponent with which prefill time is assumed to grow with length: between linear and quadratic."""

ROW_GROWTH_TOKENS = 256

_SAMPLING = Sampling(seed=1, temperature=0.0, top_logprobs=limits.TOP_LOGPROBS_MAX)


def check_prompt(
    executor: Executor,
    world: Collectives,
    context_tokens_max: int,
    clock: Clock,
    *,
    budget_s: float,
    exact: bool,
) -> CanaryFinding:
    """Run prompts of growing length and return a finding with the digest of the last one's result.

    The next length, at most 4,500 tokens, is run if its expected duration is within the budget.

    Args:
        executor: warm and without sequences, before and after.
        world: all ranks call this at the same point.
        context_tokens_max: longest sequence in tokens, the sampled token included.
        clock: measures durations.
        budget_s: limit for the expected duration of one prompt, in seconds; rank 0 decides for all.
        exact: digest ids and bits of the highest log probabilities (equal devices), else only the
            likeliest token's id.

    Returns:
        Name with the prompt's length, digest, bytes of the token ids, and microseconds of the run.

    Raises:
        CanaryFailed: the model's logits are not finite.
    """
    lengths = prompt_lengths(max(1, context_tokens_max - 1))
    for length, next_length in itertools.zip_longest(lengths, lengths[1:]):
        try:
            result, seconds = _run(executor, length, clock)
        except InvariantBroken as error:
            raise CanaryFailed(
                f"The model computes logits that are not finite for a prompt of {length:,} tokens "
                f"({error}): collectives over these links are faulty, or model.dtype is too narrow."
            ) from error
        if next_length is None:
            break
        next_s = seconds * (next_length / length) ** PREFILL_TIME_EXPONENT
        # Only rank 0's time counts; otherwise the ranks' prompts would differ in length.
        if not any(of_rank_0(world, int(next_s <= budget_s))):
            break
    executor.restart_receipts()
    return CanaryFinding(
        name=f"{PROMPT_PREFIX}{length:,} tokens",
        digest=_digest(result, exact=exact),
        bytes=4 * length,
        microseconds=seconds * 1e6,
    )


def prompt_lengths(length_max: int) -> list[int]:
    """Return the prompt lengths to run, in tokens, ascending, none above `length_max`."""
    return sorted({min(length_max, length) for length in PROMPT_TOKENS})


def longest_prompt_within(row_tokens_max: int) -> int:
    """Return the longest prompt, in tokens, whose row fits into memory; rows grow in steps of 256.

    Never less than the first of `PROMPT_TOKENS`, because the warm-up has used two rows of that
    length.

    Args:
        row_tokens_max: longest row that fits, in tokens.
    """
    return max(PROMPT_TOKENS[0], row_tokens_max // ROW_GROWTH_TOKENS * ROW_GROWTH_TOKENS - 1)


def prompt_ids(length: int, vocabulary: int) -> list[int]:
    """Return a prompt whose token ids depend on their position only.

    Args:
        length: number of tokens.
        vocabulary: number of token ids; all returned ids are below it.
    """
    return [(31 * index * index + 7 * index + 1) % vocabulary for index in range(length)]


def _run(executor: Executor, length: int, clock: Clock) -> tuple[StepResult, float]:
    """Prefill a prompt in chunks and drop it; return its last step and the seconds taken."""
    token_ids = prompt_ids(length, executor.vocab_size)
    admitted = AdmittedSequence(
        sequence_id=1, slot=0, tokens=token_ids, prompt_tokens=length, sampling=_SAMPLING
    )
    row_tokens = (length // ROW_GROWTH_TOKENS + 1) * ROW_GROWTH_TOKENS
    began_s = clock.now()
    step_id = 0
    for step_id, start in enumerate(range(0, length, CHUNK_TOKENS), 1):
        chunk_tokens = min(CHUNK_TOKENS, length - start)
        chunk = PrefillChunk(
            sequence_id=1,
            start=start,
            length=chunk_tokens,
            samples=start + chunk_tokens == length,
        )
        plan = StepPlan(
            epoch=1,
            step_id=step_id,
            deadline_s=0.0,
            row_count=1,
            row_tokens=row_tokens,
            admitted=[] if start else [admitted],
            prefill_chunks=[chunk],
        )
        result = executor.finish(executor.launch(plan))
    seconds = clock.now() - began_s
    drop_plan = StepPlan(
        epoch=1, step_id=step_id + 1, deadline_s=0.0, dropped=[1], row_count=0, row_tokens=0
    )
    executor.finish(executor.launch(drop_plan))
    return result, seconds


def _digest(result: StepResult, *, exact: bool) -> bytes:
    """Digest the result of this rank itself: the sampled id may be that of rank 0."""
    last = result.logprobs[0][0]
    digest = hashlib.blake2b(digest_size=16)
    ids = last.top_ids if exact else last.top_ids[:1]
    digest.update(struct.pack(f"<{len(ids)}i", *ids))
    if exact:
        digest.update(struct.pack(f"<{len(ids)}f", *last.top_logprobs))
    return digest.digest()
