"""Turns between tenants: admissions, prompt chunks and places in a full batch."""

import itertools
from collections import Counter
from typing import Any

import pytest

from services.scheduler.speculation.sequence_drafts import NgramDraftState
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.support.reference_rank import REPEAT_MARKER
from tests.unit.scheduler.support.world_factory import MakeWorld


def _flood(
    world: InMemoryWorld, tenant: str, requests: int, tokens: int = 8, **options: Any
) -> None:
    """Submit equal requests of one tenant, named by it."""
    for index in range(requests):
        world.submit(f"{tenant}{index}", [index + 1, 7, 9], tokens, tenant=tenant, **options)


def _running(world: InMemoryWorld) -> Counter[str]:
    """Return the running sequences of each tenant."""
    return Counter(sequence.tenant for sequence in world.core._batch.running)


def _admitted_before(world: InMemoryWorld, request_id: str) -> int:
    """Return how many requests were admitted before one."""
    return list(world.cached).index(request_id)


def _fairness_preemptions(world: InMemoryWorld) -> float:
    return world.core._batch.report_counters()["preemptions_for_fairness_total"]


def test_request_is_admitted_before_flood_of_another_tenant(make_world: MakeWorld) -> None:
    """One request behind 60 of another tenant is the next to be admitted, and all are served."""
    world = make_world(running_sequences_max=4)
    _flood(world, "flood", 60)
    for _ in range(3):
        world.step()
    running = len(world.cached)
    _flood(world, "small", 1)
    world.settle()
    assert _admitted_before(world, "small0") <= running + 1
    assert all(world.tokens[f"flood{i}"] == completion([i + 1, 7, 9], 8) for i in range(60))


def test_tenants_with_equal_weights_are_admitted_in_turn(make_world: MakeWorld) -> None:
    """Of two tenants with many waiting requests, both have about half of the first ones served."""
    world = make_world(running_sequences_max=2)
    _flood(world, "a", 40)
    _flood(world, "b", 40)
    world.settle()
    first = Counter(name[0] for name in list(world.ends)[:40])
    assert abs(first["a"] - first["b"]) <= 4, first


def test_tenant_of_triple_weight_is_served_three_times_as_much(make_world: MakeWorld) -> None:
    """With weights of 3 and 1, three of four of the first requests served are of the former."""
    world = make_world(running_sequences_max=4)
    _flood(world, "a", 60, weight=1.0)
    _flood(world, "b", 60, weight=3.0)
    world.settle()
    first = Counter(name[0] for name in list(world.ends)[:60])
    assert 2.2 <= first["b"] / first["a"] <= 4.0, first


def test_priority_overtakes_own_requests_but_not_those_of_others(make_world: MakeWorld) -> None:
    """Requests of high priority come first in their tenant and leave other tenants their turns."""
    world = make_world(running_sequences_max=1)
    world.submit("runs", [1], 4, tenant="a")
    _flood(world, "low", 4)
    for index in range(10):
        world.submit(f"high{index}", [index, 5], 8, tenant="a", priority=index)
    world.settle()
    order = [name for name in world.cached if name != "runs"]
    assert [name for name in order if name.startswith("high")] == [
        f"high{index}" for index in reversed(range(10))
    ]
    assert max(order.index(f"low{index}") for index in range(4)) <= 8, order


def test_tenant_that_was_idle_has_saved_no_turns(make_world: MakeWorld) -> None:
    """A tenant that used little for long takes turns with the others once it sends many requests,
    instead of being served alone."""
    world = make_world(running_sequences_max=2)
    world.submit("slow", [1], 400, tenant="b")
    _flood(world, "a", 30)
    for _ in range(60):
        world.step()
    before = len(world.ends)
    _flood(world, "b", 30)
    for index in range(30):
        world.submit(f"a_{index}", [index, 3], 8, tenant="a")
    world.settle()
    next_ends = Counter(name[0] for name in list(world.ends)[before : before + 20])
    assert next_ends["a"] >= 7, next_ends


def test_tenant_without_running_sequence_gets_place_in_full_batch(make_world: MakeWorld) -> None:
    """With all slots taken by long completions of one tenant, another tenant's request starts at
    once; the youngest sequence of the former waits and loses no token."""
    world = make_world(running_sequences_max=4)
    _flood(world, "flood", 8, 200)
    for _ in range(10):
        world.step()
    world.submit("small", [5, 6], 20, tenant="small")
    for _ in range(4):
        world.step()
    assert _running(world) == {"flood": 3, "small": 1}
    assert world.tokens["small"]
    assert _fairness_preemptions(world) == 1
    world.settle()
    assert world.tokens["flood3"] == completion([4, 7, 9], 200)


def test_tenant_with_running_sequence_preempts_nothing(make_world: MakeWorld) -> None:
    """Further requests of a tenant that has a running sequence wait for free slots."""
    world = make_world(running_sequences_max=4)
    _flood(world, "flood", 8, 100)
    for _ in range(10):
        world.step()
    _flood(world, "small", 6, 60)
    for _ in range(20):
        world.step()
    assert _running(world) == {"flood": 3, "small": 1}
    assert _fairness_preemptions(world) == 1
    world.settle()


