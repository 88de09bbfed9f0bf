"""How long a decode step takes, by rows and by tokens per row, learnt from receipts. Pure.

A step's `width` is one more than its longest drafts, 1 in a plain step. Ranks pad rows to it, or
compute those with drafts apart, whichever they find cheaper; so a shape is the number of rows, the
width, and which part of the rows has drafts, in three classes.

Drafts that the ranks propose themselves cost a forward of the draft model or head each, and one
more: a shape has the method too, and nothing is told from one method to another but plain steps.

What counts is the step's period, not only its busy time: a verification's result must be here
before the next plan can be made, so its step also costs the idle time that follows it, the round
trip, and the building of its graph, which nothing hides (and which the rank counts as busy). A
plain step hides all that behind the step before it.

Periods of plain steps are kept per number of rows, and those of wider ones as ratios to them, so
that both follow a text that grows longer. Between two measured widths a straight line is taken, and
past the last one its steepest slope goes on; nothing measured means hardly any cost, as on a GPU
whose memory bounds it, which one step per shape corrects. That one is only made when the text
repeats itself, and repeated after thousands of steps.
"""

import dataclasses
import itertools
import math

from services.scheduler.speculation.method import Method
from shared import limits

NEVER_MEASURED = 2**31
WIDTHS = limits.DRAFT_TOKENS_MAX + 1
_WEIGHT = 0.3
_OUTLIER = 4.0
"""So many times slower than expected is believed when it happens twice: a kernel that is compiled
for its first use takes seconds once."""
_OUTLIER_MODEL = 1.5
"""The same where the ranks propose drafts, which pay for hundreds of steps or never: an accident is
not to end that, nor a first step in which many forwards of two models begin."""
_FIRST_SLOPE = 0.02
"""Part of a plain step that one more token per row is thought to cost at first."""
_FIRST_DRAFT = 0.1
"""The same of a forward of the ranks' draft model or head."""
_FIRST_EXPOSED_MS = 0.5
"""A round trip, until one was measured (docs/performance.md, exposed scheduling cost)."""
_FIRST_COLD_MS = 1.0
"""Building a graph, until it was measured."""
_PERIOD_MS_MIN = 1e-3
"""No step takes less, whatever a clock says: everything is told as a ratio to it."""
_PARTS = (0.25, 0.5, 1.0)
"""Up to so much of the rows has drafts."""
_GUESSED_STEPS = 16
"""So many steps with drafts may go by a batch of another size."""
_USUAL = 5
"""Drafts."""
_FORGOTTEN_STEPS = 4_096
"""A width that was not tried for so long may cost something else now."""
_FORGOTTEN_STEPS_MODEL = 2_048
"""The same where the ranks propose drafts: what is believed by mistake would cost more than a step
that is made to see."""


@dataclasses.dataclass(slots=True)
class _Cell:
    """What steps of one shape have cost."""

    ratio: float
    """Against a plain step of as many rows."""
    step: int
    """Number of the step that taught it last."""
    suspicion: bool = False
    """The last one was an outlier."""


