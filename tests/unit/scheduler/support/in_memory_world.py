"""A world in memory: the real core, reference ranks that check every plan, and a clock of its
own."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
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
    GrammarCompiled,
    JoinWorld,
    LeaveWorld,
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
    token_ids,
)
from shared.transport import codec
from tests.unit.scheduler.support.rank_messages import HELLO
from tests.unit.scheduler.support.reference_rank import (
    BYTES_PER_TOKEN,
    DRAFT_BYTES_PER_TOKEN,
    VOCABULARY,
    Block,
    ReferenceRank,
    WorldTraits,
    completion,
    next_token,
)

MODEL_METHODS = ("draft_model", "eagle")

__all__ = ["GATEWAY", "VOCABULARY", "InMemoryWorld", "RankSetup", "completion", "next_token"]

GATEWAY = PeerId(b"gateway")
_TO_RANK: codec.Decoder[Any] = codec.Decoder(JoinWorld | StepPlan | RestoreBlocks | LeaveWorld)


@dataclasses.dataclass
class RankSetup:
    """Properties of the ranks of a world."""

    kv_tokens: int = 100_000
    """Tokens that fit into each rank's memory for KV."""
    context: int = 8_192
    can_roll_back: bool = True
    checkpoint_bytes: int = 0
    """Size of a row's state that cannot be cut; 0: plain KV."""
    kv_layout: str = "layout"
    fingerprint: str = "f"
    has_drafts: bool = True
    """The ranks support the configured draft method."""
    draft_quality: float = 0.8
    disks: dict[int, dict[bytes, Block]] = dataclasses.field(default_factory=dict)
    """Contents of each rank's store, which outlive ranks and worlds."""


