"""Sums of the canary: collectives checked against known results; timing of a decode step's sums.

Summands are small integers that every dtype holds exactly in any order of addition, so each rank
checks the sum itself. They depend on rank, element and repetition with an odd period, so that a
missing, shifted, stale or foreign part of the data changes the result.
"""

import hashlib
import io
import statistics
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.peers.collectives import Collectives
from shared.clock import Clock
from shared.errors import CanaryFailed
from shared.log import Log
from shared.measurements.canary_names import SUM_PREFIX, decode_name
from shared.messages import CanaryFinding

CHUNK_TOKENS = 2_048
"""Tokens of the largest sum: a whole prefill chunk. A constant, so that settings of one rank do not
change the sums."""

SMALL_BYTES = (4 * 1_024, 32 * 1_024)
"""Sizes at which backends change their algorithm; the second with one more element."""

SMALL_REPETITIONS, CHUNK_REPETITIONS = 8, 3
"""Timed repetitions. One more before them is checked, but not timed."""

SUMMAND_SUM_MAX = 128
"""Bound of the sums: bfloat16 holds integers exactly up to twice this."""

PERIOD_MAX = 61
STRIDE = 1_009
"""Elements after which the pattern shifts by one, so that it does not repeat."""

WRONG_SUMS_SHOWN_MAX = 3

_log = Log("rank_worker.canary")

COMPARED_ELEMENTS = 1 << 18
"""Elements compared at a time; a chunk of a wide model has a hundred million."""

DECODE_ROWS = (1, 2, 4, 8)
"""Batch sizes whose decode steps are timed."""

DECODE_REPETITIONS = 5
"""Timed repetitions, after one that is not timed."""

_SUM_NODE = 'label ="Sum AllReduce"'
"""A sum over ranks in a graph that MLX exports."""


