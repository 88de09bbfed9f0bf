"""Limits of the requests, tokens and bytes that wait, in all and by tenant."""

import pytest

from shared.messages import RequestRejected, Sampling
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld
from tests.unit.scheduler.support.world_factory import MakeWorld


def _fill(world: InMemoryWorld, tenant: str, count: int, length: int = 3) -> list[str]:
    """Submit requests of one tenant; return the ids of those that were refused."""
    names = [f"{tenant}{index}" for index in range(count)]
    for name in names:
        world.submit(name, [1] * length, 500, tenant=tenant)
    return [name for name in names if isinstance(world.ends.get(name), RequestRejected)]


def _refusal(world: InMemoryWorld, request_id: str) -> str:
    end = world.ends[request_id]
    assert isinstance(end, RequestRejected)
    assert end.cause == "queue_full"
    assert end.retry_after_s
    return end.detail


def _end_all(world: InMemoryWorld) -> None:
    for sequence in world.core._requests:
        world.abort(sequence.request.request_id)
    world.settle()


def test_one_tenant_fills_its_share_of_waiting_requests_and_others_find_room(
    make_world: MakeWorld,
) -> None:
    """Of 20 places one tenant gets 15, and the refusal names its share; another gets places."""
    world = make_world(running_sequences_max=1, waiting_requests_max=20, share=0.75)
    refused = _fill(world, "a", 30)
    assert len(refused) == 30 - 1 - 15
    assert "Your own share is used up" in _refusal(world, refused[0])
    assert len(_fill(world, "b", 3)) == 0
    _end_all(world)


@pytest.mark.parametrize(("limit", "unit"), [("tokens", "tokens"), ("bytes", "bytes")])
def test_waiting_tokens_and_bytes_are_bounded_for_each_tenant(
    make_world: MakeWorld, limit: str, unit: str
) -> None:
    """Long prompts of one tenant are refused beyond its share; another's prompt is accepted."""
    most = {"tokens": {"waiting_tokens_max": 10_000}, "bytes": {"waiting_bytes_max": 80_000}}
    world = make_world(running_sequences_max=1, share=0.75, **most[limit])
    refused = _fill(world, "a", 20, 1_000)
    assert 8 <= len(refused) <= 12, refused
    assert unit in _refusal(world, refused[0])
    assert not _fill(world, "b", 1, 1_000)
    assert world.core._waiting.limits.tokens <= 10_000
    _end_all(world)


def test_sentence_names_limit_for_all_if_no_share_is_exceeded(make_world: MakeWorld) -> None:
    """A queue that is full of several tenants' requests is described by its limit."""
    world = make_world(running_sequences_max=1, waiting_requests_max=4)
    refused = _fill(world, "a", 10)
    assert "4 requests are waiting" in _refusal(world, refused[0])
    _end_all(world)


def test_request_beyond_limit_is_accepted_when_nothing_waits(make_world: MakeWorld) -> None:
    """A prompt of more tokens than may wait is served, since no waiting makes room for it."""
    world = make_world(waiting_tokens_max=100, waiting_bytes_max=100, share=0.5)
    world.submit("long", [1] * 2_000, 3)
    world.settle()
    assert len(world.tokens["long"]) == 3


def test_resumed_request_is_accepted_by_full_queue(make_world: MakeWorld) -> None:
    """A request with tokens from before a restart is accepted although the queue is full."""
    world = make_world(running_sequences_max=1, waiting_requests_max=4)
    assert _fill(world, "a", 10)
    world.submit("resumed", [1, 2], 500, tenant="a", generated=[5])
    assert "resumed" in world.accepted
    _end_all(world)


def test_logit_bias_counts_as_waiting_memory(make_world: MakeWorld) -> None:
    """Requests with long logit biases are refused earlier than requests without any."""
    world = make_world(running_sequences_max=1, waiting_bytes_max=400_000)
    bias = [(token, 1.0) for token in range(500)]
    for index in range(20):
        sampling = Sampling(seed=1, temperature=0.0, logit_bias=bias)
        world.submit(f"r{index}", [1], 500, sampling=sampling)
    refused = [name for name, end in world.ends.items() if isinstance(end, RequestRejected)]
    assert 10 < len(refused) < 19
    _end_all(world)
