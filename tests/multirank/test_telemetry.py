"""What two real ranks report of their steps, against measurements of its own kind by this test."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.supervisor.status.profile_query import ProfileQuery
from shared.configuration.settings import Config, SchedulerConfig
from shared.measurements.step_losses import find_losses
from shared.messages import MeasuredStep, RankStatus
from shared.model.location import demo_folder
from tests.multirank.worlds.cluster import Client, cluster
from tests.support.waiting import wait_until

STEPS = 12
TOKENS = 3_000
DELAY_MS = 6.0


def _measure(client: Client) -> list[MeasuredStep]:
    """Measure steps of a running request, decodes of one row."""
    config = Config(scheduler=SchedulerConfig(gateway_address=client.address))
    with ProfileQuery(config) as query:
        return query.measure(STEPS, 60.0, lambda _: client.poll())


def _resident_bytes(rank: RankStatus) -> int:
    pages = int(Path(f"/proc/{rank.pid}/statm").read_text().split()[1])
    return pages * 4_096


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two ranks of which no step is measured unless this is ordered."""
    with cluster(2, SCHEDULER_PROFILE_EVERY_STEPS="0") as client:
        yield client


def test_status_of_real_ranks_agrees_with_clock_and_memory_of_this_machine(client: Client) -> None:
    """Both ranks have this machine's clock, and use at least the memory that they report."""
    began_s = time.monotonic()
    client.submit("a", [5, 6, 7], max_tokens=150)
    client.wait_for_ends(["a"], 60.0)
    wait_until(lambda: all(one.clock_error_s > 0.0 for one in client.query_status().ranks), 10.0)
    took_s = time.monotonic() - began_s
    for rank in client.query_status().ranks:
        assert abs(rank.clock_offset_s) <= rank.clock_error_s + 1e-4
        assert rank.clock_error_s < 0.2
        assert rank.shard_bytes <= rank.memory_bytes <= rank.peak_bytes
        assert rank.memory_bytes + rank.cached_bytes < _resident_bytes(rank)
        assert 0.0 < rank.busy_s + rank.idle_s < took_s
        assert rank.silence_s < 5.0
        assert rank.parts == []


def test_measured_steps_on_two_ranks_have_same_tokens_and_known_collectives(
    client: Client,
) -> None:
    """The text does not change while steps are measured, and the bytes that ranks exchange are
    those of the model's shape."""
    client.submit("before", [9, 8, 7], max_tokens=400)
    client.wait_for_ends(["before"], 60.0)
    client.submit("measured", [9, 8, 7], max_tokens=400)
    client.poll_until(lambda: len(client.tokens["measured"]) > 5, 20.0, "no tokens")
    steps = _measure(client)
    client.wait_for_ends(["measured"], 60.0)
    assert client.tokens["measured"] == client.tokens["before"]
    assert len(steps) == STEPS
    shape = json.loads((demo_folder() / "config.json").read_text())
    layers = shape["num_hidden_layers"]
    for step in steps:
        assert (step.kind, step.decodes, len(step.profiles)) == ("decode", 1, 2)
        for profile in step.profiles:
            assert sum(one.seconds for one in profile.parts) == pytest.approx(profile.seconds)
            (sums,) = (one for one in profile.parts if one.part == "collective")
            # Two sums of a layer's output, and one that distributes the token id.
            assert sums.runs == 2 * layers + 1
            assert sums.bytes == 2 * layers * shape["hidden_size"] * 4 + 4
    first, second = client.query_status().ranks
    assert {one.part for one in first.parts} == {one.part for one in second.parts}


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["attention", "collective"])
def test_rank_with_planted_delay_is_named_with_its_part(kind: str) -> None:
    """The largest loss is the wait for the rank that is late, and the sentence says where."""
    slow = ("tests.multirank.worlds.slow_rank", kind, str(DELAY_MS))
    with cluster(2, None, {1: slow}, SCHEDULER_PROFILE_EVERY_STEPS="20") as client:
        client.submit("a", [9, 8, 7], max_tokens=TOKENS)
        client.poll_until(lambda: len(client.tokens["a"]) > 50, 60.0, "no tokens")
        steps = _measure(client)
        first, second = client.query_status().ranks
    layers = json.loads((demo_folder() / "config.json").read_text())["num_hidden_layers"]
    loss = find_losses(steps)[0]
    assert loss.sentence.startswith(
        f"The others wait {loss.seconds * 1e3:.2f} ms a step for rank 1"
    )
    part = "attention" if kind == "attention" else "(attention|the MLP)"
    assert loss.sentence.partition(": ")[2].startswith(tuple(part.strip("()").split("|")))
    runs = layers if kind == "attention" else 2 * layers
    assert 0.7 * runs * DELAY_MS / 1e3 < loss.seconds < 2 * runs * DELAY_MS / 1e3
    # Steps are measured without an order too, and others have waited for the late rank.
    assert second.awaited_s > 5 * first.awaited_s
