"""Does faults to a real Lockstep under load, and prints what came of them.

    python -m tests.chaos [--faults NAME,...] [--count N] [--ranks 1|2|4] [--streams 16]
        [--seed S] [--json FILE]

Exit code 1 if a stream was lost, a token is there twice or not at all, a text differs, or a pause
was longer than allowed.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tests.chaos import catalog, processes
from tests.chaos.campaign import Campaign, Options
from tests.chaos.stack import Stuck
from tests.chaos.table import render


def main() -> int:
    """Run the command line."""
    processes.end_as_interrupted()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--faults", default="", help="names with commas between (default: all)")
    parser.add_argument("--count", type=int, default=2, help="how often each is done")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="keep everything that the processes say here")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    names = [name for name in options.faults.split(",") if name]
    try:
        faults = catalog.choose(names, options.count, options.ranks)
    except KeyError as error:
        parser.error(error.args[0])
    campaign = Campaign(
        Options(
            ranks=options.ranks,
            streams=options.streams,
            seed=options.seed,
            log=options.log,
        )
    )
    stuck = ""
    try:
        campaign.run(faults)
    except Stuck as error:
        stuck = str(error)
    print(
        f"{options.ranks} ranks, {options.streams} streams, seed {options.seed}; "
        f"loading takes {campaign.load_s:.2f} s here"
    )
    print(render(campaign.rows))
    if stuck:
        print(f"PROBLEM: {stuck}")
    if options.json is not None:
        rows = [{**dataclasses.asdict(row), "good": row.is_good} for row in campaign.rows]
        options.json.write_text(json.dumps({"load_s": campaign.load_s, "rows": rows}, indent=2))
    return 0 if not stuck and all(row.is_good for row in campaign.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
