"""Polling of links over real sockets until a condition holds."""

import time
from collections.abc import Callable
from typing import Any

from shared.transport.links import LinkEvent
from tests.support.waiting import wait_until

Event = LinkEvent[Any]
DEADLINE_S = 60.0


def poll_until(
    condition: Callable[[], bool], *links: tuple[Any, list[Event]], deadline_s: float = DEADLINE_S
) -> None:
    """Poll links in turn until a condition holds.

    Args:
        condition: checked before each round.
        links: each link with the list to which its events are appended.
        deadline_s: seconds after which the wait fails.

    Raises:
        AssertionError: the condition does not hold after `deadline_s` seconds.
    """

    def holds() -> bool:
        if condition():
            return True
        for link, events in links:
            events.extend(link.poll(0.005))
        return False

    wait_until(holds, deadline_s, poll_s=0.0, failure=lambda: [events[-5:] for _, events in links])


def poll_for(seconds: float, *links: tuple[Any, list[Event]]) -> None:
    """Poll links in turn for some seconds, appending their events to the lists."""
    end_s = time.monotonic() + seconds
    poll_until(lambda: time.monotonic() > end_s, *links)
