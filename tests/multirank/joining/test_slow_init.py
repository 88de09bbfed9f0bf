"""MLX's init that is slow, stuck or fails, on real ranks: it holds the interpreter's lock."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.chaos.cluster.stack import StackOptions
from tests.chaos.cluster.unsupervised_stack import UnsupervisedStack
from tests.multirank.worlds.refused_world import DEADLINE_S, ROLES, run_stack, wait_for_failure
from tests.support.waiting import wait_until

StartWorld = Callable[..., UnsupervisedStack]

PROGRAM = "tests.multirank.worlds.slow_init"
NO_DEVICE = "[jaccl] Could not find device rdma_en9 (1 available)"
CLOSED = "[jaccl] Recv failed with errno=2"


@pytest.fixture
def start_world() -> Iterator[StartWorld]:
    """Return a function that starts a world of two; it is stopped after the test.

    The function takes what `slow_init` reads for each rank, the scheduler's limit for silence in
    seconds, and settings.
    """
    with ExitStack() as stacks:

        def start(
            first: str, second: str, silence_s: float, **settings: object
        ) -> UnsupervisedStack:
            options = StackOptions(ranks=2, settings=(("cache.ssd", False), *settings.items()))
            commands = {
                "scheduler": lambda _: ["-m", PROGRAM, "scheduler"],
                "rank 0": lambda _: ["-m", PROGRAM, "rank", "--rank", "0"],
                "rank 1": lambda _: ["-m", PROGRAM, "rank", "--rank", "1"],
            }
            stack = UnsupervisedStack(options, commands, ROLES)
            stack.environment |= {
                "SLOW_INIT_0": first, "SLOW_INIT_1": second, "SILENCE_S": str(silence_s),
            }  # fmt: skip
            return stacks.enter_context(run_stack(stack))

        yield start


def _wait_until_ready(stack: UnsupervisedStack) -> None:
    wait_until(
        lambda: (status := stack.try_status()) is not None and status.ready,
        DEADLINE_S,
        failure=stack.log.tail,
    )


@pytest.mark.parametrize(
    ("held_s", "silence_s"),
    [(2.5, 1.0), pytest.param(14.0, 10.0, marks=pytest.mark.proof)],
)
def test_rank_joins_when_init_holds_interpreter_lock_beyond_silence_limit(
    start_world: StartWorld, held_s: float, silence_s: float
) -> None:
    """A rank that can send nothing during MLX's init is not lost; its first start succeeds."""
    stack = start_world("0", str(held_s), silence_s)
    _wait_until_ready(stack)

    assert [stack.starts(name) for name in ROLES] == [1, 1, 1]


def test_stuck_init_ends_at_deadline_with_names_of_its_ranks(start_world: StartWorld) -> None:
    """Ranks that never come back from MLX's init end by `scheduler.init_deadline_s`; the status
    says which ranks, where they are, and what to do."""
    settings = {"scheduler.init_deadline_s": 4.0, "scheduler.epochs_failed_max": 1}
    stack = start_world("0", "3600", 1.0, **settings)
    reason = wait_for_failure(stack).reason

    assert "have not joined within 4 s (scheduler.init_deadline_s): rank 0 on " in reason
    assert "are inside MLX's init of ring" in reason
    assert "raise scheduler.init_deadline_s" in reason


def test_late_cause_of_one_rank_replaces_symptom_of_another(start_world: StartWorld) -> None:
    """A rank reports that a peer has ended, then the peer reports why: the status has the cause,
    although the symptom ended all trying."""
    settings = {"scheduler.epochs_failed_max": 1}
    stack = start_world(f"0.2 {CLOSED}", f"1.0 {NO_DEVICE}", 1.0, **settings)
    wait_for_failure(stack)

    def explained() -> str:
        status = stack.try_status()
        return status.reason if status is not None and NO_DEVICE in status.reason else ""

    reason = wait_until(explained, DEADLINE_S, failure=stack.log.tail)
    assert f"The last one: Rank 1 failed: Joining the world over ring failed: {NO_DEVICE}" in reason
    assert "a peer ended while joining" in stack.log.tail()
    assert "No such file" not in stack.log.tail()
