"""Interfaces: `ifconfig` of macOS."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 addresses."""
    members: tuple[str, ...] = ()
    """Of a bridge: the interfaces in it."""
    active: bool = False
    up: bool = False


_HEAD = re.compile(r"^([A-Za-z][\w.]*): flags=\w+<([^>]*)>")


def read_interfaces(text: str) -> dict[str, Interface]:
    """Return the interfaces by name."""
    found: dict[str, Interface] = {}
    name = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            found[name] = Interface(name, up="UP" in head[2].split(","))
            continue
        words = line.split()
        if not name or len(words) < 2:
            continue
        one = found[name]
        if words[0] == "inet":
            found[name] = dataclasses.replace(one, addresses=(*one.addresses, words[1]))
        elif words[0] == "member:":
            found[name] = dataclasses.replace(one, members=(*one.members, words[1]))
        elif words[0] == "status:":
            found[name] = dataclasses.replace(one, active=words[1] == "active")
    return found
