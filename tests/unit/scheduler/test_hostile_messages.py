"""Any valid message from any peer at any time: the core never raises and its state stays
consistent.

Messages are generated from their types, so new types are covered, and mixed with the messages of
correct peers, so that they reach a working world. A faulty rank ends its epoch at most. Answers of
the core are checked too, because a gateway refuses invalid ones.
"""

from collections import deque
from typing import Any

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    HandOverRequested,
    RankLost,
    RankMessageReceived,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
)
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankReady,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RestoreBlocks,
    Sampling,
    StepFinished,
    StepPlan,
    SubmitRequest,
    ToGateway,
    TokenLogprobs,
    TokensGenerated,
    ToRank,
    ToScheduler,
    token_ids,
)
from shared.transport import codec
from tests.support.effort import cases
from tests.unit.scheduler.support.rank_messages import HELLO, READY
from tests.unit.shared.messages.message_strategies import instances

_TO_GATEWAY: codec.Decoder[Any] = codec.Decoder(ToGateway)
_TO_RANK: codec.Decoder[Any] = codec.Decoder(ToRank)

_WRONG_FIELDS = ["tokens"] * 3 + ["logprobs"] * 3 + ["step_id", "rank", "digest", "busy_ms"]

GATEWAYS = [PeerId(name) for name in (b"gateway-1", b"gateway-2", b"status-3", b"operator-4")]
UNKNOWN_PEERS = [PeerId(name) for name in (b"rank-x", b"", b"\xff\x00", b"gateway-1")]
NAMES = ["a", "b", "c"]
VOCABULARY = 50
SIZE = 2

_READY = msgspec.structs.replace(
    READY, context_tokens_max=400, vocab_size=VOCABULARY, kv_layout="layout"
)


