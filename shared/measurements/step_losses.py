"""Losses in measured steps: which rank is waited for and why, and which part is slow.

Pure. Averages are over steps of one kind that all ranks have reported.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from shared.messages.step_profile import MeasuredStep, Part, StepProfile, unpack_spans

_READING_PARTS: tuple[Part, ...] = ("attention", "mlp", "experts", "head")
"""Parts whose time is at least that of reading their weights."""
_TITLES: dict[Part, str] = {
    "host": "the host's work",
    "blocks": "changing rows and blocks",
    "embedding": "the embedding",
    "attention": "attention",
    "kv_write": "writing keys and values",
    "mlp": "the MLP",
    "experts": "experts",
    "collective": "collectives",
    "norms": "norms and residuals",
    "head": "the head",
    "drafting": "drafting",
    "masks": "masks of grammars",
    "sampling": "sampling",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Time of a step that could be saved, on average."""

    seconds: float
    sentence: str
    """What takes it, with the numbers."""


def awaited_seconds(profiles: Iterable[StepProfile]) -> dict[int, float]:
    """Return, by rank, how long others waited for it in the collectives of one step.

    All ranks leave a collective together, so the one that came last spent the least time in it. The
    others waited for it for as long as they spent more.

    Args:
        profiles: of the same step, one per rank. They have the same collectives in the same order.
    """
    seconds = {
        profile.rank: [
            one.seconds for one in unpack_spans(profile.spans) if one.part == "collective"
        ]
        for profile in profiles
    }
    awaited: defaultdict[int, float] = defaultdict(float)
    for number in range(min(map(len, seconds.values()), default=0)):
        durations = {rank: one[number] for rank, one in seconds.items()}
        last = min(durations, key=lambda rank: durations[rank])
        awaited[last] += max(durations.values()) - durations[last]
    return dict(awaited)


def comparable_steps(steps: Iterable[MeasuredStep], world_size: int) -> list[MeasuredStep]:
    """Return the steps of the most frequent kind that all ranks have reported."""
    whole = [one for one in steps if len(one.profiles) == world_size]
    kinds = Counter(one.kind for one in whole)
    return [one for one in whole if one.kind == kinds.most_common(1)[0][0]]


def mean_seconds(steps: Sequence[MeasuredStep]) -> dict[int, dict[Part, float]]:
    """Return, by rank and part, the mean seconds of a step."""
    sums: defaultdict[int, defaultdict[Part, float]] = defaultdict(lambda: defaultdict(float))
    for step in steps:
        for profile in step.profiles:
            for part in profile.parts:
                sums[profile.rank][part.part] += part.seconds / len(steps)
    return {rank: dict(parts) for rank, parts in sorted(sums.items())}


def find_losses(steps: Sequence[MeasuredStep]) -> list[Loss]:
    """Return the losses of comparable steps, the largest first; [] without steps."""
    if not steps:
        return []
    losses = [*_waits(steps), *_slow_parts(steps), *_collectives(steps)]
    return sorted((one for one in losses if one.seconds > 0.0), key=lambda one: -one.seconds)


def _waits(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield, for each rank that is waited for, how long and why."""
    awaited: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        for rank, seconds in awaited_seconds(step.profiles).items():
            awaited[rank] += seconds / len(steps)
    means = mean_seconds(steps)
    for rank, seconds in awaited.items():
        others = [parts for other, parts in means.items() if other != rank]
        more = {
            part: mine - statistics.median(one.get(part, 0.0) for one in others)
            for part, mine in means[rank].items()
            if part != "collective"
        }
        part = max(more, key=lambda one: more[one])
        yield Loss(
            seconds,
            f"The others wait {_ms(seconds)} a step for rank {rank}: {_TITLES[part]} "
            f"{'take' if _TITLES[part].endswith('s') else 'takes'} "
            f"{_ms(means[rank][part])} there, {_ms(means[rank][part] - more[part])} elsewhere.",
        )


def _slow_parts(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield the parts that take longer than reading their bytes, where that was measured."""
    for part in _READING_PARTS:
        found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for profile in (one for step in steps for one in step.profiles):
            for total in profile.parts:
                if total.part == part and profile.bytes_per_s:
                    read = total.bytes + (profile.kv_bytes if part == "attention" else 0)
                    found[profile.rank].append((total.seconds, read / profile.bytes_per_s))
        for rank, pairs in found.items():
            seconds, least = (statistics.fmean(values) for values in zip(*pairs, strict=True))
            yield Loss(
                seconds - least,
                f"On rank {rank} {_TITLES[part]} takes {_ms(seconds)} a step, and reading its "
                f"bytes would take {_ms(least)}.",
            )


def _collectives(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield the time of collectives without waiting: that of the rank that waits least."""
    means = mean_seconds(steps)
    seconds = min((parts.get("collective", 0.0) for parts in means.values()), default=0.0)
    runs = {
        part.runs for one in steps[-1].profiles for part in one.parts if part.part == "collective"
    }
    if runs:
        count = max(runs)
        yield Loss(
            seconds,
            f"{count} collectives take {_ms(seconds)} a step even where no rank is late, "
            f"{seconds / count * 1e6:.0f} us each.",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
