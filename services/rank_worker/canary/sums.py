"""The canary's sums: collectives whose result is known in closed form, checked on every rank.

Summands are small whole numbers that every type holds exactly, in any order of addition, so the
sum is checked against the truth and not only against the other ranks. They follow from rank, place
and repetition with an odd period: a piece that is missing, shifted, stale or of another rank shows.
"""

import hashlib
import io
import statistics
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.collectives import Collectives
from shared.canary_names import SUM, decode_name
from shared.clock import Clock
from shared.errors import CanaryFailed
from shared.log import Log
from shared.messages import CanaryFinding

CHUNK_TOKENS = 2_048
"""Tokens of the largest sum: a whole prefill chunk. A constant, because no rank's own settings may
change what is summed."""

SMALL_BYTES = (4 * 1_024, 32 * 1_024)
"""Sizes at which backends have changed their way of adding; of the second, one element more."""

SMALL_REPETITIONS, CHUNK_REPETITIONS = 8, 3
"""Timed ones; one goes before them that is checked and not timed."""

EXACT_MAX = 128
"""A bfloat16 holds whole numbers exactly up to twice that."""

PERIOD_MAX = 61
STRIDE = 1_009
"""After so many places the pattern has moved by one more: no length repeats it."""

WRONG_SUMS_SHOWN_MAX = 3

_log = Log("rank_worker.canary")

COMPARED_ELEMENTS = 1 << 18
"""Elements that are compared at once: a chunk of a wide model has a hundred million."""

Summand = npt.NDArray[np.int8]


ROWS = (1, 2, 4, 8)
"""Sequences that decode together."""

REPETITIONS = 5
"""Timed ones; one more goes before them."""

_SUM = 'label ="Sum AllReduce"'
"""A sum over ranks, as MLX writes graphs."""


