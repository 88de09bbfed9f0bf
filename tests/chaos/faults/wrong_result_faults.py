"""Ranks that compute a wrong result: receipts differ, and no token of that step is released."""

import functools

from tests.chaos.cluster.fault_injection_stack import FaultInjectionStack
from tests.chaos.cluster.faulty_rank import RESULT_FAULTS
from tests.chaos.cluster.stack import wait_for
from tests.chaos.faults.fault import Fault, FaultContext

INJECT_DEADLINE_S = 30.0
MISMATCHES = "receipts_mismatched_total"


def _return_wrong_result(kind: str, context: FaultContext) -> None:
    stack = context.stack
    assert isinstance(stack, FaultInjectionStack)
    before = stack.status()
    rank = context.repetition % context.world_size
    file = stack.fault_file(rank)
    stack.log.note(f"rank {rank} is to return a wrong {kind}")
    # The rename lets the rank see the file only when it is complete.
    new = file.with_suffix(".new")
    new.write_text(kind, encoding="ascii")
    new.rename(file)
    wait_for(lambda: not file.exists(), INJECT_DEADLINE_S, "no step had a result to change")
    after = context.wait_until_served({rank.pid for rank in before.ranks})
    rise = after.counters.get(MISMATCHES, 0.0) - before.counters.get(MISMATCHES, 0.0)
    if rise != 1.0:
        context.add_problem(f"{MISMATCHES} rose by {rise:g}, not by 1, after a wrong {kind}")


FAULTS = tuple(
    Fault(
        f"wrong-{kind}",
        "found, a pause",
        functools.partial(_return_wrong_result, kind),
        stack_kind="fault injection",
        ranks_min=2,
    )
    for kind in RESULT_FAULTS
)
