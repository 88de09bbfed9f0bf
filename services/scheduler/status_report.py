"""Status report. Owns the StatusReported message. Pure."""

import dataclasses

from services.scheduler.batch.in_flight_steps import InFlightSteps
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.requests.drain import Drain
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.tenant_turns import TenantTurns
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.step_pipeline import StepPipeline
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.telemetry.token_rates import TokenRates
from services.scheduler.world.world import World
from services.scheduler.world.world_change import WorldChange
from shared.configuration.settings import Config
from shared.messages import StatusReported


@dataclasses.dataclass(frozen=True, slots=True)
class StatusReporter:
    """Reads the parts of the scheduler for the status of gateways and `lockstep status`."""

    config: Config
    world: World
    change: WorldChange
    batch: RunningBatch
    pipeline: StepPipeline
    telemetry: Telemetry
    requests: RequestTable
    waiting: WaitingQueue
    drain: Drain

    def report(self, tokens_limit: int, now_s: float) -> StatusReported:
        """Return the status.

        Args:
            tokens_limit: most tokens of prompt and completion of a request; 0: unknown.
            now_s: the monotonic time in seconds.
        """
        config, world, batch = self.config, self.world, self.batch
        in_flight = self.pipeline.in_flight
        reason = world.explain()
        if not reason:
            reason = self.drain.explain() or in_flight.overdue_reason(now_s) or ""
        return StatusReported(
            ready=not reason,
            reason=reason,
            draining=self.drain.is_on,
            model=config.served_name,
            model_fingerprint=world.model.fingerprint(),
            epoch=world.epoch,
            world_size=world.size,
            backend=world.recovery.backend,
            sharding=config.sharding,
            namespace=self.change.namespace,
            spare_world=world.spares.explain(),
            world_change=self.change.explain(now_s),
            ranks=[self.telemetry.complete(one, now_s) for one in world.statuses()],
            dismissed=world.dismissed.report(now_s),
            failure=world.recovery.failure,
            running=len(batch),
            waiting=len(self.waiting),
            kv_tokens_used=batch.tokens_used,
            kv_tokens_max=batch.rows.tokens_max,
            context_tokens_max=tokens_limit,
            steps=in_flight.finished_step_id,
            drafts=batch.speculation.counters.statistics(),
            durations=self.telemetry.report_durations(),
            counters=self.requests.counters | self.telemetry.head | _counters(world, batch),
            gauges=_queue_gauges(self.waiting, self.requests.turns)
            | self.telemetry.experts.gauges()
            | _gauges(batch, in_flight, self.pipeline.rates, now_s),
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
        "tokens_in_flight": float(in_flight.tokens),
        "step_stalled_s": in_flight.stalled_s(now_s),
        **batch.cache.report_gauges(),
    }
