"""Ways in which one executor runs a series of plans, and the prompts of each.

Each way takes a plan when it builds its step.
"""

from collections.abc import Callable, Iterable

from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.execution.executor import Executor
from shared.messages import PrefillChunk, StepPlan


def run_one_by_one(
    executor: Executor, plans: Iterable[StepPlan], on_end: Callable[[], object]
) -> None:
    """Run each plan after the one before has ended.

    Args:
        executor: runs them.
        plans: any number.
        on_end: called when a step has ended.
    """
    for plan in plans:
        executor.finish(executor.launch(plan))
        on_end()


def run_queued(executor: Executor, plans: Iterable[StepPlan], on_end: Callable[[], object]) -> None:
    """Run plans as the step loop does on a device with a queue, which has two steps at a time.

    Args:
        executor: runs them.
        plans: any number.
        on_end: called when a step has ended.
    """
    flight: list[LaunchedStep] = []

    def finish_oldest() -> None:
        executor.finish(flight.pop(0))
        on_end()

    for plan in plans:
        flight.append(executor.launch(plan, finish_oldest if flight else None))
        if len(flight) > 1:
            finish_oldest()
    if flight:
        finish_oldest()


def run_prepared(
    executor: Executor, plans: Iterable[StepPlan], on_end: Callable[[], object]
) -> None:
    """Run decodes as the step loop does on a CPU, which builds one step ahead.

    Args:
        executor: runs them.
        plans: any number, without prompts.
        on_end: called when a step has ended.
    """
    running: LaunchedStep | None = None
    for plan in plans:
        following = executor.prepare(plan)
        if running is not None:
            executor.start_first_layers(following)
            executor.finish(running)
            on_end()
        executor.start(following)
        running = following
    if running is not None:
        executor.finish(running)
        on_end()


def divide_chunks(chunks: Iterable[PrefillChunk], tokens_max: int) -> list[list[PrefillChunk]]:
    """Divide chunks into steps of up to `tokens_max` tokens, or of one chunk, in order."""
    steps: list[list[PrefillChunk]] = []
    left = 0
    for chunk in chunks:
        if chunk.length > left:
            steps.append([])
            left = tokens_max
        steps[-1].append(chunk)
        left -= chunk.length
    return steps
