"""Reuse of blocks in memory: which tokens each request reuses, and what the gateway is told.

Reference ranks check every plan: the KV of each reused token is that of the prompt.
"""

import pytest

from services.scheduler.cache.index import block_format
from services.scheduler.events import TimePassed
from shared.messages import CachedPrefix, RequestFinished, RequestRejected
from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    prefilled_tokens,
    read_metrics,
    run_request,
)
from tests.unit.scheduler.support.in_memory_world import RankSetup, completion
from tests.unit.scheduler.support.rank_failures import lose_rank, restart_ranks
from tests.unit.scheduler.support.world_factory import MakeWorld


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_repeated_prompt_computes_only_last_token(make_world: MakeWorld, ranks: int) -> None:
    """The second time all tokens but the last are reused, on every rank."""
    world = make_world(ranks=ranks)
    assert run_request(world, "a", PROMPT) == 0
    first_plan = len(world.plans)
    assert run_request(world, "b", PROMPT) == 99
    assert prefilled_tokens(world.plans[first_plan:]) == 1
    assert world.cached["a"] == CachedPrefix(miss="new")
    assert world.cached["b"] == CachedPrefix(memory_tokens=99)


def test_next_turn_reuses_all_earlier_tokens_except_last_generated(make_world: MakeWorld) -> None:
    """Each turn reuses all tokens before it except the last generated one."""
    world = make_world()
    prompt = list(PROMPT)
    run_request(world, "turn 0", prompt, 30)
    for turn in range(1, 6):
        known = len(prompt) + 30
        prompt += [*completion(prompt, 30), turn, 1, 2]
        assert run_request(world, f"turn {turn}", prompt, 30) == known - 1
        # The last token was never an input, so it has no KV.
        assert world.cached[f"turn {turn}"].miss == ""


def test_prompt_with_changed_history_reuses_tokens_before_change(make_world: MakeWorld) -> None:
    """A turn that drops part of the last answer reuses the tokens up to the first change."""
    world = make_world()
    run_request(world, "a", PROMPT, 30)
    answer = completion(PROMPT, 30)
    changed = [*PROMPT, *answer[:7], 998, *answer[20:]]
    assert run_request(world, "b", changed) == 107
    assert world.cached["b"] == CachedPrefix(memory_tokens=107, diverged_at=107, miss="diverged")


def test_next_turn_reuses_kv_of_stop_token_of_earlier_turn(make_world: MakeWorld) -> None:
    """The plan in flight has computed the KV of the stop token, so the next turn reuses it."""
    world = make_world()
    answer = completion(PROMPT, 20)
    world.submit("a", PROMPT, 100, stop_ids=[answer[-1]])
    world.settle()
    answer = world.tokens["a"]
    assert run_request(world, "b", [*PROMPT, *answer, 1, 2]) == len(PROMPT) + len(answer)


def test_simultaneous_requests_compute_shared_prompt_once(make_world: MakeWorld) -> None:
    """The whole blocks of a prompt that eight requests share are computed once."""
    world = make_world(step_tokens_max=64)
    for number in range(8):
        world.submit(f"c{number}", PROMPT, 6)
    world.settle()
    assert prefilled_tokens(world.plans) == 100 + 7 * 4
    assert all(world.tokens[f"c{number}"] == completion(PROMPT, 6) for number in range(8))


def test_unrelated_request_starts_before_request_waiting_for_shared_blocks(
    make_world: MakeWorld,
) -> None:
    """While a request waits for the blocks of a long prompt, an unrelated one behind it starts."""
    world = make_world(step_tokens_max=64)
    long = [7 * number % 1_000 for number in range(1_500)]
    world.submit("first", long, 2)
    world.submit("twin", long, 2)
    world.submit("other", [1, 2, 3], 2)
    for _ in range(8):
        world.step()
    assert "other" in world.ends or world.tokens["other"]
    assert "twin" not in world.cached
    world.settle()
    assert world.cached["twin"].memory_tokens == 1_488
    assert prefilled_tokens(world.plans) == 1_500 + 12 + 3