@dataclasses.dataclass(slots=True)
class _Curve:
    """What steps of one number of rows have cost."""

    plain_ms: float = 0.0
    """0: unknown."""
    suspicion: bool = False
    """The last plain step was an outlier."""
    verified: int = 0
    """Wider steps since the last plain one that taught something."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepWidth:
    """What a decode step computes, as far as its cost depends on it."""

    rows: int
    """Sequences that decode; 0 when none does or chunks are computed too, whose cost is not a
    decode's."""
    width: int
    """One more than the longest drafts."""
    drafted: int
    """Rows with drafts."""
    method: Method = "ngram"
    """How those are proposed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Finished:
    """A step whose cost is complete once it is known how long the device waited after it."""

    shape: StepWidth
    busy_ms: float
    teaches: bool


class StepCosts:
    """Learns periods in milliseconds; one per epoch, since another world has other costs."""

    def __init__(self) -> None:
        self._exposed_ms = _FIRST_EXPOSED_MS
        """What the device waits when a plan is held until results are here."""
        self._cold_ms = _FIRST_COLD_MS
        """What a plain step takes longer when nothing hid the building of its graph."""
        self._curves: dict[int, _Curve] = {}
        """Plain steps by rows."""
        self._wide: dict[tuple[Method, int, int], dict[int, _Cell]] = {}
        """Others by method, rows and part of them with drafts, then by width."""
        self._last: _Finished | None = None
        self._steps = 0
        self._periods: dict[tuple[Method, int, int], list[float]] = {}
        """By method, rows and part, what `periods_ms` returns until something is learnt."""

    @property
    def turn_ms(self) -> float:
        """What it costs to leave run-ahead for verifications and to come back."""
        return self._exposed_ms + self._cold_ms

    @property
    def return_ms(self) -> float:
        """What coming back costs alone."""
        return self._cold_ms

    def periods_ms(self, rows: int, drafted: int, method: Method = "ngram") -> list[float]:
        """Return the expected period by most drafts per row, 0 .. DRAFT_TOKENS_MAX.

        All 0 while no plain step was measured.

        Args:
            rows: sequences that decode.
            drafted: those of them with drafts.
            method: how those are proposed.
        """
        key = method, rows, _part(rows, drafted)
        if key not in self._periods:
            self._periods[key] = self._predict(*key)
        return self._periods[key]

    def forward_ms(self, rows: int, method: Method) -> float:
        """Return what one more draft of each row costs, at the most; 0: unknown."""
        periods_ms = self.periods_ms(rows, rows, method)
        return (periods_ms[_USUAL] - periods_ms[1]) / (_USUAL - 1)

    def verified(self, rows: int) -> int:
        """Return how many steps of so many rows had drafts since a plain one was measured.

        NEVER_MEASURED: none was, and drafts teach nothing before one is. Only a batch of about a
        size that was measured with drafts goes by that, for a few steps: while requests come and
        go one by one, hardly any size lasts for longer.
        """
        curve = self._curves.get(rows)
        if curve and curve.plain_ms:
            return curve.verified
        guessed = curve.verified if curve else 0
        return 0 if guessed < _GUESSED_STEPS and self._is_like_known(rows) else NEVER_MEASURED

    def finished(self, shape: StepWidth, busy_ms: float, idle_ms: float, *, held: bool) -> None:
        """Take in a step, in the order of receipts.

        Args:
            shape: what it computed.
            busy_ms: StepFinished.busy_ms.
            idle_ms: StepFinished.idle_ms if there was work all the time, else 0.
            held: its plan waited for results although the steps before had no drafts.
        """
        self._steps += 1
        before, self._last = self._last, None
        if before is not None and before.shape.width == 1 and held:
            self._exposed_ms += _WEIGHT * (idle_ms - self._exposed_ms)
            idle_ms = 0.0
        elif before is not None and before.shape.method != "ngram" and before.shape.width > 1:
            # Their first plan is not held back, and every next one is.
            self._exposed_ms += _WEIGHT * (idle_ms - self._exposed_ms)
        if before is not None and before.teaches:
            self._learn(before, max(_PERIOD_MS_MIN, before.busy_ms + idle_ms))
        # The graph of a plain step is built while another runs, except after a wait, and at first.
        is_warm = not held and before is not None and before.shape.width == 1
        is_plain = shape.width == 1
        known = self._curves.get(shape.rows)
        if is_plain and not is_warm and known is not None and known.plain_ms:
            excess_ms = min(max(0.0, busy_ms - known.plain_ms), known.plain_ms)
            self._cold_ms += _WEIGHT * (excess_ms - self._cold_ms)
        self._last = _Finished(shape, busy_ms, teaches=shape.rows > 0 and (is_warm or not is_plain))

    def _learn(self, step: _Finished, period_ms: float) -> None:
        curve = self._curves.setdefault(step.shape.rows, _Curve())
        if step.shape.width == 1:
            self._learn_plain(curve, period_ms)
        else:
            curve.verified += 1
            if curve.plain_ms:
                self._learn_wide(curve, step.shape, period_ms)
        self._periods.clear()

    def _learn_plain(self, curve: _Curve, period_ms: float) -> None:
        known = curve.plain_ms
        if known and period_ms > _OUTLIER * known and not curve.suspicion:
            curve.suspicion = True
            return
        curve.plain_ms = _average(known, period_ms, believed=curve.suspicion)
        curve.suspicion = False
        curve.verified = 0

    def _learn_wide(self, curve: _Curve, shape: StepWidth, period_ms: float) -> None:
        # More tokens per row take no less time: then what was known of plain steps was wrong.
        curve.plain_ms = min(curve.plain_ms, period_ms)
        ratio = period_ms / curve.plain_ms
        expected_ms = self.periods_ms(shape.rows, shape.drafted, shape.method)[shape.width - 1]
        key = shape.method, shape.rows, _part(shape.rows, shape.drafted)
        cells = self._wide.setdefault(key, {})
        cell = cells.get(shape.width)
        if cell is None:
            factor = _OUTLIER if shape.method == "ngram" else _OUTLIER_MODEL
            is_outlier = period_ms > factor * expected_ms
            known = expected_ms / curve.plain_ms if is_outlier else ratio
            cells[shape.width] = _Cell(known, self._steps, is_outlier)
            return
        cell.step = self._steps
        factor = _OUTLIER if shape.method == "ngram" else _OUTLIER_MODEL
        if ratio > factor * cell.ratio and not cell.suspicion:
            cell.suspicion = True
            return
        cell.ratio = _average(cell.ratio, ratio, believed=cell.suspicion)
        cell.suspicion = False

    def _predict(self, method: Method, rows: int, part: int) -> list[float]:
        plain_ms = self._plain_ms(rows)
        if not plain_ms:
            return [0.0] * WIDTHS
        # Waiting for results costs something however few drafts there are. Where the ranks propose
        # them, as many forwards come on top as a row has tokens: none at a width of 0.
        proposes = method != "ngram"
        points = [(0 if proposes else 1, 1.0 + self._exposed_ms / plain_ms)]
        for width, ratio in self._nearest_ratios(method, rows, part):
            points.append((width, max(ratio, points[-1][1])))
        ratios = _through(points, _FIRST_SLOPE + (_FIRST_DRAFT if proposes else 0.0))
        ratios[0] = 1.0
        return [plain_ms * ratio for ratio in ratios]

    def _plain_ms(self, rows: int) -> float:
        """Return a plain step's period; of rows never measured, what scaling makes likely."""
        if rows in self._curves and self._curves[rows].plain_ms:
            return self._curves[rows].plain_ms
        known = [count for count, curve in self._curves.items() if curve.plain_ms]
        if not known:
            return 0.0
        below = [count for count in known if count <= rows]
        nearest = max(below) if below else min(known)
        # Between "rows cost nothing" and "rows cost their number". Only ratios decide, so that
        # neither is far off.
        return self._curves[nearest].plain_ms * math.sqrt(max(1.0, rows / nearest))

    def _is_like_known(self, rows: int) -> bool:
        return any(
            self._curves[known].plain_ms and known <= 2 * rows and rows <= 2 * known
            for _, known, _ in self._wide
        )

    def _nearest_ratios(self, method: Method, rows: int, part: int) -> list[tuple[int, float]]:
        """Return (width, ratio) of the likeliest shapes that were measured, by rising width."""
        while known := [key for key in self._wide if key[0] == method]:
            key = min(known, key=lambda one: (abs(one[2] - part), abs(one[1] - rows)))
            cells = self._wide[key]
            for width in [width for width, cell in cells.items() if self._is_old(method, cell)]:
                del cells[width]
            if cells:
                return sorted((width, cell.ratio) for width, cell in cells.items())
            del self._wide[key]
        return []

    def _is_old(self, method: Method, cell: _Cell) -> bool:
        forgotten = _FORGOTTEN_STEPS if method == "ngram" else _FORGOTTEN_STEPS_MODEL
        return self._steps - cell.step > forgotten


def _part(rows: int, drafted: int) -> int:
    """Return the class of a step by the part of its rows that has drafts."""
    return sum(drafted > part * rows for part in _PARTS[:-1])


def _average(known: float, new: float, *, believed: bool) -> float:
    # Nothing makes a step much faster than it is: what was known was an accident.
    return new if believed or 2 * new < known or not known else known + _WEIGHT * (new - known)


def _through(points: list[tuple[int, float]], slope_min: float) -> list[float]:
    """Return the ratios of all widths: lines through the points, and on from the last one.

    Args:
        points: (width, ratio) by rising width, the first one's 0 or 1.
        slope_min: past the last point it is at least so steep.
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