class HostileWorld:
    """A core with correct ranks and gateways, and hostile peers."""

    def __init__(self, draw: Any) -> None:
        cache = {"block_tokens": 16, "ssd": True}
        config = {"world": {"size": SIZE}, "cache": cache, "scheduler": {"epochs_failed_max": 40}}
        self.core = SchedulerCore(config_from_tree(config))
        self.draw = draw
        self.now_s = 10.0
        self.ranks: dict[PeerId, JoinWorld] = {}
        self.plans: dict[PeerId, deque[StepPlan]] = {}
        self.restores = 0
        self.hashes = [b"h" * 32]
        """Hashes of blocks that ranks were ordered to keep."""
        self.open: set[tuple[PeerId, str]] = set()
        self.positions: dict[tuple[PeerId, str], int] = {}
        self.processes = 0
        self.steps = 0
        self.is_over = False

    def tell(self, one: Event) -> None:
        """Handle an event with the core; check its state and its answers."""
        actions = self.core.handle(one, self.now_s)
        self.core.check_invariants()
        if isinstance(one, GatewayLost):
            # It gets no further messages, and none of its requests is open.
            gone = {entry for entry in self.open if entry[0] == one.gateway}
            assert not self.core._requests.of_gateway(one.gateway)
            self.open -= gone
            for entry in gone:
                self.positions.pop(entry, None)
        for action in actions:
            self._perform(action)

    def start_rank(self, rank: int) -> None:
        """Let a correct rank process say hello."""
        self.processes += 1
        peer = PeerId(f"rank-{self.processes}".encode())
        hello = msgspec.structs.replace(
            HELLO, rank=rank, pid=self.processes, data_address=f"127.0.0.1:{self.processes}"
        )
        self.tell(RankMessageReceived(peer, hello))

    def start_missing_ranks(self) -> None:
        """Start missing ranks, as a supervisor does, and let most of them load."""
        for rank in range(SIZE - len(self.ranks)):
            self.start_rank(-1 if self.draw(st.booleans()) else rank)
        for peer, order in list(self.ranks.items()):
            if self.draw(st.integers(0, 9)):
                self.tell(
                    RankMessageReceived(peer, msgspec.structs.replace(_READY, rank=order.rank))
                )

    def step(self) -> None:
        """Let every rank send a correct receipt for its oldest plan."""
        for peer, order in list(self.ranks.items()):
            plans = self.plans.get(peer)
            if plans:
                self.tell(RankMessageReceived(peer, _receipt(plans.popleft(), order.rank)))

    def send_wrong_receipt(self) -> None:
        """Let a rank answer its oldest plan with a receipt that has one wrong field."""
        working = [peer for peer in self.ranks if self.plans.get(peer)]
        if not working:
            return
        # Only rank 0's tokens are used.
        peer = min(working, key=lambda one: self.ranks[one].rank)
        correct = _receipt(self.plans[peer].popleft(), self.ranks[peer].rank)
        name = self.draw(st.sampled_from(_WRONG_FIELDS))
        values = [getattr(self.draw(instances(StepFinished)), name)]
        if name == "tokens":
            values = [[[self.draw(st.integers(0, 2 * VOCABULARY))] for _ in correct.tokens]]
            values += [one * 2 for one in values] + [[one * 2 for one in correct.tokens]]
        elif name == "logprobs":
            entry = TokenLogprobs(logprob=-1.0)
            values = [[[entry] * self.draw(st.integers(0, 2)) for _ in correct.tokens]]
            values += [[[entry]] * (len(correct.tokens) + 1), [[entry]] * (len(correct.tokens) - 1)]
        wrong = msgspec.structs.replace(correct, **{name: self.draw(st.sampled_from(values))})
        event(f"wrong {name}")
        self.tell(RankMessageReceived(peer, wrong))
        for other in [one for one in working if one != peer and self.plans.get(one)]:
            plan = self.plans[other].popleft()
            self.tell(RankMessageReceived(other, _receipt(plan, self.ranks[other].rank)))

    def send_hostile(self, kinds: st.SearchStrategy[msgspec.Struct]) -> None:
        """Let some peer send a valid message that it should not send."""
        message = self._plausible(self.draw(kinds))
        if self.draw(st.booleans()):
            self.tell(
                GatewayMessageReceived(
                    self.draw(st.sampled_from(GATEWAYS + UNKNOWN_PEERS)), message
                )
            )
        else:
            known = [*self.ranks, *self.core._world._waiting]
            self.tell(
                RankMessageReceived(self.draw(st.sampled_from(known + UNKNOWN_PEERS)), message)
            )

    def _plausible(self, message: Any) -> Any:
        """Replace numbers by current ones, so that the message passes more than the first check."""
        hashes = [self.draw(st.sampled_from(self.hashes)) for _ in range(3)]
        near = {
            "stored": hashes,
            "lost": hashes[1:],
            "epoch": max(0, self.core._world.epoch - self.draw(st.sampled_from([0, 0, 0, 1, -1]))),
            "rank": self.draw(st.integers(0, SIZE)),
            "step_id": self.core._pipeline.in_flight.finished_step_id
            + self.draw(st.integers(0, 3)),
            "restore_id": self.draw(st.integers(0, 5)),
            "request_id": self.draw(st.sampled_from(NAMES)),
            "host": "h",
            "pid": self.draw(st.integers(0, self.processes + 1)),
            "permanent": self.draw(st.integers(0, 9)) == 0,
            "tokens": [[self.draw(st.integers(0, VOCABULARY))]] * self.draw(st.integers(0, 3)),
        }
        names = set(message.__struct_fields__) & set(near)
        chosen = {name: near[name] for name in names if self.draw(st.integers(0, 3))}
        return msgspec.structs.replace(message, **chosen)

    def _perform(self, action: Action) -> None:
        match action:
            case SendToGateway():
                self._to_gateway(action.gateway, _TO_GATEWAY.decode(codec.encode(action.message)))
            case SendToRanks():
                message = _TO_RANK.decode(codec.encode(action.message))
                for peer in action.peers:
                    self._to_rank(peer, message)
            case Stop():
                self.is_over = True

    def _to_rank(self, peer: PeerId, message: ToRank) -> None:
        match message:
            case JoinWorld():
                self.ranks[peer] = message
                self.plans[peer] = deque()
            case StepPlan():
                self.plans[peer].append(message)
                self.hashes += [block.hash for block in message.keep_blocks]
            case RestoreBlocks():
                self.restores += 1
            case LeaveWorld():
                self.ranks.pop(peer, None)
                self.plans.pop(peer, None)

    def _to_gateway(self, gateway: PeerId, message: ToGateway) -> None:
        match message:
            case RequestAccepted():
                assert (gateway, message.request_id) not in self.open
                self.open.add((gateway, message.request_id))
            case RequestFinished() | RequestFailed():
                self.open.remove((gateway, message.request_id))
                self.positions.pop((gateway, message.request_id), None)
            case TokensGenerated():
                self.steps += 1
                columns = message.request_ids, message.positions, message.tokens
                all_logprobs = message.logprobs or [[]] * len(message.tokens)
                for name, position, tokens, logprobs in zip(*columns, all_logprobs, strict=True):
                    key = gateway, name
                    assert key in self.open, "tokens of a request that is not open"
                    assert len(logprobs) in (0, len(tokens)), "log probabilities of other tokens"
                    assert position == self.positions.get(key, position), "a gap or a repeat"
                    assert all(0 <= token < VOCABULARY for token in tokens)
                    self.positions[key] = position + len(tokens)


