"""Requests that arrive together share the first plan when no sequence runs, and none waits long."""

import pytest

from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.events import GatewayMessageReceived, TimePassed
from shared.messages import AbortRequest, RequestRejected
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld, completion
from tests.unit.scheduler.support.world_factory import MakeWorld


def _admitted(world: InMemoryWorld) -> list[int]:
    """Return the number of admitted requests of each plan with a prefill."""
    return [len(plan.admitted) for plan in world.plans if plan.prefill_chunks]


def test_plan_is_built_when_last_announced_request_arrives(make_world: MakeWorld) -> None:
    """The plan is built as soon as the last announced request arrives."""
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


def test_announced_request_that_never_arrives_delays_others_8_ms(make_world: MakeWorld) -> None:
    """When an announced request does not arrive, the others start within 8 ms."""
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    wake_at_s = world.core.wake_at_s
    assert wake_at_s is not None
    assert 0.0 < wake_at_s - world.now_s <= 0.008
    world.now_s = wake_at_s
    world.tell(TimePassed())
    assert (_admitted(world), world.core.wake_at_s) == ([1], None)
    world.settle()


def test_repeated_announcements_delay_first_request_at_most_25_ms(make_world: MakeWorld) -> None:
    """Repeated announcements delay the first request by at most about 25 ms."""
    world = make_world()
    began_s = world.now_s
    for number in range(12):
        world.submit(f"r{number}", [1, 2, 3], 5, more_requests_expected=True)
        if _admitted(world):
            break
        world.now_s += 0.005
    assert 0.02 <= world.now_s - began_s <= 0.03
    world.settle()


def test_request_starts_without_awaiting_announced_ones_while_others_run(
    make_world: MakeWorld,
) -> None:
    """A free row in the next plan is used at once: the device is busy anyway."""
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
def test_new_requests_of_clients_that_ended_together_are_admitted_in_one_plan(
    make_world: MakeWorld, pause_s: float, shared: list[int]
) -> None:
    """The first client to return waits for the second, unless both were away for long."""
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    world.submit("b", [1, 2, 3], 5)
    world.settle()
    world.now_s += pause_s
    world.submit("c", [4, 5, 6], 5)
    world.submit("d", [4, 5, 6], 5)
    world.settle()
    assert _admitted(world) == shared


def test_request_waits_only_once_for_client_that_does_not_return(make_world: MakeWorld) -> None:
    """When one of two clients does not return, a request of the other one waits for it only the
    first time.
    """
    world = make_world()
    world.submit("a", [1, 2, 3], 5, more_requests_expected=True)
    world.submit("b", [1, 2, 3], 5)
    world.settle()
    world.submit("c", [4, 5, 6], 1)
    wake_at_s = world.core.wake_at_s
    assert wake_at_s is not None
    world.now_s = wake_at_s
    world.tell(TimePassed())
    world.settle()
    world.submit("d", [7, 8, 9], 1)
    assert world.core.wake_at_s is None
    world.settle()


def test_request_waits_for_second_client_after_stop_strings_but_not_after_aborts(
    make_world: MakeWorld,
) -> None:
    """After two ends by stop strings a new request waits for that of the second client; after
    aborts it does not.
    """
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


def test_refused_request_does_not_make_scheduler_wait_for_announced_ones(
    make_world: MakeWorld,
) -> None:
    """A refused request does not make the scheduler wait for others."""
    world = make_world()
    world.submit("a", [1] * 10_000, 5, more_requests_expected=True)
    assert isinstance(world.ends["a"], RequestRejected)
    assert world.core.wake_at_s is None


def test_requests_of_single_client_are_never_delayed(make_world: MakeWorld) -> None:
    """A client that sends one request after the other never waits."""
    world = make_world()
    for number in range(5):
        world.submit(f"r{number}", [1, 2, 3], 5)
        assert (len(_admitted(world)), world.core.wake_at_s) == (number + 1, None)
        world.settle()


def test_prompts_sharing_step_take_half_second_of_prefill_at_most() -> None:
    """Prompts that share a step take half a second of prefill together at most."""
    timing = StepTiming(150.0)
    assert timing.joint_tokens_max() == float("inf")
    timing.record_step(500, 0, 250.0)
    assert timing.joint_tokens_max() == pytest.approx(1_000)


def test_prompts_exceeding_half_second_together_get_separate_steps(make_world: MakeWorld) -> None:
    """Prompts that together take more than half a second get a step each."""
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
