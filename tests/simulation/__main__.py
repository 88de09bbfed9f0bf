"""Command line of the simulation: many seeds on all cores, or one seed with its log."""

import argparse
import multiprocessing
import sys
import time

from tests.simulation.run import Outcome, simulate

LAST_LINES = 60


def main() -> int:
    """Run the simulation; return 0 when no run violates a check."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=1_000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone and print the end of its log")
    parser.add_argument("--verbose", action="store_true", help="print the whole log")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        return _print_run(simulate(options.seed), verbose=options.verbose)
    return _run_seeds(range(options.first, options.first + options.seeds), options.jobs)


def _print_run(outcome: Outcome, *, verbose: bool) -> int:
    for second, process, event, *details in outcome.log[0 if verbose else -LAST_LINES :]:
        print(f"{second:12.6f}  {process:<16} {event} {' '.join(map(str, details))}")
    print(
        f"seed {outcome.seed}: {outcome.seconds:.1f} s, {outcome.faults} faults, "
        f"{outcome.outcomes}, log {outcome.digest}"
    )
    print(outcome.violation or "no violation")
    return bool(outcome.violation)


def _run_seeds(seeds: range, jobs: int) -> int:
    began = time.perf_counter()
    broken: list[tuple[int, str]] = []
    totals: dict[str, int] = {}
    faults, seconds = 0, 0.0
    with multiprocessing.Pool(jobs) as pool:
        for outcome in pool.imap_unordered(_simulate_without_log, seeds, chunksize=8):
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


def _simulate_without_log(seed: int) -> Outcome:
    outcome = simulate(seed)
    outcome.log.clear()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
