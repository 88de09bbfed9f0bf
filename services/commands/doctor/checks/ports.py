"""Are the ports free that this host's processes will listen on, and if not, whose are they?"""

import dataclasses
import errno
import os
import socket
from collections.abc import Callable, Sequence

from services.commands.doctor.facts import Findings
from shared.configuration.host_share import HostShare
from shared.os.process_file import RoleProcess

Owners = Callable[[int], list[tuple[str, int]]]
"""Port -> (command, process id) of who listens on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listening:
    """One address of this host."""

    what: str
    setting: str
    host: str
    port: int


def listened_on(share: HostShare) -> list[Listening]:
    """Return where this host's processes listen with tcp, but for the ranks' data ports."""
    config, roles = share.config, share.roles
    found = []
    if roles.gateway:
        found.append(Listening("gateway", "gateway.port", config.gateway.host, config.gateway.port))
    bus = []
    if roles.scheduler:
        bus.append(("scheduler for gateways", "scheduler.gateway_address", config.gateway_address))
        bus.append(("scheduler for ranks", "scheduler.rank_address", config.rank_address))
    if roles.cache_store:
        bus.append(("cache store", "cache.store_address", config.store_address))
    for what, setting, address in bus:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if address.startswith("tcp://") and port.isdecimal():
            found.append(Listening(what, setting, host.strip("[]").replace("*", ""), int(port)))
    return found


def try_to_listen(host: str, port: int) -> int:
    """Return 0 if a socket can have this address now, else errno. Nothing stays open."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            # Linux lets a second socket bind with SO_REUSEADDR, but not listen.
            one.listen(1)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def check_ports(
    found: Findings,
    places: Sequence[Listening],
    owners: Owners,
    running: Sequence[RoleProcess],
    listen: Callable[[str, int], int] = try_to_listen,
) -> None:
    """Check each address.

    Args:
        found: takes the findings.
        places: from `listened_on`.
        owners: who holds a port.
        running: processes of this Lockstep.
        listen: tries an address.
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
                    f"the {place.what} cannot have it: {text or 'a process of another user'} "
                    "listens there",
                    f"end that process, or set {place.setting} to another port",
                )
        elif code == errno.EADDRNOTAVAIL:
            found.fail(
                check,
                f"{place.host} is no address of this host, so the {place.what} cannot listen there",
                f"bring its interface up, or correct {place.setting}",
            )
        else:
            found.fail(
                check,
                f"the {place.what} cannot listen there: {os.strerror(code)}",
                f"set {place.setting} to another port (below 1024 only root may listen)",
            )
