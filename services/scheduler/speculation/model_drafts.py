"""Drafts that the ranks propose themselves: how many, for whom, and what draft rows read. Pure.

A draft model keeps a row of its own per sequence, and proposes only from one that holds what the
sequence's row holds. Rows with drafts stay level by themselves. In a plan in which somebody has
drafts, rows that are level and have none follow too: that is a row more in a forward that runs
anyway. In a plan without drafts none follows, for one read of many tokens later costs hardly more
than one forward now, and may never be needed. Rows that fell behind by little read in the very plan
in which they get drafts again. Those that lack much, since they began from blocks, read in pieces
when the drafts that they may get are worth it, the nearest first. A head's rows need no reading:
what they lack only makes drafts worse.

Drafts exist always, and their fate shows only when they are verified. So while they lose, a probe
is made now and then: as many drafts as would pay if they were good, or a few where none would, for
that may have been measured at a bad moment; as seldom as keeps the cost of probes at a hundredth of
the time, and at once again when one has fared well.
"""

import dataclasses

from services.scheduler.speculation.costs import StepCosts
from services.scheduler.speculation.drafting import Drafting, ModelDrafting
from services.scheduler.speculation.method import Model
from services.scheduler.speculation.policy import (
    Candidate,
    Chances,
    Choice,
    all_that_may,
    choose,
    worth_sending,
)
from services.scheduler.speculation.positions import HopedFor, PositionAcceptance, PositionRates
from services.scheduler.speculation.reading import Reading
from shared.settings import SchedulerConfig

_PROBE_COST = 0.01
_PROBE_COST_BLIND = 0.005
_PROBE_COST_FIRST = 0.02
_PROBE_TRIALS = 64.0
"""Probes may take this part of the time that plain steps take; less where no drafts pay by what is
measured, and more while fewer drafts than that have been tried."""
_PROBED = 4
"""Rows of a probe. Before anything is known of drafts, what they save is a guess, and not worth
that more rows than these read much."""
_BLIND_SHARE = 1.0
_BLIND_DRAFTS = 3
"""Drafts of a probe, of one row, where none pay by what is measured; and what is promised."""
_KNOWN_TRIALS = 24.0
"""After so many drafts something is known."""
NEAR = 64
"""Who lacks so few tokens reads them when it gets drafts; that takes about as long as a draft."""
_LASTS = 64
"""Drafts that pay do so for as many steps at least: what it takes to begin counts in parts."""
_HOPEFUL = 0.5
"""When so much of a probe comes true the next one follows at once."""
_TOKENS_AHEAD = 256
"""Completions are thought to go on for at most so long."""
_PROMPT_SHARE = 0.15
"""A draft model reads a token in this part of the model's time, until it was measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingRow:
    """A sequence that decodes in the next plan."""

    drafting: Drafting | None
    """None: it takes no drafts."""
    lag: int
    """Tokens of it that are sampled in flight: Sequence.samples_in_flight."""
    tokens_left: int
    """Tokens until its end is reached by length, those in flight not counted off."""
    gap: int = 0
    """Tokens that its row holds and its draft row lacks, all of them known."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """A sequence that is being prefilled."""

    drafts_max: int
    """Drafts that it may get at the most, its length considered."""
    gap: int
    """Tokens of its prompt that its draft row lacks."""
    tokens_left: int
    """Tokens of completion until its end is reached by length."""
    token_ms: float
    """What prefilling a token takes; 0: unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlan:
    """What the next plan does about such drafts."""

    counts: list[int] = dataclasses.field(default_factory=list)
    """Empty, or per row as StepPlan.draft_counts."""
    reads: list[int] = dataclasses.field(default_factory=list)
    """Empty, or per row how many tokens its draft row reads before."""
    share: float = 0.0
    """As Choice.share."""


_NOTHING = ModelPlan()


