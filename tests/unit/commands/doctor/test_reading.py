"""Parsers of command outputs, for complete and damaged texts."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.commands.doctor.checks.jobs import read_job_command
from services.commands.doctor.reading import linux, macos, thunderbolt
from services.commands.doctor.reading.thunderbolt import read_hardware_ports, read_thunderbolt
from services.commands.doctor.remote import read_answer
from services.commands.doctor.system_commands import CommandOutcome
from tests.support.effort import cases
from tests.unit.commands.doctor import recorded

READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "hardware ports": (read_hardware_ports, recorded.HARDWARE_PORTS),
    "thunderbolt": (lambda text: read_thunderbolt(text, {}), recorded.PROFILER),
    "rdma switch": (thunderbolt.read_switch, "enabled\n"),
    "rdma devices": (thunderbolt.read_devices, recorded.IBV_DEVICES),
    "rdma states": (thunderbolt.read_states, recorded.IBV_DEVINFO),
    "interfaces": (macos.read_interfaces, recorded.IFCONFIG + recorded.BRIDGE),
    "vm_stat": (macos.read_wired, recorded.VM_STAT),
    "memory_pressure": (macos.read_free_share, recorded.MEMORY_PRESSURE),
    "sysctl": (macos.read_number, "549755813888\n"),
    "pmset": (macos.read_power, recorded.PMSET),
    "nvidia-smi": (linux.read_gpus, recorded.NVIDIA),
    "lsof": (macos.read_lsof, recorded.LSOF),
    "ss": (linux.read_ss, recorded.SS),
    "sw_vers": (macos.read_sw_vers, recorded.SW_VERS),
    "another host": (
        lambda text: read_answer(CommandOutcome(text)),
        '{"hosts": [], "findings": []}',
    ),
    "job": (lambda text: read_job_command(text.encode()), "<plist><dict></dict></plist>"),
}


@pytest.mark.parametrize("name", list(READERS))
@settings(max_examples=cases(12, 60))
@given(text=st.text(max_size=400), data=st.data())
def test_doctor_parser_raises_no_error_for_any_output(
    name: str, text: str, data: st.DataObject
) -> None:
    """Any text, and a real output with a part removed or inserted, gives facts or None."""
    read, real = READERS[name]
    start = data.draw(st.integers(0, len(real)))
    stop = data.draw(st.integers(start, len(real)))

    read(text)
    read(real[:start] + real[stop:])
    read(real[:start] + text + real[start:])


def test_doctor_reads_speed_interface_and_peer_of_thunderbolt_ports() -> None:
    """A cabled port names the other end; an empty one has its highest speed."""
    interfaces = read_hardware_ports(recorded.HARDWARE_PORTS)

    ports = read_thunderbolt(recorded.PROFILER, interfaces)

    assert ports is not None
    empty, cabled = ports
    assert (empty.receptacle, empty.interface, empty.connected) == ("1", "en2", False)
    assert (empty.speed_gbps, empty.peer_uuid) == (120, "")
    assert (cabled.uuid, cabled.peer_uuid) == (recorded.A2, recorded.B1)
    assert (cabled.speed_gbps, cabled.interface, cabled.peer_name) == (80, "en5", "Mac Studio B")


def test_doctor_does_not_take_thunderbolt_dock_for_another_mac() -> None:
    """A connected device without a domain is no other host."""
    text = recorded.profiler(("3", recorded.A2, "40 Gb/s", "", ""))
    dock = text.replace("no_devices_connected", "connected")

    ports = read_thunderbolt(dock, {})

    assert ports is not None
    assert (ports[0].connected, ports[0].peer_uuid) == (True, "")


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"SPThunderboltDataType": 5}'])
def test_doctor_parser_returns_none_for_malformed_thunderbolt_profile(text: str) -> None:
    """A failed command differs from a Mac without ports."""
    assert read_thunderbolt(text, {}) is None


def test_doctor_parser_returns_none_for_deeply_nested_json() -> None:
    """Nesting deeper than the recursion limit raises no error."""
    assert read_thunderbolt("[" * 200_000, {}) is None


def test_doctor_reads_rdma_switch_devices_and_port_states() -> None:
    """The parsers return the switch, the devices and the state of each port."""
    assert thunderbolt.read_switch("RDMA is disabled.\n") == "disabled"
    assert thunderbolt.read_switch("enabled\n") == "enabled"
    assert thunderbolt.read_switch("rdma_ctl: command not found") is None
    assert thunderbolt.read_devices(recorded.IBV_DEVICES) == ["rdma_en2", "rdma_en5"]
    assert thunderbolt.read_devices(recorded.IBV_DEVICES_NONE) == []
    assert thunderbolt.read_states(recorded.IBV_DEVINFO) == {
        "rdma_en2": "PORT_DOWN",
        "rdma_en5": "PORT_ACTIVE",
    }


def test_doctor_reads_addresses_and_bridge_members_of_interfaces() -> None:
    """The parser returns IPv4 addresses, members of bridges, and whether an interface is up."""
    found = macos.read_interfaces(recorded.IFCONFIG + recorded.BRIDGE)

    assert found["en5"].addresses == ("169.254.10.1",)
    assert found["en2"].addresses == ()
    assert found["bridge0"].members == ("en2", "en5")
    assert found["bridge0"].up


def test_doctor_reads_memory_figures_of_macos_in_bytes() -> None:
    """Wired bytes are pages times their size, which is 16 KiB on Apple silicon."""
    assert macos.read_wired(recorded.VM_STAT) == 390_625 * 16_384
    assert macos.read_free_share(recorded.MEMORY_PRESSURE) == 0.93
    assert macos.read_number("0\n") == 0
    assert macos.read_number("sysctl: unknown oid") is None


def test_doctor_reads_power_settings_that_pmset_prints_with_remarks() -> None:
    """pmset prints a remark behind some numbers."""
    found = macos.read_power(recorded.PMSET)

    assert (found["sleep"], found["displaysleep"], found["autorestart"]) == (0, 10, 1)


def test_doctor_reads_command_and_process_id_of_port_holders() -> None:
    """lsof and ss give command name and process id."""
    assert macos.read_lsof(recorded.LSOF) == [("python3.12", 4711), ("node", 4800)]
    assert linux.read_ss(recorded.SS) == [("python3", 4711), ("python3", 4712)]


def test_doctor_omits_gpus_whose_memory_is_not_reported() -> None:
    """A GPU whose memory nvidia-smi does not report is left out."""
    text = recorded.NVIDIA + "NVIDIA T4, 570.86.15, [N/A], [N/A]\n"

    assert [(gpu.name, gpu.total) for gpu in linux.read_gpus(text)] == [
        ("NVIDIA H200", 143_771 * 2**20)
    ] * 2


def test_doctor_reads_program_and_command_from_job_files() -> None:
    """A LaunchDaemon is a plist; a unit has ExecStart."""
    plist = (
        b'<?xml version="1.0"?>\n<plist version="1.0"><dict><key>ProgramArguments</key><array>'
        b"<string>/opt/lockstep/bin/lockstep</string><string>gateway</string></array></dict>"
        b"</plist>"
    )

    assert read_job_command(plist) == ("/opt/lockstep/bin/lockstep", "gateway")
    assert read_job_command(b"[Service]\nExecStart=/srv/bin/lockstep gateway\n") == (
        "/srv/bin/lockstep",
        "gateway",
    )
    assert read_job_command(b"<plist><dict>") == ("", "")
