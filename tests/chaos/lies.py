"""Receipts that differ because a rank computed something else: nothing of that step may leave."""

import functools
import time

from tests.chaos.fault import Arena, Fault
from tests.chaos.lying_rank import KINDS
from tests.chaos.rigged import Rigged
from tests.chaos.stack import Stuck

TOLD_DEADLINE_S = 30.0


def _lie(kind: str, arena: Arena) -> None:
    stack = arena.stack
    assert isinstance(stack, Rigged)
    before = stack.status()
    file = stack.lie_file(arena.turn % arena.ranks)
    stack.log.note(f"rank {arena.turn % arena.ranks} is to lie: {kind}")
    draft = file.with_suffix(".new")
    draft.write_text(kind, encoding="ascii")
    draft.rename(file)
    until_s = time.monotonic() + TOLD_DEADLINE_S
    while file.exists():
        if time.monotonic() > until_s:
            raise Stuck(f"no step took the lie within {TOLD_DEADLINE_S:.0f} s")
        time.sleep(0.01)
    after = arena.wait_served({rank.pid for rank in before.ranks})
    name = "receipts_mismatched_total"
    found = after.counters.get(name, 0.0) - before.counters.get(name, 0.0)
    if found != 1.0:
        arena.complain(f"{name} rose by {found:g}, not by 1, after a lie about the {kind}")


FAULTS = tuple(
    Fault(
        f"lie-{kind}",
        "found, a pause",
        functools.partial(_lie, kind),
        ground="by parts",
        ranks_min=2,
    )
    for kind in KINDS
)
