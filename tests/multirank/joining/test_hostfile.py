"""Worlds from a hostfile: real ranks, and a peer that cannot be reached."""

import json
import time
from pathlib import Path

import pytest

from services.commands.deployment import hostfile
from services.scheduler.world.environment import rank_environment
from shared import limits
from shared.configuration import inventory
from shared.messages import RankFailed, RankHello, RequestFinished
from tests.multirank.worlds.cluster import cluster
from tests.multirank.worlds.scripted_scheduler import EPOCH, ScriptedScheduler
from tests.support.orders import join_order
from tests.support.ports import free_port

INIT_S = 20.0
PROMPT = [5, 6, 7, 8]


def _generate(ranks: int, **settings: str) -> list[int]:
    with cluster(ranks, **settings) as client:
        client.submit("one", PROMPT, max_tokens=8, stop_ids=[])
        client.wait_for_ends(["one"], 60.0)
        assert isinstance(client.ends["one"], RequestFinished)
        assert client.status is not None
        assert len(client.status.ranks) == ranks
        return client.tokens["one"]


@pytest.mark.proof
def test_two_ranks_started_from_hostfile_generate_same_tokens_as_one_rank(tmp_path: Path) -> None:
    """With host names and two connections per rank the tokens equal those of one rank."""
    rows = [[f"localhost:{free_port()}" for _ in range(2)] for _ in range(2)]
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(rows))

    two_ranks = _generate(2, WORLD_HOSTFILE=str(hostfile))

    assert len(two_ranks) == 8
    assert two_ranks == _generate(1)


@pytest.mark.proof
def test_two_ranks_started_from_hostfile_of_inventory_form_a_world(tmp_path: Path) -> None:
    """A hostfile that `lockstep hostfile` writes lets real ranks connect over the ring."""
    alone = {"name": "here", "roles": ["gateway", "scheduler", "cache_store"], "ranks": 2}
    hosts = inventory.parse({"hosts": [alone]}, "cluster.toml")
    text = hostfile.render(hosts, "ring", free_port())
    file = tmp_path / "hosts.json"
    file.write_text(text)

    assert len(_generate(2, WORLD_HOSTFILE=str(file))) == 8


@pytest.fixture
def scheduler(tmp_path: Path) -> ScriptedScheduler:
    """Return a scripted scheduler."""
    return ScriptedScheduler(tmp_path)


@pytest.mark.proof
def test_rank_names_unreachable_peer_and_ends_before_join_deadline(
    scheduler: ScriptedScheduler,
) -> None:
    """The rank names the unreachable peer and ends before the deadline for joining."""
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
        scheduler.poll_until(lambda: bool(scheduler.messages_of(RankHello)))
        scheduler.peers = {0: scheduler.messages[0][0]}
        started_s = time.monotonic()
        scheduler.send(0, order)
        scheduler.poll_until(lambda: bool(scheduler.messages_of(RankFailed)), 2.0 * INIT_S)
        seconds = time.monotonic() - started_s
        codes = scheduler.wait_until_ended()
    finally:
        scheduler.close()

    (failed,) = scheduler.messages_of(RankFailed)
    assert f"cannot reach rank 1 at {other} (" in failed.detail
    assert "Rank 1 has not reached rank 0" in failed.detail
    assert not failed.permanent
    assert codes == [limits.EXIT_WORLD_LOST]
    assert seconds < INIT_S
