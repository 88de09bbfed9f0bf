"""Step loop of a rank with the real link, tier and model, on plans that arrive at once."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.batch.step_outputs import LaunchedStep, StepResult
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.measurements import StepMeasurements
from services.rank_worker.execution.step_loop import StepLoop
from services.rank_worker.kv_cache.stored import arrays
from services.rank_worker.kv_cache.stored.context import TierSettings
from services.rank_worker.kv_cache.stored.tier import StoredTier
from services.rank_worker.model.sharding import local_experts
from services.rank_worker.peers.watchdog import Watchdog
from services.rank_worker.scheduler_link import SchedulerLink
from shared.clock import SystemClock
from shared.errors import InvariantBroken
from shared.messages import (
    AdmittedSequence,
    AdoptedRestore,
    BlocksRestored,
    BlocksSpilled,
    KeptBlock,
    Message,
    RankHello,
    RestoreBlocks,
    RestoreItem,
    SpillOrder,
    StepFinished,
    StepPlan,
    StepsMeasured,
    ToScheduler,
)
from shared.messages.telemetry.step_times import StepTimes, unpack
from shared.transport.links import Listener, Received
from tests.mlx.executor_driver import admission, make_executor, make_prompt, prefill_chunk
from tests.mlx.models import make_llama
from tests.mlx.sharding.moe_models import make_half_of_experts
from tests.support.orders import join_order, rank_hello
from tests.support.waiting import PROCESS_DEADLINE_S, wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore

BLOCK = 8
PROMPT = make_prompt(4, 20)
HELLO = rank_hello()


class Scheduler:
    """Scheduler end of the link: sends plans and collects messages of the rank."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/ranks.sock"
        self.link: Listener[Any] = Listener(self.address, ToScheduler)
        self.received: list[Message] = []
        self.steps: list[StepLoop] = []
        self.receipts_at_first_step: list[int] = []
        """Number of sent receipts at each call for a first step."""
        self._step_id = 0

    def receive(self) -> None:
        """Receive waiting messages of the rank."""
        for event in self.link.poll(0.01):
            if isinstance(event, Received):
                self.received.append(event.message)

    def wait_for(self, kind: type[Any], count: int) -> list[Any]:
        """Wait for `count` messages of one kind and return them."""

        def found() -> list[Any]:
            self.receive()
            return [one for one in self.received if isinstance(one, kind)]

        wait_until(lambda: len(found()) >= count, 30.0)
        return found()

    def send(self, message: Message) -> None:
        """Send a message to the rank."""
        self.link.send(self.link.peers[0], message, 1)

    def plan(self, **fields: Any) -> None:
        """Send the next plan."""
        self._step_id += 1
        sizes = {"row_count": 1, "row_tokens": 64}
        self.send(StepPlan(epoch=1, step_id=self._step_id, deadline_s=30.0, **{**sizes, **fields}))

    def finished(self) -> list[StepFinished]:
        """Wait until all plans are finished; return the results."""
        return self.wait_for(StepFinished, self._step_id)


@pytest.fixture(params=[True, False], ids=["builds_ahead", "launches_ahead"])
def scheduler(
    request: pytest.FixtureRequest, tmp_path: Path, make_model: Callable[[str], nn.Module]
) -> Iterator[Scheduler]:
    """Return a scheduler with one rank, whose steps run in a thread."""
    with _serving(lambda: make_model("llama"), tmp_path, on_cpu=request.param) as made:
        yield made


@contextlib.contextmanager
def _serving(make: Callable[[], nn.Module], tmp_path: Path, *, on_cpu: bool) -> Iterator[Scheduler]:
    """Run a rank's steps in a thread, for a scheduler in this one."""
    store = ScriptedStore(tmp_path)
    store.start()
    made = Scheduler(tmp_path)
    link = SchedulerLink(made.address, HELLO, end_process=lambda _: None)
    link.start()
    made.wait_for(RankHello, 1)
    order = join_order(step_deadline_max_s=30.0)
    made.send(order)
    assert link.orders.get(timeout=PROCESS_DEADLINE_S) == order
    settings = TierSettings(
        store_address=store.address, epoch=1, rank=0, world_size=1, spill_bytes_max=2**24
    )
    tier = StoredTier(settings, link.send, arrays.allocate)
    tier.start()
    # A spill without a store is reported as lost, and a busy machine connects late.
    wait_until(lambda: tier._store != "away")

    def serve() -> None:
        clock = SystemClock()
        # MLX must create the executor in the thread that computes with it.
        executor = make_executor(
            make(), take_restored=tier.take, profile=ExecutionProfile(has_queue=not on_cpu)
        )
        tier.expect(executor.store.block_bytes, 2**24)
        link.on_restore = tier.restore
        measurements = StepMeasurements(order.epoch, order.rank)
        link.take_measurements = measurements.take
        steps = StepLoop(
            order,
            executor,
            link,
            tier,
            Watchdog(clock),
            clock,
            measurements,
            on_cpu=on_cpu,
            on_first_step=lambda: made.receipts_at_first_step.append(link.step_finished),
        )
        made.steps.append(steps)
        with contextlib.suppress(InvariantBroken):
            steps.run()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield made
    finally:
        link.orders.put(order)  # not a plan: ends the step loop
        thread.join()
        tier.close()
        link.exit(0)
        made.link.close(0.0)
        store.close()


