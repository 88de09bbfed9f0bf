"""Step costs. Owns the measured period of decode steps by rows and tokens per row. Pure.

The `width` of a step is one more than the most drafts of a row, 1 in a plain step. Ranks pad rows
to it or compute rows with drafts apart, whichever is cheaper, or pad none where kernels attend. So
a cost depends on the number of rows, the width, and which part of the rows has drafts, in three
classes. Drafts that ranks propose
also cost a forward of the draft model or head each, so they depend on the method too.

A cost is the period of a step, not only its busy time: the result of a verification must arrive
before the next plan can be made, so such a step also costs the idle time after it, the round trip,
and the building of its graph, which the rank counts as busy. A plain step overlaps all of that with
the step before it.

Plain steps have a period per number of rows. Wider steps have ratios to it, so that both follow a
text as it grows. Between two measured widths the cost is linear; past the last one the steepest
slope continues. Without measurements drafts are assumed to be nearly free, as on a GPU bound by
memory; one step per kind corrects this. It is made only when drafts look promising, and repeated
after thousands of steps.
"""

import dataclasses
import itertools
import math

from msgspec import Struct

from services.scheduler.speculation.methods import Method
from shared import limits

NEVER_MEASURED = 2**31
WIDTHS = limits.DRAFT_TOKENS_MAX + 1
_WEIGHT = 0.3
_OUTLIER = 4.0
"""A step this many times slower than expected must happen twice before it counts, since a kernel
that is compiled at its first use takes seconds once."""
_OUTLIER_MODEL = 1.5
"""The same for drafts proposed by ranks. These are faster than none for hundreds of steps or never,
so one slow step, such as the first with two models, must not end them."""
_FIRST_SLOPE = 0.02
"""Assumed cost of one more token per row, as a part of a plain step."""
_FIRST_DRAFT = 0.1
"""Assumed cost of a forward of the draft model or head, as a part of a plain step."""
_FIRST_EXPOSED_MS = 0.5
"""Assumed round trip of plan and receipt."""
_FIRST_COLD_MS = 1.0
"""Assumed time to build a graph."""
_PERIOD_MS_MIN = 1e-3
"""Lower bound of a measured period, since ratios are formed with it."""
_DRAFTED_PARTS = (0.25, 0.5, 1.0)
"""Upper bounds of the classes of steps by the part of rows with drafts."""
_GUESSED_STEPS = 16
"""Steps with drafts that may rely on measurements of another batch size."""
_TYPICAL_DRAFTS = 5
_FORGOTTEN_STEPS = 4_096
"""Steps after which a measurement of a width is outdated."""
_FORGOTTEN_STEPS_MODEL = 2_048
"""The same for drafts proposed by ranks, where a wrong cost loses more than a new measurement."""


@dataclasses.dataclass(slots=True)
class _RelativeCost:
    """Cost of steps of one kind and width."""

    ratio: float
    """Period, relative to a plain step of as many rows."""
    step: int
    """Number of the last measured step."""
    had_outlier: bool = False
    """The last step was an outlier."""


@dataclasses.dataclass(slots=True)
class _PlainCost:
    """Period of plain steps of one number of rows."""

    plain_ms: float = 0.0
    """Average period; 0: unknown."""
    had_outlier: bool = False
    """The last plain step was an outlier."""
    drafted_steps: int = 0
    """Steps with drafts since the last plain step that was measured."""


class DecodeWork(Struct, frozen=True):
    """The decodes of one step, described by the facts that decide how long it takes."""

    rows: int
    """Sequences that decode; 0 if the step has prefill chunks, so that its cost is not recorded."""
    width: int
    """Tokens per row: one, and the most drafts of a row."""
    drafted_rows: int
    """Rows with drafts."""
    method: Method = "ngram"
    """Method that proposed the drafts."""


class _PendingStep(Struct, frozen=True):
    """A finished step whose period is known once the idle time after it is known."""

    work: DecodeWork
    busy_ms: float
    is_measured: bool
    """Its period is recorded."""


