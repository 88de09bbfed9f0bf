"""Drafts that ranks propose, in the whole core: valid plans, the same text, fewer steps."""

import itertools
from collections.abc import Iterator

import pytest

from services.scheduler.cache.kv_rows import RowBudget
from shared.messages import RequestFinished, Speculation
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import query_status
from tests.unit.scheduler.support.reference_rank import (
    BYTES_PER_TOKEN,
    DRAFT_BYTES_PER_TOKEN,
    REPEAT_MARKER,
)
from tests.unit.scheduler.support.world_factory import MakeWorld, world_factory

PROMPT = list(range(200, 240))


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds whose ranks propose drafts; at teardown check that accepted requests have
    ended."""
    with world_factory() as make:

        def drafting(method: str = "draft_model", **fields: object) -> InMemoryWorld:
            speculation = {"method": method, "draft_model": "small", "tokens_max": 5}
            return make(speculation=speculation, **fields)

        yield drafting


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_good_drafts_give_same_tokens_in_fewer_steps(make_world: MakeWorld, method: str) -> None:
    """Good drafts give the tokens of a run without drafts in fewer steps; accepted drafts are
    reported by method and request."""
    world = make_world(method, hardware=RankSetup(draft_quality=0.9))
    world.submit("a", PROMPT, 300)
    world.settle()

    assert world.tokens["a"] == completion(PROMPT, 300)
    status = query_status(world)
    assert status.counters["steps_total"] < 150
    end = world.ends["a"]
    assert isinstance(end, RequestFinished)
    [drafts] = status.drafts
    assert drafts.method == method
    assert 150 < end.drafts_accepted <= drafts.accepted


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_always_rejected_drafts_are_proposed_in_few_steps(
    make_world: MakeWorld, method: str
) -> None:
    """Drafts that are never right are proposed in less than a tenth of the steps."""
    world = make_world(method, hardware=RankSetup(draft_quality=0.0))
    for number in range(4):
        world.submit(f"r{number}", [number, *PROMPT], 300)
    world.settle()

    status = query_status(world)
    counters = status.counters
    assert counters["drafted_steps_total"] < 0.1 * counters["steps_total"]
    assert sum(one.accepted for one in status.drafts) == 0


def test_plans_with_eagle_contain_no_draft_chunks(make_world: MakeWorld) -> None:
    """Only a draft model's rows read tokens."""
    world = make_world("eagle")
    world.submit("a", PROMPT, 40)
    world.settle()
    assert any(plan.draft_counts for plan in world.plans)
    assert not any(plan.draft_chunks for plan in world.plans)


def test_draft_rows_read_no_more_tokens_than_same_plan_prefills(make_world: MakeWorld) -> None:
    """Draft rows read at most the tokens that are prefilled in the same plan."""
    world = make_world(step_tokens_max=32)
    world.submit("a", list(range(300)), 40)
    world.settle()
    chunks = [plan for plan in world.plans if plan.prefill_chunks]
    assert len(chunks) > 3
    for plan in chunks:
        read = sum(len(chunk.tokens) for chunk in plan.draft_chunks)
        assert read <= sum(chunk.length for chunk in plan.prefill_chunks)
    tokens = [token for plan in chunks for one in plan.draft_chunks for token in one.tokens]
    assert tokens == list(range(300))


def test_draft_row_reads_reused_prefix_in_chunks_of_bounded_length(make_world: MakeWorld) -> None:
    """A draft row reads a prefix from blocks later, a bounded number of tokens per step."""
    world = make_world(hardware=RankSetup(draft_quality=0.9), decode_stall_ms=1_000.0)
    prompt = [token % 900 for token in range(1_200)]
    world.submit("a", prompt, 20)
    world.settle()
    first = len(world.plans)
    world.submit("b", [*prompt, 7, 8], 200)
    world.settle()

    assert world.cached["b"].memory_tokens > 1_000
    chunk_lengths = [
        len(chunk.tokens)
        for plan in world.plans[first:]
        if not plan.prefill_chunks
        for chunk in plan.draft_chunks
    ]
    assert sum(chunk_lengths) > 1_000, "the draft row has read the prefix"
    assert chunk_lengths[0] <= 128, "the cost is not known at first"
    assert all(after <= 2 * before for before, after in itertools.pairwise(chunk_lengths))
    assert max(plan.draft_counts[0] for plan in world.plans[-20:] if plan.draft_counts) > 1


