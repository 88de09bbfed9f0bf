"""What two real ranks report of their steps, against measurements of its own kind by this test."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.supervisor.status.profile_query import ProfileQuery
from shared.configuration.settings import Config, SchedulerConfig
from shared.measurements.step_losses import find_losses, mean_exchanges, mean_seconds
from shared.measurements.trace import build_trace
from shared.messages import MeasuredStep, PartTotal, RankStatus, StatusReported
from shared.messages.telemetry.step_profile import NO_LAYER, Part, unpack_spans
from shared.model.location import demo_folder
from tests.multirank.worlds.cluster import Client, cluster
from tests.multirank.worlds.saved_model import save_model
from tests.support.waiting import wait_until

STEPS = 12
TOKENS = 3_000
LAG_S = 0.15
"""Longest way of messages on a busy machine, several of them added up."""


def _measure(client: Client) -> list[MeasuredStep]:
    """Measure steps of a running request, decodes of one row."""
    config = Config(scheduler=SchedulerConfig(gateway_address=client.address))
    with ProfileQuery(config) as query:
        query.begin(STEPS)
        return query.collect(STEPS, 60.0, lambda _: client.poll())


def _trace(client: Client) -> dict[str, Any]:
    """Return the trace of the last steps, with those that were measured."""
    config = Config(scheduler=SchedulerConfig(gateway_address=client.address))
    with ProfileQuery(config) as query:
        query.status()
        return build_trace(query.trace(60.0))


def _resident_bytes(rank: RankStatus) -> int:
    pages = int(Path(f"/proc/{rank.pid}/statm").read_text().split()[1])
    return pages * 4_096


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two ranks with one row, of which no step is measured part by part unless this is ordered."""
    settings = {"PROFILE_EVERY_STEPS": "0", "RUNNING_SEQUENCES_MAX": "1"}
    with cluster(2, **{f"SCHEDULER_{name}": value for name, value in settings.items()}) as client:
        yield client


def test_status_of_real_ranks_agrees_with_clock_and_memory_of_this_machine(client: Client) -> None:
    """Both ranks have this machine's clock, and use at least the memory that they report."""
    client.submit("a", [5, 6, 7], max_tokens=150)
    client.wait_for_ends(["a"], 60.0)
    wait_until(lambda: all(one.clock_error_s > 0.0 for one in client.query_status().ranks), 10.0)
    for rank in client.query_status().ranks:
        assert abs(rank.clock_offset_s) <= rank.clock_error_s + 1e-4
        assert rank.clock_error_s < 0.2
        assert rank.shard_bytes <= rank.memory_bytes <= rank.peak_bytes
        assert rank.memory_bytes + rank.cached_bytes < _resident_bytes(rank)
        assert rank.silence_s < 5.0
        assert rank.parts == []


def test_durations_and_busy_time_agree_with_stopwatch(client: Client) -> None:
    """The second of two requests waits for the only row. Steps follow each other without a gap."""
    before = client.query_status()
    names = ["first", "second"]
    events: dict[str, Mapping[str, object]] = {
        "admitted": client.cached,
        "first token": client.tokens,
        "end": client.ends,
    }
    seen_s: dict[tuple[str, str], float] = {}
    began_s = time.monotonic()

    def look() -> bool:
        for event, found in events.items():
            for name in names:
                # Tokens are an empty list from the beginning.
                if found.get(name) not in (None, []):
                    seen_s.setdefault((name, event), time.monotonic() - began_s)
        return all((name, "end") in seen_s for name in names)

    for name in names:
        client.submit(name, [5, 6, 7], max_tokens=60)
    client.poll_until(look, 60.0, lambda: seen_s)
    after = client.query_status()

    def between(start: str, end: str) -> float:
        return sum(seen_s[name, end] - (seen_s[name, start] if start else 0.0) for name in names)

    assert _spent_s(before, after, "queue") == pytest.approx(between("", "admitted"), abs=LAG_S)
    prefills_s = between("admitted", "first token")
    assert _spent_s(before, after, "prefill") == pytest.approx(prefills_s, abs=LAG_S)
    decodes_s = between("first token", "end")
    assert _spent_s(before, after, "decode") == pytest.approx(decodes_s, abs=LAG_S)
    assert seen_s["second", "admitted"] > seen_s["first", "end"] - LAG_S, "it waited"
    steps_s = _spent_s(before, after, "step")
    for old, new in zip(before.ranks, after.ranks, strict=True):
        used_s = new.busy_s + new.idle_s - old.busy_s - old.idle_s
        assert 0.8 * decodes_s < used_s < seen_s["second", "end"] + LAG_S
        if new.rank == 0:
            assert new.busy_s - old.busy_s == pytest.approx(steps_s, rel=0.02)


