"""Step deadlines. Owns how long a step may take before the world is declared lost.

A deadline is a multiple of the predicted time and at least some seconds, because the prediction
may come from an idle machine and the step run on a busy one. A step of a kind that has not run in
this epoch gets the longest deadline: it may compile kernels (seconds on CUDA) or allocate memory,
and the cost of a token at a new depth is unknown.
"""

from services.scheduler.batch.plan_builder import StepWork
from services.scheduler.batch.step_timing import StepTiming
from shared.configuration.settings import SchedulerConfig

_StepKind = tuple[str, int, int]


class StepDeadlines:
    """Decides how long each step of an epoch may take before the world counts as lost.

    Work counts as new until a step of its kind (such as decodes of as many rows) has finished in
    this epoch, because new processes compile kernels and allocate memory again.
    """

    def __init__(self, timing: StepTiming, config: SchedulerConfig) -> None:
        self._timing = timing
        self._factor = config.step_deadline_factor
        self._min_s, self._max_s = config.step_deadline_min_s, config.step_deadline_max_s
        self._seen: set[_StepKind] = set()
        self._last: StepWork | None = None
        """The work of the step that has finished last. Most steps repeat it."""

    def deadline_s(self, shape: StepWork) -> float:
        """Return how many seconds a step may take: a multiple of its predicted time, within bounds.

        Args:
            shape: the work in the step. If any kind of it is new in this epoch, or its time cannot
                be predicted yet, the step gets the longest deadline.
        """
        if shape != self._last and not self._seen.issuperset(_kinds(shape)):
            return self._max_s
        predicted_ms = self._timing.predicted_ms(
            shape.chunk_tokens, shape.decodes, shape.chunk_position
        )
        if predicted_ms is None:
            return self._max_s
        # Each further token of a row costs at most as much as the first.
        allowed_s = self._factor * shape.width * predicted_ms / 1_000.0
        return min(max(allowed_s, self._min_s), self._max_s)

    def record_step(self, shape: StepWork) -> None:
        """Record that a step has finished, so that its kinds of work are no longer new.

        Args:
            shape: the work in the step, as passed to `deadline_s`.
        """
        if shape != self._last:
            self._last = shape
            self._seen.update(_kinds(shape))


def _kinds(shape: StepWork) -> list[_StepKind]:
    """Return the kinds of work in a step: row arrays, decode, prefill by size and depth, reads.

    Token counts are rounded to powers of two, so that most prompt lengths share a kind.
    """
    kinds = [("rows", shape.row_count, shape.row_tokens)]
    if shape.decodes:
        kinds.append((f"decode {shape.method}", shape.decodes, shape.width))
    if shape.chunk_tokens:
        depth = (shape.chunk_position + shape.chunk_tokens).bit_length()
        kinds.append(("prefill", shape.chunk_tokens.bit_length(), depth))
    if shape.read_tokens:
        kinds.append(("read", shape.read_tokens.bit_length(), 0))
    return kinds