def _hash(number: int) -> bytes:
    return hashlib.blake2b(bytes([number]), digest_size=32).digest()


def _reusing(sequence: AdmittedSequence, blocks: int) -> AdmittedSequence:
    return AdmittedSequence(
        sequence_id=sequence.sequence_id,
        slot=sequence.slot,
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        sampling=sequence.sampling,
        reused_tokens=blocks * BLOCK,
        reused_blocks=[_hash(number) for number in range(blocks)],
    )


def test_step_loop_restores_spilled_blocks_and_keeps_tokens(scheduler: Scheduler) -> None:
    """Plans with spills and restores are finished in order; a restored sequence gets the same
    tokens.
    """
    kept = [
        KeptBlock(sequence_id=1, start=number * BLOCK, length=BLOCK, hash=_hash(number))
        for number in range(2)
    ]
    names = [one.hash for one in kept]
    scheduler.plan(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[prefill_chunk(1, 0, 20, 20)])
    scheduler.plan(decodes=[1])
    scheduler.plan(keep_blocks=kept[:1], decodes=[1])
    scheduler.plan(keep_blocks=kept[1:])
    scheduler.plan(spill=SpillOrder(namespace="0a", hashes=names), decodes=[1])
    scheduler.plan(decodes=[1])
    scheduler.plan(dropped=[1], evict_blocks=names)
    before = scheduler.finished()
    (report,) = scheduler.wait_for(BlocksSpilled, 1)
    assert report.stored == names

    items = [RestoreItem(block=name, length=BLOCK) for name in names]
    scheduler.send(
        RestoreBlocks(epoch=1, restore_id=5, namespace="0a", items=items, deadline_s=30.0)
    )
    (answer,) = scheduler.wait_for(BlocksRestored, 1)
    assert (answer.count, answer.stopped_by) == (2, "")
    scheduler.plan(adopted=[AdoptedRestore(restore_id=5, count=2)])
    scheduler.plan(
        admitted=[_reusing(admission(2, 0, PROMPT), 2)],
        prefill_chunks=[prefill_chunk(2, 16, 20, 20)],
    )
    for _ in range(4):
        scheduler.plan(decodes=[2])
    after = scheduler.finished()[len(before) :]

    assert [one.step_id for one in before + after] == list(range(1, 14))
    assert [one.tokens for one in after if one.tokens] == [
        one.tokens for one in before if one.tokens
    ]


def test_plan_without_forward_leaves_measured_step_time_unchanged(scheduler: Scheduler) -> None:
    """A plan without a forward returns no tokens and leaves the measured time of the last forward
    unchanged.
    """
    scheduler.plan(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[prefill_chunk(1, 0, 20, 20)])
    scheduler.plan(decodes=[1])
    scheduler.plan()
    finished = scheduler.finished()

    assert [len(one.tokens) for one in finished] == [1, 1, 0]
    assert scheduler.steps[0]._busy_s * 1e3 == finished[1].busy_ms


def test_cpu_starts_next_step_before_finishing_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the next plan has arrived, the device is never idle between steps."""
    prepare = Executor.prepare

    def prepared(executor: Executor, plan: StepPlan, *settle: Any) -> LaunchedStep:
        if plan.step_id == 2:
            wait_until(lambda: made.steps[0].link.orders.qsize() == 3, 30.0)
        return prepare(executor, plan, *settle)

    monkeypatch.setattr(Executor, "prepare", prepared)
    with _serving(lambda: make_llama(6), tmp_path, on_cpu=True) as made:
        made.plan(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[prefill_chunk(1, 0, 20, 20)])
        made.finished()
        for _ in range(4):
            made.plan(decodes=[1])
        finished = made.finished()

    assert [len(one.tokens) for one in finished] == [1] * 5
    assert [one.idle_ms for one in finished[2:]] == [0.0] * 3


def test_gpu_sends_result_before_whole_next_step_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU the result of a step is sent after the first half of the next one is started.

    A step that cannot be split is started whole before that result.
    """
    events: list[tuple[str, int]] = []
    prepare, start, finish = Executor.prepare, Executor.start, Executor.finish

    def prepared(executor: Executor, plan: StepPlan, *settle: Any) -> LaunchedStep:
        if plan.step_id == 1:
            wait_until(lambda: made.steps[0].link.orders.qsize() == 6, 30.0)
        return prepare(executor, plan, *settle)

    def started(executor: Executor, launched: LaunchedStep) -> None:
        start(executor, launched)
        events.append(("started", launched.plan.step_id))

    def finished(executor: Executor, launched: LaunchedStep) -> StepResult:
        events.append(("finished", launched.plan.step_id))
        return finish(executor, launched)

    monkeypatch.setattr(Executor, "prepare", prepared)
    monkeypatch.setattr(Executor, "start", started)
    monkeypatch.setattr(Executor, "finish", finished)
    with _serving(lambda: make_llama(6), tmp_path, on_cpu=False) as made:
        made.plan(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[prefill_chunk(1, 0, 20, 20)])
        for _ in range(3):
            made.plan(decodes=[1])
        made.plan(decodes=[1], drafts=[[3]])
        made.plan()
        made.plan()
        answers = made.finished()

    assert [len(one.tokens) for one in answers] == [1, 1, 1, 1, 1, 0, 0]
    whole = [("started", 5), ("finished", 4)]
    parts = [("finished", 1), ("started", 2), ("finished", 2), ("started", 3)]
    assert events[:8] == [("started", 1), *parts, ("finished", 3), ("started", 4), whole[0]]
    assert events[8] == whole[1]


