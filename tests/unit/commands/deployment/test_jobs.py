"""Contents of LaunchDaemons and systemd units."""

import plistlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.commands.deployment import installation, jobs, launchd, systemd
from services.commands.deployment.jobs import Job
from services.supervisor.supervisor import END_DEADLINE_S
from shared import limits
from shared.configuration import host_selection
from shared.errors import ConfigError, UsageError
from tests.unit.commands.deployment import inventories

EXECUTABLE = "/opt/lockstep/.venv/bin/lockstep"
SETTINGS = ["--inventory", "/opt/lockstep/cluster.toml", "--host"]
DRAIN_S = 30.0


def _jobs(
    folder: Path,
    host: str = "studio-1",
    *,
    supervised: bool = False,
    variables: Mapping[str, str] | None = None,
    text: str = inventories.TWO_HOSTS,
) -> dict[str, Job]:
    file = str(inventories.write_inventory(folder, text))
    share = host_selection.select_share(file, None, {"gateway.host": host}, {})
    where = installation.find_installation(share, None, file)
    installation.check_installation(where, share)
    made = jobs.make_host_jobs(share, where, variables or {}, supervised=supervised)
    return {job.name: job for job in made}


def test_every_role_of_host_becomes_a_launchd_job(tmp_path: Path) -> None:
    """A job runs the console script with role, inventory and host name."""
    first, second = _jobs(tmp_path, "studio-1"), _jobs(tmp_path, "studio-2")

    assert {name: list(job.command) for name, job in first.items()} == {
        "scheduler": [EXECUTABLE, "scheduler", *SETTINGS, "studio-1"],
        "store": [EXECUTABLE, "cache-store", *SETTINGS, "studio-1"],
        "rank-0": [EXECUTABLE, "rank-worker", "--rank", "0", *SETTINGS, "studio-1"],
        "gateway": [EXECUTABLE, "gateway", *SETTINGS, "studio-1"],
    }
    assert list(second) == ["store", "rank-1"]
    assert {job.place.user for job in first.values()} == {"ann"}
    assert {job.place.user for job in second.values()} == {"bob"}


def test_supervised_job_runs_lockstep_up_with_time_to_drain(tmp_path: Path) -> None:
    """The job runs `lockstep up`, with time for two drains and the end of the ranks."""
    found = _jobs(tmp_path, supervised=True)

    assert list(found) == ["lockstep"]
    assert list(found["lockstep"].command) == [EXECUTABLE, "up", *SETTINGS, "studio-1"]
    assert found["lockstep"].end_s > 2 * (DRAIN_S + END_DEADLINE_S) + 2 * END_DEADLINE_S


def test_launch_daemon_starts_at_boot_restarts_and_has_time_to_drain(tmp_path: Path) -> None:
    """A LaunchDaemon starts before login, is kept running, and may drain before SIGKILL."""
    found = {
        name: plistlib.loads(launchd.render(job).encode()) for name, job in _jobs(tmp_path).items()
    }

    assert found["gateway"] == {
        "Label": "org.lockstep.gateway",
        "ProgramArguments": [EXECUTABLE, "gateway", *SETTINGS, "studio-1"],
        "UserName": "ann",
        "WorkingDirectory": "/opt/lockstep",
        "EnvironmentVariables": {
            "PYTHONUNBUFFERED": "1",
            "LOCKSTEP_LOG_DIRECTORY": "/var/log/lockstep",
        },
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 5,
        "ExitTimeOut": 45,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": 65_536},
        "HardResourceLimits": {"NumberOfFiles": 65_536},
        "Umask": 0o077,
        "StandardOutPath": "/var/log/lockstep/gateway.log",
        "StandardErrorPath": "/var/log/lockstep/gateway.log",
    }
    assert found["scheduler"]["ExitTimeOut"] > DRAIN_S
    # The next epoch waits for a rank that has ended with the last one.
    assert found["rank-0"]["ThrottleInterval"] == 1
    assert len({one["Label"] for one in found.values()}) == len(found)


