"""`lockstep bench gateway`: how many streamed tokens per second one gateway process writes.

This process plays the scheduler: a Listener that sends every step's tokens as one message, as fast
as the clients receive them, never more than a window of steps ahead. The gateway is the real one,
on a core of its own where the system can do that; this process and the clients share the others.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, positive_int, positive_ints
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

SUMMARY = "how many streamed tokens per second one gateway writes"
COLUMNS = [
    "tokens_per_s",
    "gateway_cpu_us_per_token",
    "tokens_per_cpu_s",
    "gateway_core_share",
    "tokens_per_event",
]
GATEWAY = "gateway"


class GatewayPlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    streams: list[int]
    windows: list[int]
    """Steps that may be under way between this process and the clients."""
    tokens: int
    """Over all streams, per repeat."""
    repeats: int
    log_folder: Path
    tries: int = 1
    """Measurements of one repeat while others use the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument("--streams", type=positive_ints, default=[16, 64], help="comma-separated")
    parser.add_argument("--windows", type=positive_ints, default=[4, 64], help="steps under way")
    parser.add_argument(
        "--tokens", type=positive_int, default=300_000, help="over all streams, per repeat"
    )


def make_plan(asked: BenchmarkOptions) -> GatewayPlan:
    """Return what the command line asks for.

    Raises:
        UsageError: there is no such model.
        UnavailableError: a model could not be made.
    """
    arguments = asked.arguments
    return GatewayPlan(
        model=asked.model,
        streams=arguments.streams,
        windows=arguments.windows,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        log_folder=asked.logs,
        tries=arguments.tries,
    )


class FakeScheduler:
    """The scheduler's side of the link."""

    def __init__(self, address: str, progress_file: Path, words: list[int]) -> None:
        self._link: Listener[Any] = Listener(address, ToScheduler)
        self._progress = SharedCounter(progress_file)
        self._words = words
        self._status_at_s = 0.0

    def close(self) -> None:
        """End the link."""
        self._link.close(wait_s=0.5)

    def serve(self, seconds: float) -> list[tuple[PeerId, SubmitRequest]]:
        """Answer what arrives for a while; return the requests among it, accepted."""
        submitted: list[tuple[PeerId, SubmitRequest]] = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not submitted:
            submitted += self._turn(0.02)
        return submitted

    def feed(self, streams: int, tokens_each: int, window_steps: int, timeout_s: float) -> None:
        """Wait for `streams` requests, then give each `tokens_each` tokens.

        Raises:
            UnavailableError: the requests do not come, or their tokens do not arrive.
        """
        until_s = time.monotonic() + timeout_s
        open_requests: list[tuple[PeerId, SubmitRequest]] = []
        while len(open_requests) < streams:
            open_requests += self._turn(0.02)
            if time.monotonic() > until_s:
                raise UnavailableError(f"{len(open_requests)} of {streams} requests came.")
        peer = open_requests[0][0]
        names = [request.request_id for _, request in open_requests]
        for step in range(tokens_each):
            while step * streams - self._progress.get() > window_steps * streams:
                self._turn(0.0)
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
                self._turn(0.0)
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
        self._turn(0.0)

    def _send(self, peer: PeerId, message: Any) -> None:
        while True:
            try:
                self._link.send(peer, message)
            except LinkFull:
                self._turn(0.001)
            else:
                return

    def _turn(self, timeout_s: float) -> list[tuple[PeerId, SubmitRequest]]:
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
    """Flood a gateway with every number of streams.

    Raises:
        UnavailableError: it does not start, or tokens get lost.
    """
    mark, words = PromptGenerator(plan.model).marked_words()
    pinned = CorePinning()
    report = Report(
        benchmark="gateway",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "tokens": plan.tokens,
            "repeats": plan.repeats,
            "message": "all tokens of one step, one per stream",
            "gateway_core": pinned.note,
        },
    )
    with _rig(plan, pinned, mark, words) as rig:
        for streams in plan.streams:
            for window in plan.windows:
                print_progress(f"{streams} streams, {window} steps under way")
                report.cases.append(_case(plan, streams, window, rig))
    noise.add_noise_note(report)
    return report