@pytest.mark.parametrize("steps", range(8))
def test_waiting_requests_continue_when_request_computing_their_prefix_is_aborted(
    make_world: MakeWorld, steps: int
) -> None:
    """After the computing request is aborted, waiting ones continue and reuse its blocks."""
    world = make_world(step_tokens_max=64)
    long = [7 * number % 1_000 for number in range(700)]
    world.submit("first", long, 2)
    world.submit("twin", long, 2)
    world.submit("third", long, 2)
    for _ in range(steps):
        world.step()
    world.abort("first")
    world.settle()
    assert world.tokens["twin"] == world.tokens["third"] == completion(long, 2)
    assert prefilled_tokens(world.plans) <= 700 + 3 * 16 + 64


def test_blocks_within_system_tokens_are_evicted_last(make_world: MakeWorld) -> None:
    """Blocks within `system_tokens` are evicted last."""
    world = make_world(cache={"resident_bytes_max": 2_000})
    run_request(world, "a", PROMPT, system_tokens=90)
    for number in range(20):
        run_request(world, f"other {number}", [number, *([number + 500] * 70)])
    assert run_request(world, "b", [*PROMPT[:90], 1, 2, 3]) == 80
    assert world.cached["b"].miss == "evicted" or world.cached["b"].miss == "diverged"


def test_known_prefix_gone_from_memory_counts_as_evicted_miss(make_world: MakeWorld) -> None:
    """A known prefix that is gone from memory is a miss by eviction."""
    world = make_world(cache={"resident_bytes_max": 2_000})
    run_request(world, "a", PROMPT)
    for number in range(4):
        run_request(world, f"other {number}", [number + 1] * 150)
    assert run_request(world, "b", [*PROMPT, 1]) == 0
    assert world.cached["b"].miss == "evicted"


def test_request_with_other_salt_reuses_no_cached_token(make_world: MakeWorld) -> None:
    """In 1,000 tries with another salt no token of a known prefix is reused or reported."""
    world = make_world(kv_tokens=200_000)
    run_request(world, "mine", PROMPT, cache_salt="mine")
    for number in range(1_000):
        world.submit(f"theirs {number}", PROMPT[: 17 + number % 80], 1, cache_salt=f"x{number}")
        if number % 50 == 49:
            world.settle()
    world.settle()
    theirs = [cached for name, cached in world.cached.items() if name.startswith("theirs")]
    assert theirs == [CachedPrefix(miss="new")] * 1_000
    assert run_request(world, "mine again", PROMPT, cache_salt="mine") == 99


def test_returning_preempted_sequence_reuses_its_own_blocks(make_world: MakeWorld) -> None:
    """A preempted sequence resumes from its blocks as far as rows leave memory."""
    world = make_world(kv_tokens=900, kv_row_growth_tokens=16)
    for number in range(2):
        world.submit(f"r{number}", [number + 1] * 100, 400)
    world.settle()
    seen = read_metrics(world)
    assert seen["preemptions_total"] == 1
    assert seen["cache_hit_tokens_memory_total"] > 200
    for number in range(2):
        assert world.tokens[f"r{number}"] == completion([number + 1] * 100, 400)
        assert world.cached[f"r{number}"].memory_tokens == 0, "the prefix of its first admission"


def test_known_prompt_counts_as_evicted_in_first_request_of_new_epoch(
    make_world: MakeWorld,
) -> None:
    """Restarted ranks hold no blocks; the index still knows the texts."""
    world = make_world()
    run_request(world, "a", PROMPT)
    lose_rank(world)
    restart_ranks(world)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"].miss == "evicted"
    assert run_request(world, "c", PROMPT) == 99
    assert not [line for line in world.log_lines if line.event == "blocks_of_another_namespace"]


def test_epoch_with_other_model_clears_block_index(make_world: MakeWorld) -> None:
    """An epoch with another block namespace clears the index and logs it once."""
    world = make_world()
    run_request(world, "a", PROMPT)
    world.hardware.fingerprint = "another"
    lose_rank(world)
    restart_ranks(world)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"].miss == "new"
    changes = [line for line in world.log_lines if line.event == "blocks_of_another_namespace"]
    assert len(changes) == 1


