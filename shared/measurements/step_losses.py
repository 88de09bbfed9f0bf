"""Losses in measured steps: which rank is waited for and why, and which part is slow.

Pure. Averages are over steps of one kind that all ranks have reported.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from shared.messages.telemetry.step_profile import MeasuredStep, Part, StepProfile, unpack_spans

READING_PARTS: tuple[Part, ...] = ("attention", "mlp", "experts", "head")
"""Parts whose time is at least that of reading their weights."""
EXCHANGES: tuple[Part, ...] = ("collective", "send", "receive")
"""Parts in which ranks exchange arrays, and may wait for each other."""
_TITLES: dict[Part, str] = {
    "host": "the host's work",
    "blocks": "changing rows and blocks",
    "embedding": "the embedding",
    "attention": "attention",
    "kv_write": "writing keys and values",
    "mlp": "the MLP",
    "experts": "experts",
    "collective": "collectives",
    "send": "sending",
    "receive": "receiving",
    "norms": "norms and residuals",
    "head": "the head",
    "drafting": "drafting",
    "masks": "masks of grammars",
    "sampling": "sampling",
}


_PLURAL: tuple[Part, ...] = ("experts", "collective", "norms", "masks")
"""Parts whose titles are plurals."""
_REASON_SHARE_MIN = 0.1
"""A part that takes longer on one rank explains the wait for it if it makes up this share."""


@dataclasses.dataclass(slots=True)
class Exchanges:
    """What the exchanges of one step take on one rank, in seconds."""

    transfer_s: float = 0.0
    """Even where no rank is late."""
    waiting_s: float = 0.0
    """For other ranks."""
    awaited_s: float = 0.0
    """Time that others waited for this rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """Time of a step that could be saved, on average."""

    seconds: float
    sentence: str
    """What takes it, with the numbers."""


def exchanges(profiles: Sequence[StepProfile]) -> dict[int, Exchanges]:
    """Return, by rank, how the time of the exchanges in one step divides.

    All ranks leave a collective together, so the one that came last spent the least time in it: the
    time of the transfer. The others waited for that rank for as long as they spent more. A rank of
    a pipeline receives from the next one; the shorter of sending and receiving is the transfer.

    Args:
        profiles: of the same step, one per rank. They have the same collectives in the same order.
    """
    found = {profile.rank: Exchanges() for profile in profiles}
    durations = {profile.rank: _durations(profile) for profile in profiles}
    collectives = [one["collective"] for one in durations.values()]
    for spent in zip(*collectives, strict=False):
        last = list(durations)[spent.index(min(spent))]
        for rank, seconds in zip(durations, spent, strict=True):
            found[rank].transfer_s += min(spent)
            found[rank].waiting_s += seconds - min(spent)
        found[last].awaited_s += max(spent) - min(spent)
    for rank in durations:
        sender = durations.get(rank + 1, {}).get("send", [])
        for spent in zip(durations[rank]["receive"], sender, strict=False):
            for one, seconds, other in zip((rank, rank + 1), spent, (rank + 1, rank), strict=True):
                found[one].transfer_s += min(spent)
                found[one].waiting_s += seconds - min(spent)
                found[other].awaited_s += seconds - min(spent)
    return found


def _durations(profile: StepProfile) -> dict[Part, list[float]]:
    """Return the seconds of each exchange, in order."""
    found: dict[Part, list[float]] = {part: [] for part in EXCHANGES}
    for one in unpack_spans(profile.spans):
        if one.part in found:
            found[one.part].append(one.seconds)
    return found


def mean_seconds(steps: Sequence[MeasuredStep]) -> dict[int, dict[Part, float]]:
    """Return, by rank and part, the mean seconds of a step."""
    sums: defaultdict[int, defaultdict[Part, float]] = defaultdict(lambda: defaultdict(float))
    for step in steps:
        for profile in step.profiles:
            for part in profile.parts:
                sums[profile.rank][part.part] += part.seconds / len(steps)
    return {rank: dict(parts) for rank, parts in sorted(sums.items())}


def mean_exchanges(steps: Sequence[MeasuredStep]) -> dict[int, Exchanges]:
    """Return, by rank, how the time of the exchanges divides in a mean step."""
    means: defaultdict[int, Exchanges] = defaultdict(Exchanges)
    for step in steps:
        for rank, one in exchanges(step.profiles).items():
            means[rank].transfer_s += one.transfer_s / len(steps)
            means[rank].waiting_s += one.waiting_s / len(steps)
            means[rank].awaited_s += one.awaited_s / len(steps)
    return dict(means)


