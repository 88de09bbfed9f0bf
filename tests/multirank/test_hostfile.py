"""Worlds that a hostfile describes: real ranks over the real ring, and a peer that is not there."""

import json
import time
from pathlib import Path

import pytest

from services.scheduler.world.environment import rank_environment
from shared import limits
from shared.messages import RankFailed, RankHello, RequestFinished
from tests.multirank.cluster import cluster
from tests.multirank.test_join import EPOCH, Scheduler
from tests.orders import join_order
from tests.ports import free_port

INIT_S = 20.0
PROMPT = [5, 6, 7, 8]


def _tokens(ranks: int, **settings: str) -> list[int]:
    with cluster(ranks, **settings) as client:
        client.submit("one", PROMPT, max_tokens=8, stop_ids=[])
        client.wait(["one"], 60.0)
        assert isinstance(client.ends["one"], RequestFinished)
        assert client.status is not None
        assert len(client.status.ranks) == ranks
        return client.tokens["one"]


def test_two_ranks_from_a_hostfile(tmp_path: Path) -> None:
    """Names instead of numbers, and two connections each: the tokens are those of one rank."""
    rows = [[f"localhost:{free_port()}" for _ in range(2)] for _ in range(2)]
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(rows))

    several = _tokens(2, WORLD_HOSTFILE=str(hostfile))

    assert len(several) == 8
    assert several == _tokens(1)


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    return Scheduler(tmp_path)


@pytest.mark.proof
def test_a_peer_that_cannot_be_reached_is_named(scheduler: Scheduler) -> None:
    """The rank says which one, where, and ends within the deadline for joining."""
    other = "192.0.2.7:5000"
    environment, files = rank_environment(
        "ring", 0, 2, [], hostfile_text=json.dumps([[f"127.0.0.1:{free_port()}"], [other]])
    )
    order = join_order(
        0,
        2,
        epoch=EPOCH,
        sharding="tensor",
        environment=environment,
        files=files,
        init_deadline_s=INIT_S,
        load_deadline_s=30.0,
        step_deadline_max_s=60.0,
    )
    try:
        scheduler.start(0, 2)
        scheduler.until(lambda: bool(scheduler.of(RankHello)))
        scheduler.peers = {0: scheduler.heard[0][0]}
        started_s = time.monotonic()
        scheduler.order(0, order)
        scheduler.until(lambda: bool(scheduler.of(RankFailed)), 2.0 * INIT_S)
        seconds = time.monotonic() - started_s
        codes = scheduler.wait_gone()
    finally:
        scheduler.close()

    (failed,) = scheduler.of(RankFailed)
    assert f"cannot reach rank 1 at {other} (" in failed.detail
    assert "Rank 1 has not reached rank 0" in failed.detail
    assert not failed.permanent
    assert codes == [limits.EXIT_WORLD_LOST]
    assert seconds < INIT_S