def test_tenant_below_half_of_its_fair_part_gets_places_in_full_batch(
    make_world: MakeWorld,
) -> None:
    """A colleague's stream and further requests start beside a flood at once, up to half of the
    colleague's fair part; then places go by turns, and no sequence is moved back and forth."""
    world = make_world(running_sequences_max=16)
    _flood(world, "flood", 40, 300)
    for _ in range(30):
        world.step()
    world.submit("stream", [5, 6], 200, tenant="small")
    for _ in range(4):
        world.step()
    _flood(world, "small", 8, 200)
    for _ in range(20):
        world.step()
    assert _running(world) == {"flood": 12, "small": 4}
    assert _fairness_preemptions(world) == 4
    world.settle()


def test_no_tenant_loses_its_only_running_sequence(make_world: MakeWorld) -> None:
    """With as many tenants running as there are slots, another tenant waits for a free slot."""
    world = make_world(running_sequences_max=2)
    for tenant in "abc":
        world.submit(tenant, [ord(tenant)], 40, tenant=tenant)
        world.step()
    for _ in range(10):
        world.step()
    assert _running(world) == {"a": 1, "b": 1}
    world.settle()
    assert _fairness_preemptions(world) == 0


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_request_gets_kv_memory_that_others_fill(
    make_world: MakeWorld, plans_in_flight: int
) -> None:
    """With free slots but all KV memory used by one tenant, another one's request starts soon."""
    world = make_world(kv_tokens=1_024, kv_row_growth_tokens=64, plans_in_flight=plans_in_flight)
    _flood(world, "flood", 30, 150)
    for _ in range(75):
        world.step()
    assert len(world.core._waiting) > 5
    assert world.core._batch.rows.has_free_slot
    world.submit("small", [5, 6], 20, tenant="small")
    for _ in range(6):
        world.step()
    assert world.tokens["small"]
    assert _fairness_preemptions(world) >= 1
    world.settle()
    assert world.tokens["small"] == completion([5, 6], 20)
    for plan in world.plans:
        assert not {one.sequence_id for one in plan.admitted} & set(plan.dropped)


def test_long_prompt_delays_short_one_of_another_tenant_by_one_step_at_most(
    make_world: MakeWorld,
) -> None:
    """Without running decodes, a short prompt is in the first plan that is made after it came."""
    world = make_world(kv_tokens=50_000)
    world.submit("learnt", [9] * 6_000, 2, tenant="a")
    world.settle()
    world.submit("long", [3] * 7_000, 2, tenant="a")
    for _ in range(3):
        world.step()
    before = len(world.plans)
    world.submit("short", [4] * 200, 2, tenant="b")
    world.step()
    world.step()
    chunks = [[chunk.length for chunk in plan.prefill_chunks] for plan in world.plans[before:]]
    assert chunks[0][0] == 200, chunks
    world.settle()


def test_short_prompt_is_read_while_long_one_of_another_tenant_is(make_world: MakeWorld) -> None:
    """A prompt of 200 tokens is answered long before one of 7,000 of another tenant is read."""
    world = make_world(kv_tokens=50_000)
    world.submit("long", [3] * 7_000, 2, tenant="a")
    for _ in range(4):
        world.step()
    world.submit("short", [4] * 200, 2, tenant="b")
    for _ in range(4):
        world.step()
    assert world.tokens["short"]
    assert not world.tokens["long"]
    world.settle()
    assert world.tokens["long"] == completion([3] * 7_000, 2)


def test_long_prompts_of_two_tenants_are_read_in_turn(make_world: MakeWorld) -> None:
    """Chunks of two long prompts alternate, so neither is read to the end before the other."""
    world = make_world(kv_tokens=50_000)
    for tenant in "ab":
        world.submit(tenant, [ord(tenant)] * 6_000, 2, tenant=tenant)
    world.settle()
    owners = [chunk.sequence_id for plan in world.plans for chunk in plan.prefill_chunks]
    changes = sum(one != other for one, other in itertools.pairwise(owners))
    assert changes >= len(owners) // 3, owners


def test_one_tenant_reads_its_prompts_one_after_the_other(make_world: MakeWorld) -> None:
    """Without other tenants the first long prompt is read to its end before the next begins."""
    world = make_world(kv_tokens=50_000)
    for name in "ab":
        world.submit(name, [ord(name)] * 6_000, 2, tenant="one")
    world.settle()
    owners = [chunk.sequence_id for plan in world.plans for chunk in plan.prefill_chunks]
    assert owners == sorted(owners)


def test_preempted_sequence_copies_drafts_from_all_of_its_tokens(make_world: MakeWorld) -> None:
    """A sequence that ran before its preemption proposes drafts from the tokens that it has since
    then, and its text is the same."""
    world = make_world(running_sequences_max=2, speculation={"method": "ngram", "tokens_max": 4})
    prompt = [REPEAT_MARKER, 5, *range(20)]
    for name in ("first", "second"):
        world.submit(name, prompt, 300, tenant="a")
    for _ in range(10):
        world.step()
    world.submit("small", [5, 6], 4, tenant="b")
    while "small" not in world.ends:
        world.step()
    for _ in range(6):
        world.step()
    assert _fairness_preemptions(world) == 1
    for sequence in world.core._batch.running:
        assert isinstance(sequence.draft_state, NgramDraftState)
        assert sequence.draft_state.proposer._tokens is sequence.tokens
        assert sequence.blocks.tokens is sequence.tokens
    assert len(world.core._batch) == 2
    world.settle()
    assert world.tokens["first"] == world.tokens["second"] == completion(prompt, 300)
