"""Draft method of a request for every server setting and every requested method."""

from collections.abc import Iterator
from typing import Literal

import pytest

from shared.messages import RequestFinished, RequestRejected, Speculation
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import query_status
from tests.unit.scheduler.support.reference_rank import REPEAT_MARKER
from tests.unit.scheduler.support.world_factory import world_factory

ServerMethod = Literal["off", "ngram", "draft_model", "eagle"]
RequestedMethod = Literal["default", "off", "ngram", "draft_model", "eagle"]
UsedMethod = Literal["none", "ngram", "draft_model", "eagle"]
SERVER_METHODS: tuple[ServerMethod, ...] = ("off", "ngram", "draft_model", "eagle")
REQUESTED_METHODS: tuple[RequestedMethod, ...] = ("default", "off", "ngram", "draft_model", "eagle")
TOKENS = 90


def expected_method(server: ServerMethod, requested: RequestedMethod) -> UsedMethod:
    """Return the method to use: an unsupported method is off, n-grams need no setting."""
    method = server if requested == "default" else requested
    if method == "ngram" or (method == server and method != "off"):
        return method
    return "none"


def used_methods(world: InMemoryWorld) -> set[str]:
    """Return the methods whose drafts the plans contain."""
    counts = any(max(plan.draft_counts, default=0) > 0 for plan in world.plans)
    by_rank: set[str] = {world.config.speculation.method} if counts else set()
    return by_rank | ({"ngram"} if any(any(plan.drafts) for plan in world.plans) else set())


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[InMemoryWorld]:
    """Build a world with a draft method, with or without adapting, and a bound on the batch."""
    server, adaptive, disable_above_sequences = request.param
    with world_factory() as make:
        speculation = {
            "method": server,
            "draft_model": "small" if server in ("draft_model", "eagle") else "",
            "tokens_max": 5,
            "adaptive": adaptive,
            "disable_above_sequences": disable_above_sequences,
        }
        yield make(speculation=speculation, hardware=RankSetup(draft_quality=0.9))


def make_prompt(number: int) -> list[int]:
    """Return a prompt whose completion repeats itself."""
    return [REPEAT_MARKER, 9, *range(100 + number, 112 + number)]


@pytest.mark.parametrize("requested", REQUESTED_METHODS)
@pytest.mark.parametrize(
    "world", [(server, adaptive, 0) for server in SERVER_METHODS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_request_gets_drafts_of_requested_method_or_none(
    world: InMemoryWorld, requested: RequestedMethod
) -> None:
    """The drafts come from the requested method or are missing; the text is the same."""
    expected = expected_method(world.config.speculation.method, requested)
    world.submit("a", make_prompt(0), TOKENS, speculation=Speculation(method=requested))
    world.settle()
    assert world.tokens["a"] == completion(make_prompt(0), TOKENS)
    assert used_methods(world) == ({expected} - {"none"})
    end = world.ends["a"]
    assert isinstance(end, RequestFinished)
    assert (end.drafts_accepted > 0) == (expected != "none")


@pytest.mark.parametrize("requested", REQUESTED_METHODS)
@pytest.mark.parametrize(
    "world", [(server, adaptive, 2) for server in SERVER_METHODS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_no_row_gets_drafts_beyond_configured_number_of_sequences(
    world: InMemoryWorld, requested: RequestedMethod
) -> None:
    """Above `disable_above_sequences` no row gets drafts; a single request afterwards does."""
    for number in range(3):
        speculation = Speculation(method=requested)
        world.submit(f"r{number}", make_prompt(number), 40, speculation=speculation)
    world.settle()
    for number in range(3):
        assert world.tokens[f"r{number}"] == completion(make_prompt(number), 40)
    full = [plan for plan in world.plans if len(plan.decodes) > 2]
    assert full
    assert not any(any(plan.drafts) or max(plan.draft_counts, default=0) > 0 for plan in full)
    world.submit("alone", make_prompt(7), TOKENS, speculation=Speculation(method=requested))
    world.settle()
    expected = expected_method(world.config.speculation.method, requested)
    assert used_methods(world) == ({expected} - {"none"})


@pytest.mark.parametrize(
    "world", [(server, adaptive, 0) for server in SERVER_METHODS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_rows_with_different_draft_methods_in_one_batch_keep_tokens(world: InMemoryWorld) -> None:
    """In a batch with all methods each request gets its tokens and drafts of its own
    method only.
    """
    for requested in REQUESTED_METHODS:
        world.submit(requested, make_prompt(0), TOKENS, speculation=Speculation(method=requested))
    world.settle()
    statistics = query_status(world).drafts
    for requested in REQUESTED_METHODS:
        assert world.tokens[requested] == completion(make_prompt(0), TOKENS)
        end = world.ends[requested]
        assert isinstance(end, RequestFinished)
        if expected_method(world.config.speculation.method, requested) == "none":
            assert end.drafts_accepted == end.drafts_rejected == 0
    answers = {
        expected_method(world.config.speculation.method, requested)
        for requested in REQUESTED_METHODS
    } - {"none"}
    reported = {one.method for one in statistics if one.rows}
    assert reported == used_methods(world) <= answers
    assert reported, "no drafts were verified"


def test_server_of_model_without_rollback_rejects_requests_for_drafts() -> None:
    """Without configured drafts the server runs other requests; requests for drafts are rejected
    with the reason."""
    with world_factory() as make:
        world = make(hardware=RankSetup(can_roll_back=False))
        for method in REQUESTED_METHODS:
            world.submit(method, make_prompt(0), 40, speculation=Speculation(method=method))
        had = world.tokens["resumed"] = completion(make_prompt(0), 3)
        speculation = Speculation(method="ngram")
        world.submit("resumed", make_prompt(0), 40, speculation=speculation, generated=list(had))
        world.settle()
        assert not used_methods(world)
        for method in REQUESTED_METHODS:
            if method in ("default", "off"):
                assert world.tokens[method] == completion(make_prompt(0), 40)
            else:
                end = world.ends[method]
                assert isinstance(end, RequestRejected)
                assert end.cause == "no_drafts"
                assert f"{method} is not supported by this model" in end.detail
        assert isinstance(world.ends["resumed"], RequestFinished), (
            "a resumed request is not rejected"
        )