def find_losses(steps: Sequence[MeasuredStep]) -> list[Loss]:
    """Return the losses of comparable steps, the largest first; [] without steps."""
    if not steps:
        return []
    losses = [*_waits(steps), *_slow_parts(steps), *_transfers(steps)]
    return sorted((one for one in losses if one.seconds > 0.0), key=lambda one: -one.seconds)


def largest_loss(steps: Iterable[MeasuredStep], world_size: int) -> str:
    """Return the largest loss, a sentence; "" before any step was measured on all ranks.

    The steps of the last epoch and of its most frequent kind count.

    Args:
        steps: measured steps of any kind, oldest first.
        world_size: number of ranks.
    """
    whole = [one for one in steps if len(one.profiles) == world_size]
    last = [one for one in whole if one.epoch == whole[-1].epoch]
    kinds = Counter(one.kind for one in last)
    same = [one for one in last if one.kind == kinds.most_common(1)[0][0]]
    losses = find_losses(same)
    return losses[0].sentence if losses else ""


def _waits(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield, for each rank that is waited for, how long and why."""
    means = mean_seconds(steps)
    turns = ", as the ranks of a pipeline compute in turn" if _is_pipeline(steps) else ""
    for rank, one in mean_exchanges(steps).items():
        reasons = _reasons(means, rank, one.awaited_s)
        yield Loss(
            one.awaited_s,
            f"The others wait {_ms(one.awaited_s)} a step for rank {rank}{turns}"
            + (f": {reasons}." if reasons else "."),
        )


def _reasons(means: dict[int, dict[Part, float]], rank: int, awaited_s: float) -> str:
    """Say which parts take longer on a rank and so explain the wait for it; "" if no part does."""
    others = [parts for other, parts in means.items() if other != rank]
    usual = {
        part: statistics.median(one.get(part, 0.0) for one in others)
        for part in means[rank]
        if part not in EXCHANGES and others
    }
    more = {part: means[rank][part] - seconds for part, seconds in usual.items()}
    largest = max(more.values(), default=0.0)
    if largest <= _REASON_SHARE_MIN * awaited_s:
        return ""
    named = sorted((one for one in more if more[one] > largest / 2), key=lambda one: -more[one])
    return "; ".join(
        f"{_takes(part, means[rank][part])} there, {_ms(usual[part])} elsewhere" for part in named
    )


def _slow_parts(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield the parts that take longer than reading their bytes, where that was measured.

    Ranks that share a layer compute it at the same time, and the others wait for one that takes
    longer. So the rank with the smallest loss counts. A prefill computes more than it reads.
    """
    if steps[0].kind == "prefill":
        return
    for part in READING_PARTS:
        losses = sorted(_beyond_reading(steps, part), key=lambda one: one.seconds)
        yield from losses if _is_pipeline(steps) else losses[:1]


def _beyond_reading(steps: Sequence[MeasuredStep], part: Part) -> Iterable[Loss]:
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
            f"On rank {rank} {_takes(part, seconds)} a step, and reading the bytes that "
            f"{'they need' if part in _PLURAL else 'it needs'} would take {_ms(least)}.",
        )


def _transfers(steps: Sequence[MeasuredStep]) -> Iterable[Loss]:
    """Yield the time of exchanges without waiting, on the rank where it is longest."""
    seconds = max((one.transfer_s for one in mean_exchanges(steps).values()), default=0.0)
    counts = [
        sum(part.runs for part in one.parts if part.part in EXCHANGES) for one in steps[-1].profiles
    ]
    if count := max(counts, default=0):
        yield Loss(
            seconds,
            f"{count} exchanges between ranks take {_ms(seconds)} a step even where no rank is "
            f"late, {seconds / count * 1e6:.0f} us each.",
        )


def _is_pipeline(steps: Sequence[MeasuredStep]) -> bool:
    return any(
        part.part == "receive"
        for step in steps
        for profile in step.profiles
        for part in profile.parts
    )


def _takes(part: Part, seconds: float) -> str:
    return f"{_TITLES[part]} {'take' if part in _PLURAL else 'takes'} {_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
