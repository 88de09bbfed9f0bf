"""All faults by name, and the sets that are run."""

from collections.abc import Sequence

from tests.chaos import lies, link_faults, quiet_faults, rank_faults, role_faults
from tests.chaos.fault import Fault

ALL: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *quiet_faults.FAULTS,
        *rank_faults.FAULTS,
        *role_faults.FAULTS,
        *link_faults.FAULTS,
        *lies.FAULTS,
    )
}

BASELINE = "none"


def choose(names: Sequence[str], count: int, ranks: int) -> list[tuple[Fault, int]]:
    """Return the named faults, all for none named, each `count` times; the baseline comes first.

    Raises:
        KeyError: there is no such fault, or it needs more ranks; the text says so.
    """
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise KeyError(f"No fault is called {unknown[0]}; there are: {', '.join(ALL)}.")
    few = [name for name in names if ALL[name].ranks_min > ranks]
    if few:
        raise KeyError(f"{few[0]} needs {ALL[few[0]].ranks_min} ranks.")
    fitting = [name for name, fault in ALL.items() if fault.ranks_min <= ranks]
    wanted = [name for name in names or fitting if name != BASELINE]
    return [(ALL[BASELINE], 1), *((ALL[name], count) for name in wanted)]
