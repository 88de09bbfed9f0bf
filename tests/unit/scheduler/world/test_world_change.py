"""The world's change since the last start: its sentence, its log line and the saved facts."""

import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.events import Action, SaveWorldFacts, TimePassed, WriteLog
from services.scheduler.world.world_change import (
    SHOWN_S,
    WorldChange,
    WorldFacts,
    explain_change,
)
from shared.configuration.loading import config_from_tree
from shared.messages import RankStatus
from tests.unit.scheduler.support.world_factory import MakeWorld

ONE = WorldFacts(ranks=1, sharding="none", hosts=["mac1"], namespace="aa")
TWO = WorldFacts(ranks=2, sharding="tensor", hosts=["mac1", "mac2"], namespace="bb")


@pytest.mark.parametrize(
    ("before", "now", "expected_words"),
    [
        (ONE, TWO, ["2 ranks instead of 1, on 2 hosts instead of 1.", "do not serve it"]),
        (TWO, ONE, ["1 rank instead of 2, on 1 host instead of 2."]),
        (
            TWO,
            WorldFacts(ranks=2, sharding="expert", hosts=TWO.hosts, namespace="cc"),
            ["start: split by expert instead of tensor.", "do not serve it"],
        ),
        (
            TWO,
            WorldFacts(ranks=2, sharding="tensor", hosts=["mac1", "mac3"], namespace="bb"),
            ["start: on other hosts.", "only the blocks that are stored on its host"],
        ),
        (
            TWO,
            WorldFacts(ranks=2, sharding="tensor", hosts=["mac2", "mac1"], namespace="bb"),
            ["start: with ranks on each other's hosts."],
        ),
        (
            ONE,
            WorldFacts(ranks=1, sharding="none", hosts=["mac1"], namespace="cc"),
            ["The model, its shares, settings or versions have changed"],
        ),
        # Before ranks are there, only the settings are known.
        (
            ONE,
            WorldFacts(ranks=2, sharding="tensor"),
            ["2 ranks instead of 1.", "may not serve it"],
        ),
    ],
)
def test_change_of_world_is_one_text_with_differences_and_consequence(
    before: WorldFacts, now: WorldFacts, expected_words: list[str]
) -> None:
    """Each difference is named with its old and new value, then whether stored blocks serve."""
    text = explain_change(before, now)

    assert [words for words in expected_words if words not in text] == []


@pytest.mark.parametrize("now", [TWO, WorldFacts(ranks=2, sharding="tensor")])
def test_world_equal_to_last_start_has_no_change(now: WorldFacts) -> None:
    """The same world, and settings that fit it, give no text."""
    assert explain_change(TWO, now) == ""


def test_worlds_without_blocks_are_compared_without_consequence() -> None:
    """With the cache off a change says nothing of blocks."""
    before, now = (WorldFacts(ranks=ranks, sharding="tensor") for ranks in (2, 4))

    assert explain_change(before, now) == (
        "The world has changed since the last start: 4 ranks instead of 2."
    )


def test_scheduler_logs_changed_world_at_its_first_event() -> None:
    """The log names the change before a rank is there."""
    core = SchedulerCore(config_from_tree({"world": {"size": 2}}), before=ONE)

    actions = core.handle(TimePassed(), 0.0)

    lines = [one for one in actions if isinstance(one, WriteLog)]
    assert [(one.level, one.event) for one in lines] == [("warning", "world_changed")]
    assert "2 ranks instead of 1" in lines[0].fields["detail"]


def test_change_is_shown_for_a_day_after_the_world_is_ready() -> None:
    """While ranks are missing it is shown; once they are ready, for a day."""
    change = WorldChange(config_from_tree({"world": {"size": 2}}), ONE, [])
    assert change.explain(9 * SHOWN_S) != ""

    ranks = [RankStatus(rank=rank, state="ready", host="mac1") for rank in range(2)]
    change.note_ready(ranks, "bb", 10 * SHOWN_S)

    assert "2 ranks instead of 1" in change.explain(10 * SHOWN_S)
    assert change.explain(11 * SHOWN_S - 1.0) != ""
    assert change.explain(11 * SHOWN_S) == ""


def test_facts_of_a_world_are_saved_once_when_it_is_ready(make_world: MakeWorld) -> None:
    """A world that never becomes ready replaces no facts; an equal one saves nothing again."""
    world = make_world(ranks=2)
    actions: list[Action] = []
    change = WorldChange(world.config, None, actions)
    ranks = [RankStatus(rank=rank, state="ready", host="mac1") for rank in range(2)]
    assert actions == []

    for _ in range(2):
        change.note_ready(ranks, "bb", 1.0)

    assert [type(one) for one in actions] == [SaveWorldFacts]
    assert world.status is not None
    assert len(world.status.namespace) == 64
    assert world.status.world_change == ""
