"""Bugs to plant: each breaks one rule of the protocol in the real code, and must be found."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from services.gateway.completion import open_requests as gateway_requests
from services.gateway.completion.open_requests import OpenRequests
from services.rank_worker.scheduler_link import SchedulerLink
from services.rank_worker.watchdog import Watchdog
from services.scheduler import step_pipeline
from services.scheduler.batch import speculation_planner
from services.scheduler.batch.in_flight_steps import InFlightSteps
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.batch.running_sequences import RunningSequences
from services.scheduler.cache.index.eviction import _VictimSearch
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.restore_order import RestoreOrder
from services.scheduler.main import Shell
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.sequence import Sequence
from services.scheduler.step_pipeline import StepPipeline
from services.scheduler.world.world import World
from shared.messages import LeaveWorld, StepPlan, SubmitRequest
from shared.transport.delivery import MESSAGE, Frame, Session
from shared.transport.links import Dialer, Received

Plant = Callable[[], Any]
PLANTS: dict[str, Plant] = {}


def plants(function: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    """Enter a bug under its function's name."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            function(stack)
            yield

    PLANTS[function.__name__] = planted
    return function


def put(stack: ExitStack, target: object, name: str, value: object) -> None:
    """Replace something real until the stack is unwound."""
    stack.enter_context(mock.patch.object(target, name, value))


# --- links ---------------------------------------------------------------------------------------


@plants
def a_session_delivers_duplicates(stack: ExitStack) -> None:
    """What comes again after a resend is delivered again."""
    real = Session.receive

    def receive(self: Session, frame: Frame, now_s: float) -> bool:
        return real(self, frame, now_s) or (
            frame.kind == MESSAGE and frame.number <= self._received
        )

    put(stack, Session, "receive", receive)


@plants
def a_session_delivers_past_a_gap(stack: ExitStack) -> None:
    """What comes after a lost message is delivered as if nothing were missing."""
    real = Session.receive

    def receive(self: Session, frame: Frame, now_s: float) -> bool:
        if frame.kind == MESSAGE and frame.number > self._received + 1:
            self._received = frame.number - 1
        return real(self, frame, now_s)

    put(stack, Session, "receive", receive)


@plants
def an_old_acknowledgement_counts_for_all(stack: ExitStack) -> None:
    """An acknowledgement makes a session forget what was sent after it too."""
    real = Session._forget

    def forget(self: Session, acknowledged: int) -> None:
        real(self, self._next_number - 1)

    put(stack, Session, "_forget", forget)


@plants
def a_session_begins_under_the_old_incarnation(stack: ExitStack) -> None:
    """A dialler whose session was lost begins the next one as if it were the same."""
    real = Dialer._lose

    def lose(self: Dialer[Any], cause: str, events: list[Any]) -> None:
        before = self.incarnation
        real(self, cause, events)
        self.incarnation = before

    put(stack, Dialer, "_lose", lose)


@plants
def a_moment_of_silence_loses_a_peer(stack: ExitStack) -> None:
    """Whoever is not heard for a second is lost: a false alarm."""
    put(stack, Session, "is_silent", lambda self, now_s: now_s - self.last_received_s > 1.0)


@plants
def a_dead_peer_is_missed_only_by_its_silence(stack: ExitStack) -> None:
    """Nobody takes note of a connection that has closed."""
    put(stack, Session, "is_gone", lambda self, now_s: False)


# --- ranks ---------------------------------------------------------------------------------------


@plants
def a_rank_takes_plans_of_any_epoch(stack: ExitStack) -> None:
    """The bus does not look at a plan's epoch."""
    real = SchedulerLink._handle

    def take(self: SchedulerLink, event: Any) -> None:
        if isinstance(event, Received) and isinstance(event.message, StepPlan):
            self.orders.put(event.message)
        else:
            real(self, event)

    put(stack, SchedulerLink, "_handle", take)


@plants
def a_rank_outlives_its_scheduler(stack: ExitStack) -> None:
    """The bus does not end the process when the scheduler is lost."""
    real = SchedulerLink._handle

    def take(self: SchedulerLink, event: Any) -> None:
        if hasattr(event, "message") or not hasattr(event, "cause"):
            real(self, event)

    put(stack, SchedulerLink, "_handle", take)


@plants
def nobody_watches_steps(stack: ExitStack) -> None:
    """Neither the rank's watchdog nor the scheduler's deadline ends a step that hangs."""
    put(stack, Watchdog, "check", lambda self: None)
    put(stack, InFlightSteps, "overdue_reason", lambda self, now_s: None)


# --- epochs --------------------------------------------------------------------------------------


@plants
def a_receipt_of_an_old_epoch_counts(stack: ExitStack) -> None:
    """A receipt counts for the present epoch, whoever it is from."""
    real = StepPipeline.receive

    def receive(self: StepPipeline, peer: Any, receipt: Any, now_s: float) -> Any:
        peers = self._world.peers
        if receipt.rank < len(peers):
            receipt = msgspec.structs.replace(receipt, epoch=self._world.epoch)
            peer = peers[receipt.rank]
        return real(self, peer, receipt, now_s)

    put(stack, StepPipeline, "receive", receive)


@plants
def one_sequence_is_not_requeued(stack: ExitStack) -> None:
    """At the end of an epoch the youngest running sequence is forgotten."""
    real = RunningBatch.requeue_running

    def requeue_all(self: RunningBatch) -> None:
        running = self.running
        if running:
            del self._running._by_id[running[-1].sequence_id]
        real(self)

    put(stack, RunningBatch, "requeue_running", requeue_all)


