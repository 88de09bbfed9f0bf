"""What the scheduler says about itself. Pure."""

from collections import deque
from collections.abc import Mapping

from services.scheduler.flights import Flights
from services.scheduler.planner import Batch
from services.scheduler.world import World
from shared.messages import StatusReported
from shared.settings import Config

_WINDOW_S = 2.0


class Rates:
    """Tokens per second over the last moments."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def note(self, now_s: float, tokens: int) -> None:
        """Take in what one step has generated."""
        self._entries.append((now_s, tokens))
        self._tokens += tokens
        self._forget(now_s)

    def tokens_per_second(self, now_s: float) -> float:
        """Return the mean over the window, 0 when idle."""
        self._forget(now_s)
        return self._tokens / _WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._entries and now_s - self._entries[0][0] > _WINDOW_S:
            self._tokens -= self._entries.popleft()[1]


def report(
    *,
    config: Config,
    world: World,
    batch: Batch,
    flights: Flights,
    rates: Rates,
    counters: Mapping[str, float],
    waiting: int,
    tokens_limit: int,
    draining: bool,
    now_s: float,
) -> StatusReported:
    """Describe the whole state for gateways and `lockstep status`."""
    reason = world.explain()
    if not reason and draining:
        reason = "The server is stopping."
    if not reason:
        reason = flights.overdue(now_s) or ""
    return StatusReported(
        ready=not reason,
        reason=reason,
        draining=draining,
        model=config.served_name,
        model_fingerprint=world.fingerprint(),
        epoch=world.epoch,
        world_size=world.size,
        backend=config.backend,
        ranks=world.statuses(),
        running=len(batch),
        waiting=waiting,
        kv_tokens_used=batch.tokens_used,
        kv_tokens_max=batch.rows.tokens_max,
        context_tokens_max=tokens_limit,
        steps=flights.finished,
        counters={
            **counters,
            "preemptions_total": float(batch.preemptions),
            **batch.cache.report_counters(),
        },
        gauges={
            "tokens_per_second": rates.tokens_per_second(now_s),
            "prefill_token_ms": batch.timing.prefill_token_ms(),
            "decode_ms": batch.timing.decode_ms(max(1, len(batch))),
            "row_count": float(batch.rows.row_count),
            "row_tokens": float(batch.rows.row_tokens),
            "plans_in_flight": float(len(flights)),
            "step_stalled_s": flights.stalled_s(now_s),
            **batch.cache.report_gauges(),
        },
    )
