"""What must hold of everything the scheduler says, entered word by word (I2, I6, I7).

One ledger covers one life of the scheduler: its word for a request is accepted, tokens, one end.
"""

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

Expected = Callable[[str], Sequence[int]]
"""The tokens that an undisturbed run generates for a request id."""


@dataclasses.dataclass
class _Account:
    """One accepted request."""

    tokens: int
    """So many of its completion are known to its gateway."""
    is_admitted: bool = False


class Ledger:
    """Every open request, plan and receipt of one life of the scheduler."""

    def __init__(self, expected: Expected) -> None:
        self.ended_epochs: list[str] = []
        """The causes."""
        self.has_given_up = False
        """Too many epochs have failed: nothing is tried any more."""
        self.released = 0
        """Tokens that left."""
        self._expected = expected
        self._open: dict[tuple[PeerId, str], _Account] = {}
        self._submitted: dict[tuple[PeerId, str], SubmitRequest] = {}
        self._plans: defaultdict[PeerId, tuple[int, int]] = defaultdict(lambda: (0, 0))
        """(epoch, step) that was ordered last, by rank process."""
        self._receipts: defaultdict[tuple[int, int], dict[PeerId, bytes]] = defaultdict(dict)
        self._members: dict[int, tuple[PeerId, ...]] = {}
        self._epoch = 0
        """As it was before the event."""
        self._stale = 0.0
        """Receipts that the core has counted as stale."""

    def enter(
        self, event: Event, actions: list[Action], core: SchedulerCore, finished: int
    ) -> None:
        """Enter one event and what came of it; raise Violation when a promise is broken.

        Args:
            event: what the core was told.
            actions: what it orders.
            core: the core, after it.
            finished: the last finished step before it.
        """
        if isinstance(event, GatewayMessageReceived) and isinstance(event.message, SubmitRequest):
            self._submitted[event.gateway, event.message.request_id] = event.message
        elif isinstance(event, RankMessageReceived) and isinstance(event.message, StepFinished):
            self._enter_receipt(event.peer, event.message, core)
        self._epoch = core_inspection.epoch(core)
        for action in actions:
            match action:
                case SendToRanks(message=StepPlan() as plan):
                    self._enter_plan(action.peers, plan)
                case SendToGateway(message=TokensGenerated() as tokens):
                    self._check_receipts(event, core, finished)
                    self._enter_tokens(action.gateway, tokens)
                case WriteLog(event="epoch_ended", fields=fields):
                    self.ended_epochs.append(str(fields["cause"]))
                case SendToGateway():
                    self._enter_word(action.gateway, action.message)
        self.has_given_up = self.has_given_up or core_inspection.has_given_up(core)
        if isinstance(event, GatewayLost):
            self._enter_loss(event.gateway, core)

    def _enter_loss(self, gateway: PeerId, core: SchedulerCore) -> None:
        """Whatever a gateway owned that is lost has ended, whether anybody is told or not."""
        left = core_inspection.requests_of(core, gateway)
        if left:
            raise Violation(f"requests of a lost gateway stay open: {left}")
        for name in self.open_requests(gateway):
            del self._open[gateway, name]

    def open_requests(self, gateway: bytes) -> list[str]:
        """Return the requests of one gateway that have not ended."""
        return [name for peer, name in self._open if peer == gateway]

    def _enter_receipt(self, peer: PeerId, receipt: StepFinished, core: SchedulerCore) -> None:
        if receipt.epoch == self._epoch and peer in self._members.get(receipt.epoch, ()):
            self._receipts[receipt.epoch, receipt.step_id].setdefault(peer, receipt.digest)
        elif core_inspection.stale_receipts(core) <= self._stale:
            raise Violation(f"a receipt of epoch {receipt.epoch} counts in epoch {self._epoch}")
        self._stale = core_inspection.stale_receipts(core)

    def _enter_plan(self, peers: tuple[PeerId, ...], plan: StepPlan) -> None:
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
        """Tokens leave only when the receipts of all ranks for their step are there and agree."""
        if not isinstance(event, RankMessageReceived) or not isinstance(
            event.message, StepFinished
        ):
            raise Violation(f"I6: tokens leave at a {type(event).__name__}")
        epoch = core_inspection.epoch(core)
        last = core_inspection.finished_steps(core)
        if event.message.epoch != epoch or last <= finished:
            raise Violation(f"I6: tokens leave at a receipt of epoch {event.message.epoch}")
        for step in range(finished + 1, last + 1):
            receipts = self._receipts[epoch, step]
            missing = [peer for peer in self._members[epoch] if peer not in receipts]
            if missing or len(set(receipts.values())) != 1:
                raise Violation(f"I6: tokens of step {epoch}.{step} leave, receipts: {receipts}")

    def _enter_tokens(self, gateway: PeerId, message: TokensGenerated) -> None:
        for name, position, tokens in zip(
            message.request_ids, message.positions, message.tokens, strict=True
        ):
            account = self._open.get((gateway, name))
            if account is None:
                raise Violation(f"I7: tokens of {name}, which is not open")
            if position != account.tokens:
                raise Violation(f"I7: {name} goes on at {position}, not at {account.tokens}")
            account.tokens += len(tokens)
            self.released += len(tokens)
            expected = self._expected(name)[position : account.tokens]
            if list(expected) != tokens:
                raise Violation(f"{name} gets {tokens} at {position}, not {expected}")

    def _enter_word(self, gateway: PeerId, message: object) -> None:
        match message:
            case RequestAccepted(request_id=name):
                if (gateway, name) in self._open:
                    raise Violation(f"I7: {name} is accepted twice")
                submitted = self._submitted[gateway, name]
                self._open[gateway, name] = _Account(len(submitted.generated))
            case RequestAdmitted(request_id=name):
                account = self._open.get((gateway, name))
                if account is None or account.is_admitted:
                    raise Violation(f"I7: {name} is admitted without having been accepted")
                account.is_admitted = True
            case RequestRejected(request_id=name):
                if (gateway, name) in self._open:
                    raise Violation(f"I7: {name} is rejected after it was accepted")
            case RequestFinished(request_id=name) | RequestFailed(request_id=name):
                account = self._open.pop((gateway, name), None)
                if account is None:
                    raise Violation(f"I7: {name} ends, and is not open")
                if isinstance(message, RequestFinished):
                    self._check_end(message, account)

    def _check_end(self, message: RequestFinished, account: _Account) -> None:
        if message.completion_tokens != account.tokens:
            raise Violation(
                f"{message.request_id} ends with {message.completion_tokens} tokens, "
                f"{account.tokens} were sent"
            )
        expected = len(self._expected(message.request_id))
        if message.finish_reason in ("stop", "length") and account.tokens > expected:
            raise Violation(f"{message.request_id} has {account.tokens} tokens of {expected}")