@plants
def ranks_are_not_told_to_leave(stack: ExitStack) -> None:
    """LeaveWorld is not sent."""
    real = Shell._send_to_ranks

    def send(self: Shell, action: Any) -> None:
        if not isinstance(action.message, LeaveWorld):
            real(self, action)

    put(stack, Shell, "_send_to_ranks", send)


@plants
def a_lost_rank_does_not_end_the_epoch(stack: ExitStack) -> None:
    """Nobody takes note of a lost rank, or of the one that takes its place."""
    real = World.handle_hello

    def hello(self: World, peer: Any, message: Any, now_s: float) -> None:
        real(self, peer, message, now_s)

    put(stack, World, "handle_lost", lambda self, peer, cause, now_s: False)
    put(stack, World, "handle_failed", lambda self, peer, message, now_s: False)
    put(stack, World, "handle_hello", hello)


# --- receipts and tokens -------------------------------------------------------------------------


@plants
def tokens_leave_before_all_receipts(stack: ExitStack) -> None:
    """The first receipt finishes a step."""
    real = InFlightSteps.pop_finished

    def pop_finished(self: InFlightSteps, world_size: int, now_s: float) -> Any:
        has_primary = len(self) and 0 in self._steps[0].receipts
        return real(self, 1 if has_primary else world_size, now_s)

    put(stack, InFlightSteps, "pop_finished", pop_finished)


@plants
def differing_receipts_are_ignored(stack: ExitStack) -> None:
    """Nobody compares digests."""
    put(stack, step_pipeline, "find_disagreement", lambda flight, vocabulary: None)


@plants
def tokens_are_sent_twice(stack: ExitStack) -> None:
    """Every tenth position is told twice."""
    real = step_pipeline.tokens_message

    def message(entries: list[Any]) -> Any:
        again = [entry for entry in entries if entry[1] == 9]
        return real(entries + again)

    put(stack, step_pipeline, "tokens_message", message)


@plants
def a_token_is_skipped(stack: ExitStack) -> None:
    """A token that was sampled is lost on its way into the sequence."""
    real = step_pipeline.take_tokens

    def take(sequence: Sequence, tokens: list[int]) -> Any:
        return real(sequence, tokens[1:] if sequence.completion_tokens == 7 else tokens)

    put(stack, step_pipeline, "take_tokens", take)


@plants
def replay_begins_a_token_too_early(stack: ExitStack) -> None:
    """A sequence that goes back to the queue forgets its last token."""
    real = Sequence.preempt

    def preempt(self: Sequence) -> None:
        if self.completion_tokens:
            self.tokens.pop()
        real(self)

    put(stack, Sequence, "preempt", preempt)


# --- slots, rows, blocks -------------------------------------------------------------------------


@plants
def a_slot_is_not_given_back(stack: ExitStack) -> None:
    """Whoever leaves keeps the slot."""
    put(stack, Rows, "release_slot", lambda self, slot, sequence_id: None)


@plants
def ranks_are_not_told_who_left(stack: ExitStack) -> None:
    """A plan does not say whom it drops."""
    real = RunningSequences.take_dropped

    def take(self: RunningSequences) -> list[int]:
        return real(self)[1:]

    put(stack, RunningSequences, "take_dropped", take)


@plants
def the_best_rank_decides_a_restore(stack: ExitStack) -> None:
    """Adopted is what some rank has read, not what all have."""
    put(
        stack,
        RestoreOrder,
        "count",
        property(lambda self: max(answer.count for answer in self.answers.values())),
    )


@plants
def a_block_in_use_is_evicted(stack: ExitStack) -> None:
    """Eviction does not look at who holds a block, nor at what follows it."""
    put(stack, _VictimSearch, "_stays", lambda self, entry: False)


# --- drafts --------------------------------------------------------------------------------------


@plants
def a_draft_row_lacks_nothing(stack: ExitStack) -> None:
    """Drafts are asked for although the draft row has not read what the sequence's row holds."""
    put(stack, speculation_planner, "_unread_tokens", lambda sequence, drafting: 0)


@plants
def a_draft_row_outlives_preemption(stack: ExitStack) -> None:
    """Who comes back is thought to have the draft row that it had."""
    real = Sequence.preempt

    def preempt(self: Sequence) -> None:
        held = self.draft_row_tokens
        real(self)
        self.draft_row_tokens = held

    put(stack, Sequence, "preempt", preempt)


# --- gateways ------------------------------------------------------------------------------------


@plants
def a_resumed_request_forgets_its_tokens(stack: ExitStack) -> None:
    """A gateway offers a request again without what was generated."""
    real = OpenRequests._resume

    class Forgetful:
        class structs:  # noqa: N801 - stands for msgspec.structs
            @staticmethod
            def replace(order: SubmitRequest, **fields: Any) -> SubmitRequest:
                return msgspec.structs.replace(order, **{**fields, "generated": []})

    def resume(self: OpenRequests, choice: Any) -> None:
        with mock.patch.object(gateway_requests, "msgspec", Forgetful):
            real(self, choice)

    put(stack, OpenRequests, "_resume", resume)


@plants
def requests_are_not_resumed(stack: ExitStack) -> None:
    """A gateway waits for a scheduler that does not know its requests."""
    put(stack, OpenRequests, "_resume_all", lambda self: None)


@plants
def requests_of_a_lost_gateway_stay(stack: ExitStack) -> None:
    """The scheduler goes on computing for nobody."""
    put(stack, RequestTable, "of_gateway", lambda self, gateway: [])
