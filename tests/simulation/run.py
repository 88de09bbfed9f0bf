"""One simulated run. Owns its end and its verdict; the system and its faults are elsewhere."""

import dataclasses

from tests.simulation.environment.event_heap import START_S, EventHeap, Violation
from tests.simulation.environment.patching import patched_environment
from tests.simulation.faults.fault_schedule import FaultSchedule
from tests.simulation.processes.process import Killed
from tests.simulation.system import System

TRAFFIC_S = 4.0
"""All clients have started after this time."""
WAIT_AFTER_FAULTS_S = 150.0
"""Longest time from the last fault to the end of every request: two of the longest step deadlines
and the detection of a dead link."""
CHECK_EVERY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    seed: int
    violation: str
    """The first violated check; "" without violations."""
    digest: str
    log: list[tuple[object, ...]]
    seconds: float
    """Simulated time."""
    faults: int
    outcomes: dict[str, int]
    """Number of clients by how they ended."""
    divergences: int
    """Number of corrupted receipts that ranks have sent."""


def simulate(seed: int, only_fault: str = "") -> Outcome:
    """Run one seed to its end.

    Args:
        seed: source of all random choices.
        only_fault: the only kind of fault to inject; "" for all kinds.
    """
    heap = EventHeap(seed)
    system = System(heap)
    faults = FaultSchedule(heap, system, only_fault)
    violation = ""
    with patched_environment(heap, system.network):
        try:
            system.start()
            faults.plan()
            _run_to_end(heap, system, faults)
        except (Exception, Killed) as error:  # noqa: BLE001 - every error is reported with its seed
            violation = f"{type(error).__name__}: {error}"
    outcomes: dict[str, int] = {}
    for client in system.clients:
        outcomes[client.outcome or "waiting"] = outcomes.get(client.outcome or "waiting", 0) + 1
    return Outcome(
        seed,
        violation,
        heap.digest(),
        heap.log,
        heap.now_s - START_S,
        faults.count,
        outcomes,
        system.rank_environment.divergences,
    )


def _run_to_end(heap: EventHeap, system: System, faults: FaultSchedule) -> None:
    """Advance until all clients have ended and nothing is left over.

    Raises:
        Violation: a client waits too long, something is left over, or an outcome is wrong.
    """
    _advance_to(heap, START_S + TRAFFIC_S)
    while True:
        _advance_to(heap, heap.now_s + CHECK_EVERY_S)
        over_s = max(START_S + TRAFFIC_S, faults.ends_at_s)
        waiting = [client for client in system.clients if not client.outcome]
        is_over = heap.now_s >= over_s and not waiting
        if is_over and (left := system.leftovers()) == []:
            break
        if heap.now_s > over_s + WAIT_AFTER_FAULTS_S:
            if waiting:
                raise Violation(f"{', '.join(one.name for one in waiting)} never end")
            raise Violation(f"left over: {'; '.join(left)}")
    system.check_outcomes()


def _advance_to(heap: EventHeap, until_s: float) -> None:
    entries = heap._entries
    while entries and entries[0][0] <= until_s:
        heap.step()
    heap.now_s = max(heap.now_s, until_s)
