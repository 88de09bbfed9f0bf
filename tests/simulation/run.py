"""One run: a seed, a system, its faults, and the judgement in the end."""

import dataclasses

from tests.simulation.environment.event_heap import START_S, Heap, Violation
from tests.simulation.environment.patching import bound
from tests.simulation.faults.fault_schedule import Faults
from tests.simulation.processes.process import Killed
from tests.simulation.system import System

TRAFFIC_S = 4.0
"""All clients have come by then."""
PATIENCE_S = 150.0
"""After the last fault whoever waits has its end by then: two of the longest deadlines of a step,
and the time to notice a dead link."""
LOOK_EVERY_S = 0.25


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    seed: int
    violation: str
    """"" when every promise was kept."""
    digest: str
    log: list[tuple[object, ...]]
    seconds: float
    """Simulated."""
    faults: int
    outcomes: dict[str, int]
    """Clients by how they ended."""
    divergences: int
    """Receipts that were wrong."""


def simulate(seed: int, only: str = "") -> Outcome:
    """Play the run of this seed to its end; `only`: with one kind of fault."""
    heap = Heap(seed)
    system = System(heap)
    faults = Faults(heap, system, only)
    violation = ""
    with bound(heap, system.wire):
        try:
            system.start()
            faults.plan()
            _play(heap, system, faults)
        except (Exception, Killed) as error:  # noqa: BLE001 - whatever goes wrong has a seed
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
        system.worlds.divergences,
    )


def _play(heap: Heap, system: System, faults: Faults) -> None:
    """Let everything happen until all is over; then nobody may wait, and nothing may be left."""
    _until(heap, START_S + TRAFFIC_S)
    while True:
        _until(heap, heap.now_s + LOOK_EVERY_S)
        over_s = max(START_S + TRAFFIC_S, faults.ends_at_s)
        waiting = [client for client in system.clients if not client.outcome]
        is_over = heap.now_s >= over_s and not waiting
        if is_over and (left := system.leftovers()) == []:
            break
        if heap.now_s > over_s + PATIENCE_S:
            if waiting:
                raise Violation(f"{', '.join(one.name for one in waiting)} wait for ever")
            raise Violation(f"left behind: {'; '.join(left)}")
    system.judge()


def _until(heap: Heap, until_s: float) -> None:
    entries = heap._entries
    while entries and entries[0][0] <= until_s:
        heap.step()
    heap.now_s = max(heap.now_s, until_s)
