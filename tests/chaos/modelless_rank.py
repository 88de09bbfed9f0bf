"""A rank without a model, for as many epochs as one likes: real messages over real sockets.

Its tokens are a function of the request and the position, so that every completion is known. It
lies when it is told to, in the three ways of `lying_rank`.
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
"""The first token of a request's prompt, which no other has, and a position in its completion."""

_pids = itertools.count(1)


def true_token(sampled: Sampled) -> int:
    """Return the token that every honest rank samples there."""
    text = b"%d %d" % sampled
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") % VOCABULARY


class ModellessRank:
    """One rank; each epoch gets a new link, as it would get a new process."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self.lie = ""
        """What the next step that samples lies about; "" after it has."""
        self.lied_about: list[Sampled] = []
        """What that step sampled."""
        self.joined = 0
        """Epochs that this rank has entered."""
        self.answered = 0
        """Plans that it has answered."""
        self._begin()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take orders and answer them."""
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
                    self._begin()
                    return
                case _:
                    pass

    def close(self) -> None:
        """End the link without waiting for anything."""
        self._link.close(wait_s=0.0)

    def _begin(self) -> None:
        self._epoch = 0
        self._digest = b""
        self._sequences: dict[int, tuple[int, int]] = {}
        """Sequence id -> first token of its prompt, position that is sampled next."""
        self._link: Dialer[ToRank] = Dialer(self._address, "rank", ToRank)

    def _finish(self, plan: StepPlan) -> StepFinished:
        for sequence_id in plan.dropped:
            del self._sequences[sequence_id]
        for admitted in plan.admitted:
            position = len(admitted.tokens) - admitted.prompt_tokens
            self._sequences[admitted.sequence_id] = (admitted.tokens[0], position)
        sampled = [self._advance(sequence_id) for sequence_id in _samples(plan)]
        tokens = [true_token(one) for one in sampled]
        lie = self.lie if len(set(tokens)) > 1 else ""
        if lie:
            self.lie, self.lied_about = "", sampled
        if lie == "token":
            tokens[0] ^= 1
        elif lie == "row":
            at = next(at for at, token in enumerate(tokens) if token != tokens[0])
            tokens[0], tokens[at] = tokens[at], tokens[0]
        text = self._digest + codec.encode(plan) + repr(tokens).encode()
        self._digest = hashlib.blake2b(text, digest_size=16).digest()
        flipped = bytes([self._digest[0] ^ (lie == "digest")]) + self._digest[1:]
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
    """Yield the sequences that sample, in the order of a receipt's tokens."""
    yield from (chunk.sequence_id for chunk in plan.prefill_chunks if chunk.samples)
    yield from plan.decodes
