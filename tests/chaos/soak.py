"""Mixed load and faults for some minutes: what the processes hold is then what they held before.

    python -m tests.chaos.soak [--minutes 60] [--ranks 2] [--streams 16] [--seed S]

Slots, rows and requests, descriptors and threads of scheduler, gateway and store, and the files in
the run folder. A process that was killed meanwhile is compared with the one before it.
"""

import argparse
import dataclasses
import random
import sys
import time

from tests.chaos import catalog, grounds, processes
from tests.chaos.campaign import Campaign, Options
from tests.chaos.load import Load
from tests.chaos.stack import Shape, Stack
from tests.chaos.table import Row, render

WATCHED = ("scheduler", "gateway", "store")
FAULTS = (
    "none", "rank-kill-mixed", "store-kill", "rank-stop-1s", "gateway-kill", "scheduler-kill",
    "store-stop", "scheduler-stop-1s", "rank-kill-load", "rank-kill-recovery", "rank-kill-prefill",
)  # fmt: skip
"""One after the other; the order is drawn anew each round."""
SETTLE_S = 3.0
"""Idle connections and threads of finished work are gone after so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What a stack at rest holds, by name."""

    counts: dict[str, float]

    @classmethod
    def of(cls, stack: Stack) -> "Holdings":
        """Count what an idle stack holds now."""
        time.sleep(SETTLE_S)
        stack.wait_ready()
        stack.forget_link()
        time.sleep(0.5)
        pids = {role: stack.pid(role) for role in WATCHED}
        counts: dict[str, float] = {}
        for role, pid in pids.items():
            counts[f"{role} descriptors"] = processes.open_files(pid)
            counts[f"{role} threads"] = processes.threads(pid)
        counts["files in run_dir"] = len(list(stack.config.run_dir.iterdir()))
        counts["temporary files"] = len(list(stack.temporary.iterdir()))
        status = stack.status()
        counts["requests running"] = status.running
        counts["requests waiting"] = status.waiting
        counts["KV tokens held"] = status.kv_tokens_used
        counts["plans in flight"] = status.gauges.get("plans_in_flight", 0.0)
        counts["rank processes"] = sum(role.startswith("rank") for role in stack.pids())
        return cls(counts)

    def growth(self, before: "Holdings") -> dict[str, float]:
        """Return what is more than before, and by how much."""
        return {
            name: value - before.counts[name]
            for name, value in self.counts.items()
            if value > before.counts[name]
        }


def run(campaign: Campaign, minutes: float) -> tuple[Holdings, Holdings]:
    """Do faults for so long and add their rows; return what was held before and after."""
    options = campaign.options
    chance = random.Random(options.seed)
    with grounds.opened("up", Shape(options.ranks, log=options.log)) as stack:
        campaign.load_s = stack.load_s
        load = Load(stack.port, campaign.tasks, options.streams, options.seed)
        try:
            campaign.learn(load)
            # Twice: the first use of every path opens what stays open.
            _round(campaign, stack, load, ["none"])
            before = Holdings.of(stack)
            until_s = time.monotonic() + 60.0 * minutes
            while time.monotonic() < until_s:
                names = chance.sample(FAULTS, len(FAULTS))
                _round(campaign, stack, load, names, until_s)
            return before, Holdings.of(stack)
        finally:
            load.close()


def _round(
    campaign: Campaign, stack: Stack, load: Load, names: list[str], until_s: float = float("inf")
) -> None:
    for name in names:
        if time.monotonic() > until_s:
            return
        row = campaign.do(stack, load, catalog.ALL[name], 1)
        campaign.report(row, row.recovered_s)
        _merge(campaign.rows, row)


def _merge(rows: list[Row], new: Row) -> None:
    """Add a row to the one of the same fault."""
    for row in rows:
        if row.fault == new.fault:
            row.add(new)
            return
    rows.append(new)


def main() -> int:
    """Run the command line."""
    processes.end_as_interrupted()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    campaign = Campaign(Options(options.ranks, options.streams, options.seed))
    before, after = run(campaign, options.minutes)
    print(render(campaign.rows))
    width = max(map(len, before.counts))
    for name, value in before.counts.items():
        print(f"{name:<{width}}  before {value:g}, after {after.counts[name]:g}")
    grown = after.growth(before)
    if grown:
        print(f"PROBLEM: more is held than before: {grown}")
    return 0 if not grown and all(row.is_good for row in campaign.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
