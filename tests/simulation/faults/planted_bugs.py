"""Planted bugs for mutation tests: each breaks one rule of the protocol in the real code."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from services.gateway.completion import open_requests as gateway_requests
from services.gateway.completion.open_requests import OpenRequests
from services.rank_worker.peers.watchdog import Watchdog
from services.rank_worker.scheduler_link import SchedulerLink
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
PLANTED_BUGS: dict[str, Plant] = {}


def planted_bug(function: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    """Register a bug under its function's name."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            function(stack)
            yield

    PLANTED_BUGS[function.__name__] = planted
    return function


def replace(stack: ExitStack, target: object, name: str, value: object) -> None:
    """Replace an attribute of real code until the stack is unwound."""
    stack.enter_context(mock.patch.object(target, name, value))


# --- links ----------------------------------------------------------------------------------------


@planted_bug
def a_session_delivers_duplicates(stack: ExitStack) -> None:
    """A message that is resent is delivered again."""
    real = Session.receive

    def receive(self: Session, frame: Frame, now_s: float) -> bool:
        return real(self, frame, now_s) or (
            frame.kind == MESSAGE and frame.number <= self._received
        )

    replace(stack, Session, "receive", receive)


@planted_bug
def a_session_delivers_past_a_gap(stack: ExitStack) -> None:
    """A message after a lost one is delivered."""
    real = Session.receive

    def receive(self: Session, frame: Frame, now_s: float) -> bool:
        if frame.kind == MESSAGE and frame.number > self._received + 1:
            self._received = frame.number - 1
        return real(self, frame, now_s)

    replace(stack, Session, "receive", receive)


@planted_bug
def an_old_acknowledgement_counts_for_all(stack: ExitStack) -> None:
    """An acknowledgement removes later messages from the resend buffer too."""
    real = Session._drop_acknowledged

    def drop_acknowledged(self: Session, acknowledged: int) -> None:
        real(self, self._next_number - 1)

    replace(stack, Session, "_drop_acknowledged", drop_acknowledged)


@planted_bug
def a_session_begins_under_the_old_incarnation(stack: ExitStack) -> None:
    """A dialler begins a new session with the incarnation of the lost one."""
    real = Dialer._end_session

    def end_session(self: Dialer[Any], cause: str, events: list[Any]) -> None:
        before = self.incarnation
        real(self, cause, events)
        self.incarnation = before

    replace(stack, Dialer, "_end_session", end_session)


@planted_bug
def a_moment_of_silence_loses_a_peer(stack: ExitStack) -> None:
    """A peer is lost after one second of silence."""
    replace(stack, Session, "is_silent", lambda self, now_s: now_s - self.last_received_s > 1.0)


@planted_bug
def a_dead_peer_is_missed_only_by_its_silence(stack: ExitStack) -> None:
    """A closed connection is not noticed."""
    replace(stack, Session, "is_unreachable", lambda self, now_s: False)


# --- ranks ----------------------------------------------------------------------------------------


@planted_bug
def a_rank_takes_plans_of_any_epoch(stack: ExitStack) -> None:
    """The rank's scheduler link does not check a plan's epoch."""
    real = SchedulerLink._handle

    def take(self: SchedulerLink, event: Any) -> None:
        if isinstance(event, Received) and isinstance(event.message, StepPlan):
            self.orders.put(event.message)
        else:
            real(self, event)

    replace(stack, SchedulerLink, "_handle", take)


@planted_bug
def a_rank_outlives_its_scheduler(stack: ExitStack) -> None:
    """The rank's scheduler link does not end the process when the scheduler is lost."""
    real = SchedulerLink._handle

    def take(self: SchedulerLink, event: Any) -> None:
        if hasattr(event, "message") or not hasattr(event, "cause"):
            real(self, event)

    replace(stack, SchedulerLink, "_handle", take)


@planted_bug
def hung_steps_are_not_noticed(stack: ExitStack) -> None:
    """Neither the rank's watchdog nor the scheduler's deadline ends a step that hangs."""
    replace(stack, Watchdog, "check", lambda self: None)
    replace(stack, InFlightSteps, "overdue_reason", lambda self, now_s: None)


# --- epochs ---------------------------------------------------------------------------------------


@planted_bug
def a_receipt_of_an_old_epoch_counts(stack: ExitStack) -> None:
    """A receipt counts for the current epoch; its sender and epoch are ignored."""
    real = StepPipeline.receive

    def receive(self: StepPipeline, peer: Any, receipt: Any, now_s: float) -> Any:
        peers = self._world.peers
        if receipt.rank < len(peers):
            receipt = msgspec.structs.replace(receipt, epoch=self._world.epoch)
            peer = peers[receipt.rank]
        return real(self, peer, receipt, now_s)

    replace(stack, StepPipeline, "receive", receive)


@planted_bug
def one_sequence_is_not_requeued(stack: ExitStack) -> None:
    """The youngest running sequence is dropped when an epoch ends."""
    real = RunningBatch.requeue_running

    def requeue_all(self: RunningBatch) -> None:
        running = self.running
        if running:
            del self._running._by_id[running[-1].sequence_id]
        real(self)

    replace(stack, RunningBatch, "requeue_running", requeue_all)


@planted_bug
def ranks_are_not_told_to_leave(stack: ExitStack) -> None:
    """LeaveWorld is not sent."""
    real = Shell._send_to_ranks

    def send(self: Shell, action: Any) -> None:
        if not isinstance(action.message, LeaveWorld):
            real(self, action)

    replace(stack, Shell, "_send_to_ranks", send)


