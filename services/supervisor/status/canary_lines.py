"""What a rank's canary has found, as one line for people. Pure."""

import dataclasses
from collections.abc import Sequence

from shared.canary_names import PROMPT, SUM, read_decode_name
from shared.messages import CanaryFinding


@dataclasses.dataclass(frozen=True, slots=True)
class Fabric:
    """What findings say about the links between ranks."""

    latency_us: float
    """Median time of the fastest sum of one element."""
    bytes_per_s: float
    """Of the largest sum: what each rank put in, by the time that it took."""
    prompt_tokens: int
    """Length of the prompt that was computed; 0: none."""
    prompt_s: float
    decode_sums: int
    """Sums over ranks that a decode has; 0: not known."""
    decode_s: float
    """What they take by themselves, with one row."""


def read(findings: Sequence[CanaryFinding]) -> Fabric | None:
    """Return what findings say; None where there are no sums."""
    sums = [one for one in findings if one.name.startswith(SUM)]
    if not sums:
        return None
    smallest = min(one.bytes for one in sums)
    largest = max(sums, key=lambda one: one.bytes)
    prompts = [one for one in findings if one.name.startswith(PROMPT)]
    digits = [word for one in prompts for word in one.name.replace(",", "").split()]
    decodes = [(read_decode_name(one.name), one.microseconds / 1e6) for one in findings]
    decode = next(
        ((counts[0], seconds) for counts, seconds in decodes if counts and counts[1] == 1),
        (0, 0.0),
    )
    return Fabric(
        latency_us=min(one.microseconds for one in sums if one.bytes <= 4 * smallest),
        bytes_per_s=largest.bytes / max(1e-9, largest.microseconds / 1e6),
        prompt_tokens=next((int(word) for word in digits if word.isdecimal()), 0),
        prompt_s=sum(one.microseconds for one in prompts) / 1e6,
        decode_sums=decode[0],
        decode_s=decode[1],
    )


def describe(findings: Sequence[CanaryFinding]) -> str:
    """Return one line; "" where there are no sums."""
    fabric = read(findings)
    if fabric is None:
        return ""
    words = [f"{fabric.latency_us:,.0f} us a sum", f"{_rate(fabric.bytes_per_s)} in large ones"]
    if fabric.decode_sums:
        words.append(f"{fabric.decode_sums} sums a decode in {fabric.decode_s * 1e3:.2f} ms")
    if fabric.prompt_tokens:
        words.append(f"a prompt of {fabric.prompt_tokens:,} tokens in {fabric.prompt_s:.2f} s")
    return ", ".join(words)


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
