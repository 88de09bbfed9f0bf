"""Injects faults into a real Lockstep under load and prints the results.

    python -m tests.chaos [--faults NAME,...] [--count N] [--ranks 1|2|4] [--streams 16]
        [--seed S] [--json FILE]

Exit code 1 if a stream was lost, a token is duplicated or missing, a text differs, or a pause was
longer than allowed.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tests.chaos.campaign import Campaign, CampaignOptions
from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import DeadlineExceeded
from tests.chaos.faults import catalog
from tests.chaos.results import render


def main() -> int:
    """Run the command line."""
    processes.treat_sigterm_as_interrupt()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", default="", help="comma-separated names (default: all)")
    parser.add_argument("--count", type=int, default=2, help="how often each fault is injected")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file for the output of all processes")
    parser.add_argument("--json", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    names = [name for name in options.faults.split(",") if name]
    try:
        faults = catalog.choose(names, options.count, options.ranks)
    except KeyError as error:
        parser.error(error.args[0])
    campaign = Campaign(
        CampaignOptions(
            ranks=options.ranks,
            streams=options.streams,
            seed=options.seed,
            log=options.log,
        )
    )
    hang = ""
    try:
        campaign.run(faults)
    except DeadlineExceeded as error:
        hang = str(error)
    print(
        f"{options.ranks} ranks, {options.streams} streams, seed {options.seed}; "
        f"loading takes {campaign.load_s:.2f} s here"
    )
    print(render(campaign.results))
    if hang:
        print(f"PROBLEM: {hang}")
    if options.json is not None:
        rows = [
            {**dataclasses.asdict(result), "good": result.is_good} for result in campaign.results
        ]
        options.json.write_text(json.dumps({"load_s": campaign.load_s, "rows": rows}, indent=2))
    return 0 if not hang and all(result.is_good for result in campaign.results) else 1


if __name__ == "__main__":
    sys.exit(main())
