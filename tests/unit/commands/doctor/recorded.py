"""Recorded outputs of macOS and Linux commands: a healthy Mac of two, and variants with faults."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.commands.doctor.system_commands import CommandOutcome

A1, A2 = "AD089FC0-E653-4FFE-B00A-DFF110B2F9A1", "200E23D3-C921-44E0-95F7-55144AC251CC"
B1, B2 = "28CA4C30-A263-4C55-B302-953416D0B209", "88F10ACA-5CAA-4F5D-8361-03EED54ACB5A"

SW_VERS = "ProductName:\t\tmacOS\nProductVersion:\t\t26.4.1\nBuildVersion:\t\t25E253\n"

IBV_DEVICES = """    device                 node GUID
    ------              ----------------
    rdma_en2            ef3a5e1f9cf9a705
    rdma_en5            6a5d1d0d77e3b105
"""

IBV_DEVICES_NONE = """    device                 node GUID
    ------              ----------------
"""

IBV_DEVINFO = """hca_id:\trdma_en2
\ttransport:\t\t\tThunderbolt (5)
\tfw_ver:\t\t\t\t1.0.0
\tnode_guid:\t\t\tef3a:5e1f:9cf9:a705
\tvendor_id:\t\t\t0x05ac
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tlink_layer:\t\tThunderbolt

hca_id:\trdma_en5
\ttransport:\t\t\tThunderbolt (5)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tlink_layer:\t\tThunderbolt
"""

HARDWARE_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 9c:76:0e:39:aa:01

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 36:7c:94:cd:45:c0

Hardware Port: Thunderbolt 3
Device: en5
Ethernet Address: 36:7c:94:cd:45:c4

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:7c:94:cd:45:c0

VLAN Configurations
===================
"""

IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 9c:76:0e:39:aa:01
\tinet 10.0.0.11 netmask 0xffffff00 broadcast 10.0.0.255
\tmedia: autoselect (10Gbase-T <full-duplex>)
\tstatus: active
en2: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tstatus: inactive
en5: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=460<TSO4,TSO6,CHANNEL_IO>
\tether 36:7c:94:cd:45:c4
\tinet6 fe80::347c:94ff:fecd:45c4%en5 prefixlen 64 scopeid 0xc
\tinet 169.254.10.1 netmask 0xffff0000 broadcast 169.254.255.255
\tmedia: autoselect <full-duplex>
\tstatus: active
"""

BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 36:7c:94:cd:45:c0
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\t\troot id 0:0:0:0:0:0 priority 0 ifcost 0 port 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 9 priority 0 path cost 0
\tmember: en5 flags=3<LEARNING,DISCOVER>
\tmedia: <unknown type>
\tstatus: active
"""

PMSET = """System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 autorestart          1
 womp                 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            0
 sleep                0 (sleep prevented by powerd, sharingd)
 hibernatemode        0
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         0
"""

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                             24871391.
Pages active:                            3100422.
Pages inactive:                          2937105.
Pages speculative:                        160334.
Pages throttled:                               0.
Pages wired down:                         390625.
Pages purgeable:                           30312.
"Translation faults":                  178236487.
"""

MEMORY_PRESSURE = """The system has 549755813888 (33554432 pages with a page size of 16384).
System-wide memory free percentage: 93%
"""

LSOF = "p4711\ncpython3.12\np4800\ncnode\n"
SS = (
    "LISTEN 0      4096       127.0.0.1:8080       0.0.0.0:*    "
    'users:(("python3",pid=4711,fd=9),("python3",pid=4712,fd=9))\n'
)
NVIDIA = "NVIDIA H200, 570.86.15, 143771, 4\nNVIDIA H200, 570.86.15, 143771, 120333\n"


def profiler(*ports: tuple[str, str, str, str, str]) -> str:
    """Return the output of `system_profiler SPThunderboltDataType -json`.

    Args:
        ports: receptacle, domain, speed, domain at the other end or "", and its name, per port.
    """
    return json.dumps({"SPThunderboltDataType": [_bus(*port) for port in ports]}, indent=2)


def _bus(receptacle: str, uuid: str, speed: str, peer: str, name: str) -> dict[str, Any]:
    status = "connected" if peer else "no_devices_connected"
    bus: dict[str, Any] = {
        "_name": f"thunderboltusb4_bus_{receptacle}",
        "device_name_key": "Mac Studio",
        "domain_uuid_key": uuid,
        "receptacle_1_tag": {
            "current_speed_key": speed,
            "link_status_key": "0x2" if peer else "0x100",
            "micro_version_key": "0.0.0",
            "receptacle_id_key": receptacle,
            "receptacle_status_key": f"receptacle_{status}",
        },
        "route_string_key": "0",
        "switch_uid_key": "0x05ACBE5E06781982",
        "vendor_name_key": "Apple Inc.",
    }
    if peer:
        bus["_items"] = [
            {
                "_name": name,
                "device_id_key": "0xA",
                "device_name_key": "Mac16,9",
                "domain_uuid_key": peer,
                "vendor_id_key": "0x0A27",
            }
        ]
    return bus


PROFILER = profiler(("1", A1, "Up to 120 Gb/s", "", ""), ("3", A2, "80 Gb/s", B1, "Mac Studio B"))

HEALTHY: Mapping[str, str] = {
    "sw_vers": SW_VERS,
    "machdep.cpu.brand_string": "Apple M3 Ultra\n",
    "hw.memsize": "549755813888\n",
    "iogpu.wired_limit_mb": "0\n",
    "pmset": PMSET,
    "vm_stat": VM_STAT,
    "memory_pressure": MEMORY_PRESSURE,
    "networksetup": HARDWARE_PORTS,
    "system_profiler": PROFILER,
    "rdma_ctl": "enabled\n",
    "ibv_devices": IBV_DEVICES,
    "ibv_devinfo": IBV_DEVINFO,
    "ifconfig": IFCONFIG,
    "-c": '{"right": true, "device": "Device(gpu, 0)", "has": {"ring": true, "jaccl": true}}\n',
}
"""Word of a command -> its output."""


def succeeded(text: str) -> CommandOutcome:
    """Return the outcome of a command that printed `text` and succeeded."""
    return CommandOutcome(text)


def not_installed(name: str) -> CommandOutcome:
    """Return the outcome of a command that is not installed."""
    return CommandOutcome(problem=f"{name} is not on this machine")


def mac_runner(
    changed: Mapping[str, str | CommandOutcome] | None = None,
) -> Callable[[Sequence[str], float], CommandOutcome]:
    """Return a runner of commands that answers as a healthy Mac does, except for `changed`."""
    answers: dict[str, str | CommandOutcome] = {**HEALTHY, **(changed or {})}

    def run(command: Sequence[str], deadline_s: float) -> CommandOutcome:
        assert deadline_s > 0
        for words in (command[-1:], command[:1], command[1:2]):
            for word in words:
                said = answers.get(word.rpartition("/")[2])
                if said is not None:
                    return said if isinstance(said, CommandOutcome) else CommandOutcome(said)
        return not_installed(command[0])

    return run
