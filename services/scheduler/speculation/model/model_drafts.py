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
that may have been measured at a bad moment; as seldom as `probes` demands. Rows that have fallen
far behind read first, in plans of their own, so that reading and drafting are measured apart.
"""

import dataclasses

from services.scheduler.speculation.costs import StepCosts
from services.scheduler.speculation.method import Model
from services.scheduler.speculation.model.probes import TRIALS, Probe, Probes
from services.scheduler.speculation.model.reading_cost import Reading
from services.scheduler.speculation.policy import (
    Candidate,
    Chances,
    DraftChoice,
    all_that_may,
    choose,
    worth_sending,
)
from services.scheduler.speculation.position_rates import (
    HopedFor,
    PositionAcceptance,
    PositionRates,
)
from services.scheduler.speculation.sequence_drafts import Drafting, ModelDrafting
from shared.configuration.settings import SchedulerConfig

_FIRST_PIECE = 32
"""Tokens that are read to see what reading takes."""
_MARGIN = 1.03
_MARGIN_NEW = 1.0
"""Drafts must promise so many times the tokens of plain steps. Until many have been tried, a few
that failed by chance do not end good ones, and those that nearly pay cost next to nothing."""
_PROBED = 4
"""Rows of a probe. Before anything is known of drafts, what they save is a guess, and not worth
that more rows than these read much."""
_BLIND_SHARE = 1.0
_BLIND_DRAFTS = 3
"""Drafts of a probe, of one row, where none pay by what is measured; and what is promised."""
_KNOWN_TRIALS = 3.0
"""After so many drafts per row something is known, and all rows may read much."""
NEAR = 64
"""Who lacks so few tokens reads them when it gets drafts; that takes about as long as a draft."""
_LASTS = 64
"""Drafts that pay do so for as many steps at least: what it takes to begin counts in parts."""
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
    """As DraftChoice.share."""


_NOTHING = ModelPlan()


class ModelDrafts:
    """One method's policy over the running batch."""

    def __init__(self, method: Model, config: SchedulerConfig, *, is_adaptive: bool = True) -> None:
        self.method: Model = method
        self._is_adaptive = is_adaptive
        self.reading = Reading(config)
        self.common = PositionRates()
        self.probes = Probes(method, self.common)
        self._config = config
        self._reads_whole = 0
        """Rows that read all that they lack if the plan chosen last is made, and get no drafts."""
        self._read_in_vain = 0
        """Rows that have read all that they lacked, and nobody got drafts since."""

    def begin_epoch(self) -> None:
        """Begin with no plan in flight; another world has other costs, but the same texts."""
        self.reading = Reading(self._config)
        self.probes.forget_plans()
        self._reads_whole = 0

    def choose(self, rows: list[DecodingRow], costs: StepCosts) -> ModelPlan:
        """Decide what the next plan does for those who decode in it.

        Args:
            rows: all that decode, those that take no such drafts too.
            costs: what steps take.
        """
        self.probes.chosen, self._reads_whole = None, 0
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
                self._reads_whole = sum(far[place] == rows[place].gap > 0 for place in mine)
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
        cost_ms = self.probes.cost_ms(rows, min(rows, _PROBED), hoped.drafts, costs)
        return self.probes.are_due(cost_ms, read_ms)

    def planned(self, *, has_drafts: bool, has_reads: bool = False) -> None:
        """Note that a plan was made, with such drafts or without, and what reads for them."""
        if self.probes.planned(has_drafts=has_drafts, has_reads=has_reads):
            return
        if has_drafts:
            self._read_in_vain = 0
        elif has_reads:
            self._read_in_vain += self._reads_whole

    def verified(self, drafting: ModelDrafting, proposed: int, accepted: int) -> None:
        """Take in what became of one row's drafts."""
        drafting.acceptance.verified(proposed, accepted)
        self.probes.verified(proposed, accepted)

    def _probe(
        self,
        rows: list[DecodingRow],
        mine: dict[int, ModelDrafting],
        costs: StepCosts,
    ) -> ModelPlan:
        """Return a probe of the rows that lack least, or nothing while it is not due."""
        nearest = sorted(mine, key=lambda place: rows[place].gap)[:_PROBED]
        if not costs.periods_ms(len(rows), len(nearest), self.method)[0]:
            return _NOTHING
        left = self.reading.tokens_max
        level = []
        for place in nearest:
            if rows[place].gap <= min(NEAR, left):
                level.append(place)
                left -= rows[place].gap
        # What a few show is worth to know for all.
        hoped = self._choice(rows, dict.fromkeys(mine, HopedFor()), costs)
        if hoped.share and not hoped.drafts:
            return _NOTHING
        lacking = [place for place in nearest if place not in level] if hoped.drafts else []
        if level and self.probes.is_hopeful and not self.probes.hopes:
            # It may have been chance, and reading much is dear.
            lacking = []
        for some in (lacking, lacking[: not level]) if lacking else ():
            probed = [mine[place] for place in some]
            plan = self._catch_up(rows, some, probed, hoped, costs) if some else _NOTHING
            if plan.reads:
                return plan
        if not level:
            return _NOTHING
        return self._see(rows, mine, level if hoped.share else level[:1], hoped, costs)

    def _see(
        self,
        rows: list[DecodingRow],
        mine: dict[int, ModelDrafting],
        level: list[int],
        hoped: DraftChoice,
        costs: StepCosts,
    ) -> ModelPlan:
        """Return drafts of some rows that lack little, if that is due."""
        drafts = hoped.drafts or min(_BLIND_DRAFTS, _most(rows[level[0]]))
        read_ms = sum(self.reading.cost_ms(rows[place].gap) for place in level)
        probed = [mine[place] for place in level]
        lost_ms = self.probes.lost_ms(len(rows), probed, drafts, costs)
        if not self.probes.are_due(lost_ms, read_ms, is_blind=not hoped.drafts):
            return _NOTHING
        counts, reads = [-1] * len(rows), [0] * len(rows)
        for place in level:
            counts[place] = min(drafts, _most(rows[place]))
            reads[place] = rows[place].gap
        of = [one.acceptance for one in mine.values()]
        cost_ms = self.probes.cost_ms(len(rows), len(level), drafts, costs)
        self.probes.chosen = Probe(of, cost_ms + read_ms)
        return ModelPlan(counts, reads if any(reads) else [], hoped.share or _BLIND_SHARE)

    def _catch_up(
        self,
        rows: list[DecodingRow],
        places: list[int],
        probed: list[ModelDrafting],
        hoped: DraftChoice,
        costs: StepCosts,
    ) -> ModelPlan:
        """Let rows read a piece of what they lack, once there is time for all of it and a probe.

        Nobody has had drafts for long. Read with the drafts, it would hide what they cost. A piece
        also shows what reading takes, so the first one is made on a guess.
        """
        reading = self.reading
        size = reading.tokens_max if reading.token_ms else _FIRST_PIECE
        read_ms = 0.0
        for place in places:
            gap = rows[place].gap if reading.token_ms else min(rows[place].gap, size)
            read_ms += (gap - 1) // size * reading.forward_ms + reading.cost_ms(gap)
        plain_ms = costs.periods_ms(len(rows), 1, self.method)[0]
        tokens_left = max(rows[place].tokens_left for place in places)
        if read_ms > _saved_ms(tokens_left, plain_ms, hoped.share, 1):
            return _NOTHING
        lost_ms = self.probes.lost_ms(len(rows), probed, hoped.drafts, costs)
        if not self.probes.are_due(lost_ms, read_ms):
            return _NOTHING
        reads = [0] * len(rows)
        for place in places:
            reads[place] = min(rows[place].gap, size)
            size -= reads[place]
        self.probes.chosen = Probe([], read_ms, only_reads=True)
        return ModelPlan([], reads, hoped.share)

    def _choice(
        self, rows: list[DecodingRow], chances: dict[int, Chances], costs: StepCosts
    ) -> DraftChoice:
        """Return how many drafts pay if those with chances get some, and nobody else."""
        candidates = [Candidate(one, 1, 0, _most(rows[place])) for place, one in chances.items()]
        if not self._is_adaptive:
            return all_that_may(candidates)
        is_ahead = any(row.lag for row in rows)
        begin_ms = costs.return_ms if is_ahead else 0.0
        is_new = self.common.tried < TRIALS
        # Who lacks much will lack little by then.
        begin_ms += sum(self.reading.cost_ms(min(rows[place].gap, NEAR)) for place in chances)
        return choose(
            candidates,
            len(rows),
            costs.periods_ms(len(rows), len(chances), self.method),
            begin_ms / _LASTS,
            costs.verified(len(rows)),
            is_ahead=True,
            margin=_MARGIN_NEW if is_new else _MARGIN,
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
        is_guess = self._is_adaptive and self.common.tried < _KNOWN_TRIALS * max(8, len(rows))
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