def test_requests_without_draft_model_get_no_draft_row(make_world: MakeWorld) -> None:
    """Requests that decline, are too short, or use n-grams read nothing."""
    world = make_world()
    world.submit("off", PROMPT, 30, speculation=Speculation(method="off"))
    world.submit("ngram", [REPEAT_MARKER, 9, *PROMPT], 90, speculation=Speculation(method="ngram"))
    world.submit("short", PROMPT, 2)
    world.settle()
    assert not any(plan.draft_chunks or plan.draft_counts for plan in world.plans)
    assert any(plan.drafts for plan in world.plans)


def test_request_for_unconfigured_draft_method_gets_no_drafts(make_world: MakeWorld) -> None:
    """A server with a draft model proposes nothing when a request asks for eagle."""
    world = make_world()
    world.submit("a", PROMPT, 60, speculation=Speculation(method="eagle"))
    world.settle()
    assert not any(plan.draft_counts for plan in world.plans)


def test_every_decode_gets_all_allowed_drafts_when_adapting_is_off() -> None:
    """Without adapting every decode gets as many drafts as allowed."""
    with world_factory() as make:
        speculation = {
            "method": "draft_model", "draft_model": "small", "tokens_max": 3, "adaptive": False,
        }  # fmt: skip
        world = make(speculation=speculation, hardware=RankSetup(draft_quality=0.0))
        world.submit("a", PROMPT, 60)
        world.submit("b", [REPEAT_MARKER, 5, *PROMPT], 60, speculation=Speculation(method="ngram"))
        world.settle()
        assert world.tokens["a"] == completion(PROMPT, 60)
        counts = [plan.draft_counts for plan in world.plans if plan.decodes]
        assert sum(bool(one) for one in counts) > 20
        assert {max(one) for one in counts if one} == {1, 2, 3}


def test_kv_budget_counts_draft_rows_in_bytes_per_token(make_world: MakeWorld) -> None:
    """Rows take the bytes of the model and of the draft model per token; blocks take only those of
    the model."""
    tokens = 2_000
    world = make_world(kv_tokens=tokens)
    budget = world.core._batch.rows.budget
    assert budget.row_bytes_per_token == BYTES_PER_TOKEN + DRAFT_BYTES_PER_TOKEN
    assert (
        query_status(world).kv_tokens_max == tokens * BYTES_PER_TOKEN // budget.row_bytes_per_token
    )
    form = world.core._batch.cache.block_format
    assert form is not None
    assert form.block_bytes(1) == BYTES_PER_TOKEN
    assert RowBudget(100, 10, 0).row_bytes(1, 5) == 50
    assert RowBudget(100, 10, 0, 3).longest_row() == 7


def test_rank_without_configured_draft_model_is_configuration_failure(
    make_world: MakeWorld,
) -> None:
    """The failure names the setting and both values, and no request is served."""
    world = make_world(hardware=RankSetup(has_drafts=False), ranks=2)
    status = query_status(world)
    assert status.failure == "configuration"
    assert (
        'speculation.method is "draft_model" for the scheduler and "off" on rank 0: give the '
        "scheduler and all ranks the same [speculation] section."
    ) in status.reason
    assert not world.ranks


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafting_for_model_without_rollback_is_configuration_failure(
    make_world: MakeWorld, method: str
) -> None:
    """A model that cannot be rolled back is refused for draft models and eagle."""
    world = make_world(method, hardware=RankSetup(can_roll_back=False))
    assert f"speculation.method is {method}" in query_status(world).reason


def test_accepted_drafts_after_end_of_completion_are_not_sent(make_world: MakeWorld) -> None:
    """No token after a stop token or the last allowed token is sent."""
    world = make_world(hardware=RankSetup(draft_quality=0.95))
    whole = completion(PROMPT, 300)
    world.submit("stops", PROMPT, 300, stop_ids=[whole[97]])
    for length in range(41, 49):
        world.submit(f"ends-{length}", PROMPT, length)
    world.settle()
    assert world.tokens["stops"] == whole[: whole.index(whole[97]) + 1]
    for length in range(41, 49):
        assert world.tokens[f"ends-{length}"] == whole[:length]
