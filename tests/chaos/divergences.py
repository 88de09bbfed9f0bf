"""A thousand receipts that differ, given to a real scheduler: no token of such a step leaves.

The scheduler is a real process and the links are real; the ranks live in this process and have no
model, because a thousand loads would take an hour. The faults lie-digest, lie-token and lie-row of
`python -m tests.chaos` do the same to real ranks, some tens of times.

    python -m tests.chaos.divergences [--count 1000] [--ranks 2] [--streams 16] [--seed S]
"""

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable

from shared.messages import (
    RequestFinished,
    Sampling,
    StatusReported,
    SubmitRequest,
    ToGateway,
    TokensGenerated,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Received
from tests.chaos import processes
from tests.chaos.lying_rank import KINDS
from tests.chaos.modelless_rank import VOCABULARY, ModellessRank, true_token
from tests.chaos.parts import Parts
from tests.chaos.stack import Shape, Stuck

PROMPT_TOKENS = 4
COMPLETION_TOKENS = 40
STEPS_BEFORE_LIE_MAX = 12
STEP_DEADLINE_S = 20.0
LISTEN_S = 0.01
"""After a lie, before the next epoch computes anything, the client listens for so long."""


class _SchedulerOnly(Parts):
    """The one process that is tested here."""

    def __init__(self, ranks: int) -> None:
        super().__init__(
            Shape(
                ranks,
                (
                    ("cache.enabled", False),
                    # All of these failures are wanted: the bound on failed epochs must not hold.
                    ("scheduler.epochs_failed_window_s", 0.001),
                ),
            ),
            roles=("scheduler",),
        )


@dataclasses.dataclass(slots=True)
class Result:
    """What came of the lies."""

    told: int = 0
    found: int = 0
    """Mismatches that the scheduler counted."""
    released: int = 0
    """Tokens of a step with a lie that left before the next epoch computed them again."""
    wrong: int = 0
    """Tokens that differ, are there twice, or are missing."""
    complete: int = 0
    """Requests that ended with all their tokens."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether every lie was found and nothing of it left."""
        return self.told == self.found and not self.released and not self.wrong


class Client:
    """Keeps so many requests open, in place of a gateway."""

    def __init__(self, address: str, streams: int, result: Result) -> None:
        self._link: Dialer[ToGateway] = Dialer(address, "gateway-chaos", ToGateway)
        self._result = result
        self._open: dict[str, tuple[int, int]] = {}
        """Request id -> first token of its prompt, tokens received."""
        self._streams = streams
        self._next = 0
        self.is_ready = False
        self.reports = 0
        self.mismatches = 0.0
        """As the last status report says."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has arrived; keep the number of requests up."""
        for event in self._link.poll(timeout_s):
            self._take(event)
        while self.is_ready and len(self._open) < self._streams:
            self._submit()

    def received(self, first: int) -> int:
        """Return how many tokens of the request with this first prompt token have come."""
        # One that is not open any more has received all.
        counts = (count for token, count in self._open.values() if token == first)
        return next(counts, COMPLETION_TOKENS)

    def close(self) -> None:
        """End the link."""
        self._link.close(wait_s=0.0)

    def _submit(self) -> None:
        used = {first for first, _ in self._open.values()}
        while (first := self._next % VOCABULARY) in used:
            self._next += 1
        name = f"r{self._next}"
        self._next += 1
        self._open[name] = (first, 0)
        self._link.send(
            SubmitRequest(
                request_id=name,
                prompt=[first, *range(PROMPT_TOKENS - 1)],
                sampling=Sampling(seed=1, temperature=0.0),
                max_tokens=COMPLETION_TOKENS,
            )
        )

    def _take(self, event: LinkEvent[ToGateway]) -> None:
        match event:
            case Received(message=TokensGenerated() as message):
                columns = zip(message.request_ids, message.positions, message.tokens, strict=True)
                for name, position, tokens in columns:
                    self._take_tokens(name, position, tokens)
            case Received(message=RequestFinished() as message):
                _, count = self._open.pop(message.request_id)
                self._result.complete += 1
                self._result.wrong += abs(count - COMPLETION_TOKENS)
            case Received(message=StatusReported() as message):
                self.reports += 1
                self.mismatches = message.counters.get("receipts_mismatched_total", 0.0)
                self.is_ready = self.is_ready or message.ready
            case Connected():
                pass
            case Received(message=message) if "Fail" in type(message).__name__:
                raise Stuck(f"a request failed: {message}")
            case _:
                pass

    def _take_tokens(self, name: str, position: int, tokens: list[int]) -> None:
        first, count = self._open[name]
        wanted = [true_token((first, count + at)) for at in range(len(tokens))]
        self._result.wrong += len(tokens) if position != count or tokens != wanted else 0
        self._open[name] = (first, count + len(tokens))


def run(count: int, ranks: int, streams: int, seed: int) -> Result:
    """Tell `count` lies, one in each epoch.

    Raises:
        Stuck: something did not happen in time.
    """
    result, chance = Result(), random.Random(seed)
    stack = _SchedulerOnly(ranks)
    workers: list[ModellessRank] = []
    client = None
    began_s = time.monotonic()
    try:
        stack.launch()
        workers = [ModellessRank(stack.config.rank_address, rank) for rank in range(ranks)]
        client = Client(stack.config.gateway_address, streams, result)
        _until(workers, client, lambda: client.is_ready)
        for _ in range(count):
            _lie_once(workers, client, result, chance)
        result.found = _mismatches(workers, client)
        result.seconds = time.monotonic() - began_s
        return result
    except Stuck:
        print(stack.log.tail())
        raise
    finally:
        for worker in workers:
            worker.close()
        if client is not None:
            client.close()
        stack.close()
        stack.remove()


def _lie_once(
    workers: list[ModellessRank], client: Client, result: Result, chance: random.Random
) -> None:
    """Let some steps pass, tell one lie, and look what the client got before the next epoch."""
    due = workers[0].answered + chance.randrange(STEPS_BEFORE_LIE_MAX)
    _until(workers, client, lambda: workers[0].answered >= due)
    liar = chance.choice(workers)
    liar.lie = chance.choice(KINDS)
    _until(workers, client, lambda: not liar.lie)
    result.told += 1
    joined = [worker.joined for worker in workers]
    # The next epoch computes nothing before all ranks are polled once more.
    until_s = time.monotonic() + STEP_DEADLINE_S
    while any(worker.joined == before for worker, before in zip(workers, joined, strict=True)):
        for worker, before in zip(workers, joined, strict=True):
            if worker.joined == before:
                worker.poll(0.001)
        if time.monotonic() > until_s:
            raise Stuck(f"no epoch followed lie {result.told} within {STEP_DEADLINE_S:.0f} s")
    client.poll(LISTEN_S)
    result.released += sum(client.received(first) > position for first, position in liar.lied_about)


def _mismatches(workers: list[ModellessRank], client: Client) -> int:
    """Return how many mismatches the scheduler says it has seen."""
    reports = client.reports
    _until(workers, client, lambda: client.reports > reports)
    return int(client.mismatches)


def _pump(workers: list[ModellessRank], client: Client) -> None:
    for worker in workers:
        worker.poll(0.001)
    client.poll()


def _until(workers: list[ModellessRank], client: Client, done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + STEP_DEADLINE_S
    while not done():
        _pump(workers, client)
        if time.monotonic() > until_s:
            raise Stuck(f"what was waited for did not come within {STEP_DEADLINE_S:.0f} s")


def main() -> int:
    """Run the command line."""
    processes.end_as_interrupted()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.divergences")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        result = run(options.count, options.ranks, options.streams, options.seed)
    except Stuck as error:
        print(f"BAD: {error}")
        return 1
    print(
        f"{result.told} lies told, {result.found} found in {result.seconds:.1f} s: "
        f"{result.released} tokens of a step with a lie released, {result.wrong} tokens wrong, "
        f"{result.complete} requests complete: {'good' if result.is_good else 'BAD'}"
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
