"""Runs a few steps before a rank says that it is ready, so that no request pays for what is first.

The first step of each kind compiles kernels (on CUDA for seconds), pages weights in and allocates;
what it took would also be taken for what such a step takes. A model that computes no numbers is
refused here, before anybody waits for an answer.
"""

from services.rank_worker.executor import Executor
from shared.errors import ConfigError, InvariantBroken
from shared.messages import AdmittedSequence, PrefillChunk, Sampling, StepPlan

LENGTHS = (64, 40)
"""Tokens of two prompts, different enough to be prefilled one by one and decoded as ragged rows."""
DECODES = 3
ROW_TOKENS = 256

_DRAWS = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1),
)


def warm_up(executor: Executor, context_tokens_max: int) -> None:
    """Run plans that all ranks make alike: prefill, decode and both ways to draw, then drop all.

    Args:
        executor: fresh, and as fresh again afterwards.
        context_tokens_max: no sequence becomes longer.

    Raises:
        ConfigError: the model's logits are not numbers.
    """
    longest = max(1, context_tokens_max - DECODES - 1)
    try:
        for plan in _plans(executor.vocab_size, longest):
            executor.finish(executor.launch(plan))
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
    work = [
        StepPlan(
            epoch=1,
            step_id=number,
            deadline_s=0.0,
            row_count=len(LENGTHS),
            row_tokens=ROW_TOKENS,
            admitted=new,
            prefill_chunks=prefills,
            decodes=decodes,
        )
        for number, (new, prefills, decodes) in enumerate(steps, 1)
    ]
    end = StepPlan(
        epoch=1,
        step_id=len(work) + 1,
        deadline_s=0.0,
        dropped=everybody,
        row_count=0,
        row_tokens=0,
    )
    return [*work, end]