@planted_bug
def a_lost_rank_does_not_end_the_epoch(stack: ExitStack) -> None:
    """The loss or the failure of a rank does not end the epoch."""
    real = World.handle_process

    def hello(self: World, peer: Any, message: Any, now_s: float) -> None:
        real(self, peer, message, now_s)

    replace(stack, World, "handle_lost", lambda self, peer, cause, now_s: False)
    replace(stack, World, "handle_failed", lambda self, peer, message, now_s: False)
    replace(stack, World, "handle_process", hello)


# --- receipts and tokens --------------------------------------------------------------------------


@planted_bug
def tokens_leave_before_all_receipts(stack: ExitStack) -> None:
    """The first receipt finishes a step."""
    real = InFlightSteps.pop_finished

    def pop_finished(self: InFlightSteps, world_size: int, now_s: float) -> Any:
        has_primary = len(self) and 0 in self._steps[0].receipts
        return real(self, 1 if has_primary else world_size, now_s)

    replace(stack, InFlightSteps, "pop_finished", pop_finished)


@planted_bug
def differing_receipts_are_ignored(stack: ExitStack) -> None:
    """Digests of receipts are not compared."""
    replace(stack, step_pipeline, "find_disagreement", lambda flight, vocabulary: None)


@planted_bug
def tokens_are_sent_twice(stack: ExitStack) -> None:
    """Every tenth position is sent twice."""
    real = StepPipeline._take

    def take(self: StepPipeline, planned: Any, receipt: Any, now_s: float) -> Any:
        messages, ended = real(self, planned, receipt, now_s)
        for message in messages.values():
            for place in [at for at, position in enumerate(message.positions) if position == 9]:
                message.request_ids.append(message.request_ids[place])
                message.positions.append(message.positions[place])
                message.tokens.append(message.tokens[place])
        return messages, ended

    replace(stack, StepPipeline, "_take", take)


@planted_bug
def a_token_is_skipped(stack: ExitStack) -> None:
    """One sampled token is not appended to its sequence."""
    real = step_pipeline.take_tokens

    def take(sequence: Sequence, tokens: list[int]) -> Any:
        return real(sequence, tokens[1:] if sequence.completion_tokens == 7 else tokens)

    replace(stack, step_pipeline, "take_tokens", take)


@planted_bug
def replay_begins_a_token_too_early(stack: ExitStack) -> None:
    """A sequence that returns to the queue loses its last token."""
    real = Sequence.preempt

    def preempt(self: Sequence) -> None:
        if self.completion_tokens:
            self.tokens.pop()
        real(self)

    replace(stack, Sequence, "preempt", preempt)


# --- slots, rows, blocks --------------------------------------------------------------------------


@planted_bug
def a_slot_is_not_given_back(stack: ExitStack) -> None:
    """A finished sequence keeps its slot."""
    replace(stack, Rows, "release_slot", lambda self, slot, sequence_id: None)


@planted_bug
def plans_omit_dropped_sequences(stack: ExitStack) -> None:
    """A plan omits one dropped sequence."""
    real = RunningSequences.take_departed

    def take(self: RunningSequences) -> list[tuple[Sequence, int]]:
        return real(self)[1:]

    replace(stack, RunningSequences, "take_departed", take)


@planted_bug
def the_best_rank_decides_a_restore(stack: ExitStack) -> None:
    """Blocks are adopted that only one rank has restored."""
    replace(
        stack,
        RestoreOrder,
        "count",
        property(lambda self: max(answer.count for answer in self.answers.values())),
    )


@planted_bug
def a_block_in_use_is_evicted(stack: ExitStack) -> None:
    """Eviction ignores references and child blocks."""
    replace(stack, _VictimSearch, "_stays", lambda self, entry: False)


# --- drafts ---------------------------------------------------------------------------------------


@planted_bug
def unread_draft_row_tokens_are_ignored(stack: ExitStack) -> None:
    """Drafts are requested although the draft row has not read all tokens of the sequence's row."""
    replace(stack, speculation_planner, "_unread_tokens", lambda sequence, drafting: 0)


@planted_bug
def a_draft_row_outlives_preemption(stack: ExitStack) -> None:
    """A preempted sequence is assumed to keep its draft row."""
    real = Sequence.preempt

    def preempt(self: Sequence) -> None:
        held = self.draft_row_tokens
        real(self)
        self.draft_row_tokens = held

    replace(stack, Sequence, "preempt", preempt)


# --- gateways -------------------------------------------------------------------------------------


@planted_bug
def a_resumed_request_forgets_its_tokens(stack: ExitStack) -> None:
    """A gateway resubmits a request without its generated tokens."""
    real = OpenRequests._resume

    class Forgetful:
        class structs:  # noqa: N801 - stands for msgspec.structs
            @staticmethod
            def replace(order: SubmitRequest, **fields: Any) -> SubmitRequest:
                return msgspec.structs.replace(order, **{**fields, "generated": []})

    def resume(self: OpenRequests, choice: Any) -> None:
        with mock.patch.object(gateway_requests, "msgspec", Forgetful):
            real(self, choice)

    replace(stack, OpenRequests, "_resume", resume)


@planted_bug
def requests_are_not_resumed(stack: ExitStack) -> None:
    """A gateway does not resubmit requests that the scheduler does not know."""
    replace(stack, OpenRequests, "_resume_all", lambda self: None)


@planted_bug
def requests_of_a_lost_gateway_stay(stack: ExitStack) -> None:
    """The scheduler does not abort the requests of a lost gateway."""
    replace(stack, RequestTable, "of_gateway", lambda self, gateway: [])
