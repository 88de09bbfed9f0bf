"""Probes of drafts that lose. Owns when they are tried again, by a budget of time. Pure.

A probe costs its time beyond that of plain steps for the same expected tokens, so drafts that
nearly pay are tried often and bad ones rarely. The total cost stays below a fixed part of the time
of plain steps: the epsilon-greedy rule of bandits (Sutton and Barto, "Reinforcement Learning", 2nd
edition, 2018, section 2.2) with epsilon as a part of time instead of trials.
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
"""Part of the time of plain steps that probes may cost; less if no drafts pay as measured, and more
while fewer than `TRIALS` drafts have been tried."""
_COST_READING = 0.005
"""Additional part if draft rows must read before the probe."""
_LOST_MIN = 0.2
"""Smallest cost of a probe in plain steps, since its gain is only expected."""
_SUCCESS = 0.5
"""Acceptance of a row after which the next probe follows at once."""
_SUCCESSES_MAX = 4
"""Most such probes in a row; after these, drafts pay for all rows or only for the probed ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A plan that measures drafts."""

    acceptances: list[PositionAcceptance]
    """Rates of all sequences with such drafts, which are old now."""
    expected_ms: float
    """Expected time beyond that of a plain step."""
    only_reads: bool = False
    """Draft rows read for a later probe; the plan has no drafts."""


class Probes:
    """Probes of one method and their budget."""

    def __init__(self, method: Model, common: PositionRates) -> None:
        """Start with an empty budget; `common` are the rates of all sequences."""
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

    def begin_epoch(self) -> None:
        """Discard plans in flight."""
        self.chosen = self._made = None

    def record_plan(self, *, has_drafts: bool, has_reads: bool) -> bool:
        """Record that a plan was made; return whether it probes drafts."""
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
        """Record the verification of one row's drafts."""
        if self._made is not None and accepted >= _SUCCESS * proposed:
            self.last_succeeded = True

    def record_plain_time(self, plain_ms: float) -> None:
        """Add the time of a plain step to the budget."""
        self._plain_ms += plain_ms

    def record_excess(self, excess_ms: float) -> None:
        """Take the last plan's time beyond that of a plain step off the budget."""
        if self._made is not None and self._made.only_reads:
            self._plain_ms -= max(0.0, excess_ms) / (_COST + _COST_READING)
        elif self._made is not None:
            # The expected cost was taken off before, when the probe became due.
            self._plain_ms -= max(0.0, excess_ms - self._made.expected_ms) / _COST

    def probe_ms(self, rows: int, drafted_rows: int, drafts: int, costs: StepCosts) -> float:
        """Return the expected time of a probe beyond that of a plain step, without reads."""
        periods_ms = costs.periods_ms(rows, drafted_rows, self._method)
        return periods_ms[drafts] - periods_ms[0] + costs.resume_ms

    def probe_loss_ms(
        self, rows: int, probed: list[ModelDraftState], drafts: int, costs: StepCosts
    ) -> float:
        """Return the expected time of a probe beyond that of plain steps for as many tokens."""
        gains = [0.0] * drafts
        for one in probed:
            one.acceptance.add_chances(gains, 1, 0)
        plain_ms = costs.periods_ms(rows, len(probed), self._method)[0]
        cost_ms = self.probe_ms(rows, len(probed), drafts, costs)
        return max(_LOST_MIN * plain_ms, cost_ms - plain_ms * sum(gains) / rows)

    def is_due(self, lost_ms: float, read_ms: float, *, is_blind: bool = False) -> bool:
        """Tell whether the budget covers a probe.

        Args:
            lost_ms: expected loss of the probe.
            read_ms: time of the reads before it.
            is_blind: no drafts pay as measured.
        """
        if self.last_succeeded and self.successes < _SUCCESSES_MAX and not is_blind:
            return True
        share = max(_COST, min(_COST_FIRST, TRIALS * _COST / self._common.drafts_tried))
        share = _COST_BLIND if is_blind else share + (_COST_READING if read_ms else 0.0)
        return share * self._plain_ms >= lost_ms + read_ms
