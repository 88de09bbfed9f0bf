"""What a finished step means: tokens for sequences and gateways, evidence when receipts differ."""

from services.scheduler.batch.in_flight_steps import InFlightStep
from services.scheduler.requests.sequence import Sequence
from shared.identifiers import Slot
from shared.messages import TokenLogprobs, TokensGenerated


def take_tokens(sequence: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
    """Append what was sampled up to the sequence's end; return that and why it ended, if it did."""
    taken: list[int] = []
    for token in tokens:
        sequence.tokens.append(token)
        taken.append(token)
        if token in sequence.stop_ids:
            return taken, "stop"
        if len(sequence.tokens) >= sequence.tokens_max:
            return taken, "length"
    return taken, None


def tokens_message(
    entries: list[tuple[Sequence, int, list[int], list[TokenLogprobs]]],
) -> TokensGenerated:
    """Return one gateway's share of a step.

    Args:
        entries: per sequence the position of its first new token, its new tokens, and their
            logprobs if they were asked for.
    """
    wanted = any(logprobs for _, _, _, logprobs in entries)
    return TokensGenerated(
        request_ids=[sequence.request.request_id for sequence, _, _, _ in entries],
        positions=[position for _, position, _, _ in entries],
        tokens=[tokens for _, _, tokens, _ in entries],
        logprobs=[logprobs for _, _, _, logprobs in entries] if wanted else [],
    )


def evidence(flight: InFlightStep, difference: str) -> dict[str, object]:
    """Return the facts about receipts that differ, for whoever looks into it."""
    return {
        "difference": difference,
        "plan": flight.step.plan,
        "receipts": {str(rank): receipt for rank, receipt in flight.receipts.items()},
        "slots": {
            str(s.sequence_id): Slot(s.slot) if s.slot is not None else None
            for s in flight.step.samples
        },
    }
