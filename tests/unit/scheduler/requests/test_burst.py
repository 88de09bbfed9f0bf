"""Where nobody runs, requests that come together share the first plan; nobody waits for long."""

import pytest

from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.events import GatewayMessageReceived, TimePassed
from shared.messages import AbortRequest, RequestRejected
from tests.unit.scheduler.in_memory_world import GATEWAY, InMemoryWorld, completion
from tests.unit.scheduler.world_factory import MakeWorld


def _admitted(world: InMemoryWorld) -> list[int]:
    """Return how many each plan with a prefill has admitted."""
    return [len(plan.admitted) for plan in world.plans if plan.prefill_chunks]


def test_announced_requests_share_a_plan(make_world: MakeWorld) -> None:
    """The plan is made when the last has come, at that moment."""
    world = make_world()
    for name in ("a", "b"):
        world.submit(name, [1, 2, 3], 5, more_requests_expected=True)
        world.now_s += 0.002
    assert (_admitted(world), world.core.wake_at_s is not None) == ([], True)
    world.submit("c", [1, 2, 3], 5)
    assert (_admitted(world), world.core.wake_at_s) == ([3], None)
    world.settle()
    assert {name: world.tokens[name] for name in "abc"} == dict.fromkeys(
        "abc", completion([1, 2, 3], 5)
    )


def test_who_does_not_come_is_not_waited_for(make_world: MakeWorld) -> None:
    """An announced request may be refused by its gateway: the others go on within 8 ms."""
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    until_s = world.core.wake_at_s
    assert until_s is not None
    assert 0.0 < until_s - world.now_s <= 0.008
    world.now_s = until_s
    world.tell(TimePassed())
    assert (_admitted(world), world.core.wake_at_s) == ([1], None)
    world.settle()


def test_the_first_waits_25_ms_at_most(make_world: MakeWorld) -> None:
    """Announcements without an end hold up nobody."""
    world = make_world()
    began_s = world.now_s
    for number in range(12):
        world.submit(f"r{number}", [1, 2, 3], 5, more_requests_expected=True)
        if _admitted(world):
            break
        world.now_s += 0.005
    assert 0.02 <= world.now_s - began_s <= 0.03
    world.settle()


def test_nobody_waits_while_others_run(make_world: MakeWorld) -> None:
    """A free place in the next plan is taken at once: the device is busy anyway."""
    world = make_world()
    world.submit("a", [1, 2, 3], 50)
    for _ in range(3):
        world.step()
    world.submit("b", [1, 2, 3], 5, more_requests_expected=True)
    world.step()
    assert world.core.wake_at_s is None
    assert _admitted(world) == [1, 1]
    world.settle()


@pytest.mark.parametrize(("pause_s", "shared"), [(0.004, [2, 2]), (0.06, [2, 1, 1])])
def test_those_who_ended_together_come_back_together(
    make_world: MakeWorld, pause_s: float, shared: list[int]
) -> None:
    """The first one back waits for the second, unless both have been away for long."""
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    world.submit("b", [1, 2, 3], 5)
    world.settle()
    world.now_s += pause_s
    world.submit("c", [4, 5, 6], 5)
    world.submit("d", [4, 5, 6], 5)
    world.settle()
    assert _admitted(world) == shared


def test_who_did_not_come_back_is_not_waited_for_again(make_world: MakeWorld) -> None:
    """One of two that ended together comes back alone, twice: it waits once."""
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    world.submit("b", [1, 2, 3], 5)
    world.settle()
    world.submit("c", [4, 5, 6], 1)
    until_s = world.core.wake_at_s
    assert until_s is not None
    world.now_s = until_s
    world.tell(TimePassed())
    world.settle()
    world.submit("d", [7, 8, 9], 1)
    assert world.core.wake_at_s is None
    world.settle()


def test_texts_that_a_gateway_ended_together_come_back_together(make_world: MakeWorld) -> None:
    """A stop string is an end like any other; an abort is none."""
    for reason, waits in (("stop", True), ("abort", False)):
        world = make_world()
        for name in ("a", "b"):
            world.submit(name, [1, 2, 3], 50, more_requests_expected=name == "a")
        world.step()
        for name in ("a", "b"):
            order = AbortRequest(request_id=name, reason=reason)  # type: ignore[arg-type]
            world.tell(GatewayMessageReceived(GATEWAY, order))
        world.submit("c", [4, 5, 6], 5)
        assert (world.core.wake_at_s is not None) == waits
        world.settle()


def test_a_refused_request_announces_nothing(make_world: MakeWorld) -> None:
    """Whoever is refused has nothing that others could share."""
    world = make_world()
    world.submit("a", [1] * 10_000, 5, more_requests_expected=True)
    assert isinstance(world.ends["a"], RequestRejected)
    assert world.core.wake_at_s is None


def test_a_single_client_never_waits(make_world: MakeWorld) -> None:
    """One request after the other: whoever comes back is the only one that was away."""
    world = make_world()
    for number in range(5):
        world.submit(f"r{number}", [1, 2, 3], 5)
        assert (len(_admitted(world)), world.core.wake_at_s) == (number + 1, None)
        world.settle()


def test_prompts_that_share_a_step_are_bounded_by_time() -> None:
    """The first of several waits for the last: half a second of prefill, however long one may
    take alone.
    """
    timing = StepTiming(150.0)
    assert timing.joint_tokens_max() == float("inf")
    timing.record_step(500, 0, 250.0)
    assert timing.joint_tokens_max() == pytest.approx(1_000)


def test_long_prompts_do_not_share_a_step(make_world: MakeWorld) -> None:
    """What two of them need together is more than half a second; each has a step of its own."""
    world = make_world()
    world.submit("first", list(range(1, 65)), 2)
    world.settle()
    timing = world.core._batch.timing
    for _ in range(20):
        timing.record_step(800, 0, 400.0)
    for number, name in enumerate("abc"):
        world.submit(name, [3 + number] * 600, 3, more_requests_expected=name != "c")
    lengths = [sum(chunk.length for chunk in plan.prefill_chunks) for plan in world.plans]
    assert [length for length in lengths if length][1] == 600
    world.settle()
    assert set(world.ends) == {"first", "a", "b", "c"}
