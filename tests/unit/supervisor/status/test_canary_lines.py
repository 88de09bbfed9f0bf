"""Canary findings in the output of `lockstep status`."""

import msgspec

from services.supervisor.status import canary_lines
from services.supervisor.status.status_table import render
from shared.messages import CanaryFinding
from tests.unit.supervisor.status.status_reports import rank_status, status_report


def finding(name: str, size: int, microseconds: float) -> CanaryFinding:
    """Return a canary finding."""
    return CanaryFinding(name=name, digest=bytes(16), bytes=size, microseconds=microseconds)


FINDINGS = [
    finding("sum of 1 bfloat16", 2, 14.0),
    finding("sum of 4 KiB of bfloat16", 4_096, 10.0),
    finding("sum of 1 int32", 4, 12.4),
    finding("sum of 2,048 x 4,096 bfloat16", 16_777_216, 4_000.0),
    finding("65 sums of a decode of 1 row", 532_480, 910.0),
    finding("65 sums of a decode of 8 rows", 4_259_840, 1_910.0),
    finding("prompt of 4,500 tokens", 18_000, 3_210_000.0),
]
EXPECTED = (
    "12 us a sum, 4.19 GB/s in large ones, 65 sums a decode in 0.91 ms, "
    "a prompt of 4,500 tokens in 3.21 s"
)


def test_canary_line_has_latency_of_fastest_and_bandwidth_of_largest_collective_sum() -> None:
    """Latency is that of the fastest one-element sum, bandwidth that of the largest sum."""
    assert canary_lines.describe(FINDINGS) == EXPECTED


def test_status_shows_canary_line_of_each_rank() -> None:
    """Each rank has one line; without findings there is no line."""
    ranks = [msgspec.structs.replace(rank_status(number), canary=FINDINGS) for number in (0, 1)]
    lines = render(status_report(ranks=ranks)).splitlines()
    assert f"  canary       rank 0: {EXPECTED}" in lines
    assert f"               rank 1: {EXPECTED}" in lines
    assert "canary" not in render(status_report())


def test_status_shows_canary_bandwidth_below_one_gigabyte_in_megabytes() -> None:
    """A bandwidth of 105 MB/s is not shown in gigabytes."""
    slow = [*FINDINGS[:3], finding("sum of 2,048 x 64 float32", 524_288, 5_000.0)]
    assert canary_lines.describe(slow) == "12 us a sum, 105 MB/s in large ones"


def test_status_table_has_column_for_weight_bytes_of_each_rank() -> None:
    """The size of a rank's weights has a column; an unknown size is a dash."""
    ranks = [msgspec.structs.replace(rank_status(0), shard_bytes=3 * 2**20), rank_status(1)]
    *_, columns, first, second = render(status_report(ranks=ranks)).splitlines()
    column = columns.index("weights")
    assert first[column:].split()[:2] == ["3", "MiB"]
    assert second[column:].split()[0] == "-"
