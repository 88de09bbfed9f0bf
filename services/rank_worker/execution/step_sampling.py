"""The draw of a step: which rows sample, where each one's token lies, and what came out."""

import math

import mlx.core as mx

from services.rank_worker.batch.running_batch import SequenceBatch
from services.rank_worker.batch.step_parts import Forwards, Launched, StepSample
from services.rank_worker.kv_cache.rows import KVStore
from services.rank_worker.sampling import Sampler
from services.rank_worker.sampling.draft_acceptance import Verifying, count_accepted
from services.rank_worker.sampling.drafts import Drafts
from shared.errors import InvariantBroken
from shared.messages import StepPlan, TokenLogprobs


def build_draw(
    plan: StepPlan,
    forwards: Forwards,
    drafts: Drafts,
    *,
    batch: SequenceBatch,
    store: KVStore,
    sampler: Sampler,
) -> StepSample | None:
    """Build the draw of all rows that sample; take note of where each one's token will lie.

    Args:
        plan: the step.
        forwards: what its forwards gave.
        drafts: what its decodes verify.
        batch: whose rows they are.
        store: the rows, as the step leaves them.
        sampler: draws.
    """
    sampling = [one.sequence_id for one in plan.prefill_chunks if one.samples]
    sequences = [batch.find(one) for one in sampling + plan.decodes]
    if not sequences:
        return None
    sequence_ids: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        rows = drafts.count(sequence.sequence_id) + 1
        # A new token's position is the number of tokens before it, all of which are in the row.
        length = store.length(sequence.slot)
        sequence_ids += [sequence.sequence_id] * rows
        positions += range(length - rows + 1, length + 1)
    drawn = sampler.draw(forwards.in_order(sequence_ids), sequence_ids, positions, drafts)
    sampled: list[Verifying | None] = []
    first = 0
    for sequence in sequences:
        count = drafts.count(sequence.sequence_id)
        if count:
            base = store.length(sequence.slot) - count - 1
            sequence.verifying = Verifying(base, count, drawn.tokens, first)
        else:
            sequence.last = (drawn.tokens, first)
        sampled.append(sequence.verifying)
        first += count + 1
    return StepSample(drawn, drafts, sequence_ids, sampled)


def read_draw(
    launched: Launched, draw: StepSample
) -> tuple[list[list[int]], list[list[TokenLogprobs]], list[float]]:
    """Wait for what was drawn; of drafts keep what was accepted, and the token behind.

    Returns:
        (tokens and log probabilities per sequence, top logits of all these tokens' rows).

    Raises:
        InvariantBroken: a row's logits are not numbers.
    """
    mx.eval(draw.arrays())
    all_tokens: list[int] = draw.drawn.tokens.tolist()  # type: ignore[assignment]
    all_tops: list[float] = draw.drawn.top_logits.tolist()  # type: ignore[assignment]
    if not all(map(math.isfinite, all_tops)):
        raise InvariantBroken(
            f"logits of step {launched.plan.step_id} are not finite: highest per row {all_tops}"
        )
    pending = draw.drawn.logprobs
    asked = pending.read(len(all_tokens)) if pending is not None else None
    known = draw.drafts.read()
    tokens: list[list[int]] = []
    logprobs: list[list[TokenLogprobs]] = []
    tops: list[float] = []
    first = 0
    for verifying in draw.sampled:
        count, accepted = 0, 0
        if verifying is not None:
            count = verifying.count
            places = draw.drafts.places(draw.sequence_ids[first], count)
            drafts = [known[place] for place in places]
            accepted = count_accepted(drafts, all_tokens[first : first + count + 1])
            verifying.accepted = accepted
        stop = first + accepted + 1
        tokens.append(all_tokens[first:stop])
        tops += all_tops[first:stop]
        if asked is not None:
            logprobs.append([one for row in asked[first:stop] for one in row])
        first += count + 1
    return tokens, logprobs, tops
