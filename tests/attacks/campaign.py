"""Runs attacks against a target beside a victim, and says what each attack has done."""

import dataclasses
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence

from tests.attacks.attack import Attack
from tests.attacks.attacker import Attacker
from tests.attacks.target import DEPARTURE_S, Memory, Target
from tests.attacks.victim import KINDS, OPEN_MAX, Experience, Victim

GAP_MORE_S = 0.5
"""Most by which an attack may lengthen the longest gap between two tokens of the victim."""
MEMORY_MAX = Memory(
    gateway=1_500_000_000, scheduler=300_000_000, store=500_000_000, rank=2_000_000_000
)
"""Most resident memory of each process."""
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
    longest_s: dict[str, float]
    """The victim's longest request of each kind during the attack."""
    latency_p50_s: float
    """The median of all of them."""
    statuses: dict[int, int]
    """Number of the attack's answers by HTTP status."""
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
    memory, statuses = _attack(target, attack, connections, seconds)
    departure_s = target.departure_s(OPEN_MAX) if attack.must_depart else 0.0
    experience = victim.stop()
    problems = _victim_problems(attack, experience, alone)
    for role, used in dataclasses.asdict(memory).items():
        if used > getattr(MEMORY_MAX, role):
            problems.append(f"the {role} had {used / 1e6:.0f} MB")
    problems += [f"an answer with {one}" for one in statuses if one >= 500 and one != 503]
    if attack.status and attack.status not in statuses:
        problems.append(f"no answer with {attack.status}: nothing was attacked")
    if departure_s > DEPARTURE_S:
        problems.append(f"departed clients were served for {departure_s:.1f} s")
    problems += target.traceback_lines(first_line)[:1]
    if (chars := target.log_bytes(first_line)) > LOG_CHARS_MAX:
        problems.append(f"{chars:,} characters of log")
    return Result(
        attack=attack.name,
        connections=connections,
        gap_s=experience.gap_s,
        longest_s=experience.longest_s,
        latency_p50_s=statistics.median(
            list(itertools.chain(*experience.latencies_s.values())) or [0.0]
        ),
        statuses=dict(statuses),
        memory=memory,
        departure_s=departure_s,
        problems=problems,
    )


def render(alone: Experience, results: Sequence[Result]) -> str:
    """Return the results as a table; seconds, and MB of memory."""
    kinds = "".join(f"{kind:>9}" for kind in KINDS)
    roles = "".join(f"{field.name:>10}" for field in dataclasses.fields(Memory))
    names = f"{'attack':<20}{'n':>3}{'gap':>7}{kinds}{'p50':>7}{roles}{'left':>7}"
    return "\n".join(
        [
            names,
            f"{'alone':<23}{alone.gap_s:>7.2f}{_seconds(alone.longest_s)}",
            *map(_row, results),
        ]
    )


def _row(one: Result) -> str:
    memory = "".join(f"{used / 1e6:>10.0f}" for used in dataclasses.astuple(one.memory))
    statuses = " ".join(f"{status}x{count}" for status, count in sorted(one.statuses.items()))
    return (
        f"{one.attack:<20}{one.connections:>3}{one.gap_s:>7.2f}{_seconds(one.longest_s)}"
        f"{one.latency_p50_s:>7.2f}{memory}{one.departure_s:>7.1f}"
        f"  {'; '.join(one.problems) or 'good'} ({statuses or 'no answers'})"
    )


def _seconds(longest_s: dict[str, float]) -> str:
    return "".join(f"{longest_s[kind]:>9.2f}" for kind in KINDS)


def _victim_problems(attack: Attack, experience: Experience, alone: Experience) -> list[str]:
    """Return what the victim may not have experienced."""
    problems = [f"the victim: {refusal}" for refusal in experience.refusals[:3]]
    if experience.gap_s > alone.gap_s + GAP_MORE_S:
        problems.append(f"gap {experience.gap_s:.2f} s, alone {alone.gap_s:.2f} s")
    for kind, longest_s in experience.longest_s.items():
        if longest_s > alone.longest_s[kind] + attack.request_more_s:
            before_s = alone.longest_s[kind]
            problems.append(f"{kind} request {longest_s:.2f} s, alone {before_s:.2f} s")
    return problems


def _attack(
    target: Target, attack: Attack, connections: int, seconds: float
) -> tuple[Memory, Counter[int]]:
    """Run the attackers to their end.

    Returns:
        The largest resident memory meanwhile, and the number of answers by HTTP status.
    """
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
        largest = largest.largest(target.memory())
    return largest, Counter(attacker.statuses)
