"""Checks of one host: every fault has a finding with a remedy, and a healthy Mac has none."""

import json
import os
import plistlib
import socket
from pathlib import Path

import pytest

from services.commands.doctor.checks import files, jobs, ports, rdma
from services.commands.doctor.checks.environment import check_variables, watched_variables
from services.commands.doctor.examiner import Examiner, _running
from services.commands.doctor.facts import Finding, Findings, HostReport
from services.commands.doctor.system_commands import CommandOutcome
from shared.configuration.device_matrix import DeviceUse
from shared.configuration.host_share import HostShare, single_host_share
from shared.configuration.loading import config_from_tree, load_config
from shared.os.process_file import RoleProcess
from tests.unit.commands.doctor import recorded

JACCL = {
    "world": {
        "size": 2,
        "backend": "jaccl",
        "jaccl_devices": "devices.json",
        "jaccl_coordinator": "10.0.0.1:7620",
    }
}


PAIR = [[None, "rdma_en5"], ["rdma_en4", None]]


def _share(tmp_path: Path, **sections: object) -> HostShare:
    paths = {"run_dir": str(tmp_path / "run"), "keys_dir": str(tmp_path / "keys")}
    return single_host_share(config_from_tree({"paths": paths, **sections}))


def _examine_mac(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: dict[str, str | CommandOutcome] | None = None,
    devices: list[list[str | None]] | None = None,
) -> HostReport:
    """Examine a Mac that answers as a healthy one does, except for `changed`.

    Its matrix of RDMA devices is PAIR, or `devices`.
    """
    monkeypatch.setattr("services.commands.doctor.examiner.sys.platform", "darwin")
    monkeypatch.chdir(tmp_path)
    Path(str(JACCL["world"]["jaccl_devices"])).write_text(json.dumps(devices or PAIR))
    share = _share(tmp_path, **JACCL)
    return Examiner(share, "studio-a", {}, recorded.mac_runner(changed)).examine()


def _only_finding(report: HostReport, name: str) -> Finding:
    """Return the one finding of a check."""
    found = [one for one in report.findings if one.check == name]
    assert len(found) == 1, found
    return found[0]


