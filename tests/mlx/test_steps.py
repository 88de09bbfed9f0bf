"""The main thread of a rank with the real bus, tier and model, on plans that arrive all at once."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx import nn

from services.rank_worker.bus import Bus
from services.rank_worker.steps import Steps
from services.rank_worker.stored import StoredTier, TierSettings, arrays
from services.rank_worker.watchdog import Watchdog
from shared.clock import SystemClock
from shared.errors import InvariantBroken
from shared.messages import (
    AdmittedSequence,
    AdoptedRestore,
    BlocksRestored,
    BlocksSpilled,
    JoinWorld,
    KeptBlock,
    Message,
    RankHello,
    RestoreBlocks,
    RestoreItem,
    SpillOrder,
    StepFinished,
    StepPlan,
    ToScheduler,
)
from shared.transport import Listener, Received
from tests.mlx.driver import admit, chunk, executor_of, make_prompt
from tests.unit.rank_worker.scripted_store import ScriptedStore, until

BLOCK = 8
PROMPT = make_prompt(4, 20)
HELLO = RankHello(
    rank=0,
    host="h",
    pid=1,
    data_address="",
    launched=False,
    device="cpu",
    mlx_version="0",
    memory_bytes=1,
)


class Scheduler:
    """The other end: sends plans, and collects what the rank says."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/ranks.sock"
        self.link: Listener[Any] = Listener(self.address, ToScheduler)
        self.heard: list[Message] = []
        self.steps: list[Steps] = []
        self.firsts: list[int] = []
        """How many receipts were out whenever a first step was told."""
        self._step_id = 0

    def hear(self) -> None:
        """Take in what the rank has said."""
        for event in self.link.poll(0.01):
            if isinstance(event, Received):
                self.heard.append(event.message)

    def wait(self, kind: type[Any], count: int) -> list[Any]:
        """Wait for so many messages of one kind and return them."""

        def found() -> list[Any]:
            self.hear()
            return [one for one in self.heard if isinstance(one, kind)]

        until(lambda: len(found()) >= count, 30.0)
        return found()

    def say(self, message: Message) -> None:
        """Send to the rank."""
        self.link.send(self.link.peers[0], message, 1)

    def plan(self, **fields: Any) -> None:
        """Send the next plan."""
        self._step_id += 1
        self.say(
            StepPlan(
                epoch=1,
                step_id=self._step_id,
                deadline_s=30.0,
                row_count=1,
                row_tokens=64,
                **fields,
            )
        )

    def finished(self) -> list[StepFinished]:
        """Wait until all plans are answered; return the answers."""
        return self.wait(StepFinished, self._step_id)


@pytest.fixture(params=[True, False], ids=["builds_ahead", "launches_ahead"])
def scheduler(
    request: pytest.FixtureRequest, tmp_path: Path, make_model: Callable[[str], nn.Module]
) -> Iterator[Scheduler]:
    """A scheduler with one rank of epoch 1, whose steps run in a thread."""
    store = ScriptedStore(tmp_path)
    store.start()
    made = Scheduler(tmp_path)
    bus = Bus(made.address, HELLO, end_process=lambda _: None)
    bus.start()
    made.wait(RankHello, 1)
    order = JoinWorld(
        epoch=1,
        rank=0,
        world_size=1,
        backend="off",
        environment={},
        files={},
        synchronization="broadcast",
        receipt_logits=True,
        init_deadline_s=1.0,
        load_deadline_s=1.0,
        step_deadline_max_s=30.0,
    )
    made.say(order)
    assert bus.orders.get(timeout=5.0) == order
    settings = TierSettings(
        store_address=store.address, epoch=1, rank=0, world_size=1, spill_bytes_max=2**24
    )
    tier = StoredTier(settings, bus.say, arrays.allocate)
    tier.start()
    model = make_model("llama")

    def serve() -> None:
        clock = SystemClock()
        executor = executor_of(model, take_restored=tier.take)
        tier.expect(executor.block_payload_bytes, 2**24)
        bus.restore = tier.restore
        steps = Steps(
            order,
            executor,
            bus,
            tier,
            Watchdog(clock),
            clock,
            on_cpu=request.param,
            first_done=lambda: made.firsts.append(bus.step_finished),
        )
        made.steps.append(steps)
        with contextlib.suppress(InvariantBroken):
            steps.run()

    thread = threading.Thread(target=serve)
    thread.start()
    yield made
    bus.orders.put(order)  # no plan, which ends the steps
    thread.join()
    tier.close()
    bus.end(0)
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


def test_blocks_go_to_disk_and_come_back_between_steps(scheduler: Scheduler) -> None:
    """Plans with and without forwards, all sent at once: answered in order, with the same tokens
    after a restore as before.
    """
    kept = [
        KeptBlock(sequence_id=1, start=number * BLOCK, length=BLOCK, hash=_hash(number))
        for number in range(2)
    ]
    names = [one.hash for one in kept]
    scheduler.plan(admitted=[admit(1, 0, PROMPT)], prefill_chunks=[chunk(1, 0, 20, 20)])
    scheduler.plan(decodes=[1])
    scheduler.plan(keep_blocks=kept[:1], decodes=[1])
    scheduler.plan(keep_blocks=kept[1:])
    scheduler.plan(spill=SpillOrder(namespace="0a", hashes=names), decodes=[1])
    scheduler.plan(decodes=[1])
    scheduler.plan(dropped=[1], evict_blocks=names)
    before = scheduler.finished()
    (report,) = scheduler.wait(BlocksSpilled, 1)
    assert report.stored == names

    items = [RestoreItem(block=name, length=BLOCK) for name in names]
    scheduler.say(
        RestoreBlocks(epoch=1, restore_id=5, namespace="0a", items=items, deadline_s=30.0)
    )
    (answer,) = scheduler.wait(BlocksRestored, 1)
    assert (answer.count, answer.stopped_by) == (2, "")
    scheduler.plan(adopted=[AdoptedRestore(restore_id=5, count=2)])
    scheduler.plan(
        admitted=[_reusing(admit(2, 0, PROMPT), 2)], prefill_chunks=[chunk(2, 16, 20, 20)]
    )
    for _ in range(4):
        scheduler.plan(decodes=[2])
    after = scheduler.finished()[len(before) :]

    assert [one.step_id for one in before + after] == list(range(1, 14))
    assert [one.tokens for one in after if one.tokens] == [
        one.tokens for one in before if one.tokens
    ]


def test_a_plan_without_a_forward_teaches_nothing(scheduler: Scheduler) -> None:
    """It is answered without tokens; how long the main thread waits for a plan that could be
    launched ahead still follows from the step before it, which computed something.
    """
    scheduler.plan(admitted=[admit(1, 0, PROMPT)], prefill_chunks=[chunk(1, 0, 20, 20)])
    scheduler.plan(decodes=[1])
    scheduler.plan()
    finished = scheduler.finished()

    assert [len(one.tokens) for one in finished] == [1, 1, 0]
    assert scheduler.steps[0]._busy_s * 1e3 == finished[1].busy_ms


def test_the_first_step_is_told_once(scheduler: Scheduler) -> None:
    """Whoever waits for a world that serves hears of its first step, after its receipt."""
    for _ in range(3):
        scheduler.plan()
    scheduler.finished()
    assert scheduler.firsts == [1]
