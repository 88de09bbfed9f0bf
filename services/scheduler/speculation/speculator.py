"""Speculation for the running batch: what planner and core talk to. Pure.

Per plan: `choose`, with everybody who decodes; then `planned`, or no plan when it holds. Per
receipt: `verified` for each row that had drafts, and `finished` once. Nothing here knows of slots,
rows of KV or messages.

A plan has either drafts that were proposed here or those that the ranks propose. Where some rows
take the ones and some the others, each plan goes to the method that promises more tokens for all
rows together; the other rows decode one token in it.
"""

import dataclasses
from collections.abc import Sequence

from services.scheduler.speculation.acceptance import AcceptanceRates
from services.scheduler.speculation.costs import StepCosts, StepWidth
from services.scheduler.speculation.counters import DraftCounters
from services.scheduler.speculation.method import Method, is_model
from services.scheduler.speculation.model.model_drafts import (
    NEAR,
    DecodingRow,
    ModelDrafts,
    ModelPlan,
    PromptRow,
)
from services.scheduler.speculation.policy import (
    PLAIN,
    Candidate,
    DraftChoice,
    all_that_may,
    can_pay,
    choose,
    worth_sending,
)
from services.scheduler.speculation.sequence_drafts import Drafting, ModelDrafting, NgramDrafting
from shared.configuration.settings import SchedulerConfig, SpeculationConfig
from shared.messages import Speculation

__all__ = ["DecodingRow", "PlannedDrafts", "PromptRow", "Speculator"]