def test_plist_keeps_spaces_quotes_and_special_characters_in_paths_and_values(
    tmp_path: Path,
) -> None:
    """Spaces, quotes, ampersands and angle brackets in paths and values are unchanged."""
    strange = '/opt/lock & "step"/<100%>\'s'
    text = inventories.TWO_HOSTS.replace("/opt/lockstep/.venv/bin", strange.replace('"', '\\"'))
    job = _jobs(tmp_path, variables={"HF_HOME": strange}, text=text)["gateway"]

    found = plistlib.loads(launchd.render(job).encode())

    assert found["ProgramArguments"][0] == f"{strange}/lockstep"
    assert found["EnvironmentVariables"]["HF_HOME"] == strange


def _unit(job: Job) -> list[str]:
    return systemd.render(job).splitlines()


def test_systemd_unit_has_time_to_drain_and_no_restart_after_configuration_error(
    tmp_path: Path,
) -> None:
    """A unit restarts except after configuration errors, and has time for a drain."""
    found = _jobs(tmp_path)
    gateway, rank = _unit(found["gateway"]), _unit(found["rank-0"])

    for line in (
        f"ExecStart={EXECUTABLE} gateway {' '.join(SETTINGS)} studio-1",
        "User=ann",
        "WorkingDirectory=/opt/lockstep",
        "Environment=PYTHONUNBUFFERED=1",
        "Restart=always",
        "StartLimitIntervalSec=0",
        f"RestartPreventExitStatus={limits.EXIT_USAGE} {limits.EXIT_CONFIG}",
        f"SuccessExitStatus={limits.EXIT_WORLD_LOST}",
        "TimeoutStopSec=45",
        "KillMode=mixed",
        "LimitNOFILE=65536",
        "WantedBy=multi-user.target",
    ):
        assert line in gateway, line
    # A unit that starts later ends earlier: the gateway stops accepting requests first.
    assert (
        "After=network-online.target lockstep-scheduler.service lockstep-store.service "
        "lockstep-rank-0.service" in gateway
    )
    assert "After=network-online.target lockstep-scheduler.service lockstep-store.service" in rank


def test_systemd_unit_quotes_spaces_percent_and_dollar_signs(tmp_path: Path) -> None:
    """Spaces, quotes, percent and dollar signs reach the process unchanged."""
    text = inventories.TWO_HOSTS.replace("/opt/lockstep/.venv/bin", '/opt/a b/100%/\\"$x')
    job = _jobs(tmp_path, variables={"HF_HOME": "/a b/$y/5%"}, text=text)["gateway"]
    unit = _unit(job)

    start = next(line for line in unit if line.startswith("ExecStart="))
    assert start.startswith('ExecStart="/opt/a b/100%%/\\"$$x/lockstep" gateway ')
    assert 'Environment="HF_HOME=/a b/$y/5%%"' in unit


@pytest.mark.parametrize("supervised", [False, True])
def test_systemd_units_are_accepted_by_systemd_analyze(tmp_path: Path, supervised: bool) -> None:
    """Units consist of sections and assignments; systemd-analyze, if present, finds no fault."""
    executable = tmp_path / "bin" / "lockstep"
    executable.parent.mkdir()
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    text = inventories.TWO_HOSTS.replace(EXECUTABLE, str(executable)).replace('"ann"', '"daemon"')
    units = tmp_path / "units"
    units.mkdir()
    for job in _jobs(tmp_path, supervised=supervised, text=text).values():
        text = systemd.render(job)
        (units / systemd.file_name(job)).write_text(text)
        sections = re.findall(r"^\[(\w+)\]$", text, re.MULTILINE)
        assert sections == ["Unit", "Service", "Install"]
        assert all(re.match(r"$|\[|[A-Z]\w+=.", line) for line in text.splitlines())
    if shutil.which("systemd-analyze") is None:
        return

    output = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(units.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )

    ours = [line for line in output.stderr.splitlines() if "lockstep" in line]
    assert (output.returncode, ours) == (0, []), output.stderr


