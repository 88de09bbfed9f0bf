"""Draft policy. Owns how many drafts the next plan has, by expected tokens per millisecond. Pure.

Ranks without kernels pad rows to the most drafts of a row, so one number is chosen for the whole
batch. Every
number up to the longest drafts is compared by expected tokens and measured step period. A row sends
fewer drafts if further ones are too unlikely for the measured cost of a token. Source: Liu et al.,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (2024), here with
measured periods instead of a cost model.

Run-ahead or lock-step: drafts depend on the result of the plan before, so a sequence with drafts is
not part of the plan that is in flight meanwhile. With T(n) the period of a step of n rows, and e
the idle time of the device when no plan is sent ahead, there are three schedules:

    lock-step   all rows in each plan, which waits for the result before: T(n) + e per round
    halves      two plans in flight with half of the rows each: 2 T(n/2) per round
    others      rows without drafts run in the other plan: T(n) + T(n - drafted) per round, with
                twice the tokens for these rows

Where steps with drafts are faster, memory bounds a step and T(n/2) is about T(n). Halves then cost
about T(n) - e more than lock-step, and the extra plan of `others` could have verified drafts too.
Halves win by e where T is proportional to n, but there drafts rarely make a step faster; `others`
win where e exceeds a step. So plans run in lock-step while any row has drafts, and ahead otherwise.
The compared period contains the measured e, so run-ahead stays where e makes drafts slower.

Switching to lock-step costs e once, and switching back costs the building of a graph that does not
overlap with a step. The switch is made only if the first verification gains more than both cost.
"""

import dataclasses
from typing import Protocol

_MARGIN = 1.03
"""Smallest speedup for which drafts are used."""
_CHANCE_MIN = 0.02
"""Less likely drafts are not sent."""
_MARGINAL_SHARE = 0.5
"""Part of a draft's cost that its chance must be worth; leaving it out does not save padding."""
_PLAIN_EVERY = ((2.0, 1_024), (1.2, 256), (0.0, 64))
"""(speedup, steps): with a speedup above the first, one of this many steps is plain, to measure
plain steps again. A small speedup needs this more often and loses little by it."""
_ASSUMED_SPEEDUP = 2.0
"""Speedup reported when drafts are used without comparing costs."""


