"""Prometheus metrics of each rank, with its number and host as labels."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import RankStatus

_LABELS = ("rank", "host")


def families(prefix: str, ranks: Sequence[RankStatus]) -> Iterator[Metric]:
    """Yield Prometheus metrics of the ranks: state, memory, shares of their time, and clocks.

    Args:
        prefix: first part of every metric's name.
        ranks: the scheduler's last report of each rank.
    """
    for name, text, values in (
        ("rank_ready", "1 when this rank executes steps, else 0.",
         [one.state == "ready" for one in ranks]),
        ("rank_weights_bytes", "Weights on this rank.", [one.shard_bytes for one in ranks]),
        ("rank_memory_active_bytes", "Memory that MLX's arrays use.",
         [one.memory_bytes for one in ranks]),
        ("rank_memory_peak_bytes",
         "The most memory that MLX's arrays have used since the rank's process started.",
         [one.peak_bytes for one in ranks]),
        ("rank_memory_cached_bytes", "Freed memory that MLX keeps for new arrays.",
         [one.cached_bytes for one in ranks]),
        ("rank_silence_seconds", "Time since the rank's last message; it sends one a second.",
         [one.silence_s for one in ranks]),
        ("rank_clock_offset_seconds", "The rank's monotonic clock minus the scheduler's.",
         [one.clock_offset_s for one in ranks]),
        ("rank_clock_error_seconds", "Largest error of rank_clock_offset_seconds.",
         [one.clock_error_s for one in ranks]),
    ):  # fmt: skip
        gauge = GaugeMetricFamily(prefix + name, text, labels=_LABELS)
        for rank, value in zip(ranks, values, strict=True):
            gauge.add_metric([str(rank.rank), rank.host], value)
        yield gauge
    for name, text, values in (
        ("rank_busy_seconds", "Time in which the rank's device had steps.",
         [one.busy_s for one in ranks]),
        ("rank_idle_seconds",
         "Time in which the rank's device waited for a step although requests were open.",
         [one.idle_s for one in ranks]),
        ("rank_late_seconds",
         "Time by which the rank ended steps after the first rank had.",
         [one.late_s for one in ranks]),
        ("rank_awaited_seconds",
         "Time for which other ranks waited for this one in collectives of measured steps.",
         [one.awaited_s for one in ranks]),
        ("rank_expert_assignments",
         "Tokens routed to experts of this rank, once for each expert.",
         [one.assignments for one in ranks]),
        ("rank_expert_foreign_assignments",
         "Tokens routed to other ranks' experts, in layers whose experts are divided.",
         [one.foreign_assignments for one in ranks]),
    ):  # fmt: skip
        counter = CounterMetricFamily(prefix + name, text, labels=_LABELS)
        for rank, value in zip(ranks, values, strict=True):
            counter.add_metric([str(rank.rank), rank.host], value)
        yield counter
    yield from _parts(prefix, ranks)


def _parts(prefix: str, ranks: Sequence[RankStatus]) -> Iterator[Metric]:
    for name, text, field in (
        ("rank_part_seconds", "Time of a part in the steps that were measured.", "seconds"),
        ("rank_part_runs", "Runs of a part in the steps that were measured.", "runs"),
        ("rank_part_bytes",
         "Bytes of weights that a part read in measured steps, or that a collective was given.",
         "bytes"),
    ):  # fmt: skip
        counter = CounterMetricFamily(prefix + name, text, labels=[*_LABELS, "part"])
        for rank in ranks:
            for part in rank.parts:
                value = getattr(part, field)
                counter.add_metric([str(rank.rank), rank.host, part.part], value)
        yield counter
