"""Text of `lockstep status`: summary lines, canary, drafts, counters and a table of ranks. Pure."""

from collections.abc import Iterable, Sequence

from services.supervisor.status import canary_lines
from services.supervisor.status.service_queries import LockstepSummary
from shared.messages import DraftStatistics, RankStatus, StatusReported

_COLUMN_TITLES = ("rank", "state", "pid", "host", "device", "BLAS", "MLX", "weights", "memory")

_FAILURES = {
    "configuration": "A restart cannot help: change the setting, then start Lockstep again.",
    "epochs": "No further start is tried: repair the cause, then `lockstep restart scheduler`.",
}
"""Remedy of each failure. The line before it states the reason."""

_POSITIONS_SHOWN = 8
"""Draft positions with a share of their own; later ones are seldom reached."""


def render(status: StatusReported, *, formats: str = "", stored: str = "") -> str:
    """Return the text of `lockstep status`: summary lines, then a table with a row per rank.

    Args:
        status: the scheduler's report.
        formats: formats of tool calls and reasoning that the gateway reads; "" if it is unknown.
        stored: what of this host's stored blocks does not serve; "": nothing, or unknown.
    """
    state = "ready" if status.ready else f"not ready ({status.reason or 'no reason given'})"
    if status.draining:
        state += ", draining"
    lines = [
        f"Lockstep is {state}",
        f"  model        {status.model}",
        f"  fingerprint  {status.model_fingerprint or '-'}",
        f"  world        {status.world_size} x {status.backend}, epoch {status.epoch}",
        f"  steps        {_count(status.steps)}",
        f"  requests     {status.running} running, {status.waiting} waiting",
        f"  KV           {_count(status.kv_tokens_used)} of {_count(status.kv_tokens_max)} tokens",
        f"  context      {_count(status.context_tokens_max)} tokens at most",
    ]
    if status.failure:
        lines.insert(1, f"  {_FAILURES[status.failure]}")
    elif status.draining:
        lines.insert(1, "  New requests are refused until `lockstep drain --off`.")
    if formats:
        lines.append(f"  formats      {formats}")
    lines += _titled("layers", sorted({rank.layers for rank in status.ranks if rank.layers}))
    if status.spare_world:
        lines.append(f"  spares       {status.spare_world}")
    if status.world_change:
        lines.append(f"  change       {status.world_change}")
    if stored:
        lines.append(f"  stored       {stored}")
    if status.dismissed:
        gone = ", ".join(f"{rank.pid} on {rank.host}" for rank in status.dismissed)
        lines.append(f"  dismissed    {gone}")
    canaries = ((rank.rank, canary_lines.describe(rank.canary)) for rank in status.ranks)
    drafts = (_draft_line(one) for one in status.drafts if one.rows and one.proposed)
    lines += _titled("canary", (f"rank {rank}: {text}" for rank, text in canaries if text))
    lines += _titled("now", _numbers(status.gauges))
    lines += _titled("drafts", drafts)
    lines += _titled("total", _numbers(status.counters))
    rows = [_COLUMN_TITLES, *(_row(rank) for rank in status.ranks)]
    return "\n".join([*lines, "", *_table(rows)])


def render_all(summaries: Sequence[LockstepSummary]) -> str:
    """Return a table with a row per Lockstep, and why each one that is not ready is not."""
    rows: list[Sequence[str]] = [("port", "state", "model", "pid", "run folder")]
    for one in summaries:
        state = "ready" if one.ready else "not ready" if one.status else "no answer"
        rows.append((str(one.port), state, one.model, str(one.pid), one.run_dir))
    reasons = [f"  {one.port}: {one.reason}" for one in summaries if one.reason]
    title = f"{len(summaries)} Lockstep{'s run' if len(summaries) > 1 else ' runs'} here"
    advice = "Show one of them with `lockstep status --port PORT`."
    return "\n".join([title, *_table(rows), *reasons, advice])


def _row(rank: RankStatus) -> tuple[str, ...]:
    state = f"loading {rank.loaded:.0%}" if rank.state == "loading" else rank.state
    return (
        str(rank.rank),
        state,
        str(rank.pid) if rank.pid else "-",
        rank.host or "-",
        rank.device or "-",
        rank.blas or "-",
        rank.mlx_version or "-",
        f"{rank.shard_bytes / 2**20:,.0f} MiB" if rank.shard_bytes else "-",
        f"{rank.memory_bytes / 2**20:,.0f} MiB",
    )


def _titled(title: str, texts: Iterable[str]) -> list[str]:
    """Return one line per text, with the title before the first."""
    return [f"  {'' if place else title:<11}  {text}" for place, text in enumerate(texts)]


def _draft_line(one: DraftStatistics) -> str:
    positions = zip(one.proposed_at, one.accepted_at, strict=True)
    shares = [f"{100 * accepted / proposed:.0f}" for proposed, accepted in positions if proposed]
    return (
        f"{one.method}: {one.proposed:,} proposed, {one.accepted:,} accepted "
        f"({one.accepted / one.proposed:.0%}; by position "
        f"{' '.join(shares[:_POSITIONS_SHOWN])} %), "
        f"{one.accepted / one.rows + 1:.2f} tokens per step"
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _numbers(numbers: dict[str, float]) -> list[str]:
    return [f"{name} {_count(value)}" for name, value in sorted(numbers.items())]


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
