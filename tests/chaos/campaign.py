"""Runs of faults against running stacks, with one result per kind of fault."""

import dataclasses
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos.cluster.stack import DeadlineExceeded, Stack, StackOptions
from tests.chaos.cluster.stack_kinds import StackKind, open_stack
from tests.chaos.faults.fault import Fault, FaultContext
from tests.chaos.load.client_load import Load
from tests.chaos.load.stream_records import ExpectedAnswer
from tests.chaos.load.tasks import Task, make_tasks
from tests.chaos.results import FaultResult

TOKENS_DEADLINE_S = 30.0
HANGS_MAX = 3
"""Number of hangs after which a kind of fault is given up."""
PAUSE_S = (0.1, 0.7)
"""Shortest and longest random pause in seconds before a fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class CampaignOptions:
    """Size of a run."""

    ranks: int = 2
    streams: int = 16
    seed: int = 1
    task_count: int = 32
    answer_tokens: int = 300
    """Tokens of a long answer; sixteen streams on two cores take about three seconds."""
    slack_s: float = 0.0
    """Seconds added to deadlines on a machine that is busy with other work."""
    log: Path | None = None
    """File for the output of all processes; None: a temporary one."""


class Campaign:
    """All results of one run."""

    def __init__(self, options: CampaignOptions) -> None:
        self.options = options
        self.results: list[FaultResult] = []
        self.load_s = 0.0
        """Longest time in seconds from the start of the processes to a ready world."""
        self._baseline_s = 0.0
        self.tasks: list[Task] = make_tasks(options.task_count, options.answer_tokens, options.seed)
        self._expected: dict[str, ExpectedAnswer] = {}

    def run(self, faults: Sequence[tuple[Fault, int]]) -> None:
        """Inject each fault the given number of times; faults of one stack kind share a stack."""
        for kind in dict.fromkeys(fault.stack_kind for fault, _ in faults):
            self._run_on(kind, [one for one in faults if one[0].stack_kind == kind])

    def _run_on(self, kind: StackKind, faults: Iterable[tuple[Fault, int]]) -> None:
        options = self.options
        with open_stack(kind, StackOptions(options.ranks, log=options.log)) as stack:
            self.load_s = max(self.load_s, stack.load_s)
            load = Load(stack.port, self.tasks, options.streams, options.seed)
            try:
                self.learn_expected(load)
                for fault, count in faults:
                    began_s = time.monotonic()
                    self.results.append(self.run_fault(stack, load, fault, count))
                    self.print_progress(self.results[-1], time.monotonic() - began_s)
            finally:
                load.close()

    @staticmethod
    def print_progress(result: FaultResult, seconds: float) -> None:
        """Print a finished result, because a run may take an hour."""
        verdict = "good" if result.is_good else "BAD"
        print(f"{result.fault}: {result.count} in {seconds:.1f} s: {verdict}", file=sys.stderr)

    def learn_expected(self, load: Load) -> None:
        """Record each text once without a fault; later stacks have to generate the same."""
        if not self._expected:
            problems = load.learn_expected()
            if problems:
                raise DeadlineExceeded(f"requests fail without any fault: {problems}")
            self._expected = load.expected
        load.expected = self._expected

    def run_fault(self, stack: Stack, load: Load, fault: Fault, count: int) -> FaultResult:
        """Inject one fault `count` times under load, then wait for the end of all streams."""
        rng = random.Random(f"{self.options.seed} {fault.name}")
        context = FaultContext(stack, load, rng, self.options.slack_s)
        result = FaultResult(
            fault.name, fault.expected, may_lose=fault.may_lose, may_refuse=fault.may_refuse
        )
        hangs = 0
        for repetition in range(count):
            context.repetition = repetition
            try:
                self._run_once(context, fault, result)
            except DeadlineExceeded as error:
                result.problems.append(str(error))
                result.problems.append(stack.log.tail(12))
                _restart(stack)
                hangs += 1
                if hangs == HANGS_MAX:
                    break
        try:
            load.drain()
        except DeadlineExceeded as error:
            result.problems.append(str(error))
        result.add_tally(load.take_tally())
        result.problems += context.problems
        result.figures = context.figures
        if fault.name == "none":
            self._baseline_s = max(result.pause_s, self._baseline_s)
        return result

    def _run_once(self, context: FaultContext, fault: Fault, result: FaultResult) -> None:
        context.load.set_phase(fault.phase)
        context.load.wait_for_tokens(time.monotonic(), TOKENS_DEADLINE_S)
        time.sleep(context.rng.uniform(*PAUSE_S))
        began_s = time.monotonic()
        result.count += 1
        try:
            fault.inject(context)
        finally:
            ended_s = time.monotonic()
            pause_s, first_s = context.load.longest_pause(began_s, ended_s)
            # On a busy machine loading takes longer than it did at the start.
            age_s = context.stack.youngest_rank_age_s
            load_s = max(context.stack.load_s, age_s if age_s < ended_s - began_s else 0.0)
            allowed_s = fault.pause_max_s(load_s, self._baseline_s, context.slack_s)
            # While this process did not run, it could not receive tokens.
            allowed_s += context.load.longest_stall(began_s, ended_s)
            result.add_pause(pause_s, allowed_s, load_s)
            result.first_token_s = max(result.first_token_s, first_s)
            result.recovered_s = max(result.recovered_s, ended_s - began_s)


def _restart(stack: Stack) -> None:
    """Start new processes after a hang."""
    stack.log.note("hang: all processes are restarted")
    stack.close_status_link()
    stack.end()
    stack.start()
