"""Waiting for a condition with a deadline: the only wait loops that tests have."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 15.0

"""Other tests may keep both cores busy; what takes milliseconds alone can then take seconds."""
PROCESS_DEADLINE_S = 900.0
"""For a process of a test at idle priority, to which other tests can leave almost no time."""
POLL_S = 0.005


def wait_until(
    condition: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    *,
    poll_s: float = POLL_S,
    failure: str | Callable[[], object] = "the condition does not hold",
) -> T:
    """Call `condition` until it returns a true value, and return that value.

    Args:
        condition: checked at once, then every `poll_s` seconds.
        deadline_s: seconds after which the wait fails.
        poll_s: pause between two checks in seconds; 0 checks without a pause.
        failure: what the error says, or a function that returns it.

    Raises:
        AssertionError: `condition` is still false at the deadline.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() >= end_s:
            raise AssertionError(_message(failure, deadline_s))
        time.sleep(poll_s)
    return value


def poll_until(
    poll: Callable[[], object],
    condition: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    *,
    failure: str | Callable[[], object] = "the condition does not hold",
) -> T:
    """Do as `wait_until`, but call `poll` between two checks; `poll` blocks for a short time."""

    def check() -> T:
        if value := condition():
            return value
        poll()
        return condition()

    return wait_until(check, deadline_s, poll_s=0.0, failure=failure)


async def wait_until_async(
    condition: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    *,
    poll_s: float = POLL_S,
    failure: str | Callable[[], object] = "the condition does not hold",
) -> T:
    """Do as `wait_until` without blocking the event loop."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() >= end_s:
            raise AssertionError(_message(failure, deadline_s))
        await asyncio.sleep(poll_s)
    return value


def _message(failure: str | Callable[[], object], deadline_s: float) -> str:
    text = failure() if callable(failure) else failure
    return f"after {deadline_s:g} s: {text}"
