"""The scheduler's report for pages: which requests run and which wait."""

from services.scheduler.events import GatewayMessageReceived, SendToGateway
from shared.configuration.settings import Config, SchedulerConfig
from shared.messages import ActivityReported, QueryActivity
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld


def _activity(world: InMemoryWorld) -> ActivityReported:
    query = GatewayMessageReceived(GATEWAY, QueryActivity())
    (answer,) = (
        one.message
        for one in world.core.handle(query, world.now_s)
        if isinstance(one, SendToGateway) and isinstance(one.message, ActivityReported)
    )
    return answer


def test_activity_lists_running_requests_and_then_waiting_ones_in_order() -> None:
    """Two requests have rows; the others wait for them."""
    world = InMemoryWorld(Config(scheduler=SchedulerConfig(running_sequences_max=2)))
    world.boot()
    for name in ("a", "b", "c", "d"):
        world.submit(name, [1, 2, 3], 20)
    for _ in range(5):
        world.step()
    report = _activity(world)
    assert [(one.record.request_id, one.state) for one in report.requests] == [
        ("a", "decode"),
        ("b", "decode"),
        ("c", "waiting"),
        ("d", "waiting"),
    ]
    assert report.requests_omitted == 0
    world.settle()
    assert _activity(world).requests == []
