"""How long a step may take before the world is declared lost.

Ten times what is predicted, at least `limits.STEP_DEADLINE_MIN_S`: predictions are learnt when the
machine may be idle, and hold when it is not. What has not run yet in this epoch is not predicted at
all but given the most time: the first step of a kind may compile kernels (seconds on CUDA) or
allocate, and what a token costs at a depth that no prompt has reached yet can only be guessed.
"""

from services.scheduler.batch.plan_builder import StepShape
from services.scheduler.batch.step_timing import StepTiming
from shared import limits

_Kind = tuple[str, int, int]


class StepDeadlines:
    """Which kinds of steps have run; one per epoch, since new processes have to warm up again."""

    def __init__(self, timing: StepTiming) -> None:
        self._timing = timing
        self._seen: set[_Kind] = set()

    def deadline_s(self, shape: StepShape) -> float:
        """Return how long a step may take."""
        if not self._seen.issuperset(_kinds(shape)):
            return limits.STEP_DEADLINE_MAX_S
        predicted_ms = self._timing.predicted_ms(
            shape.chunk_tokens, shape.decodes, shape.chunk_position
        )
        if predicted_ms is None:
            return limits.STEP_DEADLINE_MAX_S
        # A token more per row costs at most as much as the first.
        allowed_s = limits.STEP_DEADLINE_FACTOR * shape.width * predicted_ms / 1_000.0
        return min(max(allowed_s, limits.STEP_DEADLINE_MIN_S), limits.STEP_DEADLINE_MAX_S)

    def finished(self, shape: StepShape) -> None:
        """Take in that a step has run to its end."""
        self._seen.update(_kinds(shape))


def _kinds(shape: StepShape) -> list[_Kind]:
    """Return what a step consists of: its arrays, its decode, its prefill by size and depth.

    Sizes count by powers of two, so that prompts of all lengths do not make every step a new one.
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