def test_epoch_with_other_draft_model_keeps_block_namespace(make_world: MakeWorld) -> None:
    """Blocks hold nothing of the draft model, so their namespace stays."""
    world = make_world(hardware=RankSetup(fingerprint="f"))
    run_request(world, "a", PROMPT)
    world.hardware.fingerprint = "f+draft"
    lose_rank(world)
    restart_ranks(world)
    assert run_request(world, "b", PROMPT) == 0
    assert not [line for line in world.log_lines if line.event == "blocks_of_another_namespace"]


@pytest.mark.parametrize("off", ["setting", "ranks"])
def test_plans_keep_and_evict_no_blocks_when_cache_is_off(make_world: MakeWorld, off: str) -> None:
    """With the cache off, or ranks that cannot keep blocks, no plan keeps or evicts blocks."""
    world = make_world(
        cache={"enabled": off != "setting"},
        hardware=RankSetup(kv_layout="" if off == "ranks" else "layout"),
    )
    run_request(world, "a", PROMPT)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"] == CachedPrefix(miss="off")
    assert not any(plan.keep_blocks or plan.evict_blocks for plan in world.plans)


def test_block_size_above_context_length_ends_world_as_configuration_failure(
    make_world: MakeWorld,
) -> None:
    """A block size above the context ends the world with the setting and its possible values.

    Restarted ranks change nothing: an operator must change the setting.
    """
    world = make_world(context=100, cache={"block_tokens": 256})
    world.submit("a", [1, 2], 3)
    end = world.ends["a"]
    assert isinstance(end, RequestRejected)
    assert end.detail == (
        "cache.block_tokens is 256, but the model's context has 100 tokens: set it to 16 up to 100."
    )
    assert world.dismissed
    world.start_rank(0)
    assert not world.ranks


def test_plan_after_each_prefill_chunk_keeps_whole_blocks_of_chunk(make_world: MakeWorld) -> None:
    """Each chunk of a long prompt is followed by a plan that keeps its whole blocks."""
    world = make_world(step_tokens_max=64)
    long = [7 * number % 1_000 for number in range(600)]
    world.submit("a", long, 3)
    world.settle()
    for before, plan in zip(world.plans, world.plans[1:], strict=False):
        for chunk in before.prefill_chunks:
            end = (chunk.start + chunk.length) // 16 * 16
            kept = [one.start + one.length for one in plan.keep_blocks]
            assert end in kept


def test_repeated_prompt_keeps_no_already_resident_block_again(make_world: MakeWorld) -> None:
    """A repeated prompt adds no block except its own end."""
    world = make_world()
    for number in range(5):
        run_request(world, f"r{number}", PROMPT, 20)
    kept = [one.hash for plan in world.plans for one in plan.keep_blocks]
    assert len(kept) == len(set(kept)) == 7 + 1


def test_longer_partial_block_replaces_shorter_one_with_equal_tokens(make_world: MakeWorld) -> None:
    """The partial block at a turn's end is dropped when the next turn has the same tokens and
    more."""
    world = make_world()
    run_request(world, "a", PROMPT[:84], 1)
    run_request(world, "b", PROMPT[:88], 1)
    run_request(world, "c", PROMPT[:98], 1)
    resident = read_metrics(world)["cache_resident_bytes"]
    assert resident == 98 * 10, "no token twice"


def test_only_one_plan_is_sent_after_last_request_ends(make_world: MakeWorld) -> None:
    """One plan without work keeps and drops the rest; then no plan follows."""
    world = make_world()
    run_request(world, "a", PROMPT)
    count = len(world.plans)
    last = world.plans[-1]
    assert last.dropped
    assert last.keep_blocks
    assert not last.prefill_chunks
    for _ in range(100):
        world.now_s += 0.5
        world.tell(TimePassed())
        world.step()
    assert len(world.plans) == count


