"""Parts of decode steps by rank, from steps that a running stack measures while streams decode."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.commands.bench.measuring.report import PART, Case
from services.supervisor.status.profile_query import ProfileQuery
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.measurements.step_losses import EXCHANGES, mean_exchanges, mean_seconds
from shared.messages import MeasuredStep
from shared.messages.telemetry.step_profile import Part

SHARES = [
    "rows",
    "measured_step_ms",
    "attention_share",
    "mlp_share",
    "experts_share",
    "exchanges_share",
    "head_share",
    "sampling_share",
    "other_share",
]
EXCHANGED = [
    "collectives_per_step",
    "collectives_ms",
    "messages_per_step",
    "messages_ms",
    "waiting_ms",
    "transfer_ms",
]
"""Columns of the two tables. Messages are those that a pipeline sends and receives."""
_OWN_SHARES: tuple[Part, ...] = ("attention", "mlp", "experts", "head", "sampling")
PART_TIMES = [f"{part}_ms" for part in _OWN_SHARES]
STEPS = 20
"""Decodes that are measured, at least."""
_DEADLINE_S = 120.0


def measure_steps(config: Config, clients: int, decode: Callable[[], object]) -> list[MeasuredStep]:
    """Measure decodes of streams, and return those with the most rows.

    Args:
        config: settings of the running stack.
        clients: number of streams.
        decode: has the streams decode at once, for some time; is called again when it returns.

    Raises:
        UnavailableError: when streams fail, the scheduler does not answer, or no decode was
            measured.
    """
    # The first steps read prompts, and not all streams decode in them.
    count = min(limits.PROFILES_PER_MESSAGE_MAX, STEPS + 8 + 2 * clients)
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            decode()

    with ProfileQuery(config) as query, ThreadPoolExecutor(1) as threads:
        query.begin(count)
        loading = threads.submit(load)
        try:
            measured = query.collect(
                count, _DEADLINE_S, lambda _: loading.result() if loading.done() else None
            )
        finally:
            is_over.set()
        loading.result()
    decodes = [one for one in measured if not one.prefill_tokens]
    if not decodes:
        raise UnavailableError(f"None of {len(measured)} measured steps decodes only.")
    rows = max(one.decodes for one in decodes)
    return [one for one in decodes if one.decodes == rows]


def rank_metrics(steps: Sequence[MeasuredStep]) -> dict[int, dict[str, float | None]]:
    """Return, by rank, the metrics of a mean step.

    Args:
        steps: measured decodes of equally many rows.

    Returns:
        rows: that decode; measured_step_ms: its time, which is longer than that of other steps;
        …_ms: milliseconds of each part; …_share: their share of the step, with all exchanges
        between ranks as one part; collectives_per_step and messages_per_step: their number, None
        without any; waiting_ms: part of the exchanges in which the rank waited for others;
        transfer_ms: the other part.
    """
    found = {}
    shared = mean_exchanges(steps)
    for rank, seconds in mean_seconds(steps).items():
        whole_s = sum(seconds.values())
        exchanges_s = sum(seconds.get(part, 0.0) for part in EXCHANGES)
        own = {part: seconds.get(part) for part in _OWN_SHARES}
        other_s = whole_s - exchanges_s - sum(filter(None, own.values()))
        sums, messages = _runs(steps, rank, EXCHANGES[:1]), _runs(steps, rank, EXCHANGES[1:])
        messages_s = exchanges_s - seconds.get("collective", 0.0)
        found[rank] = {
            "rows": float(steps[0].decodes),
            "measured_step_ms": whole_s * 1e3,
            **{f"{part}_share": one and one / whole_s for part, one in own.items()},
            "exchanges_share": exchanges_s / whole_s,
            "other_share": other_s / whole_s,
            **{f"{part}_ms": one * 1e3 for part, one in seconds.items() if part not in EXCHANGES},
            "collectives_per_step": sums,
            "collectives_ms": seconds["collective"] * 1e3 if sums else None,
            "messages_per_step": messages,
            "messages_ms": messages_s * 1e3 if messages else None,
            "waiting_ms": shared[rank].waiting_s * 1e3 if exchanges_s else None,
            "transfer_ms": shared[rank].transfer_s * 1e3 if exchanges_s else None,
        }
    return found


def by_rank(case: Case, tables: tuple[str, str], contender: str) -> list[Case]:
    """Divide a case whose contenders are ranks into one or two cases per rank, by table.

    Args:
        case: has the metrics of `rank_metrics`.
        tables: names of the tables with the parts and with the exchanges.
        contender: name of the only contender of the new cases.
    """
    found = []
    for rank, series in case.series.items():
        for is_exchange, table in enumerate(tables):
            metrics = {key: one for key, one in series.items() if (key in EXCHANGED) == is_exchange}
            if metrics:
                conditions = {**case.conditions, PART: table, "rank": int(rank)}
                found.append(Case(conditions=conditions, series={contender: metrics}))
    return found


def _runs(steps: Sequence[MeasuredStep], rank: int, parts: Sequence[Part]) -> float | None:
    """Return how often these parts of a rank ran per step; None: never."""
    runs = [
        part.runs
        for step in steps
        for profile in step.profiles
        for part in profile.parts
        if profile.rank == rank and part.part in parts
    ]
    return sum(runs) / len(steps) if runs else None
