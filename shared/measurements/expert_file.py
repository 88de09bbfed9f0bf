"""File of the assignments to routed experts: the scheduler's report as JSON."""

from pathlib import Path

import msgspec

from shared.errors import UsageError
from shared.messages import ExpertsReported

FILE_BYTES_MAX = 64 * 1024 * 1024
"""Larger than the largest report as JSON."""


def write(file: Path, report: ExpertsReported) -> None:
    """Write a report.

    Args:
        file: replaced if it exists.
        report: what the scheduler has answered.

    Raises:
        UsageError: when it cannot be written.
    """
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=0) + b"\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None


def read(file: Path) -> ExpertsReported:
    """Read a report that `write` has written.

    Raises:
        UsageError: when it cannot be read, is damaged or no such report, or counts no tokens.
    """
    remedy = "write one with `lockstep status --expert-stats FILE`"
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{file} is too large for counts of experts: {remedy}.")
        report = msgspec.json.decode(file.read_bytes(), type=ExpertsReported)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} has no counts of experts ({error}): {remedy}.") from None
    numbers = [one.layer for one in report.layers]
    if len(set(numbers)) != len(numbers):
        raise UsageError(f"{file} counts a layer twice: {remedy}.")
    if not any(sum(one.counts) for one in report.layers):
        raise UsageError(
            f"{file} counts no tokens: {remedy} after a model with routed experts has served some "
            "requests."
        )
    return report
