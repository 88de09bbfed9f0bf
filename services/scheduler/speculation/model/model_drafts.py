"""Drafts proposed by ranks. Owns how many, for which rows, and what draft rows read. Pure.

A draft model has a row per sequence and can propose only if that row holds all tokens of the
sequence's row. Rows with drafts stay complete. In a plan with drafts, complete rows without drafts
take part too, which costs one more row in a forward that runs anyway. In a plan without drafts no
draft row takes part, because reading many tokens later costs hardly more than one forward now.
Rows that lack few tokens read them in the plan in which they get drafts. Rows that lack many, as
after reusing cache blocks, read in pieces if the expected drafts are worth it, the most complete
rows first. Rows of an EAGLE head need no reading: missing tokens only make its drafts worse.

Acceptance is known only from verified drafts. While drafts are slower than none, a probe is made
from time to time (see `probes`): with as many drafts as would be faster at good acceptance, or with
a few if no number would, since costs may have been measured at a bad moment. Rows that lack many
tokens read them in earlier plans, so that reading and drafting are measured separately.
"""

from services.scheduler.speculation.costs import StepCosts
from services.scheduler.speculation.methods import Model
from services.scheduler.speculation.model.probes import TRIALS, Probe, Probes
from services.scheduler.speculation.model.reading_cost import ReadingCost
from services.scheduler.speculation.policy import (
    Candidate,
    Chances,
    DraftChoice,
    choose,
    choose_all,
    count_worth_sending,
)
from services.scheduler.speculation.position_rates import (
    OptimisticChances,
    PositionAcceptance,
    PositionRates,
)
from services.scheduler.speculation.sequence_drafts import (
    PLAIN_PLAN,
    DecodingRow,
    ModelDraftState,
    PlannedDrafts,
    PromptRow,
)
from shared.configuration.settings import SchedulerConfig

_FIRST_PIECE = 32
"""Tokens of the first read, which measures the cost of reading."""
_MARGIN = 1.03
_MARGIN_NEW = 1.0
"""Smallest speedup for which drafts are used, and the one before many drafts were tried: then a few
rejections by chance must not end good drafts, and drafts that are hardly slower cost little."""
_PROBED_ROWS = 4
"""Most rows of a probe, and most rows that read many tokens while acceptance is unknown."""
_BLIND_SPEEDUP = 1.0
_BLIND_DRAFTS = 3
"""Speedup and drafts of a probe of one row that is made although by measured costs no number of
drafts is faster than none."""
_KNOWN_TRIALS = 3.0
"""Drafts per row after which acceptance counts as known, so that all rows may read many tokens."""
UNREAD_SMALL = 64
"""A row that lacks at most this many tokens reads them in the plan in which it gets drafts, which
takes about as long as a draft."""
_DRAFTED_STEPS_MIN = 64
"""Steps over which the cost of starting to use drafts is spread."""
_TOKENS_LEFT_MAX = 256
"""Most completion tokens that a sequence is assumed to have left."""
_PROMPT_SHARE = 0.15
"""Assumed time of a draft model to read a token, as a part of the model's prefill time."""