_INDEX_TOKENS = 384
"""Tokens of long texts that are indexed per plan, all sequences together: below a millisecond."""
_STEP_TOKENS = 32
"""What a step has brought is indexed at once, whatever else there is to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """What the next plan does about drafts."""

    drafts: list[list[int]]
    """Empty, or per row in the order asked: what to verify."""
    holds: bool = False
    """No plan may be made before all plans in flight have results."""
    counts: list[int] = dataclasses.field(default_factory=list)
    """Empty, or per row in the order asked: StepPlan.draft_counts; then there are no drafts."""
    reads: list[int] = dataclasses.field(default_factory=list)
    """Empty, or per row in the order asked: tokens that its draft row reads before."""
    method: Method = "ngram"
    """Whose drafts these are."""

    @property
    def has_drafts(self) -> bool:
        """Tell whether anything is verified."""
        return any(self.drafts) or max(self.counts, default=-1) > 0

    def shape(self, rows: int) -> StepWidth:
        """Return what `finished` is to be told of a step of so many rows with these drafts."""
        lengths = [max(0, count) for count in self.counts] or [len(one) for one in self.drafts]
        longest = max(lengths, default=0)
        if self.counts and not longest:
            # Rows that only follow cost more than a plain step: it teaches nothing.
            rows = 0
        return StepWidth(rows, 1 + longest, sum(map(bool, lengths)), self.method)


_NONE = PlannedDrafts([])
_HOLD = PlannedDrafts([], holds=True)


class Speculator:
    """Decides about drafts for the running batch, and learns what they bring and cost."""

    def __init__(self, config: SpeculationConfig, scheduler: SchedulerConfig | None = None) -> None:
        self.counters = DraftCounters()
        self.costs = StepCosts()
        self.models = (
            ModelDrafts(config.method, scheduler or SchedulerConfig(), is_adaptive=config.adaptive)
            if is_model(config.method)
            else None
        )
        """What the ranks are set up to propose; None: nothing."""
        self._config = config
        self._common = AcceptanceRates()
        self._was_held = False

    def begin_epoch(self) -> None:
        """Begin with no plan in flight; another world has other costs, but the same texts."""
        self.costs = StepCosts()
        self._was_held = False
        if self.models is not None:
            self.models.begin_epoch()

    def drafting(self, tokens: list[int], wish: Speculation) -> Drafting | None:
        """Return what a sequence keeps for its drafts; None: it takes none.

        Args:
            tokens: the sequence's own list.
            wish: what its client wants; n-grams need nothing that must be set up.
        """
        method = self._config.method if wish.method == "default" else wish.method
        drafts_max = min(wish.tokens or self._config.tokens_max, self._config.tokens_max)
        if method == "ngram":
            return NgramDrafting(tokens, drafts_max, self._common)
        if self.models is not None and method == self.models.method:
            return ModelDrafting(self.models.method, drafts_max, self.models.common)
        return None

    def look_ahead(self, draftings: list[Drafting]) -> None:
        """Index a slice of texts that nobody decodes from yet: prompts being computed."""
        budget = _INDEX_TOKENS
        for one in draftings:
            if budget <= 0:
                return
            if isinstance(one, NgramDrafting):
                budget -= one.proposer.extend(budget)

    def reads_prompt(self, prompt: PromptRow, rows: int) -> bool:
        """Tell whether a draft row reads a prompt while it is prefilled.

        Args:
            prompt: of a sequence whose drafts the ranks propose.
            rows: sequences that run.
        """
        if self.models is None or 0 < self._config.batch_max < rows:
            return False
        return self.models.reads_prompt(prompt, rows, self.costs)

    def choose(self, rows: list[DecodingRow]) -> PlannedDrafts:
        """Decide what the next plan does for those who decode in it.

        It holds only while some row has tokens in flight, so a result surely follows.
        """
        if 0 < self._config.batch_max < len(rows):
            return _NONE
        choice = self._choose_ngrams(rows)
        made = self._choose_counts(rows)
        # Promises are equal where nothing is weighed: what the server is set up for goes first.
        if made.share >= choice.share and made.share:
            if self.models is None or not (made.counts or made.reads):
                return _NONE
            return PlannedDrafts([], False, made.counts, made.reads, self.models.method)
        if choice.holds:
            self._was_held = True
            return _HOLD
        drafts = [_drafts(row, choice) for row in rows] if choice.drafts else []
        return PlannedDrafts(drafts) if any(drafts) else _NONE

    def planned(self, drafts: PlannedDrafts, read: int = 0) -> bool:
        """Note that a plan was made as chosen; return whether it had been held back.

        That is to be remembered with the step, for `finished`.

        Args:
            drafts: what the plan has.
            read: tokens that draft rows read in it.
        """
        held, self._was_held = self._was_held, False
        self.counters.planned(has_drafts=drafts.has_drafts, was_held=held, read=read)
        if self.models is not None:
            has_drafts = max(drafts.counts, default=-1) > 0
            self.models.planned(has_drafts=has_drafts, has_reads=bool(drafts.reads))
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
        if self.models is not None and isinstance(drafting, ModelDrafting):
            self.models.verified(drafting, proposed, emitted - 1)

    def finished(
        self,
        shape: StepWidth,
        busy_ms: float,
        idle_ms: float,
        *,
        held: bool,
        reads: Sequence[int] = (),
    ) -> None:
        """Take in what a step has cost; see StepCosts.finished.

        Args:
            shape: what it decoded.
            busy_ms: StepFinished.busy_ms.
            idle_ms: StepFinished.idle_ms if there was work all the time, else 0.
            held: its plan waited for results although the steps before had no drafts.
            reads: tokens that draft rows have read in it, of each that has.
        """
        if self.models is not None and shape.rows and shape.method == self.models.method:
            self.models.probes.took(busy_ms - self.costs.periods_ms(shape.rows, 0)[0])
        if reads and self.models is not None:
            reading = self.models.reading
            if shape.width > 1 and max(reads) > NEAR:
                shape = dataclasses.replace(shape, rows=0)
            elif shape.width > 1:
                busy_ms = max(0.0, busy_ms - sum(map(reading.cost_ms, reads)))
            else:
                plain_ms = self.costs.periods_ms(shape.rows, 0)[0] if shape.rows else 0.0
                if plain_ms:
                    reading.finished(sum(reads), len(reads), busy_ms - plain_ms)
                    self.models.probes.took(busy_ms - plain_ms)
                shape = dataclasses.replace(shape, rows=0)
        elif self.models is not None and shape.rows and shape.width == 1:
            self.models.probes.passed(busy_ms + idle_ms)
        self.costs.finished(shape, busy_ms, idle_ms, held=held)

    def _choose_ngrams(self, rows: list[DecodingRow]) -> DraftChoice:
        who = [row.drafting for row in rows if isinstance(row.drafting, NgramDrafting)]
        if not who or (self._config.adaptive and not self._can_pay(who, len(rows))):
            return PLAIN
        self._take_in(who)
        return self._choice(rows)

    def _choose_counts(self, rows: list[DecodingRow]) -> ModelPlan:
        return self.models.choose(rows, self.costs) if self.models is not None else ModelPlan()

    def _can_pay(self, who: list[NgramDrafting], rows: int) -> bool:
        """Tell whether drafts for all of them, or for some, could pay: else nobody looks."""
        longest = max(one.drafts_max for one in who)
        return any(
            can_pay(some, rows, longest, self.costs.periods_ms(rows, some))
            for some in {len(who), -(-len(who) // 2), -(-len(who) // 4)}
        )

    def _take_in(self, draftings: list[NgramDrafting]) -> None:
        budget = _INDEX_TOKENS
        for one in draftings:
            budget -= one.proposer.extend(max(budget, _STEP_TOKENS))

    def _choice(self, rows: list[DecodingRow]) -> DraftChoice:
        candidates = []
        for row in rows:
            one = row.drafting
            if not isinstance(one, NgramDrafting) or not one.proposer.matched:
                continue
            most = min(one.drafts_max, row.tokens_left - row.lag - 1)
            if most > 0:
                matched = one.proposer.matched
                candidates.append(Candidate(one.acceptance, matched, row.lag, most))
        if not candidates:
            return PLAIN
        if not self._config.adaptive:
            return all_that_may(candidates)
        return choose(
            candidates,
            len(rows),
            self.costs.periods_ms(len(rows), len(candidates)),
            self.costs.turn_ms,
            self.costs.verified(len(rows)),
        )


def _drafts(row: DecodingRow, choice: DraftChoice) -> list[int]:
    """Return what to verify for one row."""
    one = row.drafting
    if not isinstance(one, NgramDrafting) or row.lag or not one.proposer.matched:
        return []
    count = min(choice.drafts, one.drafts_max, row.tokens_left - 1)
    if count <= 0:
        return []
    matched = one.proposer.matched
    return one.proposer.propose(worth_sending(one.acceptance, matched, count, choice.chance_min))
