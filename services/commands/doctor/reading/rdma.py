"""RDMA over Thunderbolt: `rdma_ctl status`, `ibv_devices` and `ibv_devinfo`."""

import re
from typing import Literal

_DEVICE = re.compile(r"^\s*([A-Za-z][\w.-]*)\s+[0-9a-fA-F:]{16,}\s*$", re.MULTILINE)


def read_switch(text: str) -> Literal["enabled", "disabled"] | None:
    """Return what `rdma_ctl status` says; None: something else."""
    words = re.findall(r"[a-z]+", text.lower())
    if "disabled" in words:
        return "disabled"
    return "enabled" if "enabled" in words else None


def read_devices(text: str) -> list[str]:
    """Return the devices that `ibv_devices` lists."""
    return _DEVICE.findall(text)


def read_states(text: str) -> dict[str, str]:
    """Return device -> state of its port, such as PORT_ACTIVE, from `ibv_devinfo`."""
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
