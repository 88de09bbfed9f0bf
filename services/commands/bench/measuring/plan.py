"""Parameters of one run of a benchmark that most benchmarks share."""

from pathlib import Path

from msgspec import Struct


class BenchmarkPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run that every benchmark has; each field is named like its option."""

    log_folder: Path
    """Folder for the logs of child processes."""
    repeats: int
    """Measurements of each case."""
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""


class StackPlan(BenchmarkPlan, frozen=True, kw_only=True):
    """Parameters of one run of a benchmark that starts a whole Lockstep."""

    model: Path
    ranks: int = 1
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""
