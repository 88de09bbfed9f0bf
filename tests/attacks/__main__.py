"""Attacks a real Lockstep as one tenant, and measures what another tenant notices of it.

    python -m tests.attacks [--attacks NAME,...] [--connections 1,4] [--seconds 6] [--json FILE]

Exit code 1 if a request of the victim was refused or held up, its stream paused for too long, a
process took too much memory, clients that had left were served on, an answer had a status from 500
on, or the log has a traceback.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.attacks.campaign import render, run_alone, run_attack
from tests.attacks.catalog import ATTACKS
from tests.attacks.target import running_target


def main() -> int:
    """Run the command line."""
    names = [attack.name for attack in ATTACKS]
    parser = argparse.ArgumentParser(prog="python -m tests.attacks")
    parser.add_argument("--attacks", default=",".join(names), help="comma-separated names")
    parser.add_argument("--connections", default="1,4", help="numbers of attackers")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of each attack")
    parser.add_argument("--json", type=Path, help="file for the results as JSON")
    options = parser.parse_args()
    chosen = options.attacks.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    results = []
    with tempfile.TemporaryDirectory() as folder, running_target(Path(folder)) as target:
        alone = run_alone(target, options.seconds)
        for attack in ATTACKS:
            if attack.name not in chosen:
                continue
            for count in map(int, options.connections.split(",")):
                result = run_attack(target, attack, count, options.seconds, alone)
                verdict = "; ".join(result.problems) or "good"
                print(f"{attack.name} x {count}: {verdict}", file=sys.stderr, flush=True)
                results.append(result)
    print(render(alone, results))
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in results], indent=2))
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
