"""A rank worker as a simulated process: the real link and watchdog around a reference rank."""

import dataclasses
import queue

import msgspec

from services.rank_worker.scheduler_link import SchedulerLink
from services.rank_worker.watchdog import CHECK_EVERY_S, Watchdog
from shared import limits
from shared.configuration.settings import Config
from shared.messages import (
    JoinWorld,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    StepFinished,
    StepPlan,
)
from tests.simulation.environment.collectives import Group
from tests.simulation.environment.disk import Disk, DiskTraffic
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import Wire
from tests.simulation.processes.process import Process
from tests.unit.scheduler.reference_rank import (
    BYTES_PER_TOKEN,
    DRAFT_BYTES_PER_TOKEN,
    VOCABULARY,
    ReferenceRank,
    Terms,
)

HOST = "host"


@dataclasses.dataclass
class Worlds:
    """What rank processes share: memory of one size, groups, disks."""

    config: Config
    terms: Terms
    context: int
    groups: dict[str, Group]
    disks: dict[int, Disk]
    load_s: float
    step_s: float
    """What a step takes at least."""
    divergences: int = 0
    """Wrong receipts that were sent."""

    def group(self, order: JoinWorld, pid: int, heap: Heap) -> Group:
        """Return the group of everybody who was told the same addresses."""
        key = order.files.get("MLX_HOSTFILE") or order.environment.get("MLX_HOSTFILE") or str(pid)
        if key not in self.groups:
            self.groups[key] = Group(key, order.world_size, heap)
        return self.groups[key]


