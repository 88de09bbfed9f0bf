"""Canary findings of a rank (its measured collectives, prompt and decode) as one line. Pure."""

from collections.abc import Sequence

from shared.measurements.canary_names import PROMPT_PREFIX, SUM_PREFIX, parse_decode_name
from shared.messages import CanaryFinding


def describe(findings: Sequence[CanaryFinding]) -> str:
    """Return the times and throughput in a rank's canary findings as one line of text.

    It has the time of the fastest small sum over ranks, the throughput of the largest sum (bytes
    that each rank contributes, per second) and, if measured, the time of all sums of a decode of
    one row and the time of a prompt. It is "" if the findings have no sums.
    """
    sums = [one for one in findings if one.name.startswith(SUM_PREFIX)]
    if not sums:
        return ""
    smallest = min(one.bytes for one in sums)
    largest = max(sums, key=lambda one: one.bytes)
    latency_us = min(one.microseconds for one in sums if one.bytes <= 4 * smallest)
    rate = _rate(largest.bytes / max(1e-9, largest.microseconds / 1e6))
    words = [f"{latency_us:,.0f} us a sum", f"{rate} in large ones"]
    decodes = [(parse_decode_name(one.name), one.microseconds / 1e3) for one in findings]
    one_row = [(counts[0], spent) for counts, spent in decodes if counts and counts[1] == 1]
    words += [f"{count} sums a decode in {spent:.2f} ms" for count, spent in one_row[:1] if count]
    prompts = [one for one in findings if one.name.startswith(PROMPT_PREFIX)]
    names = [word for one in prompts for word in one.name.replace(",", "").split()]
    tokens = next((int(word) for word in names if word.isdecimal()), 0)
    if tokens:
        seconds = sum(one.microseconds for one in prompts) / 1e6
        words.append(f"a prompt of {tokens:,} tokens in {seconds:.2f} s")
    return ", ".join(words)


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
