"""Installing and taking away jobs: every file and every call, down to the last one."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.commands import main
from services.commands.deployment import installing
from services.commands.deployment.installing import Target
from services.commands.deployment.jobs import Job
from shared import limits
from shared.errors import UnavailableError
from tests.unit.commands.deployment import inventories
from tests.unit.commands.deployment.test_jobs import _jobs

DAEMONS = "Library/LaunchDaemons"
UNITS = "etc/systemd/system"
LOGS = ["/usr/bin/install", "-d", "-o", "bob", "-m", "0750", "/var/log/lockstep"]


class Machine:
    """Notes calls; those that `fails` names fail so often."""

    def __init__(self, root: Path) -> None:
        """Begin with none."""
        self.calls: list[list[str]] = []
        self.fails: dict[str, int] = {}
        self.slept_s = 0.0
        self.target = Target(root, self._call, self._sleep)

    def _call(self, command: Sequence[str]) -> int:
        self.calls.append(list(command))
        for name in self.fails:
            if name in command and self.fails[name] > 0:
                self.fails[name] -= 1
                return 5
        return 0

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def _made(folder: Path, *, supervised: bool = False) -> list[Job]:
    return list(_jobs(folder, "studio-2", supervised=supervised).values())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_launch_daemons_are_installed(tmp_path: Path) -> None:
    """The log's folder, the files, then each job is enabled and started."""
    machine = Machine(tmp_path / "root")

    installing.install_launchd(machine.target, _made(tmp_path))

    files = ["org.lockstep.rank-1.plist", "org.lockstep.store.plist"]
    assert _names(tmp_path / "root" / DAEMONS) == files
    assert _names(tmp_path / "root/etc/newsyslog.d") == ["lockstep.conf"]
    assert (tmp_path / "root" / DAEMONS / files[0]).stat().st_mode & 0o777 == 0o644
    assert machine.calls == [
        LOGS,
        LOGS,
        ["/bin/launchctl", "enable", "system/org.lockstep.store"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.store.plist"],
        ["/bin/launchctl", "enable", "system/org.lockstep.rank-1"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.rank-1.plist"],
    ]


def test_launch_daemons_are_replaced(tmp_path: Path) -> None:
    """Installed again as one job, what ran before is ended first, and its files are gone."""
    machine = Machine(tmp_path / "root")
    installing.install_launchd(machine.target, _made(tmp_path))
    machine.calls.clear()

    installing.install_launchd(machine.target, _made(tmp_path, supervised=True))

    assert _names(tmp_path / "root" / DAEMONS) == ["org.lockstep.lockstep.plist"]
    assert machine.calls == [
        ["/bin/launchctl", "bootout", "system/org.lockstep.rank-1"],
        ["/bin/launchctl", "bootout", "system/org.lockstep.store"],
        LOGS,
        ["/bin/launchctl", "enable", "system/org.lockstep.lockstep"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.lockstep.plist"],
    ]


def test_a_predecessor_that_drains_is_waited_for(tmp_path: Path) -> None:
    """launchd refuses a job while the old one ends: it is asked again, not for ever."""
    machine = Machine(tmp_path / "root")
    machine.fails = {"bootstrap": 3}
    installing.install_launchd(machine.target, _made(tmp_path, supervised=True))
    assert machine.slept_s == 3.0

    machine.fails = {"bootstrap": 10**6}
    with pytest.raises(UnavailableError, match=r"launchctl bootstrap system .* failed with code 5"):
        installing.install_launchd(machine.target, _made(tmp_path, supervised=True))


def test_launch_daemons_are_taken_away(tmp_path: Path) -> None:
    """Every job of ours is ended, also one that is no longer in the inventory; others stay."""
    machine = Machine(tmp_path / "root")
    installing.install_launchd(machine.target, _made(tmp_path))
    folder = tmp_path / "root" / DAEMONS
    (folder / "org.lockstep.rank-7.plist").touch()
    (folder / "com.example.other.plist").touch()
    machine.calls.clear()
    machine.fails = {"bootout": 1}

    installing.uninstall_launchd(machine.target)

    assert _names(folder) == ["com.example.other.plist"]
    assert _names(tmp_path / "root/etc/newsyslog.d") == []
    assert machine.calls == [
        ["/bin/launchctl", "bootout", f"system/org.lockstep.{name}"]
        for name in ("rank-1", "rank-7", "store")
    ]


def test_units_are_installed_replaced_and_taken_away(tmp_path: Path) -> None:
    """Files first, then systemd reads them; what is no unit any more is ended before."""
    machine = Machine(tmp_path / "root")
    systemctl = "/usr/bin/systemctl"
    two = ["lockstep-store.service", "lockstep-rank-1.service"]

    installing.install_systemd(machine.target, _made(tmp_path))
    assert _names(tmp_path / "root" / UNITS) == sorted(two)
    assert machine.calls == [
        [systemctl, "daemon-reload"],
        [systemctl, "enable", *two],
        [systemctl, "restart", *two],
    ]

    machine.calls.clear()
    installing.install_systemd(machine.target, _made(tmp_path, supervised=True))
    assert _names(tmp_path / "root" / UNITS) == ["lockstep.service"]
    assert machine.calls == [
        [systemctl, "disable", "--now", *sorted(two)],
        [systemctl, "daemon-reload"],
        [systemctl, "enable", "lockstep.service"],
        [systemctl, "restart", "lockstep.service"],
    ]

    machine.calls.clear()
    installing.uninstall_systemd(machine.target)
    assert _names(tmp_path / "root" / UNITS) == []
    assert machine.calls == [
        [systemctl, "disable", "--now", "lockstep.service"],
        [systemctl, "daemon-reload"],
    ]


def test_a_refusal_of_systemd_is_an_error(tmp_path: Path) -> None:
    """The command and its exit code are named."""
    machine = Machine(tmp_path / "root")
    machine.fails = {"enable": 1}

    with pytest.raises(
        UnavailableError, match=r"`/usr/bin/systemctl enable .*` failed with code 5"
    ):
        installing.install_systemd(machine.target, _made(tmp_path))


def _lockstep(*arguments: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(arguments)
    return code, said.getvalue()


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_the_command_line_writes_below_a_root_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    """With --root the files are written there, and the calls are named instead of made."""
    file, root = str(inventories.written(tmp_path)), str(tmp_path / "root")
    settings = ("--inventory", file, "--host", "studio-2")

    code, said = _lockstep(kind, "install", *settings, "--root", root)

    assert code == limits.EXIT_OK, said
    assert f"wrote {root}/" in said
    assert "not run: /" in said
    code, said = _lockstep(kind, "uninstall", "--root", root)
    assert code == limits.EXIT_OK, said
    assert not [path for path in Path(root).rglob("*lockstep*") if path.is_file()]
    assert _lockstep(kind, "uninstall", "--root", root)[1] == "There was nothing to do.\n"


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_rendering_prints_each_file_below_its_path(tmp_path: Path, kind: str) -> None:
    """What would be installed, on any machine, for any host."""
    file = str(inventories.written(tmp_path))

    code, said = _lockstep(kind, "render", "--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_OK, said
    folder = DAEMONS if kind == "launchd" else UNITS
    assert said.count(f"==> /{folder}/") == 4


def test_root_rights_are_asked_for_with_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, and on a machine of the other kind, nothing is written."""
    file = str(inventories.written(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    words = ["launchd", "install", "--inventory", file, "--host", "studio-2"]
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])

    code, said = _lockstep(*words)

    assert code == limits.EXIT_CONFIG
    assert said.startswith("lockstep: This command needs root rights: run `sudo /")
    assert said.endswith(f"/lockstep {' '.join(words)}`.\n")
    code, said = _lockstep("systemd", "install", *words[2:])
    assert code == limits.EXIT_USAGE
    assert "has no systemd: use `lockstep launchd install`" in said


def test_secrets_in_the_environment_stop_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCKSTEP_API_KEYS is refused before anything is read or written."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", "ann=" + "x" * 40)
    file = str(inventories.written(tmp_path))

    code, said = _lockstep("launchd", "render", "--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_CONFIG
    assert "gateway.api_keys_file" in said
    assert "xxxx" not in said
