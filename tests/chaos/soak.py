"""Mixed load and faults for some minutes, after which no resource may have grown.

    python -m tests.chaos.soak [--minutes 60] [--ranks 2] [--streams 16] [--seed S]

Compares rows, requests, descriptors, threads and files before and after. A process that was killed
meanwhile is compared with its predecessor.
"""

import argparse
import dataclasses
import random
import sys
import time

from tests.chaos.campaign import Campaign, CampaignOptions
from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import Stack, StackOptions
from tests.chaos.cluster.stack_kinds import open_stack
from tests.chaos.faults import attack_faults, catalog
from tests.chaos.load.client_load import Load
from tests.chaos.results import FaultResult, render

WATCHED = ("scheduler", "gateway", "store")
FAULTS = (
    "none", "rank-kill-mixed", "store-kill", "rank-stop-1s", "gateway-kill", "scheduler-kill",
    "store-stop", "scheduler-stop-1s", "rank-kill-load", "rank-kill-recovery", "rank-kill-prefill",
    "rank-kill-cleaned", *(fault.name for fault in attack_faults.FAULTS),
)  # fmt: skip
"""Injected in a random order that changes each round."""
CLEANING_FAULT = "rank-kill-cleaned"
LISTENERS = {"scheduler descriptors": 2, "store descriptors": 1}
"""Sockets of a role. One whose file was deleted stays open beside the new one, because closing it
would end its connections."""
SETTLE_S = 3.0
"""Seconds after which idle connections and threads of finished work have ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResourceUse:
    """Resources of an idle stack, by name."""

    counts: dict[str, float]

    @classmethod
    def of(cls, stack: Stack) -> "ResourceUse":
        """Measure an idle stack."""
        time.sleep(SETTLE_S)
        stack.wait_until_ready()
        stack.close_status_link()
        time.sleep(0.5)
        pids = {role: stack.pid(role) for role in WATCHED}
        counts: dict[str, float] = {}
        for role, pid in pids.items():
            counts[f"{role} descriptors"] = processes.descriptor_count(pid)
            counts[f"{role} threads"] = processes.thread_count(pid)
        counts["files in run_dir"] = len(list(stack.config.run_dir.iterdir()))
        counts["temporary files"] = len(list(stack.temporary.iterdir()))
        status = stack.status()
        counts["requests running"] = status.running
        counts["requests waiting"] = status.waiting
        counts["KV tokens held"] = status.kv_tokens_used
        counts["plans in flight"] = status.gauges.get("plans_in_flight", 0.0)
        counts["rank processes"] = sum(role.startswith("rank") for role in stack.pids())
        return cls(counts)

    def growth(self, before: "ResourceUse", cleanings: int) -> dict[str, float]:
        """Return the growth of each resource that grew too much.

        Args:
            before: the earlier use.
            cleanings: how often the run folder was cleaned meanwhile.
        """
        return {
            name: value - before.counts[name]
            for name, value in self.counts.items()
            if value > before.counts[name] + cleanings * LISTENERS.get(name, 0)
        }


def run(campaign: Campaign, minutes: float) -> tuple[ResourceUse, ResourceUse]:
    """Inject faults for `minutes`; return the resources before and after."""
    options = campaign.options
    rng = random.Random(options.seed)
    with open_stack("supervised", StackOptions(options.ranks, log=options.log)) as stack:
        campaign.load_s = stack.load_s
        load = Load(stack.port, campaign.tasks, options.streams, options.seed)
        try:
            campaign.learn_expected(load)
            # The first use of each path opens descriptors that stay open.
            _run_round(campaign, stack, load, ["none"])
            before = ResourceUse.of(stack)
            until_s = time.monotonic() + 60.0 * minutes
            while time.monotonic() < until_s:
                names = rng.sample(FAULTS, len(FAULTS))
                _run_round(campaign, stack, load, names, until_s)
            return before, ResourceUse.of(stack)
        finally:
            load.close()


def _run_round(
    campaign: Campaign, stack: Stack, load: Load, names: list[str], until_s: float = float("inf")
) -> None:
    for name in names:
        if time.monotonic() > until_s:
            return
        result = campaign.run_fault(stack, load, catalog.ALL[name], 1)
        campaign.print_progress(result, result.recovered_s)
        _merge(campaign.results, result)


def _merge(results: list[FaultResult], new: FaultResult) -> None:
    """Merge a result into the one of the same fault."""
    for result in results:
        if result.fault == new.fault:
            result.merge(new)
            return
    results.append(new)


def main() -> int:
    """Run the command line."""
    processes.treat_sigterm_as_interrupt()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    campaign = Campaign(CampaignOptions(options.ranks, options.streams, options.seed))
    before, after = run(campaign, options.minutes)
    print(render(campaign.results))
    width = max(map(len, before.counts))
    for name, value in before.counts.items():
        print(f"{name:<{width}}  before {value:g}, after {after.counts[name]:g}")
    cleanings = [one.count for one in campaign.results if one.fault == CLEANING_FAULT]
    grown = after.growth(before, sum(cleanings))
    if grown:
        print(f"PROBLEM: resources have grown: {grown}")
    return 0 if not grown and all(result.is_good for result in campaign.results) else 1


if __name__ == "__main__":
    sys.exit(main())
