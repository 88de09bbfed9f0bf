"""Speculator. Owns the choice of drafts for the running batch; knows no slots or messages. Pure.

For each plan the caller calls `choose` with all decoding rows, then `record_plan` unless the plan
must wait. For each receipt it calls `record_verification` for each row with drafts, then
`record_step` once.

The drafts of a plan are proposed either by the scheduler or by the ranks. If rows use both methods,
each plan uses the method with the larger expected speedup, and the other rows decode one token.
"""

from collections.abc import Sequence

from msgspec import structs

from services.scheduler.speculation.costs import DecodeWork, StepCosts
from services.scheduler.speculation.counters import DraftCounters
from services.scheduler.speculation.methods import is_model
from services.scheduler.speculation.model.model_drafts import UNREAD_SMALL, ModelDrafts
from services.scheduler.speculation.ngram.acceptance import AcceptanceRates
from services.scheduler.speculation.ngram.predicted_text import PredictedText
from services.scheduler.speculation.policy import (
    PLAIN_STEP,
    Candidate,
    DraftChoice,
    can_pay,
    choose,
    choose_all,
    count_worth_sending,
)
from services.scheduler.speculation.sequence_drafts import (
    PLAIN_PLAN,
    DecodingRow,
    DraftState,
    ModelDraftState,
    NgramDraftState,
    PlannedDrafts,
    PromptRow,
)
from shared.configuration.settings import SchedulerConfig, SpeculationConfig
from shared.messages import Speculation

_INDEX_TOKENS = 384
"""Tokens indexed per plan for all sequences, which take less than a millisecond."""
_STEP_TOKENS = 32
"""Tokens of a sequence that are always indexed, so that new tokens are indexed at once."""


_WAIT = PlannedDrafts(waits_for_results=True)