def check_sums(
    world: Collectives, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> list[CanaryFinding]:
    """Sum known numbers over all ranks and compare every element with its known sum.

    Every rank runs all sums even after an error, so that the ranks stay in step.

    Args:
        world: at least two ranks; all call this at the same point, with equal arguments.
        hidden_size: H, width of the model's activations.
        dtype: of the activations.
        clock: measures durations.

    Returns:
        One finding per size and dtype: digest of the results of all repetitions, bytes of one sum,
        median microseconds of a sum.

    Raises:
        CanaryFailed: a sum is wrong on this rank.
    """
    findings: list[CanaryFinding] = []
    wrong: list[str] = []
    for name, count, sum_dtype, repetitions in _sum_sizes(hidden_size, dtype):
        finding, problem = _check_sum(world, name, count, sum_dtype, repetitions, clock)
        findings.append(finding)
        if problem:
            wrong.append(f"{name}: {problem}")
    if wrong:
        raise CanaryFailed(
            f"{len(wrong)} of {len(findings)} known sums over {world.world_size} ranks are wrong "
            f"here. {'; '.join(wrong[:WRONG_SUMS_SHOWN_MAX])}. Check cables and drivers of the "
            "links between the ranks, or set world.backend to ring."
        )
    return findings


def of_rank_0(world: Collectives, *numbers: int) -> list[int]:
    """Return the numbers that rank 0 passes, on all ranks. A collective, run while loading (I3).

    Args:
        world: all ranks call this at the same point, with equally many numbers.
        numbers: int32, from 0 on; those of other ranks do not count.
    """
    own = numbers if world.rank == 0 else [0] * len(numbers)
    return list(map(int, np.array(world.sum_ids(mx.array(own, dtype=mx.int32)))))


def summand(rank: int, world_size: int, repetition: int) -> npt.NDArray[np.int8]:
    """Return the numbers that a rank adds, for one period of the repeating pattern, int8 [period].

    Args:
        rank: the rank.
        world_size: number of ranks, which determines the period.
        repetition: number of the repetition, from 0 on; it shifts the pattern.
    """
    period = _period(world_size)
    index = np.arange(period)
    return ((index + rank * rank + repetition) % period - period // 2).astype(np.int8)


def expected_sum(world_size: int, repetition: int) -> npt.NDArray[np.int32]:
    """Return the sum of all ranks' `summand` patterns, int32 [period].

    Args:
        world_size: number of ranks.
        repetition: number of the repetition, from 0 on; it shifts the pattern.
    """
    parts = [summand(rank, world_size, repetition) for rank in range(world_size)]
    total: npt.NDArray[np.int32] = np.sum(parts, axis=0, dtype=np.int32)
    return total


def period_indices(count: int, world_size: int) -> npt.NDArray[np.uint8]:
    """Return, for each element of a sum, its index in the repeating pattern, uint8 [count].

    Args:
        count: number of elements.
        world_size: number of ranks, which determines the pattern's period.
    """
    period = _period(world_size)
    found = np.empty(count, dtype=np.uint8)
    for start in range(0, count, COMPARED_ELEMENTS):
        index = np.arange(start, min(count, start + COMPARED_ELEMENTS), dtype=np.int64)
        found[start : start + COMPARED_ELEMENTS] = (index + index // STRIDE) % period
    return found


def _period(world_size: int) -> int:
    """Return an odd period, so small that every dtype holds the sums of all ranks exactly."""
    return min(PERIOD_MAX, (2 * SUMMAND_SUM_MAX // world_size) | 1)


def _sum_sizes(hidden_size: int, dtype: mx.Dtype) -> Iterator[tuple[str, int, mx.Dtype, int]]:
    """Yield (name, elements, dtype, timed repetitions) of every sum."""
    small, large = SMALL_BYTES
    for one in dict.fromkeys((dtype, mx.float32, mx.int32)):
        counts = {
            "1": 1,
            f"{small // 1_024} KiB of": small // one.size,
            f"{large // 1_024} KiB and 1 of": large // one.size + 1,
        }
        for size, count in counts.items():
            yield f"{SUM_PREFIX}{size} {_dtype_name(one)}", count, one, SMALL_REPETITIONS
    name = f"{SUM_PREFIX}{CHUNK_TOKENS:,} x {hidden_size:,} {_dtype_name(dtype)}"
    yield name, CHUNK_TOKENS * hidden_size, dtype, CHUNK_REPETITIONS


def _dtype_name(dtype: mx.Dtype) -> str:
    """Return a type's name without its module, such as "bfloat16"."""
    return str(dtype).rpartition(".")[2]


def _check_sum(
    world: Collectives,
    name: str,
    count: int,
    dtype: mx.Dtype,
    repetitions: int,
    clock: Clock,
) -> tuple[CanaryFinding, str]:
    """Return the finding of one size, and a description of the error, "" without one."""
    indices = period_indices(count, world.world_size)
    digest = hashlib.blake2b(digest_size=16)
    seconds: list[float] = []
    problem = ""
    for repetition in range(repetitions + 1):
        pattern = summand(world.rank, world.world_size, repetition)
        addend = mx.array(pattern[indices]).astype(dtype)
        mx.eval(addend)
        began_s = clock.now()
        total = world.sum_ids(addend)
        mx.eval(total)
        if repetition:
            seconds.append(clock.now() - began_s)
        del addend
        expected = expected_sum(world.world_size, repetition)
        # Compared even after an error, because that digests the sum.
        mismatch = _compare(total, expected, indices, digest.update)
        problem = problem or mismatch
    microseconds = statistics.median(seconds) * 1e6
    _log.debug("canary_sum", name=name, microseconds=round(microseconds, 1), problem=problem)
    size = count * dtype.size
    finding = CanaryFinding(
        name=name, digest=digest.digest(), bytes=size, microseconds=microseconds
    )
    return finding, problem


def _compare(
    total: mx.array,
    expected: npt.NDArray[np.int32],
    indices: npt.NDArray[np.uint8],
    digest: Callable[[bytes], object],
) -> str:
    """Digest a sum and describe how it differs from the expected one; "" if it does not.

    Compares in blocks: wider copies of the whole array would take several times its memory.

    Args:
        total: [count] of any dtype, holding integers.
        expected: int32 [period].
        indices: uint8 [count], index in the period of each element.
        digest: called with the bytes of each block.
    """
    wrong_count, first_mismatch = 0, ""
    for start in range(0, len(indices), COMPARED_ELEMENTS):
        part = total[start : start + COMPARED_ELEMENTS]
        # NumPy has no bfloat16; float32 holds its values exactly.
        block = np.array(part if part.dtype == mx.int32 else part.astype(mx.float32))
        digest(block.tobytes())
        expected_block = expected[indices[start : start + COMPARED_ELEMENTS]]
        is_wrong = block != expected_block
        if not wrong_count and is_wrong.any():
            at = int(np.argmax(is_wrong))
            first_mismatch = (
                f"element {start + at:,} is {_digits(block[at])} instead of {expected_block[at]}"
            )
        wrong_count += int(is_wrong.sum())
    if not wrong_count:
        return ""
    return f"{first_mismatch}, and {wrong_count:,} of {len(indices):,} are wrong"


def _digits(number: np.generic) -> str:
    """Return the shortest text that no other number of this type has, without ".0"."""
    return str(number).removesuffix(".0")


def count_sums(model: nn.Module) -> int:
    """Return how many sums over ranks a decode of one row has; nothing is computed."""
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    graph = io.StringIO()
    mx.export_to_dot(graph, model(tokens, cache=make_prompt_cache(model)))
    return graph.getvalue().count(_SUM_NODE)


def time_sums(
    world: Collectives, count: int, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> list[CanaryFinding]:
    """Time the sums of a decode step, one after the other as layers run them, without other work.

    That is the least time that a decode step spends in collectives on these links, unless kernels
    sum in shared GPU memory instead.

    Args:
        world: all ranks call this at the same point, with equal arguments.
        count: sums per decode step.
        hidden_size: H, width of a row.
        dtype: of the activations.
        clock: measures durations.

    Returns:
        One finding per batch size in `DECODE_ROWS`: digest of the result, and for all `count` sums
        together their bytes and median microseconds.
    """
    findings: list[CanaryFinding] = []
    for rows in DECODE_ROWS:
        seconds: list[float] = []
        # Zeros stay zeros in every repetition.
        summed = mx.zeros((rows, hidden_size), dtype=dtype)
        mx.eval(summed)
        for _ in range(DECODE_REPETITIONS + 1):
            began_s = clock.now()
            for _ in range(count):
                summed = world.sum_ids(summed)
            mx.eval(summed)
            seconds.append(clock.now() - began_s)
        digest = hashlib.blake2b(bytes(mx.array(summed, dtype=mx.float32)), digest_size=16)
        finding = CanaryFinding(
            name=decode_name(count, rows),
            digest=digest.digest(),
            bytes=count * summed.nbytes,
            microseconds=statistics.median(seconds[1:]) * 1e6,
        )
        findings.append(finding)
    return findings