@dataclasses.dataclass(frozen=True, slots=True)
class _Rig:
    """What runs during a measurement."""

    feeder: FakeScheduler
    gateway: MeasuredProcess
    client: MeasuredProcess
    port: int
    mark: str
    """What every token's text holds once."""


@contextlib.contextmanager
def _rig(plan: GatewayPlan, pinned: "CorePinning", mark: str, words: list[int]) -> Iterator[_Rig]:
    with contextlib.ExitStack() as cleanup:
        name = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        folder = Path(name)
        feeder = FakeScheduler(f"ipc://{folder}/gateways.sock", folder / "progress", words)
        cleanup.callback(feeder.close)
        cleanup.callback(pinned.undo)
        port = free_port()
        pinned.to_first()
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
        pinned.to_others()
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
        _wait(feeder, gateway, port)
        yield _Rig(feeder, gateway, client, port, mark)


class CorePinning:
    """Keeps the gateway and everything else on different cores, where the system can do that."""

    def __init__(self) -> None:
        self._cores: list[int] = []
        if sys.platform == "linux":
            self._cores = sorted(os.sched_getaffinity(0))
        self.note = "its own" if len(self._cores) >= 2 else "shared"

    def to_first(self) -> None:
        """Processes started from here on run on the first core."""
        self._set(self._cores[:1])

    def to_others(self) -> None:
        """This process, and those it starts from here on, run on the other cores."""
        self._set(self._cores[1:])

    def undo(self) -> None:
        """Run on all cores again."""
        self._set(self._cores)

    def _set(self, cores: list[int]) -> None:
        if sys.platform == "linux" and len(self._cores) >= 2:
            os.sched_setaffinity(0, cores)


def _wait(feeder: FakeScheduler, gateway: MeasuredProcess, port: int) -> None:
    until_s = time.monotonic() + 60.0
    while get_json(port, "/readyz", timeout_s=1.0)[0] != 200:
        feeder.serve(0.2)
        if gateway.process.poll() is not None:
            raise gateway.failure(f"ended with exit code {gateway.process.returncode}")
        if time.monotonic() > until_s:
            raise gateway.failure("was not ready in time")


def _case(plan: GatewayPlan, streams: int, window: int, rig: _Rig) -> Case:
    case = Case(conditions={"streams": streams, "steps_under_way": window})
    _flood(streams, max(100, plan.tokens // 5 // streams), window, rig)
    for _ in range(plan.repeats):
        tokens_each = max(100, plan.tokens // streams)

        def one(tokens_each: int = tokens_each) -> dict[str, float | None]:
            return _flood(streams, tokens_each, window, rig)

        metrics, foreign = noise.measure_with_retries(one, plan.tries)
        case.series_of(GATEWAY).add(metrics | {noise.FOREIGN_CORES: foreign})
    return case


def _flood(streams: int, tokens_each: int, window: int, rig: _Rig) -> dict[str, float | None]:
    body = {
        "model": "bench",
        "prompt": [1, 2, 3],
        "max_tokens": tokens_each,
        "temperature": 0,
        "stream": True,
    }
    cpu_s = machine.cpu_seconds(rig.gateway.pid) or 0.0
    rig.client.send(
        {
            "port": rig.port,
            "path": "/v1/completions",
            "body": body,
            "streams": streams,
            "mark": rig.mark,
            "timeout_s": 120.0,
        }
    )
    rig.feeder.feed(streams, tokens_each, window, timeout_s=120.0)
    answer = rig.client.receive()
    cpu_s = (machine.cpu_seconds(rig.gateway.pid) or 0.0) - cpu_s
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
