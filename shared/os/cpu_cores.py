"""Number of CPU cores that this process may use."""

import os


def available_cores() -> int:
    """Return how many CPU cores this process may use (its affinity), else the machine's number."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
