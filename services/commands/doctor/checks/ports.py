"""Check that the ports of this host's processes are free or held by this Lockstep."""

import dataclasses
import errno
import os
import socket
from collections.abc import Callable, Sequence

from services.commands.doctor.facts import Findings
from shared.configuration.host_share import HostShare
from shared.os.process_file import RoleProcess

PortOwners = Callable[[int], list[tuple[str, int]]]
"""Returns (command, process id) of each process that listens on a port."""


@dataclasses.dataclass(frozen=True, slots=True)
class ListenAddress:
    """TCP address on which a process of this host listens, as configured."""

    what: str
    """The process, in words for a finding."""
    setting: str
    """Setting that gives the address."""
    host: str
    """Name or IP address; "" for all interfaces."""
    port: int


def listen_addresses(share: HostShare) -> list[ListenAddress]:
    """Return the configured TCP addresses of gateway, scheduler and cache store of this host.

    Roles that do not run here, and the ranks' data ports, are left out.
    """
    config, roles = share.config, share.roles
    found = []
    if roles.gateway:
        found.append(
            ListenAddress("gateway", "gateway.port", config.gateway.host, config.gateway.port)
        )
    bus = []
    if roles.scheduler:
        bus.append(("scheduler for gateways", "scheduler.gateway_address", config.gateway_address))
        bus.append(("scheduler for ranks", "scheduler.rank_address", config.rank_address))
    if roles.cache_store:
        bus.append(("cache store", "cache.store_address", config.store_address))
    for what, setting, address in bus:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if address.startswith("tcp://") and port.isdecimal():
            found.append(ListenAddress(what, setting, host.strip("[]").replace("*", ""), int(port)))
    return found


def try_to_listen(host: str, port: int) -> int:
    """Listen at a TCP address for a moment.

    Args:
        host: name or IP address; "" for all interfaces.
        port: the port.

    Returns:
        0 if it was possible, else the errno.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            # With SO_REUSEADDR Linux lets a second socket bind, but not listen.
            one.listen(1)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def check_ports(
    found: Findings,
    places: Sequence[ListenAddress],
    owners: PortOwners,
    running: Sequence[RoleProcess],
    listen: Callable[[str, int], int] = try_to_listen,
) -> None:
    """Check that each address is free, or that a process of this Lockstep listens there.

    A port that another process holds, and an address at which nothing can listen, are a FAIL.

    Args:
        found: collects one finding per address.
        places: from `listen_addresses`.
        owners: returns the processes that listen on a port.
        running: processes of this Lockstep.
        listen: tries to listen at an address, as `try_to_listen` does.
    """
    ours = {holder.pid for holder in running}
    for place in places:
        check = f"port {place.port}"
        code = listen(place.host, place.port)
        if code == 0:
            found.ok(check, f"free for the {place.what}")
        elif code == errno.EADDRINUSE:
            holders = owners(place.port)
            text = ", ".join(f"{name} (process {pid})" for name, pid in holders)
            if any(pid in ours for _, pid in holders):
                found.ok(check, f"held by this Lockstep: {text}")
            else:
                found.fail(
                    check,
                    f"the {place.what} cannot listen there: {text or 'a process of another user'} "
                    "holds the port",
                    f"end that process, or set {place.setting} to another port",
                )
        elif code == errno.EADDRNOTAVAIL:
            found.fail(
                check,
                f"{place.host} is not an address of this host, so the {place.what} cannot listen "
                "there",
                f"bring its interface up, or correct {place.setting}",
            )
        else:
            found.fail(
                check,
                f"the {place.what} cannot listen there: {os.strerror(code)}",
                f"set {place.setting} to another port (below 1024 only root may listen)",
            )