class StepCosts:
    """Measured durations of decode steps with and without drafts, and predictions from them.

    They are those of one epoch, because another world has other durations.
    """

    def __init__(self) -> None:
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget all measurements, because another world has other durations."""
        self._exposed_ms = _FIRST_EXPOSED_MS
        """Idle time of the device when a plan waits for results."""
        self._cold_ms = _FIRST_COLD_MS
        """Extra time of a plain step whose graph was not built during another step."""
        self._plain_costs: dict[int, _PlainCost] = {}
        """Costs of plain steps, by rows."""
        self._drafted_costs: dict[tuple[Method, int, int], dict[int, _RelativeCost]] = {}
        """Costs of steps with drafts: by method, rows and class of drafted rows, then by width."""
        self._pending: _PendingStep | None = None
        self._steps = 0
        self._periods: dict[tuple[Method, int, int], list[float]] = {}
        """Cached results of `periods_ms`, by method, rows and class of drafted rows."""

    @property
    def switch_ms(self) -> float:
        """Milliseconds lost by one change from plans sent ahead to plans that wait, and back.

        Plans with drafts wait for the results of the plan before; without drafts they are sent
        ahead.
        """
        return self._exposed_ms + self._cold_ms

    @property
    def resume_ms(self) -> float:
        """Milliseconds lost by one change from plans that wait for results to plans sent ahead."""
        return self._cold_ms

    def periods_ms(self, rows: int, drafted_rows: int, method: Method = "ngram") -> list[float]:
        """Return the expected milliseconds per step for each number of drafts per row.

        A period is the time from the start of one step to the start of the next.

        Args:
            rows: sequences that decode.
            drafted_rows: those of them with drafts.
            method: method that proposes the drafts.

        Returns:
            DRAFT_TOKENS_MAX + 1 periods: at index 0 that of a step without drafts, at index n that
            of a step whose longest row has n drafts. All are 0 while no step without drafts was
            measured.
        """
        key = method, rows, _drafted_class(rows, drafted_rows)
        if key not in self._periods:
            self._periods[key] = self._predict(*key)
        return self._periods[key]

    def draft_ms(self, rows: int, method: Method) -> float:
        """Return an upper bound of the milliseconds that one more draft for every row costs.

        Args:
            rows: sequences that decode, all with drafts.
            method: method that proposes the drafts.

        Returns:
            The bound; 0 while no step without drafts was measured.
        """
        periods_ms = self.periods_ms(rows, rows, method)
        return (periods_ms[_TYPICAL_DRAFTS] - periods_ms[1]) / (_TYPICAL_DRAFTS - 1)

    def steps_since_plain(self, rows: int) -> int:
        """Return how many steps with drafts ran since one without drafts was measured.

        For a batch size without measurement this is 0 for a few steps if a similar one (within a
        factor of two) was measured with drafts, since the size changes often as requests come and
        go.

        Args:
            rows: number of sequences that decode; only steps with as many count.

        Returns:
            The number of steps; NEVER_MEASURED if no step without drafts was measured, since the
            costs of drafts are relative to it.
        """
        plain_cost = self._plain_costs.get(rows, _PlainCost())
        if plain_cost.plain_ms:
            return plain_cost.drafted_steps
        may_guess = plain_cost.drafted_steps < _GUESSED_STEPS and self._is_like_known(rows)
        return 0 if may_guess else NEVER_MEASURED

    def record_step(
        self, work: DecodeWork, busy_ms: float, idle_ms: float, *, was_held: bool
    ) -> None:
        """Record the duration of a finished step, in the order of receipts.

        Args:
            work: its decodes.
            busy_ms: StepFinished.busy_ms.
            idle_ms: StepFinished.idle_ms if requests were open all the time, else 0.
            was_held: its plan was sent only after the results of steps without drafts had arrived.
        """
        self._steps += 1
        before, self._pending = self._pending, None
        if before is not None and before.work.width == 1 and was_held:
            self._exposed_ms += _WEIGHT * (idle_ms - self._exposed_ms)
            idle_ms = 0.0
        elif before is not None and before.work.method != "ngram" and before.work.width > 1:
            # Drafts proposed by ranks wait for results from their second plan on.
            self._exposed_ms += _WEIGHT * (idle_ms - self._exposed_ms)
        if before is not None and before.is_measured:
            self._learn(before, max(_PERIOD_MS_MIN, before.busy_ms + idle_ms))
        # The graph of a plain step is built while another step runs, except after a wait.
        is_warm = not was_held and before is not None and before.work.width == 1
        is_plain = work.width == 1
        known = self._plain_costs.get(work.rows)
        if is_plain and not is_warm and known is not None and known.plain_ms:
            excess_ms = min(max(0.0, busy_ms - known.plain_ms), known.plain_ms)
            self._cold_ms += _WEIGHT * (excess_ms - self._cold_ms)
        self._pending = _PendingStep(
            work, busy_ms, is_measured=work.rows > 0 and (is_warm or not is_plain)
        )

    def _learn(self, step: _PendingStep, period_ms: float) -> None:
        plain_cost = self._plain_costs.setdefault(step.work.rows, _PlainCost())
        if step.work.width == 1:
            self._learn_plain(plain_cost, period_ms)
        else:
            plain_cost.drafted_steps += 1
            if plain_cost.plain_ms:
                self._learn_wide(plain_cost, step.work, period_ms)
        self._periods.clear()

    def _learn_plain(self, plain_cost: _PlainCost, period_ms: float) -> None:
        known = plain_cost.plain_ms
        if known and period_ms > _OUTLIER * known and not plain_cost.had_outlier:
            plain_cost.had_outlier = True
            return
        plain_cost.plain_ms = _average(known, period_ms, believed=plain_cost.had_outlier)
        plain_cost.had_outlier = False
        plain_cost.drafted_steps = 0

    def _learn_wide(self, plain_cost: _PlainCost, work: DecodeWork, period_ms: float) -> None:
        # More tokens per row take no less time, so a smaller period corrects that of plain steps.
        plain_cost.plain_ms = min(plain_cost.plain_ms, period_ms)
        ratio = period_ms / plain_cost.plain_ms
        expected_ms = self.periods_ms(work.rows, work.drafted_rows, work.method)[work.width - 1]
        key = work.method, work.rows, _drafted_class(work.rows, work.drafted_rows)
        costs = self._drafted_costs.setdefault(key, {})
        cost = costs.get(work.width)
        factor = _OUTLIER if work.method == "ngram" else _OUTLIER_MODEL
        if cost is None:
            is_outlier = period_ms > factor * expected_ms
            known = expected_ms / plain_cost.plain_ms if is_outlier else ratio
            costs[work.width] = _RelativeCost(known, self._steps, is_outlier)
            return
        cost.step = self._steps
        if ratio > factor * cost.ratio and not cost.had_outlier:
            cost.had_outlier = True
            return
        cost.ratio = _average(cost.ratio, ratio, believed=cost.had_outlier)
        cost.had_outlier = False

    def _predict(self, method: Method, rows: int, part: int) -> list[float]:
        plain_ms = self._plain_ms(rows)
        if not plain_ms:
            return [0.0] * WIDTHS
        # Even one draft costs the wait for results. With drafts proposed by ranks each token of a
        # row costs a forward too, so the line begins at a width of 0.
        proposes = method != "ngram"
        points = [(0 if proposes else 1, 1.0 + self._exposed_ms / plain_ms)]
        for width, ratio in self._nearest_ratios(method, rows, part):
            points.append((width, max(ratio, points[-1][1])))
        ratios = _interpolate_ratios(points, _FIRST_SLOPE + (_FIRST_DRAFT if proposes else 0.0))
        ratios[0] = 1.0
        return [plain_ms * ratio for ratio in ratios]

    def _plain_ms(self, rows: int) -> float:
        """Return the period of a plain step, estimated if these rows were not measured."""
        known = [count for count, plain_cost in self._plain_costs.items() if plain_cost.plain_ms]
        if not known:
            return 0.0
        nearest = max((count for count in known if count <= rows), default=min(known))
        # The cost of rows lies between constant and proportional to their number. Decisions
        # depend on ratios only, so a rough estimate is enough.
        return self._plain_costs[nearest].plain_ms * math.sqrt(max(1.0, rows / nearest))

    def _is_like_known(self, rows: int) -> bool:
        return any(
            self._plain_costs[known].plain_ms and known <= 2 * rows and rows <= 2 * known
            for _, known, _ in self._drafted_costs
        )

    def _nearest_ratios(self, method: Method, rows: int, part: int) -> list[tuple[int, float]]:
        """Return measured (width, ratio) pairs of the most similar steps, by rising width."""
        while known := [key for key in self._drafted_costs if key[0] == method]:
            key = min(known, key=lambda one: (abs(one[2] - part), abs(one[1] - rows)))
            costs = self._drafted_costs[key]
            for width in [width for width, cost in costs.items() if self._is_old(method, cost)]:
                del costs[width]
            if costs:
                return sorted((width, cost.ratio) for width, cost in costs.items())
            del self._drafted_costs[key]
        return []

    def _is_old(self, method: Method, cost: _RelativeCost) -> bool:
        forgotten = _FORGOTTEN_STEPS if method == "ngram" else _FORGOTTEN_STEPS_MODEL
        return self._steps - cost.step > forgotten


def _drafted_class(rows: int, drafted_rows: int) -> int:
    """Return the class of a step by the part of its rows with drafts."""
    return sum(drafted_rows > part * rows for part in _DRAFTED_PARTS[:-1])


def _average(known: float, new: float, *, believed: bool) -> float:
    # A step cannot be much faster by accident, so a much lower value replaces the average.
    return new if believed or 2 * new < known or not known else known + _WEIGHT * (new - known)


def _interpolate_ratios(points: list[tuple[int, float]], slope_min: float) -> list[float]:
    """Return the ratios of all widths, interpolated and extrapolated linearly.

    Args:
        points: (width, ratio) by rising width; the first width is 0 or 1.
        slope_min: smallest slope past the last point.
    """
    begin = points[0][0]
    ratios: list[float] = []
    steepest = slope_min
    for (width, ratio), (following, higher) in itertools.pairwise(points):
        slope = (higher - ratio) / (following - width)
        steepest = max(steepest, slope)
        ratios += [ratio + slope * step for step in range(following - width)]
    last = points[-1][1]
    ratios += [last + steepest * step for step in range(WIDTHS + 1 - begin - len(ratios))]
    return ratios[1 - begin :]
