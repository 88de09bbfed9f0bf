"""Probes of drafts slower than none. Owns when they are tried again, by a budget of time. Pure.

A probe costs its time beyond that of plain steps for the same expected tokens, so drafts that are
hardly slower are tried often and bad ones rarely. The total cost stays below a fixed part of the
time of plain steps: the epsilon-greedy rule of bandits (Sutton and Barto, "Reinforcement Learning",
2nd edition, 2018, section 2.2) with epsilon as a part of time instead of trials.
"""

import dataclasses

from services.scheduler.speculation.costs import StepCosts
from services.scheduler.speculation.methods import Model
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates
from services.scheduler.speculation.sequence_drafts import ModelDraftState

TRIALS = 64.0
_COST = 0.01
_COST_BLIND = 0.005
_COST_FIRST = 0.015
"""Part of the time of plain steps that probes may cost; less if no drafts are faster than none by
measured costs, and more while fewer than `TRIALS` drafts have been tried."""
_COST_READING = 0.005
"""Additional part if draft rows must read before the probe."""
_LOST_MIN = 0.2
"""Smallest cost of a probe in plain steps, since its gain is only expected."""
_SUCCESS = 0.5
"""Acceptance of a row after which the next probe follows at once."""
_SUCCESSES_MAX = 4
"""Most such probes in a row; after these, drafts are faster for all rows or only for the probed
ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A plan with drafts made only to measure their acceptance, or one that prepares such a plan.

    A preparing plan has no drafts: rows of the draft model read the tokens that they lack.
    """

    acceptances: list[PositionAcceptance]
    """Rates of all sequences with drafts of this method; the probe halves the weight of their
    counts."""
    expected_ms: float
    """Expected milliseconds of its step beyond those of a step without drafts."""
    only_reads: bool = False
    """Rows of the draft model read for a later probe; the plan has no drafts."""


class Probes:
    """Decides when drafts that made decoding slower are tried again in a probe.

    A probe is a plan with drafts made only to measure how many are accepted. It costs time, so it
    needs a budget: a small part (0.5 to 2 %) of the time of plain steps (those without drafts)
    since the last probe. Each method of speculation has its own budget.
    """

    def __init__(self, method: Model, common: PositionRates, costs: StepCosts) -> None:
        """Start with an empty budget.

        Args:
            method: the method that proposes the drafts.
            common: acceptance rates of all sequences with this method.
            costs: measured durations of steps.
        """
        self.chosen: Probe | None = None
        """The probe of the last choice; None: it was no probe."""
        self.last_succeeded = False
        """A row of the last probe had good acceptance."""
        self.successes = 0
        """Successful probes in a row before the last one."""
        self._made: Probe | None = None
        """The probe of the last plan; None: it was no probe."""
        self._plain_ms = 0.0
        """Time of plain steps since the last probe, less the unexpected cost of that probe."""
        self._method: Model = method
        self._common = common
        self._costs = costs

    def begin_epoch(self) -> None:
        """Forget that the last plan was a probe, as its epoch has ended; keep the time budget."""
        self.chosen = self._made = None

    def record_plan(self, *, has_drafts: bool, has_reads: bool) -> bool:
        """Record a plan that was made; return whether it is a probe with drafts.

        A plan is a probe if `chosen` asks for one and the plan contains it: its drafts, or its
        reads if it only prepares a probe. A probe with drafts uses up the time saved for probes and
        halves the weight of older acceptance counts, so that its own results weigh more.

        Args:
            has_drafts: the plan has drafts of this method.
            has_reads: in the plan, rows of the draft model read known tokens that they lack.

        Returns:
            True for a probe with drafts; False for a plan that prepares one, and for all others.
        """
        chosen, self.chosen, self._made = self.chosen, None, None
        if chosen is None or not (has_reads if chosen.only_reads else has_drafts):
            return False
        self._made = chosen
        if chosen.only_reads:
            return False
        self.successes = self.successes + 1 if self.last_succeeded else 0
        self._plain_ms, self.last_succeeded = 0.0, False
        for one in chosen.acceptances:
            one.fade()
        return True

    def record_verification(self, proposed: int, accepted: int) -> None:
        """Record the verification of one row's drafts.

        If the last plan was a probe and at least half were accepted, the probe is a success, after
        which the next one needs no budget.

        Args:
            proposed: number of drafts in the row.
            accepted: how many of them, from the first, were accepted.
        """
        if self._made is not None and accepted >= _SUCCESS * proposed:
            self.last_succeeded = True

    def record_plain_time(self, plain_ms: float) -> None:
        """Let the budget for probes grow, because a step without drafts has finished.

        Args:
            plain_ms: busy and idle milliseconds of that step, of which a small part is granted to
                probes.
        """
        self._plain_ms += plain_ms

    def record_excess(self, excess_ms: float) -> None:
        """Take milliseconds that the last probe took beyond its expected cost off the budget.

        A plan that only prepared a probe pays for all its milliseconds, since nothing was taken off
        before. If the last plan was no probe, the call has no effect.

        Args:
            excess_ms: milliseconds that its step took more than a step without drafts.
        """
        if self._made is not None and self._made.only_reads:
            self._plain_ms -= max(0.0, excess_ms) / (_COST + _COST_READING)
        elif self._made is not None:
            # The expected cost was taken off before, when the probe became due.
            self._plain_ms -= max(0.0, excess_ms - self._made.expected_ms) / _COST

    def probe_ms(self, rows: int, drafted_rows: int, drafts: int) -> float:
        """Return the milliseconds that a probe is expected to take beyond a step without drafts.

        Reads of the draft model before the probe are not included.

        Args:
            rows: number of sequences that decode.
            drafted_rows: how many of them get drafts.
            drafts: number of drafts of each of these.
        """
        periods_ms = self._costs.periods_ms(rows, drafted_rows, self._method)
        return periods_ms[drafts] - periods_ms[0] + self._costs.resume_ms

    def probe_loss_ms(self, rows: int, probed: list[ModelDraftState], drafts: int) -> float:
        """Return the milliseconds that a probe is expected to lose.

        That is its time, less the time in which steps without drafts generate as many tokens as are
        expected of the probe.

        Args:
            rows: number of sequences that decode.
            probed: draft states of those that get drafts.
            drafts: number of drafts of each of these.

        Returns:
            The loss, at least a fifth of a step without drafts, since the accepted tokens are only
            expected.
        """
        gains = [0.0] * drafts
        for one in probed:
            one.acceptance.add_chances(gains, 1, 0)
        plain_ms = self._costs.periods_ms(rows, len(probed), self._method)[0]
        cost_ms = self.probe_ms(rows, len(probed), drafts)
        return max(_LOST_MIN * plain_ms, cost_ms - plain_ms * sum(gains) / rows)

    def is_due(self, lost_ms: float, read_ms: float, *, is_blind: bool = False) -> bool:
        """Tell whether a probe may be made: the budget covers it, or the last probe was a success.

        A success counts for at most four probes in a row.

        Args:
            lost_ms: expected loss of the probe in milliseconds.
            read_ms: milliseconds in which rows of the draft model read before it.
            is_blind: by measured costs no number of drafts is faster than none, so the budget is
                smaller and successes do not count.
        """
        if self.last_succeeded and self.successes < _SUCCESSES_MAX and not is_blind:
            return True
        share = max(_COST, min(_COST_FIRST, TRIALS * _COST / self._common.drafts_tried))
        share = _COST_BLIND if is_blind else share + (_COST_READING if read_ms else 0.0)
        return share * self._plain_ms >= lost_ms + read_ms
