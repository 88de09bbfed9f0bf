"""Speculation for the running batch: what planner and core talk to. Pure.

Per plan: `choose`, with everybody who decodes; then `planned`, or no plan when it holds. Per
receipt: `verified` for each row that had drafts, and `finished` once. Nothing here knows of slots,
rows of KV or messages.
"""

import dataclasses

from services.scheduler.speculation.acceptance import Rates
from services.scheduler.speculation.costs import StepCosts, StepWidth
from services.scheduler.speculation.counters import DraftCounters
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.policy import (
    PLAIN,
    Candidate,
    Choice,
    can_pay,
    choose,
    worth_sending,
)
from shared.messages import Speculation
from shared.settings import SpeculationConfig

_INDEX_TOKENS = 384
"""Tokens of long texts that are indexed per plan, all sequences together: below a millisecond."""
_STEP_TOKENS = 32
"""What a step has brought is indexed at once, whatever else there is to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingRow:
    """A sequence that decodes in the next plan."""

    drafting: Drafting | None
    """None: it takes no drafts."""
    lag: int
    """Tokens of it that are sampled in flight: Sequence.samples_in_flight."""
    tokens_left: int
    """Tokens until its end is reached by length, those in flight not counted off."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """What the next plan does about drafts."""

    drafts: list[list[int]]
    """Empty, or per row in the order asked: what to verify."""
    holds: bool = False
    """No plan may be made before all plans in flight have results."""

    def shape(self, rows: int) -> StepWidth:
        """Return what `finished` is to be told of a step of so many rows with these drafts."""
        longest = max(map(len, self.drafts), default=0)
        return StepWidth(rows, 1 + longest, sum(map(bool, self.drafts)))


_NONE = PlannedDrafts([])
_HOLD = PlannedDrafts([], holds=True)


class Speculator:
    """Decides about drafts for the running batch, and learns what they bring and cost."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.counters = DraftCounters()
        self.costs = StepCosts()
        self._config = config
        self._common = Rates()
        self._was_held = False

    def begin_epoch(self) -> None:
        """Begin with no plan in flight; another world has other costs, but the same texts."""
        self.costs = StepCosts()
        self._was_held = False

    def drafting(self, tokens: list[int], wish: Speculation) -> Drafting | None:
        """Return what a sequence keeps for its drafts; None: it takes none.

        Args:
            tokens: the sequence's own list.
            wish: what its client wants; n-grams need nothing that must be set up.
        """
        method = self._config.method if wish.method == "default" else wish.method
        if method != "ngram":
            return None
        drafts_max = min(wish.tokens or self._config.tokens_max, self._config.tokens_max)
        return Drafting(tokens, method, drafts_max, self._common)

    def look_ahead(self, draftings: list[Drafting]) -> None:
        """Index a slice of texts that nobody decodes from yet: prompts being computed."""
        budget = _INDEX_TOKENS
        for one in draftings:
            if budget <= 0:
                return
            budget -= one.proposer.extend(budget)

    def choose(self, rows: list[DecodingRow]) -> PlannedDrafts:
        """Decide what the next plan does for those who decode in it.

        It holds only while some row has tokens in flight, so a result surely follows.
        """
        count = len(rows)
        who = [row.drafting for row in rows if row.drafting is not None]
        if not who or 0 < self._config.batch_max < count:
            return _NONE
        if not self._can_pay(who, count):
            return _NONE
        self._take_in(who)
        choice = self._choice(rows)
        if choice.holds:
            self._was_held = True
            return _HOLD
        drafts = [_drafts(row, choice) for row in rows] if choice.drafts else []
        return PlannedDrafts(drafts) if any(drafts) else _NONE

    def planned(self, drafts: PlannedDrafts) -> bool:
        """Note that a plan was made as chosen; return whether it had been held back.

        That is to be remembered with the step, for `finished`.
        """
        held, self._was_held = self._was_held, False
        self.counters.planned(has_drafts=bool(drafts.drafts), was_held=held)
        return held

    def verified(self, drafting: Drafting, proposed: int, emitted: int, taken: int) -> None:
        """Take in what became of one row's drafts.

        Args:
            drafting: whose.
            proposed: drafts that the plan had for it.
            emitted: tokens that the receipt has for it, one more than were accepted.
            taken: tokens of these that became part of the completion: it may have ended.
        """
        used = min(taken, emitted - 1)
        drafting.accepted += used
        drafting.rejected += proposed - used
        self.counters.verified(drafting.method, proposed, emitted - 1)

    def finished(self, shape: StepWidth, busy_ms: float, idle_ms: float, *, held: bool) -> None:
        """Take in what a step has cost; see StepCosts.finished."""
        self.costs.finished(shape, busy_ms, idle_ms, held=held)

    def _can_pay(self, who: list[Drafting], rows: int) -> bool:
        """Tell whether drafts for all of them, or for some, could pay: else nobody looks."""
        longest = max(one.drafts_max for one in who)
        return any(
            can_pay(some, rows, longest, self.costs.periods_ms(rows, some))
            for some in {len(who), -(-len(who) // 2), -(-len(who) // 4)}
        )

    def _take_in(self, draftings: list[Drafting]) -> None:
        budget = _INDEX_TOKENS
        for one in draftings:
            budget -= one.proposer.extend(max(budget, _STEP_TOKENS))

    def _choice(self, rows: list[DecodingRow]) -> Choice:
        candidates = []
        for row in rows:
            one = row.drafting
            if one is None or not one.proposer.matched:
                continue
            most = min(one.drafts_max, row.tokens_left - row.lag - 1)
            if most > 0:
                matched = one.proposer.matched
                candidates.append(Candidate(one.acceptance, matched, row.lag, most))
        if not candidates:
            return PLAIN
        return choose(
            candidates,
            len(rows),
            self.costs.periods_ms(len(rows), len(candidates)),
            self.costs.turn_ms,
            self.costs.verified(len(rows)),
        )


def _drafts(row: DecodingRow, choice: Choice) -> list[int]:
    """Return what to verify for one row."""
    one = row.drafting
    if one is None or row.lag or not one.proposer.matched:
        return []
    count = min(choice.drafts, one.drafts_max, row.tokens_left - 1)
    if count <= 0:
        return []
    matched = one.proposer.matched
    return one.proposer.propose(worth_sending(one.acceptance, matched, count, choice.chance_min))
