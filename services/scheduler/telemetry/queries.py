"""Answers to queries about steps and requests. Changes no decision. Pure."""

from typing import Literal

from services.scheduler.events import Action, SendToGateway
from services.scheduler.requests.request_history import record_of
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.telemetry.trace_queries import TraceQueries
from services.scheduler.world.world import World
from shared import limits
from shared.configuration.settings import Config
from shared.identifiers import PeerId
from shared.messages import (
    ActivityReported,
    ExpertsReported,
    HttpRequestsReported,
    OpenRequest,
    OrderTrace,
    ProfilesReported,
    QueryActivity,
    QueryExperts,
    QueryProfiles,
    QueryTrace,
)

Query = (
    QueryProfiles | QueryActivity | QueryExperts | QueryTrace | OrderTrace | HttpRequestsReported
)


class TelemetryQueries:
    """Answers queries from what the parts of the scheduler know."""

    def __init__(
        self,
        config: Config,
        telemetry: Telemetry,
        requests: RequestTable,
        waiting: WaitingQueue,
        world: World,
        gateways: set[PeerId],
        actions: list[Action],
    ) -> None:
        """Begin without queries.

        Args:
            config: names the model and its split.
            telemetry: the history of steps, profiles and events.
            requests: the open requests, with the history of others.
            waiting: those that wait.
            world: the ranks.
            gateways: all connected gateways and commands; the caller adds and removes them.
            actions: receives the answers.
        """
        self._config = config
        self._telemetry = telemetry
        self._requests = requests
        self._waiting = waiting
        self._world = world
        self._actions = actions
        self.traces = TraceQueries(telemetry, requests, world, gateways, actions)

    def handle(self, peer: PeerId, query: Query, now_s: float) -> None:
        """Answer a query, or begin to collect the answer.

        Args:
            peer: the gateway or command that asks.
            query: the query, or what belongs to one.
            now_s: the monotonic time in seconds.
        """
        answer: ProfilesReported | ActivityReported | ExpertsReported
        match query:
            case QueryProfiles():
                answer = self._telemetry.profiles.report(query)
            case QueryActivity():
                answer = self._activity(query, now_s)
            case QueryExperts():
                answer = self._experts()
            case QueryTrace() | OrderTrace() | HttpRequestsReported():
                self.traces.handle(peer, query, now_s)
                return
        self._actions.append(SendToGateway(peer, answer))

    def _experts(self) -> ExpertsReported:
        return ExpertsReported(
            model=self._config.served_name,
            model_fingerprint=self._world.model.fingerprint(),
            sharding=self._config.sharding,
            world_size=self._world.size,
            layers=self._telemetry.experts.report(),
        )

    def _activity(self, query: QueryActivity, now_s: float) -> ActivityReported:
        telemetry = self._telemetry
        waiting = self._waiting.heads(limits.ACTIVITY_REQUESTS_MAX)
        running = [one for one in self._requests if one.slot is not None]
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
