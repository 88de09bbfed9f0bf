"""How many drafts the next plan carries: as many as bring the most tokens per millisecond. Pure.

Rows are padded to the longest drafts of the plan, so one number is chosen for the whole batch: all
cuts between 0 and the longest are compared, by the tokens that they are expected to bring and the
measured period of such a step. Below the cut a row sends no draft that is too unlikely for what a
token more has been measured to cost. Source: Liu et al., "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput" (2024), with measured periods for its model of them.

Run-ahead or lock-step. The drafts of a plan follow the result of the one before, so a sequence that
is verified sits out the plan in flight meanwhile. Three ways to go on, T(n) being the period of a
step of n rows and e what the device waits when nothing is sent ahead:

    lock-step   everybody in each plan, and the next waits for the result: T(n) + e per turn
    halves      two plans in flight, half of the rows in each: 2 T(n/2) per turn
    the others  those without drafts keep the other plan busy: T(n) + T(n - drafted) per turn,
                twice the tokens for them

Where drafts pay, a step hardly costs more with more rows (memory bounds it: T(n/2) is about T(n)),
so halves cost about T(n) - e more than lock-step, and the others' extra plan is one that lock-step
would have used to verify too. Halves win where T is in proportion to n by all of e, but there k
drafts cost k times a row and seldom pay at all; the others win where e exceeds a whole step. At one
row there is nothing to choose. So: lock-step while anybody is verified, and run-ahead otherwise.
The period that is compared contains e, as it was measured; where e makes drafts lose, run-ahead
stays.

A turn to lock-step costs e once, since the plan that would have been sent ahead is held back until
its tokens are known, and the turn back costs the building of a graph that nothing hides. It is only
made when the first verification alone pays for both.
"""

import dataclasses
from typing import Protocol

_MARGIN = 1.03
"""Drafts must promise so many times the tokens of plain steps."""
_CHANCE_MIN = 0.02
"""A draft that is accepted more seldom only counts as rejected."""
_MARGINAL_SHARE = 0.5
"""So much of a draft's cost must its chance be worth: padding is not saved by leaving it out."""
_PLAIN_EVERY = ((2.0, 1_024), (1.2, 256), (0.0, 64))
"""(times the tokens, steps): where drafts promise so much, one step of so many has none, since what
a plain step costs may have changed. Where they promise little that costs little, and a small error
would keep drafts that lose."""
_FORCED = 2.0
"""Promised where nothing is measured."""


class Chances(Protocol):
    """How likely a sequence's drafts are."""

    def add_gains(self, gains: list[float], matched: int, lag: int) -> None:
        """Add to `gains[j]` the chance that the first j + 1 drafts all come true.

        Args:
            gains: as many as drafts may be sent; summed over sequences by the caller.
            matched: what speaks for them, as known now.
            lag: tokens that are sampled before these drafts and not known yet.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be verified."""

    acceptance: Chances
    matched: int
    """What speaks for its drafts; 0: there are none."""
    lag: int
    """Tokens of it that are sampled in flight: unknown yet."""
    drafts_max: int
    """Drafts that may be sent for it once those are known."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """What to do with the next plan."""

    drafts: int = 0
    """Most drafts of a sequence in it."""
    chance_min: float = 0.0
    """Drafts that are less likely are not sent."""
    holds: bool = False
    """It is not made before all plans in flight have results."""
    share: float = dataclasses.field(default=0.0, compare=False)
    """Tokens that drafts promise against plain steps of the same time; 0: they lose. Also known
    where a plain step comes first because it has to be measured again."""


PLAIN = DraftChoice()


def choose(
    candidates: list[Candidate],
    rows: int,
    periods_ms: list[float],
    turn_ms: float,
    steps_verified: int,
    *,
    is_ahead: bool = False,
    margin: float = _MARGIN,
) -> DraftChoice:
    """Return how many drafts the next plan carries, or that it waits.

    Args:
        candidates: who may be verified.
        rows: sequences that decode in that plan.
        periods_ms: expected period by drafts per row.
        turn_ms: what a turn to lock-step and back costs.
        steps_verified: steps with drafts since a plain one of so many rows was measured.
        is_ahead: plans are in flight, but drafts need not wait for them: the ranks propose them.
        margin: drafts must promise so many times the tokens of plain steps.
    """
    plain_ms = periods_ms[0]
    longest = max([one.drafts_max for one in candidates if one.matched], default=0)
    if not plain_ms or not longest:
        return PLAIN
    gains = [0.0] * longest
    lag = 0
    for one in candidates:
        lag = max(lag, one.lag)
        if one.matched and one.drafts_max == longest:
            one.acceptance.add_gains(gains, one.matched, one.lag)
        elif one.matched and one.drafts_max:
            own = [0.0] * one.drafts_max
            one.acceptance.add_gains(own, one.matched, one.lag)
            for position, gain in enumerate(own):
                gains[position] += gain
    best, best_share = 0, margin
    tokens = best_tokens = float(rows)
    wait_ms = turn_ms if lag or is_ahead else 0.0
    for drafts, gain in enumerate(gains, start=1):
        tokens += gain
        # Tokens of this step, against plain steps of the same time.
        share = tokens * plain_ms / (rows * (periods_ms[drafts] + wait_ms))
        if share > best_share:
            best, best_share, best_tokens = drafts, share, tokens
    if not best:
        return PLAIN
    patience = next(steps for share, steps in _PLAIN_EVERY if best_share > share)
    if steps_verified >= patience:
        return DraftChoice(share=best_share)
    if lag:
        return DraftChoice(holds=True, share=best_share)
    token_ms = periods_ms[best] / best_tokens
    draft_ms = (periods_ms[best] - periods_ms[1]) / (max(1, best - 1) * len(candidates))
    chance_min = max(_CHANCE_MIN, _MARGINAL_SHARE * draft_ms / token_ms)
    return DraftChoice(best, chance_min, share=best_share)


def all_that_may(candidates: list[Candidate]) -> DraftChoice:
    """Return the most drafts that may be sent, whatever they cost; what is unknown is waited for.

    Args:
        candidates: who may be verified.
    """
    found = [one for one in candidates if one.matched and one.drafts_max > 0]
    if not found:
        return PLAIN
    if any(one.lag for one in found):
        return DraftChoice(holds=True, share=_FORCED)
    return DraftChoice(max(one.drafts_max for one in found), share=_FORCED)


def worth_sending(acceptance: Chances, matched: int, count: int, chance_min: float) -> int:
    """Return how many of `count` drafts are likely enough."""
    chances = [0.0] * count
    acceptance.add_gains(chances, matched, 0)
    return sum(chance >= chance_min for chance in chances)


def can_pay(rows_verified: int, rows: int, drafts_max: int, periods_ms: list[float]) -> bool:
    """Tell whether any number of drafts could pay if all were accepted; else nobody need look."""
    plain_ms = periods_ms[0]
    if not plain_ms:
        return True
    return any(
        (rows + rows_verified * drafts) * plain_ms > _MARGIN * rows * periods_ms[drafts]
        for drafts in range(1, drafts_max + 1)
    )
