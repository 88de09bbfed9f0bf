"""Parsers of Thunderbolt and RDMA output: `system_profiler -json`, `ibv_devices`, `rdma_ctl`. Pure.

The keys of system_profiler are those that `mlx.distributed_config` reads.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from services.commands.doctor.facts import ThunderboltPort

_DEVICE = re.compile(r"^\s*([A-Za-z][\w.-]*)\s+[0-9a-fA-F:]{16,}\s*$", re.MULTILINE)
_SPEED = re.compile(r"(\d{1,4})\s*Gb/s")


def read_hardware_ports(text: str) -> dict[str, str]:
    """Parse the output of `networksetup -listallhardwareports`.

    Returns:
        Name of the hardware port, such as "Thunderbolt 1" -> its network interface, such as "en5".
    """
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            name = value.strip()
        elif key.strip() == "Device" and name:
            found[name] = value.strip()
            name = ""
    return found


def read_thunderbolt(text: str, interfaces: Mapping[str, str]) -> list[ThunderboltPort] | None:
    """Return this host's Thunderbolt ports, in order of their numbers.

    Args:
        text: output of system_profiler.
        interfaces: from `read_hardware_ports`.

    Returns:
        The ports; None if the output is malformed.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return None
    buses = tree.get("SPThunderboltDataType") if isinstance(tree, dict) else None
    if not isinstance(buses, list):
        return None
    ports = [port for bus in buses if isinstance(bus, dict) for port in _ports(bus, interfaces)]
    return sorted(ports, key=lambda port: (len(port.receptacle), port.receptacle))


def _ports(bus: dict[str, Any], interfaces: Mapping[str, str]) -> list[ThunderboltPort]:
    uuid = _word(bus, "domain_uuid_key")
    tag = bus.get("receptacle_1_tag")
    if not uuid or not isinstance(tag, dict):
        return []
    receptacle = _word(tag, "receptacle_id_key")
    items = bus.get("_items")
    peers = [
        item
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, dict) and _word(item, "domain_uuid_key")
    ]
    peer = peers[0] if peers else {}
    speed = _SPEED.search(_word(tag, "current_speed_key"))
    status = _word(tag, "receptacle_status_key")
    return [
        ThunderboltPort(
            receptacle=receptacle,
            uuid=uuid,
            speed_gbps=int(speed[1]) if speed else 0,
            connected=bool(peers) or (bool(status) and "no_devices" not in status),
            peer_uuid=_word(peer, "domain_uuid_key"),
            peer_name=_word(peer, "_name") or _word(peer, "device_name_key"),
            interface=interfaces.get(f"Thunderbolt {receptacle}", ""),
        )
    ]


def _word(tree: Mapping[str, Any], key: str) -> str:
    value = tree.get(key)
    return value if isinstance(value, str) else ""


def read_switch(text: str) -> Literal["enabled", "disabled"] | None:
    """Return whether RDMA is switched on, as `rdma_ctl status` prints it; None: not found."""
    words = re.findall(r"[a-z]+", text.lower())
    if "disabled" in words:
        return "disabled"
    return "enabled" if "enabled" in words else None


def read_devices(text: str) -> list[str]:
    """Return the names of the RDMA devices in the output of `ibv_devices`."""
    return _DEVICE.findall(text)


def read_states(text: str) -> dict[str, str]:
    """Parse the output of `ibv_devinfo`: device -> state of its first port, such as PORT_ACTIVE."""
    found: dict[str, str] = {}
    device = ""
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        words = value.split()
        if key == "hca_id" and words:
            device = words[0]
        elif key == "state" and device and words:
            found.setdefault(device, words[0])
    return found
