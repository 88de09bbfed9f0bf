"""`lockstep bench gateway`: streamed tokens per second that one gateway process writes.

This process plays the scheduler: it sends the tokens of each step as one message, as fast as the
clients receive them, and at most a window of steps ahead. The gateway is the real one, on a core of
its own where the system supports that; this process and the clients share the other cores.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from services.commands.bench.flags import number_option, numbers_option
from services.commands.bench.load.counting_client import SharedCounter
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import (
    LOCKSTEP_COMMAND,
    MeasuredProcess,
    bench_program,
    free_port,
    get_json,
)
from services.commands.bench.measuring.report import Report
from shared.errors import LinkFull, UnavailableError
from shared.identifiers import PeerId
from shared.messages import (
    RankStatus,
    RequestAccepted,
    RequestFinished,
    StatusReported,
    SubmitRequest,
    TokensGenerated,
    ToScheduler,
)
from shared.transport.links import Listener, Received

COLUMNS = [
    "tokens_per_s",
    "gateway_cpu_us_per_token",
    "tokens_per_cpu_s",
    "gateway_core_share",
    "tokens_per_write",
]
GATEWAY = "gateway"


class GatewayPlan(BenchmarkPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench gateway`, from its command line."""

    model: Path
    streams: list[int]
    windows: list[int]
    """Steps that may be in flight between this process and the clients."""
    tokens: int
    """Tokens per repeat over all streams."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--streams", "Numbers of concurrent streams", "16,64"),
    numbers_option("--windows", "Numbers of steps in flight", "4,64"),
    number_option("--tokens", "Tokens per repeat over all streams", 300_000, quick_max=50_000),
]
"""Options of this benchmark."""


class FakeScheduler:
    """The scheduler's end of the gateway's link; accepts all requests and sends made-up tokens.

    `progress_file` holds the clients' count of arrived tokens, `words` the ids of tokens to send.
    """

    def __init__(self, address: str, progress_file: Path, words: list[int]) -> None:
        self._link: Listener[Any] = Listener(address, ToScheduler)
        self._progress = SharedCounter(progress_file)
        self._words = words
        self._status_at_s = 0.0

    def close(self) -> None:
        """Close the link."""
        self._link.close(wait_s=0.5)

    def serve(self, seconds: float) -> None:
        """Acknowledge the gateway's messages and report status for some seconds.

        No request may arrive meanwhile: it would be accepted and get no tokens.
        """
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._poll(0.02)

    def feed(self, streams: int, tokens_each: int, window_steps: int, timeout_s: float) -> None:
        """Wait for requests, then send each step's tokens and at the end finish all requests.

        Args:
            streams: number of requests.
            tokens_each: number of tokens per request.
            window_steps: number of steps whose tokens may be sent before the clients have read
                them; sending pauses beyond it.
            timeout_s: longest time for everything, in seconds.

        Raises:
            UnavailableError: when requests or tokens do not arrive in time.
        """
        until_s = time.monotonic() + timeout_s
        open_requests: list[tuple[PeerId, SubmitRequest]] = []
        while len(open_requests) < streams:
            open_requests += self._poll(0.02)
            if time.monotonic() > until_s:
                raise UnavailableError(f"{len(open_requests)} of {streams} requests arrived.")
        peer = open_requests[0][0]
        names = [request.request_id for _, request in open_requests]
        for step in range(tokens_each):
            while step * streams - self._progress.get() > window_steps * streams:
                self._poll(0.0)
                time.sleep(0.0001)
                if time.monotonic() > until_s:
                    raise UnavailableError(f"Tokens stopped arriving at step {step}.")
            token = self._words[step % len(self._words)]
            self._send(
                peer,
                TokensGenerated(
                    request_ids=names, positions=[step] * streams, tokens=[[token]] * streams
                ),
            )
            if step % 16 == 0:
                self._poll(0.0)
        for name in names:
            self._send(
                peer,
                RequestFinished(
                    request_id=name,
                    finish_reason="length",
                    prompt_tokens=1,
                    completion_tokens=tokens_each,
                ),
            )
        self._poll(0.0)

    def _send(self, peer: PeerId, message: Any) -> None:
        while True:
            try:
                self._link.send(peer, message)
            except LinkFull:
                self._poll(0.001)
            else:
                return

    def _poll(self, timeout_s: float) -> list[tuple[PeerId, SubmitRequest]]:
        submitted = []
        for event in self._link.poll(timeout_s):
            match event:
                case Received(peer=peer, message=SubmitRequest() as request):
                    accepted = RequestAccepted(request_id=request.request_id, queued_ahead=0)
                    self._link.send(peer, accepted)
                    submitted.append((peer, request))
        now_s = time.monotonic()
        if now_s - self._status_at_s > 0.5:
            self._status_at_s = now_s
            for peer in self._link.peers:
                self._link.send(peer, _status())
        return submitted


def measure(plan: GatewayPlan, report: Report) -> None:
    """Measure tokens/s of one gateway for each number of streams and of steps in flight.

    A step is in flight from the sending of its tokens until the clients have read them.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per number of streams and of steps.

    Raises:
        UnavailableError: when the gateway does not start or loses tokens.
    """
    mark, words = PromptGenerator(plan.model).marked_words()
    cores = _cores_to_share()
    report.settings |= {
        "model": plan.model.name,
        "tokens": plan.tokens,
        "repeats": plan.repeats,
        "message": "all tokens of one step, one per stream",
        "gateway_core": "its own" if cores else "shared",
    }
    with _started_testbed(plan, cores, mark, words) as testbed:
        for streams, window in itertools.product(plan.streams, plan.windows):
            stream = functools.partial(_stream_tokens, streams, window, testbed)
            conditions = {"streams": streams, "steps_under_way": window}
            warm_up = functools.partial(stream, max(100, plan.tokens // 5 // streams))
            run = functools.partial(stream, max(100, plan.tokens // streams))
            measure_case(plan, report, conditions, run, warm_up=warm_up)


@dataclasses.dataclass(frozen=True, slots=True)
class _Testbed:
    """Processes and helpers that run during a measurement."""

    scheduler: FakeScheduler
    gateway: MeasuredProcess
    client: MeasuredProcess
    port: int
    mark: str
    """Letter that the text of every token contains exactly once."""


@contextlib.contextmanager
def _started_testbed(
    plan: GatewayPlan, cores: Sequence[int], mark: str, words: list[int]
) -> Iterator[_Testbed]:
    """Start the gateway on the first of these cores, and the clients on the others."""
    with contextlib.ExitStack() as cleanup:
        name = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        folder = Path(name)
        scheduler = FakeScheduler(f"ipc://{folder}/gateways.sock", folder / "progress", words)
        cleanup.callback(scheduler.close)
        cleanup.callback(_run_on, cores)
        port = free_port()
        variables = {
            "LOCKSTEP_PATHS_RUN_DIR": name,
            "LOCKSTEP_MODEL_PATH": str(plan.model),
            "LOCKSTEP_MODEL_SERVED_NAME": "bench",
            "LOCKSTEP_GATEWAY_HOST": "127.0.0.1",
            "LOCKSTEP_GATEWAY_PORT": str(port),
            "HF_HUB_OFFLINE": "1",
        }
        _run_on(cores[:1])
        command = [*LOCKSTEP_COMMAND, "gateway"]
        log = plan.log_folder / "gateway.log"
        gateway = cleanup.enter_context(MeasuredProcess("the gateway", command, log, variables))
        _run_on(cores[1:])
        command = bench_program("load.counting_client", str(folder / "progress"))
        log = plan.log_folder / "flood.log"
        client = cleanup.enter_context(MeasuredProcess("the clients", command, log, piped=True))
        _wait_until_ready(scheduler, gateway, port)
        yield _Testbed(scheduler, gateway, client, port, mark)


def _cores_to_share() -> list[int]:
    """Return the cores of this process if there are several and it can choose, else []."""
    if sys.platform != "linux" or machine.usable_cores() < 2:
        return []
    return sorted(os.sched_getaffinity(0))


def _run_on(cores: Sequence[int]) -> None:
    """Pin this process, and so those that it starts next, to these cores; []: change nothing."""
    if sys.platform == "linux" and cores:
        os.sched_setaffinity(0, cores)


def _wait_until_ready(scheduler: FakeScheduler, gateway: MeasuredProcess, port: int) -> None:
    until_s = time.monotonic() + 60.0
    while get_json(port, "/readyz", timeout_s=1.0)[0] != 200:
        scheduler.serve(0.2)
        gateway.require_running()
        if time.monotonic() > until_s:
            raise gateway.failure("was not ready in time")


def _stream_tokens(
    streams: int, window: int, testbed: _Testbed, tokens_each: int
) -> dict[str, dict[str, float | None]]:
    body = {
        "model": "bench",
        "prompt": [1, 2, 3],
        "max_tokens": tokens_each,
        "temperature": 0,
        "stream": True,
    }
    cpu_s = machine.cpu_seconds(testbed.gateway.pid)
    testbed.client.send(
        {
            "port": testbed.port,
            "path": "/v1/completions",
            "body": body,
            "streams": streams,
            "mark": testbed.mark,
            "timeout_s": 120.0,
        }
    )
    testbed.scheduler.feed(streams, tokens_each, window, timeout_s=120.0)
    answer = testbed.client.receive()
    cpu_s = machine.cpu_seconds(testbed.gateway.pid) - cpu_s
    expected = tokens_each * streams
    if answer["failure"] or answer["tokens"] != expected:
        raise UnavailableError(
            f"{answer.get('tokens', 0)} of {expected} tokens arrived. {answer['failure']}"
        )
    metrics = {
        "tokens_per_s": expected / answer["wall_s"],
        "gateway_cpu_us_per_token": cpu_s * 1e6 / expected,
        "tokens_per_cpu_s": expected / cpu_s if cpu_s else None,
        "gateway_core_share": cpu_s / answer["wall_s"],
        "tokens_per_write": expected / answer["chunks"] if answer["chunks"] else None,
    }
    return {GATEWAY: metrics}


def _status() -> StatusReported:
    return StatusReported(
        ready=True,
        reason="",
        draining=False,
        model="bench",
        model_fingerprint="bench",
        epoch=1,
        world_size=1,
        backend="off",
        ranks=[RankStatus(rank=0, state="ready", loaded=1.0)],
        running=0,
        waiting=0,
        kv_tokens_used=0,
        kv_tokens_max=1_000_000,
        context_tokens_max=1_000_000,
        steps=1,
        counters={},
        gauges={},
    )
