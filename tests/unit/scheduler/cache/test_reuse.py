"""Reuse of blocks in memory, as a whole: who gets what of whose work, and what it is told.

Every plan is checked by reference ranks: the KV of each reused token is that of the prompt.
"""

import pytest

from services.scheduler.events import RankLost, TimePassed
from shared.messages import CachedPrefix, RequestFinished, RequestRejected
from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    prefilled_tokens,
    read_metrics,
    run_request,
)
from tests.unit.scheduler.in_memory_world import RankSetup, completion
from tests.unit.scheduler.world_factory import MakeWorld


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_prompt_again(make_world: MakeWorld, ranks: int) -> None:
    """The second time all but the last token is reused, on every rank alike."""
    world = make_world(ranks=ranks)
    assert run_request(world, "a", PROMPT) == 0
    mark = len(world.plans)
    assert run_request(world, "b", PROMPT) == 99
    assert prefilled_tokens(world.plans[mark:]) == 1
    assert world.cached["a"] == CachedPrefix(miss="new")
    assert world.cached["b"] == CachedPrefix(memory_tokens=99)


def test_a_conversation_reuses_its_answers(make_world: MakeWorld) -> None:
    """Each turn reuses all tokens before it but the one that was generated last."""
    world = make_world()
    prompt = list(PROMPT)
    run_request(world, "turn 0", prompt, 30)
    for turn in range(1, 6):
        known = len(prompt) + 30
        prompt += [*completion(prompt, 30), turn, 1, 2]
        assert run_request(world, f"turn {turn}", prompt, 30) == known - 1
        # The last token was never an input, so it has no KV; all before it was reused.
        assert world.cached[f"turn {turn}"].miss == ""


def test_rewritten_history_is_reused_up_to_the_change(make_world: MakeWorld) -> None:
    """A turn that drops a part of the last answer reuses up to the first changed token."""
    world = make_world()
    run_request(world, "a", PROMPT, 30)
    answer = completion(PROMPT, 30)
    changed = [*PROMPT, *answer[:7], 998, *answer[20:]]
    assert run_request(world, "b", changed) == 107
    assert world.cached["b"] == CachedPrefix(memory_tokens=107, diverged_at=107, miss="diverged")


def test_a_stop_token_that_was_an_input_is_reused(make_world: MakeWorld) -> None:
    """Run-ahead has computed the stop token already, so the next turn reuses it too."""
    world = make_world()
    answer = completion(PROMPT, 20)
    world.submit("a", PROMPT, 100, stop_ids=[answer[-1]])
    world.settle()
    answer = world.tokens["a"]
    assert run_request(world, "b", [*PROMPT, *answer, 1, 2]) == len(PROMPT) + len(answer)


def test_choices_of_one_prompt_compute_it_once(make_world: MakeWorld) -> None:
    """Eight requests with one prompt that arrive together: its whole blocks are computed once."""
    world = make_world(step_tokens_max=64)
    for number in range(8):
        world.submit(f"c{number}", PROMPT, 6)
    world.settle()
    assert prefilled_tokens(world.plans) == 100 + 7 * 4
    assert all(world.tokens[f"c{number}"] == completion(PROMPT, 6) for number in range(8))


def test_others_pass_those_who_wait(make_world: MakeWorld) -> None:
    """While a twin waits for a long prompt, an unrelated request behind it is not held up."""
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
def test_whoever_waits_goes_on_when_the_other_ends(make_world: MakeWorld, steps: int) -> None:
    """An aborted computation ends the wait for it; what it had computed is reused."""
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


def test_a_system_prompt_outlives_other_traffic(make_world: MakeWorld) -> None:
    """Blocks within `system_tokens` are evicted last, whatever has come since."""
    world = make_world(cache={"resident_bytes_max": 2_000})
    run_request(world, "a", PROMPT, system_tokens=90)
    for number in range(20):
        run_request(world, f"other {number}", [number, *([number + 500] * 70)])
    assert run_request(world, "b", [*PROMPT[:90], 1, 2, 3]) == 80
    assert world.cached["b"].miss == "evicted" or world.cached["b"].miss == "diverged"


def test_evicted_blocks_are_named_as_the_cause(make_world: MakeWorld) -> None:
    """A prefix that is known and gone from memory is a miss by eviction."""
    world = make_world(cache={"resident_bytes_max": 2_000})
    run_request(world, "a", PROMPT)
    for number in range(4):
        run_request(world, f"other {number}", [number + 1] * 150)
    assert run_request(world, "b", [*PROMPT, 1]) == 0
    assert world.cached["b"].miss == "evicted"


def test_tenants_share_nothing(make_world: MakeWorld) -> None:
    """In 1,000 tries with another salt no token of a known prefix is reused, nor is it told."""
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


def test_preempted_sequences_reuse_what_they_computed(make_world: MakeWorld) -> None:
    """Who had to leave its row begins again from its blocks, as far as rows leave memory."""
    world = make_world(kv_tokens=900, kv_row_growth_tokens=16)
    for number in range(2):
        world.submit(f"r{number}", [number + 1] * 100, 400)
    world.settle()
    seen = read_metrics(world)
    assert seen["preemptions_total"] == 1
    assert seen["cache_hit_tokens_memory_total"] > 200
    for number in range(2):
        assert world.tokens[f"r{number}"] == completion([number + 1] * 100, 400)
        assert world.cached[f"r{number}"].memory_tokens == 0, "what its first admission found"


