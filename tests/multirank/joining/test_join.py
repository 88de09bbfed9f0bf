"""Real ranks join, execute steps, fail and leave; a listener plays the scheduler."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from shared.messages import (
    AdmittedSequence,
    Heartbeat,
    LeaveWorld,
    PrefillChunk,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    Sampling,
    StepFinished,
    StepPlan,
)
from tests.multirank.worlds.scripted_scheduler import (
    EPOCH,
    GONE_S,
    SLACK_S,
    ScriptedScheduler,
    two_free_ports,
)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedScheduler]:
    """Return a scripted scheduler; its ranks are killed afterwards."""
    link = ScriptedScheduler(tmp_path)
    yield link
    link.close()


def _plan(step_id: int, *, deadline_s: float = 10.0) -> StepPlan:
    first = step_id == 1
    admitted = AdmittedSequence(
        sequence_id=9, slot=0, tokens=[5, 6, 7], prompt_tokens=3, sampling=Sampling(seed=4)
    )
    chunk = PrefillChunk(sequence_id=9, start=0, length=3, samples=True)
    return StepPlan(
        epoch=EPOCH,
        step_id=step_id,
        deadline_s=deadline_s,
        row_count=1,
        row_tokens=64,
        admitted=[admitted] if first else [],
        prefill_chunks=[chunk] if first else [],
        decodes=[] if first else [9],
    )


def _digests(finished: list[StepFinished]) -> dict[int, set[bytes]]:
    found: dict[int, set[bytes]] = {}
    for message in finished:
        found.setdefault(message.step_id, set()).add(message.digest)
    return found


def test_two_ranks_join_execute_steps_with_equal_receipts_and_end(
    scheduler: ScriptedScheduler,
) -> None:
    """Ranks report ready, execute steps with equal receipts and end within a second."""
    for rank in range(2):
        scheduler.start(rank, 2)
    ready = scheduler.join_world(2)
    for step_id in range(1, 9):
        scheduler.send_all(_plan(step_id))
    scheduler.poll_until(lambda: len(scheduler.messages_of(StepFinished)) == 16)
    scheduler.poll_until(lambda: len(scheduler.messages_of(Heartbeat)) >= 2)
    scheduler.send_all(LeaveWorld(epoch=EPOCH, detail="the test is over"))
    codes = scheduler.wait_until_ended()

    finished = scheduler.messages_of(StepFinished)
    digests = _digests(finished)
    assert list(digests) == list(range(1, 9))
    assert all(len(found) == 1 for found in digests.values())
    assert all(len(m.tokens) == (1 if m.rank == 0 else 0) for m in finished)
    assert len({report.model_fingerprint for report in ready}) == 1
    assert {message.stage for message in scheduler.messages_of(RankLoading)} >= {
        "joining",
        "loading",
    }
    assert codes == [limits.EXIT_WORLD_LOST] * 2


def test_rank_reports_failure_and_ends_when_peer_is_killed(scheduler: ScriptedScheduler) -> None:
    """After SIGKILL of one rank the other fails its next step, reports it and ends."""
    for rank in range(2):
        scheduler.start(rank, 2)
    scheduler.join_world(2)
    scheduler.send_all(_plan(1))
    scheduler.poll_until(lambda: len(scheduler.messages_of(StepFinished)) == 2)
    scheduler.processes[1].kill()
    scheduler.processes[1].wait()
    scheduler.send(0, _plan(2))
    codes = scheduler.wait_until_ended()

    assert codes == [limits.EXIT_WORLD_LOST, -signal.SIGKILL]
    assert [(m.rank, m.permanent) for m in scheduler.messages_of(RankFailed)] == [(0, False)]


def test_watchdog_ends_rank_waiting_in_collective_at_step_deadline(
    scheduler: ScriptedScheduler,
) -> None:
    """A rank whose peer got no plan waits in a collective until its watchdog ends it."""
    for rank in range(2):
        scheduler.start(rank, 2)
    scheduler.join_world(2)
    scheduler.send(0, _plan(1, deadline_s=0.5))
    scheduler.poll_until(lambda: scheduler.processes[0].poll() is not None, GONE_S + SLACK_S)

    assert scheduler.processes[0].returncode == limits.EXIT_WORLD_LOST
    assert scheduler.messages_of(StepFinished) == []


@pytest.mark.proof
def test_ranks_started_by_mlx_launch_join_and_send_equal_receipts(
    scheduler: ScriptedScheduler,
) -> None:
    """Ranks that MLX's launcher starts join with its environment and send equal receipts."""
    main = "from mlx._distributed_utils.launch import main; main()"
    flags = ["-n", "2", "--backend", "ring", "--starting-port", str(two_free_ports())]
    scheduler.start(-1, 2, sys.executable, "-c", main, *flags, "--")
    scheduler.join_world(2)
    for step_id in (1, 2, 3):
        scheduler.send_all(_plan(step_id))
    scheduler.poll_until(lambda: len(scheduler.messages_of(StepFinished)) == 6)
    scheduler.send_all(LeaveWorld(epoch=EPOCH, detail="the test is over"))
    scheduler.wait_until_ended()

    assert all(hello.launched for hello in scheduler.messages_of(RankHello))
    assert all(
        len(digests) == 1 for digests in _digests(scheduler.messages_of(StepFinished)).values()
    )


def test_rank_reports_permanent_failure_and_exits_when_model_cannot_be_split(
    scheduler: ScriptedScheduler,
) -> None:
    """A model with eight heads on three ranks fails before joining; the report names the possible
    numbers of ranks."""
    scheduler.join_rank_0(3)
    codes = scheduler.wait_until_ended(60.0)

    (failed,) = scheduler.messages_of(RankFailed)
    assert failed.permanent
    assert "cannot be split over 3 ranks" in failed.detail
    assert "set world.size to 1, 2 or 4" in failed.detail
    assert codes == [limits.EXIT_CONFIG]


def test_joined_rank_ends_when_scheduler_closes_link(scheduler: ScriptedScheduler) -> None:
    """A joined rank ends when its scheduler closes the link."""
    scheduler.join_rank_0()
    scheduler.poll_until(lambda: bool(scheduler.messages_of(RankReady)))
    scheduler._link.drop(scheduler.peers[0])
    assert scheduler.processes[0].wait(timeout=GONE_S + SLACK_S) == limits.EXIT_WORLD_LOST


def test_rank_reports_gap_in_step_ids_as_failure_and_ends(scheduler: ScriptedScheduler) -> None:
    """Plan 3 after plan 1 is reported as a failure and not executed."""
    scheduler.join_rank_0()
    scheduler.poll_until(lambda: bool(scheduler.messages_of(RankReady)))
    scheduler.send(0, _plan(1))
    scheduler.send(0, _plan(3))
    codes = scheduler.wait_until_ended()

    (failed,) = scheduler.messages_of(RankFailed)
    assert "Step plan 3 came after 1" in failed.detail
    assert codes == [limits.EXIT_SOFTWARE]
    assert all(message.step_id == 1 for message in scheduler.messages_of(StepFinished))