class RankProcess(Process):
    """One life of a rank worker."""

    def __init__(
        self, name: str, heap: Heap, wire: Wire, worlds: Worlds, rank: int, pid: int
    ) -> None:
        super().__init__(name, heap, wire)
        self.pid = pid
        self.tampers = 0
        """So many of the next receipts are wrong."""
        self.is_wedged = False
        """Alive and heard, but no step ends any more."""
        self.steps = 0
        self.reference: ReferenceRank | None = None
        self.epoch = 0
        self.last_receipt: StepFinished | None = None
        self._worlds = worlds
        self._started_as = rank
        hello = RankHello(
            rank=rank,
            host=HOST,
            pid=pid,
            data_address=f"127.0.0.1:{10_000 + pid}",
            launched=False,
            device="cpu",
            mlx_version="0",
            memory_bytes=1,
        )
        with self.opens():
            self.link = SchedulerLink(worlds.config.rank_address, hello, heap, self.exit)
        self._watchdog = Watchdog(heap, self.exit)
        self._chance = heap.chance(f"steps of {name}")
        self._group: Group | None = None
        self._order: JoinWorld | None = None
        self.is_busy = False
        self._traffic: DiskTraffic | None = None
        self.wake()

    # --- the scheduler link's thread and the watchdog's
    # -----------------------------------

    def turn(self) -> None:
        """Let the scheduler link have a turn, then the main thread what it waits for."""
        if self.link.turn() and not self.is_busy:
            self._take_order()

    def due_in_s(self) -> float:
        """Return when the scheduler link has something to do."""
        return self.link.due_in_s()

    def _watch(self) -> None:
        self._watchdog.check()
        self.later(CHECK_EVERY_S, self._watch)

    # --- the main thread ------------------------------------------------------------------------

    def _take_order(self) -> None:
        try:
            order = self.link.orders.get_nowait()
        except queue.Empty:
            return
        self.is_busy = True
        if isinstance(order, StepPlan):
            self._launch(order)
        else:
            self._join(order)

    def _join(self, order: JoinWorld) -> None:
        self._order = order
        self.epoch = order.epoch
        self._group = self._worlds.group(order, self.pid, self.heap)
        self.link.send(RankLoading(stage="joining", loaded=0.0))
        if self.is_wedged:
            self.later(order.init_deadline_s, self._hard_deadline, 0)
            return
        self.later(order.init_deadline_s, self._hard_deadline, 1)
        self._group.enter(0, order.rank, self, 0.01, self._load, self._fail)

    def _load(self) -> None:
        assert self._order is not None
        self.steps = 1
        self.link.send(RankLoading(stage="loading", loaded=0.5))
        self.later(self._worlds.load_s * (0.5 + self._chance.random()), self._ready)

    def _ready(self) -> None:
        order = self._order
        assert order is not None
        if self.is_wedged:
            self.later(order.load_deadline_s, self.exit, 1)
            return
        worlds = self._worlds
        disk = worlds.disks[order.rank]
        self.reference = ReferenceRank(
            self.name.encode(), order.rank, order.epoch, worlds.terms, disk.blocks
        )
        self._traffic = DiskTraffic(self, self.reference, disk, self.link.send)
        self.link.on_restore = self._traffic.restore
        self.link.send(
            RankReady(
                rank=order.rank,
                model_fingerprint="f",
                kv_bytes_per_token=BYTES_PER_TOKEN,
                kv_bytes_per_row=0,
                kv_budget_bytes=worlds.terms.budget_bytes,
                context_tokens_max=worlds.context,
                vocab_size=VOCABULARY,
                can_roll_back=True,
                kv_layout="layout",
                draft_method=worlds.config.speculation.method,
                draft_bytes_per_token=DRAFT_BYTES_PER_TOKEN if worlds.terms.drafts else 0,
                blas="",
            )
        )
        self._watch()
        self._rest()

    def _hard_deadline(self, steps: int) -> None:
        if self.steps < steps or (steps == 0 and self.is_wedged):
            self.exit(1)

    def _launch(self, plan: StepPlan) -> None:
        order = self._order
        assert order is not None
        assert self._group is not None
        self._watchdog.start_step(plan.step_id, plan.deadline_s)
        self.link.step_started = plan.step_id
        if self.is_wedged:
            return
        tokens = sum(chunk.length for chunk in plan.prefill_chunks)
        tokens += sum(len(chunk.tokens) for chunk in plan.draft_chunks) // 10
        seconds = self._worlds.step_s * (1.0 + 0.05 * tokens + 0.1 * len(plan.decodes))
        seconds += self._worlds.step_s * 0.1 * (1 + max(plan.draft_counts, default=-1))
        seconds *= 0.8 + 0.4 * self._chance.random()
        self._group.enter(
            plan.step_id, order.rank, self, seconds, lambda: self._finish(plan), self._fail
        )

    def _finish(self, plan: StepPlan) -> None:
        if self.is_wedged:
            return
        assert self.reference is not None
        assert self._traffic is not None
        receipt = self.reference.execute(plan)
        self.heap.note(self.name, "executes", plan.epoch, plan.step_id, receipt.tokens)
        if self.tampers:
            self.tampers -= 1
            self._worlds.divergences += 1
            receipt = _tampered(receipt)
        self._watchdog.set_idle()
        self.last_receipt = receipt
        self.link.send(receipt)
        self.link.step_finished = plan.step_id
        self.steps += 1
        self._traffic.write()
        self._rest()

    def _rest(self) -> None:
        self.is_busy = False
        self.wake()

    def _fail(self) -> None:
        """A collective has raised: say so and end, as `main._fail`."""
        order = self._order
        assert order is not None
        self.heap.note(self.name, "fails in a collective")
        detail = "RuntimeError: a peer is gone"
        self.link.send(
            RankFailed(rank=order.rank, epoch=order.epoch, detail=detail, permanent=False)
        )
        self.link.request_exit(limits.EXIT_WORLD_LOST)


def _tampered(receipt: StepFinished) -> StepFinished:
    """Return a receipt of another computation; rank 0's tokens are wrong with it."""
    tokens = [[(token + 1) % VOCABULARY for token in some] for some in receipt.tokens]
    digest = bytes([receipt.digest[0] ^ (1 + receipt.rank)]) + receipt.digest[1:]
    return msgspec.structs.replace(receipt, tokens=tokens, digest=digest)
