"""Runs attacks against a target beside a victim, and says what each attack has done."""

import dataclasses
import statistics
import threading
import time
from collections.abc import Sequence

from tests.attacks.attacker import Attacker
from tests.attacks.catalog import Attack
from tests.attacks.target import DEPARTURE_S, Memory, Target
from tests.attacks.victim import OPEN_MAX, Experience, Victim

GAP_MORE_S = 0.5
"""Most by which an attack may lengthen the longest gap between two tokens of the victim."""
GATEWAY_BYTES_MAX = 1_500_000_000
SCHEDULER_BYTES_MAX = 300_000_000
LOG_CHARS_MAX = 50_000
"""Longest log of one attack."""
_MEMORY_EVERY_S = 0.1


@dataclasses.dataclass(slots=True)
class Result:
    """Effects of one attack."""

    attack: str
    connections: int
    gap_s: float
    """The victim's longest gap between two tokens during the attack."""
    latency_s: float
    """The victim's longest short request during the attack."""
    latency_p50_s: float
    memory: Memory
    """The largest resident memory during the attack."""
    departure_s: float
    """Time after the attack until the scheduler knew that its clients had left."""
    problems: list[str]


def run_alone(target: Target, seconds: float) -> Experience:
    """Return what a victim experiences without an attack."""
    victim = Victim(target.port)
    time.sleep(seconds)
    return victim.stop()


def run_attack(
    target: Target, attack: Attack, connections: int, seconds: float, alone: Experience
) -> Result:
    """Run one attack beside a victim.

    Args:
        target: the running Lockstep.
        attack: the attack.
        connections: number of attackers that run it at the same time.
        seconds: duration.
        alone: what a victim experiences without an attack.
    """
    first_line = target.log_lines()
    victim = Victim(target.port)
    memory = _attack(target, attack, connections, seconds)
    departure_s = target.departure_s(OPEN_MAX) if attack.must_depart else 0.0
    experience = victim.stop()
    problems = [f"the victim: {refusal}" for refusal in experience.refusals[:3]]
    if experience.gap_s > alone.gap_s + GAP_MORE_S:
        problems.append(f"gap {experience.gap_s:.2f} s, alone {alone.gap_s:.2f} s")
    if memory.gateway > GATEWAY_BYTES_MAX:
        problems.append(f"the gateway had {memory.gateway / 1e6:.0f} MB")
    if memory.scheduler > SCHEDULER_BYTES_MAX:
        problems.append(f"the scheduler had {memory.scheduler / 1e6:.0f} MB")
    if departure_s > DEPARTURE_S:
        problems.append(f"departed clients were served for {departure_s:.1f} s")
    problems += target.traceback_lines(first_line)[:1]
    if (chars := target.log_bytes(first_line)) > LOG_CHARS_MAX:
        problems.append(f"{chars:,} characters of log")
    return Result(
        attack=attack.name,
        connections=connections,
        gap_s=experience.gap_s,
        latency_s=experience.latency_s,
        latency_p50_s=statistics.median(experience.latencies_s or [0.0]),
        memory=memory,
        departure_s=departure_s,
        problems=problems,
    )


def render(alone: Experience, results: Sequence[Result]) -> str:
    """Return the results as a table."""
    first = f"alone: longest gap {alone.gap_s:.3f} s, longest request {alone.latency_s:.3f} s"
    names = (
        f"{'attack':<20}{'n':>3}{'gap s':>8}{'request s':>11}{'p50':>7}"
        f"{'gateway MB':>12}{'scheduler MB':>14}{'left s':>8}"
    )
    rows = [
        f"{one.attack:<20}{one.connections:>3}{one.gap_s:>8.2f}{one.latency_s:>11.2f}"
        f"{one.latency_p50_s:>7.2f}{one.memory.gateway / 1e6:>12.0f}"
        f"{one.memory.scheduler / 1e6:>14.0f}{one.departure_s:>8.1f}"
        f"  {'; '.join(one.problems) or 'good'}"
        for one in results
    ]
    return "\n".join([first, names, *rows])


def _attack(target: Target, attack: Attack, connections: int, seconds: float) -> Memory:
    """Run the attackers to their end; return the largest resident memory meanwhile."""
    attacker = Attacker(target.port, time.monotonic() + seconds)
    threads = [
        threading.Thread(target=attack.run, args=(attacker,), daemon=True)
        for _ in range(connections)
    ]
    for thread in threads:
        thread.start()
    largest = target.memory()
    while any(thread.is_alive() for thread in threads):
        time.sleep(_MEMORY_EVERY_S)
        now = target.memory()
        largest = Memory(max(largest.gateway, now.gateway), max(largest.scheduler, now.scheduler))
    return largest