def test_a_new_epoch_begins_with_nothing_resident(make_world: MakeWorld) -> None:
    """Ranks that come back hold no blocks; what was known of texts is still known."""
    world = make_world()
    run_request(world, "a", PROMPT)
    victim = next(iter(world.ranks))
    world.ranks.pop(victim)
    world.tell(RankLost(victim, "killed"))
    world.start_rank(0)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"].miss == "evicted"
    assert run_request(world, "c", PROMPT) == 99
    assert not [say for say in world.log_lines if say.event == "blocks_of_another_namespace"]


def test_another_model_begins_with_nothing_known(make_world: MakeWorld) -> None:
    """An epoch whose blocks are others drops the index, and says so once."""
    world = make_world()
    run_request(world, "a", PROMPT)
    world.hardware.fingerprint = "another"
    victim = next(iter(world.ranks))
    world.ranks.pop(victim)
    world.tell(RankLost(victim, "killed"))
    world.start_rank(0)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"].miss == "new"
    said = [say for say in world.log_lines if say.event == "blocks_of_another_namespace"]
    assert len(said) == 1


def test_another_draft_model_changes_no_block(make_world: MakeWorld) -> None:
    """Blocks hold nothing of it: they are the same namespace's."""
    world = make_world(hardware=RankSetup(fingerprint="f"))
    run_request(world, "a", PROMPT)
    world.hardware.fingerprint = "f+draft"
    victim = next(iter(world.ranks))
    world.ranks.pop(victim)
    world.tell(RankLost(victim, "killed"))
    world.start_rank(0)
    assert run_request(world, "b", PROMPT) == 0
    assert not [say for say in world.log_lines if say.event == "blocks_of_another_namespace"]


@pytest.mark.parametrize("off", ["setting", "ranks"])
def test_without_a_cache_nothing_is_done(make_world: MakeWorld, off: str) -> None:
    """Switched off, or with ranks that cannot keep blocks, no plan says a word about blocks."""
    world = make_world(
        cache={"enabled": off != "setting"},
        hardware=RankSetup(kv_layout="" if off == "ranks" else "layout"),
    )
    run_request(world, "a", PROMPT)
    assert run_request(world, "b", PROMPT) == 0
    assert world.cached["b"] == CachedPrefix(miss="off")
    assert not any(plan.keep_blocks or plan.evict_blocks for plan in world.plans)


def test_a_block_longer_than_the_context_is_refused(make_world: MakeWorld) -> None:
    """A block size that no sequence reaches stops the world with the setting and what is possible.

    Restarted ranks change nothing: an operator must.
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


def test_blocks_are_kept_as_soon_as_they_are_computed(make_world: MakeWorld) -> None:
    """A long prompt's blocks are there before it has ended, in the plan after each chunk."""
    world = make_world(step_tokens_max=64)
    long = [7 * number % 1_000 for number in range(600)]
    world.submit("a", long, 3)
    world.settle()
    for before, plan in zip(world.plans, world.plans[1:], strict=False):
        for chunk in before.prefill_chunks:
            end = (chunk.start + chunk.length) // 16 * 16
            kept = [one.start + one.length for one in plan.keep_blocks]
            assert end in kept


def test_nothing_is_kept_twice(make_world: MakeWorld) -> None:
    """What is resident is only touched: a repeated prompt adds no block but its own end."""
    world = make_world()
    for number in range(5):
        run_request(world, f"r{number}", PROMPT, 20)
    kept = [one.hash for plan in world.plans for one in plan.keep_blocks]
    assert len(kept) == len(set(kept)) == 7 + 1


def test_longer_tails_replace_shorter_ones(make_world: MakeWorld) -> None:
    """The end of a turn is forgotten when the next turn holds the same tokens and more."""
    world = make_world()
    run_request(world, "a", PROMPT[:84], 1)
    run_request(world, "b", PROMPT[:88], 1)
    run_request(world, "c", PROMPT[:98], 1)
    resident = read_metrics(world)["cache_resident_bytes"]
    assert resident == 98 * 10, "no token twice"


def test_an_idle_world_sends_no_plans(make_world: MakeWorld) -> None:
    """A plan without work carries what is left to keep and drop; then there is none."""
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


def test_admission_is_reported_before_the_first_token(make_world: MakeWorld) -> None:
    """The gateway learns what was found once per request, and again with the end."""
    world = make_world()
    run_request(world, "a", PROMPT)
    world.submit("b", PROMPT, 3)
    assert world.cached["b"].memory_tokens == 99
    assert not world.tokens["b"]
    world.settle()
    end = world.ends["b"]
    assert isinstance(end, RequestFinished)
    assert end.cached == world.cached["b"]


def test_cached_tokens_never_exceed_the_prompt(make_world: MakeWorld) -> None:
    """A resumed request reuses its generated tokens too; they are not counted as prompt."""
    world = make_world()
    whole = completion(PROMPT[:20], 60)
    run_request(world, "a", PROMPT[:20], 60)
    world.tokens["b"] = whole[:50]
    world.submit("b", PROMPT[:20], 60, generated=whole[:50])
    world.settle()
    assert world.tokens["b"] == whole
    assert world.cached["b"].memory_tokens == 20


def test_rows_left_over_from_a_burst_give_way_to_blocks(make_world: MakeWorld) -> None:
    """Rows as large as all memory, which nobody needs any more, do not starve the cache."""
    world = make_world(kv_tokens=2_000, kv_row_growth_tokens=64)
    world.submit("long", [5] * 1_700, 100)
    world.settle()
    run_request(world, "a", PROMPT)
    assert run_request(world, "b", PROMPT) == 99
    assert world.plans[-1].row_tokens < 1_000


def test_counters_add_up(make_world: MakeWorld) -> None:
    """Hits by tier and misses by cause are all prompt tokens; gauges say what is resident."""
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
