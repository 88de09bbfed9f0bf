"""Replacement of the settings of a running supervisor: orders, and the way back."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from services.supervisor import replacement
from shared import limits
from shared.configuration.host_share import HostShare, single_host_share
from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError


def _share(folder: Path, ranks: int = 1, **scheduler: float) -> HostShare:
    tree = {
        "paths": {"run_dir": str(folder)},
        "world": {"size": ranks},
        "scheduler": scheduler,
    }
    return single_host_share(config_from_tree(tree))


class Supervisors:
    """Supervisors that end as scripted; records the share of each."""

    def __init__(self, *endings: Callable[[], int]) -> None:
        self.shares: list[HostShare] = []
        self._endings = list(endings)

    def start(self, share: HostShare) -> int:
        """Run the next one."""
        self.shares.append(share)
        return self._endings.pop(0)()

    @property
    def sizes(self) -> list[int]:
        """Number of ranks of each."""
        return [one.config.world.size for one in self.shares]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that orders a world of two ranks, and ends cleanly by its signal."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *to: sent.append(to))

    def give() -> int:
        replacement.order(tmp_path, _share(tmp_path, 2), 4711)
        assert sent.pop() == (4711, signal.SIGTERM)
        return limits.EXIT_OK

    return give


def test_supervisor_ended_by_an_order_starts_again_with_its_settings(
    tmp_path: Path, order: Callable[[], int]
) -> None:
    """The order is taken once: the next stop ends everything."""
    supervisors = Supervisors(order, lambda: limits.EXIT_OK)

    code = replacement.run(_share(tmp_path), supervisors.start)

    assert (code, supervisors.sizes) == (limits.EXIT_OK, [1, 2])
    assert supervisors.shares[1] == _share(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


def test_order_of_an_earlier_life_is_ignored(tmp_path: Path, order: Callable[[], int]) -> None:
    """An order that nothing has taken does not turn a later stop into a restart."""
    order()

    supervisors = Supervisors(lambda: limits.EXIT_OK)

    assert replacement.run(_share(tmp_path), supervisors.start) == limits.EXIT_OK
    assert supervisors.sizes == [1]


def test_second_stop_signal_beats_an_order(tmp_path: Path, order: Callable[[], int]) -> None:
    """A supervisor that had to stop at once does not start again."""

    def end_at_once() -> int:
        order()
        return 128 + signal.SIGTERM

    supervisors = Supervisors(end_at_once)

    assert replacement.run(_share(tmp_path), supervisors.start) == 128 + signal.SIGTERM
    assert supervisors.sizes == [1]


def _raise() -> int:
    raise ConfigError("Cannot listen on 127.0.0.1 port 1.")


@pytest.mark.parametrize(
    ("ending", "expected"),
    [(_raise, "Cannot listen on"), (lambda: limits.EXIT_CONFIG, "a process refuses the settings")],
)
def test_refused_settings_give_way_to_the_previous_ones(
    tmp_path: Path,
    order: Callable[[], int],
    ending: Callable[[], int],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reason is in the log, and in a file for the command that waits."""
    supervisors = Supervisors(order, ending, lambda: limits.EXIT_OK)

    code = replacement.run(_share(tmp_path), supervisors.start)

    assert (code, supervisors.sizes) == (limits.EXIT_OK, [1, 2, 1])
    assert replacement.refusal(tmp_path).startswith(expected)
    assert expected in capsys.readouterr().err


def test_first_settings_that_are_refused_end_the_supervisor(tmp_path: Path) -> None:
    """Without previous settings a fault is an error, as it is without orders."""
    with pytest.raises(ConfigError, match="Cannot listen"):
        replacement.run(_share(tmp_path), Supervisors(_raise).start)
    failed = Supervisors(lambda: limits.EXIT_CONFIG)
    assert replacement.run(_share(tmp_path), failed.start) == limits.EXIT_CONFIG


def test_settings_that_have_worked_for_long_are_not_replaced_by_older_ones(
    tmp_path: Path, order: Callable[[], int]
) -> None:
    """After the time for joining and loading a fault is no longer one of the new settings."""
    brief = _share(tmp_path, 2, init_deadline_s=0.001, load_deadline_s=0.001)

    def order_brief() -> int:
        code = order()
        replacement.order(tmp_path, brief, 4711)
        return code

    def fail_late() -> int:
        time.sleep(0.01)
        return limits.EXIT_CONFIG

    supervisors = Supervisors(order_brief, fail_late)

    assert replacement.run(_share(tmp_path), supervisors.start) == limits.EXIT_CONFIG
    assert supervisors.shares[1].config == structs.replace(brief.config)


def test_order_to_an_ended_supervisor_leaves_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an ordinary stop of the next supervisor would start it again."""

    def kill(_pid: int, _number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)

    with pytest.raises(ProcessLookupError):
        replacement.order(tmp_path, _share(tmp_path, 2), 4711)

    assert list(tmp_path.iterdir()) == []
