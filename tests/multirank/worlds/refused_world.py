"""Worlds of two real ranks that fail to start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from shared.messages import StatusReported
from tests.chaos.cluster.unsupervised_stack import UnsupervisedStack
from tests.support.waiting import wait_until

ROLES = ("scheduler", "rank 0", "rank 1")
DEADLINE_S = 200.0
"""Two starts, one after the other; each may take as long as `READY_DEADLINE_S`."""

S = TypeVar("S", bound=UnsupervisedStack)


@contextmanager
def run_stack(stack: S) -> Iterator[S]:
    """Start a stack; stop it and delete its folders at the exit."""
    try:
        stack.launch()
        yield stack
    finally:
        stack.close()
        stack.remove()


def wait_for_failure(stack: UnsupervisedStack) -> StatusReported:
    """Wait until the scheduler tries no further epoch; the world may not be ready before."""

    def failed_status() -> StatusReported | None:
        status = stack.try_status()
        assert status is None or not status.ready
        return status if status is not None and status.failure else None

    status = wait_until(failed_status, DEADLINE_S, failure=stack.log.tail)
    assert status is not None
    return status