def _receipt(plan: StepPlan, rank: int) -> StepFinished:
    sampled = sum(chunk.samples for chunk in plan.prefill_chunks) + len(plan.decodes)
    return StepFinished(
        epoch=plan.epoch,
        step_id=plan.step_id,
        rank=rank,
        digest=b"d" * 16,
        tokens=[[plan.step_id % VOCABULARY]] * sampled if rank == 0 else [],
        busy_ms=5.0,
        idle_ms=0.0,
        memory_bytes=1,
    )


_ANY = st.one_of([instances(kind) for kind in ToScheduler.__args__])
_FROM_RANKS = st.one_of([instances(kind) for kind in (StepFinished, RankReady, RankHello)])
_CAUSES = ["goodbye", "restarted", "silent for 10 s", "another key uses its identity"]


def _perform_action(world: HostileWorld, action: str) -> None:
    draw = world.draw
    match action:
        case "ranks":
            world.start_missing_ranks()
        case "step":
            world.step()
            world.now_s += 0.01
        case "submit":
            request = SubmitRequest(
                request_id=draw(st.sampled_from(NAMES)),
                prompt=token_ids.pack(
                    draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60))
                ),
                sampling=Sampling(seed=1),
                max_tokens=draw(st.integers(1, 40)),
            )
            world.tell(GatewayMessageReceived(draw(st.sampled_from(GATEWAYS[:2])), request))
        case "wrong_receipt":
            world.send_wrong_receipt()
        case "any":
            world.send_hostile(_ANY)
        case "rank":
            world.send_hostile(_FROM_RANKS)
        case "lost":
            known = [*world.ranks, *UNKNOWN_PEERS]
            peer = draw(st.sampled_from(known))
            world.ranks.pop(peer, None)
            world.tell(RankLost(peer, draw(st.sampled_from(_CAUSES))))
        case "gateway":
            gateway = draw(st.sampled_from(GATEWAYS + UNKNOWN_PEERS))
            world.tell(draw(st.sampled_from([GatewayConnected(gateway), GatewayLost(gateway)])))
        case "time":
            world.now_s += draw(st.sampled_from([0.0, 0.02, 0.5, 1.9, 30.0, 700.0]))
            world.tell(TimePassed())
        case "stop":
            world.tell(draw(st.sampled_from([DrainRequested(), HandOverRequested()])))


_ACTIONS = (
    ["ranks"] * 4
    + ["step"] * 12
    + ["submit"] * 3
    + ["any"] * 4
    + ["rank"] * 3
    + ["wrong_receipt"] * 3
)
_ACTIONS += ["lost", "gateway", "time", "time"]


@settings(max_examples=cases(20, 50), suppress_health_check=list(HealthCheck))
@given(data=st.data(), ends=st.integers(0, 9))
def test_core_raises_nothing_and_keeps_invariants_under_any_messages(
    data: st.DataObject, ends: int
) -> None:
    """After any sequence of messages nothing is raised, no invariant is broken and every answer is
    valid."""
    world = HostileWorld(data.draw)
    for gateway in GATEWAYS:
        world.tell(GatewayConnected(gateway))
    world.start_missing_ranks()
    for action in data.draw(st.lists(st.sampled_from(_ACTIONS), min_size=60, max_size=120)):
        _perform_action(world, action)
    if ends == 0:
        _perform_action(world, "stop")
        _perform_action(world, "step")
    event(f"epochs: {min(5, world.core._world.epoch)}")
    event(f"messages with tokens: {min(3, world.steps // 5)} x 5")
    event(f"restores: {min(3, world.restores)}")
    event(f"failure: {world.core._world.recovery.failure or 'none'}")