def test_first_step_callback_runs_once_after_first_receipt_is_sent(scheduler: Scheduler) -> None:
    """The callback for the first step runs once, after the receipt of this step is sent."""
    for _ in range(3):
        scheduler.plan()
    scheduler.finished()
    assert scheduler.receipts_at_first_step == [1]


def test_long_prefill_of_divided_experts_starts_after_earlier_results_are_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A long prefill of divided experts starts after all earlier results are sent.

    A short prefill is launched ahead like a decode.
    """
    monkeypatch.setitem(local_experts.WAIT_FLOPS, "cpu", 0.0)
    on_device: list[int] = []
    real = local_experts._on_host

    def counted(number: mx.array) -> int:
        on_device.append(len(made.steps[0]._launched))
        return real(number)

    monkeypatch.setattr(local_experts, "_on_host", counted)
    prepare = Executor.prepare
    ahead: dict[int, int] = {}

    def prepared(executor: Executor, plan: StepPlan, *settle: Any) -> LaunchedStep:
        if plan.step_id == 1:
            wait_until(lambda: made.steps[0].link.orders.qsize() == 8, 30.0)
        ahead[plan.step_id] = len(made.steps[0]._launched)
        return prepare(executor, plan, *settle)

    monkeypatch.setattr(Executor, "prepare", prepared)
    long, short = make_prompt(1, 40), make_prompt(2, 31)
    with _serving(lambda: make_half_of_experts("qwen3_moe"), tmp_path, on_cpu=False) as made:
        made.plan(
            row_count=3,
            admitted=[admission(1, 0, long)],
            prefill_chunks=[prefill_chunk(1, 0, 40, 40)],
        )
        for one, prompt in ((2, long), (3, short)):
            for _ in range(3):
                made.plan(row_count=3, decodes=[1])
            made.plan(
                row_count=3,
                admitted=[admission(one, one - 1, prompt)],
                prefill_chunks=[prefill_chunk(one, 0, len(prompt), len(prompt))],
                decodes=[1],
            )
        finished = made.finished()

    assert [len(one.tokens) for one in finished] == [1, 1, 1, 1, 2, 1, 1, 1, 2]
    assert on_device == [0] * 6, "two long prompts, three layers of experts each"
    assert ahead[5] == 0
    assert max(ahead[3], ahead[4]) == 1, "nothing is launched ahead"
    assert ahead[9] == 1


def test_reported_times_of_steps_agree_with_clock_of_this_test(scheduler: Scheduler) -> None:
    """Each step is reported once. Its times lie between the plan and the receipt, in their order,
    and say the same as the receipt."""
    sent_s, received_s = [], []
    for number in range(20):
        sent_s.append(time.monotonic())
        if number == 0:
            chunk = prefill_chunk(1, 0, 20, 20)
            scheduler.plan(admitted=[admission(1, 0, PROMPT)], prefill_chunks=[chunk])
        else:
            scheduler.plan(decodes=[1])
        if number % 3 == 2:
            receipts = scheduler.finished()
        received_s.append(time.monotonic() if number % 3 == 2 else 0.0)
    receipts = scheduler.finished()

    def steps() -> list[tuple[int, StepTimes]]:
        return [
            (report.first_step_id + number, times)
            for report in scheduler.wait_for(StepsMeasured, 1)
            for number, times in enumerate(unpack(report.times, report.origin_s))
        ]

    wait_until(lambda: len(steps()) == 20, 30.0)
    measured = steps()
    assert [step_id for step_id, _ in measured] == list(range(1, 21))
    for number, (_, times) in enumerate(measured):
        assert sent_s[number] <= times.came_s + 2e-6
        assert times.came_s <= times.built_s <= times.handed_over_s <= times.ended_s
        assert times.began_s <= times.ended_s <= times.reported_s
        if received_s[number]:
            assert times.reported_s <= received_s[number]
        busy_s = receipts[number].busy_ms / 1e3
        assert times.ended_s - times.began_s == pytest.approx(busy_s, abs=4e-6)
    last = scheduler.wait_for(StepsMeasured, 1)[-1]
    assert 0 < last.active_bytes <= last.peak_bytes
