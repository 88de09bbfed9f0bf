"""Rules for link addresses. Owns which ones are safe from strangers, without and with keys."""

import ipaddress
import re

from shared import limits
from shared.configuration.host_addresses import is_loopback
from shared.errors import ConfigError

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_WILDCARDS = {"*", "0.0.0.0", "::"}  # noqa: S104 - compared with, not bound


def is_tcp(address: str) -> bool:
    """Tell whether an address is a tcp address. Only tcp links use keys, if the host has them."""
    return address.startswith("tcp://")


def check_address(address: str, *, has_keys: bool = False, is_dialled: bool = False) -> None:
    """Check that an address has a valid form, and that only this user or key holders reach it.

    Accepted are ipc sockets, tcp on loopback, and with keys tcp on any host.

    Args:
        address: ipc://path or tcp://host:port.
        has_keys: peers must prove an allowed key; then any host is accepted.
        is_dialled: the address is connected to, not bound.

    Raises:
        ConfigError: when it is malformed or unprotected; contains the remedy.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        if not rest or len(rest.encode()) > limits.IPC_PATH_BYTES_MAX:
            raise ConfigError(
                f"The socket path {rest!r} is empty or longer than {limits.IPC_PATH_BYTES_MAX} "
                "bytes: set paths.run_dir to a shorter one."
            )
    elif scheme == "tcp":
        _check_tcp(address, rest, has_keys=has_keys, is_dialled=is_dialled)
    else:
        raise ConfigError(f"The bus address {address} is neither ipc:// nor tcp://.")


def _check_tcp(address: str, rest: str, *, has_keys: bool, is_dialled: bool) -> None:
    host, _, port = rest.rpartition(":")
    is_port = port.isdecimal() and port.isascii() and 0 < int(port) < 65_536
    if not is_port and (is_dialled or port != "*"):
        raise ConfigError(f"The bus address {address} is not tcp://host:port.")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if host in _WILDCARDS and is_dialled:
        raise ConfigError(f"The bus address {address} names no host to connect to.")
    if host not in _WILDCARDS and not _is_host(host):
        # Also refuses ZeroMQ's own syntax: "127.0.0.1:1;10.0.0.1:2" binds to the first address.
        raise ConfigError(f"The bus address {address} is not tcp://host:port.")
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"The bus address {address} is not on loopback, and this host has no keys: make them "
            "with `lockstep keys new` on every host, exchange them with `lockstep keys allow`, "
            "or use ipc:// or tcp://127.0.0.1."
        )


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None
    return True
