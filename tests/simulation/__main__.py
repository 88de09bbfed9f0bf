"""`python -m tests.simulation`: play many seeds, or one exactly.

--seeds N --first K     play seeds K .. K + N - 1 on all cores
--seed n --verbose      play one; with its whole log
"""

import argparse
import multiprocessing
import sys
import time

from tests.simulation.run import Outcome, simulate

LAST_LINES = 60


def main() -> int:
    """Return 0 when no promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one only, and show its end")
    parser.add_argument("--verbose", action="store_true", help="show all of it")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    if options.seed is not None:
        return _show(simulate(options.seed), verbose=options.verbose)
    return _play(range(options.first, options.first + options.seeds), options.jobs)


def _show(outcome: Outcome, *, verbose: bool) -> int:
    for second, who, what, *details in outcome.log[0 if verbose else -LAST_LINES :]:
        print(f"{second:12.6f}  {who:<16} {what} {' '.join(map(str, details))}")
    print(
        f"seed {outcome.seed}: {outcome.seconds:.1f} s, {outcome.faults} faults, "
        f"{outcome.outcomes}, log {outcome.digest}"
    )
    print(outcome.violation or "no promise is broken")
    return bool(outcome.violation)


def _play(seeds: range, jobs: int) -> int:
    began = time.perf_counter()
    broken: list[tuple[int, str]] = []
    totals: dict[str, int] = {}
    faults, seconds = 0, 0.0
    with multiprocessing.Pool(jobs) as pool:
        for outcome in pool.imap_unordered(_brief, seeds, chunksize=8):
            faults += outcome.faults
            seconds += outcome.seconds
            for name, count in outcome.outcomes.items():
                totals[name] = totals.get(name, 0) + count
            if outcome.violation:
                broken.append((outcome.seed, outcome.violation))
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
    took = time.perf_counter() - began
    print(
        f"{len(seeds)} seeds, {faults} faults, {seconds / 3600:.1f} simulated hours in {took:.0f} s"
    )
    print("clients:", ", ".join(f"{count} {name}" for name, count in sorted(totals.items())))
    print(
        f"{len(broken)} violations"
        + (f": seeds {sorted(s for s, _ in broken)[:20]}" if broken else "")
    )
    return bool(broken)


def _brief(seed: int) -> Outcome:
    outcome = simulate(seed)
    outcome.log.clear()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
