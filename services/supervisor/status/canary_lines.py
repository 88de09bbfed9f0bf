"""Canary findings of a rank (its measured collectives, prompt and decode) as one line. Pure."""

import dataclasses
from collections.abc import Sequence

from shared.canary_names import PROMPT_PREFIX, SUM_PREFIX, parse_decode_name
from shared.messages import CanaryFinding


@dataclasses.dataclass(frozen=True, slots=True)
class CanaryCosts:
    """Times and throughput that one rank's canary measured: sums over ranks, a prompt, a decode."""

    latency_us: float
    """Median time in microseconds of the fastest small sum."""
    bytes_per_s: float
    """Throughput of the largest sum: bytes that each rank contributes, per second."""
    prompt_tokens: int
    """Length of the computed prompt in tokens; 0: none was computed."""
    prompt_s: float
    """Seconds to compute the prompt, 0.0 without one."""
    decode_sums: int
    """Number of sums over ranks in one decode; 0: unknown."""
    decode_s: float
    """Seconds that these sums take alone, with one row."""


def costs(findings: Sequence[CanaryFinding]) -> CanaryCosts | None:
    """Return the times and throughput in a rank's canary findings.

    Returns:
        None if the findings have no sums over ranks.
    """
    sums = [one for one in findings if one.name.startswith(SUM_PREFIX)]
    if not sums:
        return None
    smallest = min(one.bytes for one in sums)
    largest = max(sums, key=lambda one: one.bytes)
    prompts = [one for one in findings if one.name.startswith(PROMPT_PREFIX)]
    digits = [word for one in prompts for word in one.name.replace(",", "").split()]
    decodes = [(parse_decode_name(one.name), one.microseconds / 1e6) for one in findings]
    decode = next(
        ((counts[0], seconds) for counts, seconds in decodes if counts and counts[1] == 1),
        (0, 0.0),
    )
    return CanaryCosts(
        latency_us=min(one.microseconds for one in sums if one.bytes <= 4 * smallest),
        bytes_per_s=largest.bytes / max(1e-9, largest.microseconds / 1e6),
        prompt_tokens=next((int(word) for word in digits if word.isdecimal()), 0),
        prompt_s=sum(one.microseconds for one in prompts) / 1e6,
        decode_sums=decode[0],
        decode_s=decode[1],
    )


def describe(findings: Sequence[CanaryFinding]) -> str:
    """Return the times and throughput in a rank's canary findings as one line of text.

    It has the latency and throughput of a sum over ranks and, if measured, the times of a decode
    and a prompt. It is "" if the findings have no sums.
    """
    measured = costs(findings)
    if measured is None:
        return ""
    words = [f"{measured.latency_us:,.0f} us a sum", f"{_rate(measured.bytes_per_s)} in large ones"]
    if measured.decode_sums:
        words.append(f"{measured.decode_sums} sums a decode in {measured.decode_s * 1e3:.2f} ms")
    if measured.prompt_tokens:
        words.append(f"a prompt of {measured.prompt_tokens:,} tokens in {measured.prompt_s:.2f} s")
    return ", ".join(words)


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
