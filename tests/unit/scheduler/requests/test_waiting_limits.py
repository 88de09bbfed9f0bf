"""Limits of the requests, tokens and bytes that wait, in all and by tenant."""

import gc
import tracemalloc

import pytest

from services.scheduler.events import GatewayMessageReceived
from shared.messages import RequestRejected, Sampling, SubmitRequest, ToScheduler, token_ids
from shared.transport import codec
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld, completion
from tests.unit.scheduler.support.world_factory import MakeWorld


def _fill(world: InMemoryWorld, tenant: str, count: int, length: int = 3) -> list[str]:
    """Submit requests of one tenant; return the ids of those that were refused."""
    names = [f"{tenant}{index}" for index in range(count)]
    for index, name in enumerate(names):
        world.submit(name, [index, *[1] * (length - 1)], 500, tenant=tenant)
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


def test_equal_prompts_of_one_request_are_held_once_while_they_wait(
    make_world: MakeWorld,
) -> None:
    """Equal prompts that wait are one object, which counts once; each runs with tokens of its
    own."""
    world = make_world(running_sequences_max=2)
    world.submit("runs0", [1], 40)
    world.submit("runs1", [2], 40)
    world.step()
    for index in range(8):
        world.submit(f"answer:{index}", [5] * 1_000, 4)
    waiting = list(world.core._waiting)
    assert len({id(sequence.tokens) for sequence in waiting}) == 1
    assert world.core._waiting.limits._bytes.used < 8 * 4_096 + 2 * 4_000
    world.settle()
    assert all(world.tokens[f"answer:{i}"] == completion([5] * 1_000, 4) for i in range(8))


def test_waiting_prompts_take_little_more_than_four_bytes_per_token(
    make_world: MakeWorld,
) -> None:
    """64 prompts of 8,100 ids with two completions each keep less than 5 MB, instead of 42 MB."""
    world = make_world(context=16_384, kv_tokens=20_000, running_sequences_max=1)
    world.submit("runs", [1], 5_000)
    decoder: codec.Decoder[SubmitRequest] = codec.Decoder(ToScheduler)
    bodies = [
        codec.encode(
            SubmitRequest(
                request_id=f"r{prompt}:{choice}",
                prompt=token_ids.pack((prompt + 7 * n) % 997 for n in range(8_100)),
                sampling=Sampling(seed=1),
                max_tokens=100,
            )
        )
        for prompt in range(64)
        for choice in range(2)
    ]
    gc.collect()
    tracemalloc.start()
    try:
        for body in bodies:
            world.core.handle(GatewayMessageReceived(GATEWAY, decoder.decode(body)), world.now_s)
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(world.core._waiting) == 128
    assert kept_bytes < 5_000_000
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
