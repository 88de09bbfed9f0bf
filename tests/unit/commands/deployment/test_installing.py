"""Installation and removal of jobs: all files and all calls of launchctl and systemctl."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.commands.deployment import installing
from services.commands.deployment.installing import Target
from services.commands.deployment.jobs import Job
from shared import limits
from shared.errors import UnavailableError
from tests.unit.commands.command_lines import run_merged
from tests.unit.commands.deployment import inventories
from tests.unit.commands.deployment.test_jobs import _jobs

DAEMONS = "Library/LaunchDaemons"
UNITS = "etc/systemd/system"
LOGS = ["/usr/bin/install", "-d", "-o", "bob", "-m", "0750", "/var/log/lockstep"]


class RecordingMachine:
    """Records calls; a call with a word in `fails` fails that many times."""

    def __init__(self, root: Path) -> None:
        """Create a machine whose root folder is `root`."""
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


def _jobs_of_studio_2(folder: Path, *, supervised: bool = False) -> list[Job]:
    """Return the jobs of the host studio-2."""
    return list(_jobs(folder, "studio-2", supervised=supervised).values())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_install_writes_launchd_files_and_starts_every_job(tmp_path: Path) -> None:
    """The log folder and files are made first, then each job is enabled and started."""
    machine = RecordingMachine(tmp_path / "root")

    installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path))

    files = ["org.lockstep.rank-1.plist", "org.lockstep.store.plist"]
    assert _names(tmp_path / "root" / DAEMONS) == files
    assert (tmp_path / "root" / DAEMONS / files[0]).stat().st_mode & 0o777 == 0o644
    assert machine.calls == [
        LOGS,
        LOGS,
        ["/bin/launchctl", "enable", "system/org.lockstep.store"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.store.plist"],
        ["/bin/launchctl", "enable", "system/org.lockstep.rank-1"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.rank-1.plist"],
    ]


def test_install_ends_and_removes_earlier_launchd_jobs(tmp_path: Path) -> None:
    """Earlier jobs are ended first, and their files are removed."""
    machine = RecordingMachine(tmp_path / "root")
    installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path))
    machine.calls.clear()

    installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path, supervised=True))

    assert _names(tmp_path / "root" / DAEMONS) == ["org.lockstep.lockstep.plist"]
    assert machine.calls == [
        ["/bin/launchctl", "bootout", "system/org.lockstep.rank-1"],
        ["/bin/launchctl", "bootout", "system/org.lockstep.store"],
        LOGS,
        ["/bin/launchctl", "enable", "system/org.lockstep.lockstep"],
        ["/bin/launchctl", "bootstrap", "system", f"/{DAEMONS}/org.lockstep.lockstep.plist"],
    ]


def test_install_retries_launchd_bootstrap_while_earlier_job_drains(tmp_path: Path) -> None:
    """launchd refuses a job while the earlier one ends: bootstrap is retried up to a limit."""
    machine = RecordingMachine(tmp_path / "root")
    machine.fails = {"bootstrap": 3}
    installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path, supervised=True))
    assert machine.slept_s == 3.0

    machine.fails = {"bootstrap": 10**6}
    with pytest.raises(UnavailableError, match=r"launchctl bootstrap system .* failed with code 5"):
        installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path, supervised=True))


def test_uninstall_removes_lockstep_launchd_jobs_and_no_others(tmp_path: Path) -> None:
    """Jobs that are no longer in the inventory are removed too; other jobs stay."""
    machine = RecordingMachine(tmp_path / "root")
    installing.install_launchd(machine.target, _jobs_of_studio_2(tmp_path))
    folder = tmp_path / "root" / DAEMONS
    (folder / "org.lockstep.rank-7.plist").touch()
    (folder / "com.example.other.plist").touch()
    machine.calls.clear()
    machine.fails = {"bootout": 1}

    installing.uninstall_launchd(machine.target)

    assert _names(folder) == ["com.example.other.plist"]
    assert machine.calls == [
        ["/bin/launchctl", "bootout", f"system/org.lockstep.{name}"]
        for name in ("rank-1", "rank-7", "store")
    ]


def test_systemd_units_are_installed_replaced_and_removed(tmp_path: Path) -> None:
    """Units that are no longer needed are disabled before systemd reloads."""
    machine = RecordingMachine(tmp_path / "root")
    systemctl = "/usr/bin/systemctl"
    two = ["lockstep-store.service", "lockstep-rank-1.service"]

    installing.install_systemd(machine.target, _jobs_of_studio_2(tmp_path))
    assert _names(tmp_path / "root" / UNITS) == sorted(two)
    assert machine.calls == [
        [systemctl, "daemon-reload"],
        [systemctl, "enable", *two],
        [systemctl, "restart", *two],
    ]

    machine.calls.clear()
    installing.install_systemd(machine.target, _jobs_of_studio_2(tmp_path, supervised=True))
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


def test_install_fails_with_command_and_exit_code_when_systemctl_fails(tmp_path: Path) -> None:
    """The error of a failed systemctl names the command and its exit code."""
    machine = RecordingMachine(tmp_path / "root")
    machine.fails = {"enable": 1}

    with pytest.raises(
        UnavailableError, match=r"`/usr/bin/systemctl enable .*` failed with code 5"
    ):
        installing.install_systemd(machine.target, _jobs_of_studio_2(tmp_path))


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_install_with_root_flag_writes_files_below_it_and_runs_nothing(
    tmp_path: Path, kind: str
) -> None:
    """With --root files are written below it, and calls are printed instead of run."""
    file, root = str(inventories.write_inventory(tmp_path)), str(tmp_path / "root")
    settings = ("--inventory", file, "--host", "studio-2")

    code, output = run_merged(kind, "install", *settings, "--root", root)

    assert code == limits.EXIT_OK, output
    assert f"wrote {root}/" in output
    assert "not run: /" in output
    code, output = run_merged(kind, "uninstall", "--root", root)
    assert code == limits.EXIT_OK, output
    assert not [path for path in Path(root).rglob("*lockstep*") if path.is_file()]
    assert run_merged(kind, "uninstall", "--root", root)[1] == "There was nothing to do.\n"


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_render_prints_every_job_file_with_its_path(tmp_path: Path, kind: str) -> None:
    """The files of any host are printed on any machine."""
    file = str(inventories.write_inventory(tmp_path))

    code, output = run_merged(kind, "render", "--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_OK, output
    folder = DAEMONS if kind == "launchd" else UNITS
    assert output.count(f"==> /{folder}/") == 4


def test_install_without_root_rights_prints_sudo_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without root rights, or on another system, nothing is written."""
    file = str(inventories.write_inventory(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    words = ["launchd", "install", "--inventory", file, "--host", "studio-2"]
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])

    code, output = run_merged(*words)

    assert code == limits.EXIT_CONFIG
    assert output.startswith("lockstep: This command needs root rights: run `sudo /")
    assert output.endswith(f"/lockstep {' '.join(words)}`.\n")
    code, output = run_merged("systemd", "install", *words[2:])
    assert code == limits.EXIT_USAGE
    assert "has no systemd: use `lockstep launchd install`" in output


def test_install_is_refused_when_environment_contains_api_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCKSTEP_API_KEYS is refused before any file is read or written."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", "ann=" + "x" * 40)
    file = str(inventories.write_inventory(tmp_path))

    code, output = run_merged("launchd", "render", "--inventory", file, "--host", "studio-1")

    assert code == limits.EXIT_CONFIG
    assert "gateway.api_keys_file" in output
    assert "xxxx" not in output