def _spent_s(before: StatusReported, after: StatusReported, name: str) -> float:
    """Return the sum of the durations of a kind between two reports."""
    old, new = (
        sum(one.sum_s for one in each.durations if one.name == name) for each in (before, after)
    )
    return new - old


def test_measured_steps_on_two_ranks_have_same_tokens_and_known_collectives(
    client: Client,
) -> None:
    """The text does not change while steps are measured, and the bytes that ranks exchange are
    those of the model's shape."""
    client.submit("before", [9, 8, 7], max_tokens=100)
    client.wait_for_ends(["before"], 60.0)
    client.submit("measured", [9, 8, 7], max_tokens=100)
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


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "delay_ms", "parts"),
    [("attention", 2.0, ["attention"]), ("collective", 1.0, ["attention", "mlp"])],
)
def test_rank_with_planted_delay_is_named_with_its_part(
    kind: str, delay_ms: float, parts: list[Part]
) -> None:
    """The largest loss is the wait for the rank that is late, and the sentence says where.

    Attention and MLP of a layer end with a collective each.
    """
    slow = ("tests.multirank.worlds.slow_rank", kind, str(delay_ms))
    with cluster(2, None, {1: slow}, SCHEDULER_PROFILE_EVERY_STEPS="20") as client:
        client.submit("a", [9, 8, 7], max_tokens=TOKENS)
        client.poll_until(lambda: len(client.tokens["a"]) > 50, 60.0, "no tokens")
        steps = _measure(client)
        trace = _trace(client)
        first, second = client.query_status().ranks
    loss = find_losses(steps)[0]
    assert loss.sentence.startswith(f"The others wait {loss.seconds * 1e3:.2f} ms a step for rank")
    for sentence in (loss.sentence, trace["otherData"]["largest loss"]):
        said, _, reasons = sentence.partition(": ")
        assert re.fullmatch(r"The others wait \d+\.\d\d ms a step for rank 1", said)
        # The largest reason comes first.
        assert reasons.partition(" take")[0] in {part.replace("mlp", "the MLP") for part in parts}
    layers = json.loads((demo_folder() / "config.json").read_text())["num_hidden_layers"]
    # A busy machine delays both ranks, so how much later one is than the other is not certain.
    for part in parts:
        assert mean_seconds(steps)[1][part] > layers * delay_ms / 1e3
    # Steps are measured without an order too, and others have waited for the late rank.
    assert second.awaited_s > 1.5 * first.awaited_s


@pytest.mark.proof
def test_measured_steps_of_pipeline_say_what_is_sent_received_and_waited_for(
    tmp_path: Path,
) -> None:
    """Rank 1 has the first layers and sends their output to rank 0, whose output goes to both."""
    model = tmp_path / "model"
    save_model(model, "qwen3_moe", num_hidden_layers=4)
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    settings = {"MODEL_PATH": str(model), "WORLD_ENABLE_PIPELINE": "true"}
    with cluster(2, WORLD_SHARDING="pipeline", **settings) as client:
        client.submit("a", [9, 8, 7], max_tokens=TOKENS)
        client.poll_until(lambda: len(client.tokens["a"]) > 5, 60.0, "no tokens")
        steps = _measure(client)
    for step in steps:
        first, last = sorted(step.profiles, key=lambda one: one.rank)
        own = [{one.layer for one in unpack_spans(each.spans)} for each in (first, last)]
        assert own == [{NO_LAYER, 2, 3}, {NO_LAYER, 0, 1}]
        for one, message in zip((first, last), ("receive", "send"), strict=True):
            parts: dict[str, PartTotal] = {part.part: part for part in one.parts}
            assert parts.keys() & {"send", "receive"} == {message}
            assert (parts[message].runs, parts[message].bytes) == (1, width * 4)
            # The output of the last layer, and the token id.
            sums = parts["collective"]
            assert (sums.runs, sums.bytes) == (2, width * 4 + 4)
    # Each rank waits while the other computes its layers.
    found, means = mean_exchanges(steps), mean_seconds(steps)
    for rank, other in ((0, 1), (1, 0)):
        computed_s = sum(means[other][part] for part in ("attention", "experts"))
        assert computed_s < found[rank].waiting_s == pytest.approx(found[other].awaited_s)
    assert "as the ranks of a pipeline compute in turn" in find_losses(steps)[0].sentence