def test_api_keys_are_refused_in_environment_of_jobs(tmp_path: Path) -> None:
    """Keys in the environment or with --env are refused, and the error says where they belong."""
    with pytest.raises(ConfigError, match=r"LOCKSTEP_API_KEYS is set: jobs hold no secrets"):
        installation.check_environment({"LOCKSTEP_API_KEYS": "ann=" + "x" * 40})
    with pytest.raises(ConfigError, match=r"write gateway.port into the file"):
        installation.check_environment({"LOCKSTEP_GATEWAY_PORT": "9"})
    for name in ("HF_TOKEN", "LOCKSTEP_API_KEYS", "aws_secret_access_key", "PASSWORD"):
        with pytest.raises(UsageError, match=f"--env {name}"):
            jobs.parse_variables([f"{name}=x"])
    for pair in ("NAME", "=x", "A B=x", "A=x\ny", "A=\x1b"):
        with pytest.raises(UsageError, match="--env needs NAME=VALUE"):
            jobs.parse_variables([pair])
    assert jobs.parse_variables(["HF_HOME=/m", "A="]) == {"HF_HOME": "/m", "A": ""}


@pytest.mark.parametrize("name", ["ann\nExecStartPre=/bin/id", "ann b", "%i", "", "ann\t", "-r"])
def test_user_name_that_would_change_a_job_file_is_refused(name: str) -> None:
    """A line end would begin a second line of a unit; the error quotes the name."""
    with pytest.raises(ConfigError, match="is not the name of a user"):
        installation.Installation("/bin/l", ("--config", "/l.toml"), "/", "/var/log", name)


@pytest.mark.parametrize("wrong", range(4))
def test_path_with_line_end_is_refused_for_a_job(wrong: int) -> None:
    """The program, its settings and both folders stand in lines of job files."""
    paths = ["/bin/l", "/l.toml", "/work", "/var/log"]
    paths[wrong] += "\nUser=root"
    executable, settings, work_dir, log_dir = paths
    with pytest.raises(ConfigError, match="line end or control character"):
        installation.Installation(executable, ("--config", settings), work_dir, log_dir, "ann")


def test_jobs_with_relative_or_missing_paths_are_refused(tmp_path: Path) -> None:
    """A relative path has no meaning at boot, and the state folder differs there."""
    with pytest.raises(ConfigError, match="needs an absolute path, but executable is ~/lockstep"):
        _jobs(tmp_path, text=inventories.TWO_HOSTS.replace(EXECUTABLE, "~/lockstep"))
    with pytest.raises(ConfigError, match=r"paths\.run_dir \(run_dir of the host\) is not set"):
        _jobs(tmp_path, text=inventories.TWO_HOSTS.replace('run_dir = "/opt/lockstep/run"', ""))
    share = host_selection.select_share(None, None, {}, {})
    with pytest.raises(UsageError, match="Settings are missing: give --config FILE"):
        installation.find_installation(share, None, None)


def test_jobs_without_inventory_run_all_roles_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --config all roles run on this machine, as the calling user but not as root."""
    file = tmp_path / "lockstep.toml"
    file.write_text("[paths]\nrun_dir = '/opt/lockstep/run'\n[world]\nsize = 2\n")
    share = host_selection.select_share(None, str(file), {}, {})
    monkeypatch.setenv("SUDO_USER", "ann")

    where = installation.find_installation(share, str(file), None)
    made = jobs.make_host_jobs(share, where, {}, supervised=False)

    assert where.user == "ann"
    assert [job.name for job in made] == ["scheduler", "store", "rank-0", "rank-1", "gateway"]
    assert made[-1].command[1:] == ("gateway", "--config", str(file))
    # Ranks start and end together.
    assert made[3].after == ("scheduler", "store")
    monkeypatch.setenv("SUDO_USER", "root")
    with pytest.raises(ConfigError, match="name the user that runs it with --user"):
        installation.find_installation(share, str(file), None)
    assert installation.find_installation(share, str(file), None, "root").user == "root"
