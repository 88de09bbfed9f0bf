"""When drafts that lose are tried again to see whether they still do: a budget of time. Pure.

A probe costs what it takes longer than plain steps for what it is believed to bring, so drafts that
nearly pay are tried often and bad ones seldom. All that probes lose stays below a fixed part of the
time that plain steps take: the epsilon-greedy rule of bandits (Sutton and Barto, "Reinforcement
Learning", 2nd edition, 2018, section 2.2), its epsilon counted in time instead of trials.
"""

import dataclasses

from services.scheduler.speculation.costs import StepCosts
from services.scheduler.speculation.method import Model
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates
from services.scheduler.speculation.sequence_drafts import ModelDrafting

TRIALS = 64.0
_COST = 0.01
_COST_BLIND = 0.005
_COST_FIRST = 0.015
"""Probes may take this part of the time that plain steps take; less where no drafts pay by what is
measured, and more while fewer than `TRIALS` drafts have been tried."""
_COST_READING = 0.005
"""So much more where rows lack something by then, which is read first."""
_LOST_MIN = 0.2
"""Of a plain step: what is lost at least, since what a probe brings is believed, not known."""
_HOPEFUL = 0.5
"""When so much of a probe comes true the next one follows at once."""
_HOPES_MAX = 4
"""So many do: then either drafts pay for all, or what was probed is better than the rest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Drafts that are made to see how they fare."""

    of: list[PositionAcceptance]
    """Of all that may get such drafts: nobody has had any for long."""
    foreseen_ms: float
    """What it is thought to take longer than a plain step."""
    only_reads: bool = False
    """What rows lack for it is read; nobody has drafts yet."""


class Probes:
    """Probes of one method: which are made, and what they have taken."""

    def __init__(self, method: Model, common: PositionRates) -> None:
        """Begin with nothing spent; `common` tells how many drafts have been tried."""
        self.chosen: Probe | None = None
        """What the plan chosen last probes."""
        self.is_hopeful = False
        """The last probe has fared well."""
        self.hopes = 0
        """Probes before that one that have fared well, one after the other."""
        self._made: Probe | None = None
        """What the plan made last probes; while it is verified there is no later one."""
        self._plain_ms = 0.0
        """What plain steps have taken since the last probe, what that took too long counted off."""
        self._method: Model = method
        self._common = common

    def forget_plans(self) -> None:
        """Begin with no plan in flight."""
        self.chosen = self._made = None

    def planned(self, *, has_drafts: bool, has_reads: bool) -> bool:
        """Note that a plan was made; return whether it probes drafts."""
        chosen, self.chosen, self._made = self.chosen, None, None
        if chosen is None or not (has_reads if chosen.only_reads else has_drafts):
            return False
        self._made = chosen
        if chosen.only_reads:
            return False
        self.hopes = self.hopes + 1 if self.is_hopeful else 0
        self._plain_ms, self.is_hopeful = 0.0, False
        for one in chosen.of:
            one.fade()
        return True

    def verified(self, proposed: int, accepted: int) -> None:
        """Take in what became of one row's drafts."""
        if self._made is not None and accepted >= _HOPEFUL * proposed:
            self.is_hopeful = True

    def passed(self, plain_ms: float) -> None:
        """Take in that a plain step has taken so long."""
        self._plain_ms += plain_ms

    def took(self, excess_ms: float) -> None:
        """Take in what the plan made last has taken longer than a plain one."""
        if self._made is not None and self._made.only_reads:
            self._plain_ms -= max(0.0, excess_ms) / (_COST + _COST_READING)
        elif self._made is not None:
            # What was not foreseen is waited off too.
            self._plain_ms -= max(0.0, excess_ms - self._made.foreseen_ms) / _COST

    def cost_ms(self, rows: int, drafted: int, drafts: int, costs: StepCosts) -> float:
        """Return what a probe of so many rows is thought to take beside reading."""
        periods_ms = costs.periods_ms(rows, drafted, self._method)
        return periods_ms[drafts] - periods_ms[0] + costs.return_ms

    def lost_ms(
        self, rows: int, probed: list[ModelDrafting], drafts: int, costs: StepCosts
    ) -> float:
        """Return what it takes longer than plain steps for what it brings, by what is believed."""
        gains = [0.0] * drafts
        for one in probed:
            one.acceptance.add_gains(gains, 1, 0)
        plain_ms = costs.periods_ms(rows, len(probed), self._method)[0]
        cost_ms = self.cost_ms(rows, len(probed), drafts, costs)
        return max(_LOST_MIN * plain_ms, cost_ms - plain_ms * sum(gains) / rows)

    def are_due(self, lost_ms: float, read_ms: float, *, is_blind: bool = False) -> bool:
        """Tell whether enough time has passed for what a probe loses, and for what it reads."""
        if self.is_hopeful and self.hopes < _HOPES_MAX and not is_blind:
            return True
        share = max(_COST, min(_COST_FIRST, TRIALS * _COST / self._common.tried))
        share = _COST_BLIND if is_blind else share + (_COST_READING if read_ms else 0.0)
        return share * self._plain_ms >= lost_ms + read_ms
