"""`lockstep bench steps`: idle time that the scheduler leaves between the steps of a device.

The device is a rank that sleeps. Two schedulers run side by side and are measured in turn: one with
two plans in flight (run-ahead) and one with one (lock-step). This process plays their gateway.
"""

import contextlib
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from services.commands.bench.fake_ranks.sleeping_rank import StepTimesFile
from services.commands.bench.flags import (
    BenchmarkOption,
    number_option,
    positive_milliseconds,
)
from services.commands.bench.measuring import machine
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.numbers import percentile
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import (
    LOCKSTEP_COMMAND,
    MeasuredProcess,
    bench_program,
)
from services.commands.bench.measuring.report import Report
from shared.errors import UnavailableError
from shared.messages import (
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Sampling,
    StatusReported,
    SubmitRequest,
    ToGateway,
    token_ids,
)
from shared.transport.links import Dialer, Lost, Received

COLUMNS = [
    "exposed_us_p50",
    "exposed_us_p99",
    "period_us_p50",
    "overshoot_us_p50",
    "scheduler_cpu_us_per_step",
]
RUN_AHEAD, LOCK_STEP = "run-ahead", "lock-step"
PROMPT_TOKENS = 16
_KEEP_ALIVE_S = 1.0
"""Time between two polls of a link whose scheduler is not measured now."""


