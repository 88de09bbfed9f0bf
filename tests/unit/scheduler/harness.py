"""A world in memory: the real core, reference ranks that check every plan, a clock moved by hand.

The reference rank is a second, independent reading of docs/protocol.md: it keeps what a rank must
know, refuses whatever contradicts it, and samples by a hash of the tokens, so that a lost, repeated
or misplaced token shows.
"""

import dataclasses
import hashlib
from collections import defaultdict, deque
from collections.abc import Callable

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    Event,
    GatewayConnected,
    GatewayTold,
    KeepEvidence,
    RankConnected,
    RankTold,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
)
from shared import codec
from shared.config import Config
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankReady,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Sampling,
    StatusReported,
    StepFinished,
    StepPlan,
    SubmitRequest,
    TokensGenerated,
    ToScheduler,
)

GATEWAY = PeerId(b"gateway")
VOCABULARY = 1_000


def next_token(tokens: list[int]) -> int:
    """Return the token that follows: a function of everything before it."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def completion(prompt: list[int], count: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Return what an undisturbed run generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class _Row:
    slot: int
    known: list[int]
    """Tokens of the sequence, those sampled here included."""
    length: int = 0
    """Tokens whose KV is in the row."""


class ReferenceRank:
    """Executes plans as the protocol says, and refuses what contradicts its state."""

    def __init__(self, peer: PeerId, rank: int, epoch: int) -> None:
        self.peer = peer
        self.rank = rank
        self.epoch = epoch
        self.rows: dict[int, _Row] = {}
        self.row_count = 0
        self.row_tokens = 0
        self.step_id = 0
        self.digest = b""

    def execute(self, plan: StepPlan) -> StepFinished:
        """Apply a plan and return its receipt."""
        assert plan.epoch == self.epoch
        assert plan.step_id == self.step_id + 1, "plans have no gaps"
        self.step_id = plan.step_id
        for sequence_id in plan.dropped:
            del self.rows[sequence_id]
        self._move(plan)
        self.row_count, self.row_tokens = plan.row_count, plan.row_tokens
        for row in self.rows.values():
            assert row.slot < self.row_count
            assert row.length <= self.row_tokens
        for entry in plan.admitted:
            assert entry.slot not in self._slots()
            assert entry.slot < self.row_count
            assert entry.sequence_id not in self.rows
            self.rows[entry.sequence_id] = _Row(entry.slot, list(entry.tokens))
        tokens = self._prefill(plan) + self._decode(plan)
        text = f"{self.digest!r}{codec.encode(plan)!r}{tokens}".encode()
        self.digest = hashlib.blake2b(text, digest_size=16).digest()
        work_ms = sum(chunk.length for chunk in plan.prefill_chunks) * 0.5 + 5.0
        return StepFinished(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rank=self.rank,
            digest=self.digest,
            tokens=tokens if self.rank == 0 else [],
            busy_ms=work_ms,
            idle_ms=0.0,
            memory_bytes=1,
        )

    def _move(self, plan: StepPlan) -> None:
        for move in plan.moves:
            assert move.slot not in self._slots()
            assert move.slot < self.rows[move.sequence_id].slot
            self.rows[move.sequence_id].slot = move.slot

    def _prefill(self, plan: StepPlan) -> list[list[int]]:
        sampled = []
        for chunk in plan.prefill_chunks:
            row = self.rows[chunk.sequence_id]
            assert chunk.start == row.length, "chunks are contiguous"
            row.length += chunk.length
            assert row.length <= min(len(row.known), self.row_tokens)
            assert chunk.samples == (row.length == len(row.known))
            if chunk.samples:
                row.known.append(next_token(row.known))
                sampled.append([row.known[-1]])
        return sampled

    def _decode(self, plan: StepPlan) -> list[list[int]]:
        slots = [self.rows[sequence_id].slot for sequence_id in plan.decodes]
        assert slots == sorted(slots), "decodes are in slot order"
        sampled = []
        for sequence_id in plan.decodes:
            row = self.rows[sequence_id]
            assert row.length == len(row.known) - 1, "a decode computes the last sampled token"
            row.length += 1
            assert row.length <= self.row_tokens
            row.known.append(next_token(row.known))
            sampled.append([row.known[-1]])
        return sampled

    def _slots(self) -> set[int]:
        return {row.slot for row in self.rows.values()}


class World:
    """Core, ranks and one gateway, with messages delivered one by one."""

    def __init__(self, config: Config, kv_tokens: int = 100_000, context: int = 8_192) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.now_s = 100.0
        self.kv_tokens = kv_tokens
        self.context = context
        self.ranks: dict[PeerId, ReferenceRank] = {}
        self.to_ranks: dict[PeerId, deque[StepPlan]] = defaultdict(deque)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestFinished | RequestFailed | RequestRejected] = {}
        self.accepted: set[str] = set()
        self.status: StatusReported | None = None
        self.evidence: list[KeepEvidence] = []
        self.left: list[PeerId] = []
        self.exit_code: int | None = None
        self.plans: list[StepPlan] = []
        self.corrupt: Callable[[StepFinished], StepFinished] = lambda receipt: receipt
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
            host="localhost",
            pid=self._processes,
            data_address=f"127.0.0.1:{5_000 + self._processes}",
            launched=False,
            device="cpu",
            mlx_version="0",
            memory_bytes=1,
        )
        self.tell(RankTold(peer, hello))
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
        self.tell(GatewayTold(GATEWAY, message))

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.tell(GatewayTold(GATEWAY, AbortRequest(request_id=request_id)))

    def tell(self, event: Event) -> None:
        """Hand an event to the core, perform its actions, check its invariants."""
        actions = self.core.handle(event, self.now_s)
        self.core.check_invariants()
        for action in actions:
            self._perform(action)

    def rank_step(self, peer: PeerId) -> bool:
        """Let one rank execute its next plan; False when it has none."""
        if peer not in self.ranks or not self.to_ranks[peer]:
            return False
        receipt = self.ranks[peer].execute(self.to_ranks[peer].popleft())
        self.tell(RankTold(peer, self.corrupt(receipt)))
        return True

    def step(self) -> bool:
        """Let every rank execute one plan; False when all are idle."""
        self.now_s += 0.01
        moved = [self.rank_step(peer) for peer in list(self.ranks)]
        return any(moved)

    def settle(self, steps_max: int = 100_000) -> None:
        """Run until nothing moves."""
        for _ in range(steps_max):
            if not self.step():
                self.tell(TimePassed())
                if not self.step():
                    return
        raise AssertionError("the world does not come to rest")

    def _perform(self, action: Action) -> None:
        match action:
            case SendToRanks():
                for peer in action.peers:
                    self._to_rank(
                        peer,
                        codec.Decoder[ToScheduler](JoinWorld | StepPlan | LeaveWorld).decode(
                            codec.encode(action.message)
                        ),
                    )
            case SendToGateway():
                self._to_gateway(action.message)
            case KeepEvidence():
                self.evidence.append(action)
            case Stop():
                self.exit_code = action.exit_code
            case _:
                pass

    def _to_rank(self, peer: PeerId, message: object) -> None:
        match message:
            case JoinWorld():
                self.ranks[peer] = ReferenceRank(peer, message.rank, message.epoch)
                ready = RankReady(
                    rank=message.rank,
                    model_fingerprint="f",
                    kv_bytes_per_token=10,
                    kv_bytes_per_row=0,
                    kv_budget_bytes=10 * self.kv_tokens,
                    context_tokens_max=self.context,
                    vocab_size=VOCABULARY,
                    can_roll_back=True,
                    blas="",
                )
                self.tell(RankTold(peer, ready))
            case StepPlan():
                self.to_ranks[peer].append(message)
                if self.ranks[peer].rank == 0:
                    self.plans.append(message)
            case LeaveWorld():
                self.left.append(peer)
                self.ranks.pop(peer, None)
                self.to_ranks.pop(peer, None)

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
                self.ends[message.request_id] = message
            case RequestAccepted():
                self.accepted.add(message.request_id)
            case StatusReported():
                self.status = message