class ModelDrafts:
    """One method's policy over the running batch."""

    def __init__(self, method: Model, config: SchedulerConfig, *, is_adaptive: bool = True) -> None:
        self.method: Model = method
        self._is_adaptive = is_adaptive
        self.reading = Reading(config)
        self.common = PositionRates()
        self._config = config
        self._probed: list[PositionAcceptance] = []
        """Of whom the plan chosen last is a probe."""
        self._reads_much = False
        """That plan reads much."""
        self._is_probing = False
        """What is verified now is a probe."""
        self._is_hopeful = False
        self._foreseen_ms = 0.0
        """What the last probe was thought to cost."""
        self._has_read = False
        """The last probe has read much, so what it took says nothing of drafts."""
        self._read_in_vain = 0
        """Rows that have read all that they lacked, and nobody got drafts since."""
        self._plain_ms = 0.0
        """What plain steps have taken since the last probe."""

    def begin_epoch(self) -> None:
        """Begin with no plan in flight; another world has other costs, but the same texts."""
        self.reading = Reading(self._config)
        self._probed = []
        self._is_probing = False

    def choose(self, rows: list[DecodingRow], costs: StepCosts) -> ModelPlan:
        """Decide what the next plan does for those who decode in it.

        Args:
            rows: all that decode, those that take no such drafts too.
            costs: what steps take.
        """
        self._probed = []
        self.reading.forward_ms = costs.forward_ms(len(rows), self.method)
        mine = {
            place: row.drafting
            for place, row in enumerate(rows)
            if isinstance(row.drafting, ModelDrafting) and _most(row) > 0
        }
        if not mine:
            return _NOTHING
        chances: dict[int, Chances] = {place: one.acceptance for place, one in mine.items()}
        wanted = self._choice(rows, chances, costs)
        if not wanted.share:
            return self._probe(rows, mine, costs)
        if not wanted.drafts:
            return ModelPlan(share=wanted.share)
        near, far = self._reads(rows, mine, wanted.share, costs)
        level = [place for place in mine if rows[place].gap in (near[place], far[place])]
        best = self._choice(rows, {place: chances[place] for place in level}, costs)
        counts = [-1] * len(rows)
        for place in level if best.drafts else ():
            count = min(best.drafts, _most(rows[place]))
            counts[place] = worth_sending(chances[place], 0, count, best.chance_min)
        if max(counts) < 1:
            if any(far):
                self._read_in_vain += sum(far[place] == rows[place].gap > 0 for place in mine)
                return ModelPlan([], far, wanted.share)
            return self._probe(rows, mine, costs)
        reads = [max(one, other) for one, other in zip(near, far, strict=True)]
        return ModelPlan(counts, reads if any(reads) else [], wanted.share)

    def reads_prompt(self, prompt: PromptRow, rows: int, costs: StepCosts) -> bool:
        """Tell whether what is prefilled is read too, in a batch of so many rows."""
        if prompt.drafts_max < 1 or not self._is_adaptive:
            return prompt.drafts_max > 0
        periods_ms = costs.periods_ms(rows, rows, self.method)
        if not periods_ms[0]:
            return True
        fresh = PositionAcceptance(self.common)
        promised = choose(
            [Candidate(fresh, 1, 0, prompt.drafts_max)] * rows, rows, periods_ms, 0.0, 0
        )
        if promised.share:
            token_ms = self.reading.token_ms or _PROMPT_SHARE * prompt.token_ms
            saved_ms = _saved_ms(prompt.tokens_left, periods_ms[0], promised.share, rows)
            return prompt.gap * token_ms <= saved_ms
        hoped = choose(
            [Candidate(HopedFor(), 1, 0, prompt.drafts_max)] * rows, rows, periods_ms, 0.0, 0
        )
        if not hoped.drafts:
            return False
        read_ms = prompt.gap * (self.reading.token_ms or _PROMPT_SHARE * prompt.token_ms)
        return self._may_probe(rows, hoped.drafts, read_ms, costs)

    def planned(self, *, has_drafts: bool) -> None:
        """Note that a plan was made, with such drafts or without."""
        if not has_drafts:
            return
        self._is_probing = bool(self._probed)
        if not self._is_probing:
            self._read_in_vain = 0
        if self._is_probing:
            self._plain_ms, self._is_hopeful = 0.0, False
            self._has_read = self._reads_much
            for one in self._probed:
                one.fade()
        self._probed = []

    def verified(self, drafting: ModelDrafting, proposed: int, accepted: int) -> None:
        """Take in what became of one row's drafts."""
        drafting.acceptance.verified(proposed, accepted)
        if self._is_probing and accepted >= _HOPEFUL * proposed:
            self._is_hopeful = True

    def passed(self, plain_ms: float) -> None:
        """Take in that a plain step has taken so long."""
        self._plain_ms += plain_ms

    def took(self, excess_ms: float) -> None:
        """Take in what a step with drafts has taken longer than a plain one, what it read too."""
        if self._is_probing:
            # What was not foreseen is waited off too.
            self._plain_ms -= max(0.0, excess_ms - self._foreseen_ms) / _PROBE_COST

    def _probe(
        self,
        rows: list[DecodingRow],
        mine: dict[int, ModelDrafting],
        costs: StepCosts,
    ) -> ModelPlan:
        """Return a probe of the rows that lack least, or nothing while it is not due."""
        nearest = sorted(mine, key=lambda place: rows[place].gap)[:_PROBED]
        counts, reads = [-1] * len(rows), [0] * len(rows)
        left = self.reading.tokens_max
        level = []
        for place in nearest:
            if rows[place].gap <= left:
                level.append(place)
                left -= rows[place].gap
        if not level or not costs.periods_ms(len(rows), len(level), self.method)[0]:
            return _NOTHING
        hoped = self._choice(rows, dict.fromkeys(level, HopedFor()), costs)
        if hoped.share and not hoped.drafts:
            return _NOTHING
        if not hoped.share:
            level = level[:1]
        drafts = hoped.drafts or min(_BLIND_DRAFTS, _most(rows[level[0]]))
        read_ms = sum(self.reading.cost_ms(rows[place].gap) for place in level)
        if not self._may_probe(len(rows), drafts, read_ms, costs, is_blind=not hoped.drafts):
            return _NOTHING
        for place in level:
            counts[place] = min(drafts, _most(rows[place]))
            reads[place] = rows[place].gap
        self._probed = [mine[place].acceptance for place in level]
        self._reads_much = max(reads) > NEAR
        return ModelPlan(counts, reads if any(reads) else [], hoped.share or _BLIND_SHARE)

    def _may_probe(
        self, rows: int, drafts: int, read_ms: float, costs: StepCosts, *, is_blind: bool = False
    ) -> bool:
        """Tell whether enough time has passed for what a probe costs."""
        if self._is_hopeful and (self._has_read or not is_blind):
            return True
        periods_ms = costs.periods_ms(rows, min(rows, _PROBED), self.method)
        cost_ms = periods_ms[drafts] - periods_ms[0] + costs.return_ms + read_ms
        self._foreseen_ms = cost_ms
        share = max(_PROBE_COST, min(_PROBE_COST_FIRST, _PROBE_TRIALS / 100 / self.common.tried))
        share = _PROBE_COST_BLIND if is_blind else share
        return share * self._plain_ms >= cost_ms

    def _choice(
        self, rows: list[DecodingRow], chances: dict[int, Chances], costs: StepCosts
    ) -> Choice:
        """Return how many drafts pay if those with chances get some, and nobody else."""
        candidates = [Candidate(one, 1, 0, _most(rows[place])) for place, one in chances.items()]
        if not self._is_adaptive:
            return all_that_may(candidates)
        is_ahead = any(row.lag for row in rows)
        begin_ms = costs.return_ms if is_ahead else 0.0
        # Who lacks much will lack little by then.
        begin_ms += sum(self.reading.cost_ms(min(rows[place].gap, NEAR)) for place in chances)
        return choose(
            candidates,
            len(rows),
            costs.periods_ms(len(rows), len(chances), self.method),
            begin_ms / _LASTS,
            costs.verified(len(rows)),
            is_ahead=True,
        )

    def _reads(
        self,
        rows: list[DecodingRow],
        mine: dict[int, ModelDrafting],
        share: float,
        costs: StepCosts,
    ) -> tuple[list[int], list[int]]:
        """Return per row what those that lack little would read, and what those that lack much."""
        near, far = [0] * len(rows), [0] * len(rows)
        left = self.reading.tokens_max
        plain_ms = costs.periods_ms(len(rows), len(mine), self.method)[0]
        is_guess = self._is_adaptive and self.common.tried < _KNOWN_TRIALS
        may_read = _PROBED if is_guess else len(rows)
        if self._read_in_vain >= may_read:
            may_read = 0
        for number, place in enumerate(sorted(mine, key=lambda place: rows[place].gap)):
            gap = rows[place].gap
            saved_ms = _saved_ms(rows[place].tokens_left, plain_ms, share, len(rows))
            if self._is_adaptive and self.reading.cost_ms(gap) > saved_ms:
                continue
            if gap <= NEAR:
                near[place] = gap
            elif number < may_read:
                far[place] = min(gap, left)
                left -= far[place]
        return near, far


def _saved_ms(tokens_left: int, plain_ms: float, share: float, rows: int) -> float:
    """Return what drafts for one of so many rows save: all of them wait while it reads."""
    return min(tokens_left, _TOKENS_AHEAD) * plain_ms * (1.0 - 1.0 / share) / rows


def _most(row: DecodingRow) -> int:
    """Return how many drafts a row may get: one token comes behind them, and none past the end."""
    if row.drafting is None:
        return 0
    return min(row.drafting.drafts_max, row.tokens_left - row.lag - 1)