class StepsPlan(BenchmarkPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench steps`, from its command line."""

    step_ms: list[float]
    """Durations of a device's step."""
    sequences: int
    """Sequences that decode at once."""
    steps: int
    """Steps per repeat."""
    spins: bool
    """Also measure a device that computes instead of sleeping, which never oversleeps."""


OPTIONS: list[click.Parameter] = [
    BenchmarkOption(
        "--step-ms",
        "Durations of a device's step in milliseconds, comma-separated",
        "2,10",
        type=positive_milliseconds,
        metavar="MS,...",
    ),
    number_option("--sequences", "Sequences that decode", 16),
    number_option("--steps", "Steps per repeat", 500, quick_max=200),
    click.Option(
        ["--spin", "spins"],
        is_flag=True,
        help="Also measure a device that computes instead of sleeping.",
    ),
]
"""Options of this benchmark."""


class SchedulerTestbed:
    """A scheduler, its sleeping rank, and the link on which this process plays its gateway.

    Args:
        name: name of the contender, also part of the log files' names.
        plans_in_flight: largest number of step plans that the rank has not answered yet, 1 or 2.
        log_folder: folder for the logs of both processes.
    """

    def __init__(self, name: str, plans_in_flight: int, log_folder: Path) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        run_dir = Path(self._folder.name)
        self.times = StepTimesFile(run_dir / "times")
        self._scheduler = MeasuredProcess(
            f"the scheduler ({name})",
            [*LOCKSTEP_COMMAND, "scheduler"],
            log_folder / f"scheduler-{name}.log",
            {
                "LOCKSTEP_PATHS_RUN_DIR": str(run_dir),
                "LOCKSTEP_SCHEDULER_PLANS_IN_FLIGHT": str(plans_in_flight),
            },
        )
        rank = bench_program(
            "fake_ranks.sleeping_rank", f"ipc://{run_dir}/ranks.sock", "0", str(run_dir / "times")
        )
        self._rank = MeasuredProcess(
            f"the sleeping rank ({name})", rank, log_folder / f"rank-{name}.log"
        )
        self._link: Dialer[Any] = Dialer(f"ipc://{run_dir}/gateways.sock", "bench", ToGateway)
        self._requests = 0

    def stop(self) -> None:
        """Close the link, and stop the scheduler and the rank."""
        self._link.close(wait_s=0.2)
        self._rank.stop(wait_s=0.5)
        self._scheduler.stop()
        self._folder.cleanup()

    def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the scheduler reports a running world.

        Raises:
            UnavailableError: when it does not in time or a process ends.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for child in (self._scheduler, self._rank):
                child.require_running()
            for event in self._link.poll(0.1):
                match event:
                    case Received(message=StatusReported(ready=True)):
                        return
        raise self._scheduler.failure("was not ready in time")

    def keep_alive(self) -> None:
        """Poll the link once, so that it is not lost while another scheduler is measured."""
        self._link.poll(0.0)

    def generate(
        self,
        sequences: int,
        tokens: int,
        timeout_s: float,
        idle: "SchedulerTestbed | None" = None,
    ) -> None:
        """Send requests to the scheduler as its gateway and wait until all have ended.

        Args:
            sequences: number of requests that run together.
            tokens: completion length of each request.
            timeout_s: longest time until the last request has ended, in seconds.
            idle: a testbed that is not measured now and whose link is kept alive.

        Raises:
            UnavailableError: when a request is refused, fails, or does not end in time.
        """
        waiting = set()
        for _ in range(sequences):
            self._requests += 1
            name = f"bench-{self._requests}"
            waiting.add(name)
            self._link.send(
                SubmitRequest(
                    request_id=name,
                    prompt=token_ids.pack(
                        (self._requests + n) % 4_000 for n in range(PROMPT_TOKENS)
                    ),
                    sampling=Sampling(seed=self._requests, temperature=0.0),
                    max_tokens=tokens,
                )
            )
        until_s = time.monotonic() + timeout_s
        kept_alive_s = 0.0
        while waiting:
            now_s = time.monotonic()
            if now_s > until_s:
                raise self._scheduler.failure(f"did not end {len(waiting)} requests in time")
            if idle is not None and now_s - kept_alive_s > _KEEP_ALIVE_S:
                kept_alive_s = now_s
                idle.keep_alive()
            for event in self._link.poll(0.2):
                match event:
                    case Received(message=RequestFinished(request_id=name)):
                        waiting.discard(name)
                    case Received(message=RequestRejected() | RequestFailed() as answer):
                        raise UnavailableError(f"{self.name}: {answer.detail}")
                    case Lost(cause=cause):
                        raise self._scheduler.failure(f"was lost: {cause}")

    def scheduler_cpu_s(self) -> float:
        """Return the scheduler's CPU seconds since its start; 0.0 when they cannot be read."""
        return machine.cpu_seconds(self._scheduler.pid)


def measure(plan: StepsPlan, report: Report) -> None:
    """Measure how long the device idles between steps with one and with two plans in flight.

    A plan in flight is a step plan that a rank has not answered yet. Both schedulers are measured
    in turn.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per step duration and kind of simulated device.

    Raises:
        UnavailableError: when a scheduler does not start or answer.
    """
    report.settings |= {
        "sequences": plan.sequences,
        "steps": plan.steps,
        "repeats": plan.repeats,
        "exposed": "time from the end of a step on the device to the beginning of the next",
    }
    with contextlib.ExitStack() as cleanup:
        testbeds = []
        for name, plans_in_flight in ((RUN_AHEAD, 2), (LOCK_STEP, 1)):
            testbeds.append(SchedulerTestbed(name, plans_in_flight, plan.log_folder))
            cleanup.callback(testbeds[-1].stop)
        for testbed in testbeds:
            testbed.wait_until_ready()
            # Warm-up; the scheduler also learns how long a step takes.
            testbed.times.set_pace(plan.step_ms[0] / 1_000, spins=False, queued=False)
            testbed.generate(plan.sequences, 100, timeout_s=60.0)

        def measure_both(step_ms: float, device: str, wait: str) -> dict[str, dict[str, float]]:
            found = {}
            for one, other in (testbeds, testbeds[::-1]):
                queued = device == "queued"
                one.times.set_pace(step_ms / 1_000, spins=wait == "spin", queued=queued)
                found[one.name] = _measure_scheduler(plan, one, other, step_ms)
            return found

        waits = ("sleep", "spin") if plan.spins else ("sleep",)
        for step_ms, device, wait in itertools.product(plan.step_ms, ("inline", "queued"), waits):
            conditions = {"step_ms": step_ms, "device": device, "wait": wait}
            run = functools.partial(measure_both, step_ms, device, wait)
            case = measure_case(plan, report, conditions, run)
            case.add_ratios(RUN_AHEAD, LOCK_STEP, "exposed_us_p50", "exposed_us_p99")


def _measure_scheduler(
    plan: StepsPlan, testbed: SchedulerTestbed, other: SchedulerTestbed, step_ms: float
) -> dict[str, float]:
    cpu_s = testbed.scheduler_cpu_s()
    timeout_s = 30.0 + plan.steps * (step_ms + 10.0) / 1_000
    testbed.generate(plan.sequences, plan.steps, timeout_s, idle=other)
    cpu_s = testbed.scheduler_cpu_s() - cpu_s
    steps = testbed.times.steps()
    metrics = step_metrics(steps, plan.sequences, step_ms)
    metrics["scheduler_cpu_us_per_step"] = cpu_s * 1e6 / len(steps)
    return metrics


def step_metrics(
    steps: list[tuple[float, float, int]], sequences: int, step_ms: float
) -> dict[str, float]:
    """Return the metrics of pairs of consecutive steps that both decode all sequences.

    The first 10 pairs are left out.

    Args:
        steps: per step, in order: begin and end in seconds, number of sequences that it decoded.
        sequences: number of sequences that a step must decode to count.
        step_ms: intended duration of a step.

    Returns:
        exposed_us_p50, _p99 and _mean: median, 99th percentile and mean of the microseconds from
        the end of a step to the begin of the next; period_us_p50: median from begin to begin;
        overshoot_us_p50: median by which a step took longer than intended; steps: number of pairs.

    Raises:
        UnavailableError: when there are no such pairs.
    """
    full = [
        (one, other) for one, other in itertools.pairwise(steps) if one[2] == other[2] == sequences
    ][10:]
    if not full:
        raise UnavailableError(f"No two consecutive steps decoded all {sequences} sequences.")
    exposed_us = [(other[0] - one[1]) * 1e6 for one, other in full]
    period_us = [(other[0] - one[0]) * 1e6 for one, other in full]
    overshoot_us = [(one[1] - one[0]) * 1e6 - step_ms * 1_000 for one, _ in full]
    return {
        "exposed_us_p50": percentile(exposed_us, 0.5),
        "exposed_us_p99": percentile(exposed_us, 0.99),
        "exposed_us_mean": statistics.fmean(exposed_us),
        "period_us_p50": percentile(period_us, 0.5),
        "overshoot_us_p50": percentile(overshoot_us, 0.5),
        "steps": len(full),
    }