class ModelDrafts:
    """Chooses how many drafts the ranks propose and which tokens their draft model reads.

    It serves all sequences with one method: a draft model, or an EAGLE head.
    """

    def __init__(
        self, method: Model, config: SchedulerConfig, costs: StepCosts, is_adaptive: bool
    ) -> None:
        """Start without measurements.

        Args:
            method: the method of all these drafts.
            config: limits of a step's tokens and time.
            costs: measured durations of steps.
            is_adaptive: use drafts only where they are expected to be faster than none.
        """
        self.method: Model = method
        self.reading_cost = ReadingCost(config)
        self.common_rates = PositionRates()
        self.probes = Probes(method, self.common_rates, costs)
        self._config = config
        self._costs = costs
        self._is_adaptive = is_adaptive
        self._completed_by_choice = 0
        """Rows that become complete without drafts if the last choice is planned."""
        self._completed_unused = 0
        """Rows that became complete since a plan had drafts."""

    def begin_epoch(self) -> None:
        """Forget measured costs, which depend on the world; keep acceptance rates."""
        self.reading_cost = ReadingCost(self._config)
        self.probes.begin_epoch()
        self._completed_by_choice = 0

    def choose(self, rows: list[DecodingRow]) -> PlannedDrafts:
        """Choose drafts of the next plan, and what rows of the draft model read in it.

        Args:
            rows: all decoding rows, including those without such drafts.

        Returns:
            Drafts (or reads that they need) if they are faster than none; else, if one is due, a
            probe, which measures how many drafts are accepted; else an empty plan.
        """
        self.probes.chosen, self._completed_by_choice = None, 0
        self.reading_cost.forward_ms = self._costs.draft_ms(len(rows), self.method)
        states = {
            index: row.draft_state
            for index, row in enumerate(rows)
            if isinstance(row.draft_state, ModelDraftState) and _drafts_max(row) > 0
        }
        if not states:
            return PLAIN_PLAN
        chances: dict[int, Chances] = {index: one.acceptance for index, one in states.items()}
        choice = self._choose(rows, chances)
        if not choice.speedup:
            return self._probe(rows, states)
        if not choice.drafts:
            return PlannedDrafts(speedup=choice.speedup)
        near, far = self._plan_reads(rows, states, choice.speedup)
        ready = [
            index for index in states if rows[index].unread_tokens in (near[index], far[index])
        ]
        best = self._choose(rows, {index: chances[index] for index in ready})
        counts = [-1] * len(rows)
        for index in ready if best.drafts else ():
            count = min(best.drafts, _drafts_max(rows[index]))
            counts[index] = count_worth_sending(chances[index], 0, count, best.chance_min)
        if max(counts) < 1:
            if any(far):
                self._completed_by_choice = sum(
                    far[index] == rows[index].unread_tokens > 0 for index in states
                )
                return self._plan([], far, choice.speedup)
            return self._probe(rows, states)
        reads = [max(one, other) for one, other in zip(near, far, strict=True)]
        return self._plan(counts, reads, choice.speedup)

    def should_read_prompt(self, prompt: PromptRow, rows: int) -> bool:
        """Tell whether the draft model should read a prompt while the model prefills it.

        It should if reading takes no longer than drafts are expected to save, if a probe is due
        whose budget covers the reading, or if no step without drafts was measured yet.

        Args:
            prompt: the prompt of a sequence whose drafts the ranks propose.
            rows: number of running sequences.
        """
        if prompt.drafts_max < 1 or not self._is_adaptive:
            return prompt.drafts_max > 0
        periods_ms = self._costs.periods_ms(rows, rows, self.method)
        if not periods_ms[0]:
            return True

        def expect(chances: Chances) -> DraftChoice:
            candidate = Candidate(chances, 1, 0, prompt.drafts_max)
            return choose([candidate] * rows, rows, periods_ms, 0.0, 0)

        token_ms = self.reading_cost.token_ms or _PROMPT_SHARE * prompt.token_ms
        read_ms = prompt.unread_tokens * token_ms
        speedup = expect(PositionAcceptance(self.common_rates)).speedup
        if speedup:
            return read_ms <= _saved_ms(prompt.tokens_left, periods_ms[0], speedup, rows)
        drafts = expect(OptimisticChances()).drafts
        if not drafts:
            return False
        return self.probes.is_due(
            self.probes.probe_ms(rows, min(rows, _PROBED_ROWS), drafts), read_ms
        )

    def record_plan(self, *, has_drafts: bool, has_reads: bool = False) -> None:
        """Record whether the plan made after `choose` contains drafts and reads.

        Args:
            has_drafts: it has drafts of this method.
            has_reads: in it, rows of the draft model read known tokens that they lack.
        """
        if self.probes.record_plan(has_drafts=has_drafts, has_reads=has_reads):
            return
        if has_drafts:
            self._completed_unused = 0
        elif has_reads:
            self._completed_unused += self._completed_by_choice

    def record_verification(
        self, draft_state: ModelDraftState, proposed: int, accepted: int
    ) -> None:
        """Record the verification of one row's drafts.

        Args:
            draft_state: the draft state of its sequence.
            proposed: drafts in the row.
            accepted: how many of them, from the first, were accepted.
        """
        draft_state.acceptance.record_verification(proposed, accepted)
        self.probes.record_verification(proposed, accepted)

    def _probe(self, rows: list[DecodingRow], states: dict[int, ModelDraftState]) -> PlannedDrafts:
        """Return a plan that probes the most complete rows, or an empty one if none is due."""
        nearest = sorted(states, key=lambda index: rows[index].unread_tokens)[:_PROBED_ROWS]
        if not self._costs.periods_ms(len(rows), len(nearest), self.method)[0]:
            return PLAIN_PLAN
        left = self.reading_cost.tokens_max
        ready = []
        for index in nearest:
            if rows[index].unread_tokens <= min(UNREAD_SMALL, left):
                ready.append(index)
                left -= rows[index].unread_tokens
        # The expected gain is that of drafts for all rows, since a probe informs about all.
        optimistic = self._choose(rows, dict.fromkeys(states, OptimisticChances()))
        if optimistic.speedup and not optimistic.drafts:
            return PLAIN_PLAN
        lacking = [index for index in nearest if index not in ready] if optimistic.drafts else []
        if ready and self.probes.last_succeeded and not self.probes.successes:
            # A single success may be chance, and reading many tokens is expensive.
            lacking = []
        for some in [lacking] if ready else [lacking, lacking[:1]]:
            plan = self._read_before_probe(rows, {one: states[one] for one in some}, optimistic)
            if plan.reads:
                return plan
        if not ready:
            return PLAIN_PLAN
        probed = ready if optimistic.speedup else ready[:1]
        return self._probe_near_rows(rows, states, probed, optimistic)

    def _probe_near_rows(
        self,
        rows: list[DecodingRow],
        states: dict[int, ModelDraftState],
        ready: list[int],
        optimistic: DraftChoice,
    ) -> PlannedDrafts:
        """Return a plan with drafts for rows that lack few tokens, if a probe is due."""
        drafts = optimistic.drafts or min(_BLIND_DRAFTS, _drafts_max(rows[ready[0]]))
        read_ms = sum(self.reading_cost.cost_ms(rows[index].unread_tokens) for index in ready)
        probed = [states[index] for index in ready]
        lost_ms = self.probes.probe_loss_ms(len(rows), probed, drafts)
        if not self.probes.is_due(lost_ms, read_ms, is_blind=not optimistic.drafts):
            return PLAIN_PLAN
        counts, reads = [-1] * len(rows), [0] * len(rows)
        for index in ready:
            counts[index] = min(drafts, _drafts_max(rows[index]))
            reads[index] = rows[index].unread_tokens
        acceptances = [one.acceptance for one in states.values()]
        cost_ms = self.probes.probe_ms(len(rows), len(ready), drafts)
        self.probes.chosen = Probe(acceptances, cost_ms + read_ms)
        return self._plan(counts, reads, optimistic.speedup or _BLIND_SPEEDUP)

    def _read_before_probe(
        self,
        rows: list[DecodingRow],
        probed: dict[int, ModelDraftState],
        optimistic: DraftChoice,
    ) -> PlannedDrafts:
        """Return a plan in which rows read a piece of their unread tokens before a probe, if due.

        The reads are planned apart from drafts, since they would hide the cost of drafts. The first
        piece is planned on an assumed cost and measures it.
        """
        if not probed:
            return PLAIN_PLAN
        reading = self.reading_cost
        size = reading.tokens_max if reading.token_ms else _FIRST_PIECE
        read_ms = 0.0
        for index in probed:
            unread_tokens = rows[index].unread_tokens
            if not reading.token_ms:
                unread_tokens = min(unread_tokens, size)
            read_ms += (unread_tokens - 1) // size * reading.forward_ms
            read_ms += reading.cost_ms(unread_tokens)
        plain_ms = self._costs.periods_ms(len(rows), 1, self.method)[0]
        tokens_left = max(rows[index].tokens_left for index in probed)
        if read_ms > _saved_ms(tokens_left, plain_ms, optimistic.speedup, 1):
            return PLAIN_PLAN
        lost_ms = self.probes.probe_loss_ms(len(rows), [*probed.values()], optimistic.drafts)
        if not self.probes.is_due(lost_ms, read_ms):
            return PLAIN_PLAN
        reads = [0] * len(rows)
        for index in probed:
            reads[index] = min(rows[index].unread_tokens, size)
            size -= reads[index]
        self.probes.chosen = Probe([], read_ms, only_reads=True)
        return self._plan([], reads, optimistic.speedup)

    def _plan(self, counts: list[int], reads: list[int], speedup: float) -> PlannedDrafts:
        reads = reads if any(reads) else []
        return PlannedDrafts(counts=counts, reads=reads, method=self.method, speedup=speedup)

    def _choose(self, rows: list[DecodingRow], chances: dict[int, Chances]) -> DraftChoice:
        """Choose the number of drafts for the rows in `chances`, with no drafts for other rows."""
        candidates = [
            Candidate(one, 1, 0, _drafts_max(rows[index])) for index, one in chances.items()
        ]
        if not self._is_adaptive:
            return choose_all(candidates)
        is_ahead = any(row.tokens_in_flight for row in rows)
        begin_ms = self._costs.resume_ms if is_ahead else 0.0
        is_new = self.common_rates.drafts_tried < TRIALS
        # Rows that lack many tokens read most of them before they get drafts.
        begin_ms += sum(
            self.reading_cost.cost_ms(min(rows[index].unread_tokens, UNREAD_SMALL))
            for index in chances
        )
        return choose(
            candidates,
            len(rows),
            self._costs.periods_ms(len(rows), len(chances), self.method),
            begin_ms / _DRAFTED_STEPS_MIN,
            self._costs.steps_since_plain(len(rows)),
            is_ahead=True,
            margin=_MARGIN_NEW if is_new else _MARGIN,
        )

    def _plan_reads(
        self, rows: list[DecodingRow], states: dict[int, ModelDraftState], speedup: float
    ) -> tuple[list[int], list[int]]:
        """Return two lists of tokens to read per row: of rows that lack few, and that lack many."""
        near, far = [0] * len(rows), [0] * len(rows)
        left = self.reading_cost.tokens_max
        plain_ms = self._costs.periods_ms(len(rows), len(states), self.method)[0]
        is_unknown = self._is_adaptive and self.common_rates.drafts_tried < _KNOWN_TRIALS * max(
            8, len(rows)
        )
        readers_max = _PROBED_ROWS if is_unknown else len(rows)
        if self._completed_unused >= readers_max:
            readers_max = 0
        for number, index in enumerate(sorted(states, key=lambda index: rows[index].unread_tokens)):
            unread_tokens = rows[index].unread_tokens
            saved_ms = _saved_ms(rows[index].tokens_left, plain_ms, speedup, len(rows))
            if self._is_adaptive and self.reading_cost.cost_ms(unread_tokens) > saved_ms:
                continue
            if unread_tokens <= UNREAD_SMALL:
                near[index] = unread_tokens
            elif number < readers_max:
                far[index] = min(unread_tokens, left)
                left -= far[index]
        return near, far


def _saved_ms(tokens_left: int, plain_ms: float, speedup: float, rows: int) -> float:
    """Return the milliseconds that drafts for one row save, per row that waits for its reads."""
    return min(tokens_left, _TOKENS_LEFT_MAX) * plain_ms * (1.0 - 1.0 / speedup) / rows


def _drafts_max(row: DecodingRow) -> int:
    """Return the most drafts of a row, so that they and one more token do not pass its end."""
    if row.draft_state is None:
        return 0
    return min(row.draft_state.drafts_max, row.tokens_left - row.tokens_in_flight - 1)