def test_doctor_reports_only_ok_for_healthy_mac(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All findings of a healthy Mac are OK, and the facts for other hosts are complete."""
    report = _examine_mac(monkeypatch, tmp_path)

    faults = [
        one for one in report.findings if one.verdict != "OK" and not one.check.startswith("port ")
    ]
    assert faults == []
    assert report.facts.system == "26.4.1 (25E253)"
    assert report.facts.chip == "Apple M3 Ultra"
    assert report.facts.rdma_devices == ["rdma_en2", "rdma_en5"]
    assert [port.interface for port in report.facts.ports] == ["en2", "en5"]


TB4 = recorded.profiler(
    ("1", recorded.A1, "Up to 40 Gb/s", "", ""), ("3", recorded.A2, "40 Gb/s", recorded.B1, "B")
)
NO_DEVICES: dict[str, str | CommandOutcome] = {"ibv_devices": recorded.IBV_DEVICES_NONE}

FAULTS: list[tuple[dict[str, str | CommandOutcome], str, str, str, str]] = [
    ({**NO_DEVICES, "rdma_ctl": "disabled\n"}, "rdma", "FAIL", "switched off", "rdma_ctl enable"),
    (NO_DEVICES, "rdma", "FAIL", "no devices", "cables in"),
    (
        {**NO_DEVICES, "sw_vers": recorded.SW_VERS.replace("26.4.1", "26.1")},
        "rdma", "FAIL", "macOS 26.1 (25E253) has no RDMA", "update to macOS 26.2",
    ),
    ({**NO_DEVICES, "system_profiler": TB4}, "rdma", "FAIL", "Thunderbolt 4", '"ring"'),
    (
        {name: recorded.not_installed(name) for name in ("ibv_devices", "rdma_ctl")},
        "rdma", "CANNOT CHECK", "rdma_ctl is not on this machine", "by hand",
    ),
    ({"system_profiler": TB4}, "link en5", "FAIL", "runs at 40 Gb/s", "Thunderbolt 5 cable"),
    (
        {"ibv_devinfo": recorded.IBV_DEVINFO.replace("PORT_ACTIVE (4)", "PORT_DOWN (1)")},
        "link en5", "FAIL", "its RDMA port is PORT_DOWN", "plug the cable again",
    ),
    (
        {"ifconfig": recorded.IFCONFIG.replace("\tinet 169", "\tinet6 169")},
        "link en5", "FAIL", "no IPv4 address", "sudo ifconfig en5 inet 169.254.10.1",
    ),
    (
        {"ifconfig": recorded.IFCONFIG + recorded.BRIDGE},
        "thunderbolt bridge", "FAIL", "bridge0 holds en2, en5", "sudo ifconfig bridge0 down",
    ),
    (
        {"pmset": recorded.PMSET.replace(" sleep                0", " sleep                15")},
        "sleep", "FAIL", "sleeps after 15 minutes", "pmset -a sleep 0",
    ),
    (
        {"pmset": CommandOutcome(code=1, errors="no")},
        "sleep", "CANNOT CHECK", "exit code 1 (no)", "by hand",
    ),
    (
        {"pmset": recorded.PMSET.replace("autorestart          1", "autorestart          0")},
        "restart", "WARN", "power cut", "pmset -a autorestart 1",
    ),
    (
        {"vm_stat": recorded.VM_STAT.replace("390625", "12000000")},
        "wired memory", "WARN", "183.1 GiB are wired", "restart this Mac",
    ),
    (
        {"iogpu.wired_limit_mb": "524288\n"},
        "GPU memory", "WARN", "leaves macOS too little", "iogpu.wired_limit_mb=516096",
    ),
    (
        {"hw.memsize": "8388608\n", "iogpu.wired_limit_mb": "1\n"},
        "GPU memory", "FAIL", "the weights for this host take", "lockstep plan",
    ),
    (
        {"memory_pressure": recorded.MEMORY_PRESSURE.replace("93%", "7%")},
        "free memory", "WARN", "only 7%", "end programs",
    ),
    (
        {"machdep.cpu.brand_string": "Intel(R) Xeon(R)\n"},
        "chip", "FAIL", "not Apple silicon", "M chip",
    ),
    ({"system_profiler": "{"}, "thunderbolt", "CANNOT CHECK", "does not show it", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "name", "verdict", "cause", "remedy"),
    FAULTS,
    ids=[f"{number}-{case[1]}" for number, case in enumerate(FAULTS)],
)
def test_doctor_reports_each_fault_of_mac_with_cause_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: dict[str, str | CommandOutcome],
    name: str,
    verdict: str,
    cause: str,
    remedy: str,
) -> None:
    """One change to a healthy Mac gives a finding with its cause and remedy."""
    found = _only_finding(_examine_mac(monkeypatch, tmp_path, changed), name)

    assert found.verdict == verdict
    assert cause in found.detail
    assert remedy in found.remedy


def test_doctor_counts_queue_pairs_and_memory_regions_of_rdma_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The finding has what a world needs of a device and what the device has."""
    found = _only_finding(_examine_mac(monkeypatch, tmp_path), "rdma resources")

    assert (found.verdict, found.detail) == (
        "OK",
        "each of 2 devices needs 1 of 10 queue pairs and 64 of 100 memory regions",
    )


def test_doctor_fails_rdma_device_that_two_ranks_of_host_share() -> None:
    """Two ranks of one host on the same cable need more memory regions than its device has."""
    found = Findings("studio-a")
    uses = {("studio-a", "rdma_en5"): DeviceUse(2, 128), ("studio-b", "rdma_en4"): DeviceUse(1, 64)}
    rdma.check_device_uses(found, uses)
    (one,) = found.all

    assert one.verdict == "FAIL"
    assert "rdma_en5 of studio-a needs 2 of 10 queue pairs and 128 of 100" in one.detail
    assert "one rank per host" in one.remedy


def test_doctor_fails_matrix_with_one_rdma_device_for_two_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything starts the doctor names the device, the rank and both peers."""
    shared_device = [[None, "a", "a"], ["a", None, "b"], ["a", "b", None]]
    report = _examine_mac(monkeypatch, tmp_path, devices=shared_device)
    found = _only_finding(report, "rdma resources")

    assert found.verdict == "FAIL"
    assert "names a from rank 0 to rank 1 and to rank 2" in found.detail


def test_doctor_only_warns_of_missing_rdma_when_jaccl_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the ring backend, or one rank, missing RDMA is only a warning."""
    monkeypatch.setattr("services.commands.doctor.examiner.sys.platform", "darwin")
    changed: dict[str, str | CommandOutcome] = {**NO_DEVICES, "system_profiler": TB4}

    report = Examiner(_share(tmp_path), "a", {}, recorded.mac_runner(changed)).examine()

    assert {one.verdict for one in report.findings if "rdma" in one.check} == {"WARN"}


def test_doctor_reports_cannot_check_when_system_command_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Checks whose commands are missing are CANNOT CHECK; MLX fails."""
    monkeypatch.setattr("services.commands.doctor.examiner.sys.platform", "darwin")
    share = _share(tmp_path, **JACCL)

    report = Examiner(
        share, "a", {}, lambda command, _: recorded.not_installed(command[0])
    ).examine()

    by_check = {one.check: one.verdict for one in report.findings}
    for name in ("system", "chip", "sleep", "wired memory", "GPU memory", "free memory", "rdma"):
        assert by_check[name] == "CANNOT CHECK"
    assert by_check["MLX"] == "FAIL"


def test_doctor_fails_port_held_by_another_process_and_names_it(tmp_path: Path) -> None:
    """A port of another process fails with its name; a port that this Lockstep holds is OK."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = [ports.ListenAddress("gateway", "gateway.port", "127.0.0.1", port)]
        found = Findings("a")

        ports.check_ports(found, place, lambda _: [("node", 4711)], [])
        ports.check_ports(found, place, lambda _: [("lockstep", 5)], [RoleProcess("gateway", 5)])

    assert [one.verdict for one in found.all] == ["FAIL", "OK"]
    assert "node (process 4711) holds the port" in found.all[0].detail
    assert "gateway.port" in found.all[0].remedy


def test_doctor_fails_listen_address_that_belongs_to_another_host() -> None:
    """The finding names the address, so that it is not taken for a held port."""
    found = Findings("a")
    place = ports.ListenAddress("scheduler for ranks", "scheduler.rank_address", "192.0.2.1", 7611)

    ports.check_ports(found, [place], lambda _: [], [])

    assert found.all[0].verdict == "FAIL"
    assert "192.0.2.1 is not an address of this host" in found.all[0].detail


def test_doctor_checks_tcp_listen_addresses_and_no_unix_sockets(tmp_path: Path) -> None:
    """Every TCP listen address is checked; Unix sockets in the run folder are not."""
    share = _share(
        tmp_path,
        gateway={"port": 8123},
        scheduler={"rank_address": "tcp://127.0.0.1:7611"},
    )

    assert [(one.setting, one.port) for one in ports.listen_addresses(share)] == [
        ("gateway.port", 8123),
        ("scheduler.rank_address", 7611),
    ]


def test_doctor_fails_missing_keys_only_when_links_use_tcp(tmp_path: Path) -> None:
    """Missing keys fail with TCP links, and the remedy is the command that makes a key pair."""
    found = Findings("a")

    files.check_keys(found, tmp_path / "none", needed=False)
    files.check_keys(found, tmp_path / "none", needed=True)

    files.check_keys(found, tmp_path / "none", needed=True, flags=" --inventory c --host a")

    assert [one.verdict for one in found.all] == ["OK", "FAIL", "FAIL"]
    assert found.all[1].remedy == "`lockstep keys new`"
    assert found.all[2].remedy == "`lockstep keys new --inventory c --host a`"


def test_doctor_fails_keys_folder_that_other_users_can_enter(tmp_path: Path) -> None:
    """A keys folder that others can enter fails, and the remedy is the command that closes it."""
    from services.commands.keys import host_keys

    folder = tmp_path / "keys"
    host_keys.new(folder)
    healthy = Findings("a")
    public, allowed = files.check_keys(healthy, folder, needed=True)
    assert healthy.all[0].verdict == "OK"
    assert public in allowed

    folder.chmod(0o755)
    found = Findings("a")
    files.check_keys(found, folder, needed=True)

    assert found.all[0].verdict == "FAIL"
    assert "chmod 700" in found.all[0].remedy


def test_doctor_fails_damaged_or_missing_model_folder(tmp_path: Path) -> None:
    """A damaged or missing folder fails; an id that is not downloaded is CANNOT CHECK."""
    found = Findings("a")
    for path in ("demo", str(tmp_path), "some/model", "/nowhere/at/all"):
        files.check_model(found, load_config(None, {"model.path": path}))

    assert [one.verdict for one in found.all] == ["OK", "FAIL", "CANNOT CHECK", "FAIL"]
    assert "hf download some/model" in found.all[2].remedy


def test_doctor_warns_when_disk_is_smaller_than_cache_store_limit(tmp_path: Path) -> None:
    """A disk with less room than the limit of the cache store gives a warning with the setting."""

    def config(size: int) -> object:
        return {"cache.directory": str(tmp_path / "not-yet"), "cache.ssd_bytes_max": size}

    found = Findings("a")
    files.check_disk(found, load_config(None, config(1)))  # type: ignore[arg-type]
    files.check_disk(found, load_config(None, config(2**59)))  # type: ignore[arg-type]

    assert [one.verdict for one in found.all] == ["OK", "WARN"]
    assert "cache.ssd_bytes_max" in found.all[1].remedy
    assert not (tmp_path / "not-yet").exists()


def test_doctor_warns_of_installed_job_that_runs_another_installation(tmp_path: Path) -> None:
    """A job of a missing program fails; one of another installation is a warning."""
    here, other = tmp_path / "lockstep", tmp_path / "old"
    for program in (here, other):
        program.touch()
    for name, program in (("a", here), ("b", other), ("c", tmp_path / "gone")):
        (tmp_path / f"lockstep-{name}.service").write_text(f"ExecStart={program} gateway\n")
    found = Findings("a")

    jobs.check_jobs(found, jobs.installed_job_files([tmp_path]), str(here))

    assert [one.verdict for one in found.all] == ["OK", "WARN", "FAIL"]
    assert found.all[1].remedy == f"`sudo {here} systemd install` again"


def test_doctor_remedy_for_supervised_job_is_complete_install_command(tmp_path: Path) -> None:
    """The command keeps `--supervised`, the inventory and the host."""
    unit, plist = tmp_path / "lockstep.service", tmp_path / "org.lockstep.plist"
    unit.write_text('[Service]\nExecStart="/gone/lockstep" "up" --inventory /c\n')
    words = {"ProgramArguments": ["/gone/lockstep", "up"]}
    plist.write_bytes(plistlib.dumps(words))
    found = Findings("a")

    jobs.check_jobs(found, [unit, plist], "/opt/lockstep", " --inventory /c --host a")

    assert [one.remedy for one in found.all] == [
        "`sudo /opt/lockstep systemd install --supervised --inventory /c --host a` again",
        "`sudo /opt/lockstep launchd install --supervised --inventory /c --host a` again",
    ]


def test_doctor_finds_no_processes_when_run_folder_is_unreadable(tmp_path: Path) -> None:
    """A run folder that this user may not enter is no error."""
    outer = tmp_path / "outer"
    outer.mkdir(mode=0o000)
    share, user = _share(outer), os.geteuid()

    # Root may enter every folder, so root becomes another user for this check.
    os.seteuid(user or 65_534)
    try:
        with pytest.raises(PermissionError):
            share.config.run_dir.stat()
        assert _running(share) == []
    finally:
        os.seteuid(user)
        outer.chmod(0o700)


def test_doctor_reports_api_key_variables_only_as_digest() -> None:
    """Watched variables are reported for comparison, but API keys only as a digest."""
    variables = {"MLX_METAL_FAST_SYNCH": "1", "LOCKSTEP_API_KEYS": "me=s3cret", "HOME": "/x"}
    found = watched_variables(variables)

    assert set(found) == {"MLX_METAL_FAST_SYNCH", "LOCKSTEP_API_KEYS"}
    assert "s3cret" not in str(found)
    complaints = Findings("a")
    check_variables(complaints, found)
    assert complaints.all[0].verdict == "WARN"
    assert "unset MLX_METAL_FAST_SYNCH" in complaints.all[0].remedy


def test_doctor_writes_no_file_while_it_examines_host(tmp_path: Path) -> None:
    """The examination of a host creates no folder, file or lock."""
    share = _share(tmp_path)

    Examiner(
        share, "a", dict(os.environ), lambda command, _: recorded.not_installed(command[0])
    ).examine()

    assert list(tmp_path.iterdir()) == []
