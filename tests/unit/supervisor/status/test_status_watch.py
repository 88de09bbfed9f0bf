"""Detection of scheduler restarts by a process that only reads status reports, over real links."""

from collections.abc import Callable
from pathlib import Path

from services.supervisor.status.service_queries import StatusWatch
from shared.configuration.loading import load_config
from shared.messages import QueryStatus, StatusReported, ToScheduler
from shared.transport.links import Listener, Received
from tests.support.waiting import wait_until
from tests.unit.supervisor.status.status_reports import status_report

DEADLINE_S = 30.0


class _FakeScheduler:
    """A listener that answers each status query."""

    def __init__(self, address: str) -> None:
        self.link: Listener[ToScheduler] = Listener(address, ToScheduler)

    def answer(self) -> None:
        for event in self.link.poll(0.0):
            match event:
                case Received(peer=peer, message=QueryStatus()):
                    self.link.send(peer, status_report())
                case _:
                    pass

    def hang_up(self) -> None:
        for peer in self.link.peers:
            self.link.drop(peer)


def _next_report(watch: StatusWatch, scheduler: _FakeScheduler) -> StatusReported:
    """Return the next status report."""
    reports: list[StatusReported] = []
    _poll_until(watch, scheduler, reports, lambda: bool(reports))
    return reports[0]


def _poll_until(
    watch: StatusWatch,
    scheduler: _FakeScheduler,
    reports: list[StatusReported],
    condition: Callable[[], bool],
) -> None:
    """Poll both ends, appending reports to `found`, until the condition holds."""

    def poll() -> bool:
        if condition():
            return True
        scheduler.answer()
        latest = watch.poll(0.02)
        if latest is not None:
            reports.append(latest)
        return False

    wait_until(poll, DEADLINE_S, poll_s=0.0)


def test_reconnection_to_same_scheduler_process_is_not_reported_as_new_scheduler(
    tmp_path: Path,
) -> None:
    """Only another process counts as a new scheduler; a new connection to the same process does
    not."""
    config = load_config(flags={"paths.run_dir": str(tmp_path)})
    scheduler = _FakeScheduler(config.gateway_address)
    watch = StatusWatch(config, 0.05)
    try:
        _next_report(watch, scheduler)
        assert watch.schedulers == 1
        for _ in range(2):
            before = scheduler.link.peers
            scheduler.hang_up()
            assert not scheduler.link.peers
            _poll_until(watch, scheduler, [], lambda: bool(scheduler.link.peers))
            _next_report(watch, scheduler)
            assert scheduler.link.peers == before
        assert watch.schedulers == 1

        scheduler.link.close(0.0)
        scheduler = _FakeScheduler(config.gateway_address)
        _next_report(watch, scheduler)
        assert watch.schedulers == 2
    finally:
        watch.close()
        scheduler.link.close(0.0)
