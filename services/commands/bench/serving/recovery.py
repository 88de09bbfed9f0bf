"""`lockstep bench recovery`: how long streams pause when a rank is killed, and where the time goes.

Clients stream without end from a whole stack. Each repeat kills one rank with SIGKILL, the ranks in
turn, once the previous recovery is `--interval` seconds old, so that spare processes wait again;
with `--set rank_worker.spare=loaded` also once these have loaded.
The pause lasts from the kill to the first token of the next epoch; the scheduler's log divides it.
"""

import http.client
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from services.commands.bench.flags import number_option
from services.commands.bench.load.load_processes import COMPLETIONS, request_body
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import FOREIGN_CORES, Measured, measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.stack import Stack, started_stack
from services.commands.bench.serving.overhead import STACK
from shared.clock import SystemClock, unix_time_s
from shared.errors import UnavailableError

PARTS = {
    "noticed_ms": "epoch_ended",
    "processes_ms": "epoch_begins",
    "ready_ms": "world_ready",
}
"""Metric -> event of the scheduler's log at which that part of a pause ends."""
COLUMNS = ["pause_ms", *PARTS, "first_token_ms", FOREIGN_CORES]
RECOVERY_MAX_S = 120.0
SPARES_MAX_S = 300.0
"""Longest wait for spare processes that load the model."""
KEEPALIVE_S = "300"
_POLL_S = 0.02


class RecoveryPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench recovery`, from its command line."""

    clients: int
    """Streams that run all the time."""
    prompt_tokens: int
    new_tokens: int
    interval: int
    """Seconds from a recovery to the next kill."""


OPTIONS: list[click.Parameter] = [
    number_option("--clients", "Streams that run all the time", 1),
    number_option("--prompt-tokens", "Tokens of each prompt", 64),
    number_option("--new-tokens", "Completion length, after which a stream begins anew", 1_024),
    number_option("--interval", "Seconds from a recovery to the next kill", 12),
    number_option("--ranks", "World size", 1),
]
"""Options of this benchmark."""


def measure(plan: RecoveryPlan, report: Report) -> None:
    """Kill ranks in turn while clients stream; measure each pause and its parts.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case.

    Raises:
        UnavailableError: when the stack does not start, or streams do not continue after a kill.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "clients": plan.clients,
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "interval_s": plan.interval,
        "repeats": plan.repeats,
        **plan.settings,
    }
    victims = itertools.cycle(range(plan.ranks))
    # Without keep-alive chunks in the pause every event of a stream is a token.
    settings = {"LOCKSTEP_LOG_FORMAT": "json", "LOCKSTEP_GATEWAY_KEEPALIVE_S": KEEPALIVE_S}
    with started_stack(plan, report, **settings) as stack:
        streams = [
            EndlessStream(stack, request_body(stack.model, plan.new_tokens, prompt=prompt))
            for ((prompt,),) in (
                prompts.token_work(1, 1, plan.prompt_tokens) for _ in range(plan.clients)
            )
        ]

        def measure_kill() -> Measured:
            time.sleep(plan.interval)
            if stack.config.rank_worker.spare == "loaded":
                _wait_for_loaded_spares(stack)
            return {STACK: _kill_and_wait(stack, streams, next(victims))}

        try:
            conditions = {"ranks": plan.ranks, "clients": plan.clients}
            measure_case(plan, report, conditions, measure_kill)
        finally:
            for stream in streams:
                stream.stop()


class EndlessStream:
    """A client that streams completions one after the other, and when its latest token came."""

    def __init__(self, stack: Stack, body: Mapping[str, Any]) -> None:
        """Start to stream.

        Args:
            stack: serves the requests.
            body: of each request.
        """
        self.token_at_s = 0.0
        """Wall-clock time of the latest token; 0.0 before the first one."""
        self.longest_gap_ends_s = 0.0
        """Wall-clock time of the token after the longest gap since `expect_gap`."""
        self._longest_gap_s = 0.0
        self.problem = ""
        """Why no further token comes; "" if they do."""
        self._port = stack.port
        self._body = json.dumps(body)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read no further tokens."""
        self._is_stopped.set()
        self._thread.join(RECOVERY_MAX_S)

    def expect_gap(self) -> None:
        """Forget earlier gaps between tokens."""
        self._longest_gap_s = 0.0

    def _note_token(self, now_s: float) -> None:
        gap_s = now_s - self.token_at_s
        if self.token_at_s and gap_s > self._longest_gap_s:
            self._longest_gap_s, self.longest_gap_ends_s = gap_s, now_s
        self.token_at_s = now_s

    def _run(self) -> None:
        try:
            while not self._is_stopped.is_set():
                self._stream_once()
        except (OSError, http.client.HTTPException, UnavailableError) as error:
            self.problem = str(error) or type(error).__name__

    def _stream_once(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=RECOVERY_MAX_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, self._body, headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise UnavailableError(f"A request was answered with {answer.status}.")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._note_token(unix_time_s())
                    if b'"error"' in line:
                        raise UnavailableError(f"A stream broke off: {line.decode().strip()}")
                if self._is_stopped.is_set():
                    return
        finally:
            connection.close()


def _wait_for_loaded_spares(stack: Stack) -> None:
    """Wait until the spare world has loaded.

    Raises:
        UnavailableError: it does not load in time.
    """
    until_s = time.monotonic() + SPARES_MAX_S
    while (state := stack.world().get("spare_world")) != "loaded":
        stack.require_running()
        if time.monotonic() > until_s:
            detail = f"The spare processes have not loaded within {SPARES_MAX_S:.0f} s"
            raise UnavailableError(f"{detail}: {state or 'there are none'}.")
        time.sleep(1.0)


def _kill_and_wait(
    stack: Stack, streams: list[EndlessStream], victim: int
) -> dict[str, float | None]:
    """Kill a rank, wait until all streams continue, and return the pause and its parts."""
    stack.wait_for_status()
    pid = stack.ranks()[victim]["pid"]
    began = stack.log.stat().st_size
    for stream in streams:
        stream.expect_gap()
    killed_s = unix_time_s()
    os.kill(pid, signal.SIGKILL)
    clock = SystemClock()
    until_s = clock.now() + RECOVERY_MAX_S
    ready_s = 0.0
    while not (ready_s and all(one.token_at_s > ready_s for one in streams)):
        stack.require_running()
        if problem := next((one.problem for one in streams if one.problem), ""):
            raise UnavailableError(f"A stream ended after rank {victim} was killed: {problem}")
        if clock.now() > until_s:
            raise UnavailableError(
                f"No stream continued within {RECOVERY_MAX_S:.0f} s after rank {victim} was killed."
            )
        time.sleep(_POLL_S)
        ready_s = ready_s or read_event_times(stack.log, began).get("world_ready", 0.0)
    continued_s = max(one.longest_gap_ends_s for one in streams)
    return divide_pause(killed_s, read_event_times(stack.log, began), continued_s)


def read_event_times(log: Path, start: int) -> dict[str, float]:
    """Return the wall-clock time of each of the scheduler's events, the last of its kind.

    Args:
        log: file with JSON lines and others, which are skipped.
        start: offset in bytes from which it is read.
    """
    found: dict[str, float] = {}
    with log.open("rb") as stream:
        stream.seek(start)
        for line in stream:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict) and fields.get("role") == "scheduler":
                found[str(fields.get("event"))] = float(fields.get("time", 0.0))
    return found


def divide_pause(
    killed_s: float, events_s: Mapping[str, float], token_s: float
) -> dict[str, float | None]:
    """Return a pause and its parts in milliseconds.

    Args:
        killed_s: wall-clock time of the kill.
        events_s: the scheduler's events after it -> wall-clock time.
        token_s: wall-clock time at which all streams had continued.

    Returns:
        pause_ms; and one after the other: noticed_ms until the epoch has ended, processes_ms until
        all ranks have said hello, ready_ms until the world is ready, first_token_ms until the
        streams continue. None: the log lacks an end of the part.
    """
    found: dict[str, float | None] = {"pause_ms": (token_s - killed_s) * 1e3}
    since_s: float | None = killed_s
    for metric, event in PARTS.items():
        until_s = events_s.get(event)
        found[metric] = (until_s - since_s) * 1e3 if since_s and until_s else None
        since_s = until_s
    found["first_token_ms"] = None if since_s is None else (token_s - since_s) * 1e3
    return found