class Speculator:
    """Chooses drafts for the running batch by their measured acceptance and cost."""

    def __init__(self, config: SpeculationConfig, scheduler: SchedulerConfig | None = None) -> None:
        self.counters = DraftCounters()
        self.costs = StepCosts()
        self.model_drafts: ModelDrafts | None = None
        """Drafts proposed by the ranks; None: ranks propose none."""
        if is_model(config.method):
            self.model_drafts = ModelDrafts(
                config.method, scheduler or SchedulerConfig(), self.costs, config.adaptive
            )
        self._config = config
        self._common_rates = AcceptanceRates()
        self._was_held = False

    def begin_epoch(self) -> None:
        """Forget measured costs, which depend on the world; keep acceptance rates."""
        self.costs.begin_epoch()
        self._was_held = False
        if self.model_drafts is not None:
            self.model_drafts.begin_epoch()

    def new_draft_state(
        self,
        tokens: Sequence[int],
        request: Speculation,
        prompt_tokens: int = 0,
        prediction: Sequence[int] = (),
    ) -> DraftState | None:
        """Return the draft state of a new sequence; None: it takes no drafts.

        Args:
            tokens: all tokens of the sequence, which only grow.
            request: the client's speculation parameters; "ngram" is possible with any settings.
            prompt_tokens: length of its prompt, needed with a prediction.
            prediction: token ids that the client expects in the completion. With them the server's
                method is n-grams, unless it is off: a model does not know them.
        """
        method = self._config.method if request.method == "default" else request.method
        if prediction and request.method == "default" and method != "off":
            method = "ngram"
        drafts_max = min(request.tokens or self._config.tokens_max, self._config.tokens_max)
        if method == "ngram":
            predicted = PredictedText(tokens, prompt_tokens, prediction) if prediction else None
            return NgramDraftState(tokens, drafts_max, self._common_rates, predicted)
        if self.model_drafts is not None and method == self.model_drafts.method:
            return ModelDraftState(
                self.model_drafts.method, drafts_max, self.model_drafts.common_rates
            )
        return None

    def index_prompts(self, draft_states: list[DraftState]) -> None:
        """Add part of the prompts being prefilled to the n-gram indexes that drafts come from.

        Each call indexes a few hundred tokens of all prompts together, in less than a millisecond.

        Args:
            draft_states: draft states of the sequences being prefilled.
        """
        budget = _INDEX_TOKENS
        for one in draft_states:
            if budget <= 0:
                return
            if isinstance(one, NgramDraftState):
                budget -= one.extend(budget)

    def should_read_prompt(self, prompt: PromptRow, rows: int) -> bool:
        """Tell whether the draft model should read a prompt while the model prefills it.

        It should if drafts are expected to save the time of reading, or a probe of them is due.

        Args:
            prompt: the prompt of a sequence whose drafts the ranks propose.
            rows: number of running sequences.
        """
        if self.model_drafts is None or 0 < self._config.disable_above_sequences < rows:
            return False
        return self.model_drafts.should_read_prompt(prompt, rows)

    def choose(self, rows: list[DecodingRow]) -> PlannedDrafts:
        """Choose the drafts of the next plan for all decoding rows.

        Args:
            rows: the sequences that can decode.

        Returns:
            The drafts, or that the plan must wait. It waits only if some row has tokens in flight,
            so a result always follows.
        """
        if 0 < self._config.disable_above_sequences < len(rows):
            return PLAIN_PLAN
        choice = self._choose_ngrams(rows)
        model_plan = self.model_drafts.choose(rows) if self.model_drafts is not None else PLAIN_PLAN
        # Without adaptive speculation both speedups are equal, and the configured method wins.
        if model_plan.speedup >= choice.speedup and model_plan.speedup:
            return model_plan if model_plan.counts or model_plan.reads else PLAIN_PLAN
        if choice.waits_for_results:
            self._was_held = True
            return _WAIT
        drafts = [_propose(row, choice) for row in rows] if choice.drafts else []
        return PlannedDrafts(drafts) if any(drafts) else PLAIN_PLAN

    def record_plan(self, drafts: PlannedDrafts, read: int = 0) -> bool:
        """Record that a plan was made as chosen; return whether it was held back for results.

        The caller passes the returned value on to `record_step`.

        Args:
            drafts: the drafts of the plan.
            read: number of tokens that rows of the draft model read in it.

        Returns:
            True if `choose` had asked to wait for the results of the plans in flight.
        """
        was_held, self._was_held = self._was_held, False
        self.counters.planned(has_drafts=drafts.has_drafts, was_held=was_held, read=read)
        if self.model_drafts is not None:
            has_drafts = max(drafts.counts, default=-1) > 0
            self.model_drafts.record_plan(has_drafts=has_drafts, has_reads=bool(drafts.reads))
        return was_held

    def record_verification(
        self, draft_state: DraftState, proposed: int, emitted: int, taken: int
    ) -> None:
        """Record the verification of one row's drafts.

        Args:
            draft_state: the draft state of its sequence.
            proposed: drafts in the plan.
            emitted: tokens in the receipt, one more than the accepted drafts.
            taken: emitted tokens that became part of the completion, which may have ended.
        """
        used = min(taken, emitted - 1)
        draft_state.accepted += used
        draft_state.rejected += proposed - used
        self.counters.verified(draft_state.method, proposed, emitted - 1)
        if self.model_drafts is not None and isinstance(draft_state, ModelDraftState):
            self.model_drafts.record_verification(draft_state, proposed, emitted - 1)

    def record_step(
        self,
        work: DecodeWork,
        busy_ms: float,
        idle_ms: float,
        *,
        was_held: bool,
        reads: Sequence[int] = (),
    ) -> None:
        """Record the times of a finished step, from which the costs of drafts and reads follow.

        Args:
            work: its decodes.
            busy_ms: StepFinished.busy_ms.
            idle_ms: StepFinished.idle_ms if requests were open all the time, else 0.
            was_held: its plan waited for results of steps without drafts.
            reads: tokens read by each row of the draft model that read any.
        """
        if self.model_drafts is not None and work.rows and work.method == self.model_drafts.method:
            self.model_drafts.probes.record_excess(busy_ms - self.costs.periods_ms(work.rows, 0)[0])
        if reads and self.model_drafts is not None:
            reading = self.model_drafts.reading_cost
            if work.width > 1 and max(reads) > UNREAD_SMALL:
                work = structs.replace(work, rows=0)
            elif work.width > 1:
                busy_ms = max(0.0, busy_ms - sum(map(reading.cost_ms, reads)))
            else:
                plain_ms = self.costs.periods_ms(work.rows, 0)[0] if work.rows else 0.0
                if plain_ms:
                    reading.record_step(sum(reads), len(reads), busy_ms - plain_ms)
                    self.model_drafts.probes.record_excess(busy_ms - plain_ms)
                work = structs.replace(work, rows=0)
        elif self.model_drafts is not None and work.rows and work.width == 1:
            self.model_drafts.probes.record_plain_time(busy_ms + idle_ms)
        self.costs.record_step(work, busy_ms, idle_ms, was_held=was_held)

    def _choose_ngrams(self, rows: list[DecodingRow]) -> DraftChoice:
        draft_states = [
            row.draft_state for row in rows if isinstance(row.draft_state, NgramDraftState)
        ]
        if not draft_states or (
            self._config.adaptive and not self._can_pay(draft_states, len(rows))
        ):
            return PLAIN_STEP
        budget = _INDEX_TOKENS
        for one in draft_states:
            budget -= one.extend(max(budget, _STEP_TOKENS))
        return self._choose_from_matches(rows)

    def _can_pay(self, draft_states: list[NgramDraftState], rows: int) -> bool:
        """Tell whether drafts for all, half or a quarter of the rows could be faster than none."""
        longest = max(one.drafts_max for one in draft_states)
        return any(
            can_pay(some, rows, longest, self.costs.periods_ms(rows, some))
            for some in {len(draft_states), -(-len(draft_states) // 2), -(-len(draft_states) // 4)}
        )

    def _choose_from_matches(self, rows: list[DecodingRow]) -> DraftChoice:
        candidates = []
        for row in rows:
            one = row.draft_state
            if not isinstance(one, NgramDraftState) or not one.proposer.matched:
                continue
            most = min(one.drafts_max, row.tokens_left - row.tokens_in_flight - 1)
            if most > 0:
                matched = one.proposer.matched
                candidates.append(Candidate(one.acceptance, matched, row.tokens_in_flight, most))
        if not candidates:
            return PLAIN_STEP
        if not self._config.adaptive:
            return choose_all(candidates)
        return choose(
            candidates,
            len(rows),
            self.costs.periods_ms(len(rows), len(candidates)),
            self.costs.switch_ms,
            self.costs.steps_since_plain(len(rows)),
        )


def _propose(row: DecodingRow, choice: DraftChoice) -> list[int]:
    """Return the drafts of one row."""
    one = row.draft_state
    if not isinstance(one, NgramDraftState) or row.tokens_in_flight or not one.proposer.matched:
        return []
    count = min(choice.drafts, one.drafts_max, row.tokens_left - 1)
    matched = one.proposer.matched
    return one.proposer.propose(
        count_worth_sending(one.acceptance, matched, count, choice.chance_min)
    )
