"""Warm-up of a rank: a few steps before it reports that it is ready.

The first step of each kind compiles kernels (seconds on CUDA), pages weights in and allocates
memory. The first request must not pay for that, and its duration must not be taken for that of a
usual step. A model whose logits are not finite is refused here.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from services.rank_worker.execution.executor import Executor
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import ConfigError, InvariantBroken
from shared.messages import (
    AdmittedSequence,
    DraftChunk,
    PrefillChunk,
    RolledBack,
    Sampling,
    StepPlan,
)

PROMPT_TOKENS = (64, 40)
"""Lengths of two prompts, different enough to be prefilled one by one and decoded with padding."""
SEQUENCES = [1, 2]
"""Their sequence ids, in slot order."""
DECODE_STEPS = 3
"""Decode steps with all sequences."""
ROW_TOKENS = 256
"""Tokens per row, more than the sequences need."""
DRAFT_COUNTS = ((4, 4), (5, 1))
"""Drafts of each row in each step that verifies drafts."""

_SAMPLINGS = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1),
)


def warm_up(executor: Executor, context_tokens_max: int, *, speculates: bool = False) -> None:
    """Run a few small steps, so that kernels are compiled and memory is allocated; then drop all.

    The steps are equal on all ranks: prefill, decode, and sampling of the likeliest and of random
    tokens.

    Args:
        executor: without sequences, before and after.
        context_tokens_max: longest sequence in tokens; shortens the prompts if it is small.
        speculates: whether drafts are verified too, where rows can be shortened.

    Raises:
        ConfigError: the model's logits are not finite.
    """
    prompt_tokens_max = max(1, context_tokens_max - DECODE_STEPS - 1)
    step_ids = itertools.count(1)

    def run(**fields: Any) -> None:
        rows = {"row_count": len(PROMPT_TOKENS), "row_tokens": ROW_TOKENS}
        plan = StepPlan(epoch=1, step_id=next(step_ids), deadline_s=0.0, **rows | fields)
        executor.finish(executor.launch(plan))

    first, second = _admissions(executor.vocab_size, prompt_tokens_max)
    with infinite_logits_refused():
        run(admitted=[first], prefill_chunks=[whole_prefill(first)])
        # The first sequence decodes alone before the second is admitted.
        run(decodes=SEQUENCES[:1])
        run(admitted=[second], prefill_chunks=[whole_prefill(second)])
        for _ in range(DECODE_STEPS):
            run(decodes=SEQUENCES)
        has_room = context_tokens_max >= _drafting_tokens()
        if speculates and executor.store.can_roll_back and has_room:
            for fields in _drafting_steps(executor.proposer):
                run(decodes=SEQUENCES, **fields)
        run(dropped=SEQUENCES, row_count=0, row_tokens=0)
        executor.restart_receipts()


@contextlib.contextmanager
def infinite_logits_refused() -> Iterator[None]:
    """Say in a `with` block with steps before a rank is ready why its logits are not finite.

    Raises:
        ConfigError: they are not.
    """
    try:
        yield
    except InvariantBroken as error:
        raise ConfigError(
            f"The model computes logits that are not finite ({error}): its weights are damaged, or "
            "model.dtype is too narrow for them. Download the model again, or set model.dtype to "
            "float32."
        ) from error


def _admissions(vocab_size: int, tokens_max: int) -> list[AdmittedSequence]:
    lengths = [min(length, tokens_max) for length in PROMPT_TOKENS]
    return [
        made_up_prompt(length, vocab_size, sequence_id, slot, _SAMPLINGS[slot])
        for slot, (sequence_id, length) in enumerate(zip(SEQUENCES, lengths, strict=True))
    ]


def made_up_prompt(
    length: int, vocab_size: int, sequence_id: int, slot: int, sampling: Sampling
) -> AdmittedSequence:
    """Return a sequence whose token ids depend on their position only.

    Args:
        length: tokens of the prompt.
        vocab_size: of the model.
        sequence_id: of the sequence.
        slot: its place in the batch.
        sampling: how its tokens are drawn.
    """
    return AdmittedSequence(
        sequence_id=sequence_id,
        slot=slot,
        tokens=[(7 * place + 1) % vocab_size for place in range(length)],
        prompt_tokens=length,
        sampling=sampling,
    )


def whole_prefill(admitted: AdmittedSequence) -> PrefillChunk:
    """Return the chunk that is a sequence's whole prompt."""
    length = len(admitted.tokens)
    return PrefillChunk(sequence_id=admitted.sequence_id, start=0, length=length, samples=True)


def _decoded_lengths() -> list[int]:
    """Return the tokens in each row after the steps without drafts, if no prompt is shortened."""
    # The first row has decoded once more than the others.
    return [length + DECODE_STEPS + (slot == 0) for slot, length in enumerate(PROMPT_TOKENS)]


def _drafting_tokens() -> int:
    """Return the most tokens in a row in the steps that verify drafts.

    Each of these steps adds one token and the drafts to a row, of which the token remains.
    """
    return max(
        length + number + 1 + count
        for number, counts in enumerate(DRAFT_COUNTS)
        for length, count in zip(_decoded_lengths(), counts, strict=True)
    )


def _drafting_steps(proposer: RankProposer) -> Iterator[dict[str, Any]]:
    """Yield fields of steps with equal and unequal numbers of drafts, none of which is accepted.

    Where the ranks propose drafts they do so here too; their rows read arbitrary tokens.
    """
    rows = list(zip(SEQUENCES, _decoded_lengths(), strict=True))
    for number, counts in enumerate(DRAFT_COUNTS):
        fields: dict[str, Any] = {"draft_counts": list(counts)}
        if not proposer.bytes_per_token:
            fields = {"drafts": [[0] * count for count in counts]}
        if number:
            fields["rolled_back"] = [
                RolledBack(sequence_id=one, length=length + number) for one, length in rows
            ]
        elif proposer.needs_chunks:
            fields["draft_chunks"] = [
                DraftChunk(sequence_id=one, start=0, tokens=[0] * length) for one, length in rows
            ]
        yield fields
