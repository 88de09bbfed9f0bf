"""`lockstep bench gateway`: streamed tokens per second that one gateway process writes.

This process plays the scheduler: it sends the tokens of each step as one message, as fast as the
clients receive them, and at most a window of steps ahead. The gateway is the real one, on a core of
its own where the system supports that; this process and the clients share the other cores.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, number_option, numbers_option
from services.commands.bench.load.counting_client import SharedCounter
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import (
    LOCKSTEP_COMMAND,
    MeasuredProcess,
    free_port,
    get_json,
    print_progress,
)
from services.commands.bench.measuring.report import Case, Report
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

SUMMARY = "streamed tokens per second that one gateway writes"
COLUMNS = [
    "tokens_per_s",
    "gateway_cpu_us_per_token",
    "tokens_per_cpu_s",
    "gateway_core_share",
    "tokens_per_event",
]
GATEWAY = "gateway"


class GatewayPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench gateway`, from its command line."""

    model: Path
    streams: list[int]
    windows: list[int]
    """Steps that may be in flight between this process and the clients."""
    tokens: int
    """Tokens per repeat over all streams."""
    repeats: int
    log_folder: Path
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--streams", "Numbers of concurrent streams", "16,64"),
    numbers_option("--windows", "Numbers of steps in flight", "4,64"),
    number_option("--tokens", "Tokens per repeat over all streams", 300_000),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> GatewayPlan:
    """Return the gateway benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when the model does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    return GatewayPlan(
        model=options.model,
        streams=arguments.streams,
        windows=arguments.windows,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        log_folder=options.logs,
        tries=arguments.tries,
    )


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

    def serve(self, seconds: float) -> list[tuple[PeerId, SubmitRequest]]:
        """Answer the gateway until a request arrives or `seconds` pass; return (peer, request)s."""
        submitted: list[tuple[PeerId, SubmitRequest]] = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not submitted:
            submitted += self._poll(0.02)
        return submitted

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
                case _:
                    pass
        now_s = time.monotonic()
        if now_s - self._status_at_s > 0.5:
            self._status_at_s = now_s
            for peer in self._link.peers:
                self._link.send(peer, _status())
        return submitted


def measure(plan: GatewayPlan) -> Report:
    """Measure tokens/s of one gateway for each number of streams and of steps in flight.

    A step is in flight from the sending of its tokens until the clients have read them.

    Raises:
        UnavailableError: when the gateway does not start or loses tokens.
    """
    mark, words = PromptGenerator(plan.model).marked_words()
    pinning = CorePinning()
    report = Report(
        benchmark="gateway",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "tokens": plan.tokens,
            "repeats": plan.repeats,
            "message": "all tokens of one step, one per stream",
            "gateway_core": pinning.note,
        },
    )
    with _started_testbed(plan, pinning, mark, words) as testbed:
        for streams in plan.streams:
            for window in plan.windows:
                print_progress(f"{streams} streams, {window} steps in flight")
                report.cases.append(_measure_case(plan, streams, window, testbed))
    noise.add_noise_note(report)
    return report


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
    plan: GatewayPlan, pinning: "CorePinning", mark: str, words: list[int]
) -> Iterator[_Testbed]:
    with contextlib.ExitStack() as cleanup:
        name = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        folder = Path(name)
        scheduler = FakeScheduler(f"ipc://{folder}/gateways.sock", folder / "progress", words)
        cleanup.callback(scheduler.close)
        cleanup.callback(pinning.undo)
        port = free_port()
        pinning.to_first()
        gateway = MeasuredProcess(
            "the gateway",
            [*LOCKSTEP_COMMAND, "gateway"],
            plan.log_folder / "gateway.log",
            {
                "LOCKSTEP_PATHS_RUN_DIR": name,
                "LOCKSTEP_MODEL_PATH": str(plan.model),
                "LOCKSTEP_MODEL_SERVED_NAME": "bench",
                "LOCKSTEP_GATEWAY_HOST": "127.0.0.1",
                "LOCKSTEP_GATEWAY_PORT": str(port),
                "HF_HUB_OFFLINE": "1",
            },
        )
        cleanup.callback(gateway.stop)
        pinning.to_others()
        client = MeasuredProcess(
            "the clients",
            [
                sys.executable,
                "-m",
                "services.commands.bench.load.counting_client",
                str(folder / "progress"),
            ],
            plan.log_folder / "flood.log",
            piped=True,
        )
        cleanup.callback(client.stop)
        _wait_until_ready(scheduler, gateway, port)
        yield _Testbed(scheduler, gateway, client, port, mark)


class CorePinning:
    """Runs the gateway on the first core and other processes on the other cores (Linux only)."""

    def __init__(self) -> None:
        self._cores: list[int] = []
        if sys.platform == "linux":
            self._cores = sorted(os.sched_getaffinity(0))
        self.note = "its own" if len(self._cores) >= 2 else "shared"

    def to_first(self) -> None:
        """Pin this process, and so those that it starts next, to the first core."""
        self._set(self._cores[:1])

    def to_others(self) -> None:
        """Pin this process, and so those that it starts next, to all cores but the first."""
        self._set(self._cores[1:])

    def undo(self) -> None:
        """Let this process run on all cores again; processes that it started stay pinned."""
        self._set(self._cores)

    def _set(self, cores: list[int]) -> None:
        if sys.platform == "linux" and len(self._cores) >= 2:
            os.sched_setaffinity(0, cores)


def _wait_until_ready(scheduler: FakeScheduler, gateway: MeasuredProcess, port: int) -> None:
    until_s = time.monotonic() + 60.0
    while get_json(port, "/readyz", timeout_s=1.0)[0] != 200:
        scheduler.serve(0.2)
        if gateway.process.poll() is not None:
            raise gateway.failure(f"ended with exit code {gateway.process.returncode}")
        if time.monotonic() > until_s:
            raise gateway.failure("was not ready in time")


def _measure_case(plan: GatewayPlan, streams: int, window: int, testbed: _Testbed) -> Case:
    case = Case(conditions={"streams": streams, "steps_under_way": window})
    _stream_tokens(streams, max(100, plan.tokens // 5 // streams), window, testbed)
    for _ in range(plan.repeats):
        tokens_each = max(100, plan.tokens // streams)

        def measure_once(tokens_each: int = tokens_each) -> dict[str, float | None]:
            return _stream_tokens(streams, tokens_each, window, testbed)

        metrics, foreign = noise.measure_with_retries(measure_once, plan.tries)
        case.series_of(GATEWAY).add(metrics | {noise.FOREIGN_CORES: foreign})
    return case


def _stream_tokens(
    streams: int, tokens_each: int, window: int, testbed: _Testbed
) -> dict[str, float | None]:
    body = {
        "model": "bench",
        "prompt": [1, 2, 3],
        "max_tokens": tokens_each,
        "temperature": 0,
        "stream": True,
    }
    cpu_s = machine.cpu_seconds(testbed.gateway.pid) or 0.0
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
    cpu_s = (machine.cpu_seconds(testbed.gateway.pid) or 0.0) - cpu_s
    expected = tokens_each * streams
    if answer["failure"] or answer["tokens"] != expected:
        raise UnavailableError(
            f"{answer.get('tokens', 0)} of {expected} tokens arrived. {answer['failure']}"
        )
    return {
        "tokens_per_s": expected / answer["wall_s"],
        "gateway_cpu_us_per_token": cpu_s * 1e6 / expected,
        "tokens_per_cpu_s": expected / cpu_s if cpu_s else None,
        "gateway_core_share": cpu_s / answer["wall_s"],
        "tokens_per_event": expected / answer["events"] if answer["events"] else None,
    }


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
