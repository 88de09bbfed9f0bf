"""Runs faults against running stacks and collects one row for each."""

import dataclasses
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos import grounds
from tests.chaos.fault import Arena, Fault, Ground
from tests.chaos.load import Load
from tests.chaos.records import Expected
from tests.chaos.stack import Shape, Stack, Stuck
from tests.chaos.table import Row
from tests.chaos.tasks import Task, make_tasks

FLOWING_DEADLINE_S = 30.0
STUCK_MAX = 3
"""After so many hangs of one kind the next kind is done."""
BETWEEN_S = (0.1, 0.7)
"""Random time between the recovery from one fault and the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How much is done, and with which numbers."""

    ranks: int = 2
    streams: int = 16
    seed: int = 1
    task_count: int = 32
    answer_tokens: int = 300
    """Tokens of a long answer: about three seconds of sixteen streams on two cores."""
    slack_s: float = 0.0
    """What deadlines are put off by, for a machine that does other things too."""
    log: Path | None = None
    """File that gets everything that the processes say; None: a temporary one."""


class Campaign:
    """All rows of one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.load_s = 0.0
        """Longest load time of this run: from the start of the processes to a world ready."""
        self._baseline_s = 0.0
        self.tasks: list[Task] = make_tasks(options.task_count, options.answer_tokens, options.seed)
        self._expected: dict[str, Expected] = {}

    def run(self, faults: Sequence[tuple[Fault, int]]) -> None:
        """Do each fault so many times; those on the same ground share one stack."""
        order: list[Ground] = []
        for fault, _ in faults:
            if fault.ground not in order:
                order.append(fault.ground)
        for ground in order:
            self._run_on(ground, [one for one in faults if one[0].ground == ground])

    def _run_on(self, ground: Ground, faults: Iterable[tuple[Fault, int]]) -> None:
        options = self.options
        with grounds.opened(ground, Shape(options.ranks, log=options.log)) as stack:
            self.load_s = max(self.load_s, stack.load_s)
            load = Load(stack.port, self.tasks, options.streams, options.seed)
            try:
                self.learn(load)
                for fault, count in faults:
                    began_s = time.monotonic()
                    self.rows.append(self.do(stack, load, fault, count))
                    self.report(self.rows[-1], time.monotonic() - began_s)
            finally:
                load.close()

    @staticmethod
    def report(row: Row, seconds: float) -> None:
        """Say that a row is done: a run of an hour must not be silent."""
        verdict = "good" if row.is_good else "BAD"
        print(f"{row.fault}: {row.count} in {seconds:.1f} s: {verdict}", file=sys.stderr)

    def learn(self, load: Load) -> None:
        """Get every text once without a fault; later stacks have to give the same."""
        if not self._expected:
            problems = load.learn()
            if problems:
                raise Stuck(f"without any fault: {problems}")
            self._expected = load.expected
        load.expected = self._expected

    def do(self, stack: Stack, load: Load, fault: Fault, count: int) -> Row:
        """Do one fault `count` times under load, and let every stream end."""
        chance = random.Random(f"{self.options.seed} {fault.name}")
        arena = Arena(stack, load, chance, self.options.slack_s)
        row = Row(fault.name, fault.expected, may_lose=fault.may_lose, may_refuse=fault.may_refuse)
        stuck = 0
        for turn in range(count):
            arena.turn = turn
            try:
                self._once(arena, fault, row)
            except Stuck as error:
                row.problems.append(str(error))
                row.problems.append(stack.log.tail(12))
                _start_again(stack)
                stuck += 1
                if stuck == STUCK_MAX:
                    break
        try:
            load.drain()
        except Stuck as error:
            row.problems.append(str(error))
        row.take(load.take_tally())
        row.problems += arena.problems
        row.figures = arena.figures
        if fault.name == "none":
            self._baseline_s = max(row.pause_s, self._baseline_s)
        return row

    def _once(self, arena: Arena, fault: Fault, row: Row) -> None:
        arena.load.begin(fault.phase)
        arena.load.wait_progress(time.monotonic(), FLOWING_DEADLINE_S)
        time.sleep(arena.chance.uniform(*BETWEEN_S))
        began_s = time.monotonic()
        row.count += 1
        try:
            fault.act(arena)
        finally:
            ended_s = time.monotonic()
            pause_s, first_s = arena.load.longest_pause(began_s, ended_s)
            # A machine that is busy now loads more slowly than it did at the start.
            again_s = arena.stack.youngest_s
            load_s = max(arena.stack.load_s, again_s if again_s < ended_s - began_s else 0.0)
            allowed_s = fault.pause_max_s(load_s, self._baseline_s, arena.slack_s)
            # While this process stood still, so did the rest, or nobody looked.
            allowed_s += arena.load.longest_stall(began_s, ended_s)
            row.take_pause(pause_s, allowed_s, load_s)
            row.first_token_s = max(row.first_token_s, first_s)
            row.recovered_s = max(row.recovered_s, ended_s - began_s)


def _start_again(stack: Stack) -> None:
    """After a hang: the next fault begins with new processes."""
    stack.log.note("stuck: everything is started anew")
    stack.forget_link()
    stack.end()
    stack.start()
