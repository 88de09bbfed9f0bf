"""What a server is set up for against what a request asks: each pair has one answer."""

from collections.abc import Iterator
from typing import Literal

import pytest

from shared.messages import RequestFinished, RequestRejected, Speculation
from tests.unit.scheduler.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.rank_failures import query_status
from tests.unit.scheduler.reference_rank import REPEAT_MARKER
from tests.unit.scheduler.world_factory import world_factory

Server = Literal["off", "ngram", "draft_model", "eagle"]
Asked = Literal["default", "off", "ngram", "draft_model", "eagle"]
Used = Literal["none", "ngram", "draft_model", "eagle"]
SERVERS: tuple[Server, ...] = ("off", "ngram", "draft_model", "eagle")
ASKED: tuple[Asked, ...] = ("default", "off", "ngram", "draft_model", "eagle")
TOKENS = 90


def answer(server: Server, asked: Asked) -> Used:
    """Return how drafts are to be proposed: what is not set up is off, n-grams need no setting."""
    method = server if asked == "default" else asked
    if method == "ngram" or (method == server and method != "off"):
        return method
    return "none"


def used(world: InMemoryWorld) -> set[str]:
    """Return by what the drafts of all plans were proposed."""
    counts = any(max(plan.draft_counts, default=0) > 0 for plan in world.plans)
    by_rank: set[str] = {world.config.speculation.method} if counts else set()
    return by_rank | ({"ngram"} if any(any(plan.drafts) for plan in world.plans) else set())


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[InMemoryWorld]:
    """Build a world of a server's method, whether it adapts, and its bound on the batch."""
    server, adaptive, disable_above_sequences = request.param
    with world_factory() as build:
        speculation = {
            "method": server,
            "draft_model": "small" if server in ("draft_model", "eagle") else "",
            "tokens_max": 5,
            "adaptive": adaptive,
            "disable_above_sequences": disable_above_sequences,
        }
        yield build(speculation=speculation, hardware=RankSetup(draft_quality=0.9))


def prompt(number: int) -> list[int]:
    """Return a prompt whose completion repeats itself."""
    return [REPEAT_MARKER, 9, *range(100 + number, 112 + number)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "make", [(server, adaptive, 0) for server in SERVERS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_every_pair_has_one_answer(make: InMemoryWorld, asked: Asked) -> None:
    """The method that was asked for, or none; the text is the same, and so are its counts."""
    expected = answer(make.config.speculation.method, asked)
    make.submit("a", prompt(0), TOKENS, speculation=Speculation(method=asked))
    make.settle()
    assert make.tokens["a"] == completion(prompt(0), TOKENS)
    assert used(make) == ({expected} - {"none"})
    end = make.ends["a"]
    assert isinstance(end, RequestFinished)
    assert (end.drafts_accepted > 0) == (expected != "none")


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    "make", [(server, adaptive, 2) for server in SERVERS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_above_the_bound_nobody_gets_drafts(make: InMemoryWorld, asked: Asked) -> None:
    """Three at once where two may: whatever is asked; alone afterwards it is as ever."""
    for number in range(3):
        wish = Speculation(method=asked)
        make.submit(f"r{number}", prompt(number), 40, speculation=wish)
    make.settle()
    for number in range(3):
        assert make.tokens[f"r{number}"] == completion(prompt(number), 40)
    full = [plan for plan in make.plans if len(plan.decodes) > 2]
    assert full
    assert not any(any(plan.drafts) or max(plan.draft_counts, default=0) > 0 for plan in full)
    make.submit("alone", prompt(7), TOKENS, speculation=Speculation(method=asked))
    make.settle()
    expected = answer(make.config.speculation.method, asked)
    assert used(make) == ({expected} - {"none"})


@pytest.mark.parametrize(
    "make", [(server, adaptive, 0) for server in SERVERS for adaptive in (True, False)],
    indirect=True,
)  # fmt: skip
def test_all_that_may_be_asked_at_once(make: InMemoryWorld) -> None:
    """A batch of all wishes: each text is right, and each row has only what it asked for."""
    for asked in ASKED:
        make.submit(asked, prompt(0), TOKENS, speculation=Speculation(method=asked))
    make.settle()
    statistics = query_status(make).drafts
    for asked in ASKED:
        assert make.tokens[asked] == completion(prompt(0), TOKENS)
        end = make.ends[asked]
        assert isinstance(end, RequestFinished)
        if answer(make.config.speculation.method, asked) == "none":
            assert end.drafts_accepted == end.drafts_rejected == 0
    answers = {answer(make.config.speculation.method, asked) for asked in ASKED} - {"none"}
    told = {one.method for one in statistics if one.rows}
    assert told == used(make) <= answers
    assert told, "somebody's drafts were verified"


def test_a_model_that_cannot_be_rolled_back_refuses_who_asks_for_drafts() -> None:
    """Set up for none it serves everybody else; who asks for drafts is told why there are none."""
    with world_factory() as build:
        world = build(hardware=RankSetup(can_roll_back=False))
        for method in ASKED:
            world.submit(method, prompt(0), 40, speculation=Speculation(method=method))
        had = world.tokens["resumed"] = completion(prompt(0), 3)
        wish = Speculation(method="ngram")
        world.submit("resumed", prompt(0), 40, speculation=wish, generated=list(had))
        world.settle()
        assert not used(world)
        for method in ASKED:
            if method in ("default", "off"):
                assert world.tokens[method] == completion(prompt(0), 40)
            else:
                end = world.ends[method]
                assert isinstance(end, RequestRejected)
                assert end.cause == "no_drafts"
                assert f"{method} is not supported by this model" in end.detail
        assert isinstance(world.ends["resumed"], RequestFinished), "it ran before"
