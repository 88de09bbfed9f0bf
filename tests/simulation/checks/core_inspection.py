"""Views into the scheduler's core. Owns all access of the simulation to its private state."""

from services.scheduler.core import SchedulerCore
from services.scheduler.world.world import WorldState
from shared.messages import StatusReported
from tests.unit.scheduler.support.reference_rank import ReferenceRank


def epoch(core: SchedulerCore) -> int:
    """Return the current epoch."""
    return core._world.epoch


def last_finished_step(core: SchedulerCore) -> int:
    """Return the last step of the epoch with receipts of all ranks."""
    return core._pipeline.in_flight.finished_step_id


def stale_receipts(core: SchedulerCore) -> float:
    """Return the number of receipts of another epoch or from a peer outside the world."""
    return core._counters["stale_receipts_total"]


def status_report(core: SchedulerCore, now_s: float) -> StatusReported:
    """Return the status report that a gateway would get."""
    return core._report(now_s)


def open_requests(core: SchedulerCore, gateway: bytes) -> list[str]:
    """Return the open requests of one gateway."""
    return [name for peer, name in core._requests._open if peer == gateway]


def has_stopped(core: SchedulerCore) -> bool:
    """Tell whether the scheduler has stopped and only closes its links."""
    return core._has_stopped


def has_failed(core: SchedulerCore) -> bool:
    """Tell whether no further epoch will begin."""
    return core._world.state is WorldState.FAILED


def unready_reason(core: SchedulerCore) -> str:
    """Return why the world is not ready; "" when it is."""
    state = core._world.state.value
    return "" if state == "ready" else f"the world is {state}: {core._world.explain()}"


def leftovers(core: SchedulerCore) -> list[str]:
    """Return state that must not exist when no request is open."""
    cache = core._batch.cache
    counts = {
        "requests": len(core._requests),
        "waiting": len(core._waiting),
        "running": len(core._batch),
        "plans in flight": len(core._pipeline.in_flight),
        "pins": len(cache.state.pins),
        "restores": len(cache.restorer._open),
        "slots": core._batch.rows.slots_used,
    }
    return [f"scheduler: {count} {what}" for what, count in counts.items() if count]


def rank_leftovers(core: SchedulerCore, name: str, rank: ReferenceRank) -> list[str]:
    """Return state of an idle rank that differs from the block index (I9)."""
    index = core._batch.cache.state.index
    resident = {entry.hash for node in index for entry in node.entries if entry.is_resident}
    left = []
    if rank.rows:
        left.append(f"{name}: {len(rank.rows)} rows")
    if rank.open_restores:
        left.append(f"{name}: {rank.open_restores} restores")
    if set(rank.blocks) != resident or rank.resident_bytes != index.resident_bytes:
        left.append(f"{name}: other blocks than the index")
    return left
