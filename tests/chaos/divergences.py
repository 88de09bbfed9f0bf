"""A thousand mismatched receipts at a real scheduler: no token of such a step is released.

The scheduler is a real process and the links are real. The ranks run in this process without a
model, because a thousand loads would take an hour. The faults wrong-digest, wrong-token and
wrong-row of `python -m tests.chaos` do the same to real ranks, but less often.

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
    token_ids,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Received
from tests.chaos.cluster import processes
from tests.chaos.cluster.faulty_rank import RESULT_FAULTS
from tests.chaos.cluster.modelless_rank import VOCABULARY, ModellessRank, expected_token
from tests.chaos.cluster.stack import DeadlineExceeded, StackOptions, wait_for
from tests.chaos.cluster.unsupervised_stack import UnsupervisedStack

PROMPT_TOKENS = 4
COMPLETION_TOKENS = 40
STEPS_BEFORE_FAULT_MAX = 12
STEP_DEADLINE_S = 20.0
LISTEN_S = 0.01
"""Seconds for which the client listens between a fault and the next epoch's first step."""


class _SchedulerOnly(UnsupervisedStack):
    """A stack of the scheduler alone."""

    def __init__(self, ranks: int) -> None:
        super().__init__(
            StackOptions(
                ranks,
                (
                    ("cache.enabled", False),
                    # Each fault ends an epoch; the limit of failed epochs may not apply.
                    ("scheduler.epochs_failed_window_s", 0.001),
                ),
            ),
            roles=("scheduler",),
        )


@dataclasses.dataclass(slots=True)
class Result:
    """Counts of faults, tokens and requests."""

    injected: int = 0
    detected: int = 0
    """Mismatches that the scheduler counted."""
    released: int = 0
    """Tokens of a faulty step that were released before the next epoch computed them again."""
    wrong: int = 0
    """Tokens that are different, duplicated or missing."""
    complete: int = 0
    """Requests that have finished."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether each fault was detected and no token of it released."""
        return self.injected == self.detected and not self.released and not self.wrong


class Client:
    """Keeps `streams` requests open, in place of a gateway."""

    def __init__(self, address: str, streams: int, result: Result) -> None:
        self._link: Dialer[ToGateway] = Dialer(address, "gateway-chaos", ToGateway)
        self._result = result
        self._open: dict[str, tuple[int, int]] = {}
        """By request id: first prompt token, and number of received tokens."""
        self._streams = streams
        self._next = 0
        self.is_ready = False
        self.reports = 0
        self.mismatches = 0.0
        """Value of the last status report."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process arrived messages and submit requests in place of finished ones."""
        for event in self._link.poll(timeout_s):
            self._handle(event)
        while self.is_ready and len(self._open) < self._streams:
            self._submit()

    def received(self, first: int) -> int:
        """Return the number of received tokens of the request with this first prompt token."""
        # A request that is no longer open has received all tokens.
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
                prompt=token_ids.pack([first, *range(PROMPT_TOKENS - 1)]),
                sampling=Sampling(seed=1, temperature=0.0),
                max_tokens=COMPLETION_TOKENS,
            )
        )

    def _handle(self, event: LinkEvent[ToGateway]) -> None:
        match event:
            case Received(message=TokensGenerated() as message):
                columns = zip(message.request_ids, message.positions, message.tokens, strict=True)
                for name, position, tokens in columns:
                    self._check_tokens(name, position, tokens)
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
                raise DeadlineExceeded(f"a request failed: {message}")
            case _:
                pass

    def _check_tokens(self, name: str, position: int, tokens: list[int]) -> None:
        first, count = self._open[name]
        expected = [expected_token((first, count + at)) for at in range(len(tokens))]
        self._result.wrong += len(tokens) if position != count or tokens != expected else 0
        self._open[name] = (first, count + len(tokens))


def run(count: int, ranks: int, streams: int, seed: int) -> Result:
    """Inject `count` faults, one per epoch.

    Raises:
        DeadlineExceeded: an expected event did not happen in time.
    """
    result, rng = Result(), random.Random(seed)
    stack = _SchedulerOnly(ranks)
    workers: list[ModellessRank] = []
    client = None
    began_s = time.monotonic()
    try:
        stack.launch()
        workers = [ModellessRank(stack.config.rank_address, rank) for rank in range(ranks)]
        client = Client(stack.config.gateway_address, streams, result)
        _poll_until(workers, client, lambda: client.is_ready, "the world is not ready")
        for _ in range(count):
            _inject_once(workers, client, result, rng)
        result.detected = _mismatches(workers, client)
        result.seconds = time.monotonic() - began_s
        return result
    except DeadlineExceeded:
        print(stack.log.tail())
        raise
    finally:
        for worker in workers:
            worker.close()
        if client is not None:
            client.close()
        stack.close()
        stack.remove()


def _inject_once(
    workers: list[ModellessRank], client: Client, result: Result, rng: random.Random
) -> None:
    """Inject one fault after some steps; count its tokens that the client receives."""
    due = workers[0].answered + rng.randrange(STEPS_BEFORE_FAULT_MAX)
    _poll_until(workers, client, lambda: workers[0].answered >= due, "no step was executed")
    faulty = rng.choice(workers)
    faulty.fault = rng.choice(RESULT_FAULTS)
    _poll_until(workers, client, lambda: not faulty.fault, "no step could return the fault")
    result.injected += 1
    joined = [worker.joined for worker in workers]

    def have_joined() -> bool:
        # A rank that has joined is not polled, so that the next epoch computes no step yet.
        for worker, before in zip(workers, joined, strict=True):
            if worker.joined == before:
                worker.poll(0.001)
        return all(worker.joined > before for worker, before in zip(workers, joined, strict=True))

    failure = f"no epoch followed fault {result.injected}"
    wait_for(have_joined, STEP_DEADLINE_S, failure, poll_s=0.0)
    client.poll(LISTEN_S)
    result.released += sum(
        client.received(first) > position for first, position in faulty.faulty_samples
    )


def _mismatches(workers: list[ModellessRank], client: Client) -> int:
    """Return the number of mismatches that the scheduler reports."""
    reports = client.reports
    _poll_until(workers, client, lambda: client.reports > reports, "no status was reported")
    return int(client.mismatches)


def _poll_until(
    workers: list[ModellessRank], client: Client, condition: Callable[[], bool], failure: str
) -> None:
    """Poll ranks and client until `condition` holds."""

    def holds() -> bool:
        if not condition():
            for worker in workers:
                worker.poll(0.001)
            client.poll()
        return condition()

    wait_for(holds, STEP_DEADLINE_S, failure, poll_s=0.0)


def main() -> int:
    """Run the command line."""
    processes.treat_sigterm_as_interrupt()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.divergences")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        result = run(options.count, options.ranks, options.streams, options.seed)
    except DeadlineExceeded as error:
        print(f"BAD: {error}")
        return 1
    print(
        f"{result.injected} faults injected, {result.detected} detected in {result.seconds:.1f} s: "
        f"{result.released} tokens of a faulty step released, {result.wrong} tokens wrong, "
        f"{result.complete} requests complete: {'good' if result.is_good else 'BAD'}"
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
