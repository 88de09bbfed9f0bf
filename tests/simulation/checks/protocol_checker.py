"""Checks of every message of one scheduler process (I2, I6, I7): a request is accepted, gets its
tokens in order, and ends once."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    Event,
    GatewayLost,
    GatewayMessageReceived,
    RankMessageReceived,
    SendToGateway,
    SendToRanks,
    WriteLog,
)
from shared.identifiers import PeerId
from shared.messages import (
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    StepFinished,
    StepPlan,
    SubmitRequest,
    TokensGenerated,
)
from tests.simulation.checks import core_inspection
from tests.simulation.environment.event_heap import Violation

ExpectedTokens = Callable[[str], Sequence[int]]
"""The tokens that an undisturbed run generates for a request id."""


@dataclasses.dataclass
class _OpenRequest:
    """One accepted request."""

    tokens: int
    """Number of completion tokens that its gateway has."""
    is_admitted: bool = False


class ProtocolChecker:
    """Open requests, plans and receipts of one scheduler process."""

    def __init__(self, expected: ExpectedTokens) -> None:
        self.ended_epochs: list[str] = []
        """Causes of the epochs that have ended."""
        self.has_failed = False
        """Too many epochs have failed, so no further epoch begins."""
        self.released = 0
        """Number of tokens sent."""
        self._expected = expected
        self._open: dict[tuple[PeerId, str], _OpenRequest] = {}
        self._submitted: dict[tuple[PeerId, str], SubmitRequest] = {}
        self._plans: defaultdict[PeerId, tuple[int, int]] = defaultdict(lambda: (0, 0))
        """Last ordered (epoch, step) by rank process."""
        self._receipts: defaultdict[tuple[int, int], dict[PeerId, bytes]] = defaultdict(dict)
        self._members: dict[int, tuple[PeerId, ...]] = {}
        self._epoch = 0
        """The epoch before the event."""
        self._stale = 0.0
        """Number of receipts that the core has counted as stale."""

    def check_event(
        self, event: Event, actions: list[Action], core: SchedulerCore, finished: int
    ) -> None:
        """Check one event and its actions.

        Args:
            event: the event that the core has handled.
            actions: the core's actions.
            core: the core after the event.
            finished: the last finished step before the event.

        Raises:
            Violation: an action breaks a promise.
        """
        if isinstance(event, GatewayMessageReceived) and isinstance(event.message, SubmitRequest):
            self._submitted[event.gateway, event.message.request_id] = event.message
        elif isinstance(event, RankMessageReceived) and isinstance(event.message, StepFinished):
            self._record_receipt(event.peer, event.message, core)
        self._epoch = core_inspection.epoch(core)
        for action in actions:
            match action:
                case SendToRanks(message=StepPlan() as plan):
                    self._check_plan(action.peers, plan)
                case SendToGateway(message=TokensGenerated() as tokens):
                    self._check_receipts(event, core, finished)
                    self._check_tokens(action.gateway, tokens)
                case WriteLog(event="epoch_ended", fields=fields):
                    self.ended_epochs.append(str(fields["cause"]))
                case SendToGateway():
                    self._check_request_message(action.gateway, action.message)
        self.has_failed = self.has_failed or core_inspection.has_failed(core)
        if isinstance(event, GatewayLost):
            self._check_gateway_loss(event.gateway, core)

    def _check_gateway_loss(self, gateway: PeerId, core: SchedulerCore) -> None:
        """Check that all requests of a lost gateway have ended."""
        left = core_inspection.open_requests(core, gateway)
        if left:
            raise Violation(f"requests of a lost gateway stay open: {left}")
        for name in self.open_requests(gateway):
            del self._open[gateway, name]

    def open_requests(self, gateway: bytes) -> list[str]:
        """Return the requests of one gateway that have not ended."""
        return [name for peer, name in self._open if peer == gateway]

    def _record_receipt(self, peer: PeerId, receipt: StepFinished, core: SchedulerCore) -> None:
        if receipt.epoch == self._epoch and peer in self._members.get(receipt.epoch, ()):
            self._receipts[receipt.epoch, receipt.step_id].setdefault(peer, receipt.digest)
        elif core_inspection.stale_receipts(core) <= self._stale:
            raise Violation(f"a receipt of epoch {receipt.epoch} counts in epoch {self._epoch}")
        self._stale = core_inspection.stale_receipts(core)

    def _check_plan(self, peers: tuple[PeerId, ...], plan: StepPlan) -> None:
        known = self._members.setdefault(plan.epoch, peers)
        if known != peers:
            raise Violation(f"the ranks of epoch {plan.epoch} change: {known}, {peers}")
        for peer in peers:
            epoch, step = self._plans[peer]
            expected = (plan.epoch, step + 1 if epoch == plan.epoch else 1)
            if (plan.epoch, plan.step_id) != expected or epoch not in (0, plan.epoch):
                raise Violation(f"I2: plan {plan.epoch}.{plan.step_id} after {epoch}.{step}")
            self._plans[peer] = plan.epoch, plan.step_id

    def _check_receipts(self, event: Event, core: SchedulerCore, finished: int) -> None:
        """Check that tokens are sent only after all ranks have sent equal receipts for their step
        (I6)."""
        if not isinstance(event, RankMessageReceived) or not isinstance(
            event.message, StepFinished
        ):
            raise Violation(f"I6: tokens are sent at a {type(event).__name__}")
        epoch = core_inspection.epoch(core)
        last = core_inspection.last_finished_step(core)
        if event.message.epoch != epoch or last <= finished:
            raise Violation(f"I6: tokens are sent at a receipt of epoch {event.message.epoch}")
        for step in range(finished + 1, last + 1):
            receipts = self._receipts[epoch, step]
            missing = [peer for peer in self._members[epoch] if peer not in receipts]
            if missing or len(set(receipts.values())) != 1:
                raise Violation(f"I6: tokens of step {epoch}.{step} are sent, receipts: {receipts}")

    def _check_tokens(self, gateway: PeerId, message: TokensGenerated) -> None:
        for name, position, tokens in zip(
            message.request_ids, message.positions, message.tokens, strict=True
        ):
            request = self._open.get((gateway, name))
            if request is None:
                raise Violation(f"I7: tokens of {name}, which is not open")
            if position != request.tokens:
                raise Violation(f"I7: {name} continues at {position}, not at {request.tokens}")
            request.tokens += len(tokens)
            self.released += len(tokens)
            expected = self._expected(name)[position : request.tokens]
            if list(expected) != tokens:
                raise Violation(f"{name} gets {tokens} at {position}, not {expected}")

    def _check_request_message(self, gateway: PeerId, message: object) -> None:
        match message:
            case RequestAccepted(request_id=name):
                if (gateway, name) in self._open:
                    raise Violation(f"I7: {name} is accepted twice")
                submitted = self._submitted[gateway, name]
                self._open[gateway, name] = _OpenRequest(submitted.generated_tokens)
            case RequestAdmitted(request_id=name):
                request = self._open.get((gateway, name))
                if request is None or request.is_admitted:
                    raise Violation(f"I7: {name} is admitted but was not accepted")
                request.is_admitted = True
            case RequestRejected(request_id=name):
                if (gateway, name) in self._open:
                    raise Violation(f"I7: {name} is rejected after it was accepted")
            case RequestFinished(request_id=name) | RequestFailed(request_id=name):
                request = self._open.pop((gateway, name), None)
                if request is None:
                    raise Violation(f"I7: {name} ends but is not open")
                if isinstance(message, RequestFinished):
                    self._check_end(message, request)

    def _check_end(self, message: RequestFinished, request: _OpenRequest) -> None:
        if message.completion_tokens != request.tokens:
            raise Violation(
                f"{message.request_id} ends with {message.completion_tokens} tokens, "
                f"{request.tokens} were sent"
            )
        expected = len(self._expected(message.request_id))
        if message.finish_reason in ("stop", "length") and request.tokens > expected:
            raise Violation(f"{message.request_id} has {request.tokens} tokens of {expected}")
