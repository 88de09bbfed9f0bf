"""N-gram drafts in the whole core: the same text as without, in fewer steps."""

from collections.abc import Iterator

import pytest

from shared.messages import RequestFinished, Speculation
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import query_status
from tests.unit.scheduler.support.reference_rank import REPEAT_MARKER
from tests.unit.scheduler.support.world_factory import MakeWorld, world_factory

COPY = [REPEAT_MARKER, 9, *range(100, 112)]
PROSE = [5, 6, 7, 8]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds with n-gram drafts; at teardown check that accepted requests have ended."""
    with world_factory() as make:

        def speculating(**fields: object) -> InMemoryWorld:
            return make(speculation={"method": "ngram", "tokens_max": 8}, **fields)

        yield speculating


def _finish(world: InMemoryWorld, name: str) -> RequestFinished:
    end = world.ends[name]
    assert isinstance(end, RequestFinished), end
    return end


def test_ngram_drafts_halve_steps_of_repeating_text(make_world: MakeWorld) -> None:
    """The same tokens come in half the steps, and the request's end counts accepted drafts."""
    world = make_world()
    world.submit("a", COPY, 400)
    world.settle()

    assert world.tokens["a"] == completion(COPY, 400)
    end = _finish(world, "a")
    assert end.completion_tokens == 400
    assert end.drafts_accepted > 200
    status = query_status(world)
    assert status.counters["steps_total"] < 200
    [drafts] = status.drafts
    assert end.drafts_accepted <= drafts.accepted <= drafts.proposed
    assert end.drafts_rejected <= drafts.proposed - end.drafts_accepted


def test_text_without_repetition_gets_few_drafts(make_world: MakeWorld) -> None:
    """Text without repetition gets almost no drafts."""
    world = make_world()
    world.submit("a", PROSE, 100)
    world.settle()

    assert world.tokens["a"] == completion(PROSE, 100)
    assert sum(one.proposed for one in query_status(world).drafts) < 20


@pytest.mark.parametrize("method", ["off", "draft_model"])
def test_request_with_method_off_gets_no_drafts(make_world: MakeWorld, method: str) -> None:
    """A request gets no drafts with method `off` or a method that the server does not have."""
    world = make_world()
    world.submit("a", COPY, 100, speculation=Speculation(method=method))  # type: ignore[arg-type]
    world.settle()

    assert world.tokens["a"] == completion(COPY, 100)
    assert sum(one.proposed for one in query_status(world).drafts) == 0


def test_accepted_drafts_after_end_of_completion_are_not_sent(make_world: MakeWorld) -> None:
    """No token after a stop token or the last allowed token is sent or counted."""
    world = make_world()
    whole = completion(COPY, 300)
    stop = whole[220]
    first = whole.index(stop)
    world.submit("stops", COPY, 300, stop_ids=[stop])
    for length in range(91, 99):
        world.submit(f"ends-{length}", COPY, length)
    world.settle()

    assert world.tokens["stops"] == whole[: first + 1]
    for length in range(91, 99):
        assert world.tokens[f"ends-{length}"] == whole[:length]
        assert _finish(world, f"ends-{length}").completion_tokens == length


def test_ngram_speculation_for_model_without_rollback_is_configuration_failure(
    make_world: MakeWorld,
) -> None:
    """The failure names the setting before any request is served."""
    world = make_world(hardware=RankSetup(can_roll_back=False))

    status = query_status(world)
    assert status.failure == "configuration"
    assert "speculation.method is ngram" in status.reason