class Chances(Protocol):
    """Acceptance rates of a sequence's drafts: the chance that the first ones are all accepted.

    From these chances the policy computes how many tokens a verification will yield.
    """

    def add_chances(self, gains: list[float], matched: int, tokens_in_flight: int, /) -> None:
        """Add to `gains[j]` the chance that the first j + 1 drafts are all accepted.

        Args:
            gains: one entry per possible draft; changed in place.
            matched: how many tokens at the end of the known text equal those before the place from
                which drafts are copied.
            tokens_in_flight: tokens sampled before these drafts that are not known yet.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could have drafts in the next plan, with its chances and limits."""

    acceptance: Chances
    matched: int
    """Tokens matched by its proposer; 0: it has no drafts."""
    tokens_in_flight: int
    """Its tokens that are sampled in flight and not known yet."""
    drafts_max: int
    """Most drafts once those tokens are known."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """The number of drafts of the next plan, or that it must wait for results."""

    drafts: int = 0
    """Most drafts of a sequence."""
    chance_min: float = 0.0
    """Less likely drafts are not sent."""
    waits_for_results: bool = False
    """The plan waits for the results of all plans in flight."""
    speedup: float = dataclasses.field(default=0.0, compare=False)
    """Expected tokens per time with drafts, relative to plain steps; 0: drafts are not faster. It
    is set too when a plain step is made only to measure it again."""


PLAIN_STEP = DraftChoice()


def choose(
    candidates: list[Candidate],
    rows: int,
    periods_ms: list[float],
    switch_ms: float,
    drafted_steps: int,
    *,
    is_ahead: bool = False,
    margin: float = _MARGIN,
) -> DraftChoice:
    """Choose the number of drafts of the next plan by expected tokens per millisecond.

    Args:
        candidates: sequences that could have drafts.
        rows: sequences that decode in the plan.
        periods_ms: expected milliseconds per step by drafts per row; index 0 means no drafts.
        switch_ms: milliseconds that a step with drafts costs in addition if plans are sent ahead.
        drafted_steps: steps with drafts since a plain step of as many rows was measured.
        is_ahead: add `switch_ms` even if no candidate has tokens in flight.
        margin: smallest speedup for which drafts are used.
    """
    plain_ms = periods_ms[0]
    longest = max([one.drafts_max for one in candidates if one.matched], default=0)
    if not plain_ms or not longest:
        return PLAIN_STEP
    gains = [0.0] * longest
    tokens_in_flight = 0
    for one in candidates:
        tokens_in_flight = max(tokens_in_flight, one.tokens_in_flight)
        if one.matched and one.drafts_max == longest:
            one.acceptance.add_chances(gains, one.matched, one.tokens_in_flight)
        elif one.matched and one.drafts_max:
            own = [0.0] * one.drafts_max
            one.acceptance.add_chances(own, one.matched, one.tokens_in_flight)
            for position, gain in enumerate(own):
                gains[position] += gain
    best, best_speedup = 0, margin
    tokens = best_tokens = float(rows)
    wait_ms = switch_ms if tokens_in_flight or is_ahead else 0.0
    for drafts, gain in enumerate(gains, start=1):
        tokens += gain
        speedup = tokens * plain_ms / (rows * (periods_ms[drafts] + wait_ms))
        if speedup > best_speedup:
            best, best_speedup, best_tokens = drafts, speedup, tokens
    if not best:
        return PLAIN_STEP
    drafted_steps_max = next(steps for speedup, steps in _PLAIN_EVERY if best_speedup > speedup)
    if drafted_steps >= drafted_steps_max:
        return DraftChoice(speedup=best_speedup)
    if tokens_in_flight:
        return DraftChoice(waits_for_results=True, speedup=best_speedup)
    token_ms = periods_ms[best] / best_tokens
    draft_ms = (periods_ms[best] - periods_ms[1]) / (max(1, best - 1) * len(candidates))
    chance_min = max(_CHANCE_MIN, _MARGINAL_SHARE * draft_ms / token_ms)
    return DraftChoice(best, chance_min, speedup=best_speedup)


def choose_all(candidates: list[Candidate]) -> DraftChoice:
    """Choose as many drafts as allowed, regardless of their cost (speculation is not adaptive).

    Args:
        candidates: sequences that could have drafts.

    Returns:
        The most drafts of any of them; if one has tokens in flight, that the plan must wait for
        these; a step without drafts if no candidate has a match.
    """
    found = [one for one in candidates if one.matched and one.drafts_max > 0]
    if not found:
        return PLAIN_STEP
    if any(one.tokens_in_flight for one in found):
        return DraftChoice(waits_for_results=True, speedup=_ASSUMED_SPEEDUP)
    return DraftChoice(max(one.drafts_max for one in found), speedup=_ASSUMED_SPEEDUP)


def count_worth_sending(acceptance: Chances, matched: int, count: int, chance_min: float) -> int:
    """Return how many drafts of a sequence, from the first, are likely enough to be sent.

    Args:
        acceptance: chances of the sequence's drafts.
        matched: length of its match in tokens, as for `Chances.add_chances`.
        count: most drafts.
        chance_min: smallest chance that a draft and all before it are accepted.
    """
    chances = [0.0] * count
    acceptance.add_chances(chances, matched, 0)
    return sum(chance >= chance_min for chance in chances)


def can_pay(drafted_rows: int, rows: int, drafts_max: int, periods_ms: list[float]) -> bool:
    """Tell whether drafts would be at least 3 % faster than none if all of them were accepted.

    Args:
        drafted_rows: number of rows with drafts.
        rows: number of sequences that decode.
        drafts_max: most drafts per row.
        periods_ms: expected milliseconds per step by drafts per row; index 0 means no drafts.

    Returns:
        True if some number of drafts from 1 to `drafts_max` would be, or if nothing was measured.
    """
    plain_ms = periods_ms[0]
    if not plain_ms:
        return True
    return any(
        (rows + drafted_rows * drafts) * plain_ms > _MARGIN * rows * periods_ms[drafts]
        for drafts in range(1, drafts_max + 1)
    )
