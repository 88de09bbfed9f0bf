"""What clients feel: times of tokens -> time to first token, time between tokens. No I/O."""

from collections.abc import Sequence

from services.commands.bench.measuring.numbers import differences, percentile


def latencies(requests: Sequence[tuple[float, Sequence[float]]], wall_s: float) -> dict[str, float]:
    """Return metrics of many requests.

    Args:
        requests: per request when it was sent, and when each of its tokens arrived; seconds.
        wall_s: from the first request sent to the last token.
    """
    first_ms = [(arrived[0] - sent) * 1_000 for sent, arrived in requests if arrived]
    between_ms = [gap * 1_000 for _, arrived in requests for gap in differences(arrived)]
    metrics = {"wall_s": wall_s}
    if first_ms:
        metrics["ttft_p50_ms"] = percentile(first_ms, 0.5)
        metrics["ttft_p95_ms"] = percentile(first_ms, 0.95)
    decoding_s = sum(arrived[-1] - arrived[0] for _, arrived in requests if arrived)
    if between_ms and decoding_s > 0.0:
        # Of one stream.
        metrics["decode_tokens_per_s"] = len(between_ms) / decoding_s
    if between_ms:
        metrics["itl_p50_ms"] = percentile(between_ms, 0.5)
        metrics["itl_p95_ms"] = percentile(between_ms, 0.95)
    return metrics
