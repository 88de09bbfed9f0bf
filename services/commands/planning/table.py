"""Text of a memory plan. Pure."""

import json
import shlex

from services.commands.checks.text_table import counted, format_bytes, table_lines
from services.commands.planning.report import MemoryPlan, RankShare, SplitOption

_HEADINGS = (
    "ranks", "split", "host", "weights", "whole + own", "KV per token", "KV budget", "reserve",
    "longest", "verdict",
)  # fmt: skip


def render(plan: MemoryPlan) -> str:
    """Return a plan as text.

    Its parts: a summary of model and memory, a table of splits, a table of how many sequences of
    which length run at once, and the recommendation.
    """
    what = f"{plan.layers} layers, {format_bytes(plan.weights_bytes)} of weights"
    length = f"allows {plan.context_tokens_max:,} tokens"
    lines = [f"{plan.model} ({plan.model_type}): {what}, {length}"]
    if plan.draft_bytes:
        lines.append(f"  draft model: {format_bytes(plan.draft_bytes)} on every rank")
    lines += [
        f"  {one.host}: {format_bytes(one.total_bytes)}, of which {plan.device} may use "
        f"{format_bytes(one.usable_bytes)}"
        for one in plan.memory
    ]
    asked = (
        f"{counted(plan.asked_sequences, 'sequence')} of {plan.asked_context_tokens:,} tokens, "
        f"kv_bits {plan.kv_bits}"
    )
    rows = [_HEADINGS, *(row for option in plan.options for row in _rows(option))]
    lines += ["", f"Splits, for {asked}", *table_lines(rows, indent=2)]
    lines += _fits(plan)
    lines += ["", _recommended(plan)]
    if plan.experts is not None:
        lines.append(f"Experts, by {plan.experts.assignments:,} loads: {plan.experts.sentence}")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _rows(option: SplitOption) -> list[tuple[str, ...]]:
    start = (str(option.ranks), option.sharding)
    if option.obstacle:
        return [(*start, *["-"] * 7, f"not possible: {option.obstacle}")]
    alike = all(_figures(one) == _figures(option.shares[0]) for one in option.shares)
    shown = option.shares[:1] if alike else option.shares
    return [
        (
            *(start if number == 0 else ("", "")),
            "each" if alike and option.ranks > 1 else one.host,
            *_figures(one),
            f"{option.context_tokens:,}" if number == 0 else "",
            "fits" if one.short_bytes == 0 else f"{format_bytes(one.short_bytes)} short",
        )
        for number, one in enumerate(shown)
    ]


def _figures(share: RankShare) -> tuple[str, ...]:
    token = format_bytes(share.kv_bytes_per_token)
    if share.kv_bytes_per_row:
        token += f" + {format_bytes(share.kv_bytes_per_row)}/row"
    return (
        format_bytes(share.whole_bytes + share.divided_bytes),
        f"{format_bytes(share.whole_bytes)} + {format_bytes(share.divided_bytes)}",
        token,
        format_bytes(share.kv_budget_bytes),
        format_bytes(share.reserve_bytes),
    )


def _fits(plan: MemoryPlan) -> list[str]:
    if not plan.fits or plan.recommendation is None:
        return []
    best = plan.recommendation
    bits = list(plan.fits[0].sequences)
    split = f"{best.sharding} over {best.ranks} ranks" if best.ranks > 1 else "1 rank"
    rows = [("context", *(f"kv_bits {one}" for one in bits))]
    rows += [
        (f"{fit.context_tokens:,}", *(_many(fit.sequences[one]) for one in bits))
        for fit in plan.fits
    ]
    return ["", f"Sequences at once, by length ({split})", *table_lines(rows, indent=2)]


def _recommended(plan: MemoryPlan) -> str:
    best = plan.recommendation
    if best is None:
        least = min((one.short_bytes for one in plan.options if one.shares), default=0)
        return (
            f"Nothing to recommend: every split lacks memory, the best one {format_bytes(least)} "
            "per rank. "
            "Use more or larger hosts, or a smaller or more strongly quantized model."
        )
    # Numbers, strings and booleans are written alike in JSON and TOML.
    settings = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in best.settings.items()
    ]
    if best.flags:
        what = "; set ".join([f"lockstep up {shlex.join(best.flags)}", *settings])
    else:
        what = f"in the inventory set {', '.join(settings)}"
        if best.ranks < len(plan.memory):
            what += f", with ranks on {' and '.join(dict.fromkeys(best.hosts))} only"
    split = f"{best.sharding}, {best.ranks} ranks" if best.ranks > 1 else "1 rank"
    return (
        f"Recommended: {split}, kv_bits {best.kv_bits}, with room for {_many(best.sequences)} "
        f"of {best.context_tokens:,} tokens at once: {what}"
    )


def _many(count: int) -> str:
    return "any number" if count >= 2**31 - 1 else f"{count:,}"
