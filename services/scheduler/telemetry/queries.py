"""Answers to queries about steps and requests. Changes nothing. Pure."""

from typing import Literal

from services.scheduler.requests.request_history import record_of
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.world.world import World
from shared import limits
from shared.configuration.settings import Config
from shared.messages import (
    ActivityReported,
    ExpertsReported,
    OpenRequest,
    ProfilesReported,
    QueryActivity,
    QueryExperts,
    QueryProfiles,
    QueryTrace,
    TraceReported,
)

Query = QueryProfiles | QueryTrace | QueryActivity | QueryExperts
Answer = ProfilesReported | TraceReported | ActivityReported | ExpertsReported


class TelemetryQueries:
    """Answers queries from what the parts of the scheduler know."""

    def __init__(
        self,
        config: Config,
        telemetry: Telemetry,
        requests: RequestTable,
        waiting: WaitingQueue,
        world: World,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._requests = requests
        self._waiting = waiting
        self._world = world

    def answer(self, query: Query, now_s: float) -> Answer:
        """Return the answer to a query at a monotonic time in seconds."""
        match query:
            case QueryProfiles():
                return self._telemetry.profiles.report(query)
            case QueryTrace():
                return self._telemetry.trace(query.seconds, self._requests, self._world, now_s)
            case QueryActivity():
                return self._activity(query, now_s)
            case QueryExperts():
                return self._experts()

    def _experts(self) -> ExpertsReported:
        return ExpertsReported(
            model=self._config.served_name,
            model_fingerprint=self._world.fingerprint(),
            sharding=self._config.sharding,
            world_size=self._world.size,
            layers=self._telemetry.experts.report(),
        )

    def _activity(self, query: QueryActivity, now_s: float) -> ActivityReported:
        telemetry = self._telemetry
        waiting = self._waiting.heads(limits.ACTIVITY_REQUESTS_MAX)
        is_waiting = {one.sequence_id for one in self._waiting}
        running = [one for one in self._requests if one.sequence_id not in is_waiting]
        listed = [*running, *waiting][: limits.ACTIVITY_REQUESTS_MAX]
        return ActivityReported(
            now_s=now_s,
            steps=telemetry.history.complete_since((query.epoch, query.step_id), self._world.size),
            requests=[_open_request(one) for one in listed],
            requests_omitted=len(self._requests) - len(listed),
            ended_epochs=list(telemetry.events.ended_epochs),
            events=list(telemetry.events.events),
            loss=telemetry.profiles.largest_loss(self._world.size),
        )


def _open_request(sequence: Sequence) -> OpenRequest:
    drafts = sequence.draft_state
    running: Literal["prefill", "decode"] = "decode" if sequence.is_decoding else "prefill"
    return OpenRequest(
        record=record_of(sequence),
        state="waiting" if sequence.slot is None else running,
        computed_tokens=sequence.computed_tokens,
        cached=sequence.blocks.cached,
        draft_method=drafts.method if drafts is not None else "",
        drafts_accepted=drafts.accepted if drafts is not None else 0,
        drafts_rejected=drafts.rejected if drafts is not None else 0,
    )
