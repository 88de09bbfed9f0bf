"""A rank without a model that speaks the real protocol over real sockets.

Its tokens are a function of request and position, so that each completion is known. On request it
returns a wrong result, of the three kinds of `faulty_rank`.
"""

import hashlib
import itertools
from collections.abc import Iterator

from shared.messages import (
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankReady,
    StepFinished,
    StepPlan,
    ToRank,
)
from shared.transport import codec
from shared.transport.links import Connected, Dialer, Received

VOCABULARY = 4_096

Sampled = tuple[int, int]
"""First prompt token, which identifies the request, and position in its completion."""

_pids = itertools.count(1)


def expected_token(sampled: Sampled) -> int:
    """Return the token that a correct rank samples there."""
    text = b"%d %d" % sampled
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") % VOCABULARY


class ModellessRank:
    """One rank; it opens a new link for each epoch, as a new process would."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self.fault = ""
        """Wrong result of the next step that samples; "" afterwards."""
        self.faulty_samples: list[Sampled] = []
        """Everything that this step sampled."""
        self.joined = 0
        """Number of epochs that this rank has joined."""
        self.answered = 0
        """Number of plans that it has answered."""
        self._open_link()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Execute arrived orders and plans."""
        for event in self._link.poll(timeout_s):
            match event:
                case Connected():
                    self._link.send(self._hello())
                case Received(message=JoinWorld() as order):
                    self._epoch = order.epoch
                    self.joined += 1
                    self._link.send(self._ready(), self._epoch)
                case Received(message=StepPlan() as plan):
                    self._link.send(self._finish(plan), self._epoch)
                    self.answered += 1
                case Received(message=LeaveWorld()):
                    self.close()
                    self._open_link()
                    return
                case _:
                    pass

    def close(self) -> None:
        """Close the link without waiting for unsent messages."""
        self._link.close(wait_s=0.0)

    def _open_link(self) -> None:
        self._epoch = 0
        self._digest = b""
        self._sequences: dict[int, tuple[int, int]] = {}
        """By sequence id: first prompt token, and the position that is sampled next."""
        self._link: Dialer[ToRank] = Dialer(self._address, "rank", ToRank)

    def _finish(self, plan: StepPlan) -> StepFinished:
        for sequence_id in plan.dropped:
            del self._sequences[sequence_id]
        for admitted in plan.admitted:
            position = len(admitted.tokens) - admitted.prompt_tokens
            self._sequences[admitted.sequence_id] = (admitted.tokens[0], position)
        sampled = [self._advance(sequence_id) for sequence_id in _samples(plan)]
        tokens = [expected_token(one) for one in sampled]
        fault = self.fault if len(set(tokens)) > 1 else ""
        if fault:
            self.fault, self.faulty_samples = "", sampled
        if fault == "token":
            tokens[0] ^= 1
        elif fault == "row":
            at = next(at for at, token in enumerate(tokens) if token != tokens[0])
            tokens[0], tokens[at] = tokens[at], tokens[0]
        text = self._digest + codec.encode(plan) + repr(tokens).encode()
        self._digest = hashlib.blake2b(text, digest_size=16).digest()
        flipped = bytes([self._digest[0] ^ (fault == "digest")]) + self._digest[1:]
        return StepFinished(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rank=self._rank,
            digest=flipped,
            tokens=[[token] for token in tokens] if self._rank == 0 else [],
            busy_ms=1.0,
            idle_ms=0.0,
            memory_bytes=0,
        )

    def _advance(self, sequence_id: int) -> Sampled:
        first, position = self._sequences[sequence_id]
        self._sequences[sequence_id] = (first, position + 1)
        return first, position

    def _hello(self) -> RankHello:
        return RankHello(
            rank=self._rank,
            host="nowhere",
            pid=next(_pids),
            data_address=f"127.0.0.1:{self._rank + 1}",
            launched=False,
            device="none",
            mlx_version="none",
            memory_bytes=2**40,
        )

    def _ready(self) -> RankReady:
        return RankReady(
            rank=self._rank,
            model_fingerprint="none",
            kv_bytes_per_token=1,
            kv_bytes_per_row=0,
            kv_budget_bytes=2**40,
            context_tokens_max=2**15,
            vocab_size=VOCABULARY,
            can_roll_back=True,
            blas="",
        )


def _samples(plan: StepPlan) -> Iterator[int]:
    """Yield the sequences that sample, in the order of the receipt's tokens."""
    yield from (chunk.sequence_id for chunk in plan.prefill_chunks if chunk.samples)
    yield from plan.decodes