class InMemoryWorld:
    """Core, ranks and one gateway; messages are delivered one by one."""

    def __init__(self, config: Config, hardware: RankSetup | None = None) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.now_s = 100.0
        self.hardware = hardware or RankSetup()
        self.traits = self._make_traits()
        self.ranks: dict[PeerId, ReferenceRank] = {}
        self.pending_plans: dict[PeerId, deque[StepPlan]] = defaultdict(deque)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestFinished | RequestFailed | RequestRejected] = {}
        self.accepted: set[str] = set()
        self.status: StatusReported | None = None
        self.evidence: list[SaveEvidence] = []
        self.dismissed: list[PeerId] = []
        self.exit_code: int | None = None
        self.plans: list[StepPlan] = []
        self.log_lines: list[WriteLog] = []
        self.cached: dict[str, CachedPrefix] = {}
        """Cached prefix of each request at its first admission."""
        self.restores: list[RestoreBlocks] = []
        """Restore orders to the ranks, each once."""
        self.host = "localhost"
        """Host name of the next rank processes."""
        self.change_receipt: Callable[[StepFinished], StepFinished] = lambda receipt: receipt
        self.restore_answer: Callable[[ReferenceRank, RestoreBlocks], tuple[float, BlocksRestored]]
        self.restore_answer = lambda rank, order: (0.0, rank.restore(order))
        """Returns the seconds of a rank's restore, and its answer."""
        self.compile_answer: Callable[[GrammarCompiled], tuple[float, GrammarCompiled]]
        self.compile_answer = lambda report: (0.0, report)
        """Returns the seconds in which a rank compiles a grammar, and its report."""
        self.accepts_spill: Callable[[ReferenceRank, bytes], bool] = lambda rank, name: True
        """Whether a rank's store accepts a block."""
        self._answers: list[tuple[float, PeerId, BlocksRestored | GrammarCompiled]] = []
        self._processes = 0

    def boot(self) -> None:
        """Connect the gateway and start all ranks."""
        self.tell(GatewayConnected(GATEWAY))
        for rank in range(self.config.world.size):
            self.start_rank(rank)

    def start_rank(self, rank: int, *, spare: bool = False) -> PeerId:
        """Start a process for a rank, or a spare one; it joins as soon as the core orders it."""
        self._processes += 1
        peer = PeerId(f"rank-{self._processes}".encode())
        hello = msgspec.structs.replace(
            HELLO,
            rank=rank,
            host=self.host,
            pid=self._processes,
            data_address=f"127.0.0.1:{5_000 + self._processes}",
            spare=spare,
        )
        self.tell(RankMessageReceived(peer, hello))
        return peer

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        generated: Sequence[int] = (),
        **options: object,
    ) -> None:
        """Submit a request, which is greedy without other options."""
        options.setdefault("sampling", Sampling(seed=1, temperature=0.0))
        options["generated"] = token_ids.pack(generated)
        message = SubmitRequest(
            request_id=request_id,
            prompt=token_ids.pack(prompt),
            max_tokens=max_tokens,
            **options,  # type: ignore[arg-type]
        )
        self.tell(GatewayMessageReceived(GATEWAY, message))

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.tell(GatewayMessageReceived(GATEWAY, AbortRequest(request_id=request_id)))

    def tell(self, event: Event) -> None:
        """Handle an event with the core, perform its actions, and check its invariants."""
        actions = self.core.handle(event, self.now_s)
        self.core.check_invariants()
        if isinstance(event, GatewayLost):
            # The ends of its requests are not sent to any gateway.
            self.accepted &= set(self.ends)
        for action in actions:
            self._perform(action)

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass without messages, with a look at the clock every 0.5 s."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            self.tell(TimePassed())

    def rank_step(self, peer: PeerId) -> bool:
        """Let one rank execute its next plan; return False when it has none."""
        if peer not in self.ranks or not self.pending_plans[peer]:
            return False
        plan = self.pending_plans[peer].popleft()
        receipt = self.ranks[peer].execute(plan)
        self._compile(peer, plan)
        self.tell(RankMessageReceived(peer, self.change_receipt(receipt)))
        return True

    def step(self) -> bool:
        """Let every rank execute one plan and its disk work; return False when all are idle."""
        self.now_s += 0.01
        moved = [self.rank_step(peer) for peer in list(self.ranks)]
        moved += [self.write_spills(peer) for peer in list(self.ranks)]
        moved.append(bool(self._answers))
        self.deliver_answers()
        return any(moved)

    def write_spills(self, peer: PeerId) -> bool:
        """Let one rank write its spills; return False when it has none."""
        rank = self.ranks.get(peer)
        if rank is None or not rank.spills:
            return False
        stored, lost = [], []
        for name, block in rank.spills:
            if self.accepts_spill(rank, name):
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

    def deliver_answers(self) -> None:
        """Deliver the answers to restores and the reports of grammars whose time has come."""
        due = [one for one in self._answers if one[0] <= self.now_s]
        self._answers = [one for one in self._answers if one[0] > self.now_s]
        for _, peer, message in due:
            if peer in self.ranks:
                self.tell(RankMessageReceived(peer, message))

    def _compile(self, peer: PeerId, plan: StepPlan) -> None:
        """Compile the grammars of admitted sequences beside the next steps."""
        for one in plan.admitted:
            if one.grammar is not None:
                report = GrammarCompiled(
                    epoch=plan.epoch,
                    rank=self.ranks[peer].rank,
                    step_id=plan.step_id,
                    sequence_id=one.sequence_id,
                )
                takes_s, report = self.compile_answer(report)
                self._answers.append((self.now_s + takes_s, peer, report))

    def settle(self, steps_max: int = 100_000) -> None:
        """Step until all ranks are idle.

        Raises:
            AssertionError: they are still busy after `steps_max` steps.
        """
        for _ in range(steps_max):
            if not self.step():
                self.tell(TimePassed())
                if not self.step():
                    self.compare_blocks()
                    return
        raise AssertionError("the world does not become idle")

    def compare_blocks(self) -> None:
        """Check that idle ranks hold exactly the blocks of the index (I9)."""
        index = self.core._batch.cache.state.index
        entries = [entry for node in index for entry in node.entries]
        resident = {entry.hash for entry in entries if entry.is_resident}
        serving = self.core._world.peers
        for peer, rank in self.ranks.items():
            if peer in serving and not self.pending_plans[peer]:
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
                self.log_lines.append(action)
            case Stop():
                self.exit_code = action.exit_code

    def _to_rank(self, peer: PeerId, message: object) -> None:
        match message:
            case JoinWorld():
                self._join(peer, message)
            case StepPlan():
                self.pending_plans[peer].append(message)
                if self.ranks[peer].rank == 0:
                    self.plans.append(message)
            case RestoreBlocks():
                rank = self.ranks[peer]
                if rank.rank == 0:
                    self.restores.append(message)
                takes_s, answer = self.restore_answer(rank, message)
                self._answers.append((self.now_s + takes_s, peer, answer))
            case LeaveWorld():
                self.dismissed.append(peer)
                self.ranks.pop(peer, None)
                self.pending_plans.pop(peer, None)

    def _join(self, peer: PeerId, message: JoinWorld) -> None:
        hardware = self.hardware
        disk = hardware.disks.setdefault(message.rank, {})
        self.ranks[peer] = ReferenceRank(peer, message.rank, message.epoch, self.traits, disk)
        ready = RankReady(
            rank=message.rank,
            model_fingerprint=hardware.fingerprint,
            kv_bytes_per_token=BYTES_PER_TOKEN,
            kv_bytes_per_row=hardware.checkpoint_bytes,
            kv_budget_bytes=self.traits.budget_bytes,
            context_tokens_max=hardware.context,
            vocab_size=VOCABULARY,
            can_roll_back=self.hardware.can_roll_back,
            needs_checkpoints=hardware.checkpoint_bytes > 0,
            kv_layout=hardware.kv_layout,
            draft_method=self.draft_method,
            draft_bytes_per_token=DRAFT_BYTES_PER_TOKEN if self.traits.draft_method else 0,
            blas="",
        )
        self.tell(RankMessageReceived(peer, ready))

    @property
    def draft_method(self) -> Literal["off", "ngram", "draft_model", "eagle"]:
        """The ranks' draft method: the scheduler's, or "off" where the ranks lack its model."""
        method = self.config.speculation.method
        return method if method not in MODEL_METHODS or self.hardware.has_drafts else "off"

    def _make_traits(self) -> WorldTraits:
        budget = BYTES_PER_TOKEN * self.hardware.kv_tokens
        resident = self.config.cache.resident_bytes_max or budget // 2
        method = self.config.speculation.method
        return WorldTraits(
            budget,
            min(resident, budget),
            self.hardware.checkpoint_bytes,
            draft_method=method if method in MODEL_METHODS and self.hardware.has_drafts else "",
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