def check_sums(
    world: Collectives, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> list[CanaryFinding]:
    """Add up known numbers over all ranks, in the sizes and types that steps send.

    Every rank adds up everything, whatever comes out, so that all stay in step.

    Args:
        world: at least two ranks; all call this at the same point, with equal arguments.
        hidden_size: width of the model's activations.
        dtype: their type.
        clock: measures.

    Raises:
        CanaryFailed: a sum is wrong on this rank.
    """
    findings: list[CanaryFinding] = []
    wrong: list[str] = []
    for name, count, kind in _sizes(hidden_size, dtype):
        repetitions = (
            CHUNK_REPETITIONS if count == CHUNK_TOKENS * hidden_size else (SMALL_REPETITIONS)
        )
        finding, problem = _check(world, name, count, kind, repetitions, clock)
        findings.append(finding)
        if problem:
            wrong.append(f"{name}: {problem}")
    if wrong:
        raise CanaryFailed(
            f"{len(wrong)} of {len(findings)} known sums over {world.world_size} ranks are wrong "
            f"here. {'; '.join(wrong[:WRONG_SUMS_SHOWN_MAX])}."
        )
    return findings


def summand(rank: int, world_size: int, repetition: int) -> Summand:
    """Return what a rank adds at each place of the period, int8 [period]."""
    period = _period(world_size)
    place = np.arange(period)
    return ((place + rank * rank + repetition) % period - period // 2).astype(np.int8)


def expected_sum(world_size: int, repetition: int) -> npt.NDArray[np.int32]:
    """Return the sum of all ranks' summands at each place of the period, int32 [period]."""
    parts = [summand(rank, world_size, repetition) for rank in range(world_size)]
    total: npt.NDArray[np.int32] = np.sum(parts, axis=0, dtype=np.int32)
    return total


def period_indices(count: int, world_size: int) -> npt.NDArray[np.uint8]:
    """Return each element's place in the period, uint8 [count]."""
    period = _period(world_size)
    found = np.empty(count, dtype=np.uint8)
    for start in range(0, count, COMPARED_ELEMENTS):
        index = np.arange(start, min(count, start + COMPARED_ELEMENTS), dtype=np.int64)
        found[start : start + COMPARED_ELEMENTS] = (index + index // STRIDE) % period
    return found


def _period(world_size: int) -> int:
    """Return an odd number; half of it, times the ranks, is exact in every type."""
    return min(PERIOD_MAX, (2 * EXACT_MAX // world_size) | 1)


def _sizes(hidden_size: int, dtype: mx.Dtype) -> list[tuple[str, int, mx.Dtype]]:
    """Return (name, elements, type) of every sum."""
    kinds = list(dict.fromkeys((dtype, mx.float32, mx.int32)))
    small, large = SMALL_BYTES
    sizes: list[tuple[str, int, mx.Dtype]] = []
    for kind in kinds:
        text = str(kind).rpartition(".")[2]
        sizes += [
            (f"{SUM}1 {text}", 1, kind),
            (f"{SUM}{small // 1_024} KiB of {text}", small // kind.size, kind),
            (f"{SUM}{large // 1_024} KiB and 1 of {text}", large // kind.size + 1, kind),
        ]
    text = str(dtype).rpartition(".")[2]
    count = CHUNK_TOKENS * hidden_size
    sizes.append((f"{SUM}{CHUNK_TOKENS:,} x {hidden_size:,} {text}", count, dtype))
    return sizes


def _check(
    world: Collectives,
    name: str,
    count: int,
    dtype: mx.Dtype,
    repetitions: int,
    clock: Clock,
) -> tuple[CanaryFinding, str]:
    """Return what one size gave, and how it is wrong ("": it is not)."""
    place = period_indices(count, world.world_size)
    digest = hashlib.blake2b(digest_size=16)
    seconds: list[float] = []
    problem = ""
    for repetition in range(repetitions + 1):
        own = mx.array(summand(world.rank, world.world_size, repetition)[place])
        addend = own.astype(dtype)
        mx.eval(addend)
        del own
        began_s = clock.now()
        total = world.sum_ids(addend)
        mx.eval(total)
        if repetition:
            seconds.append(clock.now() - began_s)
        del addend
        expected = expected_sum(world.world_size, repetition)
        difference = _compare(total, expected, place, digest.update)
        problem = problem or difference
    microseconds = statistics.median(seconds) * 1e6
    _log.debug("canary_sum", name=name, microseconds=round(microseconds, 1), problem=problem)
    finding = CanaryFinding(
        name=name,
        digest=digest.digest(),
        bytes=count * dtype.size,
        microseconds=microseconds,
    )
    return finding, problem


def _compare(
    total: mx.array,
    due: npt.NDArray[np.int32],
    place: npt.NDArray[np.uint8],
    digest: Callable[[bytes], object],
) -> str:
    """Digest a sum and return how it differs from the truth; "" if it does not.

    Block by block: all of it in wider types would take many times its memory.

    Args:
        total: [count], whole numbers of any type.
        due: at each place of the period.
        place: [count], of each element.
        digest: takes in the bytes of what was found.
    """
    wrong, first = 0, ""
    for start in range(0, len(place), COMPARED_ELEMENTS):
        part = total[start : start + COMPARED_ELEMENTS]
        # float32 holds all that the narrower types do, and NumPy knows it.
        found = np.array(part if part.dtype == mx.int32 else part.astype(mx.float32))
        digest(found.tobytes())
        right = due[place[start : start + COMPARED_ELEMENTS]]
        is_wrong = found != right
        if not wrong and is_wrong.any():
            at = int(np.argmax(is_wrong))
            first = f"element {start + at:,} is {found[at]:g} instead of {right[at]}"
        wrong += int(is_wrong.sum())
    return f"{first}, and {wrong:,} of {len(place):,} are wrong" if wrong else ""


def count_sums(model: nn.Module) -> int:
    """Return how many sums over ranks a decode of one row has; nothing is computed."""
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    graph = io.StringIO()
    mx.export_to_dot(graph, model(tokens, cache=make_prompt_cache(model)))
    return graph.getvalue().count(_SUM)


def time_sums(
    world: Collectives, count: int, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> list[CanaryFinding]:
    """Time `count` sums in a row, for each number of rows.

    Args:
        world: all ranks call this at the same point, with equal arguments.
        count: of sums.
        hidden_size: width of a row.
        dtype: of its elements.
        clock: measures.
    """
    return [_time(world, count, rows, hidden_size, dtype, clock) for rows in ROWS]


def _time(
    world: Collectives, count: int, rows: int, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> CanaryFinding:
    seconds: list[float] = []
    # Nothing added up stays nothing, however often.
    state = mx.zeros((rows, hidden_size), dtype=dtype)
    mx.eval(state)
    for _ in range(REPETITIONS + 1):
        began_s = clock.now()
        for _ in range(count):
            state = world.sum_ids(state)
        mx.eval(state)
        seconds.append(clock.now() - began_s)
    digest = hashlib.blake2b(bytes(mx.array(state, dtype=mx.float32)), digest_size=16)
    return CanaryFinding(
        name=decode_name(count, rows),
        digest=digest.digest(),
        bytes=count * state.nbytes,
        microseconds=statistics.median(seconds[1:]) * 1e6,
    )
