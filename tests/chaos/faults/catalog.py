"""All faults by name."""

from collections.abc import Sequence

from tests.chaos.faults import (
    attack_faults,
    harmless_faults,
    link_faults,
    rank_faults,
    role_faults,
    wrong_result_faults,
)
from tests.chaos.faults.fault import Fault

ALL: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *harmless_faults.FAULTS,
        *rank_faults.FAULTS,
        *role_faults.FAULTS,
        *link_faults.FAULTS,
        *wrong_result_faults.FAULTS,
        *attack_faults.FAULTS,
    )
}

BASELINE = "none"


def choose(names: Sequence[str], count: int, ranks: int) -> list[tuple[Fault, int]]:
    """Return the baseline, then each named fault (all without names) with its count.

    Raises:
        KeyError: a name is unknown or its fault needs more ranks; the text says which.
    """
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise KeyError(f"Unknown fault {unknown[0]}. Known faults: {', '.join(ALL)}.")
    too_few = [name for name in names if ALL[name].ranks_min > ranks]
    if too_few:
        raise KeyError(f"{too_few[0]} needs {ALL[too_few[0]].ranks_min} ranks.")
    possible = [name for name, fault in ALL.items() if fault.ranks_min <= ranks]
    chosen = [name for name in names or possible if name != BASELINE]
    return [(ALL[BASELINE], 1), *((ALL[name], count) for name in chosen)]
