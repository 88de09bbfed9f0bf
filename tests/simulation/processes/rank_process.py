"""Simulated rank worker: the real scheduler link and watchdog around a reference rank."""

import dataclasses
import queue

import msgspec

from services.rank_worker.peers.watchdog import CHECK_EVERY_S, Watchdog
from services.rank_worker.scheduler_link import SchedulerLink
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
from tests.simulation.environment.disk import BlockIo, Disk
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network
from tests.simulation.processes.process import Process
from tests.unit.scheduler.support.reference_rank import (
    BYTES_PER_TOKEN,
    DRAFT_BYTES_PER_TOKEN,
    VOCABULARY,
    ReferenceRank,
    WorldTraits,
)

HOST = "host"


@dataclasses.dataclass
class RankEnvironment:
    """State outside rank processes: memory size, process groups and disks."""

    config: Config
    traits: WorldTraits
    context: int
    groups: dict[str, Group]
    disks: dict[int, Disk]
    load_s: float
    step_s: float
    """Least duration of a step."""
    divergences: int = 0
    """Number of corrupted receipts that were sent."""

    def group(self, order: JoinWorld, pid: int, heap: EventHeap) -> Group:
        """Return the group of all ranks that were given the same addresses."""
        key = order.files.get("MLX_HOSTFILE") or order.environment.get("MLX_HOSTFILE") or str(pid)
        if key not in self.groups:
            self.groups[key] = Group(key, order.world_size, heap)
        return self.groups[key]


class RankProcess(Process):
    """One life of a rank worker."""

    def __init__(
        self,
        name: str,
        heap: EventHeap,
        network: Network,
        rank_environment: RankEnvironment,
        rank: int,
        pid: int,
        *,
        spare: bool = False,
    ) -> None:
        super().__init__(name, heap, network)
        self.pid = pid
        self.corrupt_receipts_left = 0
        """Number of next receipts that are corrupted."""
        self.is_hung = False
        """Alive and connected, but no step ends any more."""
        self.steps = 0
        self.reference: ReferenceRank | None = None
        self.epoch = 0
        self.last_receipt: StepFinished | None = None
        self._environment = rank_environment
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
            spare=spare,
        )
        with self.owning_sockets():
            self.link = SchedulerLink(rank_environment.config.rank_address, hello, heap, self.exit)
        self._watchdog = Watchdog(heap, self.exit)
        self._rng = heap.random_stream(f"steps of {name}")
        self._group: Group | None = None
        self._order: JoinWorld | None = None
        self.is_busy = False
        self._block_io: BlockIo | None = None
        self.wake()

    # --- threads of the scheduler link and the watchdog -------------------------------------------

    def turn(self) -> None:
        """Run the scheduler link, then take the next order of the main thread."""
        if self.link.turn() and not self.is_busy:
            self._take_order()

    def due_in_s(self) -> float:
        """Return the seconds until the scheduler link has work."""
        return self.link.due_in_s()

    def _watch(self) -> None:
        self._watchdog.check()
        self.call_later(CHECK_EVERY_S, self._watch)

    # --- the main thread --------------------------------------------------------------------------

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
        self._group = self._environment.group(order, self.pid, self.heap)
        self.link.send(RankLoading(stage="joining", loaded=0.0))
        if self.is_hung:
            self.call_later(order.init_deadline_s, self._hard_deadline, 0)
            return
        self.call_later(order.init_deadline_s, self._hard_deadline, 1)
        self._group.enter(0, order.rank, self, 0.01, self._load, self._fail)

    def _load(self) -> None:
        assert self._order is not None
        self.steps = 1
        self.link.send(RankLoading(stage="loading", loaded=0.5))
        self.call_later(self._environment.load_s * (0.5 + self._rng.random()), self._ready)

    def _ready(self) -> None:
        order = self._order
        assert order is not None
        if self.is_hung:
            self.call_later(order.load_deadline_s, self.exit, 1)
            return
        rank_environment = self._environment
        disk = rank_environment.disks[order.rank]
        self.reference = ReferenceRank(
            self.name.encode(), order.rank, order.epoch, rank_environment.traits, disk.blocks
        )
        self._block_io = BlockIo(self, self.reference, disk, self.link.send)
        self.link.on_restore = self._block_io.restore
        self.link.send(
            RankReady(
                rank=order.rank,
                model_fingerprint="f",
                kv_bytes_per_token=BYTES_PER_TOKEN,
                kv_bytes_per_row=0,
                kv_budget_bytes=rank_environment.traits.budget_bytes,
                context_tokens_max=rank_environment.context,
                vocab_size=VOCABULARY,
                can_roll_back=True,
                kv_layout="layout",
                draft_method=rank_environment.config.speculation.method,
                draft_bytes_per_token=DRAFT_BYTES_PER_TOKEN
                if rank_environment.traits.draft_method
                else 0,
                blas="",
            )
        )
        self._watch()
        self._become_idle()

    def _hard_deadline(self, steps: int) -> None:
        if self.steps < steps or (steps == 0 and self.is_hung):
            self.exit(1)

    def _launch(self, plan: StepPlan) -> None:
        order = self._order
        assert order is not None
        assert self._group is not None
        self._watchdog.start_step(plan.step_id, plan.deadline_s)
        self.link.step_started = plan.step_id
        if self.is_hung:
            return
        tokens = sum(chunk.length for chunk in plan.prefill_chunks)
        tokens += sum(len(chunk.tokens) for chunk in plan.draft_chunks) // 10
        seconds = self._environment.step_s * (1.0 + 0.05 * tokens + 0.1 * len(plan.decodes))
        seconds += self._environment.step_s * 0.1 * (1 + max(plan.draft_counts, default=-1))
        seconds *= 0.8 + 0.4 * self._rng.random()
        self._group.enter(
            plan.step_id, order.rank, self, seconds, lambda: self._finish(plan), self._fail
        )

    def _finish(self, plan: StepPlan) -> None:
        if self.is_hung:
            return
        assert self.reference is not None
        assert self._block_io is not None
        receipt = self.reference.execute(plan)
        self.heap.record(self.name, "executes", plan.epoch, plan.step_id, receipt.tokens)
        if self.corrupt_receipts_left:
            self.corrupt_receipts_left -= 1
            self._environment.divergences += 1
            receipt = _corrupted(receipt)
        self._watchdog.set_idle()
        self.last_receipt = receipt
        self.link.send(receipt)
        self.link.step_finished = plan.step_id
        self.steps += 1
        self._block_io.write()
        self._become_idle()

    def _become_idle(self) -> None:
        self.is_busy = False
        self.wake()

    def _fail(self) -> None:
        """Report a failed collective and exit, as the rank worker's main thread does."""
        order = self._order
        assert order is not None
        self.heap.record(self.name, "fails in a collective")
        detail = "RuntimeError: a peer is gone"
        self.link.send(
            RankFailed(rank=order.rank, epoch=order.epoch, detail=detail, permanent=False)
        )
        self.link.request_exit(limits.EXIT_WORLD_LOST)


def _corrupted(receipt: StepFinished) -> StepFinished:
    """Return the receipt of another computation; on rank 0 the tokens differ too."""
    tokens = [[(token + 1) % VOCABULARY for token in some] for some in receipt.tokens]
    digest = bytes([receipt.digest[0] ^ (1 + receipt.rank)]) + receipt.digest[1:]
    return msgspec.structs.replace(receipt, tokens=tokens, digest=digest)
