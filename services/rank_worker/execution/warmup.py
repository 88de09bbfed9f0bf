"""Runs a few steps before a rank says that it is ready, so that no request pays for what is first.

The first step of each kind compiles kernels (on CUDA for seconds), pages weights in and allocates;
what it took would also be taken for what such a step takes. A model that computes no numbers is
refused here, before anybody waits for an answer.
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

LENGTHS = (64, 40)
"""Tokens of two prompts, different enough to be prefilled one by one and decoded as ragged rows."""
DECODES = 3
ROW_TOKENS = 256
DRAFTS = ((4, 4), (5, 1))
"""Drafts per row in each step that verifies some."""

_DRAWS = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1),
)


def warm_up(executor: Executor, context_tokens_max: int, *, speculates: bool = False) -> None:
    """Run plans that all ranks make alike: prefill, decode and both ways to draw, then drop all.

    Args:
        executor: fresh, and as fresh again afterwards.
        context_tokens_max: no sequence becomes longer.
        speculates: drafts are verified too, where rows can be shortened.

    Raises:
        ConfigError: the model's logits are not numbers.
    """
    longest = max(1, context_tokens_max - DECODES - 1)
    has_room = longest >= max(LENGTHS) + DECODES * len(DRAFTS)
    try:
        plans = _plans(executor.vocab_size, longest)
        for plan in plans:
            executor.finish(executor.launch(plan))
        if speculates and executor.can_roll_back and has_room:
            for plan in _verifications(len(plans), executor):
                executor.finish(executor.launch(plan))
        executor.finish(executor.launch(_end()))
        executor.begin()
    except InvariantBroken as error:
        raise ConfigError(
            f"The model computes no numbers ({error}): its weights are damaged, or model.dtype is "
            "too narrow for them."
        ) from error


def _plans(vocabulary: int, longest: int) -> list[StepPlan]:
    prompts = [
        [(7 * place + 1) % vocabulary for place in range(min(count, longest))] for count in LENGTHS
    ]
    admitted = [
        AdmittedSequence(
            sequence_id=slot + 1,
            slot=slot,
            tokens=prompt,
            prompt_tokens=len(prompt),
            sampling=draw,
        )
        for slot, (prompt, draw) in enumerate(zip(prompts, _DRAWS, strict=True))
    ]
    chunks = [
        PrefillChunk(sequence_id=one.sequence_id, start=0, length=len(one.tokens), samples=True)
        for one in admitted
    ]
    everybody = [one.sequence_id for one in admitted]
    # The first decodes by itself before the second comes: one row, then two of two lengths.
    steps: list[tuple[list[AdmittedSequence], list[PrefillChunk], list[int]]] = [
        (admitted[:1], chunks[:1], []),
        ([], [], everybody[:1]),
        (admitted[1:], chunks[1:], []),
        *[([], [], everybody)] * DECODES,
    ]
    return [
        _plan(number, admitted=new, prefill_chunks=prefills, decodes=decodes)
        for number, (new, prefills, decodes) in enumerate(steps, 1)
    ]


def _verifications(done: int, executor: Executor) -> list[StepPlan]:
    """Equal and unequal numbers of drafts, each cut back to what was certain before.

    Where ranks propose, they do here too; their rows read any tokens, because none is shown.
    """
    proposes = executor.draft_bytes_per_token > 0
    everybody = list(range(1, len(LENGTHS) + 1))
    lengths = [
        # The first row has decoded once alone, and then with all others.
        length + DECODES + (1 if slot == 0 else 0)
        for slot, length in enumerate(LENGTHS)
    ]
    plans = []
    for number, counts in enumerate(DRAFTS):
        cut = [
            RolledBack(sequence_id=one, length=length + number)
            for one, length in zip(everybody, lengths, strict=True)
        ]
        fields: dict[str, Any] = {"rolled_back": cut if number else []}
        if proposes:
            fields["draft_counts"] = list(counts)
        else:
            fields["drafts"] = [[0] * count for count in counts]
        if executor.reads_draft_chunks and not number:
            fields["draft_chunks"] = [
                DraftChunk(sequence_id=one, start=0, tokens=[0] * length)
                for one, length in zip(everybody, lengths, strict=True)
            ]
        plans.append(_plan(done + number + 1, decodes=everybody, **fields))
    return plans


def _plan(number: int, **fields: Any) -> StepPlan:
    return StepPlan(
        epoch=1,
        step_id=number,
        deadline_s=0.0,
        row_count=len(LENGTHS),
        row_tokens=ROW_TOKENS,
        **fields,
    )


def _end() -> StepPlan:
    everybody = list(range(1, len(LENGTHS) + 1))
    return StepPlan(
        epoch=1, step_id=1, deadline_s=0.0, dropped=everybody, row_count=0, row_tokens=0
    )