def test_cached_token_count_is_sent_to_gateway_before_first_token(make_world: MakeWorld) -> None:
    """The gateway gets the count of cached tokens before the first token and again with the end."""
    world = make_world()
    run_request(world, "a", PROMPT)
    world.submit("b", PROMPT, 3)
    assert world.cached["b"].memory_tokens == 99
    assert not world.tokens["b"]
    world.settle()
    end = world.ends["b"]
    assert isinstance(end, RequestFinished)
    assert end.cached == world.cached["b"]


def test_resumed_request_reports_no_more_cached_tokens_than_prompt_tokens(
    make_world: MakeWorld,
) -> None:
    """A resumed request also reuses its generated tokens, which do not count as prompt."""
    world = make_world()
    whole = completion(PROMPT[:20], 60)
    run_request(world, "a", PROMPT[:20], 60)
    world.tokens["b"] = whole[:50]
    world.submit("b", PROMPT[:20], 60, generated=whole[:50])
    world.settle()
    assert world.tokens["b"] == whole
    assert world.cached["b"].memory_tokens == 20


def test_large_unused_kv_rows_shrink_to_free_memory_for_blocks(make_world: MakeWorld) -> None:
    """Unused rows of the size of all memory shrink, so that the cache gets memory."""
    world = make_world(kv_tokens=2_000, kv_row_growth_tokens=64)
    world.submit("long", [5] * 1_700, 100)
    world.settle()
    run_request(world, "a", PROMPT)
    assert run_request(world, "b", PROMPT) == 99
    assert world.plans[-1].row_tokens < 1_000


def test_cache_hits_and_misses_add_up_to_prompt_tokens(make_world: MakeWorld) -> None:
    """Hits by tier and misses by cause add up to all prompt tokens; gauges match the counters."""
    world = make_world()
    for number in range(4):
        run_request(world, f"r{number}", [*PROMPT, number])
    seen = read_metrics(world)
    found = seen["cache_hit_tokens_memory_total"] + seen["cache_hit_tokens_ssd_total"]
    missed = {
        name.removeprefix("cache_miss_tokens_").removesuffix("_total"): value
        for name, value in seen.items()
        if name.startswith("cache_miss_tokens_") and value
    }
    assert found + sum(missed.values()) == seen["prompt_tokens_total"] == 404
    assert missed == {"new": 101, "end": 3}
    assert (
        seen["cache_blocks_resident"]
        == seen["cache_blocks_kept_total"] - (seen["cache_blocks_evicted_total"])
    )
    assert 0 < seen["cache_resident_bytes"] <= seen["cache_resident_limit_bytes"]


@pytest.mark.parametrize("checkpoint_bytes", [0, 16], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("ssd", [False, True], ids=["memory", "stores"])
def test_new_prompts_are_reused_when_index_is_full_of_resident_blocks(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, checkpoint_bytes: int, ssd: bool
) -> None:
    """With place for 64 blocks, the second use of each of a hundred prompts finds its
    blocks."""
    monkeypatch.setattr(block_format, "NODES_MAX", 64)
    world = make_world(hardware=RankSetup(checkpoint_bytes=checkpoint_bytes), cache={"ssd": ssd})
    for number in range(100):
        prompt = [(number * 31 + 7 * at) % 1_000 for at in range(100)]
        run_request(world, f"first {number}", prompt)
        assert run_request(world, f"second {number}", prompt) >= 96
    seen = read_metrics(world)
    assert seen["cache_blocks_known"] <= seen["cache_blocks_known_max"] == 64
    assert seen["cache_blocks_evicted_total"] > 100
    assert seen["cache_resident_bytes"] < seen["cache_resident_limit_bytes"]


def test_forgotten_block_that_is_stored_is_found_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored block that lost its place in the index is restored when its prompt comes back."""
    monkeypatch.setattr(block_format, "NODES_MAX", 32)
    world = make_world(cache={"ssd": True})
    run_request(world, "before", PROMPT)
    for number in range(20):
        run_request(world, f"other {number}", [number] * 100)

    run_request(world, "again", PROMPT)

    assert world.cached["again"].stored_tokens == 96
