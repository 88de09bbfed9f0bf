"""A world in memory: the real core, reference ranks that check every plan, a clock of its own."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Literal

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    RankConnected,
    RankMessageReceived,
    SaveEvidence,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
    WriteLog,
)
from shared.configuration.settings import Config
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    BlocksRestored,
    BlocksSpilled,
    CachedPrefix,
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankReady,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    RestoreBlocks,
    Sampling,
    StatusReported,
    StepFinished,
    StepPlan,
    SubmitRequest,
    TokensGenerated,
)
from shared.transport import codec
from tests.unit.scheduler.reference_rank import (
    BYTES_PER_TOKEN,
    DRAFT_BYTES_PER_TOKEN,
    VOCABULARY,
    Block,
    ReferenceRank,
    WorldTraits,
    completion,
    next_token,
)

MODELS = ("draft_model", "eagle")

__all__ = ["GATEWAY", "VOCABULARY", "InMemoryWorld", "RankSetup", "completion", "next_token"]

GATEWAY = PeerId(b"gateway")
_TO_RANK: codec.Decoder[Any] = codec.Decoder(JoinWorld | StepPlan | RestoreBlocks | LeaveWorld)


@dataclasses.dataclass
class RankSetup:
    """What the ranks of a world are like."""

    kv_tokens: int = 100_000
    """Tokens that fit into each rank's memory for KV."""
    context: int = 8_192
    can_roll_back: bool = True
    checkpoint_bytes: int = 0
    """Rows have state of this size that cannot be cut; 0: plain KV."""
    kv_layout: str = "layout"
    fingerprint: str = "f"
    has_drafts: bool = True
    """What proposes drafts is there, where the configuration wants it."""
    draft_quality: float = 0.8
    disks: dict[int, dict[bytes, Block]] = dataclasses.field(default_factory=dict)
    """What each rank's store holds; it outlives ranks and worlds."""


