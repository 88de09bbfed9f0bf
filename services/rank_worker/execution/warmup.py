"""Warm-up of a rank: a few steps before it reports that it is ready.

The first step of each kind compiles kernels (seconds on CUDA), pages weights in and allocates
memory. The first request must not pay for that, and its duration must not be taken for that of a
usual step. A model whose logits are not finite is refused here.
"""

from typing import Any

from services.rank_worker.execution.executor import Executor
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
    has_room = prompt_tokens_max >= max(PROMPT_TOKENS) + DECODE_STEPS * len(DRAFT_COUNTS)
    try:
        plans = _plans(executor.vocab_size, prompt_tokens_max)
        for plan in plans:
            executor.finish(executor.launch(plan))
        if speculates and executor.can_roll_back and has_room:
            for plan in _speculation_plans(len(plans), executor):
                executor.finish(executor.launch(plan))
        executor.finish(executor.launch(_drop_plan()))
        executor.restart_receipts()
    except InvariantBroken as error:
        raise ConfigError(
            f"The model computes logits that are not finite ({error}): its weights are damaged, or "
            "model.dtype is too narrow for them. Download the model again, or set model.dtype to "
            "float32."
        ) from error


def _plans(vocabulary: int, tokens_max: int) -> list[StepPlan]:
    prompts = [
        [(7 * place + 1) % vocabulary for place in range(min(length, tokens_max))]
        for length in PROMPT_TOKENS
    ]
    admitted = [
        AdmittedSequence(
            sequence_id=slot + 1,
            slot=slot,
            tokens=prompt,
            prompt_tokens=len(prompt),
            sampling=sampling,
        )
        for slot, (prompt, sampling) in enumerate(zip(prompts, _SAMPLINGS, strict=True))
    ]
    chunks = [
        PrefillChunk(sequence_id=one.sequence_id, start=0, length=len(one.tokens), samples=True)
        for one in admitted
    ]
    all_ids = [one.sequence_id for one in admitted]
    # The first sequence decodes alone before the second is admitted.
    steps: list[tuple[list[AdmittedSequence], list[PrefillChunk], list[int]]] = [
        (admitted[:1], chunks[:1], []),
        ([], [], all_ids[:1]),
        (admitted[1:], chunks[1:], []),
        *[([], [], all_ids)] * DECODE_STEPS,
    ]
    return [
        _plan(number, admitted=new, prefill_chunks=prefills, decodes=decodes)
        for number, (new, prefills, decodes) in enumerate(steps, 1)
    ]


def _speculation_plans(plan_count: int, executor: Executor) -> list[StepPlan]:
    """Return steps with equal and unequal numbers of drafts, none of which is accepted.

    Where the ranks propose drafts they do so here too; their rows read arbitrary tokens.
    """
    proposes = executor.draft_bytes_per_token > 0
    all_ids = list(range(1, len(PROMPT_TOKENS) + 1))
    lengths = [
        # The first row has decoded once more than the others.
        length + DECODE_STEPS + (1 if slot == 0 else 0)
        for slot, length in enumerate(PROMPT_TOKENS)
    ]
    plans = []
    for number, counts in enumerate(DRAFT_COUNTS):
        cut = [
            RolledBack(sequence_id=sequence_id, length=length + number)
            for sequence_id, length in zip(all_ids, lengths, strict=True)
        ]
        fields: dict[str, Any] = {"rolled_back": cut if number else []}
        if proposes:
            fields["draft_counts"] = list(counts)
        else:
            fields["drafts"] = [[0] * count for count in counts]
        if executor.needs_draft_chunks and not number:
            fields["draft_chunks"] = [
                DraftChunk(sequence_id=sequence_id, start=0, tokens=[0] * length)
                for sequence_id, length in zip(all_ids, lengths, strict=True)
            ]
        plans.append(_plan(plan_count + number + 1, decodes=all_ids, **fields))
    return plans


def _plan(number: int, **fields: Any) -> StepPlan:
    return StepPlan(
        epoch=1,
        step_id=number,
        deadline_s=0.0,
        row_count=len(PROMPT_TOKENS),
        row_tokens=ROW_TOKENS,
        **fields,
    )


def _drop_plan() -> StepPlan:
    all_ids = list(range(1, len(PROMPT_TOKENS) + 1))
    return StepPlan(epoch=1, step_id=1, deadline_s=0.0, dropped=all_ids, row_count=0, row_tokens=0)
