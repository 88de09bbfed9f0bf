"""How schedulers are told apart by who only hears them: over real links."""

import time
from collections.abc import Callable
from pathlib import Path

from services.supervisor.status.service_queries import StatusWatch
from shared.configuration.loading import load_config
from shared.messages import QueryStatus, StatusReported, ToScheduler
from shared.transport.links import Listener, Received
from tests.unit.supervisor.status.status_reports import status_report

DEADLINE_S = 30.0


class _Scheduler:
    """Answers whoever asks how it is."""

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


def _hear(watch: StatusWatch, scheduler: _Scheduler) -> StatusReported:
    """Return the next status."""
    found: list[StatusReported] = []
    _until(watch, scheduler, found, lambda: bool(found))
    return found[0]


def _until(
    watch: StatusWatch,
    scheduler: _Scheduler,
    found: list[StatusReported],
    is_so: Callable[[], bool],
) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until_s
        scheduler.answer()
        latest = watch.poll(0.02)
        if latest is not None:
            found.append(latest)


def test_a_link_that_comes_back_is_no_other_scheduler(tmp_path: Path) -> None:
    """Only another process counts epochs anew; to dial again says nothing about that."""
    config = load_config(flags={"paths.run_dir": str(tmp_path)})
    scheduler = _Scheduler(config.gateway_address)
    watch = StatusWatch(config, 0.05)
    try:
        _hear(watch, scheduler)
        assert watch.schedulers == 1
        for _ in range(2):
            before = scheduler.link.peers
            scheduler.hang_up()
            assert not scheduler.link.peers
            _until(watch, scheduler, [], lambda: bool(scheduler.link.peers))
            _hear(watch, scheduler)
            assert scheduler.link.peers == before
        assert watch.schedulers == 1

        scheduler.link.close(0.0)
        scheduler = _Scheduler(config.gateway_address)
        _hear(watch, scheduler)
        assert watch.schedulers == 2
    finally:
        watch.close()
        scheduler.link.close(0.0)