class InMemoryWorld:
    """Core, ranks and one gateway, with messages delivered one by one."""

    def __init__(self, config: Config, hardware: RankSetup | None = None) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.now_s = 100.0
        self.hardware = hardware or RankSetup()
        self.terms = self._make_terms()
        self.ranks: dict[PeerId, ReferenceRank] = {}
        self.to_ranks: dict[PeerId, deque[StepPlan]] = defaultdict(deque)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestFinished | RequestFailed | RequestRejected] = {}
        self.accepted: set[str] = set()
        self.status: StatusReported | None = None
        self.evidence: list[SaveEvidence] = []
        self.left: list[PeerId] = []
        self.exit_code: int | None = None
        self.plans: list[StepPlan] = []
        self.said: list[WriteLog] = []
        self.cached: dict[str, CachedPrefix] = {}
        """What the first admission of each request found."""
        self.restores: list[RestoreBlocks] = []
        """Orders to the ranks, each once."""
        self.host = "localhost"
        """Where the next rank processes run."""
        self.corrupt: Callable[[StepFinished], StepFinished] = lambda receipt: receipt
        self.read: Callable[[ReferenceRank, RestoreBlocks], tuple[float, BlocksRestored]]
        self.read = lambda rank, order: (0.0, rank.restore(order))
        """How long a rank takes for a restore, and its answer."""
        self.write: Callable[[ReferenceRank, bytes], bool] = lambda rank, name: True
        """Whether a rank's store takes a block."""
        self._answers: list[tuple[float, PeerId, BlocksRestored]] = []
        self._processes = 0

    def boot(self) -> None:
        """Connect the gateway and bring up all ranks."""
        self.tell(GatewayConnected(GATEWAY))
        for rank in range(self.config.world.size):
            self.start_rank(rank)

    def start_rank(self, rank: int) -> PeerId:
        """Start a process for a rank; it joins as soon as the core says so."""
        self._processes += 1
        peer = PeerId(f"rank-{self._processes}".encode())
        self.tell(RankConnected(peer))
        hello = RankHello(
            rank=rank,
            host=self.host,
            pid=self._processes,
            data_address=f"127.0.0.1:{5_000 + self._processes}",
            launched=False,
            device="cpu",
            mlx_version="0",
            memory_bytes=1,
        )
        self.tell(RankMessageReceived(peer, hello))
        return peer

    def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, **options: object
    ) -> None:
        """Submit a greedy request."""
        message = SubmitRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(seed=1, temperature=0.0),
            **options,  # type: ignore[arg-type]
        )
        self.tell(GatewayMessageReceived(GATEWAY, message))

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.tell(GatewayMessageReceived(GATEWAY, AbortRequest(request_id=request_id)))

    def tell(self, event: Event) -> None:
        """Hand an event to the core, perform its actions, check its invariants."""
        actions = self.core.handle(event, self.now_s)
        self.core.check_invariants()
        if isinstance(event, GatewayLost):
            # Nobody is told any more how its requests end.
            self.accepted &= set(self.ends)
        for action in actions:
            self._perform(action)

    def wait(self, seconds: float) -> None:
        """Let time pass while nobody says anything, with looks at the clock as the shell does."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            self.tell(TimePassed())

    def rank_step(self, peer: PeerId) -> bool:
        """Let one rank execute its next plan; False when it has none."""
        if peer not in self.ranks or not self.to_ranks[peer]:
            return False
        receipt = self.ranks[peer].execute(self.to_ranks[peer].popleft())
        self.tell(RankMessageReceived(peer, self.corrupt(receipt)))
        return True

    def step(self) -> bool:
        """Let every rank execute one plan and its disk work; False when all are idle."""
        self.now_s += 0.01
        moved = [self.rank_step(peer) for peer in list(self.ranks)]
        moved += [self.write_spills(peer) for peer in list(self.ranks)]
        moved.append(bool(self._answers))
        self.deliver_restores()
        return any(moved)

    def write_spills(self, peer: PeerId) -> bool:
        """Let one rank write what it was told to spill; False when it has nothing to write."""
        rank = self.ranks.get(peer)
        if rank is None or not rank.spills:
            return False
        stored, lost = [], []
        for name, block in rank.spills:
            if self.write(rank, name):
                rank.disk[name] = block
                stored.append(name)
            else:
                lost.append(name)
        rank.spills.clear()
        self.tell(
            RankMessageReceived(
                peer,
                BlocksSpilled(
                    epoch=rank.epoch,
                    rank=rank.rank,
                    stored=stored,
                    lost=lost,
                    bytes_written=len(stored),
                    store_bytes=len(rank.disk),
                ),
            )
        )
        return True

    def deliver_restores(self) -> None:
        """Tell the core those answers to restores that have taken their time."""
        due = [one for one in self._answers if one[0] <= self.now_s]
        self._answers = [one for one in self._answers if one[0] > self.now_s]
        for _, peer, message in due:
            if peer in self.ranks:
                self.tell(RankMessageReceived(peer, message))

    def settle(self, steps_max: int = 100_000) -> None:
        """Run until nothing moves."""
        for _ in range(steps_max):
            if not self.step():
                self.tell(TimePassed())
                if not self.step():
                    self.compare_blocks()
                    return
        raise AssertionError("the world does not come to rest")

    def compare_blocks(self) -> None:
        """Ranks that have executed all plans hold what the index says, to the block (I9)."""
        index = self.core._batch.cache._state.index
        entries = [entry for node in index for entry in node.entries]
        resident = {entry.hash for entry in entries if entry.is_resident}
        for peer, rank in self.ranks.items():
            if not self.to_ranks[peer]:
                assert set(rank.blocks) == resident
                assert rank.resident_bytes == index.resident_bytes

    def _perform(self, action: Action) -> None:
        match action:
            case SendToRanks():
                for peer in action.peers:
                    self._to_rank(
                        peer,
                        _TO_RANK.decode(codec.encode(action.message)),
                    )
            case SendToGateway():
                self._to_gateway(action.message)
            case SaveEvidence():
                self.evidence.append(action)
            case WriteLog():
                self.said.append(action)
            case Stop():
                self.exit_code = action.exit_code

    def _to_rank(self, peer: PeerId, message: object) -> None:
        match message:
            case JoinWorld():
                self._join(peer, message)
            case StepPlan():
                self.to_ranks[peer].append(message)
                if self.ranks[peer].rank == 0:
                    self.plans.append(message)
            case RestoreBlocks():
                rank = self.ranks[peer]
                if rank.rank == 0:
                    self.restores.append(message)
                takes_s, answer = self.read(rank, message)
                self._answers.append((self.now_s + takes_s, peer, answer))
            case LeaveWorld():
                self.left.append(peer)
                self.ranks.pop(peer, None)
                self.to_ranks.pop(peer, None)

    def _join(self, peer: PeerId, message: JoinWorld) -> None:
        hardware = self.hardware
        disk = hardware.disks.setdefault(message.rank, {})
        self.ranks[peer] = ReferenceRank(peer, message.rank, message.epoch, self.terms, disk)
        ready = RankReady(
            rank=message.rank,
            model_fingerprint=hardware.fingerprint,
            kv_bytes_per_token=BYTES_PER_TOKEN,
            kv_bytes_per_row=hardware.checkpoint_bytes,
            kv_budget_bytes=self.terms.budget_bytes,
            context_tokens_max=hardware.context,
            vocab_size=VOCABULARY,
            can_roll_back=self.hardware.can_roll_back,
            needs_checkpoints=hardware.checkpoint_bytes > 0,
            kv_layout=hardware.kv_layout,
            draft_method=self.draft_method,
            draft_bytes_per_token=DRAFT_BYTES_PER_TOKEN if self.terms.drafts else 0,
            blas="",
        )
        self.tell(RankMessageReceived(peer, ready))

    @property
    def draft_method(self) -> Literal["off", "ngram", "draft_model", "eagle"]:
        """What ranks are set up for: what the scheduler is, unless they lack what it takes."""
        method = self.config.speculation.method
        return method if method not in MODELS or self.hardware.has_drafts else "off"

    def _make_terms(self) -> WorldTraits:
        budget = BYTES_PER_TOKEN * self.hardware.kv_tokens
        resident = self.config.cache.resident_bytes_max or budget // 2
        method = self.config.speculation.method
        return WorldTraits(
            budget,
            min(resident, budget),
            self.hardware.checkpoint_bytes,
            drafts=method if method in MODELS and self.hardware.has_drafts else "",
            draft_quality=self.hardware.draft_quality,
        )

    def _to_gateway(self, message: object) -> None:
        match message:
            case TokensGenerated():
                for request_id, position, tokens in zip(
                    message.request_ids, message.positions, message.tokens, strict=True
                ):
                    assert request_id not in self.ends, "no token after the end"
                    assert position == len(self.tokens[request_id]), "no gap, no repeat"
                    self.tokens[request_id] += tokens
            case RequestFinished() | RequestFailed() | RequestRejected():
                assert message.request_id not in self.ends, "a request ends once"
                if isinstance(message, RequestFinished) and message.request_id in self.cached:
                    assert message.cached == self.cached[message.request_id]
                self.ends[message.request_id] = message
            case RequestAccepted():
                self.accepted.add(message.request_id)
            case RequestAdmitted():
                assert message.request_id not in self.cached, "admitted for the first time once"
                assert message.request_id not in self.ends
                self.cached[message.request_id] = message.cached
            case StatusReported():
                self.status = message
