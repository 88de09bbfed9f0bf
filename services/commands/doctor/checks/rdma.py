"""Checks of RDMA over Thunderbolt on one Mac: whether it is enabled and JACCL can use it.

Sources of causes and remedies: Apple TN3205; MLX issues 3207, 3467 and 3777.
"""

from collections.abc import Mapping, Sequence

from services.commands.doctor.facts import Findings, ThunderboltPort
from services.commands.doctor.reading import thunderbolt
from services.commands.doctor.reading.macos import Interface, version_numbers
from services.commands.doctor.system_commands import CommandOutcome
from shared.configuration.device_matrix import DeviceUse

THUNDERBOLT_5_GBPS = 80
"""Speed of a Thunderbolt 5 link; only such links have RDMA."""
SYSTEM_MIN = (26, 2)
"""First version of macOS with RDMA over Thunderbolt."""

_ENABLE = (
    "shut down, start with the power button held until the startup options show, choose Options, "
    "open Utilities > Terminal, run `rdma_ctl enable`, and restart"
)


def check_rdma(
    found: Findings,
    system: str,
    switch: CommandOutcome,
    devices: CommandOutcome,
    ports: Sequence[ThunderboltPort],
    *,
    needed: bool,
) -> list[str]:
    """Check that there are RDMA devices; if not, find the cause.

    Args:
        found: collects one finding, with the cause that applies: old macOS, Thunderbolt 4, RDMA
            switched off, or no device although it is on.
        system: version of macOS.
        switch: outcome of `rdma_ctl status`.
        devices: outcome of `ibv_devices`.
        ports: this Mac's Thunderbolt ports.
        needed: whether jaccl is configured; otherwise no verdict is worse than WARN.

    Returns:
        Names of the devices, such as rdma_en5.
    """
    names = [one for one in thunderbolt.read_devices(devices.text) if one.startswith("rdma_")]
    complain = found.fail if needed else found.warn
    state = thunderbolt.read_switch(switch.text)
    if names:
        found.ok("rdma", f"{len(names)} devices: {', '.join(names)}")
    elif (numbers := version_numbers(system)) and numbers < SYSTEM_MIN:
        complain("rdma", f"macOS {system} has no RDMA", "update to macOS 26.2 or later")
    elif ports and max(port.speed_gbps for port in ports) < THUNDERBOLT_5_GBPS:
        # RDMA can be switched on without the hardware for it.
        complain(
            "rdma",
            "this Mac has Thunderbolt 4 or older, which has no RDMA",
            'use world.backend = "ring"; `rdma_ctl enable` would not help',
        )
    elif state == "disabled":
        complain("rdma", "RDMA is switched off", _ENABLE)
    elif state == "enabled":
        complain(
            "rdma",
            "RDMA is switched on, but there are no devices",
            "shut all Macs of the cluster down, start them with the cables in, and look with "
            "`ibv_devices`; if it stays empty, update macOS",
        )
    else:
        found.cannot_check(
            "rdma",
            f"`rdma_ctl status` does not show it: {switch.why if not switch.ok else switch.text!r}",
            "run `rdma_ctl status` and `ibv_devices` by hand",
        )
    return names


def check_links(
    found: Findings,
    ports: Sequence[ThunderboltPort],
    states: Mapping[str, str],
    interfaces: Mapping[str, Interface],
    *,
    needed: bool,
) -> None:
    """Check that each link to another computer has 80 Gb/s, an active RDMA port and an address.

    Args:
        found: collects the findings, one OK or all faults per link.
        ports: this Mac's Thunderbolt ports; those without another computer are skipped.
        states: RDMA device -> state of its port, from `ibv_devinfo`.
        interfaces: network interfaces by name, from `ifconfig`.
        needed: whether jaccl is configured, so that a fault is a FAIL and not a WARN.
    """
    complain = found.fail if needed else found.warn
    for port in ports:
        if not port.peer_uuid:
            continue
        place = f"Thunderbolt port {port.receptacle} ({port.interface or 'no interface'})"
        check = f"link {port.interface or port.receptacle}"
        faults: list[tuple[str, str]] = []
        if 0 < port.speed_gbps < THUNDERBOLT_5_GBPS:
            fault = f"{place} runs at {port.speed_gbps} Gb/s, not at {THUNDERBOLT_5_GBPS}"
            faults.append((fault, "use a Thunderbolt 5 cable, between Thunderbolt 5 ports"))
        state = states.get(f"rdma_{port.interface}")
        if state is not None and state != "PORT_ACTIVE":
            remedy = (
                "plug the cable again at both ends; if it stays so, take the port out of the "
                "Thunderbolt Bridge (System Settings > Network) and restart"
            )
            faults.append((f"{place} has a cable, but its RDMA port is {state}", remedy))
        interface = interfaces.get(port.interface)
        if interface is not None and not interface.addresses:
            fault = f"{place} has no IPv4 address, without which JACCL finds no GID (errno 22)"
            remedy = (
                f"`sudo ifconfig {port.interface} inet 169.254.10.1 netmask 255.255.0.0 alias`, "
                "with another last number on the other host"
            )
            faults.append((fault, remedy))
        for fault, remedy in faults:
            complain(check, fault, remedy)
        if not faults:
            found.ok(check, f"{place} reaches {port.peer_name or 'another computer'}")


def check_device_uses(found: Findings, uses: Mapping[tuple[str, str], DeviceUse]) -> None:
    """Check that each RDMA device has the queue pairs and memory regions that a world needs.

    Args:
        found: collects a FAIL per device with too few, else one OK finding.
        uses: (machine, device) -> what the world needs of it.
    """
    exceeded = [(key, use) for key, use in uses.items() if use.exceeded]
    for (machine, device), use in exceeded:
        found.fail(
            "rdma resources",
            f"{use.explain(f'{device} of {machine}')}, so MLX's init fails there",
            "run one rank per host, and connect each pair of hosts by a cable of its own",
        )
    if uses and not exceeded:
        most = max(uses.values(), key=lambda use: use.memory_regions)
        count = "1 device" if len(uses) == 1 else f"{len(uses)} devices"
        found.ok("rdma resources", f"{most.explain(f'each of {count}')}")


def check_bridge(
    found: Findings,
    interfaces: Mapping[str, Interface],
    thunderbolt: Sequence[str],
    *,
    needed: bool,
) -> None:
    """Check that no active bridge has a Thunderbolt interface as member, which RDMA cannot use.

    Args:
        found: collects one finding.
        interfaces: network interfaces by name, from `ifconfig`.
        thunderbolt: names of the Thunderbolt interfaces.
        needed: whether jaccl is configured, so that such a bridge is a FAIL and not a WARN.
    """
    bridges = [
        (one.name, member)
        for one in interfaces.values()
        if one.up
        for member in one.members
        if member in thunderbolt
    ]
    if not bridges:
        found.ok("thunderbolt bridge", "no bridge holds a Thunderbolt interface")
        return
    name = bridges[0][0]
    members = ", ".join(member for bridge, member in bridges if bridge == name)
    complain = found.fail if needed else found.warn
    complain(
        "thunderbolt bridge",
        f"{name} holds {members}: JACCL cannot use these (errno 22), and with a ring of cables "
        "packets may circulate forever",
        f"`sudo ifconfig {name} down`, and remove Thunderbolt Bridge in System Settings > Network "
        "so that it stays away",
    )
