"""Status report. Owns the StatusReported message and the token rate in it. Pure."""

from collections import deque
from collections.abc import Mapping

from services.scheduler.batch.in_flight_steps import InFlightSteps
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.requests.drain import Drain
from services.scheduler.requests.tenant_turns import TenantTurns
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.world.world import World
from services.scheduler.world.world_change import WorldChange
from shared.configuration.settings import Config
from shared.messages import StatusReported

_WINDOW_S = 2.0
"""Time over which the token rate is averaged."""


class TokenRates:
    """Counts generated tokens, for their mean number per second over the last two seconds."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def record(self, now_s: float, tokens: int) -> None:
        """Record the tokens of one finished step.

        Args:
            now_s: when it finished.
            tokens: tokens of all sequences together.
        """
        self._entries.append((now_s, tokens))
        self._tokens += tokens
        self._forget(now_s)

    def tokens_per_second(self, now_s: float) -> float:
        """Return the mean number of tokens per second over the last two seconds; 0 when idle.

        Args:
            now_s: the monotonic time in seconds.
        """
        self._forget(now_s)
        return self._tokens / _WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._entries and now_s - self._entries[0][0] > _WINDOW_S:
            self._tokens -= self._entries.popleft()[1]


def report(
    *,
    config: Config,
    world: World,
    change: WorldChange,
    batch: RunningBatch,
    in_flight: InFlightSteps,
    rates: TokenRates,
    counters: Mapping[str, float],
    waiting: WaitingQueue,
    turns: TenantTurns,
    tokens_limit: int,
    drain: Drain,
    now_s: float,
) -> StatusReported:
    """Return the status of the scheduler for gateways and `lockstep status`.

    Args:
        config: the whole configuration.
        world: rank processes and the epoch.
        change: its change since the last start.
        batch: the running batch.
        in_flight: plans in flight.
        rates: tokens per second of the last seconds.
        counters: counters since the scheduler started, by name.
        waiting: the waiting requests.
        turns: the tenants with open requests.
        tokens_limit: most tokens of prompt and completion of a request; 0: unknown.
        drain: whether new requests are refused, and why.
        now_s: the monotonic time in seconds.
    """
    reason = world.explain()
    if not reason:
        reason = drain.explain() or in_flight.overdue_reason(now_s) or ""
    return StatusReported(
        ready=not reason,
        reason=reason,
        draining=drain.is_on,
        model=config.served_name,
        model_fingerprint=world.fingerprint(),
        epoch=world.epoch,
        world_size=world.size,
        backend=world.recovery.backend,
        sharding=config.sharding,
        namespace=change.namespace,
        world_change=change.explain(now_s),
        ranks=world.statuses(),
        dismissed=world.dismissed.report(now_s),
        failure=world.recovery.failure,
        running=len(batch),
        waiting=len(waiting),
        kv_tokens_used=batch.tokens_used,
        kv_tokens_max=batch.rows.tokens_max,
        context_tokens_max=tokens_limit,
        steps=in_flight.finished_step_id,
        drafts=batch.speculation.counters.statistics(),
        counters={**counters, **_counters(world, batch)},
        gauges=_queue_gauges(waiting, turns) | _gauges(batch, in_flight, rates, now_s),
    )


def _counters(world: World, batch: RunningBatch) -> dict[str, float]:
    return {
        "memory_exhausted_total": float(world.recovery.memory_exhausted),
        **batch.report_counters(),
    }


def _queue_gauges(waiting: WaitingQueue, turns: TenantTurns) -> dict[str, float]:
    return {
        "waiting_tokens": float(waiting.limits.tokens),
        "active_tenants": float(len(turns)),
    }


def _gauges(
    batch: RunningBatch, in_flight: InFlightSteps, rates: TokenRates, now_s: float
) -> dict[str, float]:
    return {
        "tokens_per_second": rates.tokens_per_second(now_s),
        "prefill_token_ms": batch.timing.prefill_token_ms(),
        "decode_ms": batch.timing.decode_ms(max(1, len(batch))),
        "kv_budget_bytes": float(batch.rows.budget.bytes_max),
        "row_count": float(batch.rows.row_count),
        "row_tokens": float(batch.rows.row_tokens),
        "plans_in_flight": float(len(in_flight)),
        "step_stalled_s": in_flight.stalled_s(now_s),
        **batch.cache.report_gauges(),
    }
