"""Addresses of hosts as settings and files give them. Owns which ones others can reach. Pure."""

import ipaddress
import re

_HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
"""Names of hosts. One of digits and dots alone is meant as an IPv4 address."""


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_fault(host: str) -> str:
    """Return why this cannot be one host's address or name, as a clause; "" if it can.

    No name is looked up.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        is_name = _HOST_NAME.fullmatch(host) is not None
        return "" if is_name else "which is neither an address nor a name of a host"
    if address.is_unspecified or address.is_multicast or host == "255.255.255.255":
        return "which is not the address of a host"
    return ""
